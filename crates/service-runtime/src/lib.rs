//! What every Haulout service stands on, so that a service crate holds nothing but its own decisions.

pub mod lease;
pub mod pods;
