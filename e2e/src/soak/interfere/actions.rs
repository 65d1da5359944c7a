//! Carries out a script: people, tenants, other controllers and faults, all played by a client with admin
//! permissions, and the controllers that are killed and stopped.

use std::time::Duration;

use anyhow::{Context as _, Result};
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, NodeMaintenance};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, ListParams, ObjectList, Patch, PatchParams, PostParams};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until};

use super::env::{self, NODES, PINNED, POOL, SPARE, SoakEnv, UNDISTURBED, object};
use super::observer::Timeline;
use super::rejections::{self, Overload};
use super::script::{Action, Script, Step};
use super::surging;
use crate::handle::Handle;
use crate::soak::replicas::Replicas;
use crate::wait;

/// A finalizer that is never removed automatically.
pub(super) const FOREIGN: &str = "example.com/hold";
const LIMIT: Duration = Duration::from_secs(60);

/// The services that take part in drains.
pub(super) struct Controllers<'a> {
    pub(super) maintenance: Replicas<'a>,
    pub(super) evacuation: Replicas<'a>,
    pub(super) workload: Replicas<'a>,
}

/// Carries out the actions.
pub(super) struct Interferer<'a> {
    pub(super) cluster: &'a Handle,
    pub(super) env: SoakEnv,
    pub(super) controllers: Controllers<'a>,
    pub(super) timeline: Timeline,
    /// Receives progress messages.
    pub(super) progress: &'a dyn Fn(&str),
    /// What has to be undone, and when.
    pub(super) pending: Vec<(Instant, Undo)>,
    /// Number of maintenances created so far.
    pub(super) maintenances: u32,
}

