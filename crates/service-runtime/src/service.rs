//! Startup and shutdown of a service: arguments, telemetry, clients, access checks, HTTP server. The `main` of a
//! service is one call.
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use clap::Parser;
//! use haulout_api_types::Evacuation;
//! use haulout_service_runtime::access::{self, Kind, Permission};
//! use haulout_service_runtime::lease::InvalidTiming;
//! use haulout_service_runtime::service::{self, CommonArgs, Context, ElectionArgs, LeaderContext, Service};
//!
//! #[derive(Parser)]
//! struct Args {
//!     #[command(flatten)]
//!     common: CommonArgs,
//!     #[command(flatten)]
//!     election: ElectionArgs,
//! }
//!
//! /// Missing permissions are reported at startup, in one line.
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
//!     context.run_elected(election.timing(), |leading| lead(&context, leading)).await
//! }
//!
//! /// Called whenever this replica is elected. The future is dropped when leadership is lost.
//! async fn lead(context: &Context, leading: LeaderContext) {
//!     let pods = context.pod_cache();
//!     // Writes through `leading.clients` fail with `NotLeading` after leadership has ended. Hold spawned tasks in a
//!     // `JoinSet`, because they would outlive this future otherwise.
//!     context.stop.cancelled().await;
//! }
//! ```

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use haulout_api_types::names::class;
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
use crate::server::{self, Readiness, ServerState};
use crate::telemetry::{self, LogFormat};

/// Timeout for the shutdown of a service. With two more seconds for the last events, scrapes and traces, it exits within ten
/// seconds.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(8);

/// Arguments of every service.
#[derive(Clone, Debug, clap::Args)]
pub struct CommonArgs {
    /// Address that serves /livez, /readyz and /metrics
    #[arg(long, env = "HAULOUT_LISTEN", default_value_t = server::all_interfaces(8080))]
    pub listen: SocketAddr,

    /// Namespace of this service and of its Lease; the default is the namespace of the pod or of the kubeconfig context
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: Option<String>,

    /// Name of this replica in Leases and events; the default is the host name, which in a pod is the pod name
    #[arg(long, env = "POD_NAME")]
    pub instance: Option<String>,

    /// Log format; RUST_LOG sets the log filter
    #[arg(long, env = "HAULOUT_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,

    /// Address of the OTLP collector (gRPC) that receives traces, such as http://collector:4317
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,

    /// Fraction of traces that are sent, from 0 to 1
    #[arg(long, env = "HAULOUT_TRACE_SAMPLING", default_value_t = 0.1, value_parser = parse_fraction)]
    pub trace_sampling: f64,

    /// Maximum number of concurrent API requests; one namespace uses at most half of them
    #[arg(long, env = "HAULOUT_MAX_REQUESTS", default_value_t = 64, value_parser = parse_positive)]
    pub max_requests: usize,
}

/// Arguments of services with leader election.
#[derive(Clone, Debug, clap::Args)]
pub struct ElectionArgs {
    /// Lease duration, in seconds
    #[arg(long, env = "HAULOUT_LEASE_SECONDS", default_value_t = 15)]
    pub lease_seconds: u64,
}

impl ElectionArgs {
    /// The timing of the election.
    pub fn timing(&self) -> Timing {
        Timing::for_lease(Duration::from_secs(self.lease_seconds))
    }
}

/// Arguments of services that create Evacuations or act on them.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct EvacuatorArgs {
    /// Built-in evacuator classes that this installation serves. Pods of their workloads get them without an annotation
    #[arg(
        long,
        env = "HAULOUT_SERVED_EVACUATOR_CLASSES",
        value_delimiter = ',',
        value_parser = PossibleValuesParser::new(class::SERVICES.iter().map(|(class, _)| class)),
    )]
    pub served_evacuator_classes: Vec<String>,
}

impl EvacuatorArgs {
    /// The served classes.
    pub fn served(&self) -> BTreeSet<String> {
        self.served_evacuator_classes.iter().cloned().collect()
    }

    /// The served classes, with the service that is their evacuator.
    pub fn services(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let served = |class: &str| self.served_evacuator_classes.iter().any(|served| served == class);
        class::SERVICES.iter().copied().filter(move |(class, _)| served(class))
    }
}

fn parse_fraction(text: &str) -> Result<f64, String> {
    let fraction = text.parse::<f64>().ok().filter(|fraction| (0.0..=1.0).contains(fraction));
    fraction.ok_or_else(|| "expected a number from 0 to 1".into())
}

fn parse_positive(text: &str) -> Result<usize, String> {
    let number = text.parse::<usize>().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "expected a whole number greater than 0".into())
}

/// Description of a service.
#[derive(Clone, Debug)]
pub struct Service {
    /// Such as `evacuation-controller`.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// The Haulout kinds that it reads or writes.
    pub kinds: Vec<Kind>,
    /// The permissions that it needs.
    pub permissions: Vec<Permission>,
}

/// The resources of a running service.
#[derive(Clone)]
pub struct Context {
    /// Clients for the API server.
    pub clients: Clients,
    /// The clock.
    pub clock: Clock,
    /// Publishes events.
    pub events: Events,
    /// The name of this replica.
    pub instance: String,
    /// The name of the service.
    pub name: &'static str,
    /// Metrics. A service adds its own.
    pub metrics: Metrics,
    /// The service's own namespace.
    pub namespace: String,
    /// What the service waits for before it is ready.
    pub readiness: Readiness,
    /// Cancelled when the service has to stop.
    pub stop: CancellationToken,
}

