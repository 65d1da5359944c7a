//! What a candidate does next: plain data in, plain data out, no clock and no client.
//!
//! Three rules keep two candidates from leading at once:
//! - A leader holds until `act_for` after it *sent* its last successful renewal, by its own clock.
//! - A standby counts `lease_duration`, which is longer, from when it *saw* the last renewal, by its own.
//! - Every write replaces one version of the Lease, so that a renewal and a take-over, or two
//!   take-overs, cannot both succeed.

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;

use super::moment::Moment;
use super::record::{duration, holder, is_renewed};
use super::timing::Timing;

/// What a candidate hears.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Observation {
    /// The watch showed the Lease, or that there is none.
    Watched(Option<Lease>),
    /// The request on its way has come to an end.
    Answered(Answer),
    /// The moment of an [`Action::Wait`] has come, or nothing has happened.
    Tick,
    /// The candidate is to give the Lease up and to claim it no more.
    Resign,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer {
    /// The Lease as it was written.
    Written(Lease),
    /// The Lease as it was read, or that there is none.
    Read(Option<Lease>),
    /// Somebody else has written in between.
    Conflict,
    /// The Lease that was to be replaced does not exist.
    Missing,
    /// Refused, failed or not answered in time: it may have been done all the same.
    Failed,
}

/// A request to the API server; only one is on its way at a time.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Request {
    /// Read the Lease.
    Read,
    /// Hold the Lease: replace this version, or make it when there is none.
    Hold(Option<Lease>),
    /// Give up this version of the Lease.
    Release(Lease),
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "it is taken apart where it is returned")]
pub(super) enum Action {
    /// Send this.
    Send(Request),
    /// Nothing until something is heard, or until this moment.
    Wait(Option<Moment>),
    /// Nothing any more: the candidate has resigned.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Standby,
    Leader { until: Moment, renew_at: Moment },
    Leaving,
}

/// The Lease as last heard of.
#[derive(Clone, Debug)]
struct Seen {
    /// `None` when it does not exist.
    lease: Option<Lease>,
    /// When its holder was last seen to write it.
    changed: Moment,
    /// How long after that it may be taken from its holder.
    patience: Duration,
}

/// One candidate.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    me: String,
    timing: Timing,
    random: fastrand::Rng,
    role: Role,
    /// `None` until the watch has shown something.
    seen: Option<Seen>,
    /// When the request on its way was sent.
    sent: Option<Moment>,
    /// What we know of the Lease is out of date.
    must_read: bool,
    /// How many requests have failed in a row.
    failures: u32,
    /// The pause after a failure.
    not_before: Moment,
}

impl Candidate {
    pub fn new(me: impl Into<String>, timing: Timing, random: fastrand::Rng) -> Self {
        Self {
            me: me.into(),
            timing,
            random,
            role: Role::Standby,
            seen: None,
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
            Role::Standby | Role::Leaving => None,
        }
    }

    /// Takes in what was heard and says what to do next. A returned [`Action::Send`] counts as sent
    /// at `now`, so that `now` must have been read before.
    pub fn decide(&mut self, observation: Observation, now: Moment) -> Action {
        // Before anything else: news that comes too late prolongs nothing.
        self.lapse(now);
        self.observe(observation, now);
        self.lapse(now);
        let action = self.next(now);
        if matches!(action, Action::Send(_)) {
            self.sent = Some(now);
        }
        action
    }

    fn lapse(&mut self, now: Moment) {
        if self.leads_until().is_some_and(|until| now >= until) {
            self.role = Role::Standby;
        }
    }

    fn observe(&mut self, observation: Observation, now: Moment) {
        match observation {
            Observation::Tick => {}
            Observation::Resign => self.role = Role::Leaving,
            Observation::Watched(lease) => self.watched(lease, now),
            Observation::Answered(answer) => {
                if let Some(sent) = self.sent.take() {
                    self.answered(answer, sent, now);
                }
            }
        }
    }

    fn watched(&mut self, lease: Option<Lease>, now: Moment) {
        match &mut self.role {
            // A watch may be behind our own writes, so that a leader does not believe it, but looks.
            Role::Leader { renew_at, .. } => {
                if lease.as_ref().and_then(holder) != Some(&self.me) {
                    *renew_at = now;
                }
            }
            Role::Standby | Role::Leaving => self.see(lease, now),
        }
    }

