//! Haulout API.
