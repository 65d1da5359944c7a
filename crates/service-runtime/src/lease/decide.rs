//! Decides what a candidate does next, without a clock and without a client.
//!
//! Three rules keep two candidates from leading at once:
//! - A leader leads until `renew_deadline` after it *sent* its last successful renewal, by its own clock.
//! - A standby waits for `lease_duration`, which is longer, after it *observed* the last renewal, by its own clock.
//! - Every write replaces one version of the Lease, so that a renewal and a takeover, or two takeovers, cannot both succeed.

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;

use super::moment::Moment;
use super::record::{duration, holder, is_renewed};
use super::timing::Timing;

/// An input of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Observation {
    /// The watch reported the Lease, or that it does not exist.
    Watched(Option<Lease>),
    /// The request in flight has ended.
    Answered(Answer),
    /// The wait of an [`Action::Wait`] has ended, or nothing has happened.
    Tick,
    /// The candidate has to release the Lease and must not claim it again.
    Resign,
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer {
    /// The written Lease.
    Written(Lease),
    /// The Lease, or `None` if it does not exist.
    Read(Option<Lease>),
    /// The Lease has changed meanwhile.
    Conflict,
    /// The Lease to replace does not exist.
    Missing,
    /// The request was rejected, failed or timed out. It may have taken effect.
    Failed,
}

/// A request to the API server. Only one is in flight at a time.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Request {
    /// Read the Lease.
    Read,
    /// Acquire or renew the Lease: replace this version, or create it if it does not exist.
    Hold(Option<Lease>),
    /// Release this version of the Lease.
    Release(Lease),
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "it is destructured immediately")]
pub(super) enum Action {
    /// Send this.
    Send(Request),
    /// Wait for an observation, at most until this moment.
    Wait(Option<Moment>),
    /// Stop: the candidate has resigned.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Standby,
    Leader { until: Moment, renew_at: Moment },
    Resigning,
}

/// The last observed state of the Lease.
#[derive(Clone, Debug)]
struct ObservedLease {
    /// `None` if it does not exist.
    lease: Option<Lease>,
    /// When a renewal by its holder was last observed.
    renewed_at: Moment,
    /// How long after that another candidate can take it over.
    takeover_after: Duration,
}

/// One candidate.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    identity: String,
    timing: Timing,
    random: fastrand::Rng,
    role: Role,
    /// `None` until the first watch event.
    observed: Option<ObservedLease>,
    /// When the request in flight was sent.
    sent: Option<Moment>,
    /// Whether the observed Lease is outdated.
    must_read: bool,
    /// Number of consecutive failed requests.
    failures: u32,
    /// The end of the backoff.
    not_before: Moment,
}

impl Candidate {
    pub fn new(identity: impl Into<String>, timing: Timing, random: fastrand::Rng) -> Self {
        Self {
            identity: identity.into(),
            timing,
            random,
            role: Role::Standby,
            observed: None,
            sent: None,
            must_read: false,
            failures: 0,
            not_before: Moment::PAST,
        }
    }

    /// Until when this candidate leads, if it does.
    pub fn leads_until(&self) -> Option<Moment> {
        match self.role {
            Role::Leader { until, .. } => Some(until),
            Role::Standby | Role::Resigning => None,
        }
    }

    /// Applies an observation and returns the next action. A returned [`Action::Send`] counts as sent at `now`, so
    /// `now` must be read before.
    pub fn decide(&mut self, observation: Observation, now: Moment) -> Action {
        // Expire first, so that a late answer does not extend the leadership.
        self.expire(now);
        self.observe(observation, now);
        self.expire(now);
        let action = self.next(now);
        if matches!(action, Action::Send(_)) {
            self.sent = Some(now);
        }
        action
    }

    fn expire(&mut self, now: Moment) {
        if self.leads_until().is_some_and(|until| now >= until) {
            self.role = Role::Standby;
        }
    }

    fn observe(&mut self, observation: Observation, now: Moment) {
        match observation {
            Observation::Tick => {}
            Observation::Resign => self.role = Role::Resigning,
            Observation::Watched(lease) => self.on_watched(lease, now),
            Observation::Answered(answer) => {
                if let Some(sent) = self.sent.take() {
                    self.on_answer(answer, sent, now);
                }
            }
        }
    }

    fn on_watched(&mut self, lease: Option<Lease>, now: Moment) {
        match &mut self.role {
            // The watch can be behind our own writes. The leader verifies the event by a renewal.
            Role::Leader { renew_at, .. } => {
                if lease.as_ref().and_then(holder) != Some(&self.identity) {
                    *renew_at = now;
                }
            }
            Role::Standby | Role::Resigning => self.update_observed(lease, now),
        }
    }

