//! How the API server is told about our webhooks: what reaches them, what never does, and what happens when they
//! are down. `cargo xtask generate` writes it as YAML, for the release `haulout` in the namespace
//! `haulout-system`; the chart puts in other names.
//!
//! Only our own kinds wait for us. Whatever the webhook itself stands on (its pods, Secret, leases, nodes) does
//! not, so that it can always come back.

use haulout_api_types::names::{
    EVACUATION_GROUP, EVACUATOR_ANNOTATION_PREFIX, NODE_MAINTENANCE_GROUP, VERSION,
};
use k8s_openapi::api::admissionregistration::v1::{
    MatchCondition, MutatingWebhook, MutatingWebhookConfiguration, RuleWithOperations, ServiceReference,
    ValidatingWebhook, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::review::Hook;

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

/// What fills objects in.
pub fn mutating() -> MutatingWebhookConfiguration {
    let webhook = |hook: Hook| {
        let webhook = Webhook::of(hook);
        MutatingWebhook {
            admission_review_versions: vec!["v1".into()],
            client_config: webhook.client_config(),
            failure_policy: Some(webhook.failure_policy.into()),
            match_conditions: Some(webhook.conditions),
            match_policy: Some("Equivalent".into()),
            name: webhook.name,
            reinvocation_policy: Some("Never".into()),
            rules: Some(webhook.rules),
            side_effects: "None".into(),
            timeout_seconds: Some(webhook.timeout_seconds),
            ..MutatingWebhook::default()
        }
    };
    MutatingWebhookConfiguration { metadata: metadata(), webhooks: Some(hooks(true).map(webhook).collect()) }
}

/// What judges objects.
pub fn validating() -> ValidatingWebhookConfiguration {
    let webhook = |hook: Hook| {
        let webhook = Webhook::of(hook);
        ValidatingWebhook {
            admission_review_versions: vec!["v1".into()],
            client_config: webhook.client_config(),
            failure_policy: Some(webhook.failure_policy.into()),
            match_conditions: Some(webhook.conditions),
            match_policy: Some("Equivalent".into()),
            name: webhook.name,
            rules: Some(webhook.rules),
            side_effects: "None".into(),
            timeout_seconds: Some(webhook.timeout_seconds),
            ..ValidatingWebhook::default()
        }
    };
    ValidatingWebhookConfiguration {
        metadata: metadata(),
        webhooks: Some(hooks(false).map(webhook).collect()),
    }
}

fn hooks(mutating: bool) -> impl Iterator<Item = Hook> {
    let mutates = |hook: &Hook| matches!(hook, Hook::MutateEvacuations | Hook::MutateNodeMaintenances);
    Hook::ALL.into_iter().filter(move |hook| mutates(hook) == mutating)
}

fn metadata() -> ObjectMeta {
    ObjectMeta { name: Some(NAME.into()), ..ObjectMeta::default() }
}

/// What the two kinds of webhooks have in common.
struct Webhook {
    name: String,
    path: &'static str,
    rules: Vec<RuleWithOperations>,
    conditions: Vec<MatchCondition>,
    failure_policy: &'static str,
    timeout_seconds: i32,
}

impl Webhook {
    fn of(hook: Hook) -> Self {
        match hook {
            Hook::MutateEvacuations => {
                Self::of_ours(hook, EVACUATION_GROUP, "Namespaced", &[("evacuations", &["CREATE"])])
            }
            Hook::ValidateEvacuations => Self::of_ours(
                hook,
                EVACUATION_GROUP,
                "Namespaced",
                &[("evacuations", &["CREATE", "UPDATE", "DELETE"]), ("evacuations/status", &["UPDATE"])],
            ),
            Hook::MutateNodeMaintenances => {
                let rules: &[(_, &[_])] = &[("nodemaintenances", &["CREATE", "UPDATE"])];
                Self::of_ours(hook, NODE_MAINTENANCE_GROUP, "Cluster", rules)
            }
            Hook::ValidateNodeMaintenances => {
                let rules: &[(_, &[_])] = &[("nodemaintenances", &["CREATE", "UPDATE", "DELETE"])];
                Self::of_ours(hook, NODE_MAINTENANCE_GROUP, "Cluster", rules)
            }
            Hook::ValidateDrainRules => {
                let rules: &[(_, &[_])] = &[("drainrules", &["CREATE", "UPDATE"])];
                Self::of_ours(hook, NODE_MAINTENANCE_GROUP, "Cluster", rules)
            }
            Hook::ValidatePods => Self {
                name: format!("pods.{EVACUATION_GROUP}"),
                rules: vec![rule("", "v1", "pods", "Namespaced", &["CREATE", "UPDATE"])],
                conditions: vec![not_ours(), evacuator_annotation_changes()],
                ..Self::of_others(hook)
            },
            Hook::ValidateNodes => Self {
                name: format!("nodes.{NODE_MAINTENANCE_GROUP}"),
                rules: vec![rule("", "v1", "nodes", "Cluster", &["UPDATE"])],
                conditions: vec![not_ours(), cordon_changes()],
                ..Self::of_others(hook)
            },
        }
    }

    /// For our own kinds: without a verdict there is no write.
    fn of_ours(hook: Hook, group: &str, scope: &str, rules: &[(&str, &[&str])]) -> Self {
        Self {
            name: format!("{}.{group}", hook.resource()),
            path: hook.path(),
            rules: rules
                .iter()
                .map(|(resource, operations)| rule(group, VERSION, resource, scope, operations))
                .collect(),
            conditions: vec![not_ours(), not_cleaners()],
            failure_policy: "Fail",
            timeout_seconds: 5,
        }
    }

    /// For kinds that everybody lives on: we are not missed.
    fn of_others(hook: Hook) -> Self {
        Self {
            name: String::new(),
            path: hook.path(),
            rules: Vec::new(),
            conditions: Vec::new(),
            failure_policy: "Ignore",
            timeout_seconds: 2,
        }
    }

    /// Without a `caBundle`: the service fills it in, and Helm leaves alone what the chart does not have.
    fn client_config(&self) -> WebhookClientConfig {
        let service = ServiceReference {
            name: NAME.into(),
            namespace: NAMESPACE.into(),
            path: Some(self.path.into()),
            port: Some(443),
        };
        WebhookClientConfig { service: Some(service), ..WebhookClientConfig::default() }
    }
}

fn rule(group: &str, version: &str, resource: &str, scope: &str, operations: &[&str]) -> RuleWithOperations {
    RuleWithOperations {
        api_groups: Some(vec![group.into()]),
        api_versions: Some(vec![version.into()]),
        operations: Some(operations.iter().map(ToString::to_string).collect()),
        resources: Some(vec![resource.into()]),
        scope: Some(scope.into()),
    }
}

fn condition(name: &str, expression: String) -> MatchCondition {
    MatchCondition { name: name.into(), expression }
}

fn not_ours() -> MatchCondition {
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
    use std::collections::BTreeSet;

    use super::*;

    /// Policy, rules and conditions of every webhook.
    fn all() -> Vec<(String, Vec<RuleWithOperations>, Vec<MatchCondition>, WebhookClientConfig)> {
        let mutating = mutating().webhooks.unwrap().into_iter().map(|webhook| {
            assert!(webhook.name.split('.').count() >= 3);
            (webhook.failure_policy, webhook.rules, webhook.match_conditions, webhook.client_config)
        });
        let validating = validating().webhooks.unwrap().into_iter().map(|webhook| {
            assert!(webhook.name.split('.').count() >= 3);
            (webhook.failure_policy, webhook.rules, webhook.match_conditions, webhook.client_config)
        });
        mutating.chain(validating).map(|(a, b, c, d)| (a.unwrap(), b.unwrap(), c.unwrap(), d)).collect()
    }

    #[test]
    fn every_hook_is_registered_once_under_its_path() {
        let found: Vec<_> =
            all().into_iter().map(|(.., client)| client.service.unwrap().path.unwrap()).collect();
        let expected: BTreeSet<_> = Hook::ALL.into_iter().map(|hook| hook.path().to_owned()).collect();
        assert_eq!(found.len(), expected.len());
        assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected);
    }

    #[test]
    fn only_our_own_kinds_wait_for_us_and_never_for_our_own_services() {
        for (policy, rules, conditions, _) in all() {
            let ours = rules.iter().all(|rule| {
                let groups = rule.api_groups.as_ref().unwrap();
                groups.iter().all(|group| group == EVACUATION_GROUP || group == NODE_MAINTENANCE_GROUP)
            });
            assert_eq!(policy, if ours { "Fail" } else { "Ignore" });
            assert_eq!(conditions[0], not_ours());
            assert_eq!(conditions.len(), 2);
        }
    }
}
