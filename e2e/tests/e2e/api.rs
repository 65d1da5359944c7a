//! The three kinds as admins use them: discovery, `kubectl explain`, `kubectl get`.

use std::time::Duration;

use haulout_api_types::Evacuation;
use haulout_e2e::service::NAMESPACE as OURS;
use haulout_e2e::wait;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;

use crate::support::shared;

#[tokio::test]
async fn definitions_are_established_as_generated() {
    let cluster = shared().await;
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client().await.unwrap());
    for crd in haulout_api_types::crds() {
        let condition = |crd: &CustomResourceDefinition, kind: &str| {
            let conditions =
                crd.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
            let found = conditions.into_iter().find(|condition| condition.type_ == kind);
            found.map(|condition| (condition.status, condition.reason.unwrap_or_default()))
        };
        let is = |state: &str, reason: &str| Some((state.to_string(), reason.to_string()));
        let name = crd.metadata.name.as_deref().unwrap();
        let established = is("True", "InitialNamesAccepted");
        let found = wait::present(api.clone(), name, "is Established", Duration::from_secs(30), |crd| {
            condition(crd, "Established") == established
        });
        let found = found.await.unwrap();
        assert_eq!(condition(&found, "NonStructuralSchema"), None);
        assert_eq!(
            condition(&found, "KubernetesAPIApprovalPolicyConformant"),
            is("False", "UnapprovedAnnotation"),
            "not an approved Kubernetes API, and annotated so"
        );
        let mut expected = crd.spec;
        // Defaults of the API server.
        expected.conversion.clone_from(&found.spec.conversion);
        expected.names.list_kind.clone_from(&found.spec.names.list_kind);
        assert_eq!(found.spec, expected, "the API server dropped or changed something");
    }
}

#[tokio::test]
async fn discovery_shows_names_scopes_and_category() {
    let cluster = shared().await;
    let listed =
        cluster.kubectl(&["api-resources", "--categories", "haulout", "--no-headers"]).await.unwrap();
    let mut rows: Vec<Vec<String>> = listed
        .success()
        .unwrap()
        .lines()
        .map(|line| line.split_whitespace().map(Into::into).collect())
        .collect();
    rows.sort();
    let row = |cells: [&str; 5]| cells.map(String::from).to_vec();
    assert_eq!(
        rows,
        [
            row(["drainrules", "drule", "nodemaintenance.k8s.io/v1alpha1", "false", "DrainRule"]),
            row(["evacuations", "evac", "evacuation.coordination.k8s.io/v1alpha1", "true", "Evacuation"]),
            row(["nodemaintenances", "nm", "nodemaintenance.k8s.io/v1alpha1", "false", "NodeMaintenance"]),
        ]
    );
}

#[tokio::test]
async fn kubectl_explain_documents_fields() {
    let cluster = shared().await;
    for (field, words) in [
        ("nodemaintenance", "requests that the selected nodes are cordoned, drained or returned to service"),
        ("nm.spec.stage", "Stages can be skipped. A maintenance cannot return to an earlier stage."),
        ("nm.spec.nodeSelector.nodeSelectorTerms.matchFields.key", "Only metadata.name is supported"),
        ("nm.spec.drainPlan.podPriority", "less than or equal to this value"),
        ("nm.status.drainStatus.blockers", "pods that cannot leave, and why"),
        ("evac.spec.progressDeadlineSeconds", "From 600 to 21600."),
        ("evac.status.evacuationCancellationPolicy", "cannot stop: the evacuation then cannot be cancelled"),
        ("drule.spec.drain.order", "Pods with a higher order leave later"),
    ] {
        let text = cluster.kubectl(&["explain", field]).await.unwrap().success().unwrap();
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(words), "{field}: {text}");
    }
}

/// The output of `kubectl get`, without ages and column spacing.
async fn columns(cluster: &haulout_e2e::Handle, args: &[&str]) -> Vec<Vec<String>> {
    let text = cluster.kubectl(args).await.unwrap().success().unwrap();
    let split = |line: &str| -> Vec<String> {
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(Into::into).collect()
    };
    text.lines()
        .map(split)
        .map(|mut row| {
            row.pop();
            row
        })
        .collect()
}

fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn maintenance_columns() {
    let cluster = shared().await;
    let object = json!({
        "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "NodeMaintenance",
        "metadata": {"name": "columns"},
        "spec": {"stage": "Drain", "reason": "new kernel", "nodeSelector": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "no-such-label", "operator": "Exists"}]}]}}
    });
    cluster.kubectl_with(&["create", "-f", "-"], &object.to_string()).await.unwrap().success().unwrap();
    let status = json!({"status": {
        "nodesSelected": 3,
        "drainStatus": {"drainMessage": "Evacuating (limited by maintenance-a)", "podsLeft": 42, "nodesSelected": 3, "nodesDrained": 1},
        "conditions": [
            {"type": "Drained", "status": "False", "reason": "Evacuating", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            {"type": "Blocked", "status": "True", "reason": "DisruptionBudgetExhausted", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        ]
    }});
    let patch = ["patch", "nm", "columns", "--subresource=status", "--type=merge", "-p", &status.to_string()];
    cluster.kubectl(&patch).await.unwrap().success().unwrap();
    assert_eq!(
        columns(&cluster, &["get", "nm", "columns"]).await,
        [
            row(&["NAME", "STAGE", "DRAINED", "NODES", "PODS LEFT", "BLOCKED", "REASON"]),
            row(&["columns", "Drain", "False", "3", "42", "DisruptionBudgetExhausted", "new kernel"]),
        ]
    );
    assert_eq!(
        columns(&cluster, &["get", "nm", "columns", "-o", "wide"]).await[1],
        row(&[
            "columns",
            "Drain",
            "False",
            "3",
            "42",
            "DisruptionBudgetExhausted",
            "Evacuating (limited by maintenance-a)",
            "1",
            "new kernel"
        ])
    );
    let selected = |stage: &str| format!("spec.stage={stage}");
    for (stage, found) in [("Drain", true), ("Idle", false)] {
        let text = cluster
            .kubectl(&["get", "nm", "-o", "name", "--field-selector", &selected(stage)])
            .await
            .unwrap();
        assert_eq!(text.success().unwrap().contains("/columns\n"), found, "stage {stage}");
    }
    cluster.kubectl(&["delete", "nm", "columns"]).await.unwrap().success().unwrap();
}

#[tokio::test]
async fn evacuation_columns_and_field_selectors() {
    let cluster = shared().await;
    let uid = "f5823a89-e03f-4752-b013-445643b8c7a0";
    let name = format!("{uid}-web-1");
    let objects = [
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "columns"}}),
        json!({"apiVersion": "evacuation.coordination.k8s.io/v1alpha1", "kind": "Evacuation",
            "metadata": {"name": name, "namespace": "columns"}, "spec": {"podRef": {"name": "web-1", "uid": uid},
            "evacuators": [{"evacuatorClass": "mover.example.com", "priority": 7}]}}),
    ];
    for object in objects {
        cluster.kubectl_with(&["create", "-f", "-"], &object.to_string()).await.unwrap().success().unwrap();
    }
    let status = json!({"status": {"activeEvacuatorClass": "mover.example.com", "failedEvictionCounter": 3, "message": "copying"}});
    // Only the evacuation controller may write these fields.
    let account = cluster.service_account_kubeconfig(OURS, "haulout-evacuation-controller").await.unwrap();
    let evacuations: Api<Evacuation> =
        Api::namespaced(cluster.client_from(&account, "columns").await.unwrap(), "columns");
    evacuations.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    assert_eq!(
        columns(&cluster, &["get", "evac", "-n", "columns"]).await,
        [
            row(&["NAME", "POD", "EVACUATOR", "BLOCKED", "FAILED EVICTIONS"]),
            row(&[&name, "web-1", "mover.example.com", "3"]),
        ]
    );
    for (selector, found) in [
        ("spec.podRef.name=web-1", true),
        ("spec.podRef.name=web-2", false),
        (&format!("spec.podRef.uid={uid}"), true),
        ("status.activeEvacuatorClass=mover.example.com", true),
        ("status.activeEvacuatorClass=other.example.com", false),
    ] {
        let get = ["get", "evac", "-n", "columns", "-o", "name", "--field-selector", selector];
        let text = cluster.kubectl(&get).await.unwrap().success().unwrap();
        assert_eq!(!text.is_empty(), found, "{selector}");
    }
    cluster.kubectl(&["delete", "namespace", "columns", "--wait=false"]).await.unwrap().success().unwrap();
}

#[tokio::test]
async fn drain_rule_columns() {
    let cluster = shared().await;
    let object = json!({"apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule",
        "metadata": {"name": "columns"}, "spec": {"drain": {"behavior": "Drain", "order": 7}}});
    cluster.kubectl_with(&["create", "-f", "-"], &object.to_string()).await.unwrap().success().unwrap();
    assert_eq!(
        columns(&cluster, &["get", "drule", "columns"]).await,
        [row(&["NAME", "BEHAVIOR", "ORDER"]), row(&["columns", "Drain", "7"])]
    );
    cluster.kubectl(&["delete", "drule", "columns"]).await.unwrap().success().unwrap();
}
