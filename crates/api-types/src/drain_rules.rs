//! drain_rules
