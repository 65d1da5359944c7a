//! The flags of the service.

use std::net::SocketAddr;
use std::path::PathBuf;

use haulout_service_runtime::server::all_interfaces;
use haulout_service_runtime::service::CommonArgs;
use jiff::SignedDuration;

/// A shorter lifetime leaves no time for renewal.
const MIN_LIFETIME: SignedDuration = SignedDuration::from_secs(10);

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

    /// Flags about the admission rules.
    #[command(flatten)]
    pub rules: RuleArgs,
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

/// The source of the certificate, and the webhook configurations that trust it.
#[derive(Clone, Debug, clap::Args)]
pub struct CertificateArgs {
    /// Directory with tls.crt and tls.key (and ca.crt with --manage-ca-bundle), such as a mounted Secret of
    /// cert-manager. Without this flag, the webhook issues its own certificate
    #[arg(long, env = "HAULOUT_CERT_DIR")]
    pub cert_dir: Option<PathBuf>,

    /// Write ca.crt from --cert-dir into the webhook configurations. Use this if nothing else does
    #[arg(long, env = "HAULOUT_MANAGE_CA_BUNDLE", requires = "cert_dir")]
    pub manage_ca_bundle: bool,

    /// Name of the Secret for the webhook's own certificate, in the namespace of the service
    #[arg(long, env = "HAULOUT_CERTIFICATE_SECRET", default_value = "haulout-admission-webhook-certificate")]
    pub certificate_secret: String,

    /// DNS name or address under which the API server reaches this service. Can be repeated
    #[arg(
        long = "serving-name",
        env = "HAULOUT_SERVING_NAMES",
        value_delimiter = ',',
        required_unless_present = "cert_dir"
    )]
    pub serving_names: Vec<String>,

    /// Validity of the webhook's own certificates. They are renewed when a third of it is left
    #[arg(long, env = "HAULOUT_CERTIFICATE_LIFETIME", default_value = "2160h", value_parser = parse_lifetime)]
    pub certificate_lifetime: SignedDuration,

    /// MutatingWebhookConfiguration into which the CA bundle is written. Can be repeated
    #[arg(long = "mutating-configuration", env = "HAULOUT_MUTATING_CONFIGURATIONS", value_delimiter = ',')]
    pub mutating_configurations: Vec<String>,

    /// ValidatingWebhookConfiguration into which the CA bundle is written. Can be repeated
    #[arg(
        long = "validating-configuration",
        env = "HAULOUT_VALIDATING_CONFIGURATIONS",
        value_delimiter = ','
    )]
    pub validating_configurations: Vec<String>,
}

impl CertificateArgs {
    /// The resources and names of the webhook configurations whose `caBundle` this service writes: mutating,
    /// validating.
    pub fn managed_configurations(&self) -> [(&'static str, &[String]); 2] {
        let ours = self.cert_dir.is_none() || self.manage_ca_bundle;
        [
            ("mutatingwebhookconfigurations", &self.mutating_configurations),
            ("validatingwebhookconfigurations", &self.validating_configurations),
        ]
        .map(|(resource, names)| (resource, if ours { names.as_slice() } else { &[] }))
    }
}

fn parse_lifetime(text: &str) -> Result<SignedDuration, String> {
    let lifetime = text.parse::<SignedDuration>().map_err(|error| error.to_string())?;
    if lifetime < MIN_LIFETIME {
        return Err(format!("must be at least {MIN_LIFETIME:#}"));
    }
    Ok(lifetime)
}

/// Settings of the admission rules.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RuleArgs {
    /// Built-in evacuator classes that are served in this installation, such as deployment.apps.k8s.io
    #[arg(long, env = "HAULOUT_SERVED_EVACUATOR_CLASSES", value_delimiter = ',')]
    pub served_evacuator_classes: Vec<String>,
}
