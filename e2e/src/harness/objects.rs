//! Builders for Kubernetes objects in tests. Fields that a test does not set have defaults that work on KWOK nodes.

mod meta;
mod node;
mod pod;
mod workload;

pub use self::node::{NodeBuilder, node};
pub use self::pod::{PodBuilder, pod};
pub use self::workload::{DeploymentBuilder, PdbBuilder, deployment, namespace, pdb};
