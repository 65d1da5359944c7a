//! What to do next about our own certificate, from what the Secret and the configurations say and what time it is.
//!
//! A renewal takes four steps, so that every API server trusts what any replica serves at every moment: the new
//! authority is staged and put into the configurations; once all of them carry it, that is noted; some time
//! later, when every API server has seen it, the new certificate is served; and when no replica can still
//! be serving the old one, its authority goes.

use jiff::{SignedDuration, Timestamp};

use super::configurations::Configuration;
use super::secret::{Contents, Generation};

/// How certificates are to be.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    pub names: Vec<String>,
    pub lifetime: SignedDuration,
    /// From the moment that all configurations carry an authority until every API server has seen it.
    pub settle: SignedDuration,
    /// From the moment that a certificate is to be served until every replica serves it.
    pub overlap: SignedDuration,
}

impl Policy {
    /// Watches bring news within seconds; a minute and ten are for bad days. Short lives, which tests have,
    /// get their share.
    pub(super) fn new(names: Vec<String>, lifetime: SignedDuration) -> Self {
        let settle = (lifetime / 20).min(SignedDuration::from_mins(1));
        let overlap = (lifetime / 10).min(SignedDuration::from_mins(10));
        Self { names, lifetime, settle, overlap }
    }
}

/// A change to the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Puts back what it was, as we remember it.
    Restore,
    /// A new certificate that is served at once: there is none that could be served meanwhile.
    Begin,
    /// A new certificate for these names, to be trusted first.
    Stage(Vec<String>),
    /// Notes that all configurations trust the next one.
    Trusted,
    /// Serves the next one.
    Promote,
    /// No longer trusts the one before.
    Forget,
}

/// What to do, or when to ask again if nothing changes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    Now(Step),
    At(Timestamp),
}

/// Decides. `found` is what is in the Secret, if that is there and usable; `remembered` is the last that was good.
pub(super) fn decide<'a>(
    found: Option<&Contents>,
    remembered: Option<&Contents>,
    configurations: impl IntoIterator<Item = &'a Configuration>,
    policy: &Policy,
    now: Timestamp,
) -> Decision {
    let Some(store) = found else {
        let usable = remembered.is_some_and(|store| now < store.current.pair.expires);
        return Decision::Now(if usable { Step::Restore } else { Step::Begin });
    };
    let next = store.next.as_ref().filter(|next| now < next.pair.expires);
    if now >= store.current.pair.expires {
        // Whoever trusts the next one is served again; those who do not yet were not served anyhow.
        return Decision::Now(if next.is_some() { Step::Promote } else { Step::Begin });
    }
    if let Some(next) = next {
        let authority = next.issued.authority.as_bytes();
        let all_trust = configurations.into_iter().all(|configuration| configuration.trusts(authority));
        return match store.next_trusted_since.map(|since| later(since, policy.settle)) {
            None if all_trust => Decision::Now(Step::Trusted),
            Some(settled) if now >= settled && all_trust => Decision::Now(Step::Promote),
            Some(settled) if now < settled => Decision::At(settled),
            // The change of a configuration is what we wait for, but not beyond the end of the current one.
            None | Some(_) => Decision::At(store.current.pair.expires),
        };
    }
    if store.previous_authority.is_some() {
        let over = later(store.served_since, policy.overlap);
        return if now >= over { Decision::Now(Step::Forget) } else { Decision::At(over) };
    }
    let known = &store.current.pair.names;
    if !policy.names.iter().all(|name| known.contains(name)) {
        // Together with the old names: while an upgrade is under way, old replicas ask for those. The common name is
        // none of them.
        let old = known.iter().filter(|name| !policy.names.contains(name) && name.contains(['.', ':']));
        return Decision::Now(Step::Stage(policy.names.iter().chain(old).cloned().collect()));
    }
    let renewal = renewal(&store.current, policy);
    if now >= renewal { Decision::Now(Step::Stage(policy.names.clone())) } else { Decision::At(renewal) }
}

/// When a third of its life is left. It begins in the past, so that its own life says less than the policy.
fn renewal(generation: &Generation, policy: &Policy) -> Timestamp {
    let own = generation.pair.expires.duration_since(generation.pair.begins);
    generation.pair.expires.saturating_sub(own.min(policy.lifetime) / 3).unwrap_or(Timestamp::MIN)
}

fn later(time: Timestamp, by: SignedDuration) -> Timestamp {
    time.saturating_add(by).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests;
