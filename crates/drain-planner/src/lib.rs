//! Haulout's drain planner decides which pods leave their nodes when, how far each node and maintenance has progressed, and
//! which maintenance waits for which. It has no client, no clock and no async code.
//!
//! | question | module |
//! |---|---|
//! | which facts about pods, nodes and maintenances does it use? | [`facts`], [`placement`] |
//! | in which steps does a maintenance drain? | [`plan`] |
//! | what is the state of one node and its pods? | `assess`, `blockers`, [`waiting`] |
//! | how do nodes and maintenances progress? | [`planner`], `advance` |
//! | what is the sum over the nodes of a maintenance? | `totals` |
//! | which maintenances intersect, and which one waits for which? | `intersections` |
//! | can one of Haulout's own pods run on another node? | `own_pods` |
//! | what is written and reported about a node or a maintenance? | [`report`], `announce` |
//! | what is changed on a node, and restored afterwards? | [`cordon`] |
//! | how long is the delay before an action is repeated that somebody reverts? | [`backoff`] |

mod advance;
mod announce;
mod assess;
pub mod backoff;
mod blockers;
pub mod cordon;
pub mod facts;
mod intersections;
mod node;
mod own_pods;
pub mod placement;
pub mod plan;
pub mod planner;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod reference;
pub mod report;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod totals;
pub mod waiting;

pub use assess::Counts;
pub use blockers::Blocker;
pub use planner::{Planner, PodScope};
pub use report::{Desired, MaintenancePlan, NodePlan, NodeState, Summary, list};
pub use waiting::{WaitCounts, WaitReason, WaitingPod};
