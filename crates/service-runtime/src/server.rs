//! The HTTP server of every service: `/livez`, `/readyz`, `/metrics`.

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

/// Timeout for receiving the headers of a request, also of the next request on the same connection.
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of connections. Further connections wait, so that they use no resources of the service.
const MAX_CONNECTIONS: usize = 256;

/// What a service waits for before it is ready. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<BTreeSet<&'static str>>>);

impl Readiness {
    /// Makes the service unready until [`Readiness::done`] is called with the same name.
    pub fn wait_for(&self, what: &'static str) {
        self.0.lock().insert(what);
    }

    /// The service no longer waits for this.
    pub fn done(&self, what: &'static str) {
        self.0.lock().remove(what);
    }

    /// What the service still waits for. It is ready if this is empty.
    pub fn pending(&self) -> Vec<&'static str> {
        self.0.lock().iter().copied().collect()
    }
}

/// The state that the server exposes.
#[derive(Clone, Debug)]
pub struct ServerState {
    /// For `/metrics`.
    pub metrics: Metrics,
    /// For `/readyz`.
    pub readiness: Readiness,
    /// For `/shift-clock` in test builds.
    pub clock: Clock,
}

/// A listener with a maximum number of open connections. Further connections wait before they are accepted.
#[derive(Debug)]
pub struct LimitedListener {
    listener: TcpListener,
    permits: Arc<Semaphore>,
}

impl LimitedListener {
    /// A listener with this maximum number of connections.
    pub fn new(listener: TcpListener, max_connections: usize) -> Self {
        Self { listener, permits: Arc::new(Semaphore::new(max_connections)) }
    }

    /// Accepts the next connection. It counts as open until the permit is dropped.
    pub async fn next(&self) -> (TcpStream, OwnedSemaphorePermit) {
        loop {
            // The semaphore is never closed.
            let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await else { continue };
            match self.listener.accept().await {
                Ok((stream, _)) => return (stream, permit),
                // Wait before the next attempt: if no more files can be opened, an immediate retry fails too.
                Err(error) => {
                    debug!(%error, "failed to accept connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// All addresses of this machine.
pub const fn all_interfaces(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::UNSPECIFIED), port)
}

/// Listens on this address. [`all_interfaces`] includes IPv4, regardless of the machine's default. On a machine without
/// IPv6 it is IPv4 alone.
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

/// Serves until `stop` is cancelled.
pub async fn serve(listener: TcpListener, state: ServerState, stop: CancellationToken) {
    serve_with_timeout(listener, state, stop, HEADER_READ_TIMEOUT).await;
}

async fn serve_with_timeout(
    listener: TcpListener,
    state: ServerState,
    stop: CancellationToken,
    header_read_timeout: Duration,
) {
    let router = Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics));
    #[cfg(feature = "test-clock")]
    let router = router.route("/shift-clock", axum::routing::post(shift_clock));
    let router = router.with_state(state);
    let listener = LimitedListener::new(listener, MAX_CONNECTIONS);
    let connections = GracefulShutdown::new();
    loop {
        let (stream, permit) = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.next() => accepted,
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(header_read_timeout)
            .serve_connection(TokioIo::new(stream), service);
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            let _permit = permit;
            if let Err(error) = connection.await {
                debug!(%error, "connection failed");
            }
        });
    }
    connections.shutdown().await;
}

async fn ready(State(state): State<ServerState>) -> Response {
    let pending = state.readiness.pending();
    if pending.is_empty() {
        return "ok\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {}\n", pending.join(", "))).into_response()
}

async fn metrics(State(state): State<ServerState>) -> Response {
    match state.metrics.encode() {
        Ok(text) => ([("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
            .into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// The body is a number of seconds.
#[cfg(feature = "test-clock")]
async fn shift_clock(State(state): State<ServerState>, body: String) -> Response {
    match body.trim().parse() {
        Ok(seconds) => {
            state.clock.shift(jiff::SignedDuration::from_secs(seconds));
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
    async fn slow_client_is_disconnected_and_blocks_nobody() {
        let listener = listen(all_interfaces(0)).unwrap();
        // Listening on all interfaces includes IPv4.
        let address = (Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port()).into();
        let readiness = Readiness::default();
        let state = ServerState {
            metrics: Metrics::new("test", "0"),
            readiness: readiness.clone(),
            clock: Clock::default(),
        };
        let stop = CancellationToken::new();
        let server =
            tokio::spawn(serve_with_timeout(listener, state, stop.clone(), Duration::from_millis(300)));
        let mut slow = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET /li").await.unwrap();
            slow.push(stream);
        }
        let get = |path| format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        assert!(ask(address, &get("/livez")).await.starts_with("HTTP/1.1 200"));
        readiness.wait_for("pods");
        let answer = ask(address, &get("/readyz")).await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("waiting for pods\n"), "{answer}");
        assert_eq!(ask(address, "GET /metrics").await, "", "it is disconnected");
        stop.cancel();
        tokio::time::timeout(Duration::from_secs(20), server).await.expect("it ends").unwrap();
    }
}
