//! `chart-hooks cleanup`: removes what an installation leaves in the cluster. It first deletes the RBAC bindings of the
//! services, so that they can no longer write. It then removes cordons, annotations, conditions, finalizers and
//! Evacuations, which nobody would remove after the uninstall, and gives moved pods back to their ReplicaSets.
//! NodeMaintenances and DrainRules stay: users own them.
//!
//! If an Evacuation forbids cancellation and its pod exists, the cleanup fails before it changes anything. `--force`
//! overrides this.
//!
//! The cleanup repeats passes over the whole cluster until a pass finds nothing. This also covers writes that were in
//! flight when the bindings were deleted. The cleanup can be repeated at any time.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::names::{COMPLETION_FINALIZER, TAINTS_FIRST_SEEN_ANNOTATION, instigator};
use haulout_api_types::{NodeMaintenance, names};
use haulout_drain_planner::cordon::{self, NodeMarkers};
use haulout_service_runtime::access::{Permission, lease_name};
use haulout_service_runtime::api::{Object, Operation, RequestError, Writer, Written};
use haulout_service_runtime::service::Context;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, NodeCondition, Secret};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, ListParams};
use kube::core::{ObjectList, PartialObjectMeta};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use thiserror::Error;
use tracing::info;

use crate::{evacuations, moved_pods};

/// The services of a release, by their names in the chart.
const SERVICES: [&str; 6] = [
    "admission-webhook",
    "certificate-manager",
    "evacuation-controller",
    "maintenance-controller",
    "taint-manager",
    "workload-evacuator",
];
/// Number of objects per page of a list.
const PAGE_SIZE: u32 = 500;
/// Number of concurrent requests.
pub(crate) const CONCURRENCY: usize = 16;
/// Maximum number of Evacuations that an error names.
const MAX_NAMED: usize = 10;

/// Restore nodes and remove finalizers and Evacuations; the chart runs this on uninstall
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// Release whose RBAC bindings, Leases and certificate are deleted, as `namespace.name`: the prefix of the chart's
    /// cluster-scoped objects
    #[arg(long)]
    pub release: Option<String>,

    /// Keep Evacuations for another evacuation controller, and only remove Haulout's own instigator finalizers
    #[arg(long)]
    pub keep_evacuations: bool,

    /// Also delete Evacuations that forbid cancellation and whose pods still exist
    #[arg(long)]
    pub force: bool,

    /// Give no pods back that a workload evacuator has moved to their Deployments, because there was none
    #[arg(long)]
    pub skip_pods: bool,
}

/// Why the cleanup failed.
#[derive(Debug, Error)]
pub enum CleanupError {
    /// A request to the API server failed.
    #[error("{0}; not finished, run the command again")]
    Api(#[from] RequestError),
    /// Evacuations forbid cancellation, and their pods exist.
    #[error(
        "these Evacuations forbid cancellation and their pods still exist: {evacuations}; {progress}. To continue, wait until \
         the pods have left and run the cleanup again, or run it with --force (chart value cleanup.force=true), which \
         can destroy data that an evacuator is moving"
    )]
    CancellationForbidden {
        /// Their namespaces and names.
        evacuations: String,
        /// What the cleanup has changed so far.
        progress: &'static str,
    },
}

impl CleanupError {
    /// Names the first [`MAX_NAMED`] Evacuations.
    pub(crate) fn cancellation_forbidden(evacuations: &[String], progress: &'static str) -> Self {
        let evacuations = match evacuations.split_at_checked(MAX_NAMED) {
            Some((named, others @ [_, ..])) => format!("{} and {} others", named.join(", "), others.len()),
            _ => evacuations.join(", "),
        };
        Self::CancellationForbidden { evacuations, progress }
    }
}

impl Args {
    /// The permissions that this command needs.
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
        if self.checks_cancellation() {
            needed.push(Permission::cluster("get", "", "pods"));
        }
        if !self.skip_pods {
            needed.extend(moved_pods::permissions());
        }
        if let Some((release, name)) = self.release_names() {
            for service in SERVICES {
                needed.extend([
                    Permission::cluster("delete", RBAC, "clusterrolebindings")
                        .on(&format!("{release}-{service}")),
                    Permission::own("delete", RBAC, "rolebindings").on(&format!("{name}-{service}")),
                    Permission::own("delete", "coordination.k8s.io", "leases").on(&lease_name(service)),
                ]);
            }
            needed.push(Permission::own("delete", "", "secrets").on(&certificate_name(name)));
        }
        needed
    }

    /// Whether an Evacuation that forbids cancellation is an error. Kept Evacuations are not cancelled.
    fn checks_cancellation(&self) -> bool {
        !self.keep_evacuations && !self.force
    }

    /// The name prefixes of the release's cluster-scoped and namespaced objects. A namespace name contains no dot.
    fn release_names(&self) -> Option<(&str, &str)> {
        let release = self.release.as_deref().filter(|release| !release.is_empty())?;
        Some((release, release.split_once('.').map_or(release, |(_, name)| name)))
    }
}

