//! Start and end of a service: arguments, telemetry, clients, checks, HTTP, and an orderly shutdown, so that
//! its `main` is one call.
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use clap::Parser;
//! use haulout_api_types::Evacuation;
//! use haulout_service_runtime::access::{self, Kind, Permission};
//! use haulout_service_runtime::lease::InvalidTiming;
//! use haulout_service_runtime::service::{self, CommonArgs, Context, ElectionArgs, Leading, Service};
//!
//! #[derive(Parser)]
//! struct Args {
//!     #[command(flatten)]
//!     common: CommonArgs,
//!     #[command(flatten)]
//!     election: ElectionArgs,
//! }
//!
//! /// What is missing is told in one line at the start.
//! const PERMISSIONS: &[Permission] =
//!     &[Permission::cluster("list", "", "pods"), Permission::cluster("watch", "", "pods")];
//!
//! fn main() -> ExitCode {
//!     let args = Args::parse();
//!     let service = Service {
//!         name: "example-controller",
//!         version: env!("CARGO_PKG_VERSION"),
//!         kinds: vec![Kind::of::<Evacuation>()],
//!         permissions: [PERMISSIONS, access::EVENTS, &access::election("example-controller")].concat(),
//!     };
//!     service::run(service, args.common, |context| run(args.election, context))
//! }
//!
//! async fn run(election: ElectionArgs, context: Context) -> Result<(), InvalidTiming> {
//!     context.lead(election.timing(), |leading| lead(&context, leading)).await
//! }
//!
//! /// Made anew whenever this replica is elected, and dropped when it no longer leads.
//! async fn lead(context: &Context, leading: Leading) {
//!     let pods = context.pod_cache();
//!     // Writes through `leading.clients` fail with `NotLeading` once leadership has ended. A task that is
//!     // spawned outlives this future: hold it in a `JoinSet`.
//!     context.stop.cancelled().await;
//! }
//! ```

use std::fmt::Display;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use kube::Config;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info, warn};

use crate::access::{self, Kind, Permission};
use crate::clients::Clients;
use crate::clock::Clock;
use crate::events::Events;
use crate::lease::{Election, InvalidTiming, Leadership, Timing};
use crate::metrics::Metrics;
use crate::pods::PodCache;
use crate::server::{self, Readiness, Shown};
use crate::telemetry::{self, LogFormat};

/// How long a service has to end in good order; then it ends anyhow. With the two seconds that last events,
/// scrapes and traces get, it is gone after ten.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(8);

/// Arguments that every service has.
#[derive(Clone, Debug, clap::Args)]
pub struct CommonArgs {
    /// Where /livez, /readyz and /metrics are served
    #[arg(long, env = "HAULOUT_LISTEN", default_value_t = server::everywhere(8080))]
    pub listen: SocketAddr,

    /// The service's own namespace, where its Lease is; in a pod it is known
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: Option<String>,

    /// The name of this replica, for leases and events; in a pod it is the pod's
    #[arg(long, env = "POD_NAME")]
    pub instance: Option<String>,

    /// What logs look like; RUST_LOG chooses which ones there are
    #[arg(long, env = "HAULOUT_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,

    /// Sends traces to this OTLP collector (gRPC), such as http://collector:4317
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,

    /// The share of traces that are sent, from 0 to 1
    #[arg(long, env = "HAULOUT_TRACE_SAMPLING", default_value_t = 0.1, value_parser = parse_share)]
    pub trace_sampling: f64,

    /// How many API requests are under way at once at most; one namespace takes up at most half of them
    #[arg(long, env = "HAULOUT_MAX_REQUESTS", default_value_t = 64, value_parser = parse_positive)]
    pub max_requests: usize,
}

/// Arguments of those services that stand for election.
#[derive(Clone, Debug, clap::Args)]
pub struct ElectionArgs {
    /// For how many seconds the Lease of a leader that has died keeps others away
    #[arg(long, env = "HAULOUT_LEASE_SECONDS", default_value_t = 15)]
    pub lease_seconds: u64,
}

impl ElectionArgs {
    /// The times that follow from them.
    pub fn timing(&self) -> Timing {
        Timing::for_lease(Duration::from_secs(self.lease_seconds))
    }
}

fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "a number from 0 to 1 is needed".into())
}

fn parse_positive(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "a whole number above 0 is needed".into())
}

/// What a service is and needs.
#[derive(Clone, Debug)]
pub struct Service {
    /// Such as `evacuation-controller`.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// The kinds of ours that it reads or writes.
    pub kinds: Vec<Kind>,
    /// What it will have to do.
    pub permissions: Vec<Permission>,
}

/// What a service gets to work with.
#[derive(Clone)]
pub struct Context {
    /// Clients of the API server.
    pub clients: Clients,
    /// The source of `now`.
    pub clock: Clock,
    /// Takes events.
    pub events: Events,
    /// The name of this replica.
    pub instance: String,
    /// The name of the service.
    pub name: &'static str,
    /// Metrics, to which a service adds its own.
    pub metrics: Metrics,
    /// The service's own namespace.
    pub namespace: String,
    /// What the service waits for before it is ready.
    pub readiness: Readiness,
    /// Cancelled when the service is to end.
    pub stop: CancellationToken,
}

impl Context {
    /// Stands for election under the service's name and, whenever elected, runs what `lead` makes, with
    /// clients that refuse to write once leadership has ended. The future is dropped when leadership is lost,
    /// and has to end by itself when [`Context::stop`] is cancelled. Returns then, or when the future ends
    /// before, which gives the Lease up.
    ///
    /// The service needs what [`access::election`] says.
    pub async fn lead<F: Future<Output = ()>>(
        &self,
        timing: Timing,
        lead: impl Fn(Leading) -> F,
    ) -> Result<(), InvalidTiming> {
        let (client, lease) = (self.clients.lease.clone(), access::lease_name(self.name));
        let election = Election::new(client, &self.namespace, &lease, &self.instance, timing)?;
        let mut leads = election.leading();
        let (metrics, name) = (self.metrics.clone(), self.name);
        metrics.leading(name, false);
        let shown = tokio::spawn(async move {
            while leads.changed().await.is_ok() {
                let leads = *leads.borrow_and_update();
                metrics.leading(name, leads);
                info!(leads, "leadership changed");
            }
        });
        let run = election.run(self.stop.clone(), |leadership| {
            let clients = self.clients.fenced(&leadership);
            lead(Leading { clients, leadership })
        });
        run.await;
        shown.abort();
        self.metrics.leading(name, false);
        Ok(())
    }

    /// Starts the cache of all pods for the parts of this service to share, with its watch in the metrics. It
    /// ends with the last clone. Leaders have one; a standby needs none.
    pub fn pod_cache(&self) -> PodCache {
        PodCache::start(self.clients.direct.clone(), self.metrics.clone())
    }
}

/// What a leader works with.
#[derive(Clone)]
pub struct Leading {
    /// Clients that refuse to write once leadership has ended.
    pub clients: Clients,
    /// Whether it still leads.
    pub leadership: Leadership,
}

/// Runs a service until SIGTERM or SIGINT, or until `main` returns. A failure to start is one line on stderr
/// and a non-zero exit.
pub fn run<F, E>(service: Service, args: CommonArgs, main: impl FnOnce(Context) -> F) -> ExitCode
where
    F: Future<Output = Result<(), E>>,
    E: Display,
{
    // Whoever was here before us installed the same one: ring is the only provider in the binary.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let name = service.name;
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(name, &error),
    };
    let result = runtime.block_on(start(service, args, main));
    // Requests that nobody waits for any more must not hold up the end.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => fail(name, &problem),
    }
}

fn fail(name: &str, problem: &dyn Display) -> ExitCode {
    // One line, whatever the error says: logs of crashed pods are read by their last line.
    let problem = problem.to_string().replace('\n', " ");
    eprintln!("haulout-{name}: {problem}");
    ExitCode::FAILURE
}

