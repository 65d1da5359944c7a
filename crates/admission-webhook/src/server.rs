//! Accepts connections, enforces their limits and closes them gracefully. `handler` has the HTTP requests, `tls` the
//! encryption.

mod handler;
pub mod tls;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use haulout_service_runtime::server::{Connection, ConnectionLimits, Listener, MAX_CONNECTIONS, Stream};
use http::{HeaderValue, header};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Service as _;
use tracing::{debug, info, warn};

use self::tls::Tls;
use crate::metrics::Metrics;
use crate::review::Admit;

/// How much a client may send on an HTTP/2 connection before the server has read it. An API server sends a larger body
/// in several round trips.
const WINDOW: u32 = 64 << 10;
/// Size of the headers of a request, and of what is buffered of a body and of a response on their way.
const BUFFER_SIZE: usize = 16 << 10;

/// Limits of the server. The defaults are for production; tests use smaller ones.
///
/// All connections together hold at most 64 MiB: 48 MiB for requests and responses (`memory`), and 16 MiB for what
/// clients send and the server has not read (256 connections of `WINDOW`). HTTP/2 allows half as much again for the
/// overhead of small frames, and TLS needs at most 64 KiB of buffers per connection, usually none. Not included are the
/// parsed objects of the requests that are being processed. `memory` limits how many there are: three of the largest size.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Concurrent connections. A new connection beyond them replaces an idle one. An API server uses HTTP/1.1 for a
    /// Service: one connection per concurrent request.
    pub connections: usize,
    /// Concurrent requests on one HTTP/2 connection, which API servers use for a loopback address.
    pub streams: u32,
    /// Duration of a TLS handshake.
    pub handshake: Duration,
    /// Time from the handshake to the first request, and time to finish after the server closes the connection.
    pub first_request: Duration,
    /// Idle time without a request. The API server closes its own idle connections after 90 s. A POST on a closing
    /// HTTP/1.1 connection fails, so this has to be longer.
    pub idle: Duration,
    /// Size of a request body. The API server accepts objects of up to 3 MiB, and an update contains the old object
    /// too.
    pub body: usize,
    /// Total size of concurrent requests and of responses that clients have not received. Large ones wait for each
    /// other. Slow ones are closed for others.
    pub memory: usize,
    /// How long a client may refuse to receive anything.
    pub write: Duration,
    /// How long new connections are accepted after a stop is requested, because endpoints take time to update.
    pub accept_after_stop: Duration,
    /// How long running requests may take after that.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: MAX_CONNECTIONS,
            streams: 32,
            handshake: Duration::from_secs(5),
            first_request: Duration::from_secs(5),
            idle: Duration::from_secs(120),
            body: 8 << 20,
            memory: 48 << 20,
            write: Duration::from_secs(5),
            accept_after_stop: Duration::from_secs(3),
            drain: Duration::from_secs(4),
        }
    }
}

/// State shared by all connections.
pub struct Server {
    router: Router,
    tls: Tls,
    limits: Limits,
    metrics: Metrics,
    /// A stop is requested: each HTTP/1.1 connection serves one more request.
    stop: CancellationToken,
    close: CancellationToken,
}

impl Server {
    /// Creates a server. Call `serve` to run it.
    pub fn new(admit: impl Admit, tls: Tls, limits: Limits, metrics: Metrics) -> Self {
        let router = handler::router(admit, &limits, metrics.clone());
        let (stop, close) = (CancellationToken::new(), CancellationToken::new());
        Self { router, tls, limits, metrics, stop, close }
    }

