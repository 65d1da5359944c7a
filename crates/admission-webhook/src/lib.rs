//! The admission webhook: a TLS server that speaks `AdmissionReview`, and the rules it applies.

pub mod admit;
pub mod certificates;
pub mod review;
pub mod server;
pub mod service;
