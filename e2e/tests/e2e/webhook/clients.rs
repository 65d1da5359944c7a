//! The optional check that only API servers with a client certificate are accepted.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use haulout_e2e::pki::{Credentials, Pki};
use haulout_e2e::service::NAMESPACE;
use haulout_e2e::{Cluster, Component, Webhook, wait, webhook};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{SOON, ask};

/// Configures API servers to present this certificate to all webhooks. Returns the path for
/// `--admission-control-config-file`.
fn admission_configuration(folder: &Path, credentials: &Credentials) -> String {
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let user = json!({
        "client-certificate": file("apiserver-client.crt", &credentials.certificate),
        "client-key": file("apiserver-client.key", &credentials.key),
    });
    let users = json!({"apiVersion": "v1", "kind": "Config", "users": [{"name": "*", "user": user}]});
    let configuration = json!({
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "WebhookAdmissionConfiguration",
        "kubeConfigFile": file("webhooks.kubeconfig", &users.to_string()),
    });
    let plugins = ["MutatingAdmissionWebhook", "ValidatingAdmissionWebhook"]
        .map(|plugin| json!({"name": plugin, "configuration": configuration}));
    let admission = json!({
        "apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration", "plugins": plugins,
    });
    file("admission.yaml", &admission.to_string())
}

/// The webhook's answer to a client with this certificate; an error if it closes the connection.
async fn answer(
    address: SocketAddr,
    roots: &RootCertStore,
    credentials: Option<&Credentials>,
) -> std::io::Result<String> {
    let config = ClientConfig::builder().with_root_certificates(roots.clone());
    let config = match credentials {
        None => config.with_no_client_auth(),
        Some(credentials) => {
            let certificate = CertificateDer::from_pem_slice(credentials.certificate.as_bytes()).unwrap();
            let key = PrivateKeyDer::from_pem_slice(credentials.key.as_bytes()).unwrap();
            config.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    let name = ServerName::try_from(webhook::HOST).unwrap();
    let stream = TcpStream::connect(address).await?;
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    // With TLS 1.3, a client learns only after its first bytes whether the server accepts its certificate.
    stream
        .write_all(
            b"POST /validate/pods HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
        )
        .await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

#[tokio::test]
async fn client_ca_admits_only_the_api_server() {
    let folder = tempfile::tempdir().unwrap();
    let pki = Pki::create(&folder.path().join("pki")).unwrap();
    let others = Pki::create(&folder.path().join("others")).unwrap();
    let api_server = pki.client("kube-apiserver", &[]).unwrap();
    let configuration = admission_configuration(folder.path(), &api_server);
    let cluster = Cluster::builder().name("webhook-clients").scheduler(false).kwok(false);
    let argument = format!("--admission-control-config-file={configuration}");
    let cluster = cluster.extra_args(Component::ApiServer, [argument]).boot().await.unwrap();

    let webhook = Webhook::install(&cluster, &[]).await.unwrap();
    let file = folder.path().join("clients.crt");
    std::fs::write(&file, pki.ca_certificate().unwrap()).unwrap();
    let authority = file.display().to_string();
    let check = ["--client-ca", &authority, "--client-name", "kube-apiserver"];
    let replica = webhook.start(&cluster, &check).await.unwrap();
    Webhook::reachable(&cluster).await.unwrap();
    let client = cluster.client().await.unwrap();
    ask(&Api::all(client.clone())).await.unwrap();
    assert!(replica.metric("haulout_admission_requests_total").await.unwrap() > 0.0);

    let secrets: Api<Secret> = Api::namespaced(client, NAMESPACE);
    let secret = secrets.get("haulout-webhook-certificate").await.unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(&secret.data.unwrap()["ca.crt"].0).unwrap()).unwrap();
    let address = webhook::address(&replica).unwrap();
    let taken = answer(address, &roots, Some(&api_server)).await.unwrap();
    assert!(taken.starts_with("HTTP/1.1 400 "), "it is heard: {taken}");
    let (other_name, other_authority) =
        (pki.client("mallory", &[]).unwrap(), others.client("kube-apiserver", &[]).unwrap());
    for (who, credentials) in
        [("nobody", None), ("another name", Some(&other_name)), ("another authority", Some(&other_authority))]
    {
        let rejected = answer(address, &roots, credentials).await;
        assert!(rejected.is_err(), "{who}: {rejected:?}");
    }

    // The file is reloaded. While it is invalid, the previous authority stays in use.
    std::fs::write(&file, "nonsense").unwrap();
    wait::eventually("the invalid file is reported", SOON, async || {
        let message = "failed to load the new client CA; keeping the previous one";
        Ok(replica.text().contains(message).then_some(()))
    })
    .await
    .unwrap();
    answer(address, &roots, Some(&api_server)).await.unwrap();
    std::fs::write(&file, others.ca_certificate().unwrap()).unwrap();
    wait::eventually("clients of the new authority are accepted", SOON, async || {
        Ok(answer(address, &roots, Some(&other_authority)).await.ok())
    })
    .await
    .unwrap();
    let rejected = answer(address, &roots, Some(&api_server)).await;
    assert!(rejected.is_err(), "the previous authority: {rejected:?}");
    drop(replica);
    cluster.shutdown().await;
}
