//! instigators
