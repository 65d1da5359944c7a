//! Decides the next step for the self-managed certificate, from the Secret, the webhook configurations and the time.
//!
//! A renewal takes four steps, so that every API server trusts every replica at all times. First, the new authority is
//! staged and written into the webhook configurations. Second, when all configurations contain it, the time is
//! recorded. Third, after the propagation time, the new certificate is served. Fourth, after the overlap time, when no
//! replica serves the old certificate, its authority is removed.

use jiff::{SignedDuration, Timestamp};

use crate::configurations::Configuration;
use crate::secret::{Contents, Generation};

/// Names, lifetime and timing of certificates.
#[derive(Clone, Debug)]
pub struct Policy {
    pub names: Vec<String>,
    pub lifetime: SignedDuration,
    /// Time from writing an authority into all configurations until every API server has received it.
    pub propagation: SignedDuration,
    /// Time from promoting a certificate until every replica serves it.
    pub overlap: SignedDuration,
}

impl Policy {
    /// Watches usually deliver changes within seconds; one and ten minutes are generous. Short lifetimes, as in tests,
    /// use a fraction.
    pub fn new(names: Vec<String>, lifetime: SignedDuration) -> Self {
        let propagation = (lifetime / 20).min(SignedDuration::from_mins(1));
        let overlap = (lifetime / 10).min(SignedDuration::from_mins(10));
        Self { names, lifetime, propagation, overlap }
    }
}

/// A change to the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Restores the last good contents.
    Restore,
    /// Issues a certificate that is served at once, because there is no other one.
    Create,
    /// Issues a certificate for these names, which has to be trusted before it is served.
    Stage(Vec<String>),
    /// Records that all configurations trust the next authority.
    MarkTrusted,
    /// Serves the next certificate.
    Promote,
    /// Removes the previous authority.
    DropPrevious,
}

/// The next step, or when to decide again if nothing changes.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Now(Step),
    At(Timestamp),
}

/// Decides the next step. `found` is the content of the Secret, if it exists and is valid. `last_good` is the last
/// valid content.
pub fn decide<'a>(
    found: Option<&Contents>,
    last_good: Option<&Contents>,
    configurations: impl IntoIterator<Item = &'a Configuration>,
    policy: &Policy,
    now: Timestamp,
) -> Decision {
    let Some(store) = found else {
        let usable = last_good.is_some_and(|store| now < store.current.pair.expires);
        return Decision::Now(if usable { Step::Restore } else { Step::Create });
    };
    let next = store.next.as_ref().filter(|next| now < next.pair.expires);
    if now >= store.current.pair.expires {
        // API servers that trust the next certificate work again. The others failed before, too.
        return Decision::Now(if next.is_some() { Step::Promote } else { Step::Create });
    }
    if let Some(next) = next {
        let authority = next.issued.authority.as_bytes();
        let all_trust = configurations.into_iter().all(|configuration| configuration.trusts(authority));
        return match store.next_trusted_since.map(|since| later(since, policy.propagation)) {
            None if all_trust => Decision::Now(Step::MarkTrusted),
            Some(propagated) if now >= propagated && all_trust => Decision::Now(Step::Promote),
            Some(propagated) if now < propagated => Decision::At(propagated),
            // Wait for a configuration to change, but not longer than the current certificate is valid.
            None | Some(_) => Decision::At(store.current.pair.expires),
        };
    }
    if store.previous_authority.is_some() {
        let over = later(store.served_since, policy.overlap);
        return if now >= over { Decision::Now(Step::DropPrevious) } else { Decision::At(over) };
    }
    let known = &store.current.pair.names;
    if !policy.names.iter().all(|name| known.contains(name)) {
        // Keep the old names: during an upgrade, old replicas require them. The common name is not one of them.
        let old = known.iter().filter(|name| !policy.names.contains(name) && name.contains(['.', ':']));
        return Decision::Now(Step::Stage(policy.names.iter().chain(old).cloned().collect()));
    }
    let renewal = renewal(&store.current, policy);
    if now >= renewal { Decision::Now(Step::Stage(policy.names.clone())) } else { Decision::At(renewal) }
}

/// When a third of its lifetime is left. Certificates are backdated, so the policy's lifetime is used if it is shorter.
fn renewal(generation: &Generation, policy: &Policy) -> Timestamp {
    let own = generation.pair.expires.duration_since(generation.pair.not_before);
    generation.pair.expires.saturating_sub(own.min(policy.lifetime) / 3).unwrap_or(Timestamp::MIN)
}

fn later(time: Timestamp, by: SignedDuration) -> Timestamp {
    time.saturating_add(by).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests;
