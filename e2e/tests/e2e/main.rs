//! The end-to-end tests, in one binary. `cargo xtask e2e` runs each test in its own process, with one shared control
//! plane. A test that disturbs others boots its own.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic, clippy::unwrap_used, missing_docs)]

mod admission_rules;
mod api;
mod chart;
mod demo;
mod deployments;
mod dist;
mod documentation;
mod evacuation;
mod harness;
mod installation;
mod leadership;
mod maintenance;
mod permissions;
mod pod_cache;
mod probe;
mod real_node;
mod service;
mod soak;
mod support;
mod taint_manager;
mod tilt;
mod validation;
mod watches;
mod webhook;
