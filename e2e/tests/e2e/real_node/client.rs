//! A client of a Service, in the network of a real node. It sends requests at a steady rate, no matter how long the
//! responses take, and each on a new connection.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use haulout_e2e::RealNode;
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1;
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::SOON;

/// A request that takes longer has failed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait between requests until the first one succeeds.
const PAUSE: Duration = Duration::from_millis(50);

/// What happened to the requests of a client.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// Number of requests that were sent.
    pub sent: u32,
    /// Number of responses by name of the pod.
    pub responses: BTreeMap<String, u32>,
    /// Why requests failed, and how often.
    pub failures: BTreeMap<String, u32>,
    /// The longest time to a response.
    pub slowest: Duration,
    /// The time in which the requests were sent. Set when the client has stopped.
    pub duration: Option<Duration>,
}

impl Results {
    fn record(&mut self, result: Result<String>, took: Duration) {
        match result {
            Ok(pod) => {
                *self.responses.entry(pod).or_default() += 1;
                self.slowest = self.slowest.max(took);
            }
            Err(error) => *self.failures.entry(format!("{error:#}")).or_default() += 1,
        }
    }

    /// Number of responses and failures.
    pub fn completed(&self) -> u32 {
        self.responses.values().chain(self.failures.values()).sum()
    }

    /// Number of responses of this pod.
    pub fn of(&self, pod: &str) -> u32 {
        self.responses.get(pod).copied().unwrap_or_default()
    }
}

/// A running client.
pub struct Client {
    results: watch::Receiver<Results>,
    stop: CancellationToken,
}

impl Client {
    /// Starts a client on this node, and waits until the server responds.
    pub async fn start(node: &RealNode, server: SocketAddr, per_second: u32) -> Self {
        let (sender, results) = watch::channel(Results::default());
        let stop = CancellationToken::new();
        let (interval, stopped) = (Duration::from_secs(1) / per_second, stop.clone());
        node.run_in_network(move || async move {
            // kube-proxy does not know the Service from the first moment.
            while get(server).await.is_err() && !stopped.is_cancelled() {
                tokio::time::sleep(PAUSE).await;
            }
            send(server, interval, Arc::new(sender), stopped).await;
        })
        .unwrap();
        let client = Self { results, stop };
        client.until("the server responds", |results| !results.responses.is_empty()).await;
        client
    }

    /// Waits until the results meet the condition.
    pub async fn until(&self, what: &str, condition: impl Fn(&Results) -> bool) -> Results {
        let mut results = self.results.clone();
        let Ok(found) = timeout(SOON, results.wait_for(condition)).await else {
            panic!("timed out waiting until {what}: {:?}", self.results.borrow());
        };
        found.unwrap().clone()
    }

    /// Waits until all requests of the next second are completed.
    pub async fn continue_for_a_second(&self, per_second: u32) {
        let number = self.results.borrow().sent + per_second;
        self.until("a second has passed", |results| results.completed() >= number).await;
    }

    /// Stops it and waits for all responses.
    pub async fn stop(self) -> Results {
        self.stop.cancel();
        self.until("the client has stopped", |results| results.duration.is_some()).await
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Sends requests until it is stopped.
async fn send(
    server: SocketAddr,
    interval: Duration,
    results: Arc<watch::Sender<Results>>,
    stop: CancellationToken,
) {
    let (begun, mut requests) = (Instant::now(), JoinSet::new());
    for number in 0.. {
        // A late request does not delay those after it.
        if stop.run_until_cancelled(sleep_until(begun + interval * number)).await.is_none() {
            break;
        }
        results.send_modify(|results| results.sent += 1);
        let results = Arc::clone(&results);
        requests.spawn(async move {
            let begun = Instant::now();
            let result = timeout(TIMEOUT, get(server)).await.context("timed out").flatten();
            results.send_modify(|results| results.record(result, begun.elapsed()));
        });
        while requests.try_join_next().is_some() {}
    }
    let duration = begun.elapsed();
    requests.join_all().await;
    results.send_modify(|results| results.duration = Some(duration));
}

/// One request on a connection of its own. Returns the body of the response.
async fn get(server: SocketAddr) -> Result<String> {
    let stream = TcpStream::connect(server).await.context("failed to connect")?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.context("failed to connect")?;
    // Its errors are those of the request, too.
    tokio::spawn(connection);
    let request =
        Request::get("/").header(header::HOST, server.to_string()).header(header::CONNECTION, "close");
    let response = sender.send_request(request.body(Empty::<Bytes>::new())?).await.context("no response")?;
    let status = response.status();
    ensure!(status == StatusCode::OK, "status {status}");
    let body = response.into_body().collect().await.context("incomplete response")?.to_bytes();
    Ok(String::from_utf8(body.to_vec())?)
}
