//! Pods of Deployments are replaced before they are evicted: the workload evacuator on a real control plane, together with the
//! controllers that use it. The API server has OwnerReferencesPermissionEnforcement, as on OpenShift.

mod cancellation;
mod failures;
mod history;
mod nodes;
mod observers;
mod obstacles;
mod outcomes;
mod owners;
mod rejection;
mod replacement;
mod restarts;
mod rights;
mod rollouts;
mod scaling;
mod slow_pods;
mod wiring;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use haulout_api_types::names::{self, class};
use haulout_api_types::node_maintenance::Stage;
use haulout_api_types::{Evacuation, conditions};
use haulout_e2e::objects::{DeploymentBuilder, PdbBuilder};
use haulout_e2e::{Cluster, Component, Service, objects, wait};
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::{Pod, Service as ClusterService};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::maintenance::scenario::{SHORT_LEASE, SOON, Scenario, TestEnv};
use crate::support::{all_at_once, one_by_one, scenarios};

const SERVED: &str = "--served-evacuator-classes=deployment.apps.k8s.io";

/// Scenarios that run at the same time with one replica of each service.
#[tokio::test]
async fn pods_of_deployments_are_replaced_before_they_are_evicted() {
    let env = Env::boot("deployments", &[]).await;
    let scenarios = scenarios![&env;
        replacement::single_replica_leaves_with_min_available_1,
        replacement::single_replica_leaves_with_max_unavailable_0,
        replacement::twenty_replicas_stay_ready,
        replacement::unavailable_replica_is_not_waited_for,
        cancellation::pod_stays_and_its_replacement_goes,
        cancellation::deletion_cost_is_restored,
        cancellation::repeated_cancellations_are_one_event,
        obstacles::anti_affinity_to_itself_leads_to_eviction,
        obstacles::volume_of_one_node_leads_to_eviction,
        obstacles::quota_leads_to_eviction,
        obstacles::lack_of_room_is_waited_for,
        outcomes::deployments_that_cannot_surge_are_evicted,
        outcomes::pods_without_a_deployment_are_evicted,
        outcomes::deployment_scaled_to_zero_takes_the_pod_along,
        outcomes::deployment_deleted_with_orphans_keeps_its_pods,
        rights::account_can_only_change_owners_of_pods,
    ];
    all_at_once(scenarios).await;
}

/// The same, while others change the Deployment, its pods or their nodes.
#[tokio::test]
async fn deployments_and_their_pods_change_during_the_replacement() {
    let env = Env::boot("deployments-change", &["--lease-seconds", "30"]).await;
    let scenarios = scenarios![&env;
        rollouts::rollout_is_in_progress_when_the_drain_starts,
        rollouts::rollout_starts_in_the_middle,
        rollouts::rollout_and_drain_start_at_once,
        rollouts::paused_deployment_replaces_its_pods,
        scaling::deployment_is_scaled_up_in_the_middle,
        scaling::moved_pod_goes_first_when_the_deployment_is_scaled_down,
        scaling::replica_set_deletes_pods_in_evacuation_first,
        scaling::replica_set_deletes_pods_while_they_are_moved,
        owners::deployment_deleted_in_the_background_takes_the_pod_along,
        owners::deployment_deleted_in_the_foreground_takes_the_pod_along,
        owners::pods_of_a_replication_controller_are_left_to_eviction,
        owners::pods_of_argo_rollouts_are_left_to_eviction,
        owners::pods_of_other_owners_are_left_to_eviction,
        owners::former_replica_set_is_gone_at_cancellation,
        owners::former_replica_set_wants_no_pods_at_cancellation,
        failures::old_pod_is_deleted_by_somebody,
        failures::old_pod_fails,
        failures::node_of_the_old_pod_is_deleted,
        failures::node_of_the_old_pod_is_not_ready,
        nodes::replacement_lands_on_a_node_under_maintenance,
        nodes::two_nodes_are_drained_at_once,
    ];
    all_at_once(scenarios).await;
}

