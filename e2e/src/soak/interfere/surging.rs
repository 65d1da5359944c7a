//! Actions that concern Deployments whose pods are replaced before they are evicted: their owners, and others, change
//! them in the middle.

use std::time::Duration;

use anyhow::{Result, bail};
use haulout_api_types::names::{FORMER_OWNER_ANNOTATION, class};
use haulout_api_types::{Evacuation, instigators};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, PropagationPolicy};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::actions::{Undo, ignore_stale};
use super::env::{self, SPARE, SoakEnv};
use super::script::Action;
use crate::wait;

/// For how long to wait for a pod that is being replaced: most are for seconds only.
const PATIENCE: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(60);
/// The annotation that keeps pods from becoming ready.
const READY: &str = "haulout.test/ready";

/// What was done, if there was an object for it, and how to undo it.
type Done = Result<(Option<Undo>, Option<String>)>;

/// Carries out one action.
pub(super) async fn act(
    env: &mut SoakEnv,
    action: Action,
    pending: &[String],
    random: &mut fastrand::Rng,
) -> Done {
    match action {
        Action::CordonSpare => return cordon_spare(env).await,
        Action::StripEvacuatorFinalizer => return strip_finalizer(env, random).await,
        _ => {}
    }
    let moved = moved_pods(env).await?;
    match action {
        Action::StripFormerOwner => strip_former_owner(env, random).await,
        Action::DeleteReplacement | Action::BreakReplacement => {
            on_replacement(env, action, random.choice(moved)).await
        }
        Action::CancelEvacuation => cancel(env, random.choice(moved)).await,
        _ => {
            let of_moved = random.choice(moved).as_ref().map(app);
            let all: Vec<_> = env::deployments().map(str::to_owned).collect();
            let name = of_moved.or_else(|| random.choice(all)).unwrap_or_default();
            if pending.contains(&name) {
                return Ok((None, None));
            }
            let Some(found) = env.deployment_api().get_opt(&name).await? else { return Ok((None, None)) };
            match action {
                Action::DeleteDeployment => delete(env, found, random).await,
                _ => change(env, &found, action, random).await,
            }
        }
    }
}

fn app(pod: &Pod) -> String {
    pod.labels().get("app").cloned().unwrap_or_default()
}

/// The pods that belong directly to Deployments with which people interfere. Waits for one.
async fn moved_pods(env: &SoakEnv) -> Result<Vec<Pod>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut pods = env.pod_api().list(&ListParams::default()).await?.items;
        let is_moved = |pod: &Pod| pod.owner_references().iter().any(|owner| owner.kind == "Deployment");
        pods.retain(|pod| is_moved(pod) && env::deployments().any(|name| app(pod) == name));
        if !pods.is_empty() || Instant::now() > deadline {
            pods.sort_by_key(kube::ResourceExt::name_any);
            return Ok(pods);
        }
        sleep(Duration::from_millis(100)).await;
    }
}

/// Scales, rolls out or pauses a Deployment, until later.
async fn change(env: &mut SoakEnv, found: &Deployment, action: Action, random: &mut fastrand::Rng) -> Done {
    let name = found.name_any();
    let replicas = found.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
    let number = random.u32(..).to_string();
    let template = |annotations: Value| json!({"metadata": {"annotations": annotations}});
    let rollout = template(json!({"example.com/rollout": number}));
    let (patch, undo, text) = match action {
        Action::ScaleDeployment => {
            let wanted = random.choice([0, 0, 1, replicas - 1, replicas + 2]).unwrap_or_default().max(0);
            (
                json!({"replicas": wanted}),
                json!({"replicas": replicas}),
                format!("from {replicas} to {wanted}"),
            )
        }
        Action::PauseDeployment => {
            let mut patch = json!({"paused": true});
            if let (true, Some(patch)) = (random.bool(), patch.as_object_mut()) {
                patch.insert("template".into(), rollout);
            }
            (patch, json!({"paused": null}), "it is paused".to_owned())
        }
        _ if random.bool() => (
            json!({"template": template(json!({"example.com/rollout": number, READY: "false"}))}),
            json!({"template": template(json!({READY: null}))}),
            "new pods do not become ready".to_owned(),
        ),
        _ => (json!({"template": rollout}), Value::Null, "a rollout".to_owned()),
    };
    patch_deployment(env, &name, patch).await?;
    let undo = (!undo.is_null()).then(|| Undo::Deployment(name.clone(), undo));
    Ok((undo, Some(format!("{name}: {text}"))))
}

/// Changes the specification of a Deployment.
pub(super) async fn patch_deployment(env: &mut SoakEnv, name: &str, spec: Value) -> Result<()> {
    let patch = Patch::Merge(json!({"spec": spec}));
    let written = env.deployment_api().patch(name, &PatchParams::default(), &patch).await;
    if let Some(written) = ignore_stale(written)? {
        env.intents.wrote("Deployment", &written.metadata);
    }
    Ok(())
}

async fn delete(env: &mut SoakEnv, found: Deployment, random: &mut fastrand::Rng) -> Done {
    let name = found.name_any();
    let how = match random.u8(..3) {
        0 => PropagationPolicy::Foreground,
        1 => PropagationPolicy::Background,
        _ => PropagationPolicy::Orphan,
    };
    let text = format!("{name}: {how:?}");
    let params = DeleteParams { propagation_policy: Some(how), ..DeleteParams::default() };
    ignore_stale(env.deployment_api().delete(&name, &params).await.map(drop))?;
    env.intents.removed("Deployment", &name);
    Ok((Some(Undo::Recreate(found.into())), Some(text)))
}