/// How the effect of an action is undone.
pub(super) enum Undo {
    Label(&'static str, &'static str),
    Finalizer(String),
    Budget(String),
    Policy(&'static str),
    Overload(Overload),
    EvacuationController,
    WorkloadEvacuator,
    /// Changes the specification of a Deployment back.
    Deployment(String, Value),
    Recreate(Box<Deployment>),
    Ready(String),
    Spare(Vec<&'static str>),
}

/// A random element; `None` if there is none.
fn choose<K>(found: ObjectList<K>, random: &mut fastrand::Rng) -> Option<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned,
{
    let mut found = found.items;
    found.sort_by_key(ResourceExt::name_any);
    let place = random.usize(..found.len().max(1));
    (place < found.len()).then(|| found.swap_remove(place))
}

impl Interferer<'_> {
    /// Carries out the whole script, and returns when all effects are undone.
    pub(super) async fn carry_out(&mut self, script: &Script) -> Result<()> {
        let begun = Instant::now();
        let mut is_second = false;
        for step in &script.steps {
            self.undo_until(begun + step.at).await?;
            if step.at >= script.second && !is_second {
                is_second = true;
                self.drain_spare().await?;
            }
            let name = step.action.name();
            let done = self.act(step).await.with_context(|| format!("interfering: {name}"))?;
            let done = done.unwrap_or_else(|| "found nothing to do".to_owned());
            (self.progress)(&format!("{name}: {done}"));
            self.timeline.note("INTERFERER", format!("{name}: {done}"));
        }
        self.undo_until(begun + script.end).await?;
        self.undo_all().await
    }

    /// Drains a node to which pods have moved, so that some of them move again.
    async fn drain_spare(&mut self) -> Result<()> {
        let field = json!({"key": "metadata.name", "operator": "In", "values": [SPARE[0]]});
        let selector = json!({"nodeSelectorTerms": [{"matchFields": [field]}]});
        let name = self.maintain(selector, Stage::Drain, false).await?;
        self.timeline.note("INTERFERER", format!("{name} drains {}", SPARE[0]));
        Ok(())
    }

    /// Waits until then, and undoes what is due before.
    async fn undo_until(&mut self, then: Instant) -> Result<()> {
        loop {
            let due = self.pending.iter().enumerate().min_by_key(|(_, (due, _))| *due);
            let Some((place, due)) =
                due.map(|(place, (due, _))| (place, *due)).filter(|(_, due)| *due <= then)
            else {
                break;
            };
            sleep_until(due).await;
            let (_, undo) = self.pending.swap_remove(place);
            self.undo(undo).await?;
        }
        sleep_until(then).await;
        Ok(())
    }

    async fn undo_all(&mut self) -> Result<()> {
        for (_, undo) in std::mem::take(&mut self.pending) {
            self.undo(undo).await?;
        }
        Ok(())
    }

    async fn undo(&mut self, undo: Undo) -> Result<()> {
        let done = match undo {
            Undo::Label(node, pool) => {
                let patch = json!({"metadata": {"labels": {POOL: pool}}});
                ignore_stale(
                    self.env.node_api().patch(node, &PatchParams::default(), &Patch::Merge(patch)).await,
                )?;
                format!("node {node} is back in pool {pool}")
            }
            Undo::Finalizer(name) => {
                self.release(&name).await?;
                format!("removed the foreign finalizer of Evacuation {name}")
            }
            Undo::Budget(name) => {
                ignore_stale(self.env.budget_api().delete(&name, &DeleteParams::default()).await)?;
                self.env.intents.removed("PodDisruptionBudget", &name);
                format!("deleted budget {name}")
            }
            Undo::Policy(name) => {
                rejections::allow(&self.env.client, name).await?;
                format!("policy {name} is gone")
            }
            Undo::Overload(overload) => {
                overload.end(&self.env.client).await?;
                "evictions are accepted again".to_owned()
            }
            Undo::EvacuationController => {
                self.controllers.evacuation.start_again().await?;
                "the evacuation controller is running again".to_owned()
            }
            Undo::WorkloadEvacuator => {
                self.controllers.workload.start_again().await?;
                "the workload evacuator is running again".to_owned()
            }
            Undo::Deployment(name, spec) => {
                let text = format!("changed Deployment {name} back: {spec}");
                surging::patch_deployment(&mut self.env, &name, spec).await?;
                text
            }
            Undo::Recreate(deployment) => {
                format!("recreated Deployment {}", surging::recreate(&mut self.env, *deployment).await?)
            }
            Undo::Ready(pod) => {
                surging::set_ready(&self.env, &pod, true).await?;
                format!("pod {pod} may be ready")
            }
            Undo::Spare(nodes) => {
                for name in &nodes {
                    self.env.cordon(name, false).await?;
                }
                format!("uncordoned {nodes:?}")
            }
        };
        self.timeline.note("INTERFERER", done);
        Ok(())
    }

    /// Removes the foreign finalizer from an Evacuation.
    pub(super) async fn release(&self, name: &str) -> Result<()> {
        let api = self.env.evacuation_api();
        let Some(evacuation) = api.get_opt(name).await? else { return Ok(()) };
        let kept: Vec<_> = evacuation.finalizers().iter().filter(|one| *one != FOREIGN).collect();
        let patch =
            json!({"metadata": {"finalizers": kept, "resourceVersion": evacuation.resource_version()}});
        ignore_stale(api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await)?;
        Ok(())
    }

    /// Carries out one action. Returns what was done, if there was an object for it.
    async fn act(&mut self, step: &Step) -> Result<Option<String>> {
        let mut random = fastrand::Rng::with_seed(step.seed);
        let (undo, done) = match step.action {
            Action::DeleteEvacuation
            | Action::StripFinalizers
            | Action::HoldEvacuation
            | Action::RelabelEvacuation
            | Action::RewriteConditions => self.on_evacuation(step.action, &mut random).await?,
            Action::UncordonNode | Action::RelabelNode | Action::RecreateNode => {
                self.on_node(step.action, &mut random).await?
            }
            Action::DeleteBudget
            | Action::CreateBudget
            | Action::DoubleBudget
            | Action::TightenBudget
            | Action::LoosenBudget => self.on_budget(step.action, &mut random).await?,
            Action::DeletePod => (None, self.delete_pod(&mut random).await?),
            Action::CompleteMaintenance
            | Action::DeleteMaintenance
            | Action::OverlapMaintenance
            | Action::CompleteUnled => (None, self.on_maintenance(step.action, &mut random).await?),
            Action::RejectEvacuations => self.reject("reject-evacuations").await?,
            Action::RejectNodes => {
                let rejected = self.reject("reject-nodes").await?;
                // So that the controller has something to write.
                sleep(Duration::from_secs(1)).await;
                self.on_node(Action::UncordonNode, &mut random).await?;
                rejected
            }
            Action::RejectEvictions => self.reject("reject-evictions").await?,
            Action::OverloadEvictions => self.overload().await?,
            Action::StopEvacuationController => {
                self.controllers.evacuation.stop(random.bool()).await?;
                (Some(Undo::EvacuationController), Some(format!("stopped for {} s", step.lasts.as_secs())))
            }
            Action::StopWorkloadEvacuator => {
                self.controllers.workload.stop(random.bool()).await?;
                (Some(Undo::WorkloadEvacuator), Some(format!("stopped for {} s", step.lasts.as_secs())))
            }
            Action::KillWorkloadLeader => {
                let after = Duration::from_millis(random.u64(..1500));
                (None, self.controllers.workload.kill_leader(after).await?)
            }
            Action::ScaleDeployment
            | Action::RollOutDeployment
            | Action::PauseDeployment
            | Action::DeleteDeployment
            | Action::StripFormerOwner
            | Action::StripEvacuatorFinalizer
            | Action::DeleteReplacement
            | Action::BreakReplacement
            | Action::CancelEvacuation
            | Action::CordonSpare => {
                let pending = self.changed_deployments();
                surging::act(&mut self.env, step.action, &pending, &mut random).await?
            }
            Action::KillEvacuationLeader => {
                let after = Duration::from_millis(random.u64(..1500));
                (None, self.controllers.evacuation.kill_leader(after).await?)
            }
            Action::KillMaintenanceLeader => {
                let after = Duration::from_millis(random.u64(..1500));
                (None, self.controllers.maintenance.kill_leader(after).await?)
            }
        };
        if let Some(undo) = undo {
            self.pending.push((Instant::now() + step.lasts, undo));
        }
        Ok(done)
    }

    /// The Deployments that are changed back later.
    fn changed_deployments(&self) -> Vec<String> {
        let names = self.pending.iter().filter_map(|(_, undo)| match undo {
            Undo::Deployment(name, _) => Some(name.clone()),
            Undo::Recreate(deployment) => Some(deployment.name_any()),
            _ => None,
        });
        names.collect()
    }

    async fn reject(&self, name: &'static str) -> Result<(Option<Undo>, Option<String>)> {
        // The previous policy still exists.
        if self.pending.iter().any(|(_, undo)| matches!(undo, Undo::Policy(known) if *known == name)) {
            return Ok((None, None));
        }
        rejections::reject(&self.env.client, name).await?;
        Ok((Some(Undo::Policy(name)), Some("such writes of ours are rejected from now on".to_owned())))
    }

    /// Makes room in a budget while the API server rejects all evictions as too many requests.
    async fn overload(&mut self) -> Result<(Option<Undo>, Option<String>)> {
        if self.pending.iter().any(|(_, undo)| matches!(undo, Undo::Overload(_))) {
            return Ok((None, None));
        }
        let evacuations = self.env.evacuation_api().list(&ListParams::default()).await?;
        let failed = |e: &Evacuation| e.status.as_ref().map_or(0, |status| status.failed_eviction_counter);
        let waits = |e: &&Evacuation| {
            let conditions = e.status.iter().flat_map(|status| &status.conditions);
            conditions.into_iter().any(|c| c.status == "True" && c.reason == "DisruptionBudgetExhausted")
        };
        let waiting = evacuations.items.iter().filter(waits).max_by_key(|e| failed(e));
        let Some(waiting) = waiting else { return Ok((None, None)) };
        let pod = self.env.pod_api().get_opt(&waiting.spec.pod_ref.name).await?;
        let app = pod.as_ref().and_then(|pod| pod.labels().get("app").cloned()).unwrap_or_default();
        let Some(budget) = self.budget_of(&app).await? else { return Ok((None, None)) };
        let overload = Overload::begin(self.cluster, &self.env.client).await?;
        let patch = json!({"spec": {"maxUnavailable": 1, "minAvailable": null}});
        self.patch_budget(&budget, &Patch::Merge(patch)).await?;
        Ok((
            Some(Undo::Overload(overload)),
            Some(format!("evictions are rejected as too many, and budget {budget} has room")),
        ))
    }

    async fn patch_budget(&mut self, name: &str, patch: &Patch<Value>) -> Result<()> {
        let written = self.env.budget_api().patch(name, &PatchParams::default(), patch).await;
        if let Some(written) = ignore_stale(written)? {
            self.env.intents.wrote("PodDisruptionBudget", &written.metadata);
        }
        Ok(())
    }

    async fn budget_of(&self, app: &str) -> Result<Option<String>> {
        let budgets = self.env.budget_api().list(&ListParams::default()).await?;
        Ok(budgets.items.iter().find(|budget| app_of(budget) == app).map(ResourceExt::name_any))
    }

    async fn on_evacuation(
        &self,
        action: Action,
        random: &mut fastrand::Rng,
    ) -> Result<(Option<Undo>, Option<String>)> {
        let api = self.env.evacuation_api();
        let mut all = api.list(&ListParams::default()).await?;
        // Evacuations of pods that return to their node are deleted soon.
        let kept = |pod: &str| !UNDISTURBED.iter().chain([&PINNED]).any(|name| pod.starts_with(name));
        all.items.retain(|evacuation| kept(&evacuation.spec.pod_ref.name));
        let Some(found) = choose(all, random) else { return Ok((None, None)) };
        let (name, pod, params) = (found.name_any(), &found.spec.pod_ref.name, PatchParams::default());
        let patch = async |patch: Value| ignore_stale(api.patch(&name, &params, &Patch::Merge(patch)).await);
        Ok(match action {
            Action::DeleteEvacuation => {
                ignore_stale(api.delete(&name, &DeleteParams::default()).await)?;
                (None, Some(format!("that of {pod}")))
            }
            Action::StripFinalizers => {
                patch(json!({"metadata": {"finalizers": null}})).await?;
                (None, Some(format!("those of {pod}")))
            }
            Action::HoldEvacuation => {
                // No instigator is left, and the finalizer keeps it.
                patch(json!({"metadata": {"finalizers": [FOREIGN]}})).await?;
                ignore_stale(api.delete(&name, &DeleteParams::default()).await)?;
                (
                    Some(Undo::Finalizer(name.clone())),
                    Some(format!("that of {pod}, by the finalizer {FOREIGN}")),
                )
            }
            Action::RelabelEvacuation => {
                let mut labels: serde_json::Map<String, Value> =
                    found.labels().keys().map(|key| (key.clone(), Value::Null)).collect();
                labels.insert("example.com/scribble".into(), "yes".into());
                patch(json!({"metadata": {"labels": labels}})).await?;
                (None, Some(format!("that of {pod}")))
            }
            _ => {
                let now = jiff::Timestamp::now();
                let blocked = |status: &str, reason: &str| {
                    let message = "written by the interferer";
                    json!([{"type": "Blocked", "status": status, "reason": reason, "message": message,
                        "lastTransitionTime": k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now)}])
                };
                let conditions = match random.u8(..3) {
                    0 => json!([]),
                    1 => blocked("False", "NotBlocked"),
                    _ => blocked("True", "Scribble"),
                };
                let text = format!("of {pod} to {conditions}");
                let status = Patch::Merge(json!({"status": {"conditions": conditions}}));
                // A policy rejects reports while no evacuator is active.
                let written = ignore_stale(api.patch_status(&name, &params, &status).await)?;
                (None, written.map(|_| text))
            }
        })
    }

