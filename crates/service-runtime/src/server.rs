//! The HTTP server of every service: `/livez`, `/readyz`, `/metrics`. `listener` limits the connections of every port.

mod connections;
mod listener;

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
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use rustix::io::Errno;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket};
use tokio_util::sync::CancellationToken;
use tower::Service as _;
use tracing::debug;

pub use self::listener::{
    CloseCause, Connection, ConnectionLimits, Listener, Memory, OutOfMemory, Stream, Work,
};
use crate::clock::Clock;
use crate::metrics::Metrics;

/// Maximum number of connections of a port. A new connection beyond it replaces an idle one.
pub const MAX_CONNECTIONS: usize = 256;

/// Timeouts of the server. Tests use shorter ones.
#[derive(Clone, Copy, Debug)]
struct Timeouts {
    /// For receiving the headers of a request.
    headers: Duration,
    /// For the whole connection, including a client that does not receive the response. Prometheus gives up after 10 s.
    connection: Duration,
}

const TIMEOUTS: Timeouts = Timeouts { headers: Duration::from_secs(5), connection: Duration::from_secs(10) };
/// Size of the headers of a request, and of what is buffered of a response.
const BUFFER_SIZE: usize = 16 << 10;

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
    serve_with_timeouts(listener, state, stop, TIMEOUTS).await;
}

async fn serve_with_timeouts(
    listener: TcpListener,
    state: ServerState,
    stop: CancellationToken,
    timeouts: Timeouts,
) {
    let closed: Family<[(&'static str, &'static str); 1], Counter> = state.metrics.add(
        "haulout_http_connections_closed",
        "Connections to the port for probes and metrics that the service closed early, by cause",
    );
    let router = Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics));
    #[cfg(feature = "test-clock")]
    let router = router.route("/shift-clock", axum::routing::post(shift_clock));
    let router = router.with_state(state);
    let limits = ConnectionLimits { connections: MAX_CONNECTIONS, memory: 0, write: timeouts.connection };
    let listener = Listener::new(listener, limits);
    let connections = GracefulShutdown::new();
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => break,
            stream = listener.next() => stream,
        };
        let (connection, router) = (stream.connection().clone(), router.clone());
        let worker = connection.clone();
        let service = service_fn(move |request: http::Request<Incoming>| {
            let (work, answer) = (worker.work(), router.clone().call(request));
            async move {
                let _work = work;
                answer.await
            }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(timeouts.headers)
            .max_buf_size(BUFFER_SIZE)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service);
        let served = connections.watch(served);
        let closed = closed.clone();
        tokio::spawn(async move {
            // The stream is dropped before the code of a branch runs, and has to know by then that it is closed early.
            let timeout = async {
                tokio::time::sleep(timeouts.connection).await;
                connection.close(CloseCause::Timeout);
            };
            tokio::select! {
                served = served => if let Err(error) = served {
                    debug!(%error, "connection failed");
                },
                _ = connection.closed() => {}
                () = timeout => {}
            }
            if let Some(cause) = connection.close_cause() {
                closed.get_or_create(&[("cause", cause.label())]).inc();
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
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
    use tokio::net::TcpStream;

    use super::*;

    async fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_string(&mut answer)).await;
        read.expect("the server ends it").unwrap();
        answer
    }

    struct Server {
        address: SocketAddr,
        metrics: Metrics,
        readiness: Readiness,
        stop: CancellationToken,
        served: tokio::task::JoinHandle<()>,
    }

    impl Server {
        fn start(timeouts: Timeouts) -> Self {
            let listener = listen(all_interfaces(0)).unwrap();
            // Listening on all interfaces includes IPv4.
            let address = (Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port()).into();
            let (metrics, readiness) = (Metrics::new("test", "0"), Readiness::default());
            let state = ServerState {
                metrics: metrics.clone(),
                readiness: readiness.clone(),
                clock: Clock::default(),
            };
            let stop = CancellationToken::new();
            let served = tokio::spawn(serve_with_timeouts(listener, state, stop.clone(), timeouts));
            Self { address, metrics, readiness, stop, served }
        }

        async fn get(&self, path: &str) -> String {
            ask(self.address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await
        }
    }

    #[tokio::test]
    async fn probes_are_answered_among_many_slow_clients() {
        let server = Server::start(TIMEOUTS);
        let mut slow = Vec::new();
        for _ in 0..2 * MAX_CONNECTIONS {
            let mut stream = TcpStream::connect(server.address).await.unwrap();
            stream.write_all(b"GET /li").await.unwrap();
            slow.push(stream);
        }
        assert!(server.get("/livez").await.starts_with("HTTP/1.1 200"));
        server.readiness.wait_for("pods");
        let answer = server.get("/readyz").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("waiting for pods\n"), "{answer}");
        let closed = "haulout_http_connections_closed_total{cause=\"too_many_connections\"} ";
        assert!(server.get("/metrics").await.contains(closed));
        server.stop.cancel();
        tokio::time::timeout(Duration::from_secs(20), server.served).await.expect("it ends").unwrap();
    }

    #[tokio::test]
    async fn client_without_complete_headers_is_disconnected() {
        let server = Server::start(Timeouts { headers: Duration::from_millis(300), ..TIMEOUTS });
        assert_eq!(ask(server.address, "GET /livez").await, "");
    }

    #[tokio::test]
    async fn connection_serves_one_request() {
        let server = Server::start(TIMEOUTS);
        let request = "GET /livez HTTP/1.1\r\nhost: x\r\n\r\n";
        let answer = ask(server.address, &request.repeat(2)).await;
        assert_eq!(answer.matches("HTTP/1.1 200").count(), 1, "{answer}");
    }

    #[tokio::test]
    async fn client_that_does_not_receive_is_disconnected() {
        let server = Server::start(Timeouts { connection: Duration::from_millis(300), ..TIMEOUTS });
        // More than the kernel buffers.
        let large: Family<[(&'static str, String); 1], Counter> = server.metrics.add("large", "Large");
        for number in 0..200 {
            large.get_or_create(&[("number", format!("{number:0>60000}"))]).inc();
        }
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        // A reset: what the client has not received does not stay in the kernel.
        let reset = stream.ready(Interest::ERROR);
        tokio::time::timeout(Duration::from_secs(20), reset).await.expect("it is disconnected").unwrap();
        let counted = async {
            let counter = "haulout_http_connections_closed_total{cause=\"timeout\"} 1\n";
            while !server.metrics.encode().unwrap().contains(counter) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), counted).await.expect("it is counted");
    }
}