/// The Secret that cert-manager made, or that the webhook of an earlier version made. Helm deletes the one of the chart.
fn certificate_name(name: &str) -> String {
    format!("{name}-admission-webhook-certificate")
}

/// Cleans up until nothing is left.
pub async fn run(args: Args, context: Context) -> Result<(), CleanupError> {
    let (client, namespace) = (&context.clients.retrying, &context.namespace);
    if args.checks_cancellation() {
        let all = evacuations::list(client).await?;
        evacuations::reject_forbidden_cancellation(client, &all, "nothing was changed").await?;
    }
    if let Some((release, name)) = args.release_names() {
        for service in SERVICES {
            remove(&Api::<ClusterRoleBinding>::all(client.clone()), &format!("{release}-{service}")).await?;
            let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), namespace);
            remove(&bindings, &format!("{name}-{service}")).await?;
        }
        info!(release, "RBAC bindings deleted");
    }
    loop {
        let evacuations = clean_evacuations(client, &args).await?;
        let maintenances = clean_maintenances(client).await?;
        let nodes = clean_nodes(client).await?;
        info!(evacuations, maintenances, nodes, "cleanup pass finished");
        if evacuations + maintenances + nodes == 0 {
            break;
        }
    }
    if !args.skip_pods {
        let pods = moved_pods::give_back(client).await?;
        info!(pods, "moved pods given back to their ReplicaSets");
    }
    if let Some((_, name)) = args.release_names() {
        for service in SERVICES {
            remove(&Api::<Lease>::namespaced(client.clone(), namespace), &lease_name(service)).await?;
        }
        remove(&Api::<Secret>::namespaced(client.clone(), namespace), &certificate_name(name)).await?;
    }
    info!("cleanup complete");
    Ok(())
}

async fn remove<K>(api: &Api<K>, name: &str) -> Result<(), CleanupError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + std::fmt::Debug,
{
    let answer = api.delete(name, &DeleteParams::default()).await;
    if matches!(&answer, Err(kube::Error::Api(status)) if status.code == 404) {
        return Ok(());
    }
    // A conflict is an error too: otherwise the service would keep its permissions.
    Operation::new("delete", K::kind(&()), "", name).result(answer)?;
    Ok(())
}

/// Lists all objects of a kind, page by page. Returns none if the kind is no longer served.
pub(crate) async fn pages<T: Clone>(
    kind: &'static str,
    page: impl AsyncFn(&ListParams) -> kube::Result<ObjectList<T>>,
) -> Result<Vec<T>, CleanupError> {
    let (mut found, mut params) = (Vec::new(), ListParams::default().limit(PAGE_SIZE));
    loop {
        let page = match page(&params).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(found),
            answer => Operation::new("list", kind, "", "").result(answer)?,
        };
        found.extend(page.items);
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(found);
        }
    }
}

/// Removes the unwanted finalizers of an object. Returns `None` if it has none of them. The next pass handles conflicts.
pub(crate) async fn remove_finalizers<K>(
    writer: &Writer,
    metadata: &ObjectMeta,
    unwanted: impl Fn(&str) -> bool,
) -> Result<Option<Written<PartialObjectMeta<K>>>, CleanupError>
where
    K: Resource<DynamicType = ()>,
{
    let before = metadata.finalizers.as_deref().unwrap_or_default();
    let kept: Vec<_> = before.iter().filter(|known| !unwanted(known)).collect();
    if kept.len() == before.len() {
        return Ok(None);
    }
    Ok(Some(writer.patch(&Object::of(metadata), json!({"metadata": {"finalizers": kept}})).await?))
}

/// Deletes all Evacuations, or withdraws our own with `--keep-evacuations`.
async fn clean_evacuations(client: &Client, args: &Args) -> Result<usize, CleanupError> {
    let all = evacuations::list(client).await?;
    if args.keep_evacuations {
        let ours = [instigator::NODE_MAINTENANCE, instigator::TAINT_MANAGER, instigator::WORKLOAD_EVACUATOR];
        return evacuations::withdraw(client, &all, &ours).await;
    }
    if args.checks_cancellation() {
        // An evacuator may have forbidden cancellation since the first check. Deletions carry the version listed here.
        let progress = "the RBAC bindings of the release are deleted until its next upgrade";
        evacuations::reject_forbidden_cancellation(client, &all, progress).await?;
    }
    evacuations::delete_all(client, &all).await
}

