//! The pod cache: all pods of the cluster, reduced to the fields that controllers read. It finds pods by UID, name and node,
//! and is shared within a process.
//!
//! The API server's JSON is parsed (`wire`, `read`) directly into a small [`Pod`]. Equal parts of pods are stored once
//! (`intern`). [`PodIndex`] finds pods and returns changes. A [watch](crate::watch) keeps it up to date. [`PodCache`] offers
//! read access, subscriptions and information about watch gaps.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use haulout_service_runtime::pods::{self, Pod};
//! use haulout_service_runtime::service::{Context, LeaderContext};
//! use haulout_service_runtime::workers::WorkQueue;
//!
//! async fn watch_pods(
//!     context: &Context,
//!     leading: &LeaderContext,
//!     nodes: &WorkQueue<String>,
//! ) -> Result<(), pods::FetchError> {
//!     // Clones share one cache. The watch ends when the last clone is dropped.
//!     let cache = context.pod_cache();
//!     cache.ready().await;
//!
//!     // The guard blocks updates of the cache: do not hold it across an `await`.
//!     let busy = cache.read().on_node("node-1").iter().any(|pod| !pod.is_finished());
//!
//!     // Deadlines that passed during a watch gap count only after a grace period.
//!     let continuity = cache.continuity();
//!     let is_over = |ended: std::time::Instant| ended.elapsed() > Duration::from_secs(30);
//!     let current = continuity.ready
//!         && continuity.gap_since.is_none()
//!         && continuity.last_gap_ended.is_none_or(is_over);
//!
//!     // The cache can be outdated. Before an irreversible action, read from the API server.
//!     let now: Option<Pod> = pods::fetch(&leading.clients.direct, "shop", "web-1").await?;
//!
//!     // The first changes are all existing pods, as new ones.
//!     let mut changes = cache.subscribe();
//!     loop {
//!         for change in changes.changes().await {
//!             // A change affects the pod's old and new node.
//!             for node in [&change.old, &change.new].into_iter().flatten().filter_map(|pod| pod.node.as_deref()) {
//!                 nodes.add(node.to_owned());
//!             }
//!         }
//!     }
//! }
//! ```
//!
//! A new pod with the same name is a different pod with another UID. Subscribers receive both changes, the deletion first. In
//! tests, [`Pod::from_json`] and [`PodIndex::apply`] build an index without a cluster.

mod cache;
#[cfg(test)]
mod fuzz;
mod index;
mod intern;
mod pod;
mod read;
mod subscription;
#[cfg(test)]
pub(crate) mod testing;
mod wire;

pub use self::cache::{Continuity, FetchError, PodCache, Subscriber, Subscription, fetch};
pub use self::index::{Change, PodIndex};
pub use self::intern::Interner;
pub use self::pod::{LabelSet, Owner, Phase, Pod};
pub use self::read::{InvalidPod, continue_token, decode_page};
pub use haulout_api_types::tolerations::Toleration;
pub use haulout_api_types::uid::{InvalidUid, Uid};
