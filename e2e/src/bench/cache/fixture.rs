//! Realistic pods. One is created through the API, with everything that admission and the kubelet add. The others are
//! copies with their own names, UIDs, labels, owners, claims and nodes, written directly into etcd.

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::etcd::Etcd;

const NODES: u32 = 1_000;
const PODS_PER_OWNER: u32 = 10;
const OWNERS_PER_NAMESPACE: u32 = 50;
/// One owner in this many is a StatefulSet, whose pods share neither labels nor claims.
const STATEFUL_ONE_IN: u32 = 5;
const PODS_AT_ONCE: u32 = 100;
const IN_FLIGHT: usize = 4;

pub(super) struct Fixture {
    etcd: Etcd,
    template: Value,
}

impl Fixture {
    /// Creates the pod that the others are copied from.
    pub(super) async fn create(cluster: &Cluster) -> Result<Self> {
        let pods: Api<Pod> = Api::default_namespaced(cluster.client().await?);
        let pod = serde_json::from_value(pod()).context("the pod of the fixture")?;
        let manager = |name: &str| Some(name.to_owned());
        let post = PostParams { field_manager: manager("kube-controller-manager"), ..PostParams::default() };
        pods.create(&post, &pod).await.context("creating the pod of the fixture")?;
        let patch = PatchParams { field_manager: manager("kubelet"), ..PatchParams::default() };
        let made = pods
            .patch_status("template", &patch, &Patch::Strategic(json!({"status": status()})))
            .await
            .context("patching the status of the pod of the fixture")?;
        pods.delete("template", &kube::api::DeleteParams::default().grace_period(0)).await?;
        let mut template = serde_json::to_value(made).context("writing the pod of the fixture")?;
        if let Some(metadata) = template.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("resourceVersion");
        }
        Ok(Self { etcd: cluster.etcd()?, template })
    }

    /// Writes the pods with these numbers.
    pub(super) async fn fill(&self, numbers: std::ops::Range<u32>) -> Result<()> {
        let end = numbers.end;
        let batches = numbers.step_by(PODS_AT_ONCE as usize).map(|first| {
            let batch = (first..end.min(first + PODS_AT_ONCE)).map(|number| self.copy(number)).collect();
            self.etcd.put(batch)
        });
        stream::iter(batches).buffer_unordered(IN_FLIGHT).try_collect().await
    }

    fn copy(&self, number: u32) -> (String, Vec<u8>) {
        let owner = number / PODS_PER_OWNER;
        let namespace = format!("team-{}", owner / OWNERS_PER_NAMESPACE);
        let stateful = owner.is_multiple_of(STATEFUL_ONE_IN);
        let app = format!("service-{owner}");
        let hash = format!("{:010x}", u64::from(owner) * 1_000_003);
        let (kind, owner_name, name) = if stateful {
            ("StatefulSet", app.clone(), format!("{app}-{}", number % PODS_PER_OWNER))
        } else {
            let set = format!("{app}-{hash}");
            ("ReplicaSet", set.clone(), format!("{set}-{:05x}", number.wrapping_mul(2_654_435_761) >> 12))
        };
        let mut pod = self.template.clone();
        let mut set = |pointer: &str, value: Value| {
            if let Some(place) = pod.pointer_mut(pointer) {
                *place = value;
            }
        };
        set("/metadata/name", json!(name));
        set("/metadata/generateName", json!(format!("{owner_name}-")));
        set("/metadata/namespace", json!(namespace));
        set("/metadata/uid", json!(uid(1, number)));
        set("/metadata/labels/app", json!(app));
        set("/metadata/labels/app.kubernetes.io~1instance", json!(app));
        set("/metadata/ownerReferences/0/kind", json!(kind));
        set("/metadata/ownerReferences/0/name", json!(owner_name));
        set("/metadata/ownerReferences/0/uid", json!(uid(2, owner)));
        set("/spec/nodeName", json!(format!("node-{}.example.internal", number % NODES)));
        if stateful {
            set(
                "/spec/volumes/0",
                json!({"name": "data", "persistentVolumeClaim": {"claimName": format!("data-{name}")}}),
            );
            // Replaces the hash, so that there are five labels.
            set("/metadata/labels", relabelled(&self.template, &app, &name));
        } else {
            set("/metadata/labels/pod-template-hash", json!(hash));
        }
        (Etcd::pod_key(&namespace, &name), pod.to_string().into_bytes())
    }
}

