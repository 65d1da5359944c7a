//! The evacuation controller on a real control plane. Scenarios have a namespace each, and share few clusters.

mod classes;
mod endings;
mod eviction;
mod example;
mod refusals;
mod replicas;
mod slow;
mod traces;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use haulout_api_types::evacuation::Evacuator;
use haulout_api_types::evacuators::evacuation_for;
use haulout_api_types::{Evacuation, instigators};
use haulout_e2e::{Cluster, Handle, Mark, Requests, Service, objects, wait};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

use crate::support::{all_at_once, one_by_one, scenarios};

/// Long enough for a busy machine.
const SOON: Duration = Duration::from_secs(60);
const INSTIGATOR: &str = "test.example.com";
const DEADLINE: Duration = Duration::from_secs(600);

/// What one controller does for many at the same time: its clock is left alone, and so is the control plane.
#[tokio::test]
async fn evacuators_evictions_budgets_and_endings() {
    let ground = Ground::boot("evacuation").await;
    let controller = Arc::new(ground.replica().await);
    controller.leads().await.unwrap();
    let scenarios = scenarios![ground.world(&controller).await;
        classes::evacuators_act_by_priority_before_eviction,
        classes::partial_evacuators_run_before_the_last_one,
        classes::completed_evacuator_hands_over_to_eviction,
        classes::switching_resets_what_the_last_evacuator_had_reported,
        example::example_evacuator_reports_completes_and_aborts,
        eviction::a_pod_without_evacuators_is_evicted_with_few_requests,
        eviction::blocked_pod_is_evicted_when_the_budget_allows,
        eviction::several_budgets_on_a_pod_are_reported,
        eviction::daemon_set_and_mirror_pods_are_never_evicted,
        eviction::pod_recreated_under_the_same_name_is_not_evicted,
        refusals::the_pods_that_make_a_budget_refuse_are_named,
        refusals::forbidden_eviction_is_retried_until_allowed,
        refusals::eviction_is_retried_while_the_server_is_busy,
        refusals::answers_of_the_real_eviction_api_have_their_meaning,
        refusals::a_budget_names_the_pods_that_take_its_room_and_until_when,
        endings::last_instigator_cancels_the_evacuation,
        endings::evacuator_finalizer_is_not_an_instigator,
        endings::forbidden_cancellation_continues_the_evacuation,
        endings::finalizers_of_others_stay_when_the_pod_has_gone,
        endings::a_deleted_evacuation_goes_on_while_an_instigator_remains,
        endings::a_deleted_evacuation_is_cancelled_by_its_last_instigator,
        endings::an_evacuation_is_counted_once_with_its_outcome,
        endings::an_evacuation_without_a_pod_is_removed,
    ];
    all_at_once(scenarios).await;
}

/// One after the other, because each shifts its controller's clock.
#[tokio::test]
async fn deadlines_and_backoffs_by_a_shifted_clock() {
    let ground = Ground::boot("evacuation-clock").await;
    let scenarios = scenarios![&ground;
        classes::silent_evacuator_times_out_after_creation,
        classes::evacuator_times_out_after_its_last_report,
        classes::late_progress_cancels_a_pending_eviction,
        classes::a_progress_time_in_the_future_is_set_to_the_present,
        eviction::room_goes_to_the_next_when_an_admitted_eviction_fails,
        eviction::pods_that_wait_for_a_budget_leave_oldest_first,
        eviction::a_terminating_pod_is_left_to_finish,
        eviction::rejected_eviction_is_retried_after_the_backoff,
        traces::a_reconcile_is_a_span_with_its_requests_under_it,
    ];
    one_by_one(scenarios).await;
}

/// One after the other, because each stops, starts or delays something.
#[tokio::test]
async fn replicas_restarts_outages_and_slow_watches() {
    let ground = Ground::boot("evacuation-trouble").await;
    let scenarios = scenarios![&ground;
        replicas::backoff_survives_a_leader_change,
        replicas::deadline_missed_in_a_gap_gets_a_grace_period,
        replicas::evacuation_may_arrive_before_its_pod,
        replicas::a_pod_that_is_gone_is_looked_up_once_if_the_cache_is_late,
        replicas::undelivered_report_stops_an_eviction,
        refusals::eviction_in_a_terminating_namespace_is_reported,
        replicas::evacuations_go_on_after_an_outage_of_the_api_server,
        slow::a_slow_namespace_does_not_hold_up_others,
    ];
    one_by_one(scenarios).await;
}

/// A cluster with one node.
struct Ground {
    client: Client,
    cluster: Arc<Cluster>,
    /// How many namespaces there are.
    worlds: AtomicUsize,
}

