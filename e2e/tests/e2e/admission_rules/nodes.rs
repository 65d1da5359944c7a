//! Cordons by hand.

use haulout_e2e::objects;
use k8s_openapi::api::core::v1::Node;

use super::node_maintenances::{maintenance, named};
use super::{Bench, Expected};

/// Three workers and a control plane.
pub fn all() -> Vec<Node> {
    let worker = |name: &str| objects::node(name).label("worker", "").build();
    let control_plane = objects::node("c1").label("node-role.kubernetes.io/control-plane", "").build();
    vec![worker("n1"), worker("n2"), worker("n3"), control_plane]
}

pub async fn table(bench: &mut Bench<'_>) {
    let hold = maintenance("hold", "Drain", named(&["n2"]));
    bench.create("a maintenance of a node", "", &hold, Expected::Fine).await;
    let patch = ["patch", "node", "n2", "-p", r#"{"spec":{"unschedulable":true}}"#];
    bench.until_warned(&patch, None, "node n2 is under maintenance").await;

    let kept =
        "node n2 is under maintenance by NodeMaintenance hold (stage Drain): it is kept cordoned anyway";
    bench.check("a cordon by hand", "", &["cordon", "n2"], None, Expected::Warned(kept)).await;
    let again = "node n2 is under maintenance by NodeMaintenance hold (stage Drain): it will be cordoned again at once";
    bench.check("an uncordon by hand", "", &["uncordon", "n2"], None, Expected::Warned(again)).await;
    bench.check("a node without maintenance", "", &["cordon", "n3"], None, Expected::Fine).await;
    bench.check("and back", "", &["uncordon", "n3"], None, Expected::Fine).await;
}

/// What the webhook has no say in.
pub async fn harmless(bench: &mut Bench<'_>) {
    bench.check("another change of a node", "", &["label", "node", "n2", "a=b"], None, Expected::Fine).await;
}
