//! The chart: what it installs, upgrades, rejects and leaves behind.

pub(crate) mod render;

use std::path::{Path, PathBuf};

use haulout_e2e::service::NAMESPACE;
use haulout_e2e::{Cluster, Handle, objects};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::flowcontrol::v1::FlowSchema;
use k8s_openapi::api::rbac::v1::{ClusterRole, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use crate::support::shared;

pub(crate) fn chart() -> PathBuf {
    haulout_e2e::repository().join("charts/haulout")
}

pub(crate) async fn helm(cluster: &Handle, args: &[&str]) -> String {
    cluster.helm(args).await.unwrap().success().unwrap()
}

/// The chart as an earlier version: with one printer column fewer.
fn earlier_chart(folder: &Path) -> PathBuf {
    let copy = folder.join("haulout");
    let status = std::process::Command::new("cp").arg("-r").arg(chart()).arg(&copy).status().unwrap();
    assert!(status.success());
    let file = copy.join("files/crds/nodemaintenance.k8s.io_drainrules.yaml");
    let mut crd: CustomResourceDefinition =
        serde_yaml::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    crd.spec.versions[0].additional_printer_columns.as_mut().unwrap().retain(|column| column.name != "Order");
    std::fs::write(file, serde_yaml::to_string(&crd).unwrap()).unwrap();
    copy
}

#[tokio::test]
async fn definitions_are_installed_upgraded_and_kept() {
    let cluster = Cluster::builder().name("chart").scheduler(false).kwok(false).boot().await.unwrap();
    let client = cluster.client().await.unwrap();
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let columns = async || {
        let crd = crds.get("drainrules.nodemaintenance.k8s.io").await.unwrap();
        let columns = crd.spec.versions[0].additional_printer_columns.clone().unwrap();
        columns.into_iter().map(|column| column.name).collect::<Vec<_>>()
    };
    let folder = tempfile::tempdir().unwrap();
    let earlier = earlier_chart(folder.path()).display().to_string();
    // No webhook runs here. If it were registered, nobody could write our kinds.
    let no_webhook = ["--set", "admissionWebhook.enabled=false,cleanup.enabled=false"];
    let install = ["install", "haulout", &earlier, "-n", "haulout-system", "--create-namespace"];
    helm(&cluster, &[install.as_slice(), &no_webhook].concat()).await;
    assert_eq!(columns().await, ["Behavior", "Age"]);

    let rule = json!({"apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule",
        "metadata": {"name": "mine"}, "spec": {"drain": {"behavior": "Skip"}}});
    cluster.kubectl_with(&["create", "-f", "-"], &rule.to_string()).await.unwrap().success().unwrap();
    cluster.install_chart(&[]).await.unwrap();
    assert_eq!(columns().await, ["Behavior", "Order", "Age"], "the upgrade adds the new column");

    // More releases in the same cluster, with the same and similar names, do not change the first one.
    let ours = chart().display().to_string();
    let roles: Api<ClusterRole> = Api::all(client.clone());
    let others = [
        ("haulout", "elsewhere", "elsewhere.haulout-view"),
        ("x", "elsewhere", "elsewhere.x-haulout-view"),
        ("x-haulout", "elsewhere", "elsewhere.x-haulout-haulout-view"),
    ];
    for (release, namespace, role) in others {
        let set = ["--create-namespace", "--set", "crds.install=false"];
        let install = ["install", release, &ours, "-n", namespace];
        helm(&cluster, &[install.as_slice(), &set, &no_webhook].concat()).await;
        roles.get(role).await.unwrap();
    }
    for (release, namespace, role) in others {
        helm(&cluster, &["uninstall", release, "-n", namespace]).await;
        assert!(roles.get_opt(role).await.unwrap().is_none());
    }
    let first = "haulout-system.haulout-view";
    roles.get(first).await.unwrap();

    helm(&cluster, &["uninstall", "haulout", "-n", "haulout-system", "--wait"]).await;
    assert!(roles.get_opt(first).await.unwrap().is_none());
    cluster
        .kubectl(&["get", "drainrule", "mine"])
        .await
        .unwrap()
        .success()
        .expect("the object is kept with its CRD");

    cluster
        .install_chart(&[("crds.keep", "false")])
        .await
        .expect("a second installation adopts the kept CRDs");
    cluster.kubectl(&["get", "drainrule", "mine"]).await.unwrap().success().unwrap();
    helm(&cluster, &["uninstall", "haulout", "-n", "haulout-system", "--wait"]).await;
    for crd in haulout_api_types::crds() {
        let name = crd.metadata.name.unwrap();
        haulout_e2e::wait::gone(crds.clone(), &name, std::time::Duration::from_secs(60)).await.unwrap();
    }
    cluster.shutdown().await;
}

#[tokio::test]
async fn chart_passes_lint_and_renders_deterministically() {
    let cluster = shared().await;
    let chart = chart().display().to_string();
    helm(&cluster, &["lint", "--strict", &chart]).await;
    let render = async || helm(&cluster, &["template", "haulout", &chart, "--namespace", "x"]).await;
    assert_eq!(render().await, render().await);
}

#[tokio::test]
async fn webhook_is_rendered_for_each_certificate_source() {
    let cluster = shared().await;
    let chart = chart().display().to_string();
    let render = async |values: &str| {
        let args = ["template", "mine", &chart, "--namespace", "x", "--set", values];
        let text = helm(&cluster, &args).await;
        // The certificate manager is the second one.
        ["admission-webhook", "certificate-manager"].map(|service| {
            let documents = text
                .split("\n---\n")
                .filter(|document| document.contains(&format!("# Source: haulout/templates/{service}.yaml")));
            documents.collect::<Vec<_>>().join("\n---\n")
        })
    };
    let [own, manager] = render("admissionWebhook.url=https://192.0.2.1:8443/").await;
    for (part, text) in [
        ("url: https://192.0.2.1:8443/validate/pods", &own),
        ("--certificate-secret=mine-haulout-webhook-certificate", &own),
        ("resourceNames: [mine-haulout-webhook-certificate]", &own),
        ("'system:serviceaccount:x:mine-haulout-evacuation-controller'", &own),
        ("--certificate-secret=mine-haulout-webhook-certificate", &manager),
        ("--serving-name=192.0.2.1", &manager),
        ("--serving-name=mine-haulout-admission-webhook.x.svc", &manager),
        ("--validating-configuration=x.mine-haulout-admission-webhook", &manager),
        ("kind: Secret\nmetadata:\n  name: mine-haulout-webhook-certificate", &manager),
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    for text in [&own, &manager] {
        assert!(!text.contains("haulout-system"), "the name of another release is in\n{text}");
    }
    let [theirs, manager] = render(
        "admissionWebhook.certificate.existingSecret=theirs,admissionWebhook.clients.configMap=api,\
         admissionWebhook.clients.names={kube-apiserver}",
    )
    .await;
    for part in ["--cert-dir=/certificate", "secretName: theirs", "--client-name=kube-apiserver"] {
        assert!(theirs.contains(part), "{part} is not in\n{theirs}");
    }
    assert!(!theirs.contains("resources: [secrets]"), "no permission on Secrets is needed\n{theirs}");
    assert_eq!(manager, "", "it has nothing to do");
    let existing = "admissionWebhook.certificate.existingSecret=theirs";
    let [_, manager] = render(&format!("{existing},admissionWebhook.certificate.manageCaBundle=true")).await;
    for part in ["--certificate-secret=theirs", "--ca-bundle-only"] {
        assert!(manager.contains(part), "{part} is not in\n{manager}");
    }
    for part in ["kind: Secret", "- update", "--serving-name"] {
        assert!(!manager.contains(part), "{part} is in\n{manager}");
    }
}

#[tokio::test]
async fn kube_system_namespace_is_rejected() {
    let cluster = shared().await;
    let chart = chart().display().to_string();
    let output = cluster.helm(&["template", "haulout", &chart, "-n", "kube-system"]).await.unwrap();
    assert!(!output.status.success());
    let (reason, fix) = ("could act as Haulout's services", "--namespace haulout-system --create-namespace");
    assert!(output.stderr.contains(reason) && output.stderr.contains(fix), "{}", output.stderr);
}

#[tokio::test]
async fn unknown_values_are_rejected_by_name() {
    let cluster = shared().await;
    let chart = chart().display().to_string();
    for (set, word) in [
        ("crd.install=false", "'crd' not allowed"),
        ("crds.kept=true", "'kept' not allowed"),
        ("crds.keep=perhaps", "crds/keep"),
        ("crds.keep=null", "missing property 'keep'"),
        ("fullnameOverride=Foo_Bar", "fullnameOverride"),
        ("admissionWebhook.url=http://example.com", "url"),
        ("admissionWebhook.certificate.secret=x", "'secret' not allowed"),
        (
            "admissionWebhook.certificate.existingSecret=x,admissionWebhook.certificate.certManager.issuerRef.name=y",
            "set either existingSecret or certManager.issuerRef",
        ),
        ("flowControl.matchingPrecedence=1", "flowControl/matchingPrecedence"),
        ("cleanup.enable=false", "'enable' not allowed"),
        ("networkPolicy.from=x", "'from' not allowed"),
        ("podMonitor.interval=often", "podMonitor/interval"),
        ("image.tag=1@sha256:0", "image/tag"),
        ("image.registry=registry.example.com/", "image/registry"),
        ("taintManager.digest=sha256:0", "taintManager/digest"),
        ("admissionWebhook.url=https://192.0.2.1?x", "admissionWebhook/url"),
        ("admissionWebhook.certificate.certManager.issuerRef.kind=ClusterIssuer", "missing property 'name'"),
        ("admissionWebhook.clients.names={kube-apiserver}", "requires clients.configMap"),
        ("enabled=false", "'/enabled': value must be true"),
        ("podMonitor.enabled=true,serviceMonitor.enabled=true", "enable only one"),
        ("taintManager.policy.rules[0].key=x", "missing property 'action'"),
        ("maintenanceController.podTypes={Mirror}", "podTypes/0"),
    ] {
        let output = cluster.helm(&["template", "haulout", &chart, "--set", set]).await.unwrap();
        assert!(!output.status.success(), "{set} was taken");
        assert!(output.stderr.contains(word), "{set}: {}", output.stderr);
    }
}

/// Sends a request as the service account of a service. Returns the FlowSchema of the request, by UID.
async fn flow_schema_of(cluster: &Handle, account: &str, path: &str) -> String {
    let account = cluster.service_account_kubeconfig(NAMESPACE, account).await.unwrap();
    let client = cluster.client_from(&account, "flow-control").await.unwrap();
    let request = http::Request::get(path).body(kube::client::Body::empty()).unwrap();
    let response = client.send(request).await.unwrap();
    let header = response.headers().get("x-kubernetes-pf-flowschema-uid").expect("flow control is on");
    header.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn flow_control_gives_services_their_own_level() {
    let cluster = Cluster::builder().name("flow-control").scheduler(false).kwok(false).boot().await.unwrap();
    cluster
        .install_chart(&[
            ("flowControl.enabled", "true"),
            ("taintManager.enabled", "true"),
            ("admissionWebhook.enabled", "true"),
        ])
        .await
        .unwrap();
    let schemas: Api<FlowSchema> = Api::all(cluster.client().await.unwrap());
    let (all, leases) = ("haulout-system.haulout", "haulout-system.haulout-leases");
    let mut uids = Vec::new();
    for name in [all, leases] {
        let is_used = |schema: &FlowSchema| {
            let conditions = schema.status.iter().flat_map(|status| status.conditions.iter().flatten());
            conditions
                .into_iter()
                .any(|c| c.type_.as_deref() == Some("Dangling") && c.status.as_deref() == Some("False"))
        };
        let soon = std::time::Duration::from_secs(60);
        let schema = haulout_e2e::wait::present(schemas.clone(), name, "has a level", soon, is_used).await;
        uids.push(schema.unwrap().metadata.uid.unwrap());
    }
    let lease =
        format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/haulout-evacuation-controller");
    let services = [
        "admission-webhook",
        "certificate-manager",
        "evacuation-controller",
        "maintenance-controller",
        "taint-manager",
        "workload-evacuator",
    ];
    for service in services {
        let account = format!("haulout-{service}");
        // The API server applies new FlowSchemas a little after it has reported that they are used.
        haulout_e2e::wait::eventually(
            &format!("requests of {service} have their own level"),
            std::time::Duration::from_secs(30),
            async || {
                let found = [
                    flow_schema_of(&cluster, &account, "/api/v1/pods").await,
                    flow_schema_of(&cluster, &account, "/api/v1/nodes").await,
                    flow_schema_of(&cluster, &account, &lease).await,
                ];
                Ok((found == [&*uids[0], &*uids[0], &*uids[1]]).then_some(()))
            },
        )
        .await
        .unwrap();
    }
    let other = flow_schema_of(&cluster, "default", "/api/v1/pods").await;
    assert!(!uids.contains(&other), "other service accounts are not affected");
    cluster.shutdown().await;
}

#[tokio::test]
async fn view_role_reads_and_does_not_write_evacuations() {
    let cluster = shared().await;
    let client = cluster.client().await.unwrap();
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.create(&PostParams::default(), &objects::namespace("chart-view")).await.unwrap();
    let binding: RoleBinding = serde_json::from_value(json!({
        "metadata": {"name": "vera"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "vera"}]
    }))
    .unwrap();
    Api::namespaced(client, "chart-view").create(&PostParams::default(), &binding).await.unwrap();
    let config = cluster.user_kubeconfig("vera", &[]).unwrap().display().to_string();
    let may = async |verb: &str, what: &str| {
        let ask = ["--kubeconfig", &config, "auth", "can-i", verb, what, "-n", "chart-view"];
        cluster.kubectl(&ask).await.unwrap().stdout.trim() == "yes"
    };
    // kube-controller-manager aggregates the roles a little after the installation.
    let evacuations = "evacuations.evacuation.coordination.k8s.io";
    haulout_e2e::wait::eventually(
        "vera may list evacuations",
        std::time::Duration::from_secs(30),
        async || Ok(may("list", evacuations).await.then_some(())),
    )
    .await
    .unwrap();
    assert!(!may("create", evacuations).await);
    assert!(!may("delete", evacuations).await);
    cluster.kubectl(&["delete", "namespace", "chart-view", "--wait=false"]).await.unwrap().success().unwrap();
}
