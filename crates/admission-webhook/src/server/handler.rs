//! Handles one request: reads its body within limits, parses the review and responds. An internal failure or an invalid
//! request is not a verdict: the response has a code outside of 2xx, and the API server applies the `failurePolicy`.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request as HttpRequest;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures::FutureExt as _;
use haulout_service_runtime::server::{Connection, Memory, OutOfMemory};
use http::{StatusCode, Uri, header};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Frame, SizeHint};
use kube::core::Status;
use serde_json::json;
use tokio::time::{Instant, timeout_at};
use tracing::{debug, error, warn};

use super::{BUFFER_SIZE, Limits};
use crate::metrics::Metrics;
use crate::review::{self, Admit, Hook, Operation, Request};

/// Memory of a request without its body.
const REQUEST_SIZE: usize = 16 << 10;
/// The rules get a copy of the objects in a body.
const COPIES: usize = 2;
/// Default of `timeoutSeconds` in the API server.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum of `timeoutSeconds` in the API server.
const MAX_TIMEOUT: Duration = Duration::from_secs(30);

struct Handler<A> {
    admit: A,
    body: usize,
    metrics: Metrics,
}

/// What is known of a request so far, for errors and metrics.
#[derive(Default)]
struct RequestInfo {
    uid: Option<String>,
    operation: Option<Operation>,
}

/// An error instead of a verdict.
type Failure = Box<Status>;

fn failure(code: StatusCode, reason: &str, message: &str) -> Failure {
    Status::failure(message, reason).with_code(code.as_u16()).boxed()
}

fn bad_request(message: &str) -> Failure {
    failure(StatusCode::BAD_REQUEST, "BadRequest", message)
}

fn internal(message: &str) -> Failure {
    failure(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message)
}

/// Responds with a review if the request's UID is known, otherwise with a Kubernetes `Status`.
fn failure_response(status: &Status, uid: Option<&str>) -> Response {
    let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let body = match uid {
        Some(uid) => review::failure(uid, status),
        None => serde_json::to_vec(&json!({
            "apiVersion": "v1", "kind": "Status", "status": "Failure",
            "code": status.code, "reason": status.reason, "message": status.message,
        })),
    };
    json_response(code, body.unwrap_or_default().into())
}

/// Serves every webhook under its path.
pub(super) fn router(admit: impl Admit, limits: &Limits, metrics: Metrics) -> Router {
    let handler = Arc::new(Handler { admit, body: limits.body, metrics });
    let route = |router: Router, hook: Hook| {
        let handler = Arc::clone(&handler);
        router.route(&hook.path(), post(async move |request| handler.answer(hook, request).await))
    };
    Hook::ALL.into_iter().fold(Router::new(), route).fallback(async |uri: Uri| {
        let path: String = uri.path().chars().take(80).collect();
        let message = format!(
            "{path} is not a webhook path of Haulout: check clientConfig in the webhook \
                               configuration"
        );
        failure_response(&failure(StatusCode::NOT_FOUND, "NotFound", &message), None)
    })
}

impl<A: Admit> Handler<A> {
    async fn answer(&self, hook: Hook, request: HttpRequest) -> Response {
        let mut known = RequestInfo::default();
        let review = AssertUnwindSafe(self.review(hook, request, &mut known)).catch_unwind();
        let status = match review.await {
            Ok(Ok(response)) => return response,
            Ok(Err(status)) => status,
            Err(_) => {
                // The panic hook has logged the panic itself.
                error!(?hook, known.uid, "admission rule panicked");
                internal("Haulout's admission webhook failed: see its log")
            }
        };
        // Anybody who can connect can send invalid requests, and must not be able to fill the log with them.
        if status.code >= 500 {
            warn!(?hook, status.code, status.message, "admission request failed");
        } else {
            debug!(?hook, status.code, status.message, "admission request failed");
        }
        self.metrics.failed(hook, known.operation);
        failure_response(&status, known.uid.as_deref())
    }

