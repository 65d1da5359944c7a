//! Somebody scales a Deployment while its pods are replaced, as a HorizontalPodAutoscaler does.

use std::collections::BTreeSet;

use haulout_api_types::evacuators::evacuation_for;

use super::*;

/// Writes the scale, as a HorizontalPodAutoscaler does.
async fn scale(app: &App<'_>, replicas: i32) {
    let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
    app.scenario.deployments().patch_scale(app.name, &PatchParams::default(), &patch).await.unwrap();
}

/// Scales up while `node` is the only schedulable node, and waits until all pods are ready. Then no node is schedulable.
pub(super) async fn scale_up_on(app: &App<'_>, node: &str, others: &[&str], replicas: i32) {
    cordon(app, others).await;
    app.open(&[node]).await;
    scale(app, replicas).await;
    let all = usize::try_from(replicas).unwrap();
    app.until_pods("are ready", |pods| pods.len() == all && pods.iter().all(is_ready)).await;
    app.until_endpoints().await;
    cordon(app, &[node]).await;
}

async fn cordon(app: &App<'_>, nodes: &[&str]) {
    for node in nodes {
        app.scenario.patch_node(node, json!({"spec": {"unschedulable": true}})).await;
    }
}

fn uids(pods: &[Pod]) -> BTreeSet<String> {
    pods.iter().filter_map(kube::ResourceExt::uid).collect()
}

fn cost(pod: &Pod) -> Option<&str> {
    pod.annotations().get(names::POD_DELETION_COST_ANNOTATION).map(String::as_str)
}

pub async fn deployment_is_scaled_up_in_the_middle(env: &Env) {
    let app = App::new(env, "scale-up", &["a"], 2).await;
    let endpoints = EndpointWatch::start(&app).await;
    app.drain().await;
    app.until_pod("is moved", is_moved).await;
    scale(&app, 4).await;
    app.until_pods("are one more than wanted", |pods| pods.len() == 5).await;
    app.scenario.node("b", "pool").await;
    app.scenario.until_drained("a").await;
    app.until_pods("are on node b", |pods| {
        pods.len() == 4 && pods.iter().all(|pod| is_untouched(pod) && is_ready(pod))
    })
    .await;
    assert_eq!((endpoints.least(), app.replicas().await), (2, 4));
    app.scenario.delete("a").await;
}

/// The pods on the other node stay, and the one that was moved does not wait for its replacement any more.
pub async fn moved_pod_goes_first_when_the_deployment_is_scaled_down(env: &Env) {
    let app = App::new(env, "scale-down", &["a", "b"], 1).await;
    let old = app.pod().await;
    scale_up_on(&app, "b", &["a"], 3).await;
    app.budget(objects::pdb("web").max_unavailable("0").namespace("scale-down").build()).await;
    let mut others = uids(&app.pods().await);
    others.remove(&old.uid().unwrap());
    let endpoints = EndpointWatch::start(&app).await;
    app.drain().await;
    app.until_pod("is moved", |pod| pod.uid() == old.uid() && is_moved(pod)).await;
    app.until_pods("include a pending one", |pods| pods.len() == 4).await;
    scale(&app, 2).await;
    let stay = |pods: &[Pod]| uids(pods) == others && pods.iter().all(is_untouched);
    app.until_pods("are those on node b", stay).await;
    app.scenario.until_drained("a").await;
    assert_eq!(endpoints.least(), 2);
    app.scenario.delete("a").await;
}

/// Pods that wait until they are moved have the lowest deletion cost. When the evacuation is cancelled, they have theirs again.
pub async fn replica_set_deletes_pods_in_evacuation_first(env: &Env) {
    let earlier = objects::deployment("web")
        .replicas(3)
        .pods(|pod| pod.annotation(names::POD_DELETION_COST_ANNOTATION, "5"));
    let app = App::with(env, "prefer", &["a", "b"], earlier).await;
    let leaving = uids(&app.pods().await);
    scale_up_on(&app, "b", &["a"], 4).await;
    let stays = app.until_pod("is on node b", |pod| is_on(pod, &app.scenario.of("b"))).await;
    app.drain().await;
    let lowest = i32::MIN.to_string();
    app.until_pods("wait for the one that is moved", |pods| {
        let waiting = pods.iter().filter(|pod| cost(pod) == Some(&lowest) && !is_moved(pod));
        waiting.count() == 2 && pods.iter().any(is_moved)
    })
    .await;
    // Of three, one is moved, one is deleted, and the last one is moved after the first has left.
    scale(&app, 2).await;
    let left = app
        .until_pods("are the last one, its replacement, and the one on node b", |pods| {
            let of_node: Vec<_> =
                pods.iter().filter(|pod| leaving.contains(&pod.uid().unwrap_or_default())).collect();
            of_node.len() == 1 && of_node.iter().all(|pod| is_moved(pod)) && pods.len() == 3
        })
        .await;
    assert!(left.iter().any(|pod| pod.uid() == stays.uid() && !is_terminating(pod)), "{left:?}");
    app.scenario.delete("a").await;
    let restored = |pod: &Pod| {
        !is_moved(pod)
            && !pod.annotations().contains_key(names::FORMER_OWNER_ANNOTATION)
            && cost(pod) == Some("5")
    };
    let pods =
        app.until_pods("have their costs again", |pods| pods.len() == 2 && pods.iter().all(restored)).await;
    let found = uids(&pods);
    assert!(found.contains(&stays.uid().unwrap()) && found.intersection(&leaving).count() == 1, "{pods:?}");
}

/// Pods are moved in the moment when the ReplicaSet deletes them. It waits until it observes these deletions, for five minutes
/// at most, and creates and deletes nothing meanwhile: the pods have to be given back before they are gone.
pub async fn replica_set_deletes_pods_while_they_are_moved(env: &Env) {
    const ROUNDS: usize = 6;
    const PODS: i32 = 16;
    let app = App::new(env, "scale-race", &["a"], 2).await;
    let served = BTreeSet::from([class::DEPLOYMENT.to_owned()]);
    let all_at_once = json!({"spec": {"strategy": {"rollingUpdate": {"maxSurge": "100%"}}}});
    app.patch(all_at_once).await;
    for round in 0..ROUNDS {
        scale(&app, PODS).await;
        let all = usize::try_from(PODS).unwrap();
        let what = format!("are all ready in round {round}");
        let pods = app.until_pods(&what, |pods| pods.len() == all && pods.iter().all(is_ready)).await;
        let evacuations = pods.iter().map(async |pod| {
            let (evacuation, _) = evacuation_for(&pod.metadata, "descheduler.example.com", &served).unwrap();
            app.scenario.evacuations().create(&PostParams::default(), &evacuation).await.unwrap();
        });
        let scaled_down = async {
            // Requests take about as long as the steps to the move, so that every round meets another moment.
            for _ in 0..round * 4 {
                app.scenario.deployments().get_scale(app.name).await.unwrap();
            }
            scale(&app, 2).await;
        };
        futures::join!(futures::future::join_all(evacuations), scaled_down);
        let what = format!("are two others in round {round}");
        let before = uids(&pods);
        app.until_pods(&what, |pods| {
            pods.len() == 2
                && pods.iter().all(|pod| is_untouched(pod) && is_ready(pod))
                && uids(pods).is_disjoint(&before)
        })
        .await;
        let none = |evacuations: &[Evacuation]| evacuations.is_empty();
        let config = watcher::Config::default();
        app.explained(wait::all(app.scenario.evacuations(), config, "are gone", SOON, none).await);
    }
}
