//! Instigator finalizers: who asked for an evacuation and still wants it, and when an evacuation is cancelled.

use crate::evacuation::{CancellationPolicy, Evacuation, Evacuator};
use crate::names::INSTIGATOR_FINALIZER_PREFIX;

/// The finalizer with which an instigator of this subdomain (at most 52 characters) marks its wish.
pub fn finalizer(subdomain: &str) -> String {
    format!("{INSTIGATOR_FINALIZER_PREFIX}{subdomain}")
}

/// The subdomain in an instigator finalizer; `None` for any other finalizer.
pub fn subdomain(finalizer: &str) -> Option<&str> {
    finalizer.strip_prefix(INSTIGATOR_FINALIZER_PREFIX).filter(|subdomain| !subdomain.is_empty())
}

/// The subdomains of the instigators among these finalizers. A finalizer of the instigator form whose subdomain is
/// one of the evacuator classes belongs to an evacuator that wants to clean up, and is no instigator's.
pub fn among<'a>(
    finalizers: impl IntoIterator<Item = &'a str>,
    evacuators: &'a [Evacuator],
) -> impl Iterator<Item = &'a str> {
    let is_evacuator = |name: &str| evacuators.iter().any(|evacuator| evacuator.evacuator_class == name);
    finalizers.into_iter().filter_map(subdomain).filter(move |name| !is_evacuator(name))
}

/// Whether an evacuation with these finalizers is cancelled: no instigator is left, and its policy allows to cancel
/// it. Only this counts. A `deletionTimestamp` does not: a deleted Evacuation goes on while an instigator's finalizer
/// is on it.
pub fn is_cancelled<'a>(
    finalizers: impl IntoIterator<Item = &'a str>,
    evacuators: &'a [Evacuator],
    policy: CancellationPolicy,
) -> bool {
    policy == CancellationPolicy::Allow && among(finalizers, evacuators).next().is_none()
}

impl Evacuation {
    fn all_finalizers(&self) -> impl Iterator<Item = &str> {
        self.metadata.finalizers.iter().flatten().map(String::as_str)
    }

    /// The subdomains of those who want this evacuation: see [`among`].
    pub fn instigators(&self) -> impl Iterator<Item = &str> {
        among(self.all_finalizers(), &self.spec.evacuators)
    }

    /// Whether the evacuation is cancelled, so that its pod stays: see [`is_cancelled`]. Evacuators stop then, and
    /// undo what they have done.
    pub fn is_cancelled(&self) -> bool {
        is_cancelled(self.all_finalizers(), &self.spec.evacuators, self.cancellation_policy())
    }

    /// Its cancellation policy, which is `Allow` until an evacuator says otherwise.
    pub fn cancellation_policy(&self) -> CancellationPolicy {
        self.status.as_ref().map(|status| status.evacuation_cancellation_policy).unwrap_or_default()
    }

    /// Whether the instigator of this subdomain wants this evacuation.
    pub fn is_wanted_by(&self, instigator: &str) -> bool {
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
    fn only_instigator_finalizers_count_and_those_of_evacuators_do_not() {
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
        assert!(evacuation(&[&mine], &[]).is_wanted_by(names::instigator::NODE_MAINTENANCE));
        let finalizers = [mine.as_str(), foreign, evacuator];
        assert_eq!(finalizers.into_iter().filter_map(subdomain).count(), 2);
    }

    #[test]
    fn cancelled_means_no_instigator_left_and_not_forbid() {
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
    fn our_own_finalizers_fit_a_qualified_name() {
        for name in [names::instigator::NODE_MAINTENANCE, names::instigator::TAINT_MANAGER] {
            let finalizer = finalizer(name);
            assert!(finalizer.split_once('/').unwrap().1.len() <= 63, "{finalizer}");
        }
    }

    proptest! {
        #[test]
        fn a_finalizer_gives_its_subdomain_back(name in "[a-z]([a-z.-]{0,50}[a-z])?") {
            let finalizer = finalizer(&name);
            prop_assert_eq!(subdomain(&finalizer), Some(name.as_str()));
        }

        #[test]
        fn no_other_text_is_taken_for_one(text in ".{0,80}") {
            prop_assume!(!text.starts_with(INSTIGATOR_FINALIZER_PREFIX));
            prop_assert_eq!(subdomain(&text), None);
        }
    }
}
