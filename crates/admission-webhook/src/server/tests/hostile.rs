//! Hostile and broken clients get an error or are disconnected. Other clients are not affected.

use std::net::Ipv4Addr;
use std::time::Duration;

use hyper::body::Bytes;
use rustls::version::TLS13;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::setup::{Setup, TIMEOUT, review};
use crate::server::Limits;

/// Only the tested limits are short, because the test's own clients can be slow on a busy machine.
fn short() -> Limits {
    Limits {
        first_request: Duration::from_millis(300),
        idle: Duration::from_millis(600),
        handshake: TIMEOUT,
        ..Limits::default()
    }
}

/// Reads until the server closes the connection.
pub async fn read_to_end_of_stream(mut stream: impl AsyncRead + Unpin) -> String {
    let mut bytes = Vec::new();
    // A reset closes the connection, too.
    let _ = timeout(TIMEOUT, stream.read_to_end(&mut bytes)).await.expect("the connection is closed");
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn half_open_tls_connection_is_closed() {
    let setup = Setup::start(Limits { handshake: Duration::from_millis(300), ..short() }).await;
    let silent = TcpStream::connect(setup.address).await.unwrap();
    let mut hesitant = TcpStream::connect(setup.address).await.unwrap();
    // The beginning of a ClientHello of 512 bytes.
    hesitant.write_all(&[0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc]).await.unwrap();
    let (silent, hesitant) = tokio::join!(read_to_end_of_stream(silent), read_to_end_of_stream(hesitant));
    assert_eq!((silent.len(), hesitant.len()), (0, 0));
    setup.closed("handshake_timeout", 2).await;

    let mut plain = TcpStream::connect(setup.address).await.unwrap();
    plain.write_all(b"POST /validate/pods HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_to_end_of_stream(plain).await;
    setup.closed("handshake_failed", 1).await;
}

#[tokio::test]
async fn silent_and_slow_clients_are_disconnected() {
    let setup = Setup::start(short()).await;
    let silent = setup.connect(&TLS13, "h2", None).await.unwrap();
    let quiet = setup.connect(&TLS13, "http/1.1", None).await.unwrap();
    let mut dripping = setup.connect(&TLS13, "http/1.1", None).await.unwrap();
    dripping.write_all(b"POST /validate/pods HTTP/1.1\r\nho").await.unwrap();
    let mut preface = setup.connect(&TLS13, "h2", None).await.unwrap();
    preface.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    tokio::join!(
        read_to_end_of_stream(silent),
        read_to_end_of_stream(quiet),
        read_to_end_of_stream(dripping),
        read_to_end_of_stream(preface)
    );
    setup.closed("idle", 4).await;
}

#[tokio::test]
async fn missing_body_gets_a_timeout_and_is_disconnected() {
    let setup = Setup::start(Limits { first_request: TIMEOUT, ..short() }).await;
    let mut slow = setup.connect(&TLS13, "http/1.1", None).await.unwrap();
    let head = "POST /validate/pods?timeout=1s HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"a\":";
    slow.write_all(head.as_bytes()).await.unwrap();
    let answer = read_to_end_of_stream(slow).await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
}

#[tokio::test]
async fn client_that_does_not_receive_is_disconnected() {
    let setup = Setup::start(Limits { write: Duration::from_millis(300), ..Limits::default() }).await;
    let mut deaf = setup.connect(&TLS13, "http/1.1", None).await.unwrap();
    let body = review("fine");
    let head = format!("POST /validate/pods HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let request = [head.as_bytes(), &body].concat();
    // Until the buffers of both sides are full.
    let sent = async { while deaf.write_all(&request).await.is_ok() {} };
    timeout(TIMEOUT, sent).await.expect("the connection is closed");
    setup.closed("write_timeout", 1).await;
}

#[tokio::test]
async fn slow_bodies_do_not_keep_memory_from_others() {
    // The memory is enough for four of these bodies.
    let (body, memory) = (1 << 20, 8 << 20);
    let setup = Setup::start(Limits { body, memory, ..Limits::default() }).await;
    let (one, other) = (Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::new(127, 0, 0, 3));
    let mut slow = Vec::new();
    for _ in 0..8 {
        let mut stream = setup.connect_from(one, &TLS13, "http/1.1", None).await.unwrap();
        let head =
            format!("POST /validate/pods?timeout=30s HTTP/1.1\r\nhost: x\r\ncontent-length: {body}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        // The server does not read the whole body while it waits for memory.
        let incomplete = vec![b' '; body - 1];
        slow.push(tokio::spawn(async move {
            let _ = stream.write_all(&incomplete).await;
            read_to_end_of_stream(stream).await
        }));
    }
    for address in [other, one] {
        for protocol in ["http/1.1", "h2"] {
            let mut client = setup.client_from(address, &TLS13, protocol, None).await.unwrap();
            let mut large = review("fine").to_vec();
            large.resize(body, b' ');
            let answer = client.post("/validate/pods?timeout=10s", large.into()).await;
            assert_eq!(answer.unwrap().0, 200, "{address} {protocol}");
        }
    }
    assert!(setup.metrics.encode().unwrap().contains("cause=\"too_much_memory\""));
    slow.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn requests_that_take_long_do_not_keep_others_out() {
    let setup = Setup::start(Limits { connections: 3, ..Limits::default() }).await;
    let (one, other) = (Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::new(127, 0, 0, 3));
    let mut hanging = Vec::new();
    for number in 0..3 {
        let name = format!("hangs-{number}");
        let mut client = setup.client_from(one, &TLS13, "http/1.1", None).await.unwrap();
        let body = review(&name);
        hanging.push(tokio::spawn(async move { client.post("/validate/pods?timeout=30s", body).await }));
        setup.asked(&name).await;
    }
    let mut client = setup.client_from(other, &TLS13, "http/1.1", None).await.unwrap();
    assert_eq!(client.post("/validate/pods", review("fine")).await.unwrap().0, 200);
    setup.closed("too_many_connections", 1).await;
    let lost = timeout(TIMEOUT, hanging.remove(0)).await.expect("the first one is closed").unwrap();
    lost.unwrap_err();
    hanging.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn large_bodies_of_one_client_wait_for_each_other() {
    // The memory is enough for two of these bodies, or for halves of four.
    let (body, memory) = (1 << 20, 4 << 20);
    let setup = Setup::start(Limits { body, memory, ..Limits::default() }).await;
    let mut large = review("fine").to_vec();
    large.resize(body, b' ');
    let (first, second) = large.split_at(body / 2);
    let answers = (0..8).map(async |_| {
        let mut stream = setup.connect(&TLS13, "http/1.1", None).await.unwrap();
        let head = format!(
            "POST /validate/pods?timeout=30s HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {body}\r\n\r\n"
        );
        stream.write_all(&[head.as_bytes(), first].concat()).await?;
        stream.flush().await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
        stream.write_all(second).await?;
        std::io::Result::Ok(read_to_end_of_stream(stream).await)
    });
    for answer in futures::future::join_all(answers).await {
        let answer = answer.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
    assert!(!setup.metrics.encode().unwrap().contains("cause=\"too_much_memory\""));
}

#[tokio::test]
async fn idle_connection_is_closed_gracefully() {
    let setup = Setup::start(Limits { first_request: TIMEOUT, ..short() }).await;
    let mut stream = setup.connect(&TLS13, "http/1.1", None).await.unwrap();
    let body = review("fine");
    let head = format!("POST /validate/pods HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), &body].concat()).await.unwrap();
    let answer = read_to_end_of_stream(stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

#[tokio::test]
async fn large_bodies_are_accepted_up_to_the_limit() {
    let setup = Setup::start(Limits::default()).await;
    let padded = |size: usize| {
        let mut body = review("fine").to_vec();
        body.resize(size, b' ');
        Bytes::from(body)
    };
    for protocol in ["http/1.1", "h2"] {
        let mut client = setup.client(&TLS13, protocol, None).await.unwrap();
        assert_eq!(client.post("/validate/pods", padded(7 << 20)).await.unwrap().0, 200);
        // Some clients lose the response while they still send. The server must keep running.
        let answer = client.post("/validate/pods", padded((8 << 20) + 1)).await;
        assert!(answer.is_err() || answer.is_ok_and(|(code, _)| code == 413), "{protocol}");
        let mut other = setup.client(&TLS13, protocol, None).await.unwrap();
        assert_eq!(other.post("/validate/pods", review("fine")).await.unwrap().0, 200);
    }
}

#[tokio::test]
async fn garbage_does_not_affect_other_clients() {
    let setup = Setup::start(Limits { first_request: TIMEOUT, ..short() }).await;
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..50 {
        let garbage: Vec<u8> = (0..random.usize(1..2000)).map(|_| random.u8(..)).collect();
        let mut raw = TcpStream::connect(setup.address).await.unwrap();
        // The server may close the connection before everything is written.
        let _ = raw.write_all(&garbage).await;
        let protocol = if round % 2 == 0 { "h2" } else { "http/1.1" };
        let mut inside = setup.connect(&TLS13, protocol, None).await.unwrap();
        let _ = inside.write_all(&garbage).await;
    }
    let mut client = setup.client(&TLS13, "h2", None).await.unwrap();
    assert_eq!(client.post("/validate/pods", review("fine")).await.unwrap().0, 200);
}