/// What keeps a replacement from starting, what a cancelled evacuation leaves, and what others observe.
#[tokio::test]
async fn obstacles_cancellation_and_observers_of_replacements() {
    let env = Env::boot("deployments-observed", &[]).await;
    let scenarios = scenarios![&env;
        obstacles::host_port_in_use_leads_to_eviction,
        obstacles::topology_spread_that_cannot_hold_leads_to_eviction,
        obstacles::policy_that_rejects_the_move_leads_to_eviction,
        obstacles::policy_that_rejects_the_new_pod_leads_to_eviction,
        obstacles::webhook_that_does_not_answer_is_waited_for,
        obstacles::image_that_cannot_be_pulled_leads_to_eviction,
        obstacles::replacement_that_is_never_ready_is_waited_for_until_the_progress_deadline,
        obstacles::namespace_that_opts_out_leads_to_eviction,
        cancellation::pod_without_our_finalizer_is_given_back_when_cancelled,
        cancellation::pod_is_given_back_when_its_evacuation_is_gone,
        cancellation::deleted_evacuation_in_the_queue_is_cancelled_by_its_instigator,
        observers::rollout_status_waits_and_then_succeeds,
        observers::available_replicas_are_lower_by_the_pods_that_leave,
        observers::expected_pods_of_budgets_are_those_of_the_scale,
        observers::drain_by_others_needs_no_force,
        observers::drain_by_others_evicts_at_once_if_the_budget_allows,
        observers::autoscalers_read_the_same_scale,
        observers::argo_cd_shows_progressing_and_never_degraded,
    ];
    all_at_once(scenarios).await;
    observers::nobody_changes_budgets_or_deployments(&env);
}

/// One after the other, because most of them stop the evacuator.
#[tokio::test]
async fn evacuator_that_stops_or_waits_for_room() {
    let args = ["--lease-seconds", SHORT_LEASE, "--wait-for-room-seconds", "5"];
    let env = Env::boot("deployments-restarts", &args).await;
    let scenarios = scenarios![&env;
        obstacles::room_is_waited_for_as_long_as_configured,
        restarts::killed_evacuator_continues_where_it_stopped,
        restarts::evacuator_without_a_leader_is_passed_over_after_a_minute,
    ];
    one_by_one(scenarios).await;
}

/// With all services as the chart configures them.
#[tokio::test]
async fn served_classes_reach_every_service() {
    wiring::served_class_reaches_every_instigator().await;
    wiring::class_that_is_not_served_is_named_by_nobody().await;
}

/// The three services on one cluster.
struct Env {
    env: TestEnv,
    /// `None` if the chart does not install it.
    evacuator: Mutex<Option<Arc<Service>>>,
}

impl Deref for Env {
    type Target = TestEnv;

    fn deref(&self) -> &TestEnv {
        &self.env
    }
}

impl Env {
    async fn boot(name: &str, args: &[&str]) -> Self {
        let plugins = "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement";
        let cluster = Cluster::builder().name(name).audit(true).extra_args(Component::ApiServer, [plugins]);
        let cluster = cluster.boot().await.unwrap();
        cluster.install_chart(&[]).await.unwrap();
        let evacuator = start(&cluster, args).await;
        let env = TestEnv::on(cluster, None, "30", &[SERVED]).await;
        Self { env, evacuator: Mutex::new(Some(Arc::new(evacuator))) }
    }

    fn evacuator(&self) -> Arc<Service> {
        self.evacuator.lock().unwrap().clone().expect("an evacuator")
    }
}

async fn start(cluster: &Cluster, args: &[&str]) -> Service {
    let service = Service::start(cluster, "workload-evacuator", args).await.unwrap();
    service.leads().await.unwrap();
    service
}

