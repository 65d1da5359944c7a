//! The campaign `drain --interfere`: while nodes are drained, people, tenants, other controllers and faults change
//! Evacuations, nodes, budgets, pods, Deployments, maintenances and our services; see [`script`] for the list. An
//! [`observer`] checks throughout that a drain continues or reports the true blocker, and at the end that nothing is
//! left over.
//!
//! The seed determines what is done and when. How far each pod is by then depends on the machine.

mod actions;
mod env;
mod evacuators;
mod observer;
mod rejections;
mod script;
mod surging;

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, NodeMaintenance};
use jiff::SignedDuration;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams};
use kube::runtime::watcher;
use serde_json::json;
use tokio::sync::watch as latest;
use tokio_util::task::AbortOnDropHandle;

use self::actions::{Controllers, Interferer, ignore_stale};
use self::env::{PINNED, POOL, SILENT, SoakEnv, UNDISTURBED, WAITS};
use self::evacuators::Mode;
use self::observer::{Observer, Timeline};
use self::script::Script;
use super::Round;
use super::replicas::Replicas;
use crate::service::SERVED_CLASSES;
use crate::{Cluster, wait};

/// Number of lines of the timeline that a failure prints. The file has all of them.
const SHOWN: usize = 150;
/// How long the round may take to finish after interference ends.
const LIMIT: Duration = Duration::from_secs(150);
/// Long enough that a leader keeps its Lease on a busy machine: while leaders change, statuses cannot be checked.
const LEASE_SECONDS: &str = "8";
/// Longer than the progress deadline of an evacuator.
const DEADLINE: Duration = Duration::from_secs(31 * 60);

/// Longer than the backoff of an eviction that was rejected many times, and shorter than the progress deadline of an
/// evacuator.
const BACKOFF: Duration = Duration::from_secs(16 * 60);

/// Runs one round. Returns a summary.
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
    let env = Box::pin(SoakEnv::prepare(interferers, random.fork())).await?;
    let pods = env.pods;
    let audit_log = cluster.audit_log.clone().context("the cluster has an audit log")?;
    let client = cluster.client_as("observer").await?;
    let observer = Observer::start(client, audit_log, timeline.clone(), &UNDISTURBED).await?;
    let start = |name, args| Replicas::start_with(cluster, name, LEASE_SECONDS, args);
    let controllers = Controllers {
        workload: start("workload-evacuator", &[]).await?,
        maintenance: start("maintenance-controller", &[SERVED_CLASSES]).await?,
        evacuation: start("evacuation-controller", &[SERVED_CLASSES]).await?,
    };
    let (mode, receiver) = latest::channel(Mode::Work);
    let evacuating =
        evacuators::run(cluster.client_as("evacuator").await?, timeline.clone(), random.fork(), receiver);
    let _evacuators = AbortOnDropHandle::new(tokio::spawn(evacuating));
    let progress = round.progress.as_ref();
    let mut interferer = Interferer {
        cluster,
        env,
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
        observer.check_intents(&interferer.env.intents).await?;
        interferer.begin_to_finish().await?;
        let passes = if script.time_passes { DEADLINE } else { BACKOFF };
        let silent = interferer.shift_clocks(passes, &observer).await?;
        if script.time_passes {
            mode.send_replace(Mode::FinishButSilent);
            interferer.until_inactive(&silent).await?;
        }
        // Otherwise, evacuators whose turn begins only now would have another half hour.
        mode.send_replace(Mode::Finish);
        interferer.finish(random.fork()).await?;
        observer.finish(&interferer.env.nodes, &interferer.env.intents).await
    };
    tokio::select! {
        done = all => done?,
        failure = observer.failed() => return Err(anyhow!(failure)),
    }
    let (actions, checks) = (script.steps.len(), observer.checks());
    Ok(format!("{pods} pods, {actions} actions, {checks} checks of maintenances without activity"))
}

/// Whether a silent evacuator is active, or was the last active one.
fn is_silent(evacuation: &Evacuation) -> bool {
    evacuation.status.as_ref().and_then(|status| status.active_evacuator_class.as_deref()) == Some(SILENT)
}

fn is_drained(maintenance: &NodeMaintenance) -> bool {
    let conditions = maintenance.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|condition| condition.type_ == "Drained" && condition.status == "True")
}

impl Interferer<'_> {
    /// Ends the interference and allows everything to finish.
    async fn begin_to_finish(&mut self) -> Result<()> {
        self.timeline.note("INTERFERER", "interference ends");
        (self.progress)("interference ends");
        let params = DeleteParams::default();
        self.env.budget_api().delete_collection(&params, &ListParams::default()).await?;
        ignore_stale(self.env.deployment_api().delete(PINNED, &params).await.map(drop))?;
        self.env.intents.removed_all("PodDisruptionBudget");
        self.env.intents.removed("Deployment", PINNED);
        ignore_stale(self.env.pod_api().delete(WAITS, &params).await.map(drop))?;
        Ok(())
    }

    /// Moves the controllers' clocks forward. Returns the Evacuations whose active evacuator was silent before.
    async fn shift_clocks(&mut self, by: Duration, observer: &Observer) -> Result<BTreeSet<String>> {
        // The API server enforces a policy for about a second after its deletion. Rejections during that time would
        // be recorded with the new clock.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let all = self.env.evacuation_api().list(&ListParams::default()).await?;
        observer.clocks_are_ahead(SignedDuration::try_from(by)?);
        self.controllers.evacuation.put_clocks_forward(by).await?;
        self.controllers.maintenance.put_clocks_forward(by).await?;
        Ok(all.iter().filter(|evacuation| is_silent(evacuation)).map(ResourceExt::name_any).collect())
    }

    /// Waits until none of these evacuators is active any more.
    async fn until_inactive(&self, silent: &BTreeSet<String>) -> Result<()> {
        let waits = |e: &Evacuation| is_silent(e) && silent.contains(&e.name_any());
        let (api, config) = (self.env.evacuation_api(), watcher::Config::default());
        wait::all(api, config, "have left silent evacuators", LIMIT, |all| !all.iter().any(waits)).await?;
        Ok(())
    }

    /// Waits until drains complete, and then ends all maintenances.
    async fn finish(&mut self, mut random: fastrand::Rng) -> Result<()> {
        let params = DeleteParams::default();
        let api = self.env.maintenance_api();
        let config = watcher::Config::default();
        // A maintenance that selects no node is never drained.
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