    /// Serves until `stop` is cancelled, then drains the connections.
    pub async fn serve(mut self, listener: TcpListener, stop: CancellationToken) {
        self.stop = stop.clone();
        let server = Arc::new(self);
        let connections = TaskTracker::new();
        let Limits { connections: most, memory, write, .. } = server.limits;
        let listener = Listener::new(listener, ConnectionLimits { connections: most, memory, write });
        let accept = async {
            loop {
                connections.spawn(Arc::clone(&server).connection(listener.next().await));
            }
        };
        let stopped = async {
            stop.cancelled().await;
            tokio::time::sleep(server.limits.accept_after_stop).await;
        };
        tokio::select! {
            () = accept => {}
            () = stopped => {}
        }
        // New connections are refused at once, so that API servers do not wait in a handshake that nobody answers.
        drop(listener);
        info!(connections = connections.len(), "closing connections");
        server.close.cancel();
        connections.close();
        if timeout(server.limits.drain, connections.wait()).await.is_err() {
            warn!(connections = connections.len(), "closing connections that did not finish in time");
        }
    }

    async fn connection(self: Arc<Self>, stream: Stream) {
        let _counted = self.metrics.connection();
        // Responses are small and clients wait for them. If this fails, they are only a little slower.
        let _ = stream.tcp().set_nodelay(true);
        let connection = stream.connection().clone();
        tokio::select! {
            () = self.tls(stream, &connection) => {}
            _ = connection.closed() => {}
        }
        if let Some(cause) = connection.close_cause() {
            self.metrics.closed(cause.label());
        }
    }

    async fn tls(&self, stream: Stream, connection: &Connection) {
        match timeout(self.limits.handshake, self.tls.acceptor().accept(stream)).await {
            Ok(Ok(stream)) => self.http(stream, connection).await,
            Ok(Err(error)) => {
                debug!(%error, "TLS handshake failed");
                self.metrics.closed("handshake_failed");
            }
            Err(_) => self.metrics.closed("handshake_timeout"),
        }
    }

    async fn http(&self, stream: TlsStream<Stream>, connection: &Connection) {
        let limits = &self.limits;
        let mut http = auto::Builder::new(TokioExecutor::new());
        http.http1().timer(TokioTimer::new()).header_read_timeout(limits.idle).max_buf_size(BUFFER_SIZE);
        http.http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(10))
            .max_concurrent_streams(limits.streams)
            .max_header_list_size(16 << 10)
            .max_send_buf_size(BUFFER_SIZE)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW);
        // ALPN determines the protocol, so no client can keep the server waiting for a first byte to detect it.
        let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        let http = if is_http2 { http.http2_only() } else { http.http1_only() };
        let (requests, started) = (TaskTracker::new(), Notify::new());
        // New requests can still start. Closing lets `wait` return when there are none.
        requests.close();
        let service = service_fn(|mut request: http::Request<Incoming>| {
            started.notify_one();
            connection.receives_request();
            request.extensions_mut().insert(connection.clone());
            let response = requests.track_future(self.router.clone().call(request));
            let stop = self.stop.clone();
            async move {
                let mut response = response.await?;
                // Otherwise the client could send its next request just when we close the connection.
                if !is_http2 && stop.is_cancelled() {
                    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(response)
            }
        });
        let mut served = pin!(http.serve_connection(TokioIo::new(stream), service));
        tokio::select! {
            ended = served.as_mut() => {
                if let Err(error) = ended {
                    debug!(%error, "connection failed");
                }
                return;
            }
            () = wait_until_idle(&requests, &started, limits.first_request, limits.idle) => self.metrics.closed("idle"),
            () = self.close.cancelled() => {}
        }
        // HTTP/2 sends GOAWAY and HTTP/1.1 `connection: close`. Running requests continue.
        served.as_mut().graceful_shutdown();
        tokio::select! {
            // The result no longer matters.
            _ = served.as_mut() => {}
            () = wait_until_idle(&requests, &started, limits.first_request, limits.first_request) => {}
        }
    }
}

/// Resolves when there is no request within `first`, or within `further` after the last request has finished.
async fn wait_until_idle(requests: &TaskTracker, started: &Notify, first: Duration, further: Duration) {
    let mut limit = first;
    loop {
        requests.wait().await;
        if timeout(limit, started.notified()).await.is_err() {
            return;
        }
        limit = further;
    }
}

#[cfg(test)]
mod tests;
