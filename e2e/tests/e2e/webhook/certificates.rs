//! Renewals under load, and certificates from other sources.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use haulout_api_types::NodeMaintenance;
use haulout_e2e::service::NAMESPACE;
use haulout_e2e::{Handle, Webhook, wait, webhook};
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::{SOON, ask, cluster};

const CONFIGURATION: &str = "haulout-system.haulout-admission-webhook";
const SECRET: &str = "haulout-webhook-certificate";
const REQUESTS: usize = 2_000;
const RENEWALS: usize = 2;
const IN_FLIGHT: usize = 4;

/// The CA bundle that the API server uses.
async fn bundle(client: &Client) -> Vec<u8> {
    let api: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let configuration = api.get(CONFIGURATION).await.unwrap();
    let webhook = configuration.webhooks.unwrap().remove(0);
    webhook.client_config.ca_bundle.unwrap_or_default().0
}

/// Makes a handshake like an API server without an open connection. Returns the certificate of the server.
async fn handshake(client: &Client, replica: std::net::SocketAddr) -> anyhow::Result<Vec<u8>> {
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(&bundle(client).await) {
        roots.add(root?)?;
    }
    let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    let stream = TcpStream::connect(replica).await?;
    let name = ServerName::try_from(webhook::HOST)?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    Ok(stream.get_ref().1.peer_certificates().unwrap()[0].to_vec())
}

