//! The service as a whole: certificate, rules and server, from the first argument to the last connection.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;

use haulout_service_runtime::server::{everywhere, listen};
use haulout_service_runtime::service::{CommonArgs, Context};
use haulout_service_runtime::term::Term;
use thiserror::Error;
use tracing::info;

use crate::admit::{Rules, Settings};
use crate::certificates::{self, CertificateArgs, CertificateError, Served};
use crate::server::tls::{self, Clients, TlsError};
use crate::server::{Limits, Server, ServerMetrics};

/// Defaults, validates and authorizes what is written to Haulout's API
#[derive(Clone, Debug, clap::Parser)]
// So that `extraArgs` of the chart win over its own.
#[command(version, args_override_self = true)]
pub struct Args {
    /// What every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Where the API server reaches the webhooks, with TLS
    #[arg(long, env = "HAULOUT_WEBHOOK_LISTEN", default_value_t = everywhere(8443))]
    pub webhook_listen: SocketAddr,

    /// A file of PEM certificates: only clients with a certificate of one of these authorities are let in, such
    /// as API servers that were given one in their --admission-control-config-file
    #[arg(long, env = "HAULOUT_CLIENT_CA")]
    pub client_ca: Option<PathBuf>,

    /// With --client-ca: only clients whose certificate has one of these names, such as kube-apiserver
    #[arg(long = "client-name", env = "HAULOUT_CLIENT_NAMES", value_delimiter = ',', requires = "client_ca")]
    pub client_names: Vec<String>,

    /// The certificate.
    #[command(flatten)]
    pub certificates: CertificateArgs,

    /// The rules.
    #[command(flatten)]
    pub rules: Settings,
}

/// Why the webhook ended, other than by order.
#[derive(Debug, Error)]
pub enum WebhookError {
    /// It cannot listen.
    #[error("--webhook-listen {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// It cannot encrypt.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// It has nothing to encrypt with.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
}

/// Runs until the service is to end.
pub async fn run(args: Args, context: Context) -> Result<(), WebhookError> {
    let certificate = Served::new(&context.metrics, context.readiness.clone());
    let clients = Clients { authority: args.client_ca, names: args.client_names };
    let tls = tls::config(Arc::new(certificate.clone()), &clients)?;
    let not_listening = |source| WebhookError::Listen { address: args.webhook_listen, source };
    let listener = listen(args.webhook_listen).map_err(not_listening)?;
    info!(webhook = %listener.local_addr().map_err(not_listening)?, "the webhook listens");
    let mut term = Term::new(&context);
    let server = Server {
        admit: Rules::start(&context, &mut term, &args.rules),
        tls,
        limits: Limits::default(),
        metrics: ServerMetrics::new(&context.metrics),
    };
    let mut ended = Ok(());
    let work = async {
        let mut serving = pin!(server.serve(listener, context.stop.clone()));
        tokio::select! {
            () = serving.as_mut() => {}
            managed = certificates::run(args.certificates, &context, &certificate) => {
                ended = managed;
                if ended.is_ok() {
                    serving.await;
                }
            }
        }
    };
    term.run(Box::pin(work)).await;
    Ok(ended?)
}