async fn start<F, E>(
    service: Service,
    args: CommonArgs,
    main: impl FnOnce(Context) -> F,
) -> Result<(), String>
where
    F: Future<Output = Result<(), E>>,
    E: Display,
{
    let endpoint = args.otlp_endpoint.as_deref();
    let _telemetry =
        telemetry::begin(service.name, args.log_format, endpoint, args.trace_sampling).map_err(text)?;
    let stop = CancellationToken::new();
    let readiness = Readiness::default();
    readiness.wait_for("start");
    // Before anything that can hang: the first process of a container cannot even be killed by a signal that
    // it does not handle.
    let signalled = stop_on_signal(stop.clone(), readiness.clone())?;
    let config =
        Config::infer().await.map_err(|error| format!("no way to reach a cluster is configured: {error}"))?;
    let metrics = Metrics::new(service.name, service.version);
    let agent = format!("haulout-{}/{}", service.name, service.version);
    let clients = Clients::new(&config, &agent, args.max_requests, &metrics).map_err(text)?;
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let namespace = given(&args.namespace).unwrap_or_else(|| config.default_namespace.clone());
    let server = config.cluster_url.to_string();
    tokio::select! {
        checked = access::check(&clients.direct, &server, &namespace, &service.kinds, &service.permissions) =>
            checked.map_err(text)?,
        () = stop.cancelled() => return Ok(()),
    }

    let clock = Clock::default();
    let listener =
        server::listen(args.listen).map_err(|error| format!("--listen {}: {error}", args.listen))?;
    let listening = listener.local_addr().map_err(text)?;
    let instance = given(&args.instance).unwrap_or_else(host_name);
    let controller = format!("haulout-{}", service.name);
    let (events, writer) =
        Events::new(clients.direct.clone(), controller, instance.clone(), clock.clone(), metrics.clone());
    let tasks = TaskTracker::new();
    // Metrics stay until the very end, so that the last scrape sees how it went.
    let serve_until = CancellationToken::new();
    let shown = Shown { metrics: metrics.clone(), readiness: readiness.clone(), clock: clock.clone() };
    tasks.spawn(server::serve(listener, shown, serve_until.clone()));
    let write_until = CancellationToken::new();
    tasks.spawn(writer.run(write_until.clone()));
    info!(service = service.name, version = service.version, %listening, server, namespace, instance, "started");

    readiness.done("start");
    let context = Context {
        clients,
        clock,
        events,
        instance,
        name: service.name,
        metrics,
        namespace,
        readiness,
        stop: stop.clone(),
    };
    let ended = tokio::select! {
        ended = main(context) => ended.map_err(text),
        () = async { stop.cancelled().await; tokio::time::sleep(SHUTDOWN_LIMIT).await } => {
            warn!("not everything ended within {} s", SHUTDOWN_LIMIT.as_secs());
            Ok(())
        }
    };
    if let Err(problem) = &ended {
        error!(problem, "ending");
    }
    stop.cancel();
    signalled.abort();
    write_until.cancel();
    serve_until.cancel();
    tasks.close();
    let _ = tokio::time::timeout(Duration::from_secs(1), tasks.wait()).await;
    info!("ended");
    ended
}

/// On the first signal: not ready first, so that nobody sends us anything new, then the order to stop.
fn stop_on_signal(
    stop: CancellationToken,
    readiness: Readiness,
) -> Result<tokio::task::JoinHandle<()>, String> {
    let mut terminate = signal(SignalKind::terminate()).map_err(text)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(text)?;
    Ok(tokio::spawn(async move {
        let name = tokio::select! {
            _ = terminate.recv() => "SIGTERM",
            _ = interrupt.recv() => "SIGINT",
        };
        readiness.wait_for("shutdown");
        info!(signal = name, "shutting down");
        stop.cancel();
    }))
}

/// The host's name, which in a pod is the pod's.
fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn text(error: impl Display) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::context;

    #[test]
    fn host_has_a_name() {
        assert!(!host_name().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_pod_cache_of_a_service_shows_its_watch_restarts() {
        // Every watch is closed at once.
        let context = context(|_| None);
        let cache = context.pod_cache();
        cache.ready().await;
        while context.metrics.watch_restarts("pods") < 2 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let text = context.metrics.encode().unwrap();
        assert!(text.contains("watch_restarts_total{resource=\"pods\"} 2"), "{text}");
    }
}
