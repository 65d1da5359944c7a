//! The slim pod cache: all pods of the cluster, reduced to what our controllers read, found by UID, name
//! and node, and shared by whoever needs them in one process.
//!
//! The API server's JSON is read (`wire`, `read`) straight into a small [`Pod`] that shares
//! what is equal in many (`intern`). [`PodIndex`] finds pods and says what changed; a [watch](crate::watch)
//! keeps it equal to the API, and [`PodCache`] lets others read, subscribe, and see gaps.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use haulout_service_runtime::pods::{self, Pod};
//! use haulout_service_runtime::service::{Context, Leading};
//! use haulout_service_runtime::workers::WorkQueue;
//!
//! async fn follow(context: &Context, leading: &Leading, nodes: &WorkQueue<String>) -> Result<(), pods::FetchError> {
//!     // Clones share it, and the last one ends it.
//!     let cache = context.pod_cache();
//!     cache.ready().await;
//!
//!     // Look and let go: the cache stands still as long as this is held, so not across an `await`.
//!     let busy = cache.read().on_node("node-1").iter().any(|pod| !pod.is_finished());
//!
//!     // Deadlines that passed while we could not see are not missed ones until things have settled.
//!     let seen = cache.continuity();
//!     let settled = |ended: std::time::Instant| ended.elapsed() > Duration::from_secs(30);
//!     let trust = seen.ready && seen.gap_since.is_none() && seen.last_gap_ended.is_none_or(settled);
//!
//!     // The cache may be behind. Before something that cannot be undone, ask the API server.
//!     let now: Option<Pod> = pods::fetch(&leading.clients.direct, "shop", "web-1").await?;
//!
//!     // Begins with all pods that are there, as new ones.
//!     let mut changes = cache.subscribe();
//!     loop {
//!         for change in changes.changes().await {
//!             // A pod that was bound or has gone concerns the node that it was on, too.
//!             for node in [&change.old, &change.new].into_iter().flatten().filter_map(|pod| pod.node.as_deref()) {
//!                 nodes.add(node.to_owned());
//!             }
//!         }
//!     }
//! }
//! ```
//!
//! A pod that was deleted and made anew under its name is another pod: its UID differs, and both changes are
//! told, the old one's end first. In tests, [`Pod::from_json`] and [`PodIndex::apply`] make an index without a
//! cluster.

mod cache;
mod feed;
mod index;
mod intern;
mod pod;
mod read;
#[cfg(test)]
pub(crate) mod testing;
mod wire;

pub use self::cache::{Continuity, FetchError, PodCache, Subscriber, Subscription, fetch};
pub use self::index::{Change, PodIndex};
pub use self::intern::Interner;
pub use self::pod::{LabelSet, Owner, Phase, Pod};
pub use self::read::{NotAPod, continue_token, decode_page};
pub use haulout_api_types::tolerations::Toleration;
pub use haulout_api_types::uid::{NotAUid, Uid};
