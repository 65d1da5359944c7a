//! How long one pod waits when it may leave: after the request, and after its budget allows it.

use std::collections::{HashMap, HashSet};
use std::pin::pin;

use anyhow::{Context as _, Result, bail, ensure};
use futures::TryStreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::json;

use super::super::stop;
use super::{BenchEnv, LIMIT, evict};
use crate::requests::{Request, Requests};
use crate::{objects, wait};

/// Number of Evacuations in one round.
const ASKED_FOR: usize = 50;
const COVERED: u16 = 20;

const BUDGET: &str = "bench";
const DISRUPTION_CONTROLLER: &str = "system:serviceaccount:kube-system:disruption-controller";

impl BenchEnv {
    /// Latencies from creation to eviction by the controller, in milliseconds.
    pub(super) async fn idle(&self) -> Result<Vec<f64>> {
        let controller = self.controller().await?;
        let waits = self.one_by_one().await;
        stop(controller).await?;
        waits
    }

    /// The same for a plain loop.
    pub(super) async fn idle_loop(&self) -> Result<Vec<f64>> {
        tokio::select! {
            waits = self.one_by_one() => waits,
            ended = self.watch_and_evict() => bail!("the loop ended: {ended:?}"),
        }
    }

    /// Requests one evacuation after the other.
    async fn one_by_one(&self) -> Result<Vec<f64>> {
        let pods = self.pods(ASKED_FOR, ASKED_FOR).await?;
        let mark = self.cluster.requests_mark()?;
        for pod in &pods {
            let name = self.ask_for(pod).await?;
            wait::gone(self.evacuations(), &name, LIMIT).await?;
        }
        let requests = self.cluster.requests_since(mark)?;
        let created: HashMap<_, _> = requests
            .verb("create")
            .resource("evacuations", "")
            .iter()
            .filter_map(|request| Some((request.name.get(37..)?.to_owned(), request.answered)))
            .collect();
        let waits: Vec<_> = evictions(&requests)
            .filter_map(|eviction| Some(milliseconds(*created.get(&eviction.name)?, eviction.received)))
            .collect();
        ensure!(waits.len() == ASKED_FOR, "{} of {ASKED_FOR} evictions were found", waits.len());
        Ok(waits)
    }

    async fn watch_and_evict(&self) -> Result<()> {
        let pods = self.acting_pods();
        let all = watcher(self.evacuations(), watcher::Config::default());
        let mut applied = pin!(all.default_backoff().applied_objects());
        let mut known = HashSet::new();
        while let Some(evacuation) = applied.try_next().await? {
            if known.insert(evacuation.uid()) {
                evict(&pods, &evacuation.spec.pod_ref.name).await?;
                self.end(&evacuation.name_any()).await?;
            }
        }
        Ok(())
    }

    /// Latencies from an allowed disruption to the eviction by the controller, in milliseconds.
    pub(super) async fn freed(&self) -> Result<Vec<f64>> {
        let controller = self.controller().await?;
        let pods = self.covered_pods().await?;
        for pod in &pods {
            let name = self.ask_for(pod).await?;
            let is_blocked = |evacuation: &haulout_api_types::Evacuation| {
                evacuation.status.as_ref().is_some_and(|status| !status.conditions.is_empty())
            };
            wait::present(self.evacuations(), &name, "is blocked", LIMIT, is_blocked).await?;
        }
        let waits = self.free_one_by_one().await;
        stop(controller).await?;
        waits
    }

    /// The same for a plain loop.
    pub(super) async fn freed_loop(&self) -> Result<Vec<f64>> {
        let pods = self.covered_pods().await?;
        tokio::select! {
            waits = self.free_one_by_one() => waits,
            ended = self.evict_when_allowed(&pods) => bail!("the loop ended: {ended:?}"),
        }
    }

    /// Creates pods that are covered by a budget that allows no disruption.
    async fn covered_pods(&self) -> Result<Vec<Pod>> {
        let pods = self.pods(COVERED.into(), COVERED.into()).await?;
        let budget = objects::pdb(BUDGET).min_available(&COVERED.to_string()).build();
        self.budgets().create(&PostParams::default(), &budget).await.context("creating a budget")?;
        self.until_exhausted(COVERED).await?;
        Ok(pods)
    }

    /// Lowers the budget step by step until no pod is left.
    async fn free_one_by_one(&self) -> Result<Vec<f64>> {
        let mark = self.cluster.requests_mark()?;
        for left in (0..COVERED).rev() {
            let lower = Patch::Merge(json!({"spec": {"minAvailable": left}}));
            self.budgets()
                .patch(BUDGET, &PatchParams::default(), &lower)
                .await
                .context("lowering the budget")?;
            self.until_exhausted(left).await?;
        }
        let requests = self.cluster.requests_since(mark)?;
        self.budgets().delete(BUDGET, &DeleteParams::default()).await.context("deleting the budget")?;
        wait::gone(self.budgets(), BUDGET, LIMIT).await?;
        self.ensure_empty().await?;
        let updates =
            requests.by_user(DISRUPTION_CONTROLLER).resource("poddisruptionbudgets", "status").code(200);
        let waits: Vec<_> = evictions(&requests)
            .filter_map(|eviction| {
                let before = updates.iter().filter(|update| update.received < eviction.received);
                let freed = before.max_by_key(|update| update.received)?;
                Some(milliseconds(freed.answered, eviction.received))
            })
            .collect();
        ensure!(waits.len() == usize::from(COVERED), "{} of {COVERED} evictions were found", waits.len());
        Ok(waits)
    }

    /// Waits until the budget covers this many pods and allows no disruption.
    async fn until_exhausted(&self, pods: u16) -> Result<()> {
        let is_exhausted = |budget: &PodDisruptionBudget| {
            budget.status.as_ref().is_some_and(|status| {
                status.observed_generation == budget.metadata.generation
                    && status.expected_pods == i32::from(pods)
                    && status.disruptions_allowed == 0
            })
        };
        wait::present(self.budgets(), BUDGET, &format!("covers {pods} pods"), LIMIT, is_exhausted).await?;
        Ok(())
    }

    async fn evict_when_allowed(&self, pods: &[Pod]) -> Result<()> {
        let api = self.acting_pods();
        let mut pods = pods.iter();
        let all = watcher(self.budgets(), watcher::Config::default());
        let mut applied = pin!(all.default_backoff().applied_objects());
        while let Some(budget) = applied.try_next().await? {
            if budget.status.is_some_and(|status| status.disruptions_allowed > 0)
                && let Some(pod) = pods.next()
            {
                evict(&api, &pod.name_any()).await?;
            }
        }
        Ok(())
    }
}

/// The successful evictions.
fn evictions(requests: &Requests) -> impl Iterator<Item = Request> {
    let evictions = requests.verb("create").resource("pods", "eviction").code(201);
    evictions.iter().cloned().collect::<Vec<_>>().into_iter()
}

fn milliseconds(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64() * 1e3
}
