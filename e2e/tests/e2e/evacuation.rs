//! The evacuation controller on a real control plane. Each test has a cluster of its own: the controller acts on
//! all Evacuations that there are, and its clock is shifted.

mod classes;
mod endings;
mod eviction;
mod example;
mod replicas;

use std::collections::BTreeSet;
use std::time::Duration;

use haulout_api_types::evacuation::Evacuator;
use haulout_api_types::evacuators::evacuation_for;
use haulout_api_types::{Evacuation, instigators};
use haulout_e2e::{Cluster, Service, objects, wait};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

/// Long enough for a busy machine.
const SOON: Duration = Duration::from_secs(60);
/// The namespace of all tests.
const NAMESPACE: &str = "web";
const INSTIGATOR: &str = "test.example.com";
const DEADLINE: Duration = Duration::from_secs(600);

/// A cluster with one node and one replica of the controller.
struct World {
    controller: Service,
    client: Client,
    cluster: Cluster,
}

impl World {
    async fn new(name: &str) -> Self {
        let cluster = Cluster::builder().name(name).audit(true).scheduler(false).boot().await.unwrap();
        cluster.install_chart(&[]).await.unwrap();
        let client = cluster.client().await.unwrap();
        let nodes: Api<Node> = Api::all(client.clone());
        nodes.create(&PostParams::default(), &objects::node("n1").build()).await.unwrap();
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.create(&PostParams::default(), &objects::namespace(NAMESPACE)).await.unwrap();
        let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> =
            Api::namespaced(client.clone(), NAMESPACE);
        wait::present(accounts, "default", "exists", SOON, |_| true).await.unwrap();
        let controller = Self::replica(&cluster).await;
        controller.leads().await.unwrap();
        Self { controller, client, cluster }
    }

    async fn replica(cluster: &Cluster) -> Service {
        Service::start(cluster, "evacuation-controller", &["--lease-seconds", "3"]).await.unwrap()
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    fn evacuations(&self) -> Api<Evacuation> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    fn budgets(&self) -> Api<PodDisruptionBudget> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// A pod that is running and ready, with these evacuators, the first with the highest priority.
    async fn pod(&self, name: &str, classes: &[&str]) -> Pod {
        self.pod_from(objects::pod(name).label("app", "web"), classes).await
    }

    async fn pod_from(&self, pod: haulout_e2e::objects::PodBuilder, classes: &[&str]) -> Pod {
        let mut pod = pod.namespace(NAMESPACE).node("n1");
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

    /// How often the Eviction API has been asked.
    async fn evictions(&self) -> String {
        let count = self.controller.metric("evacuation_controller_evictions_total").await.unwrap();
        format!("{:.0}", count.abs())
    }

    /// Waits until there is an event with this reason on this Evacuation.
    async fn until_event(&self, evacuation: &str, reason: &str) {
        let events: Api<k8s_openapi::api::events::v1::Event> =
            Api::namespaced(self.client.clone(), NAMESPACE);
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
