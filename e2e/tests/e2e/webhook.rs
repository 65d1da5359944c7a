//! The admission webhook as a server that API servers depend on: trusted through every renewal, replaceable, harmless
//! when it is down, and indifferent to garbage. What it decides is tested elsewhere.

mod availability;
mod certificates;
mod clients;
mod hostile;

use std::time::Duration;

use haulout_api_types::NodeMaintenance;
use haulout_e2e::Cluster;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

/// For what takes moments.
const SOON: Duration = Duration::from_secs(60);

/// A cluster of its own, because others could not write to our kinds while the webhook is down.
async fn cluster(name: &str) -> Cluster {
    Cluster::builder().name(name).scheduler(false).kwok(false).boot().await.unwrap()
}

/// Asks the API server to create a maintenance without keeping it: two calls of the webhook.
async fn ask(api: &Api<NodeMaintenance>) -> kube::Result<()> {
    let maintenance: NodeMaintenance = serde_json::from_value(json!({
        "metadata": {"name": "rack-7"},
        "spec": {"stage": "Idle", "nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]}
        ]}}
    }))
    .unwrap();
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    api.create(&dry, &maintenance).await.map(|_| ())
}
