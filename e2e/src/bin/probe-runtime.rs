//! A whole service on the service runtime, with nothing to decide, for tests to start without permissions,
//! to ask for metrics, to shift in time and to stop. It prints `leads`, `worked on KEY` and `ends`.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use haulout_api_types::Evacuation;
use haulout_service_runtime::access::{Kind, Permission, Scope};
use haulout_service_runtime::events::{News, Severity, reference};
use haulout_service_runtime::lease::{InvalidTiming, Timing};
use haulout_service_runtime::queue::{Backoff, Outcome};
use haulout_service_runtime::service::{self, CommonArgs, Context, Leading, Service};
use haulout_service_runtime::workers::WorkQueue;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use tracing::info_span;

/// A service with nothing to decide.
#[derive(Parser)]
struct Args {
    #[command(flatten)]
    common: CommonArgs,
    /// How many events that are all alike it publishes when it leads
    #[arg(long, default_value_t = 0)]
    events: u32,
    /// A key that is due this many seconds after the start
    #[arg(long)]
    wake_after: Option<i64>,
}

const fn own(verb: &'static str, group: &'static str, resource: &'static str) -> Permission {
    Permission { verb, group, resource, scope: Scope::OwnNamespace }
}

const PERMISSIONS: &[Permission] = &[
    own("get", "", "configmaps"),
    own("create", "events.k8s.io", "events"),
    own("patch", "events.k8s.io", "events"),
    own("get", "coordination.k8s.io", "leases"),
    own("list", "coordination.k8s.io", "leases"),
    own("watch", "coordination.k8s.io", "leases"),
    own("create", "coordination.k8s.io", "leases"),
    own("update", "coordination.k8s.io", "leases"),
];

fn main() -> ExitCode {
    let args = Args::parse();
    let service = Service {
        name: "probe",
        version: env!("CARGO_PKG_VERSION"),
        kinds: vec![Kind::of::<Evacuation>()],
        permissions: PERMISSIONS,
    };
    let common = args.common.clone();
    service::run(service, common, |context| lead(args, context))
}

async fn lead(args: Args, context: Context) -> Result<(), InvalidTiming> {
    let queue = WorkQueue::new(context.clock.clone(), Backoff::default(), context.metrics.queue("probe"));
    if let Some(seconds) = args.wake_after {
        let due = context.clock.now().saturating_add(Duration::from_secs(seconds.unsigned_abs()));
        queue.add_at("sleeper", due.unwrap_or(jiff::Timestamp::MAX));
    }
    queue.add("early");
    let timing = Timing::for_lease(Duration::from_secs(3));
    context.lead(timing, |leading| work(&args, &context, &queue, leading)).await?;
    println!("ends");
    Ok(())
}

async fn work(args: &Args, context: &Context, queue: &WorkQueue<&'static str>, leading: Leading) {
    println!("leads");
    let maps: Api<ConfigMap> = Api::namespaced(leading.clients.retrying.clone(), &context.namespace);
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
    queue
        .run(2, context.stop.clone(), |key| async move {
            let _span = info_span!("work", key).entered();
            println!("worked on {key}");
            Outcome::Done
        })
        .await;
}
