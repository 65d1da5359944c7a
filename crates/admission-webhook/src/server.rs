//! Connections: accepted, kept to their limits, and closed in good order. What is said on them is in
//! `handler`, how they are encrypted in `tls`.

mod handler;
pub mod tls;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use haulout_service_runtime::server::Door;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Service as _;
use tracing::{debug, info, warn};

use crate::metrics::Metrics;
use crate::review::Admit;

/// How much of everything there may be. The default is for production; tests make it smaller.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at once; more wait until one goes. An API server needs one or two.
    pub connections: usize,
    /// Requests at once on one HTTP/2 connection.
    pub streams: u32,
    /// A TLS handshake.
    pub handshake: Duration,
    /// From the handshake to the first request, or from the order to close to the last byte.
    pub first_request: Duration,
    /// Without a request. The API server closes its own idle connections after 90 s, and a POST that meets a
    /// closing HTTP/1.1 connection fails: hence longer.
    pub idle: Duration,
    /// Of a body. The API server takes objects of up to 3 MiB, and an update brings the old one too.
    pub body: usize,
    /// Of all bodies at once, so that many large ones wait for each other.
    pub bodies: usize,
    /// How long new connections are served after the order to stop: endpoints take a moment to change.
    pub linger: Duration,
    /// How long requests that are under way then may still take.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            streams: 128,
            handshake: Duration::from_secs(5),
            first_request: Duration::from_secs(5),
            idle: Duration::from_secs(120),
            body: 8 << 20,
            bodies: 64 << 20,
            linger: Duration::from_secs(3),
            drain: Duration::from_secs(4),
        }
    }
}

/// What all connections have in common.
pub struct Server {
    router: Router,
    tls: TlsAcceptor,
    limits: Limits,
    metrics: Metrics,
    close: CancellationToken,
}

impl Server {
    /// A server that has yet to serve.
    pub fn new(admit: impl Admit, tls: Arc<ServerConfig>, limits: Limits, metrics: Metrics) -> Self {
        let router = handler::router(admit, &limits, metrics.clone());
        Self { router, tls: TlsAcceptor::from(tls), limits, metrics, close: CancellationToken::new() }
    }

    /// Serves until the order to stop and then, for a while, to the end.
    pub async fn serve(self, listener: TcpListener, stop: CancellationToken) {
        let server = Arc::new(self);
        let connections = TaskTracker::new();
        let door = Door::new(listener, server.limits.connections);
        let accept = async {
            loop {
                let (stream, place) = door.next().await;
                connections.spawn(Arc::clone(&server).connection(stream, place));
            }
        };
        let stopped = async {
            stop.cancelled().await;
            tokio::time::sleep(server.limits.linger).await;
        };
        tokio::select! {
            () = accept => {}
            () = stopped => {}
        }
        info!(connections = connections.len(), "closing connections");
        server.close.cancel();
        connections.close();
        if timeout(server.limits.drain, connections.wait()).await.is_err() {
            warn!(connections = connections.len(), "cutting connections that did not end");
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, _place: OwnedSemaphorePermit) {
        let _counted = self.metrics.connection();
        // Answers are small and awaited; on failure they are only a little slower.
        let _ = stream.set_nodelay(true);
        match timeout(self.limits.handshake, self.tls.accept(stream)).await {
            Ok(Ok(stream)) => self.http(stream).await,
            Ok(Err(error)) => {
                debug!(%error, "TLS handshake");
                self.metrics.cut("handshake_failed");
            }
            Err(_) => self.metrics.cut("handshake_timeout"),
        }
    }

    async fn http(&self, stream: TlsStream<TcpStream>) {
        let limits = &self.limits;
        let mut http = auto::Builder::new(TokioExecutor::new());
        http.http1().timer(TokioTimer::new()).header_read_timeout(limits.idle).max_buf_size(64 << 10);
        http.http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(10))
            .max_concurrent_streams(limits.streams)
            .max_header_list_size(16 << 10)
            .initial_connection_window_size(1 << 20);
        // Told by the handshake, so that nobody can keep us waiting for a first byte to guess from.
        let http = match stream.get_ref().1.alpn_protocol() {
            Some(b"h2") => http.http2_only(),
            _ => http.http1_only(),
        };
        let (requests, begun) = (TaskTracker::new(), Notify::new());
        // More can begin; it lets `wait` return when there are none.
        requests.close();
        let service = service_fn(|request: http::Request<Incoming>| {
            begun.notify_one();
            requests.track_future(self.router.clone().call(request))
        });
        let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    debug!(%error, "connection");
                }
                return;
            }
            () = quiet(&requests, &begun, limits.first_request, limits.idle) => self.metrics.cut("idle"),
            () = self.close.cancelled() => {}
        }
        // HTTP/2 says GOAWAY and HTTP/1.1 `connection: close`; requests that are under way go on.
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            // How it ends no longer matters.
            _ = connection.as_mut() => {}
            () = quiet(&requests, &begun, limits.first_request, limits.first_request) => {}
        }
    }
}

/// Resolves when there has been no first request for so long, or no further one for so long after the last has ended.
async fn quiet(requests: &TaskTracker, begun: &Notify, first: Duration, further: Duration) {
    let mut limit = first;
    loop {
        requests.wait().await;
        if timeout(limit, begun.notified()).await.is_err() {
            return;
        }
        limit = further;
    }
}

#[cfg(test)]
mod tests;