impl Context {
    /// Takes part in the leader election of the service. Whenever this replica is elected, it runs the future of `lead`, with
    /// clients that reject writes after leadership has ended. The future is dropped when leadership is lost, and has to end
    /// when [`Context::stop`] is cancelled. This function returns when the future ends, and releases the Lease.
    ///
    /// The service needs the permissions of [`access::election`].
    pub async fn run_elected<F: Future<Output = ()>>(
        &self,
        timing: Timing,
        lead: impl Fn(LeaderContext) -> F,
    ) -> Result<(), InvalidTiming> {
        let (client, lease) = (self.clients.lease.clone(), access::lease_name(self.name));
        let election = Election::new(client, &self.namespace, &lease, &self.instance, timing)?;
        let mut leads = election.leading();
        let (metrics, name) = (self.metrics.clone(), self.name);
        metrics.set_leader(name, false);
        let observer = tokio::spawn(async move {
            while leads.changed().await.is_ok() {
                let leads = *leads.borrow_and_update();
                metrics.set_leader(name, leads);
                info!(leads, "leadership changed");
            }
        });
        let run = election.run(self.stop.clone(), |leadership| {
            let clients = self.clients.fenced(&leadership);
            lead(LeaderContext { clients, leadership })
        });
        run.await;
        observer.abort();
        self.metrics.set_leader(name, false);
        Ok(())
    }

    /// Starts a pod cache. Its watch is included in the metrics and ends when the last clone is dropped. Only leaders need
    /// one.
    pub fn pod_cache(&self) -> PodCache {
        PodCache::start(self.clients.direct.clone(), self.metrics.clone())
    }
}

/// The resources of a leader.
#[derive(Clone)]
pub struct LeaderContext {
    /// Clients that reject writes after leadership has ended.
    pub clients: Clients,
    /// Whether this replica still leads.
    pub leadership: Leadership,
}

/// Runs a service until SIGTERM or SIGINT, or until `main` returns. If it fails to start, it prints one line to stderr
/// and exits with a non-zero code.
pub fn run<F, E>(service: Service, args: CommonArgs, main: impl FnOnce(Context) -> F) -> ExitCode
where
    F: Future<Output = Result<(), E>>,
    E: Display,
{
    // An error means that ring is installed already. It is the only provider in the binary.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let name = service.name;
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(name, &error),
    };
    let result = runtime.block_on(start(service, args, main));
    // Do not wait for pending requests.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => fail(name, &problem),
    }
}

fn fail(name: &str, problem: &dyn Display) -> ExitCode {
    // One line, because people read the last line of the log of a crashed pod.
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
        telemetry::init(service.name, args.log_format, endpoint, args.trace_sampling).map_err(text)?;
    let stop = CancellationToken::new();
    let readiness = Readiness::default();
    readiness.wait_for("start");
    // Handle signals before anything that can hang: the kernel ignores unhandled signals to the first process of a
    // container.
    let signalled = stop_on_signal(stop.clone(), readiness.clone())?;
    let config = Config::infer().await.map_err(|error| {
        format!(
            "found no cluster configuration: {error}; run in a pod with a service account, or set KUBECONFIG"
        )
    })?;
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
    let listener = server::listen(args.listen)
        .map_err(|error| format!("failed to listen on {} (--listen): {error}", args.listen))?;
    let listening = listener.local_addr().map_err(text)?;
    let instance = given(&args.instance).unwrap_or_else(host_name);
    let controller = format!("haulout-{}", service.name);
    let (events, writer) =
        Events::new(clients.direct.clone(), controller, instance.clone(), clock.clone(), metrics.clone());
    let tasks = TaskTracker::new();
    // Serve metrics until the end, for the last scrape.
    let serve_until = CancellationToken::new();
    let state = ServerState { metrics: metrics.clone(), readiness: readiness.clone(), clock: clock.clone() };
    tasks.spawn(server::serve(listener, state, serve_until.clone()));
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
        () = async { stop.cancelled().await; tokio::time::sleep(SHUTDOWN_TIMEOUT).await } => {
            warn!("shutdown timed out after {}s, exiting", SHUTDOWN_TIMEOUT.as_secs());
            Ok(())
        }
    };
    if let Err(problem) = &ended {
        error!(problem, "service failed, shutting down");
    }
    stop.cancel();
    signalled.abort();
    write_until.cancel();
    serve_until.cancel();
    tasks.close();
    let _ = tokio::time::timeout(Duration::from_secs(1), tasks.wait()).await;
    info!("stopped");
    ended
}

/// On the first signal, makes the service unready, so that it gets no new requests, and then cancels `stop`.
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

/// The host name, which in a pod is the pod name.
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
    fn host_name_is_not_empty() {
        assert!(!host_name().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn pod_cache_counts_watch_restarts() {
        // Every watch is closed at once.
        let context = context(|_| None);
        let cache = context.pod_cache();
        cache.ready().await;
        while context.metrics.watch_restarts("pods") < 2 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let text = context.metrics.encode().unwrap();
        assert!(text.contains("haulout_watch_restarts_total{resource=\"pods\"} 2"), "{text}");
    }
}
