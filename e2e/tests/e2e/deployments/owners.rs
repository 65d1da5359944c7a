//! Owners go away, or are none that the workload evacuator knows.

use haulout_api_types::instigators;
use haulout_api_types::names::instigator;
use haulout_e2e::service::NAMESPACE;
use k8s_openapi::api::core::v1::ReplicationController;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Resource as _;
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, PropagationPolicy};

use super::*;

fn propagation(policy: PropagationPolicy) -> DeleteParams {
    DeleteParams { propagation_policy: Some(policy), ..DeleteParams::default() }
}

pub async fn deployment_deleted_in_the_background_takes_the_pod_along(env: &Env) {
    Box::pin(deleted(env, "gone-background", PropagationPolicy::Background)).await;
}

pub async fn deployment_deleted_in_the_foreground_takes_the_pod_along(env: &Env) {
    Box::pin(deleted(env, "gone-foreground", PropagationPolicy::Foreground)).await;
}

/// The garbage collector deletes all pods, also the one that was moved, and nothing waits for its replacement.
async fn deleted(env: &Env, name: &'static str, policy: PropagationPolicy) {
    let (app, old) = outcomes::waiting(env, name).await;
    app.scenario.deployments().delete("web", &propagation(policy)).await.unwrap();
    app.until_pods("are gone", <[Pod]>::is_empty).await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    app.scenario.until_drained("a").await;
    until_no_evacuations(&app).await;
    app.scenario.delete("a").await;
}

async fn until_no_evacuations(app: &App<'_>) {
    let (config, none) = (watcher::Config::default(), |all: &[Evacuation]| all.is_empty());
    app.explained(wait::all(app.scenario.evacuations(), config, "are gone", SOON, none).await);
}

/// Drains the node. The pod has these evacuators, is evicted, and the workload evacuator has not changed it. Returns the last
/// message of its Evacuation.
async fn left_to_eviction(app: &App<'_>, classes: &[&str]) -> String {
    let mark = app.env.cluster.requests_mark().unwrap();
    let old = app.until_pod("is ready", is_ready).await;
    app.drain().await;
    // It stays while the pod terminates.
    let has_answer = |evacuation: &Evacuation| {
        let status = evacuation.status.clone().unwrap_or_default();
        status.active_evacuator_completed || classes.is_empty()
    };
    let evacuation = app.until_evacuation(&old, "has an answer", has_answer).await;
    let found: Vec<_> = evacuation.spec.evacuators.iter().map(|e| e.evacuator_class.as_str()).collect();
    assert_eq!(found, classes);
    app.scenario.until_pod_gone(&old.name_any()).await;
    app.scenario.until_drained("a").await;
    app.scenario.delete("a").await;
    until_no_evacuations(app).await;
    let in_namespace = |request: &haulout_e2e::requests::Request| request.namespace == app.scenario.name;
    let requests = app.env.cluster.requests_since(mark).unwrap().only(in_namespace);
    let user = format!("system:serviceaccount:{NAMESPACE}:haulout-workload-evacuator");
    assert_eq!(requests.by_user(&user).resource("pods", "").writes().count(), 0);
    let evictions = requests.resource("pods", "eviction").code(201);
    assert_eq!(evictions.only(|request| request.name == old.name_any()).count(), 1);
    message(&evacuation)
}

/// A pod template for the nodes of the scenario.
fn template(app: &App<'_>, label: (&str, &str)) -> DeploymentBuilder {
    let here = json!({"pool": app.scenario.of("pool")});
    objects::deployment("web").namespace(app.scenario.name).pods(|pod| {
        pod.label(label.0, label.1)
            .delete_delay(2)
            .grace(3)
            .with(|spec| spec.node_selector = serde_json::from_value(here).unwrap())
    })
}

pub async fn pods_of_a_replication_controller_are_left_to_eviction(env: &Env) {
    let app = App::empty(env, "replication", &["a"]).await;
    let set = template(&app, ("example.com/a", "b")).build_replica_set().spec.unwrap();
    let controller = json!({
        "metadata": {"name": "web"},
        "spec": {"replicas": 1, "selector": {"app": "web"}, "template": set.template},
    });
    let controllers: Api<ReplicationController> = app.api();
    let controller = serde_json::from_value(controller).unwrap();
    controllers.create(&PostParams::default(), &controller).await.unwrap();
    left_to_eviction(&app, &[]).await;
}

/// Argo Rollouts has a label of its own.
pub async fn pods_of_argo_rollouts_are_left_to_eviction(env: &Env) {
    let app = App::empty(env, "argo-rollouts", &["a"]).await;
    rollout(&app, ("rollouts-pod-template-hash", "x")).await;
    left_to_eviction(&app, &[]).await;
}

/// With the label of Deployments, the workload evacuator is asked, and has nothing to do.
pub async fn pods_of_other_owners_are_left_to_eviction(env: &Env) {
    let app = App::empty(env, "other-owner", &["a"]).await;
    rollout(&app, (names::POD_TEMPLATE_HASH_LABEL, "x")).await;
    let answer = left_to_eviction(&app, &[class::DEPLOYMENT]).await;
    assert!(answer.contains("belongs to Rollout web, not to a Deployment"), "{answer}");
}

