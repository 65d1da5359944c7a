//! One term of leadership, which ends at its deadline unless it is extended.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kube::Client;
use tokio_util::sync::CancellationToken;

use super::fence;
use super::moment::Moment;

/// One term of leadership. After it has ended, it never becomes valid again. The next term has another `Leadership`.
#[derive(Clone)]
pub struct Leadership(Arc<Inner>);

struct Inner {
    lease: String,
    identity: String,
    /// A [`Moment`] in nanoseconds. [`Moment::PAST`] if the term has ended.
    until: AtomicU64,
    ended: CancellationToken,
}

impl Leadership {
    pub(super) fn new(lease: &str, identity: &str, until: Moment) -> Self {
        Self(Arc::new(Inner {
            lease: lease.to_owned(),
            identity: identity.to_owned(),
            until: AtomicU64::new(until.as_nanos()),
            ended: CancellationToken::new(),
        }))
    }

    /// Whether this term is valid now.
    pub fn is_held(&self) -> bool {
        self.until() > Moment::now()
    }

    /// Resolves when leadership is lost, at the latest at the deadline.
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

    /// A client that sends only GET and HEAD requests without leadership. Other requests fail with
    /// [`NotLeading`](super::NotLeading), including those in flight when leadership is lost.
    #[must_use]
    pub fn fence(&self, client: &Client) -> Client {
        fence::fence(client, self)
    }

    /// The Lease, as `namespace/name`.
    pub fn lease(&self) -> &str {
        &self.0.lease
    }

    /// The identity of the leader.
    pub fn identity(&self) -> &str {
        &self.0.identity
    }

    /// Extends the term. Returns false if it has ended, because it must not become valid again.
    pub(super) fn extend(&self, until: Moment) -> bool {
        let now = Moment::now().as_nanos();
        let extend = |before: u64| (before > now).then(|| before.max(until.as_nanos()));
        self.0.until.fetch_update(Ordering::AcqRel, Ordering::Acquire, extend).is_ok()
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
        let Inner { lease, identity, .. } = &*self.0;
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
    async fn leadership_ends_at_its_deadline() {
        assert!(held_for(Duration::from_secs(600)).is_held());
        let leadership = held_for(Duration::from_millis(50));
        leadership.lost().await;
        assert!(!leadership.is_held());
        assert!(!leadership.extend(Moment::now() + Duration::from_secs(10)), "what is lost stays lost");
        assert!(!leadership.is_held());
    }

    #[tokio::test]
    async fn clones_share_extension_and_end() {
        // Long enough for a busy machine to extend it in time.
        let held = Duration::from_secs(2);
        let leadership = held_for(held);
        let clone = leadership.clone();
        assert!(leadership.extend(Moment::now() + Duration::from_secs(600)));
        let waiting = tokio::spawn(async move { clone.lost().await });
        let early = tokio::time::timeout(held + held / 4, leadership.lost()).await;
        assert!(early.is_err() && leadership.is_held());
        leadership.end();
        let ended = tokio::time::timeout(Duration::from_secs(60), waiting).await;
        ended.expect("a clone waits for the end, not only for the deadline").unwrap();
        assert!(!leadership.is_held());
    }
}
