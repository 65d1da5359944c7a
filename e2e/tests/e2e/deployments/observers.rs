//! What others observe while pods are replaced.

use haulout_e2e::Process;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;

use super::history::History;
use super::*;

/// A budget that lets the only pod go when another one is available.
fn strict() -> PdbBuilder {
    objects::pdb("web").min_available("1")
}

/// A kubectl that runs while a test goes on.
fn kubectl(app: &App<'_>, args: &[&str]) -> Process {
    let cluster = &app.env.cluster;
    let log = cluster.logs.join(format!("kubectl-{}.log", app.scenario.name));
    cluster.command(&cluster.tools.kubectl()).args(args).log(log).spawn("kubectl").unwrap()
}

fn output(process: &Process) -> String {
    process.log().and_then(|log| std::fs::read_to_string(log).ok()).unwrap_or_default()
}

async fn until_prints(process: &Process, text: &str) {
    let what = format!("kubectl prints {text:?}");
    let prints = wait::eventually(&what, SOON, async || Ok(output(process).contains(text).then_some(())));
    prints.await.unwrap_or_else(|error| panic!("{error:#}: {}", output(process)));
}

/// Waits until it has exited successfully. Returns everything that it has printed.
async fn until_succeeds(process: &Process) -> String {
    let status = tokio::time::timeout(SOON, process.exited()).await.expect("kubectl exits");
    assert!(status.success(), "{status}: {}", output(process));
    output(process)
}

/// The replacement is ready, and the drain ends.
async fn finish(app: &App<'_>, old: &Pod, new: &Pod) {
    app.make_ready(new).await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    app.scenario.until_drained("a").await;
    app.until_pods("are as before", |pods| pods.len() == 1 && pods.iter().all(is_untouched)).await;
    app.is_as_before().await;
}

pub async fn rollout_status_waits_and_then_succeeds(env: &Env) {
    let (app, old, new) = App::moved(env, "rollout-status", strict()).await;
    let is_unavailable = |deployment: &Deployment| {
        let mut conditions = deployment.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.any(|condition| condition.type_ == "Available" && condition.status == "False")
    };
    app.explained(
        wait::present(app.scenario.deployments(), "web", "is not Available", SOON, is_unavailable).await,
    );
    let args = ["rollout", "status", "deployment/web", "--namespace", "rollout-status", "--timeout=60s"];
    let status = kubectl(&app, &args);
    until_prints(&status, "0 of 1 updated replicas are available").await;
    assert_eq!(status.try_wait(), None, "it waits");
    finish(&app, &old, &new).await;
    let text = until_succeeds(&status).await;
    assert!(text.contains("successfully rolled out"), "{text}");
}

/// The ReplicaSet does not count the pod that leaves, but Services do.
pub async fn available_replicas_are_lower_by_the_pods_that_leave(env: &Env) {
    let app = App::slow(env, "available", &["a", "b"], 4).await;
    app.budget(objects::pdb("web").min_available("4").namespace("available").selects("app", "web").build())
        .await;
    let available = |deployment: &Deployment| {
        deployment.status.as_ref().and_then(|status| status.available_replicas).unwrap_or_default()
    };
    let history = History::start(app.scenario.deployments(), "web", available).await;
    let endpoints = EndpointWatch::start(&app).await;
    app.open(&["b"]).await;
    app.drain().await;
    for _ in 0..4 {
        let (old, new) = app.until_moved("b").await;
        history.until_last("one less is available", |available| *available == 3).await;
        app.make_ready(&new).await;
        app.scenario.until_pod_gone(&old.name_any()).await;
    }
    let all = history.until_last("all are available", |available| *available == 4).await;
    assert!(all.iter().all(|available| [3, 4].contains(available)), "{all:?}");
    assert_eq!(endpoints.least(), 4);
    app.is_as_before().await;
}

/// With a number as `minAvailable`, Kubernetes does not read the scale: `expectedPods` is the number of pods.
pub async fn expected_pods_of_budgets_are_those_of_the_scale(env: &Env) {
    let budget = || objects::pdb("web");
    let cases = [
        ("budget-max", budget().max_unavailable("0"), 1),
        ("budget-percent", budget().min_available("100%"), 1),
        ("budget-number", budget().min_available("1"), 2),
    ];
    let check = |(name, budget, meanwhile): (_, PdbBuilder, i32)| async move {
        let app = App::slow(env, name, &["a", "b"], 1).await;
        app.budget(budget.namespace(name).selects("app", "web").build()).await;
        let numbers = |budget: &PodDisruptionBudget| {
            let status = budget.status.clone().unwrap_or_default();
            (status.expected_pods, status.desired_healthy, budget.metadata.generation)
        };
        let history = History::start(app.api(), "web", numbers).await;
        app.open(&["b"]).await;
        app.drain().await;
        let (old, new) = app.until_moved("b").await;
        history.until_last("the new pod is observed", |(expected, ..)| *expected == meanwhile).await;
        finish(&app, &old, &new).await;
        let all = history.until_last("the old pod is not expected", |(expected, ..)| *expected == 1).await;
        let is_allowed = |(expected, desired, generation): &(i32, i32, Option<i64>)| {
            (*expected == 1 || *expected == meanwhile) && *desired == 1 && *generation == Some(1)
        };
        assert!(all.iter().all(is_allowed), "{name}: {all:?}");
    };
    futures::future::join_all(cases.map(check)).await;
}

