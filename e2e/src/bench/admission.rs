//! What the admission webhook costs clients that create Evacuations, and what it costs itself.

mod hostile;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures::future::try_join_all;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::Evacuation;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::{Namespace, Pod, Secret};
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, Config, ResourceExt as _};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::json;

use super::{Progress, Results, median};
use crate::cluster::Cluster;
use crate::service::{NAMESPACE, Service};
use crate::webhook::{self, Webhook};
use crate::{objects, wait};

const PODS: usize = 600;
const ROUNDS: usize = 3;
const IN_FLIGHT: usize = 32;
/// The fraction of the API server's capacity at which latencies are compared.
const SHARE: f64 = 0.3;
const DIRECT: usize = 20_000;
const SPACE: &str = "bench-admission";
const CONFIGURATION: &str = "haulout-system.haulout-admission-webhook";
const SOON: Duration = Duration::from_secs(60);

/// - `capacity_per_s`: the highest rate at which the API server creates Evacuations, without the webhook.
/// - `p50_ratio`, `p99_ratio`: time to create one Evacuation at 30 % of that rate, with the webhook ÷ without.
///   Medians of the ratios of three rounds, in which both take turns.
/// - `handler_p99_ms`: the time inside the webhook during that, from its own histogram. Every pod is in its cache.
/// - `requests_per_s_per_core`: reviews of Evacuations sent directly to the webhook ÷ its processor time.
/// - `rss_mib`: its resident set after that, with 600 pods in its cache.
/// - `hostile_rss_mib_10k` to `_40k`: its resident set after that many invalid request bodies.
pub(super) async fn run(progress: Progress) -> Result<Results> {
    let cluster = Cluster::builder()
        .name("bench-admission")
        .scheduler(false)
        .kwok(false)
        .audit(false)
        .progress(progress)
        .boot()
        .await?;
    let client = cluster.client().await?;
    let (_webhook, replica) = Webhook::with_replica(&cluster).await?;
    let registration = Registration::take(&client, &replica).await?;
    let evacuations = evacuations(&client).await?;
    let capacity = capacity(&client, &evacuations).await?;
    let rate = capacity * SHARE;
    progress(&format!("the API server creates {capacity:.0} Evacuations per second: measuring at {rate:.0}"));
    let (mut p50, mut p99, mut plain) = (Vec::new(), Vec::new(), Vec::new());
    let handled = Histogram::read(&replica).await?;
    for round in 1..=ROUNDS {
        progress(&format!("round {round} of {ROUNDS}"));
        let without = create_at(&client, &evacuations, rate).await?;
        clear(&client).await?;
        registration.put(&client, &cluster).await?;
        let with = create_at(&client, &evacuations, rate).await?;
        registration.remove(&client).await?;
        clear(&client).await?;
        p50.push(quantile(&with, 0.5) / quantile(&without, 0.5));
        p99.push(quantile(&with, 0.99) / quantile(&without, 0.99));
        plain.push(quantile(&without, 0.5) * 1e3);
    }
    let handled = Histogram::read(&replica).await?.since(&handled);
    progress(&format!("sending {DIRECT} reviews directly to the webhook"));
    let webhook_client = webhook_client(&client, &replica).await?;
    let per_core = direct(&webhook_client, &replica, &evacuations).await?;
    let rss = replica.resident_bytes()? / 1024.0 / 1024.0;
    let [first, second, third, last] = hostile::run(&webhook_client, &replica, progress).await?;
    drop(replica);
    cluster.shutdown().await;
    Ok(vec![
        ("capacity_per_s", capacity),
        ("without_p50_ms", median(plain)),
        ("p50_ratio", median(p50)),
        ("p99_ratio", median(p99)),
        ("handler_p99_ms", handled.quantile(0.99) * 1e3),
        ("requests_per_s_per_core", per_core),
        ("rss_mib", rss),
        ("hostile_rss_mib_10k", first),
        ("hostile_rss_mib_20k", second),
        ("hostile_rss_mib_30k", third),
        ("hostile_rss_mib_40k", last),
    ])
}

/// The webhook configurations, which can be registered and removed.
struct Registration {
    mutating: MutatingWebhookConfiguration,
    validating: ValidatingWebhookConfiguration,
}

impl Registration {
    /// Removes the configurations. The copies that are registered later call this replica directly, as a Service
    /// would. A forwarder in between would be measured too.
    async fn take(client: &Client, replica: &Service) -> Result<Self> {
        let mut mutating: MutatingWebhookConfiguration =
            Api::all(client.clone()).get(CONFIGURATION).await.context("the mutating configuration")?;
        let mut validating: ValidatingWebhookConfiguration =
            Api::all(client.clone()).get(CONFIGURATION).await.context("the validating configuration")?;
        for metadata in [&mut mutating.metadata, &mut validating.metadata] {
            metadata.resource_version = None;
            metadata.uid = None;
        }
        let hooks = mutating.webhooks.iter_mut().flatten().map(|hook| &mut hook.client_config);
        let more = validating.webhooks.iter_mut().flatten().map(|hook| &mut hook.client_config);
        let address = webhook::address(replica)?;
        for url in hooks.chain(more).filter_map(|config| config.url.as_mut()) {
            let path = url.splitn(4, '/').nth(3).unwrap_or_default();
            *url = format!("https://{address}/{path}");
        }
        let taken = Self { mutating, validating };
        taken.remove(client).await?;
        Ok(taken)
    }

