//! A cluster with both controllers, and helpers for scenarios.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use haulout_api_types::evacuators::{evacuation_for, evacuation_name};
use haulout_api_types::node_maintenance::{DrainStatus, Stage};
use haulout_api_types::{Evacuation, NodeMaintenance, names};
use haulout_e2e::nodes::NodeState;
use haulout_e2e::objects::{DeploymentBuilder, PodBuilder};
use haulout_e2e::{Cluster, Handle, Service, Webhook, objects, wait};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Affinity, Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, ResourceExt as _};
use serde_json::{Value, json};

/// Long enough for a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A Lease that does not expire on a busy machine.
const LEASE: &str = "30";
/// For tests that kill a leader: short, because the Lease has to expire, and long enough for a busy machine to renew
/// it.
pub(crate) const SHORT_LEASE: &str = "6";

/// The flag that both controllers have.
const SERVED_CLASSES: &str = "--served-evacuator-classes";

/// The services that a drain needs.
const SERVICES: [&str; 2] = ["maintenance-controller", "evacuation-controller"];

/// A cluster with one replica of each controller.
pub(crate) struct TestEnv {
    /// In the order of [`SERVICES`].
    services: [Mutex<Arc<Service>>; 2],
    /// The arguments of each.
    args: [Vec<String>; 2],
    _webhook: Option<(Webhook, Service)>,
    pub(crate) client: Client,
    pub(crate) cluster: Cluster,
}

impl TestEnv {
    pub(crate) async fn new(name: &str, args: &[&str]) -> Self {
        let cluster = Cluster::builder().name(name).audit(true).boot().await.unwrap();
        cluster.install_chart(&[]).await.unwrap();
        Self::on(cluster, None, LEASE, args).await
    }

    pub(crate) async fn with_webhook(name: &str) -> Self {
        let cluster = Cluster::builder().name(name).audit(true).boot().await.unwrap();
        let webhook = Webhook::with_replica(&cluster).await.unwrap();
        Self::on(cluster, Some(webhook), SHORT_LEASE, &[]).await
    }

    /// Uses a cluster with the chart, and additional arguments of the maintenance controller. The evacuation controller serves
    /// the same classes.
    pub(crate) async fn on(
        cluster: Cluster,
        webhook: Option<(Webhook, Service)>,
        lease: &str,
        args: &[&str],
    ) -> Self {
        let own = |arg: &&&str| arg.starts_with(SERVED_CLASSES);
        let lease = ["--lease-seconds", lease];
        let all: Vec<_> = lease.iter().chain(args).map(ToString::to_string).collect();
        let served = lease.iter().chain(args.iter().filter(own)).map(ToString::to_string).collect();
        let args: [Vec<_>; 2] = [all, served];
        let controller = start(&cluster, SERVICES[0], &args[0]).await;
        let evacuations = start(&cluster, SERVICES[1], &args[1]).await;
        controller.leads().await.unwrap();
        evacuations.leads().await.unwrap();
        let client = cluster.client().await.unwrap();
        let services = [controller, evacuations].map(|service| Mutex::new(Arc::new(service)));
        Self { services, args, _webhook: webhook, client, cluster }
    }

    /// The leading replica of the maintenance controller.
    pub(crate) fn controller(&self) -> Arc<Service> {
        self.services[0].lock().unwrap().clone()
    }

    /// The leading replica of the evacuation controller.
    pub(crate) fn evacuation_controller(&self) -> Arc<Service> {
        self.services[1].lock().unwrap().clone()
    }

    /// Starts another replica of a service. Returns the previous one.
    async fn replace(&self, which: usize) -> Arc<Service> {
        let second = start(&self.cluster, SERVICES[which], &self.args[which]).await;
        second.ready().await.unwrap();
        std::mem::replace(&mut *self.services[which].lock().unwrap(), Arc::new(second))
    }

    /// Kills the maintenance controller. No replica is left.
    pub(crate) fn stop_controller(&self) {
        self.controller().signal(rustix::process::Signal::KILL).unwrap();
    }

    /// Starts it again.
    pub(crate) async fn start_controller(&self) {
        self.replace(0).await;
        self.controller().leads().await.unwrap();
    }

    /// Stops the evacuation controller. No replica is left.
    pub(crate) async fn stop_evacuation_controller(&self) {
        let service = self.evacuation_controller();
        service.signal(rustix::process::Signal::TERM).unwrap();
        assert!(service.exited().await.success(), "{}", service.text());
    }

    /// Starts it again.
    pub(crate) async fn start_evacuation_controller(&self) {
        self.replace(1).await;
        self.evacuation_controller().leads().await.unwrap();
    }

    /// Kills the maintenance controller. Another replica is on standby.
    pub(crate) async fn kill_controller(&self) {
        self.replace(0).await.signal(rustix::process::Signal::KILL).unwrap();
    }

