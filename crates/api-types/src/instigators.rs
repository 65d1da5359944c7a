//! Instigator finalizers: who requests an evacuation, and when an evacuation is cancelled.

use crate::evacuation::{CancellationPolicy, Evacuation, Evacuator};
use crate::names::INSTIGATOR_FINALIZER_PREFIX;

/// The finalizer of the instigator with this subdomain, which has at most 52 characters.
pub fn finalizer(subdomain: &str) -> String {
    format!("{INSTIGATOR_FINALIZER_PREFIX}{subdomain}")
}

/// The subdomain in an instigator finalizer; `None` for any other finalizer.
pub fn subdomain(finalizer: &str) -> Option<&str> {
    finalizer.strip_prefix(INSTIGATOR_FINALIZER_PREFIX).filter(|subdomain| !subdomain.is_empty())
}

/// The subdomains of the instigators with a finalizer in this list. If the subdomain is an evacuator class of the Evacuation,
/// the finalizer belongs to an evacuator that has to clean up, not to an instigator.
pub fn subdomains<'a>(
    finalizers: impl IntoIterator<Item = &'a str>,
    evacuators: &'a [Evacuator],
) -> impl Iterator<Item = &'a str> {
    let is_evacuator = |name: &str| evacuators.iter().any(|evacuator| evacuator.evacuator_class == name);
    finalizers.into_iter().filter_map(subdomain).filter(move |name| !is_evacuator(name))
}

/// Whether an evacuation with these finalizers is cancelled: no instigator is left, and the policy allows cancellation. A
/// `deletionTimestamp` does not cancel: a deleted Evacuation continues while it has an instigator finalizer.
pub fn is_cancelled<'a>(
    finalizers: impl IntoIterator<Item = &'a str>,
    evacuators: &'a [Evacuator],
    policy: CancellationPolicy,
) -> bool {
    policy == CancellationPolicy::Allow && subdomains(finalizers, evacuators).next().is_none()
}

impl Evacuation {
    fn all_finalizers(&self) -> impl Iterator<Item = &str> {
        self.metadata.finalizers.iter().flatten().map(String::as_str)
    }

    /// The subdomains of the instigators of this evacuation: see [`subdomains`].
    pub fn instigators(&self) -> impl Iterator<Item = &str> {
        subdomains(self.all_finalizers(), &self.spec.evacuators)
    }

    /// Whether the evacuation is cancelled and its pod stays: see [`is_cancelled`]. Evacuators then stop and undo their
    /// work.
    pub fn is_cancelled(&self) -> bool {
        is_cancelled(self.all_finalizers(), &self.spec.evacuators, self.cancellation_policy())
    }

    /// The cancellation policy. The default is `Allow`.
    pub fn cancellation_policy(&self) -> CancellationPolicy {
        self.status.as_ref().map(|status| status.evacuation_cancellation_policy).unwrap_or_default()
    }

    /// Whether the instigator with this subdomain requests this evacuation.
    pub fn has_instigator(&self, instigator: &str) -> bool {
        self.instigators().any(|name| name == instigator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evacuation::EvacuationStatus;
    use crate::names;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use proptest::prelude::*;

    fn evacuation(finalizers: &[&str], classes: &[&str]) -> Evacuation {
        let mut evacuation = Evacuation::default();
        evacuation.metadata.finalizers = Some(finalizers.iter().map(ToString::to_string).collect());
        evacuation.spec.evacuators = classes
            .iter()
            .map(|class| Evacuator { evacuator_class: (*class).into(), ..Evacuator::default() })
            .collect();
        evacuation
    }

    #[test]
    fn finalizers_of_evacuators_are_not_instigators() {
        let mine = finalizer(names::instigator::NODE_MAINTENANCE);
        let descheduler = "evacuation.coordination.k8s.io/instigator_descheduler.example.com";
        let evacuator = "evacuation.coordination.k8s.io/instigator_deployment.apps.k8s.io";
        let foreign = "example.com/cleanup";
        let cases: [(&[&str], &[&str], &[&str]); 5] = [
            (&[], &[], &[]),
            (&[&mine, foreign], &[], &["nodemaintenance.k8s.io"]),
            (&[&mine, descheduler], &[], &["nodemaintenance.k8s.io", "descheduler.example.com"]),
            (&[evacuator], &["deployment.apps.k8s.io"], &[]),
            (&[evacuator], &[], &["deployment.apps.k8s.io"]),
        ];
        for (finalizers, classes, expected) in cases {
            let evacuation = evacuation(finalizers, classes);
            assert_eq!(evacuation.instigators().collect::<Vec<_>>(), expected);
        }
        assert!(evacuation(&[&mine], &[]).has_instigator(names::instigator::NODE_MAINTENANCE));
        let finalizers = [mine.as_str(), foreign, evacuator];
        assert_eq!(finalizers.into_iter().filter_map(subdomain).count(), 2);
    }

    #[test]
    fn cancelled_if_no_instigator_is_left_and_policy_allows() {
        let instigator = "evacuation.coordination.k8s.io/instigator_descheduler.example.com";
        let evacuator = "evacuation.coordination.k8s.io/instigator_a.example.com";
        let foreign = "example.com/cleanup";
        let cases: [(&[&str], bool); 5] = [
            (&[], true),
            (&[instigator], false),
            (&[instigator, evacuator], false),
            (&[evacuator], true),
            (&[foreign], true),
        ];
        for (finalizers, cancelled) in cases {
            for deleted in [false, true] {
                for policy in [None, Some(CancellationPolicy::Allow), Some(CancellationPolicy::Forbid)] {
                    let mut evacuation = evacuation(finalizers, &["a.example.com"]);
                    evacuation.metadata.deletion_timestamp =
                        deleted.then(|| Time("2026-11-16T10:00:00Z".parse().unwrap()));
                    evacuation.status = policy.map(|policy| EvacuationStatus {
                        evacuation_cancellation_policy: policy,
                        ..EvacuationStatus::default()
                    });
                    let expected = cancelled && policy != Some(CancellationPolicy::Forbid);
                    assert_eq!(evacuation.is_cancelled(), expected, "{finalizers:?} {deleted} {policy:?}");
                }
            }
        }
    }

    #[test]
    fn own_finalizers_are_qualified_names() {
        for name in [names::instigator::NODE_MAINTENANCE, names::instigator::TAINT_MANAGER] {
            let finalizer = finalizer(name);
            assert!(finalizer.split_once('/').unwrap().1.len() <= 63, "{finalizer}");
        }
    }

    proptest! {
        #[test]
        fn finalizer_round_trips_its_subdomain(name in "[a-z]([a-z.-]{0,50}[a-z])?") {
            let finalizer = finalizer(&name);
            prop_assert_eq!(subdomain(&finalizer), Some(name.as_str()));
        }

        #[test]
        fn other_text_is_not_an_instigator_finalizer(text in ".{0,80}") {
            prop_assume!(!text.starts_with(INSTIGATOR_FINALIZER_PREFIX));
            prop_assert_eq!(subdomain(&text), None);
        }
    }
}
