//! Clients for the API server. Every request has a timeout, the number of concurrent requests is limited, and all
//! requests are counted.

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

/// Timeout for the start of an answer, and between two chunks. The API server's own timeout is one minute.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(65);
/// Timeout for a watch without data. The API server closes kube's watches after five minutes.
const WATCH_IDLE_TIMEOUT: Duration = Duration::from_secs(330);
/// Timeout for the renewal of a Lease. A later renewal is useless.
const LEASE_RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The clients of a service.
#[derive(Clone)]
pub struct Clients {
    /// For requests outside of workers: certificates, checks, cleanup. It retries when the API server is overloaded.
    pub retrying: Client,
    /// For watches, whose gaps must be visible, and for workers, whose queue retries. It does not retry.
    pub direct: Client,
    /// For Leases only, so that other requests do not delay a renewal. It does not retry and has a short timeout.
    pub lease: Client,
}

impl Clients {
    /// Clients with this configuration. Each has at most `in_flight` concurrent requests.
    pub fn new(config: &Config, user_agent: &str, in_flight: usize, metrics: &Metrics) -> kube::Result<Self> {
        let make = |retry: bool, limit: Duration, in_flight: usize| -> kube::Result<Client> {
            let mut config = config.clone();
            config.default_retry = retry;
            config.connect_timeout = Some(limit.min(Duration::from_secs(10)));
            if let Ok(agent) = user_agent.parse() {
                config.headers.push((http::header::USER_AGENT, agent));
            }
            Ok(with_limits(ClientBuilder::try_from(config)?, limit, in_flight, metrics))
        };
        Ok(Self {
            retrying: make(true, RESPONSE_TIMEOUT, in_flight)?,
            direct: make(false, RESPONSE_TIMEOUT, in_flight)?,
            lease: make(false, LEASE_RESPONSE_TIMEOUT, 4)?,
        })
    }
}

/// Builds a client with timeouts, a limit on concurrent requests, and counters. A request counts as in flight until its
/// answer starts, so that open watches do not count.
fn with_limits<S, B>(
    builder: ClientBuilder<S>,
    limit: Duration,
    in_flight: usize,
    metrics: &Metrics,
) -> Client
where
    S: Service<Request<Body>, Response = Response<B>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    builder
        .with_layer(&TimeoutLayer::new(limit))
        .with_layer(&layer_fn(|inner| Instrumented { inner, metrics: metrics.clone(), limit }))
        .with_layer(&ConcurrencyLimitLayer::new(in_flight))
        .build()
}

impl Clients {
    /// Clients that reject writes after this leadership has ended. The client for Leases is not restricted.
    #[must_use]
    pub fn fenced(&self, leadership: &Leadership) -> Self {
        Self {
            retrying: leadership.fence(&self.retrying),
            direct: leadership.fence(&self.direct),
            lease: self.lease.clone(),
        }
    }
}

/// Counts requests by verb and status code, and sets a timeout for answers that stall.
struct Instrumented<S> {
    inner: S,
    metrics: Metrics,
    limit: Duration,
}

impl<S, B> Service<Request<Body>> for Instrumented<S>
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
        let idle_timeout = if verb == "watch" { WATCH_IDLE_TIMEOUT } else { self.limit };
        let started = Instant::now();
        // Requests outside of a reconcile, such as Lease renewals, have no span.
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
            metrics.request(verb, code, started.elapsed());
            Ok(answer?.map(|body| TimeoutBody::new(idle_timeout, body)))
        };
        Box::pin(answered.instrument(span))
    }
}

/// The verb of a request, as the API server names it.
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
    fn requests_have_the_verbs_of_the_api_server() {
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

    /// A body that sends one chunk and then stalls.
    struct StalledBody(Option<Bytes>);

    impl http_body::Body for StalledBody {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<Bytes>, BoxError>>> {
            self.0.take().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(http_body::Frame::data(data)))))
        }
    }

    /// A client with one concurrent request, for an API server whose answers stall.
    fn client() -> Client {
        let service = tower::service_fn(|_: Request<Body>| async {
            Ok::<_, BoxError>(Response::new(StalledBody(Some(Bytes::from_static(b"{")))))
        });
        with_limits(ClientBuilder::new(service, "default"), RESPONSE_TIMEOUT, 1, &Metrics::new("test", "0"))
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_response_times_out() {
        let pods: Api<Pod> = Api::default_namespaced(client());
        let got =
            tokio::time::timeout(RESPONSE_TIMEOUT * 2, pods.get("x")).await.expect("the request times out");
        assert!(got.is_err());
        let mut watch = pods.watch(&WatchParams::default(), "0").await.unwrap().boxed();
        let idle = tokio::time::timeout(RESPONSE_TIMEOUT, watch.next()).await;
        assert!(idle.is_err(), "a watch may be idle for longer");
        let ended =
            tokio::time::timeout(WATCH_IDLE_TIMEOUT, watch.next()).await.expect("the watch times out too");
        assert!(ended.is_none_or(|event| event.is_err()));
    }

    #[tokio::test(start_paused = true)]
    async fn open_watch_does_not_count_as_in_flight() {
        let pods: Api<Pod> = Api::default_namespaced(client());
        let _watches = [
            pods.watch(&WatchParams::default(), "0").await.unwrap().boxed(),
            pods.watch(&WatchParams::default(), "0").await.unwrap().boxed(),
        ];
        let other =
            tokio::time::timeout(RESPONSE_TIMEOUT / 2, pods.watch(&WatchParams::default(), "0")).await;
        assert!(other.expect("open watches do not count as in flight").is_ok());
    }
}