    async fn on_node(
        &mut self,
        action: Action,
        random: &mut fastrand::Rng,
    ) -> Result<(Option<Undo>, Option<String>)> {
        let Some((name, pool)) = random.choice(NODES) else { return Ok((None, None)) };
        let (api, params) = (self.env.node_api(), PatchParams::default());
        // Ends an earlier foreign cordon; and a recreated node is not cordoned.
        let mut forget = || {
            if let Some(expected) = self.env.nodes.get_mut(name) {
                expected.cordoned = false;
            }
        };
        match action {
            Action::UncordonNode => {
                forget();
                let patch = Patch::Merge(json!({"spec": {"unschedulable": false}}));
                ignore_stale(api.patch(name, &params, &patch).await)?;
                Ok((None, Some(name.to_owned())))
            }
            Action::RelabelNode => {
                let patch = Patch::Merge(json!({"metadata": {"labels": {POOL: "elsewhere"}}}));
                ignore_stale(api.patch(name, &params, &patch).await)?;
                Ok((Some(Undo::Label(name, pool)), Some(format!("{name} is in no pool"))))
            }
            _ => {
                forget();
                api.delete(name, &DeleteParams::default()).await?;
                wait::gone(api.clone(), name, LIMIT).await?;
                sleep(Duration::from_millis(random.u64(..3000))).await;
                api.create(&PostParams::default(), &env::node(name, pool)).await?;
                Ok((None, Some(format!("{name} was deleted and recreated"))))
            }
        }
    }

