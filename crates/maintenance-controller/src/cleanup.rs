//! `maintenance-controller cleanup`: the end of an installation. Takes away from the services what they need to
//! write, and then everything that they have left in the cluster, so that no cordon, mark or finalizer outlives
//! those who would remove it. NodeMaintenances and DrainRules stay: they are the users' own.
//!
//! Each pass looks at the whole cluster; the last one finds nothing, so that a write that was under way when the
//! rights were taken is found too. It can be repeated at any time.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::names::{COMPLETION_FINALIZER, TAINTS_FIRST_SEEN_ANNOTATION, instigator};
use haulout_api_types::{Evacuation, NodeMaintenance, instigators, names};
use haulout_service_runtime::access::{Permission, lease_name};
use haulout_service_runtime::service::Context;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::core::PartialObjectMeta;
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::json;
use thiserror::Error;
use tracing::info;

use crate::act::{self, Written};
use crate::cordon;
use crate::seen::{NodeSeen, SlimNode};

/// The services of a release, as the chart names them.
const SERVICES: [&str; 4] =
    ["admission-webhook", "evacuation-controller", "maintenance-controller", "taint-manager"];
/// How many objects are asked for at once, and changed at once.
const PAGE: u32 = 500;
const AT_ONCE: usize = 16;

/// Puts nodes back as they were and removes what would hang without Haulout; the chart runs this on uninstall
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// The release whose services lose their rights first, and its Leases and certificate at the end, as
    /// `namespace.name` that the chart's cluster-scoped objects begin with
    #[arg(long)]
    pub release: Option<String>,

    /// Leaves Evacuations to somebody else's evacuation controller, but for our own wish in them
    #[arg(long)]
    pub keep_evacuations: bool,
}

/// Why something is left.
#[derive(Debug, Error)]
#[error("{doing}: {source}; what was cleaned up so far stays so, and it can be repeated")]
pub struct CleanupError {
    doing: String,
    source: Box<kube::Error>,
}

fn doing<T>(answer: kube::Result<T>, what: impl FnOnce() -> String) -> Result<T, CleanupError> {
    answer.map_err(|source| CleanupError { doing: what(), source: Box::new(source) })
}

impl Args {
    /// What it has to be allowed.
    pub fn permissions(&self) -> Vec<Permission> {
        const RBAC: &str = "rbac.authorization.k8s.io";
        let mut needed = vec![
            Permission::cluster("list", names::EVACUATION_GROUP, "evacuations"),
            Permission::cluster("patch", names::EVACUATION_GROUP, "evacuations"),
            Permission::cluster("list", names::NODE_MAINTENANCE_GROUP, "nodemaintenances"),
            Permission::cluster("patch", names::NODE_MAINTENANCE_GROUP, "nodemaintenances"),
            Permission::cluster("list", "", "nodes"),
            Permission::cluster("patch", "", "nodes"),
            Permission::cluster("patch", "", "nodes/status"),
        ];
        if !self.keep_evacuations {
            needed.push(Permission::cluster("delete", names::EVACUATION_GROUP, "evacuations"));
        }
        if let Some((release, name)) = self.names() {
            for service in SERVICES {
                let binding = Permission::cluster("delete", RBAC, "clusterrolebindings");
                needed.push(binding.on(&format!("{release}-{service}")));
                let binding = Permission::own("delete", RBAC, "rolebindings");
                needed.push(binding.on(&format!("{name}-{service}")));
                let lease = Permission::own("delete", "coordination.k8s.io", "leases");
                needed.push(lease.on(&lease_name(service)));
            }
            needed.push(Permission::own("delete", "", "secrets").on(&certificate(name)));
        }
        needed
    }

    /// How the release's cluster-scoped objects begin, and its others. A namespace has no dot in its name.
    fn names(&self) -> Option<(&str, &str)> {
        let release = self.release.as_deref().filter(|release| !release.is_empty())?;
        Some((release, release.split_once('.').map_or(release, |(_, name)| name)))
    }
}

/// The Secret in which the webhook keeps its own certificate.
fn certificate(name: &str) -> String {
    format!("{name}-admission-webhook-certificate")
}

/// Cleans up, and returns when nothing is left.
pub async fn run(args: Args, context: Context) -> Result<(), CleanupError> {
    let (client, namespace) = (&context.clients.retrying, &context.namespace);
    if let Some((release, name)) = args.names() {
        for service in SERVICES {
            remove(&Api::<ClusterRoleBinding>::all(client.clone()), &format!("{release}-{service}")).await?;
            let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), namespace);
            remove(&bindings, &format!("{name}-{service}")).await?;
        }
        info!(release, "the services may not write any more");
    }
    loop {
        let evacuations = evacuations(client, args.keep_evacuations).await?;
        let maintenances = maintenances(client).await?;
        let nodes = nodes(client).await?;
        info!(evacuations, maintenances, nodes, "cleaned up");
        if evacuations + maintenances + nodes == 0 {
            break;
        }
    }
    if let Some((_, name)) = args.names() {
        for service in SERVICES {
            remove(&Api::<Lease>::namespaced(client.clone(), namespace), &lease_name(service)).await?;
        }
        remove(&Api::<Secret>::namespaced(client.clone(), namespace), &certificate(name)).await?;
    }
    info!("nothing is left");
    Ok(())
}

