//! Haulout's drain planner: which pods leave their nodes when, how far each node and maintenance has come, and which
//! maintenance waits for which. There is no client, clock or async code in here, so that the maintenance controller and
//! whoever previews a drain come to the same conclusions.
//!
//! | question | module |
//! |---|---|
//! | what has to be known about pods, nodes and maintenances? | [`facts`], [`placement`] |
//! | in which steps does a maintenance drain? | [`plan`] |
//! | what does one look at a node find? | `assess`, `blockers`, [`waiting`] |
//! | how do nodes and maintenances get further? | [`planner`], `advance` |
//! | what do the nodes of a maintenance add up to? | `totals` |
//! | which maintenances intersect, and who waits for whom in the end? | `intersections` |
//! | can a pod of Haulout itself run elsewhere? | `places` |
//! | what is to be done and said about a node or a maintenance? | [`report`], `announce` |
//! | what is changed on a node, and put back afterwards? | [`cordon`] |
//! | how long to wait before something is done again that is undone each time? | [`pause`] |

mod advance;
mod announce;
mod assess;
mod blockers;
pub mod cordon;
pub mod facts;
mod intersections;
mod node;
pub mod pause;
pub mod placement;
mod places;
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
pub use planner::{Planner, Which};
pub use report::{Desired, MaintenancePlan, NodePlan, NodeState, Summary, list};
pub use waiting::{Awaited, Waiting, Waits};