/// A Deployment on the nodes of a pool, with a Service.
struct App<'a> {
    env: &'a Env,
    scenario: Scenario<'a>,
    name: &'static str,
    /// What must not change.
    before: Mutex<Option<(Value, Option<i64>)>>,
}

impl<'a> App<'a> {
    /// Nodes `a`, `b` and so on in the pool `pool`, and a Deployment `web` whose pods are all on node `a` at first.
    async fn new(env: &'a Env, name: &'static str, nodes: &[&str], replicas: i32) -> Self {
        Self::with(env, name, nodes, objects::deployment("web").replicas(replicas)).await
    }

    async fn with(env: &'a Env, name: &'static str, nodes: &[&str], deployment: DeploymentBuilder) -> Self {
        let app = Self::empty(env, name, nodes).await;
        app.deploy(deployment).await;
        app
    }

    /// The nodes alone. All except the first are cordoned until the pods run.
    async fn empty(env: &'a Env, name: &'static str, nodes: &[&str]) -> Self {
        let scenario = env.scenario(name).await;
        for node in nodes {
            scenario.node(node, "pool").await;
        }
        let app = Self { env, scenario, name: "web", before: Mutex::default() };
        for node in nodes.iter().skip(1) {
            app.scenario.patch_node(node, json!({"spec": {"unschedulable": true}})).await;
        }
        app
    }

    /// Creates the Deployment with a Service, and waits until its pods run on the first node.
    async fn deploy(&self, deployment: DeploymentBuilder) {
        let here = json!({"pool": self.scenario.of("pool")});
        let deployment = deployment.namespace(self.scenario.name).pods(|pod| {
            pod.delete_delay(1)
                .grace(2)
                .with(|spec| spec.node_selector = serde_json::from_value(here).unwrap())
        });
        let service: ClusterService = serde_json::from_value(json!({
            "metadata": {"name": self.name},
            "spec": {"selector": {"app": self.name}, "ports": [{"port": 80}]},
        }))
        .unwrap();
        let services: Api<ClusterService> = self.api();
        services.create(&PostParams::default(), &service).await.unwrap();
        self.scenario.deployments().create(&PostParams::default(), &deployment.build()).await.unwrap();
        let is_ready = |deployment: &Deployment| {
            let status = deployment.status.clone().unwrap_or_default();
            let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
            status.available_replicas == wanted && status.updated_replicas == wanted
        };
        let ready =
            wait::present(self.scenario.deployments(), self.name, "is available", SOON, is_ready).await;
        *self.before.lock().unwrap() = Some(intent(&self.scenario.explained(ready)));
        self.until_endpoints().await;
    }

