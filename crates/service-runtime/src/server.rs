//! The small HTTP server of every service: `/livez`, `/readyz`, `/metrics`.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::metrics::Metrics;

/// What a service still waits for before it is ready. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<BTreeSet<&'static str>>>);

impl Readiness {
    /// Says that the service is not ready because of this.
    pub fn wait_for(&self, what: &'static str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(what);
    }

    /// Says that this is no longer waited for.
    pub fn done(&self, what: &'static str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(what);
    }

    /// What is still waited for; the service is ready when it is nothing.
    pub fn missing(&self) -> Vec<&'static str> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
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

/// Listens on this address.
pub async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves until the order to stop.
pub async fn serve(listener: TcpListener, shown: Shown, stop: CancellationToken) -> std::io::Result<()> {
    let router = Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics));
    #[cfg(feature = "test-clock")]
    let router = router.route("/shift-clock", axum::routing::post(shift_clock));
    axum::serve(listener, router.with_state(shown))
        .with_graceful_shutdown(async move { stop.cancelled().await })
        .await
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