    fn answered(&mut self, answer: Answer, sent: Moment, now: Moment) {
        match answer {
            Answer::Written(lease) => {
                self.failures = 0;
                self.must_read = false;
                let ours = holder(&lease) == Some(&self.me);
                self.see(Some(lease), now);
                if ours && self.role != Role::Leaving {
                    let renew_at = sent + self.jittered(self.timing.renew_every, 0.9, 1.1);
                    self.role = Role::Leader { until: sent + self.timing.act_for, renew_at };
                }
            }
            Answer::Read(lease) => {
                self.must_read = false;
                self.found(lease, now);
            }
            Answer::Missing => self.found(None, now),
            Answer::Conflict => {
                self.must_read = true;
                self.failures = self.failures.saturating_add(1);
                // One conflict is everyday life; more in a row are somebody who is at it all the time.
                if self.failures > 1 {
                    self.pause(now);
                }
            }
            Answer::Failed => {
                self.failures = self.failures.saturating_add(1);
                self.pause(now);
                // It may have made us the holder, and then there is something to give up.
                self.must_read |= self.role == Role::Leaving;
            }
        }
    }

    /// The Lease as the API server knows it now.
    fn found(&mut self, lease: Option<Lease>, now: Moment) {
        if let Role::Leader { renew_at, .. } = &mut self.role {
            match lease.as_ref().map(holder) {
                // Deleted: nobody else may have it before we would have lost it, so that it is made anew.
                None => *renew_at = now,
                Some(holder) if holder == Some(&self.me) => *renew_at = now,
                Some(_) => self.role = Role::Standby,
            }
        }
        self.see(lease, now);
    }

    fn see(&mut self, lease: Option<Lease>, now: Moment) {
        let own = Duration::from_secs(self.timing.lease_seconds().unsigned_abs().into());
        let theirs = lease.as_ref().map(duration).unwrap_or_default();
        let changed = match &self.seen {
            None => true,
            Some(seen) => match (&seen.lease, &lease) {
                (Some(before), Some(after)) => is_renewed(before, after),
                (before, after) => before.is_some() != after.is_some(),
            },
        };
        match &mut self.seen {
            Some(seen) if !changed => seen.lease = lease,
            // The first that we see is that there is none: a new installation, and not a Lease
            // that was deleted under its leader.
            None if lease.is_none() => {
                self.seen = Some(Seen { lease, changed: now, patience: Duration::ZERO });
            }
            // A holder with another timing is waited for as long as it wants, and never shorter than
            // we would want ourselves.
            _ => {
                let patience = self.jittered(own.max(theirs), 1.0, 1.1);
                self.seen = Some(Seen { lease, changed: now, patience });
            }
        }
    }

    fn next(&mut self, now: Moment) -> Action {
        let waiting = self.sent.is_some();
        let due = match (&self.role, &self.seen) {
            (Role::Leader { until, .. }, _) if waiting => return Action::Wait(Some(*until)),
            (_, _) if waiting => return Action::Wait(None),
            (Role::Leaving, seen) => {
                let lease = seen.as_ref().and_then(|seen| seen.lease.as_ref());
                if !self.must_read && lease.and_then(holder) != Some(&self.me) {
                    return Action::Done;
                }
                now
            }
            (Role::Standby, None) => return Action::Wait(None),
            (_, _) if self.must_read => now,
            (Role::Leader { renew_at, .. }, _) => *renew_at,
            (Role::Standby, Some(seen)) => match seen.lease.as_ref().map(holder) {
                Some(None) => now,
                // Ours alone, though it may have lapsed: nobody else has this identity.
                Some(Some(holder)) if holder == self.me => now,
                Some(Some(_)) | None => seen.changed + seen.patience,
            },
        }
        .max(self.not_before);
        if now < due {
            let lapse = self.leads_until().unwrap_or(due);
            return Action::Wait(Some(due.min(lapse)));
        }
        let lease = self.seen.as_ref().and_then(|seen| seen.lease.clone());
        Action::Send(match (self.role, lease) {
            (_, _) if self.must_read => Request::Read,
            (Role::Leaving, Some(lease)) => Request::Release(lease),
            (_, lease) => Request::Hold(lease),
        })
    }

    fn pause(&mut self, now: Moment) {
        let doublings = self.failures.saturating_sub(1).min(10);
        let pause = self.timing.retry_after.saturating_mul(1 << doublings).min(self.timing.renew_every);
        self.not_before = now + self.jittered(pause, 0.5, 1.0);
    }

    fn jittered(&mut self, duration: Duration, from: f64, to: f64) -> Duration {
        duration.mul_f64(from + (to - from) * self.random.f64())
    }
}
