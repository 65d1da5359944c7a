//! The flags of the service.

use std::net::SocketAddr;
use std::path::PathBuf;

use haulout_service_runtime::server::all_interfaces;
use haulout_service_runtime::service::{CommonArgs, EvacuatorArgs};

/// Validates objects of Haulout's kinds, sets their defaults and checks the permissions of the users who write them
#[derive(Clone, Debug, clap::Parser)]
// The `extraArgs` of the chart override its own flags.
#[command(version, args_override_self = true)]
pub struct Args {
    /// Flags of every service.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Address on which the webhook serves the API server, with TLS
    #[arg(long, env = "HAULOUT_WEBHOOK_LISTEN", default_value_t = all_interfaces(8443))]
    pub webhook_listen: SocketAddr,

    /// Flags about clients.
    #[command(flatten)]
    pub clients: ClientArgs,

    /// Flags about the certificate.
    #[command(flatten)]
    pub certificates: CertificateArgs,

    /// Flags about evacuators.
    #[command(flatten)]
    pub evacuators: EvacuatorArgs,
}

/// Which clients may connect. Without a CA, all of them.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ClientArgs {
    /// File with PEM certificates. Only clients with a certificate signed by one of these CAs may connect, such as API
    /// servers that have one in their --admission-control-config-file
    #[arg(long, env = "HAULOUT_CLIENT_CA")]
    pub client_ca: Option<PathBuf>,

    /// Names of clients that may connect, such as kube-apiserver, compared with the names in their certificates.
    /// Requires --client-ca
    #[arg(long = "client-name", env = "HAULOUT_CLIENT_NAMES", value_delimiter = ',', requires = "client_ca")]
    pub client_names: Vec<String>,
}

/// The source of the certificate.
#[derive(Clone, Debug, clap::Args)]
pub struct CertificateArgs {
    /// Directory with tls.crt and tls.key, such as a mounted Secret of cert-manager, instead of --certificate-secret
    #[arg(long, env = "HAULOUT_CERT_DIR")]
    pub cert_dir: Option<PathBuf>,

    /// Name of the Secret with tls.crt and tls.key that the certificate manager keeps, in the namespace of the service
    #[arg(long, env = "HAULOUT_CERTIFICATE_SECRET", default_value = "haulout-webhook-certificate")]
    pub certificate_secret: String,
}
