//! Clients of the API server: every request has a timeout, a bounded number is under way at once, and all
//! are counted.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::{Method, Request, Response};
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use tower::limit::ConcurrencyLimitLayer;
use tower::timeout::TimeoutLayer;
use tower::{BoxError, Layer, Service};

use crate::lease::Leadership;
use crate::metrics::Metrics;

/// How long the API server may take to begin its answer. It gives up on its own requests after a minute.
const ANSWER_LIMIT: Duration = Duration::from_secs(65);
/// How long a renewal of a lease may take: later it would be of no use.
const LEASE_ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// The clients of a service.
#[derive(Clone)]
pub struct Clients {
    /// For reading, watching and most writing. Retries what the API server was too busy for.
    pub retrying: Client,
    /// For evictions, whose refusals mean something: it tries once.
    pub direct: Client,
    /// For leases alone, so that no burst of other requests delays a renewal. Tries once, and soon gives up.
    pub lease: Client,
}

impl Clients {
    /// Clients with this configuration, with at most `in_flight` requests each at once.
    pub fn new(config: &Config, user_agent: &str, in_flight: usize, metrics: &Metrics) -> kube::Result<Self> {
        let make = |retry: bool, limit: Duration, in_flight: usize| -> kube::Result<Client> {
            let mut config = config.clone();
            config.default_retry = retry;
            config.connect_timeout = Some(limit.min(Duration::from_secs(10)));
            if let Ok(agent) = user_agent.parse() {
                config.headers.push((http::header::USER_AGENT, agent));
            }
            let counted = CountLayer(metrics.clone());
            Ok(ClientBuilder::try_from(config)?
                .with_layer(&TimeoutLayer::new(limit))
                .with_layer(&counted)
                .with_layer(&ConcurrencyLimitLayer::new(in_flight))
                .build())
        };
        Ok(Self {
            retrying: make(true, ANSWER_LIMIT, in_flight)?,
            direct: make(false, ANSWER_LIMIT, in_flight)?,
            lease: make(false, LEASE_ANSWER_LIMIT, 4)?,
        })
    }
}

impl Clients {
    /// The same clients, which refuse to write once this leadership has ended. The lease's own does not.
    #[must_use]
    pub fn fenced(&self, leadership: &Leadership) -> Self {
        Self {
            retrying: leadership.fence(&self.retrying),
            direct: leadership.fence(&self.direct),
            lease: self.lease.clone(),
        }
    }
}

/// Counts requests by what they do and how they were answered.
#[derive(Clone, Debug)]
struct CountLayer(Metrics);

impl<S> Layer<S> for CountLayer {
    type Service = Count<S>;

    fn layer(&self, inner: S) -> Count<S> {
        Count { inner, metrics: self.0.clone() }
    }
}

#[derive(Clone, Debug)]
struct Count<S> {
    inner: S,
    metrics: Metrics,
}

impl<S, B> Service<Request<Body>> for Count<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let verb = verb(request.method(), request.uri().query().unwrap_or_default());
        let metrics = self.metrics.clone();
        let begun = Instant::now();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            let code = answer.as_ref().ok().map(|answer| answer.status().as_u16());
            metrics.request(verb, code, begun.elapsed());
            answer
        })
    }
}

/// What a request does, in the API server's words.
fn verb(method: &Method, query: &str) -> &'static str {
    match *method {
        Method::GET if query.split('&').any(|part| matches!(part, "watch=true" | "watch=1")) => "watch",
        Method::GET => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_called_what_the_api_server_calls_them() {
        let verbs = [
            (Method::GET, ""),
            (Method::GET, "limit=500&watch=true"),
            (Method::GET, "labelSelector=watch%3Dtrue"),
            (Method::POST, ""),
            (Method::PUT, ""),
            (Method::PATCH, ""),
            (Method::DELETE, ""),
            (Method::HEAD, ""),
        ]
        .map(|(method, query)| verb(&method, query));
        assert_eq!(verbs, ["get", "watch", "get", "create", "update", "patch", "delete", "other"]);
    }
}