impl Ground {
    async fn boot(name: &str) -> Self {
        let cluster = Cluster::builder().name(name).audit(true).scheduler(false).boot().await.unwrap();
        cluster.install_chart(&[]).await.unwrap();
        let client = cluster.client().await.unwrap();
        let nodes: Api<Node> = Api::all(client.clone());
        nodes.create(&PostParams::default(), &objects::node("n1").build()).await.unwrap();
        Self { client, cluster: Arc::new(cluster), worlds: AtomicUsize::default() }
    }

    /// A replica whose lease no busy moment costs it.
    async fn replica(&self) -> Service {
        replica(&self.cluster, "30").await
    }

    /// A namespace, with this controller.
    async fn world(&self, controller: &Arc<Service>) -> World {
        let namespace = format!("web-{}", self.worlds.fetch_add(1, Ordering::Relaxed));
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces.create(&PostParams::default(), &objects::namespace(&namespace)).await.unwrap();
        let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> =
            Api::namespaced(self.client.clone(), &namespace);
        wait::present(accounts, "default", "exists", SOON, |_| true).await.unwrap();
        let mark = self.cluster.requests_mark().unwrap();
        let (client, cluster) = (self.client.clone(), Arc::clone(&self.cluster));
        World { controller: Arc::clone(controller), client, cluster, namespace, mark }
    }

    /// A namespace, and a controller of its own that leads.
    async fn fresh(&self) -> World {
        let controller = Arc::new(self.replica().await);
        controller.leads().await.unwrap();
        self.world(&controller).await
    }
}

async fn replica(cluster: &Handle, lease_seconds: &str) -> Service {
    let args = ["--lease-seconds", lease_seconds];
    Service::start(cluster, "evacuation-controller", &args).await.unwrap()
}

/// A namespace and the controller that acts in it.
struct World {
    controller: Arc<Service>,
    client: Client,
    cluster: Arc<Cluster>,
    namespace: String,
    /// When it began.
    mark: Mark,
}

