//! A service that does as little as possible on the service runtime, for tests to freeze, stop and
//! starve. While it leads it counts upwards in a ConfigMap, and it prints what it does, one line for each:
//! `leads`, `wrote N`, `failed: …`, `stands by`. It also has a worker that only the fence can stop,
//! which ends with `fenced: …`.

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use haulout_service_runtime::lease::{Election, Leadership, NotLeading, Timing};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams, PostParams};
use kube::config::KubeConfigOptions;
use kube::{Api, Client, Config};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Where the cluster is, is in KUBECONFIG.
#[derive(Parser)]
struct Args {
    /// The namespace of the Lease and the ConfigMap
    #[arg(long, env = "PROBE_NAMESPACE")]
    namespace: String,
    /// Who this is: in the Lease, in the ConfigMap and as user agent
    #[arg(long, env = "PROBE_IDENTITY")]
    identity: String,
    /// The duration of the lease; everything else is in proportion
    #[arg(long, env = "PROBE_LEASE_SECONDS", default_value_t = 15)]
    lease_seconds: u64,
    /// The pause between two counts
    #[arg(long, env = "PROBE_PAUSE_MILLISECONDS", default_value_t = 50)]
    pause_milliseconds: u64,
}

/// The name of the Lease and of the ConfigMap.
const NAME: &str = "probe";
/// The ConfigMap that is written without looking.
const BLIND: &str = "probe-blind";

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    tracing_subscriber::fmt().with_ansi(false).init();
    let client = client(&args.identity).await?;
    let shutdown = shutdown()?;
    let timing = Timing::for_lease(Duration::from_secs(args.lease_seconds));
    let election =
        Election::new(client.clone(), &args.namespace, NAME, timing)?.with_identity(&args.identity);
    election.run(shutdown.clone(), |leadership| count(&args, &client, &shutdown, leadership)).await;
    Ok(())
}

async fn client(user_agent: &str) -> Result<Client> {
    // Nobody has installed one before us: this is the beginning of main.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut config =
        Config::from_kubeconfig(&KubeConfigOptions::default()).await.context("reading KUBECONFIG")?;
    config.default_retry = false;
    let agent = user_agent.parse().with_context(|| format!("{user_agent:?} as a user agent"))?;
    config.headers.push(("user-agent".parse().context("the name of the user agent header")?, agent));
    Client::try_from(config).context("making a client")
}

/// Is cancelled by SIGTERM.
fn shutdown() -> Result<CancellationToken> {
    let shutdown = CancellationToken::new();
    let (mut terminate, token) =
        (signal(SignalKind::terminate()).context("waiting for SIGTERM")?, shutdown.clone());
    tokio::spawn(async move {
        terminate.recv().await;
        token.cancel();
    });
    Ok(shutdown)
}

/// Says when leading ends, however it does.
struct Leading;

impl Leading {
    fn begin() -> Self {
        println!("leads");
        Self
    }
}

impl Drop for Leading {
    fn drop(&mut self) {
        println!("stands by");
    }
}

async fn count(args: &Args, client: &Client, shutdown: &CancellationToken, leadership: Leadership) {
    let _leading = Leading::begin();
    let maps: Api<ConfigMap> = Api::namespaced(leadership.fence(client), &args.namespace);
    tokio::spawn(write_blindly(maps.clone(), args.identity.clone()));
    while !shutdown.is_cancelled() {
        match increment(&maps, &args.identity).await {
            Ok(sequence) => println!("wrote {sequence}"),
            Err(error) => println!("failed: {error:#}"),
        }
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = tokio::time::sleep(Duration::from_millis(args.pause_milliseconds)) => {}
        }
    }
}

/// Counts one up from what is there. The resourceVersion goes along, so that nothing is counted twice.
async fn increment(maps: &Api<ConfigMap>, identity: &str) -> Result<u64> {
    let before = maps.get_opt(NAME).await.context("reading the count")?;
    let exists = before.is_some();
    let mut map = before.unwrap_or_default();
    map.metadata.name = Some(NAME.to_owned());
    let data = map.data.get_or_insert_default();
    let sequence = match data.get("sequence") {
        Some(text) => text.parse::<u64>().with_context(|| format!("{text:?} is no count"))? + 1,
        None => 1,
    };
    data.insert("sequence".to_owned(), sequence.to_string());
    data.insert("identity".to_owned(), identity.to_owned());
    let post = PostParams::default();
    let written = if exists { maps.replace(NAME, &post, &map).await } else { maps.create(&post, &map).await };
    written.context("writing the count")?;
    Ok(sequence)
}

/// What no service should have: a task that outlives its leader and whose writes overwrite anything.
async fn write_blindly(maps: Api<ConfigMap>, identity: String) {
    let force = PatchParams::apply(&identity).force();
    for number in 0_u64.. {
        let map = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": { "name": BLIND },
            "data": { "identity": identity, "number": number.to_string() },
        });
        if let Err(error) = maps.patch(BLIND, &force, &Patch::Apply(map)).await
            && let Some(reason) = NotLeading::find(&error)
        {
            println!("fenced: {reason}");
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
