//! Leadership on a Lease.