    async fn on_budget(
        &mut self,
        action: Action,
        random: &mut fastrand::Rng,
    ) -> Result<(Option<Undo>, Option<String>)> {
        let api = self.env.budget_api();
        let mut budgets = api.list(&ListParams::default()).await?;
        budgets.items.retain(|budget| !UNDISTURBED.contains(&app_of(budget)));
        if action == Action::CreateBudget {
            let covered: Vec<String> = budgets.iter().map(|budget| app_of(budget).to_owned()).collect();
            let free: Vec<_> = env::apps().filter(|app| !covered.iter().any(|known| known == app)).collect();
            let Some(app) = random.choice(free) else { return Ok((None, None)) };
            self.env.budget(&format!("{app}-late"), app, "maxUnavailable", 0).await?;
            return Ok((None, Some(format!("{app} may not be disrupted"))));
        }
        let Some(found) = choose(budgets, random) else { return Ok((None, None)) };
        let (name, app) = (found.name_any(), app_of(&found));
        let change = |field: &str, number: i32| {
            let mut spec = json!({"maxUnavailable": null, "minAvailable": null});
            if let Some(spec) = spec.as_object_mut() {
                spec.insert(field.to_owned(), number.into());
            }
            Patch::Merge(json!({"spec": spec}))
        };
        Ok(match action {
            Action::DeleteBudget => {
                ignore_stale(api.delete(&name, &DeleteParams::default()).await)?;
                self.env.intents.removed("PodDisruptionBudget", &name);
                (None, Some(name))
            }
            Action::DoubleBudget => {
                let second = format!("{app}-double");
                if api.get_opt(&second).await?.is_some() {
                    return Ok((None, None));
                }
                self.env.budget(&second, app, "minAvailable", 1).await?;
                (Some(Undo::Budget(second.clone())), Some(format!("{second} covers what {name} covers")))
            }
            Action::TightenBudget => {
                self.patch_budget(&name, &change("maxUnavailable", 0)).await?;
                (None, Some(name))
            }
            _ => {
                self.patch_budget(&name, &change("maxUnavailable", 1)).await?;
                (None, Some(name))
            }
        })
    }

