//! The evacuation controller on a real control plane. Each scenario has its own namespace; a few clusters are shared.

mod cancellation;
mod classes;
mod eviction;
mod example;
mod rejections;
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

/// Scenarios that run at the same time with one controller. None of them changes its clock or the control plane.
#[tokio::test]
async fn evacuators_evictions_budgets_and_cancellation() {
    let env = TestEnv::boot("evacuation").await;
    let controller = Arc::new(env.replica().await);
    controller.leads().await.unwrap();
    let scenarios = scenarios![env.test_namespace(&controller).await;
        classes::evacuators_act_by_priority_before_eviction,
        classes::partial_evacuators_run_before_the_last_one,
        classes::completed_evacuator_hands_over_to_eviction,
        classes::switching_evacuators_resets_reported_status,
        classes::largest_status_does_not_keep_a_pod,
        example::example_evacuator_reports_completes_and_aborts,
        eviction::pod_without_evacuators_is_evicted_with_few_requests,
        eviction::blocked_pod_is_evicted_when_the_budget_allows,
        eviction::several_budgets_on_a_pod_are_reported,
        eviction::daemon_set_and_mirror_pods_are_never_evicted,
        eviction::pod_recreated_under_the_same_name_is_not_evicted,
        rejections::exhausted_budget_message_names_unready_pods,
        rejections::forbidden_eviction_is_retried_until_allowed,
        rejections::eviction_is_retried_while_the_server_is_busy,
        rejections::eviction_api_answers_map_to_reasons,
        rejections::exhausted_budget_message_names_disrupted_pods,
        cancellation::last_instigator_cancels_the_evacuation,
        cancellation::evacuator_finalizer_is_not_an_instigator,
        cancellation::forbidden_cancellation_continues_the_evacuation,
        cancellation::foreign_finalizers_stay_when_the_pod_is_gone,
        cancellation::deleted_evacuation_continues_while_an_instigator_remains,
        cancellation::deleted_evacuation_is_cancelled_by_its_last_instigator,
        cancellation::evacuation_is_counted_once_with_its_outcome,
        cancellation::evacuation_without_a_pod_is_deleted,
    ];
    all_at_once(scenarios).await;
}

/// One after the other, because each scenario shifts the clock of its controller.
#[tokio::test]
async fn deadlines_and_backoffs_with_a_shifted_clock() {
    let env = TestEnv::boot("evacuation-clock").await;
    let scenarios = scenarios![&env;
        classes::silent_evacuator_times_out_after_creation,
        classes::evacuator_times_out_after_its_last_report,
        classes::late_progress_cancels_a_pending_eviction,
        classes::future_progress_timestamp_is_set_to_now,
        classes::silent_evacuator_cannot_forbid_for_ever,
        eviction::next_pod_is_tried_when_an_allowed_eviction_fails,
        eviction::pods_blocked_by_a_budget_leave_oldest_first,
        eviction::terminating_pod_is_not_evicted,
        eviction::rejected_eviction_is_retried_after_the_backoff,
        traces::reconcile_is_a_span_with_its_requests_as_children,
    ];
    one_by_one(scenarios).await;
}

/// One after the other, because each scenario stops, starts or delays something.
#[tokio::test]
async fn replicas_restarts_outages_and_slow_watches() {
    let env = TestEnv::boot("evacuation-faults").await;
    let scenarios = scenarios![&env;
        replicas::backoff_survives_a_leader_change,
        replicas::deadline_missed_in_a_gap_gets_a_grace_period,
        replicas::evacuation_may_arrive_before_its_pod,
        replicas::deleted_pod_is_looked_up_once_when_the_cache_lags,
        replicas::undelivered_report_stops_an_eviction,
        rejections::eviction_in_a_terminating_namespace_is_reported,
        replicas::evacuations_continue_after_an_api_server_outage,
        slow::slow_namespace_does_not_delay_others,
    ];
    one_by_one(scenarios).await;
}

/// A cluster with one node.
struct TestEnv {
    client: Client,
    cluster: Arc<Cluster>,
    /// Number of namespaces created so far.
    namespaces: AtomicUsize,
}