fn relabelled(template: &Value, app: &str, pod: &str) -> Value {
    let mut labels = template.pointer("/metadata/labels").cloned().unwrap_or_default();
    if let Some(labels) = labels.as_object_mut() {
        labels.remove("pod-template-hash");
        labels.insert("app".to_owned(), json!(app));
        labels.insert("app.kubernetes.io/instance".to_owned(), json!(app));
        labels.insert("statefulset.kubernetes.io/pod-name".to_owned(), json!(pod));
    }
    labels
}

fn uid(of: u32, number: u32) -> String {
    let mixed = u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{:08x}-{:04x}-4{:03x}-8{of:03x}-{number:012x}", mixed >> 32, mixed >> 16 & 0xffff, mixed & 0xfff)
}

/// Five labels, an owner, a volume (admission adds the token volume), and two containers with probes and environment
/// variables. Admission adds the two usual tolerations.
fn pod() -> Value {
    let environment = json!([
        {"name": "BACKEND", "value": "https://backend.example.internal:8443/api"},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "credentials", "key": "password"}}},
    ]);
    let probe = |path: &str| json!({"httpGet": {"path": path, "port": 8080}});
    let container = |name: &str| {
        json!({
            "name": name,
            "image": format!("registry.example.com/team/{name}:v1.27.3"),
            "env": environment,
            "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
            "livenessProbe": probe("/livez"),
            "readinessProbe": probe("/readyz"),
            "volumeMounts": [{"name": "config", "mountPath": "/etc/config", "readOnly": true}],
        })
    };
    json!({
        "metadata": {
            "name": "template",
            "generateName": "template-",
            "labels": {
                "app": "service",
                "app.kubernetes.io/instance": "service",
                "app.kubernetes.io/part-of": "shop",
                "app.kubernetes.io/version": "v1.27.3",
                "pod-template-hash": "0000000000",
            },
            "annotations": {
                "kubectl.kubernetes.io/restartedAt": "2026-11-01T09:12:44Z",
                "prometheus.io/scrape": "true",
            },
            "ownerReferences": [{
                "apiVersion": "apps/v1",
                "kind": "ReplicaSet",
                "name": "service",
                "uid": uid(2, 0),
                "controller": true,
                "blockOwnerDeletion": true,
            }],
        },
        "spec": {
            "nodeName": "node",
            "containers": [container("server"), container("sidecar")],
            "volumes": [{"name": "config", "configMap": {"name": "settings"}}],
        },
    })
}

/// The status that a kubelet reports for a running pod.
fn status() -> Value {
    let since = "2026-11-01T09:12:50Z";
    let conditions: Vec<_> =
        ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"]
            .iter()
            .map(|kind| json!({"type": kind, "status": "True", "lastTransitionTime": since}))
            .collect();
    let container = |name: &str| {
        json!({
            "name": name,
            "ready": true,
            "started": true,
            "restartCount": 0,
            "image": format!("registry.example.com/team/{name}:v1.27.3"),
            "imageID": format!("registry.example.com/team/{name}@sha256:{:064x}", 7),
            "containerID": format!("containerd://{:064x}", 9),
            "state": {"running": {"startedAt": since}},
        })
    };
    json!({
        "phase": "Running",
        "conditions": conditions,
        "containerStatuses": [container("server"), container("sidecar")],
        "hostIP": "10.0.0.7",
        "podIP": "10.128.3.4",
        "podIPs": [{"ip": "10.128.3.4"}],
        "qosClass": "Burstable",
        "startTime": since,
    })
}