    async fn review(
        &self,
        hook: Hook,
        http: HttpRequest,
        known: &mut RequestInfo,
    ) -> Result<Response, Failure> {
        let deadline = Instant::now() + budget(http.uri());
        let connection = http.extensions().get::<Connection>().cloned();
        let connection = connection.ok_or_else(|| internal("the request has no connection"))?;
        let read = self.read(http.into_body(), connection.memory());
        let (body, mut memory) = timeout_at(deadline, read).await.map_err(|_| {
            let message = "the request body was not received within timeoutSeconds, or too many large requests were \
                           waiting";
            failure(StatusCode::REQUEST_TIMEOUT, "Timeout", message)
        })??;
        let _work = connection.work();
        let started = Instant::now();
        let request = review::read(&body).map_err(|error| {
            known.uid = error.uid;
            bad_request(&error.problem)
        })?;
        drop(body);
        let (uid, operation) = (request.uid.clone(), request.operation);
        *known = RequestInfo { uid: Some(uid.clone()), operation: Some(operation) };
        check_resource(hook, &request)?;
        let budget = deadline.saturating_duration_since(started);
        let verdict = timeout_at(deadline, self.admit.admit(hook, request, budget)).await.map_err(|_| {
            let message = "Haulout's admission webhook did not reach a verdict within timeoutSeconds";
            failure(StatusCode::GATEWAY_TIMEOUT, "Timeout", message)
        })?;
        let answer = review::answer(&uid, &verdict)
            .map_err(|error| internal(&format!("failed to serialize the response: {error}")))?;
        self.metrics.answered(hook, operation, &verdict, started.elapsed());
        memory.shrink_to(REQUEST_SIZE.max(answer.len()));
        Ok(json_response(StatusCode::OK, Body::new(Answer { rest: answer.into(), _memory: memory })))
    }

    /// The whole body and the memory that it reserved.
    async fn read(&self, mut body: Body, mut memory: Memory) -> Result<(Vec<u8>, Memory), Failure> {
        let too_large = || {
            let message = format!("the request body has more than {} bytes", self.body);
            failure(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", &message)
        };
        let announced = usize::try_from(body.size_hint().lower()).ok().filter(|length| *length <= self.body);
        let announced = announced.ok_or_else(too_large)?;
        let busy = |OutOfMemory| {
            let message = "too many large requests are in progress";
            failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", message)
        };
        // All of the announced length at once. Otherwise, large requests could wait for each other with parts of it.
        memory.grow_to(REQUEST_SIZE.max(COPIES * announced)).await.map_err(busy)?;
        let mut whole = Vec::with_capacity(announced);
        while let Some(frame) = body.frame().await {
            let frame =
                frame.map_err(|error| bad_request(&format!("failed to read the request body: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            let length = whole.len() + data.len();
            if length > self.body {
                return Err(too_large());
            }
            if length > whole.capacity() {
                let capacity = length.next_power_of_two().min(self.body);
                memory.grow_to(COPIES * capacity).await.map_err(busy)?;
                whole.reserve_exact(capacity - whole.len());
            }
            whole.extend_from_slice(&data);
        }
        Ok((whole, memory))
    }
}

/// A response that keeps its memory reserved until the client has received it. Its pieces are small, so that little of
/// it is in other buffers.
struct Answer {
    rest: Bytes,
    _memory: Memory,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let length = self.rest.len().min(BUFFER_SIZE);
        let piece = self.rest.split_to(length);
        Poll::Ready((!piece.is_empty()).then(|| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

/// Nine tenths of the API server's timeout, which is in the query. A later response would be lost.
fn budget(uri: &Uri) -> Duration {
    let seconds = uri.query().unwrap_or_default().split('&').find_map(|pair| {
        let value = pair.strip_prefix("timeout=")?.strip_suffix('s')?;
        value.parse().ok().filter(|seconds| *seconds > 0)
    });
    let all = seconds.map_or(DEFAULT_TIMEOUT, Duration::from_secs).min(MAX_TIMEOUT);
    all * 9 / 10
}

/// A wrong webhook configuration would otherwise apply the rules of another kind.
fn check_resource(hook: Hook, request: &Request) -> Result<(), Failure> {
    let resource = &request.resource;
    if resource.resource == hook.resource() && resource.group == hook.group() {
        return Ok(());
    }
    let received: String = format!("{}.{}", resource.resource, resource.group).chars().take(160).collect();
    let (path, expected) = (hook.path(), hook.resource());
    Err(bad_request(&format!("{path} handles {expected}, not {received}: check the webhook configuration")))
}

fn json_response(code: StatusCode, body: Body) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

#[cfg(test)]
mod tests;
