//! `chart-hooks cleanup`: the end of an installation. Takes away from the services what they need to
//! write, and then everything that they have left in the cluster, so that no cordon, mark or finalizer outlives
//! those who would remove it. NodeMaintenances and DrainRules stay: they are the users' own.
//!
//! An evacuator that cannot stop half-way says so in its Evacuation. As long as such a pod is there nothing is
//! changed, unless somebody insists.
//!
//! Each pass looks at the whole cluster; the last one finds nothing, so that a write that was under way when the
//! rights were taken is found too. It can be repeated at any time.

use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::names::{COMPLETION_FINALIZER, TAINTS_FIRST_SEEN_ANNOTATION, instigator};
use haulout_api_types::{NodeMaintenance, names};
use haulout_drain_planner::cordon::{self, NodeMarks};
use haulout_service_runtime::access::{Permission, lease_name};
use haulout_service_runtime::api::{Doing, Object, RequestError, Writer, Written};
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

use crate::evacuations;

/// The services of a release, as the chart names them.
const SERVICES: [&str; 4] =
    ["admission-webhook", "evacuation-controller", "maintenance-controller", "taint-manager"];
/// How many objects are asked for at once, and changed at once.
const PAGE: u32 = 500;
pub(crate) const AT_ONCE: usize = 16;
/// How many Evacuations an error names.
const NAMED: usize = 10;

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

    /// Cancels Evacuations that forbid it, too, although their pods are still there
    #[arg(long)]
    pub force: bool,
}

/// Why something is left.
#[derive(Debug, Error)]
pub enum CleanupError {
    /// The API server refused, or did not answer.
    #[error("{0}; what was cleaned up so far stays so, and it can be repeated")]
    Api(#[from] RequestError),
    /// Evacuators are at work that cannot stop half-way.
    #[error(
        "evacuators of these Evacuations forbid cancellation and the pods are still there: {evacuations}; {so_far}. \
         To go on, wait until the pods have left and run this again, or run it with --force (chart value \
         cleanup.force=true), which can destroy what is being moved"
    )]
    PastRecall {
        /// Their names.
        evacuations: String,
        /// What has been changed before this was found.
        so_far: &'static str,
    },
}

impl CleanupError {
    /// Names not more Evacuations than a reader takes in.
    pub(crate) fn past_recall(evacuations: &[String], so_far: &'static str) -> Self {
        let evacuations = match evacuations.split_at_checked(NAMED) {
            Some((named, others @ [_, ..])) => format!("{} and {} others", named.join(", "), others.len()),
            _ => evacuations.join(", "),
        };
        Self::PastRecall { evacuations, so_far }
    }
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
        if self.asks_first() {
            needed.push(Permission::cluster("get", "", "pods"));
        }
        if let Some((release, name)) = self.names() {
            for service in SERVICES {
                needed.extend([
                    Permission::cluster("delete", RBAC, "clusterrolebindings")
                        .on(&format!("{release}-{service}")),
                    Permission::own("delete", RBAC, "rolebindings").on(&format!("{name}-{service}")),
                    Permission::own("delete", "coordination.k8s.io", "leases").on(&lease_name(service)),
                ]);
            }
            needed.push(Permission::own("delete", "", "secrets").on(&certificate(name)));
        }
        needed
    }

    /// Whether an Evacuation that forbids cancellation stops it. One that is kept is not cancelled.
    fn asks_first(&self) -> bool {
        !self.keep_evacuations && !self.force
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
    if args.asks_first() {
        let all = evacuations::list(client).await?;
        evacuations::refuse_past_recall(client, &all, "nothing has been changed").await?;
    }
    if let Some((release, name)) = args.names() {
        for service in SERVICES {
            remove(&Api::<ClusterRoleBinding>::all(client.clone()), &format!("{release}-{service}")).await?;
            let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), namespace);
            remove(&bindings, &format!("{name}-{service}")).await?;
        }
        info!(release, "the services may not write any more");
    }
    loop {
        let evacuations = end_evacuations(client, &args).await?;
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
    let answer = api.delete(name, &DeleteParams::default()).await;
    if matches!(&answer, Err(kube::Error::Api(status)) if status.code == 404) {
        return Ok(());
    }
    // Not even a conflict may leave it there: then nobody would lose their rights.
    Doing::new("delete", K::kind(&()), "", name).result(answer)?;
    Ok(())
}

