//! What every Haulout service stands on, so that a service crate holds nothing but its own decisions.

pub mod access;
pub mod api;
mod causes;
pub mod clients;
pub mod clock;
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
