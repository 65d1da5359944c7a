//! The serving certificate: ours, kept in a Secret and trusted through our webhook configurations, or somebody
//! else's, read from files. Either way it is replaced without a restart.

mod configurations;
mod decide;
mod files;
mod issue;
mod manage;
mod pair;
mod served;
mod store;

use std::path::PathBuf;
use std::sync::Arc;

use haulout_service_runtime::access::Permission;
use haulout_service_runtime::service::Context;
use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{Source, Store};
use jiff::SignedDuration;
use thiserror::Error;

use self::configurations::{Configurations, named};
use self::decide::Policy;
pub use self::pair::PairError;
pub use self::served::Served;

/// A shorter life than this leaves no time to renew.
const SHORTEST_LIFETIME: SignedDuration = SignedDuration::from_secs(10);

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

fn parse_lifetime(text: &str) -> Result<SignedDuration, String> {
    let lifetime = text.parse::<SignedDuration>().map_err(|error| error.to_string())?;
    if lifetime < SHORTEST_LIFETIME {
        return Err(format!("at least {SHORTEST_LIFETIME:#} is needed"));
    }
    Ok(lifetime)
}

impl CertificateArgs {
    /// What the service has to be allowed for it: nothing where others look after certificate and trust.
    pub fn permissions(&self) -> Vec<Permission> {
        const GROUP: &str = "admissionregistration.k8s.io";
        let own = self.cert_dir.is_none();
        let mut needed = Vec::new();
        if own {
            let on = |verb| Permission::own(verb, "", "secrets").on(&self.certificate_secret);
            needed.push(Permission::own("create", "", "secrets"));
            needed.extend(["list", "watch", "update"].map(on));
        }
        if own || self.manage_ca_bundle {
            let mutating = self.mutating_configurations.iter().map(|n| ("mutatingwebhookconfigurations", n));
            let validating =
                self.validating_configurations.iter().map(|n| ("validatingwebhookconfigurations", n));
            for (resource, name) in mutating.chain(validating) {
                needed.extend(
                    ["list", "watch", "patch"]
                        .map(|verb| Permission::cluster(verb, GROUP, resource).on(name)),
                );
            }
        }
        needed
    }
}

/// Why there is no certificate to serve.
#[derive(Debug, Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("--cert-dir: reading {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What happened instead.
        source: std::io::Error,
    },
    /// The files do not make a certificate.
    #[error("--cert-dir {}: {source}", dir.display())]
    Pair {
        /// The folder.
        dir: PathBuf,
        /// What is wrong.
        source: PairError,
    },
}

/// Keeps `served` up to date until the service is to end.
pub async fn run(args: CertificateArgs, context: &Context, served: &Served) -> Result<(), CertificateError> {
    let (mut term, changed) = (Term::new(context), Arc::default());
    let own = args.cert_dir.is_none();
    let configurations = (own || args.manage_ca_bundle).then(|| {
        let (mutating, validating) = (&args.mutating_configurations, &args.validating_configurations);
        Configurations::watch(&context.clients.retrying, mutating, validating, &mut term, &changed)
    });
    if let Some(dir) = args.cert_dir {
        let mut ended = Ok(());
        let files = async { ended = files::run(dir, configurations, context, served, &changed).await };
        term.run(files).await;
        return ended;
    }
    let Some(configurations) = configurations else { return Ok(()) };
    let name = args.certificate_secret;
    let secret = Arc::new(Store::new(|_| {}, Arc::clone(&changed)));
    term.watch(named(Source::in_namespace("secrets", &context.namespace), &name), &secret);
    let policy = Policy::new(args.serving_names, args.certificate_lifetime);
    term.run(manage::run((name, secret), policy, configurations, context, served, &changed)).await;
    Ok(())
}