async fn remove<K>(api: &Api<K>, name: &str) -> Result<(), CleanupError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    match api.delete(name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        answer => doing(answer, || format!("deleting {} {name}", K::kind(&()))).map(|_| ()),
    }
}

/// The metadata of all objects of a kind; none if the kind is no longer served.
async fn all<K>(client: &Client) -> Result<Vec<PartialObjectMeta<K>>, CleanupError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let api: Api<K> = Api::all(client.clone());
    let (mut found, mut params) = (Vec::new(), ListParams::default().limit(PAGE));
    loop {
        let page = match api.list_metadata(&params).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(found),
            answer => doing(answer, || format!("listing {}", K::plural(&())))?,
        };
        found.extend(page.items);
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(found);
        }
    }
}

/// Takes finalizers off an object, if it has any of them; of others, those that it has in the version that was seen.
async fn without_finalizers<K>(
    api: &Api<K>,
    metadata: &PartialObjectMeta<K>,
    unwanted: impl Fn(&str) -> bool,
) -> Result<bool, CleanupError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let kept: Vec<_> = metadata.finalizers().iter().filter(|known| !unwanted(known)).collect();
    if kept.len() == metadata.finalizers().len() {
        return Ok(false);
    }
    let name = metadata.name_any();
    let patch = json!({"metadata": {
        "uid": metadata.uid(), "resourceVersion": metadata.resource_version(), "finalizers": kept,
    }});
    match api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(patch)).await {
        // It is gone, or somebody wrote before us: the next pass will tell.
        Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(true),
        answer => doing(answer, || format!("taking finalizers off {} {name}", K::kind(&()))).map(|_| true),
    }
}

/// Without an evacuation controller nobody would ever act on them or take finalizers off them, and they would
/// hold up the deletion of their namespaces.
async fn evacuations(client: &Client, keep: bool) -> Result<usize, CleanupError> {
    let ours = [instigator::NODE_MAINTENANCE, instigator::TAINT_MANAGER].map(instigators::finalizer);
    let unwanted = |finalizer: &str| {
        if keep {
            ours.iter().any(|our| our == finalizer)
        } else {
            instigators::subdomain(finalizer).is_some()
        }
    };
    let clean = async |evacuation: &PartialObjectMeta<Evacuation>| {
        let namespace = evacuation.namespace().unwrap_or_default();
        let api: Api<Evacuation> = Api::namespaced(client.clone(), &namespace);
        let changed = without_finalizers(&api, evacuation, unwanted).await?;
        if keep || evacuation.metadata.deletion_timestamp.is_some() {
            return Ok(changed);
        }
        let preconditions = Preconditions { uid: evacuation.uid(), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let name = evacuation.name_any();
        match api.delete(&name, &params).await {
            Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => Ok(true),
            answer => doing(answer, || format!("deleting Evacuation {namespace}/{name}")).map(|_| true),
        }
    };
    let found = all::<Evacuation>(client).await?;
    count(stream::iter(&found).map(clean)).await
}

/// They stay, but nothing hangs when they are deleted.
async fn maintenances(client: &Client) -> Result<usize, CleanupError> {
    let api: Api<NodeMaintenance> = Api::all(client.clone());
    let found = all::<NodeMaintenance>(client).await?;
    let clean = |maintenance| without_finalizers(&api, maintenance, |known| known == COMPLETION_FINALIZER);
    count(stream::iter(&found).map(clean)).await
}

/// Cordon, annotations and conditions, as at the end of every maintenance.
async fn nodes(client: &Client) -> Result<usize, CleanupError> {
    let api: Api<SlimNode> = Api::all(client.clone());
    let found = doing(api.list(&ListParams::default()).await, || "listing nodes".into())?;
    let clean = async |node: SlimNode| {
        let (name, timed) = (node.name_any(), node.annotations().contains_key(TAINTS_FIRST_SEEN_ANNOTATION));
        let seen = NodeSeen::new(node);
        let mut changes = cordon::restore(&seen.marks);
        if timed {
            changes.annotations.insert(TAINTS_FIRST_SEEN_ANNOTATION.into(), None);
        }
        let (uid, what) = (&seen.version.uid, || format!("putting node {name} back as it was"));
        let mut touched = false;
        if let Some(patch) = changes.node_patch(&seen.version.version) {
            let written = act::mark_node(client, &name, uid, patch).await;
            touched = true;
            if !matches!(doing(written, what)?, Written::Done(_)) {
                return Ok(touched);
            }
        }
        if let Some(patch) = changes.status_patch() {
            doing(act::mark_node_status(client, &name, uid, patch).await, what)?;
            touched = true;
        }
        Ok(touched)
    };
    count(stream::iter(found.items).map(clean)).await
}

/// Does so many at once, and counts those that were changed.
async fn count<F>(work: impl futures::Stream<Item = F>) -> Result<usize, CleanupError>
where
    F: Future<Output = Result<bool, CleanupError>>,
{
    work.buffer_unordered(AT_ONCE)
        .try_fold(0, |sum, changed| async move { Ok(sum + usize::from(changed)) })
        .await
}