/// All objects of a kind, page by page; none if the kind is no longer served.
pub(crate) async fn pages<T: Clone>(
    kind: &'static str,
    page: impl AsyncFn(&ListParams) -> kube::Result<ObjectList<T>>,
) -> Result<Vec<T>, CleanupError> {
    let (mut found, mut params) = (Vec::new(), ListParams::default().limit(PAGE));
    loop {
        let page = match page(&params).await {
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(found),
            answer => Doing::new("list", kind, "", "").result(answer)?,
        };
        found.extend(page.items);
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(found);
        }
    }
}

/// Takes finalizers off an object, if it has any of them; `None` if it has none. If the object is gone or somebody wrote
/// before us, the next pass will tell.
pub(crate) async fn without_finalizers<K>(
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

/// Deletes Evacuations, or withdraws our own where somebody else's evacuation controller goes on.
async fn end_evacuations(client: &Client, args: &Args) -> Result<usize, CleanupError> {
    let all = evacuations::list(client).await?;
    if args.keep_evacuations {
        let ours = [instigator::NODE_MAINTENANCE, instigator::TAINT_MANAGER];
        return evacuations::withdraw(client, &all, &ours).await;
    }
    if args.asks_first() {
        // An evacuator may have come to this point since: what is deleted is what was seen here.
        let so_far = "the services of the release may not write any more, until it is upgraded";
        evacuations::refuse_past_recall(client, &all, so_far).await?;
    }
    evacuations::end(client, &all).await
}

/// They stay, but nothing hangs when they are deleted.
async fn maintenances(client: &Client) -> Result<usize, CleanupError> {
    let (api, writer): (Api<NodeMaintenance>, _) = (Api::all(client.clone()), writer(client));
    let found = pages("nodemaintenances", async |params| api.list_metadata(params).await).await?;
    let clean = async |maintenance: &PartialObjectMeta<NodeMaintenance>| {
        let unwanted = |known: &str| known == COMPLETION_FINALIZER;
        let written = without_finalizers::<NodeMaintenance>(&writer, &maintenance.metadata, unwanted).await?;
        Ok(written.is_some())
    };
    count(stream::iter(&found).map(clean)).await
}

/// A Node, as far as it is read.
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

/// Cordon, annotations and conditions, as at the end of every maintenance.
async fn nodes(client: &Client) -> Result<usize, CleanupError> {
    let (api, writer): (Api<SlimNode>, _) = (Api::all(client.clone()), writer(client));
    let found = Doing::new("list", "nodes", "", "").result(api.list(&ListParams::default()).await)?;
    let clean = async |node: SlimNode| {
        let object = Object::of(&node.metadata);
        let annotations = node.metadata.annotations.clone().unwrap_or_default();
        let timed = annotations.contains_key(TAINTS_FIRST_SEEN_ANNOTATION);
        let marks = NodeMarks::new(node.spec.unschedulable, annotations, node.status.conditions);
        let mut changes = cordon::restore(&marks);
        if timed {
            changes.annotations.insert(TAINTS_FIRST_SEEN_ANNOTATION.into(), None);
        }
        // Where a node is gone or somebody wrote before us, the next pass will tell.
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

/// Writes as this program.
pub(crate) fn writer(client: &Client) -> Writer {
    Writer::new(client.clone(), "haulout-chart-hooks")
}

/// Does so many at once, and counts those that were changed.
pub(crate) async fn count<F>(work: impl futures::Stream<Item = F>) -> Result<usize, CleanupError>
where
    F: Future<Output = Result<bool, CleanupError>>,
{
    work.buffer_unordered(AT_ONCE)
        .try_fold(0, |sum, changed| async move { Ok(sum + usize::from(changed)) })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_names_a_few_evacuations_and_the_way_out() {
        let refused = |count: usize| {
            let names: Vec<_> = (1..=count).map(|n| format!("shop/web-{n}")).collect();
            CleanupError::past_recall(&names, "nothing has been changed").to_string()
        };
        let (one, many) = (refused(1), refused(12));
        assert!(one.contains("still there: shop/web-1; nothing has been changed."), "{one}");
        assert!(one.contains("--force (chart value cleanup.force=true)"), "{one}");
        assert!(many.contains("shop/web-10 and 2 others;"), "{many}");
    }

    #[test]
    fn only_who_asks_first_may_look_at_pods() {
        let looks = |args: Args| args.permissions().contains(&Permission::cluster("get", "", "pods"));
        assert!(looks(Args::default()));
        assert!(!looks(Args { force: true, ..Args::default() }));
        assert!(!looks(Args { keep_evacuations: true, ..Args::default() }));
    }
}