impl TestEnv {
    async fn boot(name: &str) -> Self {
        let cluster = Cluster::builder().name(name).audit(true).scheduler(false).boot().await.unwrap();
        cluster.install_chart(&[]).await.unwrap();
        let client = cluster.client().await.unwrap();
        let nodes: Api<Node> = Api::all(client.clone());
        nodes.create(&PostParams::default(), &objects::node("n1").build()).await.unwrap();
        Self { client, cluster: Arc::new(cluster), namespaces: AtomicUsize::default() }
    }

    /// A replica whose Lease does not expire on a busy machine.
    async fn replica(&self) -> Service {
        replica(&self.cluster, "30").await
    }

    /// A namespace, with this controller.
    async fn test_namespace(&self, controller: &Arc<Service>) -> TestNamespace {
        let namespace = format!("web-{}", self.namespaces.fetch_add(1, Ordering::Relaxed));
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces.create(&PostParams::default(), &objects::namespace(&namespace)).await.unwrap();
        let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> =
            Api::namespaced(self.client.clone(), &namespace);
        wait::present(accounts, "default", "exists", SOON, |_| true).await.unwrap();
        let mark = self.cluster.requests_mark().unwrap();
        let (client, cluster) = (self.client.clone(), Arc::clone(&self.cluster));
        TestNamespace { controller: Arc::clone(controller), client, cluster, namespace, mark }
    }

    /// A namespace with its own controller that leads.
    async fn test_namespace_with_controller(&self) -> TestNamespace {
        let controller = Arc::new(self.replica().await);
        controller.leads().await.unwrap();
        self.test_namespace(&controller).await
    }
}

async fn replica(cluster: &Handle, lease_seconds: &str) -> Service {
    let args = ["--lease-seconds", lease_seconds];
    Service::start(cluster, "evacuation-controller", &args).await.unwrap()
}

/// A namespace and the controller that acts in it.
struct TestNamespace {
    controller: Arc<Service>,
    client: Client,
    cluster: Arc<Cluster>,
    namespace: String,
    /// When the test started.
    mark: Mark,
}

impl TestNamespace {
    /// Stops the controller gracefully, so that the next one leads at once. Its connections keep being forwarded,
    /// otherwise it could not release its Lease.
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

    /// A running and ready pod with these evacuators. The first has the highest priority.
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

    /// Requests the evacuation of a pod, as an instigator does. Returns the name of the Evacuation.
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

    /// Waits until the Evacuation meets the condition.
    async fn until(&self, name: &str, what: &str, condition: impl FnMut(&Evacuation) -> bool) -> Evacuation {
        let found = wait::present(self.evacuations(), name, what, SOON, condition).await;
        found.unwrap_or_else(|error| panic!("{error:#}\n{}", tail(&self.controller.text())))
    }

    /// Waits until this class is active.
    async fn until_active(&self, name: &str, class: &str) -> Evacuation {
        self.until(name, &format!("has {class} active"), |e| active(e) == Some(class)).await
    }

    /// Waits until the Evacuation is blocked for this reason.
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