    /// Waits until each replica has a ready endpoint.
    async fn until_endpoints(&self) {
        let slices = watcher::Config::default().labels(&format!("kubernetes.io/service-name={}", self.name));
        let replicas = usize::try_from(self.replicas().await).unwrap();
        let listed =
            wait::all(self.api(), slices, "list the endpoints", SOON, |slices: &[EndpointSlice]| {
                ready_endpoints(slices) == replicas
            });
        self.scenario.explained(listed.await);
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client(), self.scenario.name)
    }

    fn client(&self) -> Client {
        self.env.client.clone()
    }

    async fn replicas(&self) -> i32 {
        self.scenario.deployments().get(self.name).await.unwrap().spec.unwrap().replicas.unwrap()
    }

    /// Makes these nodes schedulable.
    async fn open(&self, nodes: &[&str]) {
        for node in nodes {
            self.scenario.patch_node(node, json!({"spec": {"unschedulable": false}})).await;
        }
    }

    async fn budget(&self, budget: PodDisruptionBudget) {
        let budgets: Api<PodDisruptionBudget> = self.api();
        let name = budget.name_any();
        budgets.create(&PostParams::default(), &budget).await.unwrap();
        let observed = |budget: &PodDisruptionBudget| {
            budget.status.as_ref().is_some_and(|status| {
                status.observed_generation == budget.metadata.generation && status.expected_pods > 0
            })
        };
        wait::present(budgets, &name, "is observed", SOON, observed).await.unwrap();
    }

    async fn pods(&self) -> Vec<Pod> {
        let selector = kube::api::ListParams::default().labels(&format!("app={}", self.name));
        self.scenario.pods().list(&selector).await.unwrap().items
    }

    /// The only pod.
    async fn pod(&self) -> Pod {
        let mut pods = self.pods().await;
        assert_eq!(pods.len(), 1, "{pods:?}");
        pods.remove(0)
    }

    async fn patch(&self, patch: Value) {
        let patch = Patch::Merge(patch);
        self.scenario.deployments().patch(self.name, &PatchParams::default(), &patch).await.unwrap();
    }

    async fn patch_pod(&self, pod: &Pod, patch: Value) {
        let params = PatchParams::default();
        self.scenario.pods().patch(&pod.name_any(), &params, &Patch::Merge(patch)).await.unwrap();
    }

    /// Drains the first node.
    async fn drain(&self) {
        self.drain_node("a").await;
    }

    /// Drains one node, with a maintenance of its name.
    async fn drain_node(&self, node: &str) {
        let maintenance = serde_json::from_value(json!({
            "metadata": {"name": self.scenario.of(node)},
            "spec": {
                "nodeSelector": {"nodeSelectorTerms": [
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [self.scenario.of(node)]}]},
                ]},
                "stage": Stage::Drain,
            },
        }));
        self.scenario.maintenances().create(&PostParams::default(), &maintenance.unwrap()).await.unwrap();
    }

    /// Waits until a pod of this Deployment meets the condition.
    async fn until_pod(&self, what: &str, condition: impl Fn(&Pod) -> bool) -> Pod {
        let pods = watcher::Config::default().labels(&format!("app={}", self.name));
        let found =
            wait::all(self.scenario.pods(), pods, what, SOON, |pods| pods.iter().any(&condition)).await;
        self.explained(found).into_iter().find(&condition).unwrap()
    }

    /// Waits until all pods of this Deployment meet the condition.
    async fn until_pods(&self, what: &str, condition: impl Fn(&[Pod]) -> bool) -> Vec<Pod> {
        let pods = watcher::Config::default().labels(&format!("app={}", self.name));
        self.explained(wait::all(self.scenario.pods(), pods, what, SOON, condition).await)
    }

    /// Waits until the Evacuation of a pod meets the condition.
    async fn until_evacuation(
        &self,
        pod: &Pod,
        what: &str,
        condition: impl Fn(&Evacuation) -> bool,
    ) -> Evacuation {
        let name = haulout_api_types::evacuators::evacuation_name(&pod.uid().unwrap(), &pod.name_any());
        self.explained(wait::present(self.scenario.evacuations(), &name, what, SOON, condition).await)
    }

    /// Waits for an event of the Deployment. Returns its note.
    async fn until_event(&self, reason: &str) -> String {
        let events: Api<k8s_openapi::api::events::v1::Event> = self.api();
        let is = |event: &k8s_openapi::api::events::v1::Event| event.reason.as_deref() == Some(reason);
        let what = format!("include {reason}");
        let found =
            wait::all(events, watcher::Config::default(), &what, SOON, |events| events.iter().any(is)).await;
        self.explained(found).into_iter().find(is).unwrap().note.unwrap()
    }

    fn explained<T>(&self, result: anyhow::Result<T>) -> T {
        result.unwrap_or_else(|error| {
            let evacuator = self.env.evacuator.lock().unwrap().clone();
            let evacuator = evacuator.map(|service| service.text()).unwrap_or_default();
            let lines: Vec<_> = evacuator.lines().filter(|line| line.contains(self.scenario.name)).collect();
            let last = lines[lines.len().saturating_sub(10)..].join("\n");
            self.scenario.explained(Err(error.context(format!("workload evacuator:\n{last}"))))
        })
    }

    /// Nobody has changed the Deployment, and its pods belong to its ReplicaSets as if nothing had happened.
    async fn is_as_before(&self) {
        let deployment = self.scenario.deployments().get(self.name).await.unwrap();
        assert_eq!(Some(intent(&deployment)), *self.before.lock().unwrap());
        for pod in self.pods().await {
            assert_untouched(&pod);
        }
        let budgets: Api<PodDisruptionBudget> = self.api();
        for budget in budgets.list(&kube::api::ListParams::default()).await.unwrap() {
            assert_eq!(budget.metadata.generation, Some(1), "{budget:?}");
        }
    }
}

