//! A whole service on the service runtime, with nothing to decide, for tests to freeze, cut off, shift in time
//! and stop. It prints what it does, one line for each: `leads`, `worked on KEY`, `stands by`, `ends`.
//!
//! With `--panic-on NAME` it watches ConfigMaps, and its watch panics when one has this name.
//!
//! With `--count` it counts upwards in a ConfigMap while it leads (`wrote N`, `failed: …`), and has a worker
//! that only the fence can stop, which ends with `fenced: …`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use haulout_api_types::Evacuation;
use haulout_service_runtime::access::{self, Kind, Permission};
use haulout_service_runtime::events::{News, Severity, reference};
use haulout_service_runtime::lease::{InvalidTiming, NotLeading, Timing};
use haulout_service_runtime::queue::{Backoff, Outcome};
use haulout_service_runtime::service::{self, CommonArgs, Context, Leading, Service};
use haulout_service_runtime::term;
use haulout_service_runtime::watch::{Handler, Source};
use haulout_service_runtime::workers::WorkQueue;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use tracing::info_span;

/// A service with nothing to decide.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// The duration of the lease; everything else is in proportion
    #[arg(long, default_value_t = 3)]
    lease_seconds: u64,
    /// Counts upwards in a ConfigMap while it leads, and starts whatever it is allowed to do
    #[arg(long)]
    count: bool,
    /// How many events that are all alike it publishes when it leads
    #[arg(long, default_value_t = 0)]
    events: u32,
    /// A key that is due this many seconds after the start
    #[arg(long)]
    wake_after: Option<i64>,
    /// Panics in a background task when there is a ConfigMap of this name in its namespace
    #[arg(long, value_name = "NAME")]
    panic_on: Option<String>,
}

/// A handler with a defect.
struct PanicOn(String);

impl Handler<ConfigMap> for PanicOn {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, _: ConfigMap) {
        assert!(*self.0 != *name, "ConfigMap {name} was too much for it");
    }

    fn delete(&self, _: Arc<str>) {}
}

const PERMISSIONS: &[Permission] = &[
    Permission::own("get", "", "configmaps"),
    Permission::own("create", "events.k8s.io", "events"),
    Permission::own("patch", "events.k8s.io", "events"),
];

/// The ConfigMap in which it counts, and the one that is written without looking.
const COUNT: &str = "probe";
const BLIND: &str = "probe-blind";
const PAUSE: Duration = Duration::from_millis(50);

fn main() -> ExitCode {
    let args = Args::parse();
    let service = Service {
        name: "probe",
        // In the user agent, so that tests can tell the requests of several probes apart.
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
    context.lead(timing, |leading| lead(&args, &context, &queue, leading)).await?;
    println!("ends");
    Ok(())
}

/// Says when leading ends, however it does.
struct Term;

impl Term {
    fn begin() -> Self {
        println!("leads");
        Self
    }
}

impl Drop for Term {
    fn drop(&mut self) {
        println!("stands by");
    }
}

async fn lead(args: &Args, context: &Context, queue: &WorkQueue<&'static str>, leading: Leading) {
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
            context.events.publish(News {
                regarding: reference(&map),
                severity: Severity::Normal,
                reason: "Probed",
                action: "Probe",
                note: "a burst of events that are all alike".into(),
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
        println!("worked on {key}");
        Ok::<_, std::convert::Infallible>(Outcome::Done)
    });
    tasks.run(workers).await;
}

async fn count(context: &Context, maps: Api<ConfigMap>) {
    tokio::spawn(write_blindly(maps.clone(), context.instance.clone()));
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

/// Counts one up from what is there. The resourceVersion goes along, so that nothing is counted twice.
async fn increment(maps: &Api<ConfigMap>, identity: &str) -> Result<u64> {
    let before = maps.get_opt(COUNT).await.context("reading the count")?;
    let exists = before.is_some();
    let mut map = before.unwrap_or_default();
    map.metadata.name = Some(COUNT.to_owned());
    let data = map.data.get_or_insert_default();
    let sequence = match data.get("sequence") {
        Some(text) => text.parse::<u64>().with_context(|| format!("{text:?} is no count"))? + 1,
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

/// What no service should have: a task that outlives its leader and whose writes overwrite anything.
async fn write_blindly(maps: Api<ConfigMap>, identity: String) {
    let force = PatchParams::apply(&identity).force();
    for number in 0_u64.. {
        let map = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": { "name": BLIND },
            "data": { "identity": identity, "number": number.to_string() },
        });
        if let Err(error) = maps.patch(BLIND, &force, &Patch::Apply(map)).await
            && let Some(reason) = NotLeading::find(&error)
        {
            println!("fenced: {reason}");
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
