//! The admission webhook as a server: trusted through every certificate renewal, replaceable, harmless when it is
//! down, and robust against invalid requests. Its decisions are tested elsewhere.

mod availability;
mod certificates;
mod clients;
mod floods;
mod hostile;

use std::sync::Arc;
use std::time::Duration;

use haulout_api_types::NodeMaintenance;
use haulout_e2e::Cluster;
use haulout_e2e::service::NAMESPACE;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::PostParams;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio_rustls::TlsConnector;

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

/// Connects to the webhook with this protocol, such as `h2`, and trusts its certificate.
async fn connector(cluster: &Cluster, protocol: &str) -> TlsConnector {
    let secrets: Api<Secret> = Api::namespaced(cluster.client().await.unwrap(), NAMESPACE);
    let secret = secrets.get("haulout-webhook-certificate").await.unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&secret.data.unwrap()["ca.crt"].0).unwrap()).unwrap();
    let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![protocol.into()];
    TlsConnector::from(Arc::new(config))
}