    fn on_answer(&mut self, answer: Answer, sent: Moment, now: Moment) {
        match answer {
            Answer::Written(lease) => {
                self.failures = 0;
                self.must_read = false;
                let ours = holder(&lease) == Some(&self.identity);
                self.update_observed(Some(lease), now);
                if ours && self.role != Role::Resigning {
                    let renew_at = sent + self.jittered(self.timing.renew_interval, 0.9, 1.1);
                    self.role = Role::Leader { until: sent + self.timing.renew_deadline, renew_at };
                }
            }
            Answer::Read(lease) => {
                self.must_read = false;
                self.on_read(lease, now);
            }
            Answer::Missing => self.on_read(None, now),
            Answer::Conflict => {
                self.must_read = true;
                self.failures = self.failures.saturating_add(1);
                // A single conflict is normal. Repeated conflicts mean that somebody writes the Lease continuously.
                if self.failures > 1 {
                    self.pause(now);
                }
            }
            Answer::Failed => {
                self.failures = self.failures.saturating_add(1);
                self.pause(now);
                // The request may have acquired the Lease, which then has to be released.
                self.must_read |= self.role == Role::Resigning;
            }
        }
    }

    /// Applies the current state of the Lease on the API server.
    fn on_read(&mut self, lease: Option<Lease>, now: Moment) {
        if let Role::Leader { renew_at, .. } = &mut self.role {
            match lease.as_ref().map(holder) {
                // The Lease was deleted. Nobody else can acquire it before our leadership ends, so it is created again.
                None => *renew_at = now,
                Some(holder) if holder == Some(&self.identity) => *renew_at = now,
                Some(_) => self.role = Role::Standby,
            }
        }
        self.update_observed(lease, now);
    }

    fn update_observed(&mut self, lease: Option<Lease>, now: Moment) {
        let own = Duration::from_secs(self.timing.lease_seconds().unsigned_abs().into());
        let theirs = lease.as_ref().map(duration).unwrap_or_default();
        let is_renewal = match &self.observed {
            None => true,
            Some(observed) => match (&observed.lease, &lease) {
                (Some(before), Some(after)) => is_renewed(before, after),
                (before, after) => before.is_some() != after.is_some(),
            },
        };
        match &mut self.observed {
            Some(observed) if !is_renewal => observed.lease = lease,
            // At the start, a missing Lease means a new installation, not a deleted Lease of an active leader.
            None if lease.is_none() => {
                self.observed =
                    Some(ObservedLease { lease, renewed_at: now, takeover_after: Duration::ZERO });
            }
            // Wait for the longer of the holder's lease duration and our own.
            _ => {
                let takeover_after = self.jittered(own.max(theirs), 1.0, 1.1);
                self.observed = Some(ObservedLease { lease, renewed_at: now, takeover_after });
            }
        }
    }

    fn next(&mut self, now: Moment) -> Action {
        let waiting = self.sent.is_some();
        let due = match (&self.role, &self.observed) {
            (Role::Leader { until, .. }, _) if waiting => return Action::Wait(Some(*until)),
            (_, _) if waiting => return Action::Wait(None),
            (Role::Resigning, observed) => {
                let lease = observed.as_ref().and_then(|observed| observed.lease.as_ref());
                if !self.must_read && lease.and_then(holder) != Some(&self.identity) {
                    return Action::Done;
                }
                now
            }
            (Role::Standby, None) => return Action::Wait(None),
            (_, _) if self.must_read => now,
            (Role::Leader { renew_at, .. }, _) => *renew_at,
            (Role::Standby, Some(observed)) => match observed.lease.as_ref().map(holder) {
                Some(None) => now,
                // The Lease is ours, even if it has expired: identities are unique.
                Some(Some(holder)) if holder == self.identity => now,
                Some(Some(_)) | None => observed.renewed_at + observed.takeover_after,
            },
        }
        .max(self.not_before);
        if now < due {
            let expire = self.leads_until().unwrap_or(due);
            return Action::Wait(Some(due.min(expire)));
        }
        let lease = self.observed.as_ref().and_then(|observed| observed.lease.clone());
        Action::Send(match (self.role, lease) {
            (_, _) if self.must_read => Request::Read,
            (Role::Resigning, Some(lease)) => Request::Release(lease),
            (_, lease) => Request::Hold(lease),
        })
    }

    fn pause(&mut self, now: Moment) {
        let doublings = self.failures.saturating_sub(1).min(10);
        let pause = self.timing.retry_period.saturating_mul(1 << doublings).min(self.timing.renew_interval);
        self.not_before = now + self.jittered(pause, 0.5, 1.0);
    }

    fn jittered(&mut self, duration: Duration, from: f64, to: f64) -> Duration {
        duration.mul_f64(from + (to - from) * self.random.f64())
    }
}
