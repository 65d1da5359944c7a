//! A service context for tests without a cluster: the API server answers as the test defines, and records writes.

pub mod fuzz;
mod schema;

use std::fmt;
use std::sync::Arc;

use http::{Method, Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::clients::Clients;
use crate::clock::Clock;
use crate::events::Events;
use crate::metrics::Metrics;
use crate::server::Readiness;
use crate::service::Context;

pub use self::schema::{status_violations, stored_bytes};

/// A request. It is displayed as its method and path.
#[derive(Clone, Debug)]
pub struct Call {
    /// Its HTTP method.
    pub method: Method,
    /// Its path, without the query.
    pub path: String,
    /// Its query.
    pub query: String,
    /// Its body; null if it has none.
    pub body: Value,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.path)
    }
}

impl Call {
    async fn read(request: Request<Body>) -> Self {
        let (parts, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap_or_default();
        Self {
            method: parts.method,
            path: parts.uri.path().to_owned(),
            query: parts.uri.query().unwrap_or_default().to_owned(),
            body: serde_json::from_slice(&body).unwrap_or_default(),
        }
    }
}

/// The recorded writes, in order.
#[derive(Clone, Debug, Default)]
pub struct Writes(Arc<Mutex<Vec<Call>>>);

impl Writes {
    /// All writes since the last call.
    pub fn take(&self) -> Vec<Call> {
        std::mem::take(&mut *self.0.lock())
    }

    /// The same, as methods and paths.
    pub fn take_names(&self) -> Vec<String> {
        self.take().iter().map(ToString::to_string).collect()
    }
}

/// The answer of an API server that rejects a request, with this code and message.
#[allow(clippy::unnecessary_wraps, reason = "it is the answer to a call")]
pub fn rejection(code: u16, message: &str) -> Option<(u16, Value)> {
    Some((code, json!({"kind": "Status", "code": code, "message": message, "reason": "Test"})))
}

/// A context whose API server answers with what `answer` returns: a status code and an object. For `None`, lists are empty,
/// watches are closed at once, and everything else is not found.
pub fn context(answer: impl Fn(&Call) -> Option<(u16, Value)> + Clone + Send + Sync + 'static) -> Context {
    start(answer, true).0
}

/// Like [`context`], with recorded writes, and watches that stay open.
pub fn recorded(
    answer: impl Fn(&Call) -> Option<(u16, Value)> + Clone + Send + Sync + 'static,
) -> (Context, Writes) {
    start(answer, false)
}

fn start(
    answer: impl Fn(&Call) -> Option<(u16, Value)> + Clone + Send + Sync + 'static,
    closes_watches: bool,
) -> (Context, Writes) {
    let writes = Writes::default();
    let record = writes.clone();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (answer, record) = (answer.clone(), record.clone());
        async move {
            let call = Call::read(request).await;
            let reads = call.method == Method::GET;
            if !reads {
                record.0.lock().push(call.clone());
            }
            let (status, body) = match answer(&call) {
                Some((status, object)) => (status, object.to_string()),
                None if call.query.contains("watch=true") && closes_watches => (200, String::new()),
                None if call.query.contains("watch=true") => std::future::pending().await,
                None if reads => {
                    (200, json!({"metadata": {"resourceVersion": "7"}, "items": []}).to_string())
                }
                None => (404, json!({"kind": "Status", "code": 404, "message": "not found"}).to_string()),
            };
            let mut response = Response::new(Body::from(body.into_bytes()));
            *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
            Ok::<_, kube::Error>(response)
        }
    });
    let (client, clock, metrics) =
        (Client::new(service, "default"), Clock::default(), Metrics::new("test", "0"));
    let (events, _) =
        Events::new(client.clone(), "haulout-test".into(), "test-1".into(), clock.clone(), metrics.clone());
    let context = Context {
        clients: Clients { retrying: client.clone(), direct: client.clone(), lease: client },
        clock,
        events,
        instance: "test-1".into(),
        name: "test",
        metrics,
        namespace: "default".into(),
        readiness: Readiness::default(),
        stop: CancellationToken::new(),
    };
    (context, writes)
}
