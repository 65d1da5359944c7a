//! Short builders for the Kubernetes objects that tests put into a cluster. They set what a test
//! is about; everything else has a value that works on KWOK nodes.

mod meta;
mod node;
mod pod;
mod workload;

pub use self::node::{NodeBuilder, node};
pub use self::pod::{PodBuilder, pod};
pub use self::workload::{DeploymentBuilder, PdbBuilder, deployment, namespace, pdb};