    /// Replaces all replicas by new ones, as a rollout of a Deployment does.
    pub(crate) async fn rollout_restart(&self) {
        for which in 0..SERVICES.len() {
            self.hand_over(which).await;
        }
    }

    /// Replaces the maintenance controller by a new replica, whose only state is in the API.
    pub(crate) async fn rollout_restart_controller(&self) {
        self.hand_over(0).await;
    }

    /// The old replica stops gracefully, and the new one leads.
    async fn hand_over(&self, which: usize) {
        let old = self.replace(which).await;
        old.signal(rustix::process::Signal::TERM).unwrap();
        assert!(old.exited().await.success(), "{}", old.text());
        let new = self.services[which].lock().unwrap().clone();
        new.leads().await.unwrap();
    }

    /// Starts all services again, in whatever state they are.
    pub(crate) async fn restart_all(&self) {
        for which in 0..SERVICES.len() {
            self.replace(which).await;
        }
    }

    /// Creates a scenario: a namespace with this name, which is also part of the names of all its objects.
    pub(crate) async fn scenario(&self, name: &'static str) -> Scenario<'_> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        namespaces.create(&PostParams::default(), &objects::namespace(name)).await.unwrap();
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), name);
        wait::present(accounts, "default", "exists", SOON, |_| true).await.unwrap();
        Scenario { env: self, name }
    }
}

async fn start(cluster: &Handle, name: &str, args: &[String]) -> Service {
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    Service::start(cluster, name, &args).await.unwrap()
}

/// The objects of one scenario. Names of nodes, pools and maintenances are given without the scenario's prefix.
#[derive(Clone, Copy)]
pub(crate) struct Scenario<'a> {
    pub(crate) env: &'a TestEnv,
    pub(crate) name: &'static str,
}

