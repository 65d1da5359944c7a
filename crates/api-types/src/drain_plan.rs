//! drain_plan
