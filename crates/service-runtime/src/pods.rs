//! The slim pod cache: all pods of the cluster, reduced to what our controllers read, found by UID, name
//! and node, and shared by whoever needs them in one process.
//!
//! The API server's JSON is read (`forgiving`, `wire`, `read`) straight into a small [`Pod`] that shares
//! what is equal in many (`intern`). [`PodIndex`] finds pods and says what changed; `watch` keeps it equal
//! to the API, and [`PodCache`] lets others read, subscribe, and see gaps.

mod cache;
mod feed;
mod forgiving;
mod index;
mod intern;
mod pod;
mod read;
mod request;
#[cfg(test)]
mod testing;
mod watch;
mod wire;

pub use self::cache::{Continuity, Options, PodCache, Subscription, fetch};
pub use self::index::{Change, PodIndex};
pub use self::pod::{LabelSet, NotAUid, Owner, Phase, Pod, Toleration, Uid};
pub use self::read::{NotAPod, continue_token, decode_page};
pub use self::request::Error;
