//! The admission webhook as in a cluster: replicas with the arguments of the chart's Deployment, behind one address. And
//! the certificate manager, without which they have no certificate.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use haulout_api_types::NodeMaintenance;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use crate::forwarder::Forwarder;
use crate::handle::Handle;
use crate::service::{Service, chart_args};
use crate::wait;

/// The webhook's name in the chart.
const NAME: &str = "admission-webhook";
/// The certificate manager's name in the chart.
const CERTIFICATE_MANAGER: &str = "certificate-manager";
/// The host in the URL of the webhook, and in its certificate. It leads to loopback. API servers use HTTP/2 for the loopback
/// addresses themselves, and HTTP/1.1 for all others, such as those of Services.
pub const HOST: &str = "0.0.0.0";
/// How long the first replica may take until the API server trusts it.
const LIMIT: Duration = Duration::from_secs(60);

/// The webhook of one cluster. Dropping it stops the forwarder and the certificate manager. The replicas belong to the
/// caller.
#[derive(Debug)]
pub struct Webhook {
    /// The address for the API server.
    pub forwarder: Forwarder,
    /// One replica of the certificate manager, if the chart installs it with these values.
    pub certificate_manager: Option<Service>,
}

impl Webhook {
    /// Installs the chart with the webhook, without replicas, and with these values. Starts the certificate manager.
    pub async fn install(cluster: &Handle, values: &[(&str, &str)]) -> Result<Self> {
        let forwarder = Forwarder::start().await?;
        let url = url(&forwarder);
        let own = [("admissionWebhook.enabled", "true"), ("admissionWebhook.url", &url)];
        cluster.install_chart(&[&own, values].concat()).await?;
        let certificate_manager = match chart_args(cluster, CERTIFICATE_MANAGER).await? {
            Some(args) => Some(start(cluster, CERTIFICATE_MANAGER, &args, &[]).await?),
            None => None,
        };
        Ok(Self { forwarder, certificate_manager })
    }

    /// Installs the chart, starts one replica and waits until the API server trusts it.
    pub async fn with_replica(cluster: &Handle) -> Result<(Self, Service)> {
        let webhook = Self::install(cluster, &[]).await?;
        let replica = webhook.start(cluster, &[]).await?;
        Self::reachable(cluster).await?;
        Ok((webhook, replica))
    }

    /// Starts a replica with the arguments from the chart, and these. It receives connections when it is ready.
    pub async fn start(&self, cluster: &Handle, args: &[&str]) -> Result<Service> {
        let chart = chart_args(cluster, NAME).await?.context("the chart's webhook")?;
        let args = [["--webhook-listen", "127.0.0.1:0"].as_slice(), args].concat();
        let replica = start(cluster, NAME, &chart, &args).await?;
        replica.ready().await?;
        self.forwarder.add(address(&replica)?);
        Ok(replica)
    }

    /// Waits until the API server can reach the webhook.
    pub async fn reachable(cluster: &Handle) -> Result<()> {
        let api: Api<NodeMaintenance> = Api::all(cluster.client().await?);
        let probe = serde_json::from_value(json!({
            "metadata": {"name": "is-the-webhook-there"},
            "spec": {"stage": "Idle", "nodeSelector": {"nodeSelectorTerms": [
                {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["none"]}]}
            ]}}
        }))
        .context("failed to create a probe")?;
        let dry = PostParams { dry_run: true, ..PostParams::default() };
        let mut last = None;
        let answered = wait::eventually("the API server can reach the webhook", LIMIT, async || {
            match api.create(&dry, &probe).await {
                Ok(_) => Ok(Some(())),
                Err(error) => {
                    last = Some(error);
                    Ok(None)
                }
            }
        });
        let answered = answered.await;
        answered.with_context(|| last.map(|error| error.to_string()).unwrap_or_default())
    }
}

async fn start(cluster: &Handle, name: &str, chart: &[String], args: &[&str]) -> Result<Service> {
    let all: Vec<_> = chart.iter().map(String::as_str).chain(args.iter().copied()).collect();
    Service::start(cluster, name, &all).await
}

/// The value `admissionWebhook.url` for a webhook behind this forwarder.
pub fn url(forwarder: &Forwarder) -> String {
    format!("https://{HOST}:{}", forwarder.address().port())
}

/// The address on which a replica serves the API server, from its log.
pub fn address(replica: &Service) -> Result<SocketAddr> {
    let text = replica.text();
    let mut lines = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    match lines.find_map(|line| line.get("webhook")?.as_str()?.parse().ok()) {
        Some(address) => Ok(address),
        None => bail!("the log of the webhook has no address"),
    }
}
