//! The runtime that all Haulout services share: startup, clients, leader election, watches, work queues, pod cache, eviction,
//! events, metrics and shutdown.

pub mod access;
pub mod api;
pub mod certificate;
pub mod clients;
pub mod clock;
mod error_chain;
pub mod events;
pub mod eviction;
pub mod lease;
mod lenient_json;
pub mod metrics;
pub mod pods;
pub mod queue;
pub mod server;
pub mod service;
pub mod telemetry;
pub mod term;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod watch;
pub mod workers;
