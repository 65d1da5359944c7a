//! The campaign `evacuation`: the controller is killed repeatedly while hundreds of pods leave. Separate watches
//! record every state in between, and the audit log shows which requests the API server received.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures::TryStreamExt as _;
use haulout_api_types::evacuation::Evacuator;
use haulout_api_types::evacuators::evacuation_for;
use haulout_api_types::{Evacuation, reports};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Client, ResourceExt as _};
use tokio_util::task::AbortOnDropHandle;

use super::each_evicted_once;
use super::replicas::Replicas;
use crate::requests::Mark;
use crate::{Cluster, objects, wait};

const NAMESPACE: &str = "soak";
const CLASS: &str = "soak.example.com";
/// Long enough for a busy machine: a budget recovers a disruption of a killed eviction only after two minutes.
const SOON: Duration = Duration::from_secs(1200);

/// The size of a round.
#[derive(Clone, Copy)]
struct Size {
    apps: usize,
    /// Number of pods of each app.
    replicas: i32,
    /// How many of them may be unhealthy.
    room: i32,
    /// Minimum number of kills, and the number that is not reached.
    kills: (u32, u32),
}

const FULL: Size = Size { apps: 10, replicas: 30, room: 3, kills: (5, 15) };
/// For every day. If a client dies during an eviction, the disruption stays in the budget for two minutes. With this
/// much room, no pod has to wait for that.
const SMALL: Size = Size { apps: 4, replicas: 16, room: 12, kills: (2, 5) };

/// Runs one round. Returns a summary.
pub(super) async fn round(mut random: fastrand::Rng, full: bool) -> Result<String> {
    let size = if full { FULL } else { SMALL };
    let cluster = Cluster::builder().name("soak-evacuation").audit(true).scheduler(false).boot().await?;
    cluster.install_chart(&[]).await?;
    let client = cluster.client().await?;
    let pods = set_up(&client, size).await?;
    let mark = cluster.requests_mark()?;
    let observed = Arc::new(Mutex::new(Observed {
        least: usize::try_from(size.replicas - size.room)?,
        ..Observed::default()
    }));
    let _watching = [
        tokio::spawn(watch_pods(client.clone(), Arc::clone(&observed))),
        tokio::spawn(watch_evacuations(client.clone(), Arc::clone(&observed))),
        tokio::spawn(evacuator(client.clone())),
    ]
    .map(AbortOnDropHandle::new);

    let mut controller = Replicas::start(&cluster, "evacuation-controller").await?;
    let evacuations: Api<Evacuation> = Api::namespaced(client.clone(), NAMESPACE);
    let requests = pods.iter().map(|pod| {
        let evacuations = &evacuations;
        async move {
            let (evacuation, _) =
                evacuation_for(&pod.metadata, "soak.test", &std::collections::BTreeSet::new())?;
            anyhow::Ok(evacuations.create(&PostParams::default(), &evacuation).await?)
        }
    });
    let requesting = futures::future::try_join_all(requests);
    let killing = async {
        for _ in 0..random.u32(size.kills.0..size.kills.1) {
            controller.kill_leader(Duration::from_millis(random.u64(0..4000))).await?;
        }
        // From here on, nothing is killed.
        std::future::pending::<Result<()>>().await
    };
    let done = async {
        requesting.await.context("requesting evacuations")?;
        let none =
            wait::all(evacuations.clone(), watcher::Config::default(), "are gone", SOON, <[_]>::is_empty);
        none.await
    };
    tokio::select! {
        done = done => { done?; }
        failed = killing => { failed?; }
    }
    check(&cluster, mark, &pods, &observed).await?;
    Ok(format!("{} pods left during {} kills", pods.len(), controller.kills))
}

/// Creates apps with budgets, some pods with an evacuator. Returns the pods when all are healthy.
async fn set_up(client: &Client, size: Size) -> Result<Vec<Pod>> {
    let params = PostParams::default();
    Api::<Node>::all(client.clone()).create(&params, &objects::node("n1").build()).await?;
    Api::<Namespace>::all(client.clone()).create(&params, &objects::namespace(NAMESPACE)).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), NAMESPACE);
    wait::present(accounts, "default", "exists", SOON, |_| true).await?;
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), NAMESPACE);
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(client.clone(), NAMESPACE);
    let evacuator = Evacuator { evacuator_class: CLASS.into(), priority: 1, role: None };
    let (key, value) = evacuator.annotation();
    for n in 0..size.apps {
        let name = format!("app-{n}");
        let app = objects::deployment(&name).namespace(NAMESPACE).replicas(size.replicas).pods(|pod| {
            let pod = pod.node("n1");
            if n % 3 == 0 { pod.annotation(&key, &value) } else { pod }
        });
        let budget =
            objects::pdb(&name).namespace(NAMESPACE).min_available(&(size.replicas - size.room).to_string());
        budgets.create(&params, &budget.build()).await?;
        deployments.create(&params, &app.build()).await?;
    }
    let allow = |budgets: &[PodDisruptionBudget]| {
        budgets.iter().all(|b| b.status.as_ref().is_some_and(|s| s.disruptions_allowed == size.room))
    };
    wait::all(budgets, watcher::Config::default(), "have room", SOON, allow).await?;
    let pods = Api::<Pod>::namespaced(client.clone(), NAMESPACE).list(&ListParams::default()).await?;
    Ok(pods.items)
}

