//! Access to a cluster for tests: clients, kubectl, helm, users and tokens. A handle owns nothing and can be passed to
//! other processes, as `xtask` does with the tests that share a cluster.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::{Deserialize, Serialize};

use crate::kubeconfig::{self, Identity};
use crate::pki::Pki;
use crate::process::{Command, Output};
use crate::service;
use crate::tools::Tools;
use crate::wait;

/// How long the API server may take to serve a new kind.
const SERVED_LIMIT: Duration = Duration::from_secs(30);

/// Access to a cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Handle {
    /// The name given at boot.
    pub name: String,
    /// The folder with everything of this cluster.
    pub root: PathBuf,
    /// The folder with one log per component; services started by tests may log there too.
    pub logs: PathBuf,
    /// The URL of the API server.
    pub server: String,
    /// The administrator's kubeconfig.
    pub kubeconfig: PathBuf,
    /// The audit log, if the cluster was booted with one.
    pub audit_log: Option<PathBuf>,
    /// The programs that the cluster runs.
    pub tools: Tools,
}

impl Handle {
    /// The environment variable in which `xtask` passes the path of `cluster.json` to tests.
    pub const ENV: &str = "HAULOUT_E2E_CLUSTER";

    /// Attaches to the cluster whose `cluster.json` path is in this environment variable. Returns `None` if the
    /// variable is not set.
    pub fn from_env(variable: &str) -> Result<Option<Self>> {
        let Some(path) = std::env::var_os(variable).filter(|value| !value.is_empty()) else {
            return Ok(None);
        };
        Self::from_file(Path::new(&path))
            .map(Some)
            .with_context(|| format!("failed to attach to the cluster in {variable}"))
    }

    /// Attaches to the cluster that this `cluster.json` describes.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = fs::read(path)
            .with_context(|| format!("failed to read {}: is the cluster still running?", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("failed to read {}", path.display()))
    }

    /// The path of this cluster's `cluster.json`.
    pub fn description(&self) -> PathBuf {
        self.root.join("cluster.json")
    }

