//! The slim pod cache.
