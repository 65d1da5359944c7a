//! The flags of the service.

use std::net::SocketAddr;
use std::path::PathBuf;

use haulout_service_runtime::server::everywhere;
use haulout_service_runtime::service::CommonArgs;
use jiff::SignedDuration;

/// A shorter life than this leaves no time to renew.
const SHORTEST_LIFETIME: SignedDuration = SignedDuration::from_secs(10);

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

    /// Whose connections are taken.
    #[command(flatten)]
    pub clients: ClientArgs,

    /// The certificate.
    #[command(flatten)]
    pub certificates: CertificateArgs,

    /// The rules.
    #[command(flatten)]
    pub rules: RuleArgs,
}

/// Whose connections are taken: everybody's without an authority.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ClientArgs {
    /// A file of PEM certificates: only clients with a certificate of one of these authorities are let in, such
    /// as API servers that were given one in their --admission-control-config-file
    #[arg(long, env = "HAULOUT_CLIENT_CA")]
    pub client_ca: Option<PathBuf>,

    /// With --client-ca: only clients whose certificate has one of these names, such as kube-apiserver
    #[arg(long = "client-name", env = "HAULOUT_CLIENT_NAMES", value_delimiter = ',', requires = "client_ca")]
    pub client_names: Vec<String>,
}

/// Where the certificate comes from and who is told to trust it.
#[derive(Clone, Debug, clap::Args)]
pub struct CertificateArgs {
    /// A folder with tls.crt and tls.key (and ca.crt with --manage-ca-bundle), such as a mounted Secret of
    /// cert-manager; without it the webhook makes its own certificate
    #[arg(long, env = "HAULOUT_CERT_DIR")]
    pub cert_dir: Option<PathBuf>,

    /// With --cert-dir: puts its ca.crt into the webhook configurations, where nobody else does
    #[arg(long, env = "HAULOUT_MANAGE_CA_BUNDLE", requires = "cert_dir")]
    pub manage_ca_bundle: bool,

    /// The Secret in the service's namespace that holds our own certificate
    #[arg(long, env = "HAULOUT_CERTIFICATE_SECRET", default_value = "haulout-admission-webhook-certificate")]
    pub certificate_secret: String,

    /// A DNS name or address under which the API server reaches this service; repeat for more
    #[arg(
        long = "serving-name",
        env = "HAULOUT_SERVING_NAMES",
        value_delimiter = ',',
        required_unless_present = "cert_dir"
    )]
    pub serving_names: Vec<String>,

    /// How long our own certificates are valid; they are renewed when a third of it is left
    #[arg(long, env = "HAULOUT_CERTIFICATE_LIFETIME", default_value = "2160h", value_parser = parse_lifetime)]
    pub certificate_lifetime: SignedDuration,

    /// A MutatingWebhookConfiguration that is to trust us; repeat for more
    #[arg(long = "mutating-configuration", env = "HAULOUT_MUTATING_CONFIGURATIONS", value_delimiter = ',')]
    pub mutating_configurations: Vec<String>,

    /// A ValidatingWebhookConfiguration that is to trust us; repeat for more
    #[arg(
        long = "validating-configuration",
        env = "HAULOUT_VALIDATING_CONFIGURATIONS",
        value_delimiter = ','
    )]
    pub validating_configurations: Vec<String>,
}

impl CertificateArgs {
    /// The resources and names of the webhook configurations whose `caBundle` is ours to write: mutating, validating.
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
    if lifetime < SHORTEST_LIFETIME {
        return Err(format!("at least {SHORTEST_LIFETIME:#} is needed"));
    }
    Ok(lifetime)
}

/// What the rules depend on.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RuleArgs {
    /// The user that alone may hand over control of Evacuations and count evictions, such as
    /// system:serviceaccount:haulout-system:haulout-evacuation-controller
    #[arg(long, env = "HAULOUT_EVACUATION_CONTROLLER_USER", default_value = "")]
    pub evacuation_controller_user: String,

    /// The built-in evacuator classes that something in this installation serves, such as
    /// deployment.apps.k8s.io
    #[arg(long, env = "HAULOUT_SERVED_EVACUATOR_CLASSES", value_delimiter = ',')]
    pub served_evacuator_classes: Vec<String>,
}