    async fn delete_pod(&self, random: &mut fastrand::Rng) -> Result<Option<String>> {
        let api = self.env.pod_api();
        let mut pods = api.list(&ListParams::default()).await?;
        let old = |pod: &Pod| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            node.is_some_and(|node| NODES.iter().any(|(name, _)| *name == node))
        };
        pods.items.retain(|pod| old(pod) && pod.name_any() != "stays");
        let Some(pod) = choose(pods, random).map(|pod| pod.name_any()) else { return Ok(None) };
        ignore_stale(api.delete(&pod, &DeleteParams::default()).await.map(drop))?;
        Ok(Some(pod))
    }

    async fn on_maintenance(&mut self, action: Action, random: &mut fastrand::Rng) -> Result<Option<String>> {
        if action == Action::OverlapMaintenance {
            return self.overlap(random).await.map(Some);
        }
        let api = self.env.maintenance_api();
        let mut found = api.list(&ListParams::default()).await?;
        found.items.retain(|m| m.spec.stage == Stage::Drain && m.metadata.deletion_timestamp.is_none());
        let Some(found) = choose(found, random) else { return Ok(None) };
        let name = found.name_any();
        if action == Action::CompleteUnled {
            let delete = random.bool();
            return self.complete_without_leader(&name, delete).await.map(Some);
        }
        self.end(&name, action == Action::DeleteMaintenance).await?;
        sleep(Duration::from_millis(random.u64(..3000))).await;
        // The nodes are needed again.
        let next = self.maintain(json!(found.spec.node_selector), Stage::Drain, random.bool()).await?;
        Ok(Some(format!("{name} is over, and {next} follows")))
    }

    async fn overlap(&mut self, random: &mut fastrand::Rng) -> Result<String> {
        let mut names: Vec<_> = NODES.iter().map(|(name, _)| *name).collect();
        random.shuffle(&mut names);
        // Sometimes there is no such node.
        names.truncate(random.usize(1..4));
        let names = if random.u8(..5) == 0 { vec!["no-such-node"] } else { names };
        let field = json!({"key": "metadata.name", "operator": "In", "values": names});
        let selector = json!({"nodeSelectorTerms": [{"matchFields": [field]}]});
        let stage = if random.u8(..3) == 0 { Stage::Cordon } else { Stage::Drain };
        let name = self.maintain(selector, stage, random.bool()).await?;
        Ok(format!("{name} is in stage {} on {names:?}", stage.as_str()))
    }

    /// While no maintenance controller leads, the Evacuations of a maintenance are removed, and the maintenance ends.
    async fn complete_without_leader(&mut self, name: &str, delete: bool) -> Result<String> {
        self.controllers.maintenance.stop(false).await?;
        let api = self.env.evacuation_api();
        for evacuation in api.list(&ListParams::default()).await? {
            let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
            ignore_stale(api.patch(&evacuation.name_any(), &PatchParams::default(), &patch).await)?;
        }
        sleep(Duration::from_millis(1500)).await;
        self.end(name, delete).await?;
        sleep(Duration::from_secs(4)).await;
        self.controllers.maintenance.start_again().await?;
        let how = if delete { "deleted" } else { "completed" };
        Ok(format!("{name} was {how} and its Evacuations were removed while nobody led"))
    }

    /// Completes or deletes a maintenance.
    pub(super) async fn end(&self, name: &str, delete: bool) -> Result<()> {
        let api = self.env.maintenance_api();
        if delete {
            ignore_stale(api.delete(name, &DeleteParams::default()).await.map(drop))?;
        } else {
            let patch = Patch::Merge(json!({"spec": {"stage": Stage::Complete}}));
            ignore_stale(api.patch(name, &PatchParams::default(), &patch).await.map(drop))?;
        }
        Ok(())
    }

    /// Creates a maintenance. Returns its name. `finely` gives it its own plan.
    pub(super) async fn maintain(&mut self, selector: Value, stage: Stage, finely: bool) -> Result<String> {
        self.maintenances += 1;
        let name = format!("m{}", self.maintenances);
        let plan = if finely { json!([{"podPriority": 500}]) } else { json!([]) };
        let maintenance: NodeMaintenance = object(json!({
            "metadata": {"name": name},
            "spec": {"nodeSelector": selector, "stage": stage, "drainPlan": plan, "reason": "soak"},
        }))?;
        let api = self.env.maintenance_api();
        api.create(&PostParams::default(), &maintenance).await.context("creating a NodeMaintenance")?;
        Ok(name)
    }
}

/// The workload whose pods a budget covers.
fn app_of(budget: &PodDisruptionBudget) -> &str {
    let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    let labels = selector.and_then(|selector| selector.match_labels.as_ref());
    labels.and_then(|labels| labels.get("app")).map(String::as_str).unwrap_or_default()
}

/// Ignores errors of actions that come too late: the object is gone or was changed in the meantime.
pub(super) fn ignore_stale<T>(answer: kube::Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(done) => Ok(Some(done)),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409 | 422) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
