//! `cargo xtask demo`: boots a cluster, drains a node, and keeps the cluster until Ctrl-C. The walkthrough is in
//! `story`.

mod state;
mod story;
mod view;

use std::cell::Cell;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::error::ErrorKind;
use futures::FutureExt;
use futures::future::select_all;
use haulout_e2e::service::chart_args;
use haulout_e2e::{Cluster, Handle, Service, Webhook, objects, tools, wait};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Node;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{repo, ui};

const CONTROLLERS: [&str; 3] = ["evacuation-controller", "maintenance-controller", "workload-evacuator"];
/// A drain needs another node for the pods.
const NODES_FOR_A_DRAIN: u32 = 2;

const EXAMPLES: &str = "Examples:
  cargo xtask demo                     drains a node, then keeps the cluster running until Ctrl-C
  cargo xtask demo --no-drain          starts the cluster with the sample workload, without a drain
  cargo xtask demo --once              stops after the drain, for CI
  cargo xtask demo --without-services  starts a cluster for `tilt up`, which runs the services

Exit codes: 0 if the demo completed, also if you then press Ctrl-C; 1 on failure; 2 for invalid arguments; 128 plus
the signal number if a signal arrives before the demo has completed.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Number of simulated nodes
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=5000))]
    nodes: u32,
    /// Stops after the drain instead of waiting for Ctrl-C
    #[arg(long, conflicts_with_all = ["no_drain", "without_services"])]
    once: bool,
    /// Starts the cluster without a drain
    #[arg(long)]
    no_drain: bool,
    /// Does not start Haulout's services, so that you can start them with `tilt up` or by hand; implies --no-drain
    #[arg(long)]
    without_services: bool,
}

impl Args {
    fn has_drain(&self) -> bool {
        !self.no_drain && !self.without_services
    }

