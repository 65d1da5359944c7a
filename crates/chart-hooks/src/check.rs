//! `chart-hooks check`: whether an installation works, for `helm test`. Each controller is asked for by
//! watching its leader renew its Lease, and the webhook by a maintenance that only it refuses.

use std::pin::pin;
use std::time::Duration;

use futures::TryStreamExt as _;
use haulout_api_types::{NodeMaintenance, names};
use haulout_service_runtime::access::{Permission, lease_name};
use haulout_service_runtime::service::Context;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::PostParams;
use kube::runtime::watcher;
use serde_json::json;
use tracing::info;

/// Looks whether an installation works; the chart runs this on `helm test`
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// A service that must have a leader at work, such as evacuation-controller; repeat for more
    #[arg(long = "leader")]
    pub leaders: Vec<String>,

    /// Asks the admission webhook too
    #[arg(long)]
    pub webhook: bool,

    /// For how many seconds each of them is waited for
    #[arg(long, default_value_t = 60)]
    pub within_seconds: u64,
}

impl Args {
    /// What it has to be allowed.
    pub fn permissions(&self) -> Vec<Permission> {
        let lease = |verb, service: &String| {
            Permission::own(verb, "coordination.k8s.io", "leases").on(&lease_name(service))
        };
        let leases =
            self.leaders.iter().flat_map(|service| ["list", "watch"].map(|verb| lease(verb, service)));
        let webhook = Permission::cluster("create", names::NODE_MAINTENANCE_GROUP, "nodemaintenances");
        leases.chain(self.webhook.then_some(webhook)).collect()
    }
}

/// Checks everything; the first thing that does not work is the error.
pub async fn run(args: Args, context: Context) -> Result<(), String> {
    let limit = Duration::from_secs(args.within_seconds);
    for service in &args.leaders {
        let renewed = tokio::time::timeout(limit, renewed(&context, service)).await;
        let seconds = args.within_seconds;
        let silent =
            |_| format!("no leader of {service} has renewed its Lease within {seconds} s: do its pods run?");
        let holder = renewed.map_err(silent)??;
        info!(service, holder, "leads");
    }
    if args.webhook {
        webhook(&context).await?;
        info!("the webhook answers");
    }
    info!("everything works");
    Ok(())
}

/// Waits until somebody writes to the Lease, and returns who holds it then. Clocks do not matter.
async fn renewed(context: &Context, service: &str) -> Result<String, String> {
    let api: Api<Lease> = Api::namespaced(context.clients.retrying.clone(), &context.namespace);
    let mut seen = None;
    let mut states = pin!(watcher::watch_object(api, &lease_name(service)));
    loop {
        let state =
            states.try_next().await.map_err(|error| format!("watching the Lease of {service}: {error}"))?;
        let spec = state.flatten().and_then(|lease| lease.spec).unwrap_or_default();
        let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
        match (holder, &seen) {
            (Some(holder), Some(earlier)) if *earlier != spec.renew_time => return Ok(holder),
            (_, None) => seen = Some(spec.renew_time),
            _ => {}
        }
    }
}

/// Tries to create, as a dry run, a maintenance of a node that we may not delete: the webhook alone refuses that.
async fn webhook(context: &Context) -> Result<(), String> {
    let api: Api<NodeMaintenance> = Api::all(context.clients.retrying.clone());
    let none = json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["none"]}]}]);
    let maintenance = serde_json::from_value(json!({
        "metadata": {"name": "is-the-webhook-there"},
        "spec": {"stage": "Idle", "nodeSelector": {"nodeSelectorTerms": none}},
    }));
    let maintenance = maintenance.map_err(|error| format!("making a NodeMaintenance: {error}"))?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    match api.create(&dry, &maintenance).await {
        Ok(_) => Err("the admission webhook is not asked: is its configuration there?".into()),
        Err(kube::Error::Api(status)) if status.message.contains("denied the request") => Ok(()),
        Err(error) => Err(format!("the admission webhook does not answer: {error}")),
    }
}
