//! A real Kubernetes control plane on loopback.
//!
//! [`Cluster`] boots and owns one; [`Handle`] is what a test needs to talk to it and also works from
//! another process. [`Service`] runs a service of ours beside it. [`objects`] makes things to put in, [`wait`] waits for what
//! comes of it and [`requests`] counts what it cost.

pub mod cluster;
pub mod etcd;
pub(crate) mod fleet;
pub mod forwarder;
pub mod handle;
pub mod image;
pub mod kubeconfig;
pub mod nodes;
pub mod objects;
pub mod pki;
pub mod process;
pub mod real_node;
pub mod requests;
pub mod rights;
pub mod service;
pub mod tools;
pub mod wait;
pub mod webhook;

pub use cluster::{Builder, Cluster, Component, Exit};
pub use forwarder::Forwarder;
pub use handle::Handle;
pub use process::{Command, Output, Process};
pub use real_node::RealNode;
pub use requests::{Mark, Requests};
pub use service::Service;
pub use tools::{Kubernetes, Tools};
pub use webhook::Webhook;

/// The root of the repository. A test or command that `cargo xtask` started is given it: it may have been compiled in another
/// clone.
pub fn repository() -> std::path::PathBuf {
    let given = std::env::var_os("HAULOUT_ROOT");
    given.map_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/..").into(), Into::into)
}
