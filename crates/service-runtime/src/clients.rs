//! Clients of the API server: every request has a timeout, a bounded number is under way at once, and all
//! are counted.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Response};
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use tower::layer::layer_fn;
use tower::limit::ConcurrencyLimitLayer;
use tower::timeout::TimeoutLayer;
use tower::{BoxError, Service};
use tower_http::timeout::TimeoutBody;
use tracing::field::Empty;
use tracing::{Instrument as _, Span, info_span};

use crate::lease::Leadership;
use crate::metrics::Metrics;

/// How long the API server may take to begin its answer, and to go on with it. It gives up on its own requests after a minute.
const ANSWER_LIMIT: Duration = Duration::from_secs(65);
/// How long a watch may be silent. The API server ends those of kube after five minutes.
const WATCH_SILENCE: Duration = Duration::from_secs(330);
/// How long a renewal of a lease may take: later it would be of no use.
const LEASE_ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// The clients of a service.
#[derive(Clone)]
pub struct Clients {
    /// For what no worker does: certificates, checks, clean-up. Retries what the API server was too busy for.
    pub retrying: Client,
    /// For watches, whose gaps must show, and for all that workers do: it tries once, and the queue tries again.
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
            Ok(limited(ClientBuilder::try_from(config)?, limit, in_flight, metrics))
        };
        Ok(Self {
            retrying: make(true, ANSWER_LIMIT, in_flight)?,
            direct: make(false, ANSWER_LIMIT, in_flight)?,
            lease: make(false, LEASE_ANSWER_LIMIT, 4)?,
        })
    }
}

/// With timeouts, a bound and counters around what it sends requests with. Only until an answer begins does a
/// request count as under way: a watch that goes on holds nobody up.
fn limited<S, B>(builder: ClientBuilder<S>, limit: Duration, in_flight: usize, metrics: &Metrics) -> Client
where
    S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    builder
        .with_layer(&TimeoutLayer::new(limit))
        .with_layer(&layer_fn(|inner| Oversee { inner, metrics: metrics.clone(), limit }))
        .with_layer(&ConcurrencyLimitLayer::new(in_flight))
        .build()
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

/// Counts requests by what they do and how they were answered, and gives up on answers that begin and stall.
struct Oversee<S> {
    inner: S,
    metrics: Metrics,
    limit: Duration,
}

impl<S, B> Service<Request<Body>> for Oversee<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = Response<TimeoutBody<B>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let verb = verb(request.method(), request.uri().query().unwrap_or_default());
        let metrics = self.metrics.clone();
        let silence = if verb == "watch" { WATCH_SILENCE } else { self.limit };
        let begun = Instant::now();
        // Requests that belong to no reconcile, such as renewals of the Lease, would be noise.
        let span = if Span::current().is_none() {
            Span::none()
        } else {
            info_span!("request", otel.kind = "client", verb, path = request.uri().path(), code = Empty)
        };
        let answer = self.inner.call(request);
        let answered = async move {
            let answer = answer.await;
            let code = answer.as_ref().ok().map(|answer| answer.status().as_u16());
            if let Some(code) = code {
                Span::current().record("code", code);
            }
            metrics.request(verb, code, begun.elapsed());
            Ok(answer?.map(|body| TimeoutBody::new(silence, body)))
        };
        Box::pin(answered.instrument(span))
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
    use futures::StreamExt as _;
    use k8s_openapi::api::core::v1::Pod;
    use kube::Api;
    use kube::api::WatchParams;

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

    /// An answer that says so much and then nothing for ever.
    struct Stalls(Option<Bytes>);

    impl http_body::Body for Stalls {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<Bytes>, BoxError>>> {
            self.0.take().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(http_body::Frame::data(data)))))
        }
    }

    /// A client, for one request at a time, of an API server whose answers stall.
    fn client() -> Client {
        let service = tower::service_fn(|_: Request<Body>| async {
            Ok::<_, BoxError>(Response::new(Stalls(Some(Bytes::from_static(b"{")))))
        });
        limited(ClientBuilder::new(service, "default"), ANSWER_LIMIT, 1, &Metrics::new("test", "0"))
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_begins_and_stalls_is_given_up() {
        let pods: Api<Pod> = Api::default_namespaced(client());
        let got = tokio::time::timeout(ANSWER_LIMIT * 2, pods.get("x")).await.expect("it is given up");
        assert!(got.is_err());
        let mut watch = pods.watch(&WatchParams::default(), "0").await.unwrap().boxed();
        let silent = tokio::time::timeout(ANSWER_LIMIT, watch.next()).await;
        assert!(silent.is_err(), "a watch may be silent for longer");
        let ended = tokio::time::timeout(WATCH_SILENCE, watch.next()).await.expect("but not for ever");
        assert!(ended.is_none_or(|event| event.is_err()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_goes_on_leaves_its_place_to_others() {
        let pods: Api<Pod> = Api::default_namespaced(client());
        let _watches = [
            pods.watch(&WatchParams::default(), "0").await.unwrap().boxed(),
            pods.watch(&WatchParams::default(), "0").await.unwrap().boxed(),
        ];
        let other = tokio::time::timeout(ANSWER_LIMIT / 2, pods.watch(&WatchParams::default(), "0")).await;
        assert!(other.expect("it has a place").is_ok());
    }
}
