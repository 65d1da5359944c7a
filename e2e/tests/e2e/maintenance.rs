//! The maintenance controller on a real control plane, together with the evacuation controller. Each test has its own
//! cluster, because the controller handles all maintenances. The scenarios of a test use their own namespaces, nodes
//! and maintenances, and run at the same time.

mod faults;
mod gitops;
mod lifecycle;
mod overlaps;
mod rules;
pub(crate) mod scenario;
mod status;
mod volumes;
mod waiting;

use std::collections::BTreeSet;

use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, NodeMaintenance, names};
use haulout_e2e::objects::PodBuilder;
use haulout_e2e::{objects, wait};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::{Value, json};

use crate::support::{all_at_once, one_by_one, scenarios};

use self::scenario::{
    SOON, Scenario, TestEnv, condition, condition_of, drain, is, is_cordoned, is_marked, slow,
};
