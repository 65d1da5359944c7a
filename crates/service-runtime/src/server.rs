//! The small HTTP server of every service: `/livez`, `/readyz`, `/metrics`.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::clock::Clock;
use crate::metrics::Metrics;

/// How long a client may take to ask, and to ask again on the same connection.
const PATIENCE: Duration = Duration::from_secs(30);
/// How many may be connected at once: whoever opens more has to wait, and uses up nothing that the service needs.
const MOST_CONNECTIONS: usize = 256;

/// What a service still waits for before it is ready. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<BTreeSet<&'static str>>>);

impl Readiness {
    /// Says that the service is not ready because of this.
    pub fn wait_for(&self, what: &'static str) {
        self.0.lock().insert(what);
    }

    /// Says that this is no longer waited for.
    pub fn done(&self, what: &'static str) {
        self.0.lock().remove(what);
    }

    /// What is still waited for; the service is ready when it is nothing.
    pub fn missing(&self) -> Vec<&'static str> {
        self.0.lock().iter().copied().collect()
    }
}

/// What the server shows.
#[derive(Clone, Debug)]
pub struct Shown {
    /// Shown by `/metrics`.
    pub metrics: Metrics,
    /// Shown by `/readyz`.
    pub readiness: Readiness,
    /// Shifted by `/shift-clock` in test builds.
    pub clock: Clock,
}

/// A listener that lets in only so many at once. More wait before they are accepted.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl Door {
    /// Lets in as many at once.
    pub fn new(listener: TcpListener, most: usize) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(most)) }
    }

    /// The next connection, and its place, which is free for another one when dropped.
    pub async fn next(&self) -> (TcpStream, OwnedSemaphorePermit) {
        loop {
            // A semaphore that is never closed.
            let Ok(place) = Arc::clone(&self.places).acquire_owned().await else { continue };
            match self.listener.accept().await {
                Ok((stream, _)) => return (stream, place),
                // A peer that has gone again costs nothing; where no more files may be open, trying again at once
                // would only burn time.
                Err(error) => {
                    debug!(%error, "a connection was not accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// How many may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Every address of this machine.
pub const fn everywhere(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::UNSPECIFIED), port)
}

/// Listens on this address. [`everywhere`] is IPv4 too, whatever the machine's default, and IPv4 alone on a machine that
/// has nothing else.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match bind(address) {
        Err(error)
            if address.ip() == Ipv6Addr::UNSPECIFIED
                && Errno::from_io_error(&error) == Some(Errno::AFNOSUPPORT) =>
        {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        listener => listener,
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv6() { TcpSocket::new_v6()? } else { TcpSocket::new_v4()? };
    if address.ip() == Ipv6Addr::UNSPECIFIED {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves until the order to stop.
pub async fn serve(listener: TcpListener, shown: Shown, stop: CancellationToken) {
    serve_patiently(listener, shown, stop, PATIENCE).await;
}

async fn serve_patiently(listener: TcpListener, shown: Shown, stop: CancellationToken, patience: Duration) {
    let router = Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics));
    #[cfg(feature = "test-clock")]
    let router = router.route("/shift-clock", axum::routing::post(shift_clock));
    let router = router.with_state(shown);
    let door = Door::new(listener, MOST_CONNECTIONS);
    let connections = GracefulShutdown::new();
    loop {
        let (stream, place) = tokio::select! {
            () = stop.cancelled() => break,
            entered = door.next() => entered,
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(patience)
            .serve_connection(TokioIo::new(stream), service);
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            let _place = place;
            if let Err(error) = connection.await {
                debug!(%error, "a connection broke");
            }
        });
    }
    connections.shutdown().await;
}

async fn ready(State(shown): State<Shown>) -> Response {
    let missing = shown.readiness.missing();
    if missing.is_empty() {
        return "ok\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {}\n", missing.join(", "))).into_response()
}

async fn metrics(State(shown): State<Shown>) -> Response {
    match shown.metrics.encode() {
        Ok(text) => ([("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
            .into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Takes a number of seconds in the body.
#[cfg(feature = "test-clock")]
async fn shift_clock(State(shown): State<Shown>, body: String) -> Response {
    match body.trim().parse() {
        Ok(seconds) => {
            shown.clock.shift(jiff::SignedDuration::from_secs(seconds));
            "ok\n".into_response()
        }
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_string(&mut answer)).await;
        read.expect("the server ends it").unwrap();
        answer
    }

    #[tokio::test]
    async fn who_does_not_finish_asking_is_sent_away_and_holds_up_nobody() {
        let listener = listen(everywhere(0)).unwrap();
        // Who listens everywhere is there for IPv4 as well.
        let address = (Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port()).into();
        let readiness = Readiness::default();
        let shown = Shown {
            metrics: Metrics::new("test", "0"),
            readiness: readiness.clone(),
            clock: Clock::default(),
        };
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve_patiently(listener, shown, stop.clone(), Duration::from_millis(300)));
        let mut slow = Vec::new();
        for _ in 0..MOST_CONNECTIONS {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /li").await.unwrap();
            slow.push(stream);
        }
        let get = |path| format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        assert!(ask(address, &get("/livez")).await.starts_with("HTTP/1.1 200"));
        readiness.wait_for("pods");
        let answer = ask(address, &get("/readyz")).await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("waiting for pods\n"), "{answer}");
        assert_eq!(ask(address, "GET /metrics").await, "", "it is sent away");
        stop.cancel();
        tokio::time::timeout(Duration::from_secs(20), server).await.expect("it ends").unwrap();
    }
}
