//! A complete service on the service runtime without any decisions. Tests freeze it, cut it off, shift its clock and
//! stop it. It prints one line per step: `probe: started leading`, `probe: reconciled KEY`, `probe: stopped leading`,
//! `probe: exiting`.
//!
//! With `--panic-on NAME` it watches ConfigMaps, and its watch panics when one has this name.
//!
//! With `--count` it increments a counter in a ConfigMap while it leads (`wrote N`, `failed: …`). It also has a
//! worker that only the write fence can stop, which ends with `fenced: …`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use haulout_api_types::Evacuation;
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::events::{NewEvent, Severity, reference};
use haulout_service_runtime::lease::{InvalidTiming, NotLeading, Timing};
use haulout_service_runtime::queue::{Backoff, Outcome};
use haulout_service_runtime::service::{self, CommonArgs, Context, LeaderContext, Service};
use haulout_service_runtime::term;
use haulout_service_runtime::watch::{Handler, Source};
use haulout_service_runtime::workers::WorkQueue;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use tracing::info_span;

/// A test service without any decisions.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// Lease duration, in seconds; other timings are proportional
    #[arg(long, default_value_t = 3)]
    lease_seconds: u64,
    /// Increment a counter in a ConfigMap while leading, and start an unfenced writer
    #[arg(long)]
    count: bool,
    /// Number of identical events to publish when leading starts
    #[arg(long, default_value_t = 0)]
    events: u32,
    /// Add a key that is due this many seconds after the start
    #[arg(long)]
    wake_after: Option<i64>,
    /// Panic in a background task when a ConfigMap with this name exists in the namespace
    #[arg(long, value_name = "NAME")]
    panic_on: Option<String>,
}

/// A handler that panics.
struct PanicOn(String);

impl Handler<ConfigMap> for PanicOn {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, _: ConfigMap) {
        assert!(*self.0 != *name, "panicking on ConfigMap {name}");
    }

    fn delete(&self, _: Arc<str>) {}
}

const PERMISSIONS: &[Permission] = &[
    Permission::own("get", "", "configmaps"),
    Permission::own("create", "events.k8s.io", "events"),
    Permission::own("patch", "events.k8s.io", "events"),
];

/// The ConfigMap with the counter, and the one that the unfenced writer overwrites.
const COUNT: &str = "probe";
const UNFENCED: &str = "probe-unfenced";
const PAUSE: Duration = Duration::from_millis(50);

fn main() -> ExitCode {
    let args = Args::parse();
    let service = Service {
        name: "probe",
        // Part of the user agent, so that tests can distinguish the requests of several probes.
        version: args.common.instance.clone().unwrap_or_default().leak(),
        kinds: if args.count { vec![] } else { vec![Kind::of::<Evacuation>()] },
        permissions: if args.count { Vec::new() } else { [PERMISSIONS, &access::election("probe")].concat() },
    };
    let common = args.common.clone();
    service::run(service, common, |context| run(args, context))
}

async fn run(args: Args, context: Context) -> Result<(), InvalidTiming> {
    let queue = WorkQueue::new(context.clock.clone(), Backoff::default(), context.metrics.queue("probe"));
    if let Some(seconds) = args.wake_after {
        let due = context.clock.now().saturating_add(Duration::from_secs(seconds.unsigned_abs()));
        queue.add_at("sleeper", due.unwrap_or(jiff::Timestamp::MAX));
    }
    queue.add("early");
    let timing = Timing::for_lease(Duration::from_secs(args.lease_seconds));
    context.run_elected(timing, |leading| lead(&args, &context, &queue, leading)).await?;
    println!("probe: exiting");
    Ok(())
}

/// Prints when leading starts and ends, for whatever reason.
struct Term;

impl Term {
    fn begin() -> Self {
        println!("probe: started leading");
        Self
    }
}

impl Drop for Term {
    fn drop(&mut self) {
        println!("probe: stopped leading");
    }
}

async fn lead(args: &Args, context: &Context, queue: &WorkQueue<&'static str>, leading: LeaderContext) {
    let _term = Term::begin();
    let maps: Api<ConfigMap> = Api::namespaced(leading.clients.direct, &context.namespace);
    if args.count {
        count(context, maps).await;
    } else {
        work(args, context, queue, maps).await;
    }
}

async fn work(args: &Args, context: &Context, queue: &WorkQueue<&'static str>, maps: Api<ConfigMap>) {
    if let Ok(map) = maps.get("kube-root-ca.crt").await {
        for _ in 0..args.events {
            context.events.publish(NewEvent {
                regarding: reference(&map),
                severity: Severity::Normal,
                reason: "Probed",
                action: "Probe",
                note: "one of many identical events".into(),
            });
        }
    }
    let mut tasks = term::Term::new(context);
    if let Some(name) = &args.panic_on {
        let source = Source::in_namespace("configmaps", &context.namespace);
        tasks.watch(source, &Arc::new(PanicOn(name.clone())));
    }
    let workers = queue.run(2, context.stop.clone(), |key| async move {
        let _span = info_span!("work", key).entered();
        println!("probe: reconciled {key}");
        Ok::<_, std::convert::Infallible>(Outcome::Done)
    });
    tasks.run(workers).await;
}

async fn count(context: &Context, maps: Api<ConfigMap>) {
    tokio::spawn(write_unfenced(maps.clone(), context.instance.clone()));
    while !context.stop.is_cancelled() {
        match increment(&maps, &context.instance).await {
            Ok(sequence) => println!("wrote {sequence}"),
            Err(error) => println!("failed: {error:#}"),
        }
        tokio::select! {
            () = context.stop.cancelled() => {}
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}

/// Increments the counter. The resourceVersion is part of the request, so that no number is written twice.
async fn increment(maps: &Api<ConfigMap>, identity: &str) -> Result<u64> {
    let before = maps.get_opt(COUNT).await.context("reading the count")?;
    let exists = before.is_some();
    let mut map = before.unwrap_or_default();
    map.metadata.name = Some(COUNT.to_owned());
    let data = map.data.get_or_insert_default();
    let sequence = match data.get("sequence") {
        Some(text) => text.parse::<u64>().with_context(|| format!("{text:?} is not a number"))? + 1,
        None => 1,
    };
    data.insert("sequence".to_owned(), sequence.to_string());
    data.insert("identity".to_owned(), identity.to_owned());
    let post = PostParams::default();
    let written =
        if exists { maps.replace(COUNT, &post, &map).await } else { maps.create(&post, &map).await };
    written.context("writing the count")?;
    Ok(sequence)
}

/// What no service should have: a task that continues after leadership ended, and whose writes overwrite anything.
async fn write_unfenced(maps: Api<ConfigMap>, identity: String) {
    let force = PatchParams::apply(&identity).force();
    for number in 0_u64.. {
        let map = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": { "name": UNFENCED },
            "data": { "identity": identity, "number": number.to_string() },
        });
        if let Err(error) = maps.patch(UNFENCED, &force, &Patch::Apply(map)).await
            && let Some(reason) = NotLeading::find(&error)
        {
            println!("fenced: {reason}");
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
