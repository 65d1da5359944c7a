//! The webhook configurations: what the API server sends to the admission webhook, what it never does, and what
//! happens when the webhook is down. They are for the release `haulout` in the namespace `haulout-system`; the chart
//! puts in other names.
//!
//! Only writes to our own kinds wait for the webhook. What it needs to run (its pods, Secret, leases, nodes) does not, so
//! that it can always come back.

use haulout_api_types::names::{
    EVACUATION_GROUP, EVACUATOR_ANNOTATION_PREFIX, NODE_MAINTENANCE_GROUP, VERSION,
};
use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations, ServiceReference,
    ValidatingWebhook, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// The release that the generated files are for.
const NAMESPACE: &str = "haulout-system";
const RELEASE: &str = "haulout";
const NAME: &str = "haulout-admission-webhook";

/// Our services, and what cleans up after them. What they write to our kinds is right by construction, and must not
/// wait for the webhook.
const SERVICES: [&str; 6] = [
    "admission-webhook",
    "cleanup",
    "evacuation-controller",
    "maintenance-controller",
    "taint-manager",
    "withdraw",
];

/// Those who empty namespaces and collect garbage: a namespace must not be stuck because we are down. Without
/// ServiceAccounts of their own, all controllers of the controller manager are one user.
const CLEANERS: [&str; 3] = [
    "system:kube-controller-manager",
    "system:serviceaccount:kube-system:generic-garbage-collector",
    "system:serviceaccount:kube-system:namespace-controller",
];

/// The webhooks that change objects.
pub fn mutating() -> MutatingWebhookConfiguration {
    let evacuations = [namespaced(EVACUATION_GROUP, VERSION, "evacuations", &["CREATE"])];
    let maintenances = [cluster(NODE_MAINTENANCE_GROUP, VERSION, "nodemaintenances", &["CREATE", "UPDATE"])];
    let webhooks =
        [ours("/mutate/evacuations", &evacuations), ours("/mutate/nodemaintenances", &maintenances)];
    let webhooks = webhooks.map(|webhook| MutatingWebhook {
        admission_review_versions: webhook.admission_review_versions,
        client_config: webhook.client_config,
        failure_policy: webhook.failure_policy,
        match_conditions: webhook.match_conditions,
        match_policy: webhook.match_policy,
        name: webhook.name,
        reinvocation_policy: Some("Never".into()),
        rules: webhook.rules,
        side_effects: webhook.side_effects,
        timeout_seconds: webhook.timeout_seconds,
        ..MutatingWebhook::default()
    });
    MutatingWebhookConfiguration { metadata: metadata(), webhooks: Some(webhooks.into()) }
}

/// The webhooks that judge objects.
pub fn validating() -> ValidatingWebhookConfiguration {
    let all = &["CREATE", "UPDATE", "DELETE"];
    let evacuations = [
        namespaced(EVACUATION_GROUP, VERSION, "evacuations", all),
        namespaced(EVACUATION_GROUP, VERSION, "evacuations/status", &["UPDATE"]),
    ];
    let maintenances = [cluster(NODE_MAINTENANCE_GROUP, VERSION, "nodemaintenances", all)];
    let drain_rules = [cluster(NODE_MAINTENANCE_GROUP, VERSION, "drainrules", &["CREATE", "UPDATE"])];
    let pods = namespaced("", "v1", "pods", &["CREATE", "UPDATE"]);
    let nodes = cluster("", "v1", "nodes", &["UPDATE"]);
    let webhooks = vec![
        ours("/validate/evacuations", &evacuations),
        ours("/validate/nodemaintenances", &maintenances),
        ours("/validate/drainrules", &drain_rules),
        others("/validate/pods", EVACUATION_GROUP, pods, evacuator_annotation_changes()),
        others("/validate/nodes", NODE_MAINTENANCE_GROUP, nodes, cordon_changes()),
    ];
    ValidatingWebhookConfiguration { metadata: metadata(), webhooks: Some(webhooks) }
}

fn metadata() -> ObjectMeta {
    ObjectMeta { name: Some(NAME.into()), ..ObjectMeta::default() }
}

/// For our own kinds: without a verdict there is no write.
fn ours(path: &str, rules: &[RuleWithOperations]) -> ValidatingWebhook {
    let group = rules.iter().flat_map(|rule| rule.api_groups.iter().flatten()).next();
    webhook(path, group.map_or("", String::as_str), rules.to_vec(), not_cleaners())
}

/// For kinds that everybody needs: while the webhook is down, they are written without it.
fn others(path: &str, group: &str, rule: RuleWithOperations, changes: MatchCondition) -> ValidatingWebhook {
    ValidatingWebhook {
        failure_policy: Some("Ignore".into()),
        timeout_seconds: Some(2),
        ..webhook(path, group, vec![rule], changes)
    }
}