impl World {
    /// Ends the controller in good order, so that the next one leads at once. What forwards its connections goes on
    /// meanwhile, or it could not give its lease back.
    async fn end(self) {
        let controller = self.controller;
        tokio::task::spawn_blocking(move || controller.stop(SOON)).await.unwrap().unwrap();
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn evacuations(&self) -> Api<Evacuation> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn budgets(&self) -> Api<PodDisruptionBudget> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// A pod that is running and ready, with these evacuators, the first with the highest priority.
    async fn pod(&self, name: &str, classes: &[&str]) -> Pod {
        self.pod_from(objects::pod(name).label("app", "web"), classes).await
    }

    async fn pod_from(&self, pod: haulout_e2e::objects::PodBuilder, classes: &[&str]) -> Pod {
        let mut pod = pod.namespace(&self.namespace).node("n1");
        for (place, class) in classes.iter().enumerate() {
            let priority = 100 - i32::try_from(place).unwrap();
            let evacuator = Evacuator { evacuator_class: (*class).into(), priority, role: None };
            let (key, value) = evacuator.annotation();
            pod = pod.annotation(&key, &value);
        }
        let pod = self.pods().create(&PostParams::default(), &pod.build()).await.unwrap();
        let is_running =
            |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
        wait::present(self.pods(), &pod.name_any(), "runs", SOON, is_running).await.unwrap()
    }

    /// Asks for the evacuation of a pod, as an instigator does; the Evacuation's name.
    async fn evacuate(&self, pod: &Pod) -> String {
        self.evacuate_with(pod, |_| {}).await
    }

    async fn evacuate_with(&self, pod: &Pod, change: impl FnOnce(&mut Evacuation)) -> String {
        let (mut evacuation, violations) =
            evacuation_for(&pod.metadata, INSTIGATOR, &BTreeSet::new()).unwrap();
        assert_eq!(violations, []);
        evacuation.spec.progress_deadline_seconds = DEADLINE.as_secs().try_into().unwrap();
        change(&mut evacuation);
        self.evacuations().create(&PostParams::default(), &evacuation).await.unwrap().name_any()
    }

    /// Waits until the Evacuation is like this.
    async fn until(&self, name: &str, what: &str, condition: impl FnMut(&Evacuation) -> bool) -> Evacuation {
        let found = wait::present(self.evacuations(), name, what, SOON, condition).await;
        found.unwrap_or_else(|error| panic!("{error:#}\n{}", tail(&self.controller.text())))
    }

    /// Waits until this class is in charge.
    async fn until_active(&self, name: &str, class: &str) -> Evacuation {
        self.until(name, &format!("has {class} in charge"), |e| active(e) == Some(class)).await
    }

    /// Waits until the Evacuation says that its pod is blocked for this reason.
    async fn until_blocked(&self, name: &str, reason: &str) -> Evacuation {
        self.until(name, &format!("is blocked by {reason}"), |e| blocked(e).as_deref() == Some(reason)).await
    }

    /// Waits until the pod and its Evacuation are gone.
    async fn until_gone(&self, pod: &Pod, evacuation: &str) {
        let (name, uid) = (pod.name_any(), pod.uid().unwrap());
        let gone = wait::until(self.pods(), &name, "is gone", SOON, |found| {
            found.is_none_or(|found| found.uid().as_deref() != Some(&uid))
        });
        gone.await.unwrap_or_else(|error| panic!("{error:#}\n{}", tail(&self.controller.text())));
        self.until_evacuation_gone(evacuation).await;
    }

    async fn until_evacuation_gone(&self, name: &str) {
        let gone = wait::gone(self.evacuations(), name, SOON).await;
        gone.unwrap_or_else(|error| panic!("{error:#}\n{}", tail(&self.controller.text())));
    }

    /// Writes status fields, as an evacuator does.
    async fn report(&self, name: &str, status: Value) -> Evacuation {
        let patch = Patch::Merge(json!({"status": status}));
        self.evacuations().patch_status(name, &PatchParams::default(), &patch).await.unwrap()
    }

    /// Reports that the evacuator in charge has done its part.
    async fn complete(&self, name: &str) {
        self.report(name, json!({"activeEvacuatorCompleted": true})).await;
    }

    /// Replaces the finalizers, as their owners together would.
    async fn set_finalizers(&self, name: &str, finalizers: &[&str]) {
        let patch = Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
        self.evacuations().patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Whether the pod with this UID is there and not asked to end.
    async fn is_left_alone(&self, pod: &Pod) -> bool {
        let found = self.pods().get_opt(&pod.name_any()).await.unwrap();
        found.is_some_and(|found| found.uid() == pod.uid() && found.metadata.deletion_timestamp.is_none())
    }

    /// Lets the controller do everything that it would do now: it has evacuated another pod meanwhile.
    async fn let_it_act(&self, name: &str) {
        let pod = self.pod_from(objects::pod(name), &[]).await;
        let evacuation = self.evacuate(&pod).await;
        self.until_gone(&pod, &evacuation).await;
    }

    /// Makes a budget and waits until its numbers are there.
    async fn budget(&self, budget: PodDisruptionBudget) {
        let made = self.budgets().create(&PostParams::default(), &budget).await.unwrap();
        let is_judged = |budget: &PodDisruptionBudget| {
            budget.status.as_ref().is_some_and(|s| s.observed_generation == budget.metadata.generation)
        };
        wait::present(self.budgets(), &made.name_any(), "is judged", SOON, is_judged).await.unwrap();
    }

    async fn delete_budget(&self, name: &str) {
        self.budgets().delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// What the controller has asked the API server for in this namespace.
    fn requests(&self) -> Requests {
        let all = self.cluster.requests_since(self.mark).unwrap();
        all.by_user_agent("haulout-evacuation-controller/").only(|r| r.namespace == self.namespace)
    }

    /// How often the Eviction API has been asked.
    fn evictions(&self) -> usize {
        self.requests().resource("pods", "eviction").count()
    }

    /// Waits until there is an event with this reason on this Evacuation.
    async fn until_event(&self, evacuation: &str, reason: &str) {
        let events: Api<k8s_openapi::api::events::v1::Event> =
            Api::namespaced(self.client.clone(), &self.namespace);
        let what = format!("tell {reason} of {evacuation}");
        let told = wait::all(events, watcher::Config::default(), &what, SOON, |events| {
            events.iter().any(|event| {
                let regarding = event.regarding.as_ref().and_then(|regarding| regarding.name.as_deref());
                regarding == Some(evacuation) && event.reason.as_deref() == Some(reason)
            })
        });
        told.await.unwrap();
    }
}

fn active(evacuation: &Evacuation) -> Option<&str> {
    evacuation.status.as_ref()?.active_evacuator_class.as_deref()
}

fn blocked(evacuation: &Evacuation) -> Option<String> {
    let conditions = &evacuation.status.as_ref()?.conditions;
    conditions.iter().find(|c| c.type_ == "Blocked" && c.status == "True").map(|c| c.reason.clone())
}

fn failed(evacuation: &Evacuation) -> i32 {
    evacuation.status.as_ref().map_or(0, |status| status.failed_eviction_counter)
}

fn finalizer() -> String {
    instigators::finalizer(INSTIGATOR)
}

fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
