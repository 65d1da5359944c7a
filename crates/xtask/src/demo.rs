//! `cargo xtask demo`: a cluster in which a node is emptied before your eyes and which then is yours, until Ctrl-C.
//! This boots, fills and ends it; what is told in between is in `story`.

mod picture;
mod story;
mod view;

use std::cell::Cell;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::error::ErrorKind;
use futures::FutureExt;
use futures::future::select_all;
use haulout_e2e::{Cluster, Handle, Service, Webhook, objects, tools, wait};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::PostParams;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{repo, ui};

const CONTROLLERS: [&str; 2] = ["evacuation-controller", "maintenance-controller"];
/// Where the pods of a drained node go.
const NODES_OF_A_STORY: u32 = 2;

const EXAMPLES: &str = "Examples:
  cargo xtask demo                     drains a node, then keeps the cluster running until Ctrl-C
  cargo xtask demo --no-story          starts the same cluster without a drain
  cargo xtask demo --once              stops after the drain, for CI
  cargo xtask demo --without-services  starts a cluster for `tilt up`, which runs the controllers

Exit codes: 0 if the drain completed or you stopped a running demo with Ctrl-C, 1 on failure, 2 for invalid
arguments, 128 plus the signal number if interrupted earlier.";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Number of simulated nodes
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=5000))]
    nodes: u32,
    /// Stops after the drain instead of waiting for Ctrl-C
    #[arg(long, conflicts_with_all = ["no_story", "without_services"])]
    once: bool,
    /// Starts the cluster without a drain
    #[arg(long)]
    no_story: bool,
    /// Does not start the controllers, so that `tilt up` or you can; implies --no-story
    #[arg(long)]
    without_services: bool,
}

impl Args {
    fn has_story(&self) -> bool {
        !self.no_story && !self.without_services
    }

