//! What is run on a real Kubernetes control plane: the [harness] that boots one, for the demo and the end-to-end tests too,
//! [benchmarks](mod@bench) and [fault campaigns](soak).

pub mod bench;
pub mod harness;
pub mod soak;

pub use harness::*;
