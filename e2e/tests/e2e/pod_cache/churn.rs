//! Many random changes of pods at the same time: create, bind, label, run, finish and delete, in any order, through
//! an API server that may be down for a while.

use std::sync::Arc;
use std::time::Duration;

use haulout_e2e::{Handle, objects};
use k8s_openapi::api::core::v1::{EphemeralVolumeSource, Pod, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::{Client, Error};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Each worker has its own pods, so that their changes are in order.
const WORKERS: usize = 32;
const PODS_EACH: usize = 20;

pub struct Churn {
    done: Arc<watch::Sender<usize>>,
    workers: JoinSet<()>,
}

impl Churn {
    /// Starts workers that make this many changes in total.
    pub async fn start(cluster: &Handle, changes: usize) -> Self {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let done = Arc::new(watch::Sender::new(0));
        let client = cluster.client().await.unwrap();
        let mut workers = JoinSet::new();
        for number in 0..WORKERS {
            let worker = Worker { number, client: client.clone(), random: random.fork() };
            workers.spawn(worker.run(changes.div_ceil(WORKERS), Arc::clone(&done)));
        }
        Self { done, workers }
    }

    /// Waits until this many changes are made.
    pub async fn until(&mut self, changes: usize) {
        let mut done = self.done.subscribe();
        loop {
            tokio::select! {
                reached = done.wait_for(|done| *done >= changes) => {
                    reached.unwrap();
                    return;
                }
                Some(ended) = self.workers.join_next() => ended.unwrap(),
            }
        }
    }

    /// Waits until all changes have been made.
    pub async fn finish(self) {
        self.workers.join_all().await;
    }
}

struct Worker {
    number: usize,
    client: Client,
    random: fastrand::Rng,
}

/// The expected state of a pod. It may be wrong after a request whose answer was lost.
#[derive(Clone, Copy, PartialEq)]
enum Believed {
    Absent,
    Unbound,
    Bound,
    Terminating,
}

impl Worker {
    async fn run(mut self, changes: usize, done: Arc<watch::Sender<usize>>) {
        let mut pods = [Believed::Absent; PODS_EACH];
        for _ in 0..changes {
            let slot = self.random.usize(..PODS_EACH);
            let api: Api<Pod> = Api::namespaced(self.client.clone(), home(slot));
            let name = format!("pod-{}-{slot}", self.number);
            pods[slot] = loop {
                match self.change(&api, &name, pods[slot]).await {
                    Ok(believed) => break believed,
                    // The change has been made before, by a request of this worker whose answer was lost.
                    Err(Error::Api(status)) if status.code == 404 => break Believed::Absent,
                    Err(Error::Api(status)) if status.code == 409 => break Believed::Bound,
                    Err(Error::Api(status)) if status.code < 500 && status.code != 429 => {
                        panic!("{name}: {status}")
                    }
                    // The API server is down.
                    Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
                }
            };
            done.send_modify(|done| *done += 1);
        }
    }

    async fn change(&mut self, api: &Api<Pod>, name: &str, believed: Believed) -> Result<Believed, Error> {
        let (post, patch) = (PostParams::default(), PatchParams::default());
        match (believed, self.random.u8(..10)) {
            (Believed::Absent, _) => {
                let pod = self.pod(api.namespace().unwrap_or_default(), name);
                let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
                api.create(&post, &pod).await?;
                Ok(if bound { Believed::Bound } else { Believed::Unbound })
            }
            (_, 0..2) => {
                let now = self.random.bool() || believed == Believed::Terminating;
                let params =
                    if now { DeleteParams::default().grace_period(0) } else { DeleteParams::default() };
                api.delete(name, &params).await?;
                let gone = now || believed == Believed::Unbound;
                Ok(if gone { Believed::Absent } else { Believed::Terminating })
            }
            (Believed::Unbound, 2..4) => {
                let target = json!({"apiVersion": "v1", "kind": "Node", "name": self.node()});
                let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target});
                let _: kube::core::Status = api.create_subresource("binding", name, &post, &binding).await?;
                Ok(Believed::Bound)
            }
            (_, 2..6) => {
                let metadata = self.metadata();
                api.patch(name, &patch, &Patch::Merge(json!({"metadata": metadata}))).await?;
                Ok(believed)
            }
            _ => {
                let status = self.status();
                api.patch_status(name, &patch, &Patch::Merge(json!({"status": status}))).await?;
                Ok(believed)
            }
        }
    }

    fn node(&mut self) -> String {
        format!("node-{}", self.random.u8(..25))
    }

    fn pod(&mut self, namespace: &str, name: &str) -> Pod {
        let mut pod =
            objects::pod(name).namespace(namespace).label("app", &format!("app-{}", self.random.u8(..10)));
        if self.random.bool() {
            pod = pod.node(&self.node());
        }
        if self.random.bool() {
            pod = pod.tolerates("example.com/broken", "NoExecute", Some(self.random.i64(..600)));
        }
        if self.random.bool() {
            let kind = *self.random.choice(&["ReplicaSet", "DaemonSet", "StatefulSet"]).unwrap();
            pod = pod.owner(OwnerReference {
                api_version: "apps/v1".to_owned(),
                kind: kind.to_owned(),
                name: format!("owner-{}", self.random.u8(..10)),
                uid: "any text will do".to_owned(),
                controller: Some(self.random.u8(..4) != 0),
                block_owner_deletion: None,
            });
        }
        if self.random.bool() {
            let template = json!({"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
            let ephemeral = EphemeralVolumeSource {
                volume_claim_template: Some(serde_json::from_value(template).unwrap()),
            };
            pod = pod.claim("data").empty_dir("scratch").volume(Volume {
                name: "own".to_owned(),
                ephemeral: Some(ephemeral),
                ..Volume::default()
            });
        }
        if self.random.bool() {
            pod = pod.grace(self.random.i64(1..100));
        }
        pod.build()
    }

    fn metadata(&mut self) -> Value {
        let evacuator =
            format!("evacuation.coordination.k8s.io/priority_e{}.example.com", self.random.u8(..3));
        let number = self.random.u32(..100);
        match self.random.u8(..4) {
            0 => json!({"labels": {"extra": format!("v{}", number % 10)}}),
            1 => json!({"labels": {"extra": null, "app": format!("app-{number}")}}),
            2 => json!({"annotations": {evacuator: number.to_string(), "example.com/note": "not for us"}}),
            _ => json!({"annotations": {evacuator: null}}),
        }
    }

    fn status(&mut self) -> Value {
        let phase = *self.random.choice(&["Pending", "Running", "Succeeded", "Failed"]).unwrap();
        let mut condition = |kind: &str| {
            let status = if self.random.bool() { "True" } else { "False" };
            let second = self.random.u8(..60);
            json!({"type": kind, "status": status, "lastTransitionTime": format!("2026-11-03T10:00:{second:02}Z")})
        };
        json!({"phase": phase, "conditions": [condition("Ready"), condition("PodScheduled")]})
    }
}

/// The namespace of a pod, which does not change when it is recreated.
fn home(slot: usize) -> &'static str {
    match slot % 3 {
        0 => "default",
        1 => "shop",
        _ => "batch",
    }
}
