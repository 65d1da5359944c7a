//! evacuators