/// A webhook whose name is that of the resource, which its path ends with, in this group. It has no `caBundle`: the
/// service fills it in, and Helm leaves alone what the chart does not have.
fn webhook(
    path: &str,
    group: &str,
    rules: Vec<RuleWithOperations>,
    condition: MatchCondition,
) -> ValidatingWebhook {
    let resource = path.rsplit('/').next().unwrap_or_default();
    let service = ServiceReference {
        name: NAME.into(),
        namespace: NAMESPACE.into(),
        path: Some(path.into()),
        port: Some(443),
    };
    ValidatingWebhook {
        admission_review_versions: vec!["v1".into()],
        client_config: WebhookClientConfig { service: Some(service), ..WebhookClientConfig::default() },
        failure_policy: Some("Fail".into()),
        match_conditions: Some(vec![not_by_haulout(), condition]),
        match_policy: Some("Equivalent".into()),
        name: format!("{resource}.{group}"),
        rules: Some(rules),
        side_effects: "None".into(),
        timeout_seconds: Some(5),
        ..ValidatingWebhook::default()
    }
}

fn namespaced(group: &str, version: &str, resource: &str, operations: &[&str]) -> RuleWithOperations {
    RuleWithOperations {
        api_groups: Some(vec![group.into()]),
        api_versions: Some(vec![version.into()]),
        operations: Some(operations.iter().map(ToString::to_string).collect()),
        resources: Some(vec![resource.into()]),
        scope: Some("Namespaced".into()),
    }
}

fn cluster(group: &str, version: &str, resource: &str, operations: &[&str]) -> RuleWithOperations {
    RuleWithOperations { scope: Some("Cluster".into()), ..namespaced(group, version, resource, operations) }
}

fn condition(name: &str, expression: String) -> MatchCondition {
    MatchCondition { name: name.into(), expression }
}

fn not_by_haulout() -> MatchCondition {
    let users = SERVICES.map(|service| format!("'system:serviceaccount:{NAMESPACE}:{RELEASE}-{service}'"));
    condition("not-by-haulout", format!("!(request.userInfo.username in [{}])", users.join(", ")))
}

fn not_cleaners() -> MatchCondition {
    let users = CLEANERS.map(|user| format!("'{user}'"));
    condition(
        "not-cleaned-up",
        format!("request.operation != 'DELETE' || !(request.userInfo.username in [{}])", users.join(", ")),
    )
}

/// Only pods that get or change an evacuator annotation. Taking one away is always fine.
fn evacuator_annotation_changes() -> MatchCondition {
    condition(
        "evacuator-annotation-changes",
        format!(
            "has(object.metadata.annotations) && object.metadata.annotations.exists(key, \
             key.startsWith('{EVACUATOR_ANNOTATION_PREFIX}') && (oldObject == null || \
             !has(oldObject.metadata.annotations) || !(key in oldObject.metadata.annotations) || \
             oldObject.metadata.annotations[key] != object.metadata.annotations[key]))"
        ),
    )
}

fn cordon_changes() -> MatchCondition {
    let cordoned = |object: &str| format!("{object}.?spec.?unschedulable.orValue(false)");
    condition("cordon-changes", format!("{} != {}", cordoned("object"), cordoned("oldObject")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Policy, rules and conditions of every webhook.
    fn all() -> Vec<(String, Vec<RuleWithOperations>, Vec<MatchCondition>)> {
        let mutating = mutating().webhooks.unwrap().into_iter().map(|webhook| {
            assert!(webhook.name.split('.').count() >= 3);
            (webhook.failure_policy, webhook.rules, webhook.match_conditions)
        });
        let validating = validating().webhooks.unwrap().into_iter().map(|webhook| {
            assert!(webhook.name.split('.').count() >= 3);
            (webhook.failure_policy, webhook.rules, webhook.match_conditions)
        });
        mutating.chain(validating).map(|(a, b, c)| (a.unwrap(), b.unwrap(), c.unwrap())).collect()
    }

    #[test]
    fn only_our_kinds_wait_for_us_and_never_for_our_services() {
        for (policy, rules, conditions) in all() {
            let ours = rules.iter().all(|rule| {
                let groups = rule.api_groups.as_ref().unwrap();
                groups.iter().all(|group| group == EVACUATION_GROUP || group == NODE_MAINTENANCE_GROUP)
            });
            assert_eq!(policy, if ours { "Fail" } else { "Ignore" });
            assert_eq!(conditions[0], not_by_haulout());
            assert_eq!(conditions.len(), 2);
        }
    }
}