/// What the watches have recorded.
#[derive(Default)]
struct Observed {
    /// How many pods of each app have to be healthy at every moment.
    least: usize,
    /// Healthy pods by app.
    healthy: HashMap<String, HashSet<String>>,
    failed: HashMap<String, i32>,
    gone: BTreeMap<String, u32>,
    violations: Vec<String>,
}

fn is_healthy(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True");
    ready && pod.metadata.deletion_timestamp.is_none()
}

impl Observed {
    fn pod(&mut self, pod: &Pod, exists: bool) {
        let (Some(uid), Some(app)) = (pod.uid(), pod.labels().get("app")) else { return };
        let healthy = self.healthy.entry(app.clone()).or_default();
        if exists && is_healthy(pod) {
            healthy.insert(uid);
        } else if healthy.remove(&uid) && healthy.len() < self.least {
            self.violations.push(format!("{app} has only {} healthy pods", healthy.len()));
        }
        if !exists {
            *self.gone.entry(pod.uid().unwrap_or_default()).or_default() += 1;
        }
    }

    fn evacuation(&mut self, evacuation: &Evacuation) {
        let failed = evacuation.status.as_ref().map_or(0, |status| status.failed_eviction_counter);
        let before = self.failed.insert(evacuation.name_any(), failed).unwrap_or_default();
        if failed < before {
            self.violations.push(format!(
                "failedEvictionCounter of {} went from {before} to {failed}",
                evacuation.name_any()
            ));
        }
    }
}

async fn watch_pods(client: Client, observed: Arc<Mutex<Observed>>) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client, NAMESPACE);
    let mut events = pin!(watch(pods, watcher::Config::default()).default_backoff());
    while let Some(event) = events.try_next().await? {
        let mut observed = observed.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::InitApply(pod) | Event::Apply(pod) => observed.pod(&pod, true),
            Event::Delete(pod) => observed.pod(&pod, false),
            Event::Init | Event::InitDone => {}
        }
    }
    Ok(())
}

async fn watch_evacuations(client: Client, observed: Arc<Mutex<Observed>>) -> Result<()> {
    let evacuations: Api<Evacuation> = Api::namespaced(client, NAMESPACE);
    let mut events = pin!(watch(evacuations, watcher::Config::default()).default_backoff());
    while let Some(event) = events.try_next().await? {
        if let Event::InitApply(evacuation) | Event::Apply(evacuation) = event {
            observed.lock().unwrap_or_else(PoisonError::into_inner).evacuation(&evacuation);
        }
    }
    Ok(())
}

/// An evacuator that completes at once.
async fn evacuator(client: Client) -> Result<()> {
    let evacuations: Api<Evacuation> = Api::namespaced(client, NAMESPACE);
    let mine = watcher::Config::default().fields(&format!("status.activeEvacuatorClass={CLASS}"));
    let mut events = pin!(watch(evacuations.clone(), mine).default_backoff().applied_objects());
    while let Some(evacuation) = events.try_next().await? {
        if evacuation.is_active(CLASS) {
            let patch = Patch::Merge(reports::completed(&evacuation, "nothing to do"));
            // If another client wrote first, the watch delivers the Evacuation again.
            let _ = evacuations.patch_status(&evacuation.name_any(), &PatchParams::default(), &patch).await;
        }
    }
    Ok(())
}

/// What must hold at the end.
async fn check(cluster: &Cluster, mark: Mark, pods: &[Pod], observed: &Mutex<Observed>) -> Result<()> {
    // The watches may lag a little.
    let all_gone = wait::eventually("the watches have seen all pods deleted", SOON, async || {
        let observed = observed.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = |pod: &Pod| observed.gone.contains_key(pod.uid().as_deref().unwrap_or_default());
        Ok(pods.iter().all(gone).then_some(()))
    });
    all_gone.await?;
    let observed = observed.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(violation) = observed.violations.first() {
        bail!("{violation}, and {} more violations", observed.violations.len() - 1);
    }
    ensure!(observed.gone.values().all(|times| *times == 1), "a pod was deleted twice");
    each_evicted_once(&cluster.requests_since(mark)?, pods)
}