/// kubectl refuses to evict pods without a controller. A moved pod has one.
pub async fn drain_by_others_needs_no_force(env: &Env) {
    let (app, old, new) = App::moved(env, "drain-strict", strict()).await;
    let endpoints = EndpointWatch::start(&app).await;
    let drain = kubectl(&app, &["drain", &app.scenario.of("a"), "--timeout=60s"]);
    until_prints(&drain, "Cannot evict pod as it would violate the pod's disruption budget").await;
    finish(&app, &old, &new).await;
    until_succeeds(&drain).await;
    assert_eq!(endpoints.least(), 1);
}

/// Without a budget, nothing keeps others from evicting the pod before its replacement is ready.
pub async fn drain_by_others_evicts_at_once_if_the_budget_allows(env: &Env) {
    let (app, old, new) = App::moved(env, "drain-free", objects::pdb("web").max_unavailable("1")).await;
    let drain = kubectl(&app, &["drain", &app.scenario.of("a"), "--timeout=60s"]);
    until_succeeds(&drain).await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    let only = app.until_pods("are the replacement", |pods| pods.len() == 1).await;
    assert_eq!(only[0].uid(), new.uid());
    finish(&app, &old, &new).await;
}

/// The autoscaler reads the scale of the Deployment, and changes nothing.
pub async fn autoscalers_read_the_same_scale(env: &Env) {
    let app = App::slow(env, "autoscaler", &["a", "b"], 1).await;
    let autoscalers: Api<HorizontalPodAutoscaler> = app.api();
    let autoscaler = json!({
        "metadata": {"name": "web"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"},
            "minReplicas": 1, "maxReplicas": 5,
            "metrics": [{"type": "Resource", "resource":
                {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}}],
        },
    });
    autoscalers.create(&PostParams::default(), &serde_json::from_value(autoscaler).unwrap()).await.unwrap();
    let reads = |autoscaler: &HorizontalPodAutoscaler| {
        let conditions = autoscaler.status.iter().flat_map(|status| status.conditions.iter().flatten());
        conditions.into_iter().any(|condition| condition.type_ == "AbleToScale" && condition.status == "True")
    };
    wait::present(autoscalers.clone(), "web", "reads the scale", SOON, reads).await.unwrap();
    let scale = async || {
        let scale = app.scenario.deployments().get_scale("web").await.unwrap();
        (scale.spec.unwrap().replicas, scale.status.unwrap().selector)
    };
    let before = scale().await;
    assert_eq!(before, (Some(1), Some("app=web".to_owned())));
    app.open(&["b"]).await;
    app.drain().await;
    let (old, new) = app.until_moved("b").await;
    assert_eq!(scale().await, before);
    finish(&app, &old, &new).await;
    assert_eq!(scale().await, before);
    let autoscaler = autoscalers.get("web").await.unwrap();
    assert!(reads(&autoscaler), "{:?}", autoscaler.status);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Progressing,
    Degraded,
    Healthy,
}

/// The health of a Deployment in Argo CD, which reads these fields.
fn argo_cd_health(deployment: &Deployment) -> Health {
    let status = deployment.status.clone().unwrap_or_default();
    if status.observed_generation < deployment.metadata.generation {
        return Health::Progressing;
    }
    let mut conditions = status.conditions.iter().flatten();
    if conditions.any(|c| c.type_ == "Progressing" && c.reason.as_deref() == Some("ProgressDeadlineExceeded"))
    {
        return Health::Degraded;
    }
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let updated = status.updated_replicas.unwrap_or_default();
    let is_complete = updated >= wanted
        && status.replicas.unwrap_or_default() <= updated
        && status.available_replicas.unwrap_or_default() >= updated;
    if is_complete { Health::Healthy } else { Health::Progressing }
}

/// Not even when the replacement takes longer than the progress deadline of the Deployment.
pub async fn argo_cd_shows_progressing_and_never_degraded(env: &Env) {
    let app = App::slow(env, "argo-cd", &["a", "b"], 1).await;
    app.patch(json!({"spec": {"progressDeadlineSeconds": 3}})).await;
    app.budget(strict().namespace("argo-cd").selects("app", "web").build()).await;
    let complete = |deployment: &Deployment| argo_cd_health(deployment) == Health::Healthy;
    wait::present(app.scenario.deployments(), "web", "is healthy", SOON, complete).await.unwrap();
    let history = History::start(app.scenario.deployments(), "web", argo_cd_health).await;
    app.open(&["b"]).await;
    app.drain().await;
    let (old, new) = app.until_moved("b").await;
    app.until_event(names::event::POD_NOT_REPLACED).await;
    app.make_ready(&new).await;
    app.scenario.until_pod_gone(&old.name_any()).await;
    let all = history.until_last("the application is healthy", |health| *health == Health::Healthy).await;
    assert_eq!(all, [Health::Healthy, Health::Progressing, Health::Healthy]);
}

/// The account may not, and nobody else did it for us.
pub fn nobody_changes_budgets_or_deployments(env: &Env) {
    let ours = env.cluster.requests().unwrap().only(|request| {
        request.user.starts_with(&format!("system:serviceaccount:{}:", haulout_e2e::service::NAMESPACE))
    });
    assert!(ours.resource("pods", "").verb("patch").count() > 0, "the audit log has our requests");
    for resource in ["deployments", "replicasets", "poddisruptionbudgets", "horizontalpodautoscalers"] {
        let writes = ours.writes().only(|request| request.resource == resource);
        assert_eq!(writes.count(), 0, "{:?}", writes.iter().next());
    }
}
