//! The admission webhook: sets defaults for, validates and authorizes writes to Haulout's kinds, and warns about manual
//! cordons.
//!
//! | question | module |
//! |---|---|
//! | what does the API server send, and what does it get back? | `review` |
//! | who may connect, and which limits apply to a connection? | `server` |
//! | which information does a request need? | `admit` |
//! | what is allowed, rejected, warned about and defaulted? | `decide` |
//! | which kinds are watched? | `watch` |
//! | which requests go to the API server? | `api` |
//! | where does the certificate come from? | `certificates`, `files` |
//! | which metrics are exported? | `metrics` |

mod admit;
mod api;
mod args;
mod certificates;
mod decide;
mod files;
mod metrics;
mod review;
mod server;
mod watch;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser as _;
use haulout_api_types::names::NODE_MAINTENANCE_GROUP;
use haulout_api_types::{DrainRule, Evacuation, NodeMaintenance};
use haulout_service_runtime::access::{Kind, Permission};
use haulout_service_runtime::server::listen;
use haulout_service_runtime::service::{self, Context, Service};
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch as watches;
use thiserror::Error;
use tracing::info;

use crate::admit::AdmissionRules;
use crate::api::ApiServer;
use crate::args::Args;
use crate::certificates::{CertificateError, ServingCertificate};
use crate::metrics::Metrics;
use crate::server::tls::{Tls, TlsError};
use crate::server::{Limits, Server};
use crate::watch::Caches;

fn permissions(args: &Args) -> Vec<Permission> {
    let watched = [
        watches::permissions("", "pods"),
        watches::permissions("", "nodes"),
        watches::permissions(NODE_MAINTENANCE_GROUP, "nodemaintenances"),
        watches::permissions(NODE_MAINTENANCE_GROUP, "drainrules"),
    ];
    let asked = [
        Permission::cluster("get", "", "pods"),
        Permission::cluster("create", "authorization.k8s.io", "subjectaccessreviews"),
    ];
    [watched.as_flattened(), &asked, &certificates::permissions(&args.certificates)].concat()
}

fn main() -> ExitCode {
    let args = Args::parse();
    let service = Service {
        name: "admission-webhook",
        version: env!("CARGO_PKG_VERSION"),
        kinds: vec![Kind::of::<Evacuation>(), Kind::of::<NodeMaintenance>(), Kind::of::<DrainRule>()],
        permissions: permissions(&args),
    };
    let common = args.common.clone();
    service::run(service, common, |context| run(args, context))
}

/// Why the webhook failed.
#[derive(Debug, Error)]
enum WebhookError {
    #[error("failed to listen on {address} (--webhook-listen): {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

async fn run(args: Args, context: Context) -> Result<(), WebhookError> {
    let metrics = Metrics::new(&context.metrics);
    let certificate = ServingCertificate::new(metrics.clone(), context.readiness.clone());
    let tls = Tls::load(Arc::new(certificate.clone()), &args.clients)?;
    let not_listening = |source| WebhookError::Listen { address: args.webhook_listen, source };
    let listener = listen(args.webhook_listen).map_err(not_listening)?;
    info!(webhook = %listener.local_addr().map_err(not_listening)?, "webhook listening");
    let mut term = Term::new(&context);
    let rules = AdmissionRules::new(
        Caches::start(&context, &mut term, metrics.clone()),
        ApiServer::new(context.clients.direct.clone(), metrics.clone()),
        args.evacuators.served(),
    );
    let server = Server::new(rules, tls.clone(), Limits::default(), metrics);
    let following = certificates::start(args.certificates, &context, &mut term, &certificate);
    let mut ended = Ok(());
    let work = async {
        tokio::select! {
            () = server.serve(listener, context.stop.clone()) => {}
            Err(error) = following => ended = Err(error),
            never = tls.follow_client_ca() => match never {},
        }
    };
    term.run(Box::pin(work)).await;
    Ok(ended?)
}
