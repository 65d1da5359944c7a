//! A service without a cluster, for tests of what reconciles: an API server that answers as the test says.

use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::clients::Clients;
use crate::clock::Clock;
use crate::events::Events;
use crate::metrics::Metrics;
use crate::server::Readiness;
use crate::service::Context;

/// A service whose API server answers with what `answer` returns: a status and an object. Where that is `None`, lists are
/// empty, watches are closed at once, and everything else is not found.
pub fn context(
    answer: impl Fn(&Request<Body>) -> Option<(u16, Value)> + Clone + Send + Sync + 'static,
) -> Context {
    let service = tower::service_fn(move |request: Request<Body>| {
        let (status, body) = match answer(&request) {
            Some((status, object)) => (status, object.to_string()),
            None if request.uri().query().unwrap_or_default().contains("watch=true") => (200, String::new()),
            None if request.method() == http::Method::GET => {
                (200, json!({"metadata": {"resourceVersion": "7"}, "items": []}).to_string())
            }
            None => (404, json!({"kind": "Status", "code": 404, "message": "not found"}).to_string()),
        };
        let mut response = Response::new(Body::from(body.into_bytes()));
        *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
        async move { Ok::<_, kube::Error>(response) }
    });
    let (client, clock, metrics) =
        (Client::new(service, "default"), Clock::default(), Metrics::new("test", "0"));
    let (events, _) =
        Events::new(client.clone(), "haulout-test".into(), "test-1".into(), clock.clone(), metrics.clone());
    Context {
        clients: Clients { retrying: client.clone(), direct: client.clone(), lease: client },
        clock,
        events,
        instance: "test-1".into(),
        name: "test",
        metrics,
        namespace: "default".into(),
        readiness: Readiness::default(),
        stop: CancellationToken::new(),
    }
}