#[tokio::test]
#[ignore = "slow"]
async fn no_request_fails_during_certificate_renewal() {
    let cluster = cluster("webhook-rotation").await;
    let client = cluster.client().await.unwrap();
    let short = ("certificateManager.extraArgs", "{--certificate-lifetime=30s}");
    let webhook = Webhook::install(&cluster, &[short]).await.unwrap();
    let replicas = [webhook.start(&cluster, &[]).await.unwrap(), webhook.start(&cluster, &[]).await.unwrap()];
    Webhook::reachable(&cluster).await.unwrap();

    // The API server keeps its connections. A client that opens new ones all the time covers every moment.
    let renewals = Arc::new(AtomicUsize::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let addresses = replicas.each_ref().map(|replica| webhook::address(replica).unwrap());
    let connecting = tokio::spawn({
        let (client, renewals, over) = (client.clone(), Arc::clone(&renewals), Arc::clone(&over));
        async move {
            let mut latest = vec![Vec::new(); addresses.len()];
            let mut handshakes = 0_usize;
            while !over.load(Ordering::Relaxed) {
                for (number, address) in addresses.into_iter().enumerate() {
                    let certificate = handshake(&client, address).await.expect("a handshake");
                    handshakes += 1;
                    if latest[number] != certificate {
                        let first = latest[number].is_empty();
                        latest[number] = certificate;
                        // Counted for one replica: the other has to follow, otherwise a handshake fails.
                        renewals.fetch_add(usize::from(number == 0 && !first), Ordering::Relaxed);
                    }
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            (latest, handshakes)
        }
    });

    let api: Api<NodeMaintenance> = Api::all(client.clone());
    let mut requests = 0;
    let deadline = tokio::time::Instant::now() + 5 * SOON;
    while requests < REQUESTS || renewals.load(Ordering::Relaxed) < RENEWALS {
        let some = join_all((0..IN_FLIGHT).map(|_| ask(&api))).await;
        for answer in some {
            answer.unwrap_or_else(|error| panic!("after {requests} requests: {error}"));
        }
        requests += IN_FLIGHT;
        assert!(tokio::time::Instant::now() < deadline, "{requests} requests, {renewals:?} renewals");
        assert!(!connecting.is_finished(), "a handshake failed: see above");
        // Distributes requests over the renewals.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    over.store(true, Ordering::Relaxed);
    let (latest, handshakes) = connecting.await.unwrap();
    assert!(handshakes > 100, "only {handshakes} handshakes");
    assert!(latest.iter().all(|certificate| !certificate.is_empty()));
    for replica in &replicas {
        assert!(replica.metric("haulout_certificate_expiry_timestamp_seconds").await.unwrap() > 0.0);
    }
    drop(replicas);
    cluster.shutdown().await;
}

#[tokio::test]
async fn secret_and_ca_bundles_are_restored() {
    let cluster = cluster("webhook-mended").await;
    let client = cluster.client().await.unwrap();
    let (webhook, replica) = Webhook::with_replica(&cluster).await.unwrap();
    let manager = webhook.certificate_manager.as_ref().unwrap();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let before = secrets.get(SECRET).await.unwrap();

    // The certificate manager may not create the Secret. It reports that it is missing, and the webhook keeps serving.
    secrets.delete(SECRET, &DeleteParams::default()).await.unwrap();
    let missing = async || manager.metric("haulout_certificate_secret_missing").await.unwrap();
    wait::eventually("the missing Secret is reported", SOON, async || {
        Ok((missing().await > 0.0).then_some(()))
    })
    .await
    .unwrap();
    assert!(manager.text().contains("run `helm upgrade` to create it"), "{}", manager.text());
    Webhook::reachable(&cluster).await.unwrap();
    // Then, and when it is corrupted, it is restored with the same content: a new certificate would not be trusted yet.
    reinstall(&cluster).await;
    let is_same = |secret: &Secret| secret.data == before.data;
    wait::present(secrets.clone(), SECRET, "is back", SOON, is_same).await.unwrap();
    assert!(missing().await < 1.0);
    let spoil = r#"{"data": {"tls.key": "bm9uc2Vuc2U="}}"#;
    cluster
        .kubectl(&["-n", NAMESPACE, "patch", "secret", SECRET, "-p", spoil])
        .await
        .unwrap()
        .success()
        .unwrap();
    wait::present(secrets.clone(), SECRET, "is restored", SOON, is_same).await.unwrap();

    // A new configuration, or one whose bundle was overwritten, gets the CA bundle.
    let trusted = bundle(&client).await;
    let wait_for_trust = async || {
        wait::eventually("the configuration trusts the webhook", SOON, async || {
            Ok((bundle(&client).await == trusted).then_some(()))
        })
        .await
        .unwrap();
    };
    cluster
        .kubectl(&["delete", "mutatingwebhookconfiguration,validatingwebhookconfiguration", CONFIGURATION])
        .await
        .unwrap()
        .success()
        .unwrap();
    let version = secrets.get(SECRET).await.unwrap().metadata.resource_version;
    reinstall(&cluster).await;
    wait_for_trust().await;
    let upgraded = secrets.get(SECRET).await.unwrap().metadata.resource_version;
    assert_eq!(upgraded, version, "an upgrade of the chart does not touch the Secret");
    let overwrite = r#"[{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": ""}]"#;
    cluster
        .kubectl(&["patch", "validatingwebhookconfiguration", CONFIGURATION, "--type=json", "-p", overwrite])
        .await
        .unwrap()
        .success()
        .unwrap();
    wait_for_trust().await;
    Webhook::reachable(&cluster).await.unwrap();

    // At rest, nothing is written, and the webhook writes nothing at all.
    let requests = "rest_client_requests_total";
    let patches = manager.metric_where(requests, "verb=\"patch\"").await.unwrap();
    assert!(patches <= 6.0, "{patches} patches");
    for verb in ["patch", "update", "delete"] {
        let verb = format!("verb=\"{verb}\"");
        assert!(replica.metric_where(requests, &verb).await.unwrap() < 1.0, "{verb} of the webhook");
    }
    drop(replica);
    cluster.shutdown().await;
}

/// Restores what was deleted, with the same values.
async fn reinstall(cluster: &Handle) {
    let chart = haulout_e2e::repository().join("charts/haulout");
    let chart = chart.display().to_string();
    let args = ["upgrade", "haulout", &chart, "-n", NAMESPACE, "--reuse-values"];
    cluster.helm(&args).await.unwrap().success().unwrap();
}

#[tokio::test]
async fn provided_certificate_files_are_reloaded() {
    let cluster = cluster("webhook-files").await;
    let client = cluster.client().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().display().to_string();
    let pki = cluster.pki();
    let ca = pki.ca_certificate().unwrap();
    let put = |certificate: &str, key: &str| {
        std::fs::write(folder.path().join("tls.crt"), certificate).unwrap();
        std::fs::write(folder.path().join("tls.key"), key).unwrap();
    };
    let (first, second) = (pki.serving(&[webhook::HOST]).unwrap(), pki.serving(&[webhook::HOST]).unwrap());
    let webhook = Webhook::install(
        &cluster,
        &[
            ("admissionWebhook.certificate.existingSecret", "theirs"),
            ("admissionWebhook.certificate.manageCaBundle", "true"),
        ],
    )
    .await
    .unwrap();

    // The CA bundle is from a Secret that does not exist yet.
    let manager = webhook.certificate_manager.as_ref().unwrap();
    wait::eventually("the missing Secret is reported", SOON, async || {
        Ok(manager.text().contains("certificate Secret does not exist; create it").then_some(()))
    })
    .await
    .unwrap();
    let secrets: Api<Secret> = Api::namespaced(client.clone(), NAMESPACE);
    let theirs = |ca: &str| -> Secret {
        let data = json!({"ca.crt": ca, "tls.crt": first.certificate, "tls.key": first.key});
        serde_json::from_value(json!({"metadata": {"name": "theirs"}, "stringData": data})).unwrap()
    };
    secrets.create(&PostParams::default(), &theirs(&ca)).await.unwrap();

    put(&first.certificate, &second.key);
    let error = webhook.start(&cluster, &["--cert-dir", &dir]).await.unwrap_err();
    let message = format!("{error:#}");
    assert!(message.contains("tls.key does not belong to the certificate in tls.crt"), "{message}");

    put(&first.certificate, &first.key);
    let replica = webhook.start(&cluster, &["--cert-dir", &dir]).await.unwrap();
    Webhook::reachable(&cluster).await.unwrap();
    assert_eq!(bundle(&client).await, ca.as_bytes());
    let twice = format!("{ca}{ca}");
    secrets.replace("theirs", &PostParams::default(), &theirs(&twice)).await.unwrap();
    wait::eventually("the CA bundle follows the Secret", SOON, async || {
        Ok((bundle(&client).await == twice.as_bytes()).then_some(()))
    })
    .await
    .unwrap();
    let address = webhook::address(&replica).unwrap();
    let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec();
    assert_eq!(handshake(&client, address).await.unwrap(), der(&first.certificate));

    put("nonsense", &first.key);
    wait::eventually("the invalid file is reported", SOON, async || {
        Ok(replica
            .text()
            .contains("failed to load the new certificate; keeping the previous one")
            .then_some(()))
    })
    .await
    .unwrap();
    assert_eq!(handshake(&client, address).await.unwrap(), der(&first.certificate));
    put(&second.certificate, &second.key);
    wait::eventually("the new certificate is served", SOON, async || {
        Ok((handshake(&client, address).await? == der(&second.certificate)).then_some(()))
    })
    .await
    .unwrap();
    drop(replica);
    cluster.shutdown().await;
}
