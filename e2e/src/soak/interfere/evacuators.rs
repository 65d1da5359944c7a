//! The evacuators of a round. They report, stop reporting, complete or forbid cancellation, depending on their class,
//! until everything may finish. Then all complete.

use std::collections::HashSet;
use std::pin::pin;
use std::time::Duration;

use anyhow::Result;
use futures::TryStreamExt as _;
use haulout_api_types::Evacuation;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::watcher;
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::watch as latest;
use tokio::task::JoinSet;

use super::env::{COMPLETES, FORBIDS, NAMESPACE, REPORTS, SILENT};
use super::observer::Timeline;

/// What evacuators have to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Behave as their class requires.
    Work,
    /// Complete.
    Finish,
    /// Complete, except for silent ones: they miss their deadline.
    FinishButSilent,
}

/// Runs until it is dropped. Behaviour depends on the seed and on the order in which evacuators become active.
pub(super) async fn run(
    client: Client,
    timeline: Timeline,
    mut random: fastrand::Rng,
    mode: latest::Receiver<Mode>,
) -> Result<()> {
    let api: Api<Evacuation> = Api::namespaced(client, NAMESPACE);
    let mut events = pin!(watch(api.clone(), watcher::Config::default()).default_backoff().applied_objects());
    let (mut turns, mut known) = (JoinSet::new(), HashSet::new());
    while let Some(evacuation) = events.try_next().await? {
        let class = evacuation.status.as_ref().and_then(|status| status.active_evacuator_class.clone());
        let ours = |class: &String| [COMPLETES, REPORTS, FORBIDS, SILENT].contains(&class.as_str());
        let Some(class) = class.filter(|class| ours(class) && evacuation.is_active(class)) else { continue };
        // A recreated Evacuation is a different one.
        if known.insert((evacuation.uid(), class.clone())) {
            let (api, name) = (api.clone(), evacuation.name_any());
            let turn = Turn { api, name, class, timeline: timeline.clone(), mode: mode.clone() };
            turns.spawn(turn.take(random.fork()));
        }
    }
    Ok(())
}

/// One evacuator, active for one Evacuation.
struct Turn {
    api: Api<Evacuation>,
    name: String,
    class: String,
    timeline: Timeline,
    mode: latest::Receiver<Mode>,
}

impl Turn {
    async fn take(self, mut random: fastrand::Rng) {
        let finish = self.finish();
        let class = self.class.clone();
        tokio::select! {
            () = finish => {}
            () = self.work(&class, &mut random) => {}
        }
        while !self.write(json!({"activeEvacuatorCompleted": true, "message": "done"})).await {
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    }

    /// Behaves as its class requires, and returns when it is done.
    async fn work(&self, class: &str, random: &mut fastrand::Rng) {
        match class {
            COMPLETES => pause(random, 0, 3).await,
            REPORTS => {
                for number in 1..=random.u32(2..5) {
                    self.report(&format!("part {number} is done"), json!({})).await;
                    pause(random, 2, 3).await;
                }
            }
            FORBIDS => {
                let forbid = json!({"evacuationCancellationPolicy": "Forbid"});
                self.report("cannot stop now", forbid).await;
                for _ in 0..random.u32(1..3) {
                    pause(random, 3, 5).await;
                    self.report("cannot stop yet", json!({})).await;
                }
                // It completes with the policy Forbid, or allows cancellation and then stops reporting.
                if random.bool() {
                    self.report("can stop again", json!({"evacuationCancellationPolicy": "Allow"})).await;
                    std::future::pending::<()>().await;
                }
            }
            SILENT => {
                if random.bool() {
                    self.report("started, and never reports again", json!({})).await;
                }
                std::future::pending::<()>().await;
            }
            _ => {}
        }
    }

    /// Resolves when it has to finish.
    fn finish(&self) -> impl Future<Output = ()> + use<> {
        let (mut mode, is_silent) = (self.mode.clone(), self.class == SILENT);
        async move {
            let finishes =
                |mode: &Mode| *mode == Mode::Finish || (*mode == Mode::FinishButSilent && !is_silent);
            if mode.wait_for(finishes).await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    async fn report(&self, message: &str, more: Value) {
        let mut status = json!({"message": message, "evacuationProgressTimestamp": Time(Timestamp::now())});
        if let (Some(status), Some(more)) = (status.as_object_mut(), more.as_object()) {
            status.extend(more.clone());
        }
        // A report that is too late or conflicts counts as not sent.
        self.write(status).await;
    }

    /// Writes the status if the evacuator is still active. Returns whether there is nothing more to write.
    async fn write(&self, status: Value) -> bool {
        let Ok(evacuation) = self.api.get(&self.name).await else { return true };
        if !evacuation.is_active(&self.class) {
            return true;
        }
        let version = evacuation.resource_version();
        let patch = json!({"metadata": {"resourceVersion": version}, "status": status});
        let written = self.api.patch_status(&self.name, &PatchParams::default(), &Patch::Merge(patch)).await;
        let (pod, class) = (&evacuation.spec.pod_ref.name, &self.class);
        self.timeline.note(
            "evacuator",
            match &written {
                Ok(_) => format!("{class} of {pod}: {status}"),
                Err(error) => format!("{class} of {pod} could not report: {error}"),
            },
        );
        written.is_ok()
    }
}

async fn pause(random: &mut fastrand::Rng, least: u64, most: u64) {
    let millis = random.u64(least * 1000..most * 1000);
    tokio::time::sleep(Duration::from_millis(millis)).await;
}
