//! `chart-hooks check`: verifies an installation, for `helm test`. A controller works if its leader renews its Lease. The
//! webhook works if it rejects a NodeMaintenance that only the webhook rejects.

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

/// Verify an installation; the chart runs this on `helm test`
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Args {
    /// Service that must have an active leader, such as evacuation-controller; can be repeated
    #[arg(long = "leader")]
    pub leaders: Vec<String>,

    /// Also verify the admission webhook
    #[arg(long)]
    pub webhook: bool,

    /// Timeout for each service, in seconds
    #[arg(long, default_value_t = 60)]
    pub within_seconds: u64,
}

impl Args {
    /// The permissions that this command needs.
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

/// Verifies all services. Returns the first failure.
pub async fn run(args: Args, context: Context) -> Result<(), String> {
    let limit = Duration::from_secs(args.within_seconds);
    for service in &args.leaders {
        let renewed = tokio::time::timeout(limit, renewed(&context, service)).await;
        let seconds = args.within_seconds;
        let timed_out = |_| {
            format!("no leader of {service} renewed its Lease within {seconds}s; check that its pods run")
        };
        let holder = renewed.map_err(timed_out)??;
        info!(service, holder, "leader renews its Lease");
    }
    if args.webhook {
        webhook(&context).await?;
        info!("admission webhook works");
    }
    info!("installation works");
    Ok(())
}

/// Waits until the Lease is renewed, and returns its holder. It compares renew times only with each other, not with a clock.
async fn renewed(context: &Context, service: &str) -> Result<String, String> {
    let api: Api<Lease> = Api::namespaced(context.clients.retrying.clone(), &context.namespace);
    let mut first_renewal = None;
    let mut states = pin!(watcher::watch_object(api, &lease_name(service)));
    loop {
        let state = states
            .try_next()
            .await
            .map_err(|error| format!("failed to watch the Lease of {service}: {error}"))?;
        let spec = state.flatten().and_then(|lease| lease.spec).unwrap_or_default();
        let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
        match (holder, &first_renewal) {
            (Some(holder), Some(earlier)) if *earlier != spec.renew_time => return Ok(holder),
            (_, None) => first_renewal = Some(spec.renew_time),
            _ => {}
        }
    }
}

/// Creates a NodeMaintenance as a dry run, without the permission to delete its node. Only the webhook rejects this.
async fn webhook(context: &Context) -> Result<(), String> {
    let api: Api<NodeMaintenance> = Api::all(context.clients.retrying.clone());
    let none = json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["none"]}]}]);
    let maintenance = serde_json::from_value(json!({
        "metadata": {"name": "webhook-check"},
        "spec": {"stage": "Idle", "nodeSelector": {"nodeSelectorTerms": none}},
    }));
    let maintenance = maintenance.map_err(|error| format!("failed to build a NodeMaintenance: {error}"))?;
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    match api.create(&dry, &maintenance).await {
        Ok(_) => Err("no webhook intercepted the request; check its ValidatingWebhookConfiguration".into()),
        Err(kube::Error::Api(status)) if status.message.contains("denied the request") => Ok(()),
        Err(error) => Err(format!("failed to call the admission webhook: {error}")),
    }
}