/// Removes the completion finalizer of NodeMaintenances, so that users can delete them.
async fn clean_maintenances(client: &Client) -> Result<usize, CleanupError> {
    let (api, writer): (Api<NodeMaintenance>, _) = (Api::all(client.clone()), writer(client));
    let found = pages("nodemaintenances", async |params| api.list_metadata(params).await).await?;
    let clean = async |maintenance: &PartialObjectMeta<NodeMaintenance>| {
        let unwanted = |known: &str| known == COMPLETION_FINALIZER;
        let written = remove_finalizers::<NodeMaintenance>(&writer, &maintenance.metadata, unwanted).await?;
        Ok(written.is_some())
    };
    count(stream::iter(&found).map(clean)).await
}

/// The fields of a Node that the cleanup reads.
#[derive(Clone, Debug, Default, Deserialize, Serialize, Resource)]
#[resource(inherit = Node)]
#[serde(default)]
struct SlimNode {
    metadata: ObjectMeta,
    spec: SlimNodeSpec,
    status: SlimNodeStatus,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct SlimNodeSpec {
    #[serde(default)]
    unschedulable: bool,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct SlimNodeStatus {
    #[serde(default)]
    conditions: Vec<NodeCondition>,
}

/// Restores cordon, annotations and conditions of all nodes, as at the end of a maintenance.
async fn clean_nodes(client: &Client) -> Result<usize, CleanupError> {
    let (api, writer): (Api<SlimNode>, _) = (Api::all(client.clone()), writer(client));
    let found = Operation::new("list", "nodes", "", "").result(api.list(&ListParams::default()).await)?;
    let clean = async |node: SlimNode| {
        let object = Object::of(&node.metadata);
        let annotations = node.metadata.annotations.clone().unwrap_or_default();
        let has_taint_times = annotations.contains_key(TAINTS_FIRST_SEEN_ANNOTATION);
        let markers = NodeMarkers::new(node.spec.unschedulable, annotations, node.status.conditions);
        let mut changes = cordon::restore(&markers);
        if has_taint_times {
            changes.annotations.insert(TAINTS_FIRST_SEEN_ANNOTATION.into(), None);
        }
        // The next pass handles conflicts and deleted nodes.
        if let Some(patch) = changes.node_patch()
            && !matches!(writer.patch::<SlimNode>(&object, patch).await?, Written::Done(_))
        {
            return Ok(true);
        }
        if let Some(status) = changes.status_patch() {
            let object = Object { version: None, ..object };
            writer.patch_status_strategic::<SlimNode>(&object, status).await?;
        }
        Ok(!changes.is_empty())
    };
    count(stream::iter(found.items).map(clean)).await
}

/// A writer with the field manager of this program.
pub(crate) fn writer(client: &Client) -> Writer {
    Writer::new(client.clone(), "haulout-chart-hooks")
}

/// Runs the futures concurrently and counts how many changed something.
pub(crate) async fn count<F>(work: impl futures::Stream<Item = F>) -> Result<usize, CleanupError>
where
    F: Future<Output = Result<bool, CleanupError>>,
{
    work.buffer_unordered(CONCURRENCY)
        .try_fold(0, |sum, changed| async move { Ok(sum + usize::from(changed)) })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_first_evacuations_and_the_fix() {
        let refused = |count: usize| {
            let names: Vec<_> = (1..=count).map(|n| format!("shop/web-{n}")).collect();
            CleanupError::cancellation_forbidden(&names, "nothing was changed").to_string()
        };
        let (one, many) = (refused(1), refused(12));
        assert!(one.contains("still exist: shop/web-1; nothing was changed."), "{one}");
        assert!(one.contains("--force (chart value cleanup.force=true)"), "{one}");
        assert!(many.contains("shop/web-10 and 2 others;"), "{many}");
    }

    #[test]
    fn permissions_on_pods_follow_the_options() {
        let pods = |args: Args| args.permissions().iter().filter(|one| one.resource == "pods").count();
        assert_eq!(pods(Args::default()), 4);
        assert_eq!(pods(Args { skip_pods: true, force: true, ..Args::default() }), 0);
        let reads_pods = |args: Args| args.permissions().contains(&Permission::cluster("get", "", "pods"));
        assert!(reads_pods(Args::default()));
        assert!(!reads_pods(Args { force: true, ..Args::default() }));
        assert!(!reads_pods(Args { keep_evacuations: true, ..Args::default() }));
    }
}
