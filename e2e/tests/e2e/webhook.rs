//! The admission webhook as a server: trusted through every certificate renewal, replaceable, harmless when it is
//! down, and robust against invalid requests. Its decisions are tested elsewhere.

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

/// For everything that should take moments.
const SOON: Duration = Duration::from_secs(60);

/// A separate cluster, because other tests could not write our kinds while the webhook is down.
async fn cluster(name: &str) -> Cluster {
    Cluster::builder().name(name).scheduler(false).kwok(false).boot().await.unwrap()
}

/// Creates a maintenance with a dry run: two calls of the webhook.
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
