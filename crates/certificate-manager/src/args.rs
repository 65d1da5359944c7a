//! Command line flags.

use haulout_service_runtime::service::{CommonArgs, ElectionArgs};
use jiff::SignedDuration;

/// A shorter lifetime leaves no time for renewal.
const MIN_LIFETIME: SignedDuration = SignedDuration::from_secs(10);

/// Issues and renews the admission webhook's certificate, and keeps it trusted
#[derive(Clone, Debug, clap::Parser)]
// The `extraArgs` of the chart override its own flags.
#[command(version, args_override_self = true)]
pub struct Args {
    /// Flags that every service has.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Leader election flags.
    #[command(flatten)]
    pub election: ElectionArgs,

    /// Name of the Secret for the certificate, in the namespace of the service. It has to exist, and can be empty
    #[arg(long, env = "HAULOUT_CERTIFICATE_SECRET", default_value = "haulout-webhook-certificate")]
    pub certificate_secret: String,

    /// Another program issues the certificate: only write ca.crt of the Secret into the webhook configurations
    #[arg(long, env = "HAULOUT_CA_BUNDLE_ONLY")]
    pub ca_bundle_only: bool,

    /// DNS name or address under which the API server reaches the webhook. Can be repeated
    #[arg(
        long = "serving-name",
        env = "HAULOUT_SERVING_NAMES",
        value_delimiter = ',',
        required_unless_present = "ca_bundle_only"
    )]
    pub serving_names: Vec<String>,

    /// Validity of certificates. They are renewed when a third of it is left
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

impl Args {
    /// The resources and names of the webhook configurations: mutating, validating.
    pub fn configurations(&self) -> [(&'static str, &[String]); 2] {
        [
            ("mutatingwebhookconfigurations", &self.mutating_configurations),
            ("validatingwebhookconfigurations", &self.validating_configurations),
        ]
    }
}

fn parse_lifetime(text: &str) -> Result<SignedDuration, String> {
    let lifetime = text.parse::<SignedDuration>().map_err(|error| error.to_string())?;
    if lifetime < MIN_LIFETIME {
        return Err(format!("must be at least {MIN_LIFETIME:#}"));
    }
    Ok(lifetime)
}
