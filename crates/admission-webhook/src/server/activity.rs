//! Whether anything is being asked on a connection, so that those can be closed that only hold a place.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use axum::routing::future::RouteFuture;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::Request;
use tokio::time::{Instant, sleep_until};
use tower::Service;

/// What has been asked on one connection.
#[derive(Debug)]
pub(super) struct Activity(Mutex<State>);

#[derive(Debug)]
struct State {
    asked: bool,
    under_way: usize,
    last: Instant,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { asked: false, under_way: 0, last: Instant::now() }))
    }

    /// Resolves when there has been no first request for so long, or no further one for so long.
    pub(super) async fn quiet(&self, first: Duration, further: Duration) {
        let begun = Instant::now();
        loop {
            let (until, due) = {
                let state = self.state();
                let limit = if state.asked { further } else { first };
                let now = Instant::now();
                let since = if state.under_way == 0 { state.last.max(begun) } else { now };
                (since + limit, state.under_way == 0 && now >= since + limit)
            };
            if due {
                return;
            }
            sleep_until(until).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request that is under way.
struct UnderWay(Arc<Activity>);

impl UnderWay {
    fn begin(activity: &Arc<Activity>) -> Self {
        let mut state = activity.state();
        state.asked = true;
        state.under_way += 1;
        Self(Arc::clone(activity))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.under_way -= 1;
        state.last = Instant::now();
    }
}

/// The router, with requests noted.
pub(super) fn watched(router: Router, activity: &Arc<Activity>) -> Watched {
    Watched { router, activity: Arc::clone(activity) }
}

#[derive(Clone)]
pub(super) struct Watched {
    router: Router,
    activity: Arc<Activity>,
}

impl<B> Service<Request<B>> for Watched
where
    Router:
        Service<Request<B>, Response = Response<Body>, Error = Infallible, Future = RouteFuture<Infallible>>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.router.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let under_way = UnderWay::begin(&self.activity);
        let answer = self.router.call(request);
        async move {
            let answer = answer.await;
            drop(under_way);
            answer
        }
        .boxed()
    }
}
