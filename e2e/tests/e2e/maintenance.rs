//! The maintenance controller on a real control plane, beside the evacuation controller. Each test has a cluster of
//! its own, because the controller acts on all maintenances that there are; the scenarios in it keep to namespaces,
//! nodes and maintenances of their own, and take place at once.

mod life;
mod overlaps;
mod rules;
pub(crate) mod scene;
mod status;
mod trouble;
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

use self::scene::{SOON, Scene, World, condition, condition_of, drain, is, is_cordoned, is_marked, slow};
