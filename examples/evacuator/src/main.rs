//! An evacuator to copy. It registers on pods, waits until it is given control of one that has to leave, does
//! its work (here: it copies nothing, in small steps), reports, and hands the pod back.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use futures::StreamExt as _;
use haulout_api_types::evacuation::Evacuator;
use haulout_api_types::{Evacuation, reports};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;

/// Has a say before pods leave.
#[derive(Clone, Parser)]
struct Args {
    /// The pods' namespace
    #[arg(long)]
    namespace: String,
    /// Which pods, such as app=db
    #[arg(long)]
    selector: String,
    /// Who we are: a DNS subdomain of our own
    #[arg(long, default_value = "copier.example.com")]
    class: String,
    /// Above 10000 we come before the pods' own controller, below after it
    #[arg(long, default_value_t = 11_000)]
    priority: i32,
    /// How many steps the work has
    #[arg(long, default_value_t = 10)]
    steps: u32,
    /// How many seconds each takes; keep it well below an Evacuation's progressDeadlineSeconds
    #[arg(long, default_value_t = 30)]
    step_seconds: u64,
}

#[tokio::main]
async fn main() -> Result<()> {
    // Whoever was here before us installed the same one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (args, client) = (Args::parse(), Client::try_default().await?);
    tokio::try_join!(register(&args, &client), serve(&args, &client))?;
    Ok(())
}

/// Marks every pod that we want to have a say about.
async fn register(args: &Args, client: &Client) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &args.namespace);
    let me = Evacuator { evacuator_class: args.class.clone(), priority: args.priority, role: None };
    let (key, value) = me.annotation();
    let config = watcher::Config::default().labels(&args.selector);
    let mut seen = pin!(watcher(pods.clone(), config).default_backoff().applied_objects());
    while let Some(pod) = seen.next().await {
        // A watch that broke comes back by itself.
        let Ok(pod) = pod else { continue };
        if pod.annotations().get(&key) == Some(&value) || pod.metadata.deletion_timestamp.is_some() {
            continue;
        }
        // With its UID, so that a pod which has replaced it under its name is not meant.
        let patch = Patch::Merge(json!({"metadata": {"uid": pod.uid(), "annotations": {&key: &value}}}));
        if let Err(error) = pods.patch(&pod.name_any(), &PatchParams::default(), &patch).await {
            eprintln!("registering on {}: {error}", pod.name_any());
        }
    }
    Ok(())
}

/// Takes every Evacuation of which we are given control.
async fn serve(args: &Args, client: &Client) -> Result<()> {
    // An Evacuation that is newer than this program must not hide the others.
    let all: Api<DeserializeGuard<Evacuation>> = Api::namespaced(client.clone(), &args.namespace);
    let ours = watcher::Config::default().fields(&format!("status.activeEvacuatorClass={}", args.class));
    let mut given = pin!(watcher(all, ours).default_backoff().applied_objects());
    let busy: Arc<Mutex<HashSet<String>>> = Arc::default();
    while let Some(evacuation) = given.next().await {
        let Ok(DeserializeGuard(Ok(evacuation))) = evacuation else { continue };
        let name = evacuation.name_any();
        let ours = evacuation.is_active(&args.class) && !evacuation.is_cancelled();
        if !ours || !lock(&busy).insert(name.clone()) {
            continue;
        }
        let (args, client, busy) = (args.clone(), client.clone(), Arc::clone(&busy));
        tokio::spawn(async move {
            match evacuate(&args, &client, &name).await {
                Ok(said) => println!("{name}: {said}"),
                Err(error) => eprintln!("{name}: {error:#}"),
            }
            lock(&busy).remove(&name);
        });
    }
    Ok(())
}

/// Does the work for one pod, one step after the other, and says how it went.
async fn evacuate(args: &Args, client: &Client, name: &str) -> Result<&'static str> {
    let evacuations: Api<Evacuation> = Api::namespaced(client.clone(), &args.namespace);
    let step_time = Duration::from_secs(args.step_seconds);
    let mut step = 0;
    loop {
        // Somebody else may have been given control, or the pod may stay after all: look before each report. That
        // somebody has deleted the Evacuation means nothing: while an instigator wants it, it goes on.
        let evacuation = evacuations.get_opt(name).await?;
        let Some(evacuation) = evacuation.filter(|e| e.is_active(&args.class) && !e.is_cancelled()) else {
            return Ok("not ours any more, aborted");
        };
        let left = args.steps.saturating_sub(step);
        let report = if left == 0 {
            reports::completed(&evacuation, "everything is copied")
        } else {
            let now = Timestamp::now();
            let message = format!("copied {step} of {} parts", args.steps);
            reports::progress(&evacuation, now, &message, Some(now.checked_add(step_time * left)?))
        };
        match evacuations.patch_status(name, &PatchParams::default(), &Patch::Merge(report)).await {
            Ok(_) if left == 0 => return Ok("done"),
            Ok(_) => {
                tokio::time::sleep(step_time).await;
                step += 1;
            }
            // The Evacuation has changed since we looked: look again.
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
