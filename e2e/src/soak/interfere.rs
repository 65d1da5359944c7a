//! The campaign `drain --interfere`: while nodes are drained, people, tenants, other controllers and faults do all that they
//! may do to Evacuations, nodes, budgets, pods, maintenances and our controllers; see [`script`] for the list. An
//! [`observer`] checks throughout that a drain moves on or says truly what holds it.
//!
//! What is done and when follows from the seed. Which pods have got how far by then depends on the machine.

mod actions;
mod evacuators;
mod ground;
mod observer;
mod refusals;
mod script;

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, NodeMaintenance};
use jiff::SignedDuration;
use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use kube::runtime::watcher;
use serde_json::json;
use tokio::sync::watch as latest;
use tokio_util::task::AbortOnDropHandle;

use self::actions::{Controllers, Interferer, forgiven};
use self::evacuators::Mode;
use self::ground::{Ground, NAMESPACE, PINNED, POOL, SILENT, WAITS};
use self::observer::{Observer, Timeline};
use self::script::Script;
use super::Round;
use super::replicas::Replicas;
use crate::{Cluster, wait};

/// How much of the timeline a failure shows; the file has all of it.
const SHOWN: usize = 150;
/// How long everything may take to finish once nobody interferes any more.
const LIMIT: Duration = Duration::from_secs(150);
/// Whoever leads should do so on a busy machine too: while leaders change, nothing can be judged.
const LEASE_SECONDS: &str = "5";
/// Longer than an evacuator may be silent.
const DEADLINE: Duration = Duration::from_secs(31 * 60);

/// Longer than the pause after an eviction that was refused many times, and shorter than an evacuator may be silent.
const BACKOFF: Duration = Duration::from_secs(16 * 60);

/// One round; what happened in it.
pub(super) async fn round(round: Round) -> Result<String> {
    let script = Script::new(round.seed, &round.only)?;
    let cluster = Cluster::builder().name("soak-interfere").audit(true).boot().await?;
    let timeline = Timeline::new();
    let result = Box::pin(play(&round, &cluster, &script, &timeline)).await;
    if result.is_err() {
        cluster.keep_logs();
        let file = cluster.logs.join("timeline.txt");
        std::fs::write(&file, timeline.last(usize::MAX))
            .with_context(|| format!("writing {}", file.display()))?;
    }
    result.map_err(|error| {
        let last = timeline.last(SHOWN);
        anyhow!("{error:#}\nThe timeline of the round with the seed {}:\n{last}", round.seed)
    })
}

async fn play(round: &Round, cluster: &Cluster, script: &Script, timeline: &Timeline) -> Result<String> {
    cluster.install_chart(&[]).await?;
    let mut random = round.random();
    let interferers = cluster.client_as("interferer").await?;
    let ground = Box::pin(Ground::prepare(interferers, random.fork())).await?;
    let pods = ground.pods;
    let audit_log = cluster.audit_log.clone().context("the cluster has an audit log")?;
    let observer = Observer::start(cluster.client_as("observer").await?, audit_log, timeline.clone()).await?;
    let controllers = Controllers {
        maintenance: Replicas::start_with(cluster, "maintenance-controller", LEASE_SECONDS).await?,
        evacuation: Replicas::start_with(cluster, "evacuation-controller", LEASE_SECONDS).await?,
    };
    let (mode, receiver) = latest::channel(Mode::Work);
    let evacuating =
        evacuators::run(cluster.client_as("evacuator").await?, timeline.clone(), random.fork(), receiver);
    let _evacuators = AbortOnDropHandle::new(tokio::spawn(evacuating));
    let progress = round.progress.as_ref();
    let mut interferer = Interferer {
        cluster,
        ground,
        controllers,
        timeline: timeline.clone(),
        progress,
        pending: Vec::new(),
        maintenances: 0,
    };
    let all = async {
        for pool in ["a", "b"] {
            let key = json!({"key": POOL, "operator": "In", "values": [pool]});
            let selector = json!({"nodeSelectorTerms": [{"matchExpressions": [key]}]});
            interferer.maintain(selector, Stage::Drain, random.bool()).await?;
        }
        interferer.carry_out(script).await?;
        interferer.begin_to_finish().await?;
        let passes = if script.time_passes { DEADLINE } else { BACKOFF };
        let silent = interferer.let_time_pass(passes).await?;
        observer.clocks_are_ahead(SignedDuration::try_from(passes)?);
        if script.time_passes {
            mode.send_replace(Mode::FinishButSilent);
            interferer.until_passed_over(&silent).await?;
        }
        // Those whose turn begins only now would have another half hour.
        mode.send_replace(Mode::Finish);
        interferer.finish(random.fork()).await?;
        observer.finish(&interferer.ground.nodes).await
    };
    tokio::select! {
        done = all => done?,
        failure = observer.failed() => return Err(anyhow!(failure)),
    }
    let (actions, judged) = (script.steps.len(), observer.judged());
    Ok(format!("{pods} pods, {actions} actions, {judged} looks at maintenances that did not move"))
}