    async fn put(&self, client: &Client, cluster: &Cluster) -> Result<()> {
        let post = PostParams::default();
        Api::all(client.clone()).create(&post, &self.mutating).await.context("registering the webhook")?;
        Api::all(client.clone()).create(&post, &self.validating).await.context("registering the webhook")?;
        wait_for_configuration().await;
        Webhook::reachable(cluster).await
    }

    async fn remove(&self, client: &Client) -> Result<()> {
        let delete = DeleteParams::default();
        let mutating: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
        mutating.delete(CONFIGURATION, &delete).await.context("removing the webhook")?;
        let validating: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
        validating.delete(CONFIGURATION, &delete).await.context("removing the webhook")?;
        wait_for_configuration().await;
        Ok(())
    }
}

/// Waits until the API server has noticed a changed configuration. Until then it may still call the webhook, and
/// those calls would be counted on the wrong side. Nothing signals that it has noticed.
async fn wait_for_configuration() {
    tokio::time::sleep(Duration::from_secs(2)).await;
}

/// Creates pods, and returns an Evacuation for each that is not created yet.
async fn evacuations(client: &Client) -> Result<Vec<Evacuation>> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.create(&PostParams::default(), &objects::namespace(SPACE)).await.context("a namespace")?;
    let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> = Api::namespaced(client.clone(), SPACE);
    wait::until(accounts, "default", "exists", SOON, |account| account.is_some()).await?;
    let api: Api<Pod> = Api::namespaced(client.clone(), SPACE);
    let create = |number: usize| {
        let pod = objects::pod(&format!("pod-{number}")).namespace(SPACE).label("app", "bench").build();
        let api = api.clone();
        async move { api.create(&PostParams::default(), &pod).await }
    };
    let pods: Vec<Pod> = stream::iter(0..PODS)
        .map(create)
        .buffer_unordered(IN_FLIGHT)
        .try_collect()
        .await
        .context("creating pods")?;
    let evacuation = |pod: &Pod| {
        let (name, uid) = (pod.name_any(), pod.uid().unwrap_or_default());
        let evacuation = json!({
            "metadata": {"name": format!("{uid}-{name}"), "namespace": SPACE},
            "spec": {"podRef": {"name": name, "uid": uid}, "progressDeadlineSeconds": 1800}
        });
        serde_json::from_value(evacuation).context("making an Evacuation")
    };
    pods.iter().map(evacuation).collect()
}

fn api(client: &Client) -> Api<Evacuation> {
    Api::namespaced(client.clone(), SPACE)
}

async fn clear(client: &Client) -> Result<()> {
    let api = api(client);
    api.delete_collection(&DeleteParams::default(), &ListParams::default())
        .await
        .context("deleting Evacuations")?;
    wait::eventually("all Evacuations are gone", SOON, async || {
        Ok(api.list(&ListParams::default().limit(1)).await?.items.is_empty().then_some(()))
    })
    .await
}

/// How many Evacuations per second the API server creates when they arrive as fast as it answers. The second of two
/// attempts counts.
async fn capacity(client: &Client, evacuations: &[Evacuation]) -> Result<f64> {
    let mut rate = f64::NAN;
    for _ in 0..2 {
        let api = api(client);
        let begun = Instant::now();
        stream::iter(evacuations)
            .map(|evacuation| async { api.create(&PostParams::default(), evacuation).await })
            .buffer_unordered(IN_FLIGHT)
            .try_for_each(async |_| Ok(()))
            .await
            .context("creating Evacuations")?;
        rate = count(evacuations.len()) / begun.elapsed().as_secs_f64();
        clear(client).await?;
    }
    Ok(rate)
}

/// Creates all Evacuations at this rate, regardless of how long each takes. Returns the latencies in seconds, sorted.
async fn create_at(client: &Client, evacuations: &[Evacuation], rate: f64) -> Result<Vec<f64>> {
    let api = api(client);
    let begun = tokio::time::Instant::now();
    let one = |(number, evacuation): (usize, &Evacuation)| {
        let (api, evacuation) = (api.clone(), evacuation.clone());
        let due = begun + Duration::from_secs_f64(count(number) / rate);
        tokio::spawn(async move {
            tokio::time::sleep_until(due).await;
            let created = api.create(&PostParams::default(), &evacuation).await;
            // Measured from the time at which it was due, so that waiting for a slow request counts.
            created.map(|_| due.elapsed().as_secs_f64())
        })
    };
    let all = try_join_all(evacuations.iter().enumerate().map(one)).await.context("a task")?;
    let mut times = all.into_iter().collect::<kube::Result<Vec<_>>>().context("creating an Evacuation")?;
    times.sort_by(f64::total_cmp);
    Ok(times)
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place in a short list")]
    let place = (count(sorted.len().saturating_sub(1)) * share).round() as usize;
    sorted.get(place).copied().unwrap_or(f64::NAN)
}

