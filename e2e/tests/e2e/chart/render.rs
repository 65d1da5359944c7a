//! What the chart renders: the same with Helm 3 and 4, equal to the snapshots, and accepted by the API server.

use std::collections::BTreeSet;

use serde_json::Value;

use super::*;

/// The values files that users choose between. The default values are in no file.
const VALUES: [&str; 4] = ["default", "minimal", "ha", "cert-manager"];

fn render_args(values: &str) -> Vec<String> {
    let chart = chart().display().to_string();
    let mut args: Vec<String> =
        ["template", "haulout", &chart, "--namespace", NAMESPACE].map(Into::into).to_vec();
    if values != "default" {
        let file = haulout_e2e::repository().join(format!("e2e/tests/e2e/chart/values/{values}.yaml"));
        args.extend(["--values".into(), file.display().to_string()]);
    }
    args
}

/// Renders with the pinned helm of the test cluster, or with this other one.
async fn render(cluster: &Handle, other: Option<&Path>, values: &str) -> String {
    let args = render_args(values);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let helm = cluster.tools.helm();
    let output = cluster.run(other.unwrap_or(&helm), &args, None).await.unwrap();
    output.success().unwrap()
}

/// The documents of a YAML text, without CRDs, which are generated and reviewed elsewhere.
pub(crate) fn documents(yaml: &str) -> Vec<Value> {
    let documents = serde_yaml::Deserializer::from_str(yaml);
    let documents = documents.map(|one| serde::Deserialize::deserialize(one).unwrap());
    documents.filter(|one: &Value| !one.is_null() && one["kind"] != "CustomResourceDefinition").collect()
}

fn helm_4() -> PathBuf {
    haulout_e2e::tools::ensure_more(|_| ()).unwrap().path("helm")
}

#[tokio::test]
async fn rendered_chart_matches_snapshots_with_helm_3_and_4() {
    let (cluster, helm_4) = (shared().await, helm_4());
    for values in VALUES {
        let text = render(&cluster, None, values).await;
        // In any order: Helm 3 and 4 sort foreign kinds differently.
        let objects = |text: &str| documents(text).iter().map(Value::to_string).collect::<BTreeSet<_>>();
        let four = objects(&render(&cluster, Some(&helm_4), values).await);
        assert_eq!(objects(&text), four, "Helm 3 and 4 differ with {values} values");
        let text: Vec<_> = text
            .split("\n---\n")
            .filter(|document| !document.contains("\nkind: CustomResourceDefinition\n"))
            .collect();
        insta::assert_snapshot!(values, text.join("\n---\n"));
    }
}

/// CRDs of foreign kinds that are only rendered on demand, so that a dry run finds them.
fn definitions_of_others() -> String {
    let definition = |group: &str, kind: &str, plural: &str| {
        json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{group}")},
            "spec": {
                "group": group, "scope": "Namespaced",
                "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase()},
                "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema":
                    {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}],
            },
        })
    };
    let items = [
        definition("cert-manager.io", "Certificate", "certificates"),
        definition("monitoring.coreos.com", "PodMonitor", "podmonitors"),
        definition("monitoring.coreos.com", "ServiceMonitor", "servicemonitors"),
    ];
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

#[tokio::test]
async fn api_server_accepts_everything_rendered() {
    let cluster = shared().await;
    let kubectl = async |args: &[&str], text: &str| cluster.kubectl_with(args, text).await.unwrap();
    kubectl(&["apply", "-f", "-"], &definitions_of_others()).await.success().unwrap();
    let established = ["wait", "--for=condition=Established", "--timeout=60s"];
    let crds = [
        "crd/certificates.cert-manager.io",
        "crd/podmonitors.monitoring.coreos.com",
        "crd/servicemonitors.monitoring.coreos.com",
    ];
    cluster.kubectl(&[established.as_slice(), &crds].concat()).await.unwrap().success().unwrap();
    // Even in a dry run, a pod is only accepted if its ServiceAccount exists.
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "haulout-check", "namespace": NAMESPACE}});
    kubectl(&["apply", "-f", "-"], &account.to_string()).await.success().unwrap();
    for values in VALUES {
        let text = render(&cluster, None, values).await;
        // The chart is installed here, so the dry run also covers the update.
        let dry = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict"];
        let output = kubectl(&[dry.as_slice(), &["-o", "name", "-f", "-"]].concat(), &text).await;
        assert!(output.status.success(), "{values}: {}", output.stderr);
        let taken = output.stdout.lines().count();
        assert_eq!(taken, documents(&text).len() + 3, "{values}: all documents and three CRDs");
    }
    kubectl(&["delete", "-f", "-"], &account.to_string()).await.success().unwrap();
}

#[tokio::test]
async fn helm_4_installs_upgrades_and_uninstalls() {
    // Its policies would apply to the whole shared cluster.
    let cluster = Cluster::builder().name("helm-4").boot().await.unwrap();
    let (helm_4, chart) = (helm_4(), chart().display().to_string());
    let quiet = "admissionWebhook.enabled=false,evacuationController.replicas=0,\
                 maintenanceController.replicas=0,cleanup.enabled=false";
    let helm = async |args: &[&str]| {
        let args = [args, &["--namespace", "helm-4"]].concat();
        cluster.run(&helm_4, &args, None).await.unwrap().success().unwrap()
    };
    helm(&["lint", "--strict", &chart]).await;
    let install = ["upgrade", "--install", "four", &chart, "--create-namespace", "--set", quiet];
    let said = helm(&install).await;
    assert!(said.contains("helm test four --namespace helm-4"), "{said}");
    helm(&install).await;
    helm(&["uninstall", "four", "--wait"]).await;
    let left =
        ["get", "clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/instance=four", "-o", "name"];
    assert_eq!(cluster.kubectl(&left).await.unwrap().success().unwrap(), "");
    cluster.shutdown().await;
}
