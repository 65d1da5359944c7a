//! One request: its body within limits, its review, its answer. Whatever happens, there is one: a failure of ours
//! or of the sender's is no verdict, so that it is answered with a code outside of 2xx, for which the API server
//! does what the `failurePolicy` says.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request as HttpRequest;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures::FutureExt as _;
use http::{StatusCode, Uri, header};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use kube::core::Status;
use serde_json::json;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};
use tracing::{debug, error};

use super::Limits;
use crate::metrics::Metrics;
use crate::review::{self, Admit, Hook, Operation, Request};

/// In these steps a body takes its share of the memory for all bodies.
const STEP: usize = 64 << 10;
/// What the API server takes for `timeoutSeconds` when it does not say.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest that it allows.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(30);

struct Handler<A> {
    admit: A,
    body: usize,
    /// Room for bodies, in steps.
    room: Semaphore,
    metrics: Metrics,
}

/// What is known of a request that is being answered.
#[derive(Default)]
struct Known {
    uid: Option<String>,
    operation: Option<Operation>,
}

/// Why there is no verdict.
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

/// A review where the request is known, and else a Kubernetes `Status`.
fn failure_response(status: &Status, uid: Option<&str>) -> Response {
    let code = StatusCode::from_u16(status.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let body = match uid {
        Some(uid) => review::failure(uid, status),
        None => serde_json::to_vec(&json!({
            "apiVersion": "v1", "kind": "Status", "status": "Failure",
            "code": status.code, "reason": status.reason, "message": status.message,
        })),
    };
    json_response(code, body.unwrap_or_default())
}

/// Serves every webhook under its path.
pub(super) fn router(admit: impl Admit, limits: &Limits, metrics: Metrics) -> Router {
    let room = Semaphore::new(limits.bodies.div_ceil(STEP));
    let handler = Arc::new(Handler { admit, body: limits.body, room, metrics });
    let route = |router: Router, hook: Hook| {
        let handler = Arc::clone(&handler);
        router.route(&hook.path(), post(async move |request| handler.answer(hook, request).await))
    };
    Hook::ALL.into_iter().fold(Router::new(), route).fallback(async |uri: Uri| {
        let path: String = uri.path().chars().take(80).collect();
        let message = format!("{path} is no webhook of ours: check clientConfig of the configuration");
        failure_response(&failure(StatusCode::NOT_FOUND, "NotFound", &message), None)
    })
}

impl<A: Admit> Handler<A> {
    async fn answer(&self, hook: Hook, request: HttpRequest) -> Response {
        let mut known = Known::default();
        let review = AssertUnwindSafe(self.review(hook, request, &mut known)).catch_unwind();
        let status = match review.await {
            Ok(Ok(response)) => return response,
            Ok(Err(status)) => status,
            Err(_) => {
                // The panic itself has been printed by the hook.
                error!(?hook, known.uid, "a rule panicked");
                internal("Haulout's admission webhook failed: its log says more")
            }
        };
        debug!(?hook, status.code, status.message, "no verdict");
        self.metrics.failed(hook, known.operation);
        failure_response(&status, known.uid.as_deref())
    }

    async fn review(&self, hook: Hook, http: HttpRequest, known: &mut Known) -> Result<Response, Failure> {
        let deadline = Instant::now() + budget(http.uri());
        let (body, _held) = timeout_at(deadline, self.read(http.into_body())).await.map_err(|_| {
            let message = "the body did not come, or there was no room for it, within timeoutSeconds";
            failure(StatusCode::REQUEST_TIMEOUT, "Timeout", message)
        })??;
        let begun = Instant::now();
        let request = review::read(&body).map_err(|error| {
            known.uid = error.uid;
            bad_request(&error.problem)
        })?;
        drop(body);
        let (uid, operation) = (request.uid.clone(), request.operation);
        *known = Known { uid: Some(uid.clone()), operation: Some(operation) };
        directed_here(hook, &request)?;
        let budget = deadline.saturating_duration_since(begun);
        let verdict = timeout_at(deadline, self.admit.admit(hook, request, budget)).await.map_err(|_| {
            let message = "Haulout's admission webhook came to no verdict within timeoutSeconds";
            failure(StatusCode::GATEWAY_TIMEOUT, "Timeout", message)
        })?;
        let answer = review::answer(&uid, &verdict)
            .map_err(|error| internal(&format!("writing the answer: {error}")))?;
        self.metrics.answered(hook, operation, &verdict, begun.elapsed());
        Ok(json_response(StatusCode::OK, answer))
    }

    /// The whole body, together with its share of the memory.
    async fn read(&self, mut body: Body) -> Result<(Vec<u8>, Vec<SemaphorePermit<'_>>), Failure> {
        let too_large = || {
            let message = format!("the body has more than {} bytes", self.body);
            failure(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", &message)
        };
        if !usize::try_from(body.size_hint().lower()).is_ok_and(|announced| announced <= self.body) {
            return Err(too_large());
        }
        let (mut whole, mut held) = (Vec::new(), Vec::new());
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| bad_request(&format!("reading the body: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            let length = whole.len() + data.len();
            if length > self.body {
                return Err(too_large());
            }
            let steps = length.div_ceil(STEP) - whole.len().div_ceil(STEP);
            if let Ok(steps @ 1..) = u32::try_from(steps) {
                // It fails only if the semaphore is closed, which it never is.
                held.extend(self.room.acquire_many(steps).await);
            }
            whole.extend_from_slice(&data);
        }
        Ok((whole, held))
    }
}

/// Nine tenths of the time after which the API server gives up, which it tells in the query: an answer that comes
/// as it goes is lost.
fn budget(uri: &Uri) -> Duration {
    let seconds = uri.query().unwrap_or_default().split('&').find_map(|pair| {
        let value = pair.strip_prefix("timeout=")?.strip_suffix('s')?;
        value.parse().ok().filter(|seconds| *seconds > 0)
    });
    let all = seconds.map_or(DEFAULT_TIMEOUT, Duration::from_secs).min(LONGEST_TIMEOUT);
    all * 9 / 10
}

/// A configuration that sends something else here would be judged by the wrong rules.
fn directed_here(hook: Hook, request: &Request) -> Result<(), Failure> {
    let resource = &request.resource;
    if resource.resource == hook.resource() && resource.group == hook.group() {
        return Ok(());
    }
    let shown: String = format!("{}.{}", resource.resource, resource.group).chars().take(160).collect();
    let (path, judged) = (hook.path(), hook.resource());
    Err(bad_request(&format!("{path} judges {judged}, not {shown}: check the webhook configuration")))
}

fn json_response(code: StatusCode, body: Vec<u8>) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

#[cfg(test)]
mod tests;
