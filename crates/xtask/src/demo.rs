//! `cargo xtask demo`: a cluster to play with, until Ctrl-C.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use haulout_e2e::{Cluster, Exit, Service, objects, tools, wait};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::PostParams;
use tokio::signal::unix::{SignalKind, signal};

use crate::{repo, ui};

/// What empties a node. The webhook is not among them: without a Service it can only be reached by URL.
const SERVICES: [&str; 2] = ["evacuation-controller", "maintenance-controller"];

#[derive(clap::Args)]
pub struct Args {
    /// How many pretended nodes the cluster has
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=5000))]
    nodes: u32,
    /// Leaves it to you to start the controllers, as `tilt up` does
    #[arg(long)]
    without_services: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let begun = Instant::now();
    let tools = tools::ensure(ui::note)?;
    repo::build_services()?;
    let runtime = tokio::runtime::Runtime::new().context("starting the async runtime")?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
        let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
        let builder = Cluster::builder().name("demo").tools(tools).progress(ui::note);
        let stay = async {
            let cluster = builder.boot().await?;
            let _services = match prepare(&cluster, args).await {
                Ok(services) => services,
                Err(error) => {
                    cluster.keep_logs();
                    return Err(error);
                }
            };
            ui::result(&manual(&cluster, begun.elapsed()));
            anyhow::Ok((cluster.wait_for_exit().await, cluster))
        };
        tokio::select! {
            died = stay => {
                let (Exit { component, status, log }, cluster) = died?;
                cluster.keep_logs();
                cluster.shutdown().await;
                bail!("{component} ended ({status}), and the rest has been ended with it: see {}", log.display());
            }
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        ui::note("everything has been ended and removed");
        Ok(())
    })
}

/// Fills the cluster: nodes, the chart, our services, the sample workload.
async fn prepare(cluster: &Cluster, args: &Args) -> Result<Vec<Service>> {
    let client = cluster.client().await?;
    let api: Api<Node> = Api::all(client.clone());
    for number in 1..=args.nodes {
        let node = objects::node(&format!("node-{number}")).build();
        api.create(&PostParams::default(), &node).await.context("creating a node")?;
    }
    ui::note("installing the chart");
    cluster.install_chart(&[]).await?;
    let mut services = Vec::new();
    for name in SERVICES.into_iter().filter(|_| !args.without_services) {
        ui::note(&format!("starting the {name}"));
        let service = Service::start(cluster, name, &[]).await?;
        service.leads().await?;
        services.push(service);
    }
    ui::note("starting the sample workload");
    let workload = repo::root().join("examples/sample-workload.yaml").display().to_string();
    cluster
        .kubectl(&["apply", "--filename", &workload])
        .await?
        .success()
        .context("applying the sample workload")?;
    for name in ["web", "database"] {
        let deployments: Api<Deployment> = Api::namespaced(client.clone(), "shop");
        wait::present(deployments, name, "is available", Duration::from_secs(120), |deployment| {
            let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
            let status = deployment.status.as_ref();
            wanted.is_some() && status.and_then(|status| status.available_replicas) == wanted
        })
        .await?;
    }
    Ok(services)
}

fn manual(cluster: &Cluster, took: Duration) -> String {
    format!(
        "
A Kubernetes {version} control plane with Haulout is ready after {took}. In another terminal:

  export KUBECONFIG={kubeconfig}
  export PATH={tools}:$PATH

  kubectl get nodes,pods --all-namespaces
  kubectl apply --filename examples/maintenance.yaml
  kubectl get nodemaintenances,evacuations --all-namespaces --watch
  kubectl explain nodemaintenance.spec

Nodes and pods are pretended by KWOK; everything else is real. Logs are in {logs}.
Ctrl-C ends the cluster and removes it.",
        version = cluster.tools.kubernetes_version,
        took = ui::duration(took),
        kubeconfig = cluster.kubeconfig.display(),
        tools = cluster.tools.dir.display(),
        logs = cluster.logs.display(),
    )
}