    /// Writes `cluster.json`.
    pub(crate) fn write_description(&self) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).context("failed to describe the cluster")?;
        let path = self.description();
        fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))
    }

    /// The cluster's certificate authority.
    pub fn pki(&self) -> Pki {
        Pki::open(&self.root.join("pki"))
    }

    /// A client as administrator.
    pub async fn client(&self) -> Result<Client> {
        self.client_from(&self.kubeconfig, "haulout-e2e").await
    }

    /// A client as administrator with this user agent, which identifies its requests in the audit log.
    pub async fn client_as(&self, user_agent: &str) -> Result<Client> {
        self.client_from(&self.kubeconfig, user_agent).await
    }

    /// A client with any kubeconfig of this cluster. It does not retry, so that tests get the API server's own answers.
    pub async fn client_from(&self, kubeconfig: &Path, user_agent: &str) -> Result<Client> {
        let what = || format!("failed to create a client from {}", kubeconfig.display());
        let mut config = client_config(kubeconfig).await.with_context(what)?;
        let agent = user_agent.parse().with_context(|| format!("invalid user agent {user_agent:?}"))?;
        config.headers.push(("user-agent".parse().context("invalid header name")?, agent));
        Client::try_from(config).with_context(what)
    }

    /// A kubeconfig for this user with its own client certificate and at most two groups.
    pub fn user_kubeconfig(&self, name: &str, groups: &[&str]) -> Result<PathBuf> {
        let pki = self.pki();
        let identity = Identity::Certificate(pki.client(name, groups)?);
        let path = self.root.join(format!("user-{}.kubeconfig", file_name(&[&[name], groups].concat())));
        kubeconfig::write(&path, &self.server, &pki, "default", &identity)?;
        Ok(path)
    }

    /// A client as this user.
    pub async fn user(&self, name: &str, groups: &[&str]) -> Result<Client> {
        self.client_from(&self.user_kubeconfig(name, groups)?, name).await
    }

    /// A kubeconfig with a token of this ServiceAccount that is valid for a day.
    pub async fn service_account_kubeconfig(&self, namespace: &str, name: &str) -> Result<PathBuf> {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client().await?, namespace);
        let request = TokenRequest {
            spec: TokenRequestSpec { expiration_seconds: Some(24 * 60 * 60), ..TokenRequestSpec::default() },
            ..TokenRequest::default()
        };
        let answer = accounts
            .create_token_request(name, &PostParams::default(), &request)
            .await
            .with_context(|| format!("failed to request a token of ServiceAccount {namespace}/{name}"))?;
        let token = answer.status.context("the answer to a TokenRequest has no token")?.token;
        let path = self.root.join(format!("sa-{}.kubeconfig", file_name(&[namespace, name])));
        kubeconfig::write(&path, &self.server, &self.pki(), namespace, &Identity::Token(token))?;
        Ok(path)
    }

    /// Runs kubectl as administrator. Only a failure to start it is an error: see [`Output::success`].
    pub async fn kubectl(&self, args: &[&str]) -> Result<Output> {
        self.run(&self.tools.kubectl(), args, None).await
    }

    /// Runs kubectl as administrator with this text on stdin, for `apply -f -`.
    pub async fn kubectl_with(&self, args: &[&str], stdin: &str) -> Result<Output> {
        self.run(&self.tools.kubectl(), args, Some(stdin)).await
    }

    /// Runs helm as administrator. Its own folders are inside the cluster's.
    pub async fn helm(&self, args: &[&str]) -> Result<Output> {
        self.run(&self.tools.helm(), args, None).await
    }

    /// Installs or upgrades the chart with these `--set` values, as in the README, but without pods, because KWOK nodes
    /// would only simulate them: see [`crate::Service`]. Waits until the API server serves Haulout's kinds. For some
    /// moments after the CRDs are created, it answers 404.
    pub async fn install_chart(&self, values: &[(&str, &str)]) -> Result<()> {
        let repository = crate::repository();
        self.install_chart_from(&repository.join("charts/haulout"), values).await
    }

    /// The same with another chart, such as that of an earlier version.
    pub async fn install_chart_from(&self, chart: &Path, values: &[(&str, &str)]) -> Result<()> {
        let has = |template: &str| chart.join("templates").join(template).exists();
        let (cleans_up, manages_certificate) = (has("cleanup.yaml"), has("certificate-manager.yaml"));
        let replaces = has("workload-evacuator.yaml");
        let chart = chart.display().to_string();
        let outside = service::VALUES.iter().map(|service| format!("{service}.replicas=0"));
        // While the webhook is registered and does not run, nobody could write to Haulout's kinds: see
        // [`crate::Webhook`].
        let outside = outside.chain(["admissionWebhook.enabled=false".to_owned()]);
        // An earlier version does not have these services and rejects the values.
        let outside = outside.chain(replaces.then(|| "workloadEvacuator.replicas=0".to_owned()));
        let outside = outside.chain(manages_certificate.then(|| "certificateManager.replicas=0".to_owned()));
        // The hook's pod would only be simulated.
        let outside = outside.chain(cleans_up.then(|| "cleanup.enabled=false".to_owned()));
        let given = values.iter().map(|(key, value)| format!("{key}={value}"));
        let values: Vec<_> = outside.chain(given).collect();
        let mut args = vec!["upgrade", "--install", "haulout", &chart];
        args.extend(["--namespace", service::NAMESPACE, "--create-namespace"]);
        args.extend(values.iter().flat_map(|value| ["--set", value]));
        self.helm(&args).await?.success().context("failed to install the chart with helm")?;
        let client = self.client().await?;
        for crd in haulout_api_types::crds() {
            let version = crd.spec.versions.first().context("a CRD has no version")?;
            let kind = GroupVersionKind::gvk(&crd.spec.group, &version.name, &crd.spec.names.kind);
            let resource = ApiResource::from_gvk_with_plural(&kind, &crd.spec.names.plural);
            let api: Api<DynamicObject> = Api::all_with(client.clone(), &resource);
            wait::eventually(&format!("{} are served", resource.plural), SERVED_LIMIT, async || {
                Ok(api.list(&ListParams::default().limit(1)).await.ok())
            })
            .await?;
        }
        Ok(())
    }

    /// Runs a program with this cluster's kubeconfig.
    pub async fn run(&self, program: &Path, args: &[&str], stdin: Option<&str>) -> Result<Output> {
        let mut command = self.command(program).args(args);
        if let Some(text) = stdin {
            command = command.stdin(text)?;
        }
        command.output(&args.join(" ")).await
    }

    /// A command with this cluster's kubeconfig.
    pub fn command(&self, program: &Path) -> Command {
        let helm = self.root.join("helm");
        Command::new(program)
            .env("KUBECONFIG", &self.kubeconfig)
            // Discovery is cached by server address, and an earlier cluster may have used this port.
            .env("KUBECACHEDIR", self.root.join("kube-cache"))
            .env("HELM_CACHE_HOME", helm.join("cache"))
            .env("HELM_CONFIG_HOME", helm.join("config"))
            .env("HELM_DATA_HOME", helm.join("data"))
    }
}

fn file_name(parts: &[&str]) -> String {
    parts.join("-").replace(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '.', "_")
}

async fn client_config(kubeconfig: &Path) -> Result<Config> {
    // This fails only if a provider is already installed. Ring is the only one here.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let read = Kubeconfig::read_from(kubeconfig)?;
    let mut config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    Ok(config)
}
