//! Tests the server over the network with fake rules: protocols, client authentication, limits and shutdown.

mod hostile;
mod setup;

use std::time::Duration;

use rustls::version::{TLS12, TLS13};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::timeout;

use self::setup::{Authority, Setup, TIMEOUT, review};
use super::Limits;

#[tokio::test]
async fn tls_1_2_and_1_3_and_http_1_and_2_are_served() {
    let setup = Setup::start(Limits::default()).await;
    for version in [&TLS12, &TLS13] {
        for protocol in ["http/1.1", "h2"] {
            let mut client = setup.client(version, protocol, None).await.unwrap();
            for _ in 0..3 {
                let (code, answer) = client.post("/validate/pods?timeout=5s", review("fine")).await.unwrap();
                assert_eq!((code, &answer["response"]["allowed"]), (200, &json!(true)), "{protocol}");
            }
        }
    }
}

#[tokio::test]
async fn panic_does_not_affect_other_requests() {
    let setup = Setup::start(Limits::default()).await;
    let client = setup.client(&TLS13, "h2", None).await.unwrap();
    let ask = async |name: &str| client.clone().post("/validate/pods", review(name)).await.unwrap();
    let (sleeper, panic) = tokio::join!(ask("sleeps"), ask("panics"));
    assert_eq!((sleeper.0, panic.0), (200, 500));
    assert_eq!(panic.1["response"]["uid"], "u-1");
    assert_eq!(ask("fine").await.0, 200);
}

#[tokio::test]
async fn client_ca_admits_only_named_clients() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let setup = Setup::start_for(Limits::default(), Some((&ours, &["kube-apiserver"]))).await;
    for version in [&TLS12, &TLS13] {
        for (client, welcome) in [
            (Some(ours.client("kube-apiserver")), true),
            (Some(ours.client("mallory")), false),
            (Some(theirs.client("kube-apiserver")), false),
            (None, false),
        ] {
            // With TLS 1.3, a rejected client gets the error with its first response.
            let answer = match setup.client(version, "h2", client).await {
                Ok(mut client) => client.post("/validate/pods", review("fine")).await.ok(),
                Err(_) => None,
            };
            assert_eq!(answer.map(|(code, _)| code), welcome.then_some(200));
        }
    }
}

#[tokio::test]
async fn replaced_client_ca_applies_to_new_connections() {
    let (old, new) = (Authority::new(), Authority::new());
    let setup = Setup::start_for(Limits::default(), Some((&old, &[]))).await;
    let connect = async |authority: &Authority| {
        // With TLS 1.2, a rejected client gets the error in the handshake.
        setup.client(&TLS12, "h2", Some(authority.client("kube-apiserver"))).await
    };
    let mut before = connect(&old).await.unwrap();
    for invalid in ["", "nonsense", "-----BEGIN CERTIFICATE-----\nbm9uc2Vuc2U=\n-----END CERTIFICATE-----\n"]
    {
        setup.tls.replace_authorities(invalid.as_bytes()).unwrap_err();
    }
    connect(&old).await.unwrap();
    assert!(connect(&new).await.is_err());
    setup.tls.replace_authorities(new.pem.as_bytes()).unwrap();
    connect(&new).await.unwrap();
    assert!(connect(&old).await.is_err());
    let (code, _) = before.post("/validate/pods", review("fine")).await.unwrap();
    assert_eq!(code, 200, "a connection that is open stays open");
}

#[tokio::test]
async fn graceful_shutdown_loses_no_request() {
    let setup = Setup::start(Limits::default()).await;
    let mut client = setup.client(&TLS13, "h2", None).await.unwrap();
    let mut busy = client.clone();
    let busy = tokio::spawn(async move { busy.post("/validate/pods", review("sleeps")).await });
    setup.asked("sleeps").await;
    setup.stop.cancel();
    // Endpoints take time to update: meanwhile, requests are served on old and new connections.
    assert_eq!(client.post("/validate/pods", review("fine")).await.unwrap().0, 200);
    let mut late = setup.client(&TLS13, "http/1.1", None).await.unwrap();
    assert_eq!(late.post("/validate/pods", review("fine")).await.unwrap().0, 200);
    // The client knows that this connection takes no more requests, and does not lose one when it is closed.
    assert!(late.post("/validate/pods", review("fine")).await.is_err());
    assert_eq!(busy.await.unwrap().unwrap().0, 200);
    let address = setup.address;
    timeout(TIMEOUT, setup.served).await.expect("the server stops").unwrap();
    TcpStream::connect(address).await.expect_err("the listener is closed");
}

#[tokio::test]
async fn hanging_request_does_not_block_shutdown() {
    let limits = Limits {
        accept_after_stop: Duration::from_millis(10),
        drain: Duration::from_millis(200),
        ..Limits::default()
    };
    let setup = Setup::start(limits).await;
    let mut client = setup.client(&TLS13, "h2", None).await.unwrap();
    let hung = tokio::spawn(async move { client.post("/validate/pods?timeout=30s", review("hangs")).await });
    setup.asked("hangs").await;
    setup.stop.cancel();
    timeout(TIMEOUT, setup.served).await.expect("the server stops").unwrap();
    hung.abort();
}

#[tokio::test]
async fn connections_are_refused_while_requests_finish() {
    let accept_after_stop = Duration::from_millis(10);
    let setup = Setup::start(Limits { accept_after_stop, drain: TIMEOUT, ..Limits::default() }).await;
    let mut client = setup.client(&TLS13, "h2", None).await.unwrap();
    let hung = tokio::spawn(async move { client.post("/validate/pods?timeout=30s", review("hangs")).await });
    setup.asked("hangs").await;
    setup.stop.cancel();
    let refused = async { while TcpStream::connect(setup.address).await.is_ok() {} };
    timeout(TIMEOUT / 2, refused).await.expect("the listener is closed");
    assert!(!setup.served.is_finished(), "the request still runs");
    hung.abort();
}

#[tokio::test]
async fn new_connection_replaces_an_idle_one() {
    let setup = Setup::start(Limits { connections: 2, first_request: TIMEOUT, ..Limits::default() }).await;
    let oldest = setup.connect(&TLS13, "h2", None).await.unwrap();
    let mut busy = setup.client(&TLS13, "h2", None).await.unwrap();
    let busy = tokio::spawn(async move { busy.post("/validate/pods", review("sleeps")).await });
    setup.asked("sleeps").await;
    for _ in 0..10 {
        let mut client = setup.client(&TLS13, "h2", None).await.unwrap();
        assert_eq!(client.post("/validate/pods", review("fine")).await.unwrap().0, 200);
    }
    hostile::read_to_end_of_stream(oldest).await;
    setup.closed("too_many_connections", 10).await;
    assert_eq!(busy.await.unwrap().unwrap().0, 200, "a request in progress is not lost");
}