/// Whether a silent evacuator is in charge, or was the last that was.
fn is_silent(evacuation: &Evacuation) -> bool {
    evacuation.status.as_ref().and_then(|status| status.active_evacuator_class.as_deref()) == Some(SILENT)
}

fn is_drained(maintenance: &NodeMaintenance) -> bool {
    let conditions = maintenance.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|condition| condition.type_ == "Drained" && condition.status == "True")
}

impl Interferer<'_> {
    /// Nobody interferes any more and everything is allowed to finish.
    async fn begin_to_finish(&self) -> Result<()> {
        self.timeline.note("INTERFERER", "everything is allowed to finish");
        (self.progress)("everything is allowed to finish");
        let params = DeleteParams::default();
        self.ground.budget_api().delete_collection(&params, &ListParams::default()).await?;
        let deployments: Api<Deployment> = Api::namespaced(self.ground.client.clone(), NAMESPACE);
        forgiven(deployments.delete(PINNED, &params).await.map(drop))?;
        forgiven(self.ground.pod_api().delete(WAITS, &params).await.map(drop))?;
        Ok(())
    }

    /// Puts the controllers' clocks forward; the Evacuations of which silent evacuators were in charge before.
    async fn let_time_pass(&mut self, by: Duration) -> Result<BTreeSet<String>> {
        // The API server has a policy in force for about a second after its deletion: what it refuses then, it refuses by the
        // new clock.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let all = self.ground.evacuation_api().list(&ListParams::default()).await?;
        self.controllers.evacuation.put_clocks_forward(by).await?;
        self.controllers.maintenance.put_clocks_forward(by).await?;
        Ok(all.iter().filter(|evacuation| is_silent(evacuation)).map(ResourceExt::name_any).collect())
    }

    /// Waits until nobody waits for those evacuators any more.
    async fn until_passed_over(&self, silent: &BTreeSet<String>) -> Result<()> {
        let waits = |e: &Evacuation| is_silent(e) && silent.contains(&e.name_any());
        let (api, config) = (self.ground.evacuation_api(), watcher::Config::default());
        wait::all(api, config, "have left silent evacuators", LIMIT, |all| !all.iter().any(waits)).await?;
        Ok(())
    }

    /// Drains complete, and then all maintenances are ended.
    async fn finish(&mut self, mut random: fastrand::Rng) -> Result<()> {
        let params = DeleteParams::default();
        let api = self.ground.maintenance_api();
        let config = watcher::Config::default();
        // One that selects no node never drained anything.
        let done = |m: &NodeMaintenance| {
            let nodes = m.status.as_ref().and_then(|status| status.drain_status.as_ref());
            m.spec.stage != Stage::Drain
                || m.metadata.deletion_timestamp.is_some()
                || is_drained(m)
                || nodes.is_some_and(|drain| drain.nodes_selected == 0)
        };
        wait::all(api.clone(), config.clone(), "are drained", LIMIT, |all| all.iter().all(done)).await?;
        self.timeline.note("INTERFERER", "all maintenances end");
        for maintenance in api.list(&ListParams::default()).await? {
            self.end(&maintenance.name_any(), random.bool()).await?;
        }
        let released = |m: &NodeMaintenance| m.finalizers().is_empty();
        wait::all(api.clone(), config.clone(), "are completed", LIMIT, |all| all.iter().all(released))
            .await?;
        api.delete_collection(&params, &ListParams::default()).await?;
        wait::all(api, config, "are gone", LIMIT, <[_]>::is_empty).await?;
        Ok(())
    }
}
