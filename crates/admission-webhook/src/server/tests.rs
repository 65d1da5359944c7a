//! The server on the wire, with a puppet for rules: what it speaks, whom it lets in, what it cuts, and how it ends.

mod hostile;
mod setup;

use std::time::Duration;

use rustls::version::{TLS12, TLS13};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::timeout;

use self::setup::{Authority, PATIENCE, Setup, review};
use super::Limits;

#[tokio::test]
async fn both_versions_of_tls_and_of_http_are_spoken() {
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
async fn a_panic_ends_neither_its_connection_nor_other_requests() {
    let setup = Setup::start(Limits::default()).await;
    let client = setup.client(&TLS13, "h2", None).await.unwrap();
    let ask = async |name: &str| client.clone().post("/validate/pods", review(name)).await.unwrap();
    let (sleeper, panic) = tokio::join!(ask("sleeps"), ask("panics"));
    assert_eq!((sleeper.0, panic.0), (200, 500));
    assert_eq!(panic.1["response"]["uid"], "u-1");
    assert_eq!(ask("fine").await.0, 200);
}

#[tokio::test]
async fn with_a_client_authority_only_its_named_clients_get_in() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let setup = Setup::start_for(Limits::default(), Some((&ours, &["kube-apiserver"]))).await;
    for version in [&TLS12, &TLS13] {
        for (client, welcome) in [
            (Some(ours.client("kube-apiserver")), true),
            (Some(ours.client("mallory")), false),
            (Some(theirs.client("kube-apiserver")), false),
            (None, false),
        ] {
            // With TLS 1.3 a client learns of it with its first answer.
            let answer = match setup.client(version, "h2", client).await {
                Ok(mut client) => client.post("/validate/pods", review("fine")).await.ok(),
                Err(_) => None,
            };
            assert_eq!(answer.map(|(code, _)| code), welcome.then_some(200));
        }
    }
}

#[tokio::test]
async fn an_end_in_good_order_loses_no_request() {
    let setup = Setup::start(Limits::default()).await;
    let mut client = setup.client(&TLS13, "h2", None).await.unwrap();
    let mut busy = client.clone();
    let busy = tokio::spawn(async move { busy.post("/validate/pods", review("sleeps")).await });
    setup.asked("sleeps").await;
    setup.stop.cancel();
    // Endpoints take a moment to change: whoever comes meanwhile is served, on old and on new connections.
    assert_eq!(client.post("/validate/pods", review("fine")).await.unwrap().0, 200);
    let mut late = setup.client(&TLS13, "http/1.1", None).await.unwrap();
    assert_eq!(late.post("/validate/pods", review("fine")).await.unwrap().0, 200);
    assert_eq!(busy.await.unwrap().unwrap().0, 200);
    let address = setup.address;
    timeout(PATIENCE, setup.served).await.expect("it ends by itself").unwrap();
    TcpStream::connect(address).await.expect_err("nobody listens any more");
}

#[tokio::test]
async fn a_request_that_never_ends_does_not_keep_the_server() {
    let limits =
        Limits { linger: Duration::from_millis(10), drain: Duration::from_millis(200), ..Limits::default() };
    let setup = Setup::start(limits).await;
    let mut client = setup.client(&TLS13, "h2", None).await.unwrap();
    let hung = tokio::spawn(async move { client.post("/validate/pods?timeout=30s", review("hangs")).await });
    setup.asked("hangs").await;
    setup.stop.cancel();
    timeout(PATIENCE, setup.served).await.expect("it ends all the same").unwrap();
    hung.abort();
}

#[tokio::test]
async fn a_connection_without_a_place_waits_until_an_idle_one_is_cut() {
    // Long enough for a client of ours that has got a place to use it.
    let limits = Limits { connections: 2, first_request: Duration::from_secs(2), ..Limits::default() };
    let setup = Setup::start(limits).await;
    let mut idle = Vec::new();
    for _ in 0..2 {
        idle.push(setup.connect(&TLS13, "h2", None).await.unwrap());
    }
    let mut client = setup.client(&TLS13, "h2", None).await.unwrap();
    assert_eq!(client.post("/validate/pods", review("fine")).await.unwrap().0, 200);
}