/// Creates a deleted Deployment again when it is gone.
pub(super) async fn recreate(env: &mut SoakEnv, found: Deployment) -> Result<String> {
    let name = found.name_any();
    wait::gone(env.deployment_api(), &name, LIMIT).await?;
    let mut new = crate::objects::deployment(&name).namespace(env::NAMESPACE).build();
    new.spec = found.spec;
    let created = env.deployment_api().create(&PostParams::default(), &new).await?;
    env.intents.wrote("Deployment", &created.metadata);
    Ok(name)
}

async fn strip_former_owner(env: &mut SoakEnv, random: &mut fastrand::Rng) -> Done {
    let mut pods = env.pod_api().list(&ListParams::default()).await?.items;
    pods.retain(|pod| {
        let marked = pod.annotations().contains_key(FORMER_OWNER_ANNOTATION);
        marked && env::deployments().any(|name| app(pod) == name)
    });
    pods.sort_by_key(kube::ResourceExt::name_any);
    let Some(pod) = random.choice(pods) else { return Ok((None, None)) };
    let name = pod.name_any();
    let patch = Patch::Merge(json!({"metadata": {"annotations": {FORMER_OWNER_ANNOTATION: null}}}));
    ignore_stale(env.pod_api().patch(&name, &PatchParams::default(), &patch).await)?;
    env.intents.without_cost.extend(pod.uid());
    Ok((None, Some(format!("that of {name}"))))
}

/// Deletes the newest pod of the Deployment of a moved pod, or keeps it from being ready.
async fn on_replacement(env: &SoakEnv, action: Action, moved: Option<Pod>) -> Done {
    let Some(moved) = moved else { return Ok((None, None)) };
    let same = ListParams::default().labels(&format!("app={}", app(&moved)));
    let mut pods = env.pod_api().list(&same).await?.items;
    pods.retain(|pod| pod.owner_references().iter().any(|owner| owner.kind == "ReplicaSet"));
    pods.sort_by_key(|pod| (pod.creation_timestamp(), pod.name_any()));
    let Some(newest) = pods.pop().map(|pod| pod.name_any()) else { return Ok((None, None)) };
    let text = format!("{newest}, while {} is being replaced", moved.name_any());
    if action == Action::DeleteReplacement {
        ignore_stale(env.pod_api().delete(&newest, &DeleteParams::default()).await.map(drop))?;
        return Ok((None, Some(text)));
    }
    set_ready(env, &newest, false).await?;
    Ok((Some(Undo::Ready(newest)), Some(text)))
}

/// Keeps a pod from being ready, or no longer.
pub(super) async fn set_ready(env: &SoakEnv, pod: &str, ready: bool) -> Result<()> {
    let value = if ready { Value::Null } else { "false".into() };
    let patch = Patch::Merge(json!({"metadata": {"annotations": {READY: value}}}));
    ignore_stale(env.pod_api().patch(pod, &PatchParams::default(), &patch).await)?;
    Ok(())
}

/// Removes the finalizers of all instigators, and no others.
async fn cancel(env: &SoakEnv, moved: Option<Pod>) -> Done {
    let Some(moved) = moved else { return Ok((None, None)) };
    let all = env.evacuation_api().list(&ListParams::default()).await?;
    let found =
        all.items.into_iter().find(|evacuation| Some(&evacuation.spec.pod_ref.uid) == moved.uid().as_ref());
    let Some(found) = found else { return Ok((None, None)) };
    let is_instigator =
        |finalizer: &str| found.instigators().any(|name| instigators::finalizer(name) == finalizer);
    keep_finalizers(env, &found, |finalizer| !is_instigator(finalizer)).await?;
    Ok((None, Some(format!("that of {}", moved.name_any()))))
}

/// Removes the finalizer with which the workload evacuator holds an Evacuation.
async fn strip_finalizer(env: &SoakEnv, random: &mut fastrand::Rng) -> Done {
    let ours = instigators::finalizer(class::DEPLOYMENT);
    let deadline = Instant::now() + PATIENCE;
    let found = loop {
        let mut all = env.evacuation_api().list(&ListParams::default()).await?.items;
        all.retain(|evacuation| {
            let pod = &evacuation.spec.pod_ref.name;
            let disturbed = env::deployments().any(|name| pod.starts_with(&format!("{name}-")));
            disturbed && evacuation.finalizers().contains(&ours)
        });
        match random.choice(all) {
            Some(found) => break found,
            None if Instant::now() > deadline => return Ok((None, None)),
            None => sleep(Duration::from_millis(100)).await,
        }
    };
    keep_finalizers(env, &found, |finalizer| finalizer != ours).await?;
    Ok((None, Some(format!("that of {}", found.spec.pod_ref.name))))
}

async fn keep_finalizers(env: &SoakEnv, found: &Evacuation, keep: impl Fn(&str) -> bool) -> Result<()> {
    let kept: Vec<_> = found.finalizers().iter().filter(|finalizer| keep(finalizer)).collect();
    let patch = json!({"metadata": {"finalizers": kept, "resourceVersion": found.resource_version()}});
    let api = env.evacuation_api();
    ignore_stale(api.patch(&found.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await)?;
    Ok(())
}

/// No node has room for replacements.
async fn cordon_spare(env: &SoakEnv) -> Done {
    let nodes = env.node_api().list(&ListParams::default()).await?;
    let is_open = |name: &str| {
        let node = nodes.items.iter().find(|node| node.name_any() == name);
        node.and_then(|node| node.spec.as_ref()).is_some_and(|spec| spec.unschedulable != Some(true))
    };
    let open: Vec<_> = SPARE.into_iter().filter(|name| is_open(name)).collect();
    if open.is_empty() {
        bail!("the spare nodes are cordoned already");
    }
    for name in &open {
        env.cordon(name, true).await?;
    }
    let text = format!("{open:?}");
    Ok((Some(Undo::Spare(open)), Some(text)))
}
