//! Manual cordons.

use haulout_e2e::objects;
use k8s_openapi::api::core::v1::Node;

use super::node_maintenances::{maintenance, named};
use super::{CaseRunner, Expected};

/// Three workers and a control plane node.
pub fn all() -> Vec<Node> {
    let worker = |name: &str| objects::node(name).label("worker", "").build();
    let control_plane = objects::node("c1").label("node-role.kubernetes.io/control-plane", "").build();
    vec![worker("n1"), worker("n2"), worker("n3"), control_plane]
}

pub async fn table(runner: &mut CaseRunner<'_>) {
    let hold = maintenance("hold", "Drain", named(&["n2"]));
    runner.create("a maintenance of a node", "", &hold, Expected::Accepted).await;
    let patch = ["patch", "node", "n2", "-p", r#"{"spec":{"unschedulable":true}}"#];
    runner.until_warned(&patch, None, "node n2 is under maintenance").await;

    let kept = "node n2 is under maintenance by NodeMaintenance hold (stage Drain): it stays cordoned during the maintenance";
    runner.check("a cordon by hand", "", &["cordon", "n2"], None, Expected::Warned(kept)).await;
    let again =
        "node n2 is under maintenance by NodeMaintenance hold (stage Drain): it will be cordoned again";
    runner.check("an uncordon by hand", "", &["uncordon", "n2"], None, Expected::Warned(again)).await;
    runner.check("a node without maintenance", "", &["cordon", "n3"], None, Expected::Accepted).await;
    runner.check("and back", "", &["uncordon", "n3"], None, Expected::Accepted).await;
}

/// Changes that the webhook does not check.
pub async fn harmless(runner: &mut CaseRunner<'_>) {
    runner
        .check("another change of a node", "", &["label", "node", "n2", "a=b"], None, Expected::Accepted)
        .await;
}