    /// What clap cannot see for itself.
    fn check(&self) {
        if self.has_story() && self.nodes < NODES_OF_A_STORY {
            let message =
                "the pods of the drained node need another node: use --nodes 2 or more, or --no-story";
            clap::Error::raw(ErrorKind::ValueValidation, format!("{message}\n")).exit();
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    args.check();
    let tools = tools::ensure(ui::note)?;
    repo::build_services()?;
    let begun = Instant::now();
    let runtime = tokio::runtime::Runtime::new().context("starting the async runtime")?;
    runtime.block_on(async {
        let mut signals = Signals::listen()?;
        let ready = Cell::new(false);
        let builder = Cluster::builder().name("demo").tools(tools).progress(ui::note);
        let whole = async {
            let cluster = builder.boot().await?;
            let result = live(&cluster, args, begun, &ready).await;
            if result.is_err() {
                cluster.keep_logs();
            }
            cluster.shutdown().await;
            result
        };
        let code = tokio::select! {
            result = whole => result.map(|()| 0)?,
            // Whatever was under way has been dropped, and with it all processes and files.
            number = signals.next() => if ready.get() { 0 } else { 128 + number },
        };
        ui::note("the cluster is stopped and removed");
        Ok(ExitCode::from(code))
    })
}

/// What ends us in good order.
struct Signals([(u8, Signal); 3]);

impl Signals {
    fn listen() -> Result<Self> {
        let listen = |number: u8, kind| anyhow::Ok((number, signal(kind).context("listening for signals")?));
        // Hangup: somebody closed the terminal.
        Ok(Self([
            listen(1, SignalKind::hangup())?,
            listen(2, SignalKind::interrupt())?,
            listen(15, SignalKind::terminate())?,
        ]))
    }

    /// The number of the first that comes.
    async fn next(&mut self) -> u8 {
        let signals =
            self.0.iter_mut().map(|(number, signal)| async move { signal.recv().await.map(|()| *number) });
        select_all(signals.map(FutureExt::boxed_local)).await.0.unwrap_or_default()
    }
}

/// Everything from an empty cluster to the end of the story or, without `--once`, to the first process that dies.
async fn live(cluster: &Cluster, args: &Args, begun: Instant, ready: &Cell<bool>) -> Result<()> {
    let services = prepare(cluster, args).await?;
    let mut deaths = vec![
        async {
            let exit = cluster.wait_for_exit().await;
            (exit.component.to_string(), exit.status, exit.log)
        }
        .boxed_local(),
    ];
    for service in services.running() {
        let log = service.log().map(ToOwned::to_owned).unwrap_or_default();
        let exited = service.exited().map(move |status| (service.name().to_owned(), status, log));
        deaths.push(exited.boxed_local());
    }
    let told = async {
        ui::result(&entrance(cluster, args, begun.elapsed()));
        if args.has_story() {
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
        told = told => told,
        ((name, status, log), ..) = select_all(deaths) => {
            bail!("{name} ended ({status}), and the rest has been ended with it: see {}", log.display())
        }
    }
}

/// What runs beside the cluster.
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

/// Fills the cluster: nodes, the chart, our services, the sample workload.
async fn prepare(cluster: &Handle, args: &Args) -> Result<Services> {
    let client = cluster.client().await?;
    let api: Api<Node> = Api::all(client.clone());
    for number in 1..=args.nodes {
        let node = objects::node(&format!("node-{number}")).build();
        api.create(&PostParams::default(), &node).await.context("creating a node")?;
    }
    let services = install(cluster, args).await?;
    ui::note("starting the sample workload");
    let tight = args.has_story();
    for example in ["sample-workload.yaml"].into_iter().chain(tight.then_some("tight-budget.yaml")) {
        let file = repo::root().join("examples").join(example).display().to_string();
        let applied = cluster.kubectl(&["apply", "-f", &file]).await?;
        applied.success().with_context(|| format!("applying examples/{example}"))?;
    }
    for name in ["web", "database"].into_iter().chain(tight.then_some(story::TIGHT)) {
        let deployments: Api<Deployment> = Api::namespaced(client.clone(), story::NAMESPACE);
        wait::present(deployments, name, "is available", Duration::from_secs(120), |deployment| {
            let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
            let status = deployment.status.as_ref();
            wanted.is_some() && status.and_then(|status| status.available_replicas) == wanted
        })
        .await?;
    }
    Ok(services)
}

/// Installs the chart and starts what it would run, unless that is left to others.
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
        controllers.push(Service::start(cluster, name, &[]).await?);
    }
    for controller in &controllers {
        controller.leads().await?;
    }
    Webhook::reachable(cluster).await?;
    Ok(Services { controllers, webhook: Some((webhook, replica)) })
}

/// How to get in.
fn entrance(cluster: &Handle, args: &Args, took: Duration) -> String {
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

/// What to do with a cluster that stays, from the root of the repository.
async fn hints(cluster: &Handle, args: &Args) -> Result<String> {
    let hints = if args.without_services {
        let ours = std::env::current_exe().context("finding our own program")?;
        let programs = CONTROLLERS.iter().zip(8082..).map(|(name, port)| {
            let program = ours.with_file_name(name);
            format!("\n  {} --namespace haulout-system --listen 127.0.0.1:{port}", program.display())
        });
        let way = "With that KUBECONFIG, run `tilt up`, or start the controllers yourself:\n";
        format!("Nothing drains until the controllers run. {way}{}", programs.collect::<String>())
    } else {
        let node = story::node_of_the_database(cluster).await?;
        format!(
            "The demo is done. Three things to try in the cluster:

  1. Select a node that does not exist, and read the webhook's warning:
       sed 's/node-1, node-2/nod-1/' examples/maintenance.yaml | kubectl create --dry-run=server -f -
  2. Drain {node}, where the database runs. Its pod has an evacuator that does not run yet, so the drain waits:
       sed 's/node-1, node-2/{node}/' examples/maintenance.yaml | kubectl apply -f -
       kubectl get nodemaintenances,evacuations -A -o wide --watch
  3. Start that evacuator. When it completes, only a PodDisruptionBudget blocks the pod; delete it:
       cargo run --bin example-evacuator -- --namespace shop --selector app=database --class database.example.com --step-seconds 1
       kubectl delete poddisruptionbudget database -n shop"
        )
    };
    Ok(format!("\n{hints}\n\nPress Ctrl-C to stop and remove the cluster."))
}
