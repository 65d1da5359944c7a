//! The webhook configurations: which requests the API server sends to the admission webhook, and what happens if it is
//! unavailable. They are for the release `haulout` in the namespace `haulout-system`. The chart substitutes other
//! names.
//!
//! Only writes to Haulout's own kinds require the webhook. Everything that the webhook itself needs (its pods, Secret,
//! Leases, nodes) does not, so that it can always recover.

use haulout_api_types::names::{
    EVACUATION_GROUP, EVACUATOR_ANNOTATION_PREFIX, NODE_MAINTENANCE_GROUP, VERSION,
};
use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations, ServiceReference,
    ValidatingWebhook, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// The release of the generated files.
const NAMESPACE: &str = "haulout-system";
const RELEASE: &str = "haulout";
const NAME: &str = "haulout-admission-webhook";

/// ServiceAccounts of Haulout. Their writes to Haulout's kinds are always valid, and must not depend on the webhook.
const SERVICES: [&str; 7] = [
    "admission-webhook",
    "cleanup",
    "evacuation-controller",
    "maintenance-controller",
    "taint-manager",
    "withdraw",
    "workload-evacuator",
];

/// Users that delete namespaces' contents and collect garbage. They must not be blocked while the webhook is
/// unavailable. Without separate ServiceAccounts, all controllers of the controller manager are one user.
const DELETION_CONTROLLERS: [&str; 3] = [
    "system:kube-controller-manager",
    "system:serviceaccount:kube-system:generic-garbage-collector",
    "system:serviceaccount:kube-system:namespace-controller",
];

/// The mutating webhooks.
pub fn mutating() -> MutatingWebhookConfiguration {
    let evacuations = [namespaced(EVACUATION_GROUP, VERSION, "evacuations", &["CREATE"])];
    let maintenances = [cluster(NODE_MAINTENANCE_GROUP, VERSION, "nodemaintenances", &["CREATE", "UPDATE"])];
    let webhooks =
        [own_kind("/mutate/evacuations", &evacuations), own_kind("/mutate/nodemaintenances", &maintenances)];
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

/// The validating webhooks.
pub fn validating() -> ValidatingWebhookConfiguration {
    let all = &["CREATE", "UPDATE", "DELETE"];
    let evacuations = [namespaced(EVACUATION_GROUP, VERSION, "evacuations", all)];
    let maintenances = [cluster(NODE_MAINTENANCE_GROUP, VERSION, "nodemaintenances", all)];
    let drain_rules = [cluster(NODE_MAINTENANCE_GROUP, VERSION, "drainrules", &["CREATE", "UPDATE"])];
    // A status update can change annotations too.
    let pods = [
        namespaced("", "v1", "pods", &["CREATE", "UPDATE"]),
        namespaced("", "v1", "pods/status", &["UPDATE"]),
    ];
    let nodes = [cluster("", "v1", "nodes", &["UPDATE"])];
    let webhooks = vec![
        own_kind("/validate/evacuations", &evacuations),
        own_kind("/validate/nodemaintenances", &maintenances),
        own_kind("/validate/drainrules", &drain_rules),
        core_kind("/validate/pods", EVACUATION_GROUP, &pods, evacuator_annotation_changes()),
        core_kind("/validate/nodes", NODE_MAINTENANCE_GROUP, &nodes, cordon_changes()),
    ];
    ValidatingWebhookConfiguration { metadata: metadata(), webhooks: Some(webhooks) }
}

fn metadata() -> ObjectMeta {
    ObjectMeta { name: Some(NAME.into()), ..ObjectMeta::default() }
}

/// For Haulout's kinds: writes fail while the webhook is unavailable.
fn own_kind(path: &str, rules: &[RuleWithOperations]) -> ValidatingWebhook {
    let group = rules.iter().flat_map(|rule| rule.api_groups.iter().flatten()).next();
    webhook(path, group.map_or("", String::as_str), rules.to_vec(), not_by_deletion_controllers())
}

/// For other kinds: writes succeed while the webhook is unavailable.
fn core_kind(
    path: &str,
    group: &str,
    rules: &[RuleWithOperations],
    changes: MatchCondition,
) -> ValidatingWebhook {
    ValidatingWebhook {
        failure_policy: Some("Ignore".into()),
        timeout_seconds: Some(2),
        ..webhook(path, group, rules.to_vec(), changes)
    }
}

/// A webhook. Its name is the resource, which is the end of the path, and this group. It has no `caBundle`: the service
/// writes it, and Helm does not touch fields that the chart does not have.
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

fn not_by_deletion_controllers() -> MatchCondition {
    let users = DELETION_CONTROLLERS.map(|user| format!("'{user}'"));
    condition(
        "not-cleaned-up",
        format!("request.operation != 'DELETE' || !(request.userInfo.username in [{}])", users.join(", ")),
    )
}

/// Matches pods that get or change an evacuator annotation. Removing one is always allowed.
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
    fn only_our_kinds_fail_without_the_webhook() {
        for (policy, rules, conditions) in all() {
            let own_kind = rules.iter().all(|rule| {
                let groups = rule.api_groups.as_ref().unwrap();
                groups.iter().all(|group| group == EVACUATION_GROUP || group == NODE_MAINTENANCE_GROUP)
            });
            assert_eq!(policy, if own_kind { "Fail" } else { "Ignore" });
            assert_eq!(conditions[0], not_by_haulout());
            assert_eq!(conditions.len(), 2);
        }
    }
}