    /// Checks that clap cannot express.
    fn check(&self) {
        if self.has_drain() && self.nodes < NODES_FOR_A_DRAIN {
            let message =
                "the pods of the drained node need another node: use --nodes 2 or more, or --no-drain";
            clap::Error::raw(ErrorKind::ValueValidation, format!("{message}\n")).exit();
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    args.check();
    let tools = tools::ensure(ui::note)?;
    repo::build_services()?;
    let started = Instant::now();
    let runtime = tokio::runtime::Runtime::new().context("failed to start the async runtime")?;
    runtime.block_on(async {
        let mut signals = Signals::listen()?;
        let ready = Cell::new(false);
        let builder = Cluster::builder().name("demo").tools(tools).progress(ui::note);
        let whole = async {
            let cluster = builder.boot().await?;
            let result = run_demo(&cluster, args, started, &ready).await;
            if result.is_err() {
                cluster.keep_logs();
            }
            cluster.shutdown().await;
            result
        };
        let code = tokio::select! {
            result = whole => result.map(|()| 0)?,
            // The future is dropped, and with it all processes and files.
            number = signals.next() => if ready.get() { 0 } else { 128 + number },
        };
        ui::note("the cluster is stopped and removed");
        Ok(ExitCode::from(code))
    })
}

/// Signals on which the demo cleans up and exits.
struct Signals([(u8, Signal); 3]);

impl Signals {
    fn listen() -> Result<Self> {
        let listen =
            |number: u8, kind| anyhow::Ok((number, signal(kind).context("failed to listen for signals")?));
        // Hangup means that the terminal was closed.
        Ok(Self([
            listen(1, SignalKind::hangup())?,
            listen(2, SignalKind::interrupt())?,
            listen(15, SignalKind::terminate())?,
        ]))
    }

    /// Waits for a signal and returns its number.
    async fn next(&mut self) -> u8 {
        let signals =
            self.0.iter_mut().map(|(number, signal)| async move { signal.recv().await.map(|()| *number) });
        select_all(signals.map(FutureExt::boxed_local)).await.0.unwrap_or_default()
    }
}

/// Runs the demo in an empty cluster, until its end or, without `--once`, until a process exits.
async fn run_demo(cluster: &Cluster, args: &Args, started: Instant, ready: &Cell<bool>) -> Result<()> {
    let services = prepare(cluster, args).await?;
    let mut exits = vec![
        async {
            let exit = cluster.wait_for_exit().await;
            (exit.component.to_string(), exit.status, exit.log)
        }
        .boxed_local(),
    ];
    for service in services.running() {
        let log = service.log().map(ToOwned::to_owned).unwrap_or_default();
        let exited = service.exited().map(move |status| (service.name().to_owned(), status, log));
        exits.push(exited.boxed_local());
    }
    let walkthrough = async {
        ui::result(&access_instructions(cluster, args, started.elapsed()));
        if args.has_drain() {
            story::run(cluster).await?;
        }
        if !args.once {
            ui::result(&hints(cluster, args).await?);
            ready.set(true);
            std::future::pending::<()>().await;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        walkthrough = walkthrough => walkthrough,
        ((name, status, log), ..) = select_all(exits) => {
            bail!("{name} exited unexpectedly ({status}), so the demo has stopped; its log is {}", log.display())
        }
    }
}

/// The running services.
#[derive(Default)]
struct Services {
    controllers: Vec<Service>,
    webhook: Option<(Webhook, Service)>,
}

impl Services {
    fn running(&self) -> impl Iterator<Item = &Service> {
        self.controllers.iter().chain(self.webhook.iter().map(|(_, replica)| replica))
    }
}

/// Sets up the cluster: nodes, the chart, the services and the sample workload.
async fn prepare(cluster: &Handle, args: &Args) -> Result<Services> {
    let client = cluster.client().await?;
    let api: Api<Node> = Api::all(client.clone());
    for number in 1..=args.nodes {
        let node = objects::node(&format!("node-{number}")).build();
        api.create(&PostParams::default(), &node).await.context("failed to create a node")?;
    }
    let services = install(cluster, args).await?;
    ui::note("starting the sample workload");
    let count = if args.has_drain() { story::WORKLOADS.len() } else { 1 };
    for (example, names) in story::WORKLOADS.into_iter().take(count) {
        start_workload(cluster, &client, example, names).await?;
    }
    Ok(services)
}

/// Applies an example, and waits until its Deployments are available.
async fn start_workload(cluster: &Handle, client: &Client, example: &str, names: &[&str]) -> Result<()> {
    let file = repo::root().join("examples").join(example).display().to_string();
    let applied = cluster.kubectl(&["apply", "-f", &file]).await?;
    applied.success().with_context(|| format!("failed to apply examples/{example}"))?;
    for name in names {
        let deployments: Api<Deployment> = Api::namespaced(client.clone(), story::NAMESPACE);
        wait::present(deployments, name, "is available", Duration::from_secs(120), |deployment| {
            let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
            let status = deployment.status.as_ref();
            wanted.is_some() && status.and_then(|status| status.available_replicas) == wanted
        })
        .await?;
    }
    Ok(())
}

/// Installs the chart and starts its services, unless the user starts them.
async fn install(cluster: &Handle, args: &Args) -> Result<Services> {
    ui::note("installing the chart");
    if args.without_services {
        cluster.install_chart(&[]).await?;
        return Ok(Services::default());
    }
    let webhook = Webhook::install(cluster, &[]).await?;
    ui::note("starting the admission-webhook");
    let replica = webhook.start(cluster, &[]).await?;
    let mut controllers = Vec::new();
    for name in CONTROLLERS {
        ui::note(&format!("starting the {name}"));
        controllers.push(Service::start_installed(cluster, name).await?);
    }
    for controller in &controllers {
        controller.leads().await?;
    }
    Webhook::reachable(cluster).await?;
    Ok(Services { controllers, webhook: Some((webhook, replica)) })
}

/// How to access the cluster.
fn access_instructions(cluster: &Handle, args: &Args, took: Duration) -> String {
    let missing = if args.without_services { " (without its services)" } else { "" };
    let tools = cluster.tools.search_path();
    let tools: Vec<_> = tools.iter().map(|folder| folder.display().to_string()).collect();
    format!(
        "
A Kubernetes {version} control plane with Haulout{missing} is ready after {took}. To use it from another terminal:

  export KUBECONFIG={kubeconfig}
  export PATH={tools}:$PATH

KWOK simulates nodes and pods; everything else is real. Logs are in {logs}.",
        version = cluster.tools.kubernetes_version,
        took = ui::duration(took),
        kubeconfig = cluster.kubeconfig.display(),
        tools = tools.join(":"),
        logs = cluster.logs.display(),
    )
}

/// What the user can try, from the root of the repository.
async fn hints(cluster: &Handle, args: &Args) -> Result<String> {
    let hints = if args.without_services {
        let ours = std::env::current_exe().context("failed to find the path of the running xtask binary")?;
        let mut programs = Vec::new();
        for (name, port) in CONTROLLERS.iter().zip(8082..) {
            let program = ours.with_file_name(name).display().to_string();
            let args = chart_args(cluster, name).await?.unwrap_or_default().join(" ");
            programs.push(format!("  {program} --namespace haulout-system --listen 127.0.0.1:{port} {args}"));
        }
        let way = "In another terminal with the exports above, run `tilt up` from the root of the repository, or start the \
                   controllers yourself, each in its own terminal:\n\n";
        format!("Nothing drains until the controllers run. {way}{}", programs.join("\n"))
    } else {
        let node = story::node_of_the_database(cluster).await?;
        let done = if args.no_drain { "The cluster is ready." } else { "The demo is done." };
        format!(
            "{done} Three things to try, in another terminal with the exports above, from the root of the repository:

  1. Select a node that does not exist, and read the webhook's warning:
       sed 's/node-1, node-2/nod-1/' examples/maintenance.yaml | kubectl create --dry-run=server -f -
  2. Drain {node}, where the database runs. Its pod has an evacuator that does not run yet, so the drain waits:
       sed 's/node-1, node-2/{node}/' examples/maintenance.yaml | kubectl apply -f -
       kubectl get evacuations -A -o wide --watch
  3. Start that evacuator in one more terminal with the same exports. The program runs until you stop it:
       cargo run --bin example-evacuator -- --namespace shop --selector app=database --class database.example.com --step-seconds 1
     The drain now continues: when the program has moved the data, the workload evacuator starts a replacement for the pod,
     and then the pod is evicted. This command returns when the node is drained:
       kubectl wait nodemaintenances/kernel-upgrade --for=condition=Drained --timeout=5m"
        )
    };
    Ok(format!("\n{hints}\n\nPress Ctrl-C to stop and remove the cluster."))
}
