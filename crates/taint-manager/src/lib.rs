//! The taint manager (KEP-3902): makes pods leave nodes with `NoExecute` taints. Who must leave, when and how is
//! decided by plain code over plain data, with `now` as an argument; the rest is thin.
//!
//! | question | module |
//! |---|---|
//! | which taints does a node have, and since when? | [`taint`] |
//! | for how long does a pod tolerate one? | [`toleration`] |
//! | how does a pod leave because of it? | [`policy`] |
//! | has what we see been the present for long enough to act on it? | [`sight`] |
//! | so what happens to this pod? | [`decide`] |
//! | whom does an event concern? | [`index`] |
//! | have people been told? | [`told`] |
//! | may it be done now, and what if it fails? | [`pace`] |
//! | all of that together: what is the next step for this pod? | [`manager`] |
//! | who else does the same? | [`rival`] |
//! | what are people told? | [`notice`], [`metrics`] |
//! | how is it done? | [`service`], `watch`, `policy_file`, `controller`, `act` |

mod act;
mod controller;
pub mod decide;
pub mod index;
pub mod manager;
pub mod metrics;
pub mod notice;
pub mod pace;
pub mod policy;
mod policy_file;
pub mod rival;
pub mod service;
pub mod sight;
pub mod taint;
#[cfg(test)]
mod testing;
pub mod told;
pub mod toleration;
mod watch;
