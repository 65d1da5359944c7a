//! What a leader holds in its hands: the right to act, until its deadline.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kube::Client;
use tokio_util::sync::CancellationToken;

use super::fence;
use super::moment::Moment;

/// One term of office. Once lost it never comes back: whoever leads again is given another one.
#[derive(Clone)]
pub struct Leadership(Arc<Term>);

struct Term {
    lease: String,
    identity: String,
    /// A [`Moment`] as nanoseconds; that of the past when the term has ended.
    until: AtomicU64,
    ended: CancellationToken,
}

impl Leadership {
    pub(super) fn new(lease: &str, identity: &str, until: Moment) -> Self {
        Self(Arc::new(Term {
            lease: lease.to_owned(),
            identity: identity.to_owned(),
            until: AtomicU64::new(until.as_nanos()),
            ended: CancellationToken::new(),
        }))
    }

    /// Whether leadership holds right now.
    pub fn is_held(&self) -> bool {
        self.until() > Moment::now()
    }

    /// Resolves when leadership is lost, even when nobody could tell us.
    pub async fn lost(&self) {
        loop {
            let left = self.until().left(Moment::now());
            if left.is_zero() {
                return;
            }
            tokio::select! {
                () = self.0.ended.cancelled() => return,
                () = tokio::time::sleep(left) => {}
            }
        }
    }

    /// A client that sends nothing but GET and HEAD while leadership is not held. Other requests fail with
    /// [`NotLeading`](super::NotLeading), also those that are on their way when leadership is lost.
    #[must_use]
    pub fn fence(&self, client: &Client) -> Client {
        fence::fence(client, self)
    }

    /// The Lease that it stands on, as `namespace/name`.
    pub fn lease(&self) -> &str {
        &self.0.lease
    }

    /// Who leads.
    pub fn identity(&self) -> &str {
        &self.0.identity
    }

    /// Prolongs the term; false when it has ended, because somebody may already know.
    pub(super) fn prolong(&self, until: Moment) -> bool {
        let now = Moment::now().as_nanos();
        let prolong = |before: u64| (before > now).then(|| before.max(until.as_nanos()));
        self.0.until.fetch_update(Ordering::AcqRel, Ordering::Acquire, prolong).is_ok()
    }

    pub(super) fn end(&self) {
        self.0.until.store(Moment::PAST.as_nanos(), Ordering::Release);
        self.0.ended.cancel();
    }

    fn until(&self) -> Moment {
        Moment::from_nanos(self.0.until.load(Ordering::Acquire))
    }
}

impl fmt::Debug for Leadership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Term { lease, identity, .. } = &*self.0;
        f.debug_struct("Leadership").field("lease", lease).field("identity", identity).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn held_for(duration: Duration) -> Leadership {
        Leadership::new("default/test", "me", Moment::now() + duration)
    }

    #[tokio::test]
    async fn it_is_lost_at_its_deadline_though_nobody_tells() {
        assert!(held_for(Duration::from_secs(600)).is_held());
        let leadership = held_for(Duration::from_millis(50));
        leadership.lost().await;
        assert!(!leadership.is_held());
        assert!(!leadership.prolong(Moment::now() + Duration::from_secs(10)), "what is lost stays lost");
        assert!(!leadership.is_held());
    }

    #[tokio::test]
    async fn it_can_be_prolonged_and_ended_and_all_clones_know() {
        // Long enough for a busy machine to prolong it in time.
        let held = Duration::from_secs(2);
        let leadership = held_for(held);
        let clone = leadership.clone();
        assert!(leadership.prolong(Moment::now() + Duration::from_secs(600)));
        let waiting = tokio::spawn(async move { clone.lost().await });
        let early = tokio::time::timeout(held + held / 4, leadership.lost()).await;
        assert!(early.is_err() && leadership.is_held());
        leadership.end();
        let told = tokio::time::timeout(Duration::from_secs(60), waiting).await;
        told.expect("a clone is told of the end, and not only of the deadline").unwrap();
        assert!(!leadership.is_held());
    }
}
