//! DrainRules: rules that are invalid, and rules that never apply.

use serde_json::{Value, json};

use super::{CaseRunner, Expected};

fn rule(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule", "metadata": {"name": name},
        "spec": spec})
}

pub async fn table(runner: &mut CaseRunner<'_>) {
    let web = json!([{"selector": {"matchLabels": {"app": "web"}}}]);
    let order = rule("order", json!({"drain": {"behavior": "Skip", "order": 3}}));
    let only_drain =
        Expected::Rejected(&["order can only be set with behavior Drain: remove it or change the behavior"]);
    runner.create("an order without Drain", "", &order, only_drain).await;
    let empty = json!({"matchExpressions": [{"key": "a", "operator": "In"}]});
    let unreadable =
        rule("unreadable", json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": empty}]}));
    let no_value = Expected::Rejected(&["operators In and NotIn need at least one value"]);
    runner.create("a selector that cannot be read", "", &unreadable, no_value).await;

    let wide = rule(
        "m-wide",
        json!({"drain": {"behavior": "Drain", "order": 3}, "nodes": [{"selector": {}}], "pods": web}),
    );
    runner.create("a good rule", "", &wide, Expected::Accepted).await;
    let narrow = |name: &str| {
        rule(
            name,
            json!({"drain": {"behavior": "Skip"}, "nodes": [{"selector": {"matchLabels": {"zone": "a"}}}], "pods": web}),
        )
    };
    let hidden = "DrainRule z-narrow never applies: m-wide comes before it in alphabetical order";
    runner.until_warned(&["create", "-f", "-"], Some(&narrow("z-narrow")), hidden).await;
    runner.create("a rule that another one hides", "", &narrow("z-narrow"), Expected::Warned(hidden)).await;
    runner.create("the same rule before the other", "", &narrow("a-narrow"), Expected::Accepted).await;
}
