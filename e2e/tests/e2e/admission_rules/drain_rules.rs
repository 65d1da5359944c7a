//! DrainRules: what cannot be read, and what never applies.

use serde_json::{Value, json};

use super::{Bench, Expected};

fn rule(name: &str, spec: Value) -> Value {
    json!({"apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "DrainRule", "metadata": {"name": name},
        "spec": spec})
}

pub async fn table(bench: &mut Bench<'_>) {
    let web = json!([{"selector": {"matchLabels": {"app": "web"}}}]);
    let order = rule("order", json!({"drain": {"behavior": "Skip", "order": 3}}));
    let only_drain =
        Expected::Refused(&["order can only be set with behavior Drain: remove it or change the behavior"]);
    bench.create("an order without Drain", "", &order, only_drain).await;
    let empty = json!({"matchExpressions": [{"key": "a", "operator": "In"}]});
    let unreadable =
        rule("unreadable", json!({"drain": {"behavior": "Skip"}, "pods": [{"selector": empty}]}));
    let no_value = Expected::Refused(&["operators In and NotIn need at least one value"]);
    bench.create("a selector that cannot be read", "", &unreadable, no_value).await;

    let wide = rule(
        "m-wide",
        json!({"drain": {"behavior": "Drain", "order": 3}, "nodes": [{"selector": {}}], "pods": web}),
    );
    bench.create("a good rule", "", &wide, Expected::Fine).await;
    let narrow = |name: &str| {
        rule(
            name,
            json!({"drain": {"behavior": "Skip"}, "nodes": [{"selector": {"matchLabels": {"zone": "a"}}}], "pods": web}),
        )
    };
    let hidden = "DrainRule z-narrow never applies: m-wide comes before it in alphabetical order";
    bench.until_warned(&["create", "-f", "-"], Some(&narrow("z-narrow")), hidden).await;
    bench.create("a rule that another one hides", "", &narrow("z-narrow"), Expected::Warned(hidden)).await;
    bench.create("the same rule before the other", "", &narrow("a-narrow"), Expected::Fine).await;
}
