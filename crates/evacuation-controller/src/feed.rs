//! Feeds the index with what the API server tells, and the queue with what has to be looked at.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;

use futures::TryStreamExt as _;
use haulout_api_types::Evacuation;
use haulout_service_runtime::metrics::Metrics;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::DeserializeGuard;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Api, ResourceExt as _};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::controller::Controller;
use crate::record::Record;

/// Follows all pods.
pub(crate) async fn pods(controller: Arc<Controller>) {
    let mut subscription = controller.pods.subscribe();
    loop {
        for change in subscription.changes().await {
            let keys = controller.index().pod_changed(&change, &controller.pods.read());
            controller.enqueue(keys);
        }
    }
}

/// After each gap in what we see of pods: says since when we see again, and has everything looked at.
pub(crate) async fn gaps(controller: Arc<Controller>) {
    let mut continuity = controller.pods.watch_continuity();
    let mut seen = continuity.borrow_and_update().last_gap_ended;
    // The sender lives in the cache, which we hold.
    while continuity.changed().await.is_ok() {
        let ended = continuity.borrow_and_update().last_gap_ended;
        if ended != seen {
            seen = ended;
            controller.saw_again();
            let keys = controller.index().keys();
            info!(evacuations = keys.len(), "the API server can be watched again");
            controller.enqueue(keys);
        }
    }
}

/// Follows all Evacuations; `listed` when all are known.
pub(crate) async fn evacuations(controller: Arc<Controller>, metrics: Metrics, listed: CancellationToken) {
    let api: Api<DeserializeGuard<Evacuation>> = Api::all(controller.clients.direct.clone());
    let mut events = pin!(watch(api, watcher::Config::default()).default_backoff());
    loop {
        match events.try_next().await {
            Ok(Some(Event::Init)) => controller.index().begin_relist(),
            Ok(Some(Event::InitApply(object) | Event::Apply(object))) => apply(&controller, object),
            Ok(Some(Event::InitDone)) => {
                let gone = controller.index().end_relist();
                for key in gone {
                    controller.removed(key);
                }
                listed.cancel();
            }
            Ok(Some(Event::Delete(object))) => {
                // A UID that cannot be read was not read before either.
                if let Some(key) = object.uid().and_then(|uid| uid.parse().ok()) {
                    controller.removed(key);
                }
            }
            Ok(None) => return,
            Err(error) => {
                warn!(%error, "Evacuations cannot be watched; trying again");
                metrics.watch_restarted("evacuations");
                controller.saw_again();
            }
        }
    }
}

fn apply(controller: &Controller, DeserializeGuard(object): DeserializeGuard<Evacuation>) {
    let evacuation = match object {
        Ok(evacuation) => evacuation,
        Err(problem) => {
            let (namespace, name) = (&problem.metadata.namespace, &problem.metadata.name);
            warn!(?namespace, ?name, %problem, "an Evacuation that cannot be read is left alone");
            if let Some(key) = problem.metadata.uid.and_then(|uid| uid.parse().ok()) {
                controller.forget(key);
            }
            return;
        }
    };
    let (namespace, name) = (evacuation.namespace(), evacuation.name_any());
    let known = evacuation.uid().and_then(|uid| uid.parse().ok());
    let mut index = controller.index();
    match Record::read(evacuation, |text| index.share(text)) {
        Ok(record) => {
            let key = record.uid;
            if index.apply(record) {
                drop(index);
                controller.queue.add(key);
            }
        }
        Err(problem) => {
            drop(index);
            warn!(?namespace, name, %problem, "an Evacuation that cannot be read is left alone");
            if let Some(key) = known {
                controller.forget(key);
            }
        }
    }
}

/// Follows all budgets; `listed` when all are known.
pub(crate) async fn budgets(controller: Arc<Controller>, metrics: Metrics, listed: CancellationToken) {
    let api: Api<PodDisruptionBudget> = Api::all(controller.clients.direct.clone());
    let mut events = pin!(watch(api, watcher::Config::default()).default_backoff());
    let mut names = BTreeSet::new();
    loop {
        let woken = match events.try_next().await {
            Ok(Some(Event::Init)) => {
                names.clear();
                continue;
            }
            Ok(Some(Event::InitApply(budget))) => {
                names.insert((budget.namespace().unwrap_or_default(), budget.name_any()));
                controller.index().budget_applied(budget, &controller.pods.read())
            }
            Ok(Some(Event::Apply(budget))) => {
                controller.index().budget_applied(budget, &controller.pods.read())
            }
            Ok(Some(Event::InitDone)) => {
                let woken = controller.index().budgets_listed(&names, &controller.pods.read());
                listed.cancel();
                woken
            }
            Ok(Some(Event::Delete(budget))) => {
                let (namespace, name) = (budget.namespace().unwrap_or_default(), budget.name_any());
                controller.index().budget_deleted(&namespace, &name, &controller.pods.read())
            }
            Ok(None) => return,
            Err(error) => {
                warn!(%error, "PodDisruptionBudgets cannot be watched; trying again");
                metrics.watch_restarted("poddisruptionbudgets");
                continue;
            }
        };
        controller.enqueue(woken);
    }
}
