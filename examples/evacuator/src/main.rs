//! A sample evacuator. It registers on pods, waits until it is active for one of them, does its work (here it pretends
//! to copy data in small steps), reports progress, and completes. Its account needs the Role in
//! docs/evacuator-authors.md, with the verb `report` on `evacuators` for its own class.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use futures::StreamExt as _;
use haulout_api_types::evacuation::{CancellationPolicy, Evacuator};
use haulout_api_types::{Evacuation, reports};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;

/// Copies the data of pods before they leave their nodes
#[derive(Clone, Parser)]
struct Args {
    /// Namespace of the pods
    #[arg(long)]
    namespace: String,
    /// Label selector of the pods, such as app=db
    #[arg(long)]
    selector: String,
    /// Evacuator class: a DNS subdomain that you own
    #[arg(long, default_value = "copier.example.com")]
    class: String,
    /// Priority: above 10000 acts before the pods' own controller, below after it
    #[arg(long, default_value_t = 11_000)]
    priority: i32,
    /// Number of steps
    #[arg(long, default_value_t = 10)]
    steps: u32,
    /// Duration of a step, in seconds
    #[arg(long, default_value_t = 30)]
    step_seconds: u64,
}

#[tokio::main]
async fn main() -> Result<()> {
    // This fails only if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (args, client) = (Args::parse(), Client::try_default().await?);
    tokio::try_join!(register(&args, &client), serve(&args, &client))?;
    Ok(())
}

/// Annotates the pods.
async fn register(args: &Args, client: &Client) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &args.namespace);
    let me = Evacuator { evacuator_class: args.class.clone(), priority: args.priority, role: None };
    let (key, value) = me.annotation();
    let config = watcher::Config::default().labels(&args.selector);
    let mut applied = pin!(watcher(pods.clone(), config).default_backoff().applied_objects());
    while let Some(pod) = applied.next().await {
        // The watch reconnects by itself.
        let Ok(pod) = pod else { continue };
        if pod.annotations().get(&key) == Some(&value) || pod.metadata.deletion_timestamp.is_some() {
            continue;
        }
        // The UID ensures that a new pod with the same name is not patched.
        let patch = Patch::Merge(json!({"metadata": {"uid": pod.uid(), "annotations": {&key: &value}}}));
        if let Err(error) = pods.patch(&pod.name_any(), &PatchParams::default(), &patch).await {
            eprintln!("failed to annotate pod {}: {error}", pod.name_any());
        }
    }
    Ok(())
}

/// Evacuates the pods for which this evacuator is active.
async fn serve(args: &Args, client: &Client) -> Result<()> {
    // One unreadable Evacuation must not hide the others.
    let all: Api<DeserializeGuard<Evacuation>> = Api::namespaced(client.clone(), &args.namespace);
    let ours = watcher::Config::default().fields(&format!("status.activeEvacuatorClass={}", args.class));
    let mut applied = pin!(watcher(all, ours).default_backoff().applied_objects());
    let busy: Arc<Mutex<HashSet<String>>> = Arc::default();
    while let Some(evacuation) = applied.next().await {
        let Ok(DeserializeGuard(Ok(evacuation))) = evacuation else { continue };
        let name = evacuation.name_any();
        let ours = evacuation.is_active(&args.class) && !evacuation.is_cancelled();
        if !ours || !lock(&busy).insert(name.clone()) {
            continue;
        }
        let (args, client, busy) = (args.clone(), client.clone(), Arc::clone(&busy));
        tokio::spawn(async move {
            match evacuate(&args, &client, &name).await {
                Ok(outcome) => println!("{name}: {outcome}"),
                Err(error) => eprintln!("{name}: {error:#}"),
            }
            lock(&busy).remove(&name);
        });
    }
    Ok(())
}

/// Does the work for one pod, reports progress, and returns the outcome.
async fn evacuate(args: &Args, client: &Client, name: &str) -> Result<&'static str> {
    let evacuations: Api<Evacuation> = Api::namespaced(client.clone(), &args.namespace);
    let step_time = Duration::from_secs(args.step_seconds);
    let (mut step, mut rest_of_step) = (0, step_time);
    loop {
        // Check before each report: another evacuator may be active, or the evacuation may be cancelled. A deletion timestamp means
        // nothing, because the evacuation continues while an instigator finalizer remains.
        let evacuation = evacuations.get_opt(name).await?;
        let Some(evacuation) = evacuation.filter(|e| e.is_active(&args.class) && !e.is_cancelled()) else {
            return Ok("no longer active, aborted");
        };
        let left = args.steps.saturating_sub(step);
        let report = if left == 0 {
            reports::completed(&evacuation, "everything is copied")
        } else {
            let now = Timestamp::now();
            let message = format!("copied {step} of {} parts", args.steps);
            let finish = now.checked_add(step_time * (left - 1) + rest_of_step)?;
            // The copy can stop at any step. An evacuator that cannot stop sets Forbid while it cannot.
            reports::progress(&evacuation, now, &message, Some(finish), CancellationPolicy::Allow)
        };
        match evacuations.patch_status(name, &PatchParams::default(), &Patch::Merge(report)).await {
            Ok(_) if left == 0 => return Ok("done"),
            Ok(_) => {
                // Report each step, but at least as often as the deadline requires.
                let pause = rest_of_step.min(Duration::try_from(reports::interval(&evacuation))?);
                tokio::time::sleep(pause).await;
                rest_of_step -= pause;
                if rest_of_step.is_zero() {
                    (step, rest_of_step) = (step + 1, step_time);
                }
            }
            // The Evacuation has changed since it was read: read it again.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