impl Scenario<'_> {
    /// The full name of a node, pool or maintenance of this scenario.
    pub(crate) fn of(&self, name: &str) -> String {
        format!("{}-{name}", self.name)
    }

    pub(crate) fn nodes(&self) -> Api<Node> {
        Api::all(self.env.client.clone())
    }

    pub(crate) fn maintenances(&self) -> Api<NodeMaintenance> {
        Api::all(self.env.client.clone())
    }

    pub(crate) fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.env.client.clone(), self.name)
    }

    pub(crate) fn evacuations(&self) -> Api<Evacuation> {
        Api::namespaced(self.env.client.clone(), self.name)
    }

    pub(crate) fn deployments(&self) -> Api<Deployment> {
        Api::namespaced(self.env.client.clone(), self.name)
    }

    /// Runs pods on the nodes of these pools, as the scheduler decides.
    pub(crate) async fn deploy(&self, deployment: DeploymentBuilder, pools: &[&str]) {
        let pools: Vec<_> = pools.iter().map(|pool| self.of(pool)).collect();
        let here = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "pool", "operator": "In", "values": pools}]},
        ]}}});
        let here: Affinity = serde_json::from_value(here).unwrap();
        let deployment =
            deployment.namespace(self.name).pods(|pod| pod.with(|spec| spec.affinity = Some(here)));
        self.deployments().create(&PostParams::default(), &deployment.build()).await.unwrap();
    }

    /// Waits until exactly this many pods run, all of them on this node.
    pub(crate) async fn until_run_on(&self, node: &str, number: usize) {
        let (node, all) = (self.of(node), watcher::Config::default());
        let there = |pod: &Pod| {
            pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()) == Some(&node)
                && pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
        };
        let run = |pods: &[Pod]| pods.len() == number && pods.iter().all(there);
        self.explained(wait::all(self.pods(), all, &format!("run on {node}"), SOON, run).await);
    }

    pub(crate) fn explained<T>(&self, result: anyhow::Result<T>) -> T {
        result.unwrap_or_else(|error| {
            let text = self.env.controller().text();
            let lines: Vec<_> = text.lines().collect();
            panic!("in {}: {error:#}\n{}", self.name, lines[lines.len().saturating_sub(15)..].join("\n"))
        })
    }

    /// A ready node with the label `pool`.
    pub(crate) async fn node(&self, name: &str, pool: &str) -> Node {
        self.node_from(objects::node(&self.of(name)).label("pool", &self.of(pool))).await
    }

    pub(crate) async fn node_from(&self, node: haulout_e2e::objects::NodeBuilder) -> Node {
        let node = self.nodes().create(&PostParams::default(), &node.build()).await.unwrap();
        // The controller manager adds an annotation and labels. If they came later, they would look like ours.
        let is_complete = |node: &Node| {
            condition(node, "Ready").is_some_and(|(status, _)| status == "True")
                && node.annotations().contains_key("node.alpha.kubernetes.io/ttl")
                && node.labels().contains_key("beta.kubernetes.io/os")
        };
        wait::present(self.nodes(), &node.name_any(), "is ready", SOON, is_complete).await.unwrap()
    }

    /// A running pod on a node.
    pub(crate) async fn pod(&self, name: &str, node: &str) -> Pod {
        self.pod_from(objects::pod(name), node).await
    }

    pub(crate) async fn pod_from(&self, pod: PodBuilder, node: &str) -> Pod {
        let pod = pod.namespace(self.name).node(&self.of(node)).build();
        let pod = self.pods().create(&PostParams::default(), &pod).await.unwrap();
        let runs =
            |pod: &Pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running");
        wait::present(self.pods(), &pod.name_any(), "runs", SOON, runs).await.unwrap()
    }

    /// A pod with a slow evacuator, so that its Evacuation stays.
    pub(crate) async fn slow_pod(&self, name: &str, node: &str) -> Pod {
        self.pod_from(objects::pod(name).annotation(&slow(), "100"), node).await
    }

    /// Requests the evacuation of a pod on behalf of another instigator.
    pub(crate) async fn evacuation_by_others(&self, pod: &Pod) -> Evacuation {
        let (theirs, _) = evacuation_for(&pod.metadata, "descheduler.example.com", &BTreeSet::new()).unwrap();
        self.evacuations().create(&PostParams::default(), &theirs).await.unwrap()
    }

    /// Waits until an evacuator is active for this pod. Returns the name of the Evacuation.
    pub(crate) async fn until_evacuator_active(&self, pod: &Pod) -> String {
        let name = evacuation_name(&pod.uid().unwrap(), &pod.name_any());
        let active = |e: &Evacuation| e.status.as_ref().is_some_and(|s| s.active_evacuator_class.is_some());
        self.explained(
            wait::present(self.evacuations(), &name, "has an active evacuator", SOON, active).await,
        );
        name
    }

    pub(crate) async fn until_pod_gone(&self, name: &str) {
        self.explained(wait::gone(self.pods(), name, SOON).await);
    }

    /// Creates a maintenance of the nodes in a pool.
    pub(crate) async fn maintain(&self, name: &str, pool: &str, stage: Stage) -> NodeMaintenance {
        self.maintain_with(name, pool, stage, json!([])).await
    }

    pub(crate) async fn maintain_with(
        &self,
        name: &str,
        pool: &str,
        stage: Stage,
        plan: Value,
    ) -> NodeMaintenance {
        let pools: Vec<_> = pool.split(',').map(|pool| self.of(pool)).collect();
        let maintenance = serde_json::from_value(json!({
            "apiVersion": "nodemaintenance.k8s.io/v1alpha1",
            "kind": "NodeMaintenance",
            "metadata": {"name": self.of(name)},
            "spec": {
                "nodeSelector": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "pool", "operator": "In", "values": pools}]},
                ]},
                "stage": stage,
                "drainPlan": plan,
            },
        }));
        self.maintenances().create(&PostParams::default(), &maintenance.unwrap()).await.unwrap()
    }

    pub(crate) async fn set_stage(&self, name: &str, stage: Stage) {
        let patch = Patch::Merge(json!({"spec": {"stage": stage}}));
        self.maintenances().patch(&self.of(name), &PatchParams::default(), &patch).await.unwrap();
    }

    /// Waits until a maintenance meets the condition.
    pub(crate) async fn until(
        &self,
        name: &str,
        what: &str,
        condition: impl FnMut(&NodeMaintenance) -> bool,
    ) -> NodeMaintenance {
        self.explained(wait::present(self.maintenances(), &self.of(name), what, SOON, condition).await)
    }

    pub(crate) async fn until_drained(&self, name: &str) -> NodeMaintenance {
        self.until(name, "is drained", |m| is(m, names::condition::DRAINED)).await
    }

    /// Deletes a maintenance and waits until it is gone.
    pub(crate) async fn delete(&self, name: &str) {
        let name = self.of(name);
        self.maintenances().delete(&name, &DeleteParams::default()).await.unwrap();
        self.explained(wait::gone(self.maintenances(), &name, SOON).await);
    }

    pub(crate) async fn patch_node(&self, name: &str, patch: Value) {
        self.nodes().patch(&self.of(name), &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// Waits until a maintenance is completed and has released all its nodes.
    pub(crate) async fn until_completed(&self, name: &str) -> NodeMaintenance {
        let done = |m: &NodeMaintenance| {
            let begun = m.status.iter().flat_map(|status| &status.stage_statuses);
            m.finalizers().is_empty() && begun.into_iter().any(|begun| begun.name == Stage::Complete)
        };
        self.until(name, "is completed", done).await
    }

    pub(crate) async fn until_node(
        &self,
        name: &str,
        what: &str,
        condition: impl FnMut(&Node) -> bool,
    ) -> Node {
        self.explained(wait::present(self.nodes(), &self.of(name), what, SOON, condition).await)
    }

    /// Waits until a node is cordoned and has our annotations.
    pub(crate) async fn until_cordoned(&self, name: &str) -> Node {
        self.until_node(name, "is cordoned", |node| is_cordoned(node) && is_marked(node)).await
    }

    /// Waits until a node is in the same state as before its maintenance.
    pub(crate) async fn until_restored(&self, before: &Node) {
        let same = |node: &Node| NodeState::of(node) == NodeState::of(before);
        let name = before.name_any();
        let found = wait::present(self.nodes(), &name, "is restored", SOON, same).await;
        if found.is_err() {
            let node = self.nodes().get(&name).await.unwrap();
            assert_eq!(NodeState::of(&node), NodeState::of(before), "node {name} is not as it was");
        }
        self.explained(found);
    }

    /// The pods that have an Evacuation.
    pub(crate) async fn pods_with_evacuation(&self) -> BTreeSet<String> {
        let all = self.evacuations().list(&kube::api::ListParams::default()).await.unwrap();
        all.items.into_iter().map(|evacuation| evacuation.spec.pod_ref.name).collect()
    }

    /// Waits until exactly these pods have an Evacuation.
    pub(crate) async fn until_evacuating(&self, pods: &[&str]) {
        let wanted: BTreeSet<&str> = pods.iter().copied().collect();
        let what = format!("are the Evacuations of {wanted:?}");
        let same = |found: &[Evacuation]| {
            found.iter().map(|e| e.spec.pod_ref.name.as_str()).collect::<BTreeSet<_>>() == wanted
        };
        let found = wait::all(self.evacuations(), watcher::Config::default(), &what, SOON, same).await;
        self.explained(found);
    }

    /// Waits for an event with this reason on this maintenance. Returns its note.
    pub(crate) async fn until_event(&self, maintenance: &str, reason: &str) -> String {
        self.event(maintenance, reason, |_| true).await.note.unwrap()
    }

    /// Equal events are combined into one series, whose second write comes a while after the first.
    pub(crate) async fn until_event_repeated(&self, maintenance: &str, reason: &str) {
        let is_repeated = |event: &Event| event.series.as_ref().is_some_and(|series| series.count > 1);
        self.event(maintenance, reason, is_repeated).await;
    }

    /// Waits for such an event on this maintenance.
    pub(crate) async fn event(&self, maintenance: &str, reason: &str, has: impl Fn(&Event) -> bool) -> Event {
        let maintenance = self.of(maintenance);
        let events: Api<Event> = Api::namespaced(self.env.client.clone(), "default");
        let what = format!("include {reason} on {maintenance}");
        let is = |event: &Event| {
            let regarding = event.regarding.as_ref().and_then(|regarding| regarding.name.as_deref());
            regarding == Some(maintenance.as_str()) && event.reason.as_deref() == Some(reason) && has(event)
        };
        let found =
            wait::all(events, watcher::Config::default(), &what, SOON, |events| events.iter().any(is)).await;
        self.explained(found).into_iter().find(is).unwrap()
    }
}

/// The annotation of a slow evacuator.
pub(crate) fn slow() -> String {
    format!("{}slow.example.com", names::EVACUATOR_ANNOTATION_PREFIX)
}

pub(crate) fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or_default()
}