    /// Creates a ServiceAccount with the role from the guide for evacuator authors, for these classes.
    async fn reporter_account(&self, name: &str, classes: &[&str]) {
        let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": {"name": name, "namespace": self.namespace}, "rules": [
            {"apiGroups": ["evacuation.coordination.k8s.io"], "resources": ["evacuations"],
             "verbs": ["get", "list", "watch"]},
            {"apiGroups": ["evacuation.coordination.k8s.io"], "resources": ["evacuations/status"],
             "verbs": ["patch"]},
            {"apiGroups": ["evacuation.coordination.k8s.io"], "resources": ["evacuators"],
             "resourceNames": classes, "verbs": ["report"]},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "patch"]},
        ]});
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": name, "namespace": self.namespace}});
        let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": name, "namespace": self.namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.namespace}]});
        let list = json!({"apiVersion": "v1", "kind": "List", "items": [account, role, binding]}).to_string();
        self.cluster.kubectl_with(&["create", "-f", "-"], &list).await.unwrap().success().unwrap();
        let user = format!("system:serviceaccount:{}:{name}", self.namespace);
        let args = ["auth", "can-i", "--list", "--namespace", &self.namespace, "--as", &user];
        wait::eventually(&format!("{name} may report"), SOON, async || {
            let list = self.cluster.kubectl(&args).await?.success()?;
            let reports = |line: &&str| {
                line.starts_with("evacuators.evacuation.coordination.k8s.io ")
                    && line.trim_end().ends_with("[report]")
            };
            let is_listed = |class: &&str| list.lines().filter(reports).any(|line| line.contains(class));
            Ok(classes.iter().all(is_listed).then_some(()))
        })
        .await
        .unwrap();
    }

    /// The Evacuations, for a user who may only report for these classes.
    async fn reporter(&self, name: &str, classes: &[&str]) -> Api<Evacuation> {
        self.reporter_account(name, classes).await;
        let account = self.cluster.service_account_kubeconfig(&self.namespace, name).await.unwrap();
        Api::namespaced(self.cluster.client_from(&account, name).await.unwrap(), &self.namespace)
    }

    /// Writes status fields, as an evacuator does.
    async fn report(&self, name: &str, status: Value) -> Evacuation {
        let patch = Patch::Merge(json!({"status": status}));
        self.evacuations().patch_status(name, &PatchParams::default(), &patch).await.unwrap()
    }

    /// Reports that the active evacuator has completed.
    async fn complete(&self, name: &str) {
        self.report(name, json!({"activeEvacuatorCompleted": true})).await;
    }

    /// Replaces the finalizers, on behalf of their owners.
    async fn set_finalizers(&self, name: &str, finalizers: &[&str]) {
        let patch = Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
        self.evacuations().patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Whether the pod with this UID exists and is not terminating.
    async fn is_not_terminating(&self, pod: &Pod) -> bool {
        let found = self.pods().get_opt(&pod.name_any()).await.unwrap();
        found.is_some_and(|found| found.uid() == pod.uid() && found.metadata.deletion_timestamp.is_none())
    }

    /// Waits until the controller had the chance to act: it has evacuated another pod in the meantime.
    async fn let_controller_act(&self, name: &str) {
        let pod = self.pod_from(objects::pod(name), &[]).await;
        let evacuation = self.evacuate(&pod).await;
        self.until_gone(&pod, &evacuation).await;
    }

    /// Creates a budget and waits until its status is current.
    async fn budget(&self, budget: PodDisruptionBudget) {
        let made = self.budgets().create(&PostParams::default(), &budget).await.unwrap();
        let is_observed = |budget: &PodDisruptionBudget| {
            budget.status.as_ref().is_some_and(|s| s.observed_generation == budget.metadata.generation)
        };
        wait::present(self.budgets(), &made.name_any(), "has a current status", SOON, is_observed)
            .await
            .unwrap();
    }

    async fn delete_budget(&self, name: &str) {
        self.budgets().delete(name, &DeleteParams::default()).await.unwrap();
    }

    /// The controller's requests in this namespace.
    fn requests(&self) -> Requests {
        let all = self.cluster.requests_since(self.mark).unwrap();
        all.by_user_agent("haulout-evacuation-controller/").only(|r| r.namespace == self.namespace)
    }

    /// Number of eviction requests.
    fn evictions(&self) -> usize {
        self.requests().resource("pods", "eviction").count()
    }

    /// Waits for an event with this reason on this Evacuation.
    async fn until_event(&self, evacuation: &str, reason: &str) {
        let events: Api<k8s_openapi::api::events::v1::Event> =
            Api::namespaced(self.client.clone(), &self.namespace);
        let what = format!("include {reason} on {evacuation}");
        let found = wait::all(events, watcher::Config::default(), &what, SOON, |events| {
            events.iter().any(|event| {
                let regarding = event.regarding.as_ref().and_then(|regarding| regarding.name.as_deref());
                regarding == Some(evacuation) && event.reason.as_deref() == Some(reason)
            })
        });
        found.await.unwrap();
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