/// A ReplicaSet with one pod that belongs to an object called `Rollout`.
async fn rollout(app: &App<'_>, label: (&str, &str)) {
    define_rollouts(app).await;
    let kind = GroupVersionKind::gvk("argoproj.io", "v1alpha1", "Rollout");
    let resource = ApiResource::from_gvk(&kind);
    let rollouts: Api<DynamicObject> = Api::namespaced_with(app.client(), app.scenario.name, &resource);
    let rollout = DynamicObject::new("web", &resource);
    let rollout = wait::eventually("Rollouts can be created", SOON, async || {
        Ok(rollouts.create(&PostParams::default(), &rollout).await.ok())
    });
    let rollout = rollout.await.unwrap();
    let sets: Api<ReplicaSet> = app.api();
    let mut set = template(app, label).build_replica_set();
    set.metadata.owner_references = Some(vec![rollout.controller_owner_ref(&resource).unwrap()]);
    sets.create(&PostParams::default(), &set).await.unwrap();
}

/// The CustomResourceDefinition that several scenarios share.
async fn define_rollouts(app: &App<'_>) {
    let definition = json!({
        "metadata": {"name": "rollouts.argoproj.io"},
        "spec": {
            "group": "argoproj.io",
            "scope": "Namespaced",
            "names": {"kind": "Rollout", "listKind": "RolloutList", "plural": "rollouts", "singular": "rollout"},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true,
            }}}],
        },
    });
    let definitions: Api<CustomResourceDefinition> = Api::all(app.client());
    let definition = serde_json::from_value(definition).unwrap();
    match definitions.create(&PostParams::default(), &definition).await {
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        created => drop(created.unwrap()),
    }
}

/// Its budget forbids the eviction for now, also with the third pod of a rollout.
async fn strict<'a>(env: &'a Env, name: &'static str) -> (App<'a>, Pod) {
    let app = App::new(env, name, &["a", "b"], 1).await;
    app.open(&["b"]).await;
    app.budget(objects::pdb("web").min_available("3").namespace(name).build()).await;
    let old = app.pod().await;
    app.drain().await;
    app.until_evacuation(&old, "is blocked by the budget", is_blocked_by_budget).await;
    (app, old)
}

fn is_blocked_by_budget(evacuation: &Evacuation) -> bool {
    let status = evacuation.status.clone().unwrap_or_default();
    let blocked = conditions::find(&status.conditions, names::condition::BLOCKED);
    blocked.is_some_and(|c| c.status == "True" && c.reason == names::reason::BUDGET_EXHAUSTED)
}

/// The evacuation is cancelled, and the pod has no ReplicaSet to which it could go back. It is evacuated, and its budget counts.
async fn evacuated_within_its_budget(app: &App<'_>, old: &Pod) {
    app.scenario.delete("a").await;
    let ours = instigators::finalizer(instigator::WORKLOAD_EVACUATOR);
    app.until_evacuation(old, "is requested again, and blocked by the budget", |evacuation| {
        evacuation.finalizers().contains(&ours) && is_blocked_by_budget(evacuation)
    })
    .await;
    let pod = app.scenario.pods().get(&old.name_any()).await.unwrap();
    assert!(pod.uid() == old.uid() && !is_terminating(&pod), "{pod:?}");
    let budgets: Api<PodDisruptionBudget> = app.api();
    let one = Patch::Merge(json!({"spec": {"minAvailable": 1}}));
    budgets.patch("web", &PatchParams::default(), &one).await.unwrap();
    app.scenario.until_pod_gone(&old.name_any()).await;
    app.until_pods("are the replacement", |pods| {
        pods.len() == 1 && pods.iter().all(|pod| is_untouched(pod) && is_ready(pod))
    })
    .await;
    until_no_evacuations(app).await;
}

/// Its pods are adopted by another ReplicaSet, except the one that was moved.
pub async fn former_replica_set_is_gone_at_cancellation(env: &Env) {
    let (app, old) = strict(env, "former-gone").await;
    let endpoints = EndpointWatch::start(&app).await;
    let sets: Api<ReplicaSet> = app.api();
    let former = sets.list(&kube::api::ListParams::default()).await.unwrap().items.remove(0);
    sets.delete(&former.name_any(), &propagation(PropagationPolicy::Orphan)).await.unwrap();
    let another = |sets: &[ReplicaSet]| sets.len() == 1 && sets.iter().all(|set| set.uid() != former.uid());
    let config = watcher::Config::default();
    app.explained(wait::all(sets, config, "are another one", SOON, another).await);
    evacuated_within_its_budget(&app, &old).await;
    assert_eq!(endpoints.least(), 1);
}

/// A rollout has ended meanwhile.
pub async fn former_replica_set_wants_no_pods_at_cancellation(env: &Env) {
    let (app, old) = strict(env, "former-zero").await;
    let endpoints = EndpointWatch::start(&app).await;
    rollouts::change_template(&app, json!({"example.com/revision": "2"})).await;
    app.until_pods("are the old one and one of the new revision", |pods| {
        let is_new = |pod: &Pod| pod.annotations().contains_key("example.com/revision") && is_ready(pod);
        pods.len() == 2 && pods.iter().any(is_new) && pods.iter().any(|pod| pod.uid() == old.uid())
    })
    .await;
    evacuated_within_its_budget(&app, &old).await;
    assert_eq!(endpoints.least(), 1);
}