/// What the owner of a Deployment wants, and its generation.
fn intent(deployment: &Deployment) -> (Value, Option<i64>) {
    (json!(deployment.spec), deployment.metadata.generation)
}

/// The pod belongs to its ReplicaSet, and has no annotation of ours.
fn assert_untouched(pod: &Pod) {
    assert!(is_untouched(pod), "{:?}", pod.metadata);
}

fn is_untouched(pod: &Pod) -> bool {
    let owners: Vec<_> = pod
        .owner_references()
        .iter()
        .map(|owner| (owner.kind.as_str(), owner.controller, owner.block_owner_deletion))
        .collect();
    owners == [("ReplicaSet", Some(true), Some(true))]
        && !pod.annotations().contains_key(names::FORMER_OWNER_ANNOTATION)
        && !pod.annotations().contains_key(names::POD_DELETION_COST_ANNOTATION)
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Whether the pod belongs to its Deployment.
fn is_moved(pod: &Pod) -> bool {
    pod.owner_references().iter().any(|owner| owner.kind == "Deployment")
}

fn is_on(pod: &Pod, node: &str) -> bool {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node)
}

fn is_terminating(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

fn message(evacuation: &Evacuation) -> String {
    evacuation.status.as_ref().map(|status| status.message.clone()).unwrap_or_default()
}

fn ready_endpoints(slices: &[EndpointSlice]) -> usize {
    let endpoints = slices.iter().flat_map(|slice| &slice.endpoints);
    endpoints.filter(|endpoint| endpoint.conditions.as_ref().and_then(|c| c.ready) == Some(true)).count()
}

/// Records the smallest number of ready endpoints that anybody can have observed.
struct EndpointWatch {
    least: Arc<Mutex<usize>>,
    task: tokio::task::JoinHandle<()>,
}

impl EndpointWatch {
    /// Starts with a list. The watch receives every change.
    async fn start(app: &App<'_>) -> Self {
        use futures::TryStreamExt as _;
        use kube::runtime::watcher::Event;
        let selector = watcher::Config::default().labels(&format!("kubernetes.io/service-name={}", app.name));
        let least = Arc::new(Mutex::new(usize::MAX));
        let (observed, started) = (Arc::clone(&least), Arc::new(tokio::sync::Notify::new()));
        let (api, start): (Api<EndpointSlice>, _) = (app.api(), Arc::clone(&started));
        let task = tokio::spawn(async move {
            let mut slices = BTreeMap::new();
            let mut events = std::pin::pin!(watcher(api, selector));
            while let Some(event) = events.try_next().await.unwrap() {
                match event {
                    Event::Init => slices.clear(),
                    Event::Apply(slice) | Event::InitApply(slice) => {
                        slices.insert(slice.name_any(), slice);
                    }
                    Event::Delete(slice) => {
                        slices.remove(&slice.name_any());
                    }
                    Event::InitDone => start.notify_one(),
                }
                let all: Vec<_> = slices.values().cloned().collect();
                if !all.is_empty() {
                    let mut least = observed.lock().unwrap();
                    *least = ready_endpoints(&all).min(*least);
                }
            }
        });
        started.notified().await;
        Self { least, task }
    }

    fn least(&self) -> usize {
        assert!(!self.task.is_finished(), "the watch has ended");
        *self.least.lock().unwrap()
    }
}