#[expect(clippy::cast_precision_loss, reason = "all counts here are small")]
fn count(number: usize) -> f64 {
    number as f64
}

/// The webhook's own histogram for Evacuations: cumulative counts by upper bound.
#[derive(Debug, Default)]
struct Histogram(Vec<(f64, f64)>);

impl Histogram {
    async fn read(replica: &Service) -> Result<Self> {
        let text = replica.get("/metrics").await?;
        let mut bounds = BTreeMap::<u64, (f64, f64)>::new();
        for line in text.lines().filter(|line| line.contains("resource=\"evacuations\"")) {
            let Some(rest) = line.strip_prefix("haulout_admission_duration_seconds_bucket") else { continue };
            let bound = rest.split_once("le=\"").and_then(|(_, rest)| rest.split_once('"'));
            let value = rest.rsplit_once(' ').and_then(|(_, value)| value.parse::<f64>().ok());
            let (Some((bound, _)), Some(value)) = (bound, value) else { continue };
            let bound = bound.parse::<f64>().unwrap_or(f64::INFINITY);
            bounds.entry(bound.to_bits()).or_insert((bound, 0.0)).1 += value;
        }
        Ok(Self(bounds.into_values().collect()))
    }

    fn since(self, earlier: &Self) -> Self {
        let before = |bound: f64| {
            let found = earlier.0.iter().find(|(known, _)| known.to_bits() == bound.to_bits());
            found.map_or(0.0, |(_, value)| *value)
        };
        Self(self.0.into_iter().map(|(bound, value)| (bound, value - before(bound))).collect())
    }

    /// Interpolates as Prometheus does: values are evenly distributed within a bucket.
    fn quantile(&self, share: f64) -> f64 {
        let Some((_, all)) = self.0.last() else { return f64::NAN };
        let wanted = all * share;
        let (mut lower, mut below) = (0.0, 0.0);
        for (bound, value) in &self.0 {
            if *value >= wanted {
                return if bound.is_finite() {
                    lower + (bound - lower) * (wanted - below) / (value - below)
                } else {
                    lower
                };
            }
            (lower, below) = (*bound, *value);
        }
        f64::NAN
    }
}

/// A client that calls the webhook directly, without an API server.
async fn webhook_client(client: &Client, replica: &Service) -> Result<Client> {
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let secret = secrets.get("haulout-webhook-certificate").await.context("the certificate")?;
    let authority = secret.data.as_ref().and_then(|data| data.get("ca.crt")).context("ca.crt")?;
    let root = CertificateDer::from_pem_slice(&authority.0).context("ca.crt")?;
    let url = format!("https://{}", webhook::address(replica)?).parse().context("the webhook's address")?;
    let mut config = Config::new(url);
    config.root_cert = Some(vec![root.to_vec()]);
    config.default_retry = false;
    Client::try_from(config).context("a client of the webhook")
}

/// Reviews per second and core.
async fn direct(webhook_client: &Client, replica: &Service, evacuations: &[Evacuation]) -> Result<f64> {
    let bodies: Vec<_> = evacuations.iter().map(review).collect();
    let send = |body: &String| {
        let request =
            http::Request::post("/validate/evacuations?timeout=10s").body(body.clone().into_bytes());
        let client = webhook_client.clone();
        async move {
            let answer = client.request_text(request.context("a request")?).await.context("a review")?;
            ensure!(answer.contains("\"allowed\":true"), "the webhook says {answer}");
            anyhow::Ok(())
        }
    };
    let burst = async |times: usize| {
        let all = bodies.iter().cycle().take(times).map(send);
        stream::iter(all).buffer_unordered(IN_FLIGHT).try_for_each(async |()| Ok(())).await
    };
    burst(DIRECT / 10).await?;
    let before = replica.processor_seconds()?;
    burst(DIRECT).await?;
    Ok(count(DIRECT) / (replica.processor_seconds()? - before))
}

fn review(evacuation: &Evacuation) -> String {
    let kind = "Evacuation";
    let (group, version) = ("evacuation.coordination.k8s.io", "v1alpha1");
    json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": evacuation.name_any(),
            "kind": {"group": group, "version": version, "kind": kind},
            "resource": {"group": group, "version": version, "resource": "evacuations"},
            "name": evacuation.name_any(),
            "namespace": SPACE,
            "operation": "CREATE",
            "userInfo": {"username": "admin", "groups": ["system:masters", "system:authenticated"]},
            "object": evacuation
        }
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantile_is_interpolated_within_its_bucket() {
        let histogram = Histogram(vec![(1.0, 50.0), (2.0, 100.0), (f64::INFINITY, 100.0)]);
        assert!((histogram.quantile(0.75) - 1.5).abs() < 1e-9);
        let earlier = Histogram(vec![(1.0, 50.0), (2.0, 50.0), (f64::INFINITY, 50.0)]);
        assert!((histogram.since(&earlier).quantile(0.5) - 1.5).abs() < 1e-9);
    }
}