pub(crate) fn is_marked(node: &Node) -> bool {
    node.annotations().contains_key(names::BEFORE_MAINTENANCE_ANNOTATION)
        && condition(node, names::condition::MAINTENANCE_IN_PROGRESS).is_some()
}

/// Status and reason of a node's condition.
pub(crate) fn condition(node: &Node, type_: &str) -> Option<(String, String)> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|condition| condition.type_ == type_)?;
    Some((found.status.clone(), found.reason.clone().unwrap_or_default()))
}

/// Whether a condition of a maintenance is true.
pub(crate) fn is(maintenance: &NodeMaintenance, type_: &str) -> bool {
    let conditions = maintenance.status.iter().flat_map(|status| &status.conditions);
    conditions.into_iter().any(|condition| condition.type_ == type_ && condition.status == "True")
}

/// Status, reason and message of a maintenance's condition; empty if it has none.
pub(crate) fn condition_of(maintenance: &NodeMaintenance, type_: &str) -> (String, String, String) {
    let conditions = maintenance.status.iter().flat_map(|status| &status.conditions);
    let found = conditions.into_iter().find(|condition| condition.type_ == type_);
    found.map(|found| (found.status.clone(), found.reason.clone(), found.message.clone())).unwrap_or_default()
}

pub(crate) fn drain(maintenance: &NodeMaintenance) -> DrainStatus {
    maintenance.status.as_ref().and_then(|status| status.drain_status.clone()).unwrap_or_default()
}
