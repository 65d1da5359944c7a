//! Tests of the reflector with a scripted API server: which requests it sends, how it handles the answers, and which gaps it
//! reports. Most tests use the pod cache, some a typed kind.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::Response;
use http_body::Frame;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::*;
use crate::pods::testing::{Json, pod, uid};
use crate::pods::{Continuity, PodCache};
use k8s_openapi::api::core::v1::Namespace;

/// One answer of the scripted API server.
enum Answer {
    /// This status and object.
    Object(u16, Value),
    /// A watch that sends the received chunks, and breaks on `Err`.
    Watch(mpsc::UnboundedReceiver<Result<Bytes, std::io::Error>>),
    /// The connection is refused.
    Unreachable,
}

/// A body that ends when its sender is dropped.
struct Streamed(mpsc::UnboundedReceiver<Result<Bytes, std::io::Error>>);

impl http_body::Body for Streamed {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| piece.map(Frame::data)))
    }
}

/// The requests that were sent, as verb and relevant parameters.
type SentRequests = Arc<Mutex<Vec<String>>>;

/// Returns the answers in order, and then never answers.
#[derive(Clone)]
struct Script {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    sent: SentRequests,
}

impl tower::Service<http::Request<kube::client::Body>> for Script {
    type Response = Response<Streamed>;
    type Error = std::io::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<kube::client::Body>) -> Self::Future {
        let parameters = request.uri().query().unwrap_or_default().split('&');
        let relevant = ["continue=", "resourceVersion="];
        let shown: Vec<_> = parameters.filter(|p| relevant.iter().any(|t| p.starts_with(t))).collect();
        let watch = request.uri().query().unwrap_or_default().contains("watch=true");
        let what = if watch { "watch" } else { "list" };
        self.sent.lock().unwrap().push(format!("{what} {}", shown.join(" ")).trim_end().to_owned());
        let answer = self.answers.lock().unwrap().pop_front();
        Box::pin(async move {
            let (status, receiver) = match answer {
                Some(Answer::Object(status, object)) => {
                    let (sender, receiver) = mpsc::unbounded_channel();
                    sender.send(Ok(Bytes::from(object.to_string()))).unwrap();
                    (status, receiver)
                }
                Some(Answer::Watch(receiver)) => (200, receiver),
                Some(Answer::Unreachable) => return Err(std::io::ErrorKind::ConnectionRefused.into()),
                None => std::future::pending().await,
            };
            Ok(Response::builder().status(status).body(Streamed(receiver)).unwrap())
        })
    }
}

fn client(answers: impl IntoIterator<Item = Answer>) -> (Client, SentRequests) {
    let sent = SentRequests::default();
    let answers = Arc::new(Mutex::new(answers.into_iter().collect()));
    let script = Script { answers, sent: Arc::clone(&sent) };
    (Client::new(script, "default"), sent)
}

fn start(answers: impl IntoIterator<Item = Answer>) -> (PodCache, SentRequests) {
    let (cache, sent, _) = start_counted(answers);
    (cache, sent)
}

fn start_counted(answers: impl IntoIterator<Item = Answer>) -> (PodCache, SentRequests, Metrics) {
    let (client, sent) = client(answers);
    let metrics = Metrics::new("test", "0");
    (PodCache::start(client, metrics.clone()), sent, metrics)
}

fn list(version: &str, more: &str, pods: impl IntoIterator<Item = Json>) -> Answer {
    let items: Vec<_> = pods.into_iter().map(|pod| pod.0).collect();
    Answer::Object(200, json!({"metadata": {"resourceVersion": version, "continue": more}, "items": items}))
}

/// A watch that sends these events in small chunks and then ends as given.
fn watch(events: impl IntoIterator<Item = (&'static str, Json)>, end: End) -> Answer {
    let (sender, receiver) = mpsc::unbounded_channel();
    for (kind, object) in events {
        let line = format!("{}\n", json!({"type": kind, "object": object.0}));
        for piece in line.as_bytes().chunks(50) {
            sender.send(Ok(Bytes::copy_from_slice(piece))).unwrap();
        }
    }
    match end {
        End::Closes => {}
        End::Breaks => sender.send(Err(std::io::ErrorKind::ConnectionReset.into())).unwrap(),
        End::Stays => std::mem::forget(sender),
    }
    Answer::Watch(receiver)
}

enum End {
    Closes,
    Breaks,
    Stays,
}

fn expired(code: u16) -> Json {
    Json(json!({"kind": "Status", "metadata": {}, "status": "Failure", "message": "too old", "code": code}))
}

fn at(n: u32, version: &str) -> Json {
    pod(n).with("/metadata/resourceVersion", version)
}

/// Waits in the paused time of the test, which advances when all tasks are idle.
async fn eventually(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(3600);
    while !condition() {
        assert!(Instant::now() < deadline, "it did not happen");
        sleep(Duration::from_millis(10)).await;
    }
}

async fn wait_for_requests(sent: &SentRequests, times: usize) -> Vec<String> {
    eventually(|| sent.lock().unwrap().len() >= times).await;
    sent.lock().unwrap().clone()
}

async fn wait_for(cache: &PodCache, mut condition: impl FnMut(&Continuity) -> bool) -> Continuity {
    *cache.watch_continuity().wait_for(|continuity| condition(continuity)).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn list_is_paged_and_watch_continues_from_it() {
    let (cache, sent) = start([
        list("7", "page-2", [at(1, "1")]),
        list("7", "", [at(2, "2")]),
        watch([("ADDED", at(3, "8")), ("MODIFIED", at(1, "9")), ("DELETED", at(2, "10"))], End::Stays),
    ]);
    cache.ready().await;
    eventually(|| cache.read().get(uid(2)).is_none()).await;
    let mut present: Vec<_> =
        cache.read().iter().map(|pod| (pod.uid, pod.resource_version().unwrap())).collect();
    present.sort();
    assert_eq!(present, [(uid(1), "9".into()), (uid(3), "8".into())]);
    assert_eq!(*sent.lock().unwrap(), ["list", "list continue=page-2", "watch resourceVersion=7"]);
    assert_eq!(cache.continuity(), Continuity { ready: true, ..Continuity::default() });
    let late = cache.subscribe().changes().await;
    assert_eq!(late.len(), 2, "a late subscriber receives all existing pods");
}

#[tokio::test(start_paused = true)]
async fn closed_watch_resumes_without_a_gap() {
    let bookmark = Json(json!({"kind": "Pod", "metadata": {"resourceVersion": "12"}}));
    let (cache, sent, metrics) = start_counted([
        list("7", "", []),
        watch([("ADDED", at(1, "8"))], End::Closes),
        watch([("BOOKMARK", bookmark)], End::Closes),
        watch([], End::Stays),
    ]);
    let sent = wait_for_requests(&sent, 4).await;
    assert_eq!(sent[1..], ["watch resourceVersion=7", "watch resourceVersion=8", "watch resourceVersion=12"]);
    assert_eq!((metrics.watch_restarts("pods"), cache.relists(), cache.continuity().gaps), (2, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn broken_watch_causes_a_gap_until_it_resumes() {
    let (cache, sent, metrics) = start_counted([
        list("7", "", [at(1, "1")]),
        watch([("ADDED", at(2, "8"))], End::Breaks),
        Answer::Unreachable,
        Answer::Object(503, json!({"kind": "Status", "message": "starting", "code": 503})),
        watch([], End::Stays),
    ]);
    let open = wait_for(&cache, |continuity| continuity.gap_since.is_some()).await;
    assert_eq!((open.gaps, open.last_gap_ended), (1, None));
    let closed = wait_for(&cache, |continuity| continuity.last_gap_ended.is_some()).await;
    assert_eq!((closed.gaps, closed.gap_since), (1, None));
    assert_eq!(
        sent.lock().unwrap()[1..],
        [
            "watch resourceVersion=7",
            "watch resourceVersion=8",
            "watch resourceVersion=8",
            "watch resourceVersion=8"
        ]
    );
    assert_eq!((metrics.watch_restarts("pods"), cache.relists(), cache.read().len()), (3, 0, 2));
}

#[tokio::test(start_paused = true)]
async fn expired_version_causes_a_gap_and_a_relist() {
    let answers_410 = [
        ("as an event", watch([("ERROR", expired(410))], End::Stays)),
        ("as an answer", Answer::Object(410, expired(410).0)),
    ];
    for (how, answer) in answers_410 {
        let (cache, sent, metrics) = start_counted([
            list("7", "", [at(1, "1"), at(2, "2")]),
            answer,
            list("20", "", [at(2, "2"), at(3, "19")]),
            watch([], End::Stays),
        ]);
        let mut changes = cache.subscribe();
        let gap = wait_for(&cache, |continuity| continuity.last_gap_ended.is_some()).await;
        assert_eq!((gap.gaps, gap.gap_since), (1, None), "{how}");
        assert_eq!(
            sent.lock().unwrap()[1..],
            ["watch resourceVersion=7", "list", "watch resourceVersion=20"],
            "{how}"
        );
        assert_eq!((metrics.watch_restarts("pods"), cache.relists()), (1, 1), "{how}");
        let mut reported: Vec<_> =
            changes.changes().await.iter().map(|change| change.pod().unwrap().uid).collect();
        reported.sort();
        assert_eq!(
            reported,
            [uid(2), uid(3)],
            "{how}: a pod that was added and deleted between two calls is not reported"
        );
        assert!(cache.read().get(uid(1)).is_none(), "{how}");
    }
}

#[tokio::test(start_paused = true)]
async fn failed_list_restarts_and_deletes_nothing() {
    let (cache, sent) = start([
        list("7", "", [at(1, "1"), at(2, "2")]),
        Answer::Object(410, expired(410).0),
        list("20", "page-2", [at(2, "2")]),
        Answer::Object(410, expired(410).0),
        list("30", "page-2", [at(1, "1")]),
        list("30", "", [at(2, "2")]),
        watch([], End::Stays),
    ]);
    let mut changes = cache.subscribe();
    assert_eq!(
        wait_for(&cache, |continuity| continuity.last_gap_ended.is_some()).await.gaps,
        1,
        "it is one gap"
    );
    assert_eq!(
        sent.lock().unwrap()[2..],
        ["list", "list continue=page-2", "list", "list continue=page-2", "watch resourceVersion=30"]
    );
    assert!(changes.changes().await.iter().all(|change| change.old.is_none() && change.new.is_some()));
    assert_eq!(cache.read().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn cache_is_not_ready_before_the_first_list() {
    let (cache, sent) =
        start([Answer::Unreachable, Answer::Object(403, json!({"message": "no"})), list("7", "", [])]);
    assert_eq!(cache.continuity(), Continuity::default());
    cache.ready().await;
    assert_eq!(cache.continuity().gaps, 0);
    assert_eq!(wait_for_requests(&sent, 4).await, ["list", "list", "list", "watch resourceVersion=7"]);
}

/// A connection may die at any time, also before the first bookmark of a watch.
#[tokio::test(start_paused = true)]
async fn half_open_watch_is_detected_within_90_seconds() {
    let bookmark = || ("BOOKMARK", Json(json!({"metadata": {"resourceVersion": "9"}})));
    let silent = || watch([], End::Stays);
    let cases = [
        ("before any bookmark", vec![silent()]),
        ("after a bookmark", vec![watch([bookmark()], End::Stays)]),
        ("in the next watch", vec![watch([bookmark()], End::Closes), silent()]),
        ("again and again", vec![watch([bookmark()], End::Stays), silent()]),
    ];
    for (when, watches) in cases {
        let watched = watches.len();
        let (cache, sent) = start([list("7", "", [])].into_iter().chain(watches));
        wait_for_requests(&sent, 1 + watched).await;
        let started = Instant::now();
        wait_for_requests(&sent, 2 + watched).await;
        let took = started.elapsed().as_secs();
        assert!((60..=90).contains(&took), "{when}: {took}");
        assert!(cache.continuity().gaps >= 1, "{when}");
    }
}

#[tokio::test(start_paused = true)]
async fn watches_that_close_at_once_back_off() {
    let mut answers = vec![list("7", "", [])];
    answers.extend((0..10).map(|_| watch([], End::Closes)));
    let (_cache, sent) = start(answers);
    let started = Instant::now();
    wait_for_requests(&sent, 12).await;
    assert!(started.elapsed() >= Duration::from_secs(20), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn versions_that_expire_at_once_back_off() {
    let again = || [list("7", "", []), Answer::Object(410, expired(410).0)];
    let (_cache, sent) = start((0..10).flat_map(|_| again()));
    let started = Instant::now();
    wait_for_requests(&sent, 20).await;
    assert!(started.elapsed() >= Duration::from_secs(20), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn watch_ends_with_its_last_user() {
    let (sender, receiver) = mpsc::unbounded_channel();
    let (cache, sent) = start([list("7", "", []), Answer::Watch(receiver)]);
    wait_for_requests(&sent, 2).await;
    let changes = cache.subscribe();
    drop(cache);
    tokio::task::yield_now().await;
    assert!(!sender.is_closed(), "somebody still listens");
    drop(changes);
    sender.closed().await;
}

/// What a typed handler was called with.
#[derive(Default)]
struct Calls(Mutex<Vec<String>>);

impl Calls {
    fn add(&self, call: impl Into<String>) {
        self.0.lock().unwrap().push(call.into());
    }
}

impl Handler<Namespace> for Calls {
    type Key = Arc<str>;

    fn apply(&self, key: Arc<str>, object: Namespace) {
        let labels = object.metadata.labels.unwrap_or_default();
        self.add(format!("apply {key} {}", labels.into_values().collect::<String>()).trim_end());
    }
    fn unreadable(&self, key: Arc<str>, problem: Unreadable) {
        assert!(problem.error.contains("expected"), "{}", problem.error);
        self.add(format!("unreadable {key} {}", problem.metadata.uid.unwrap_or_default()));
    }
    fn delete(&self, key: Arc<str>) {
        self.add(format!("delete {key}"));
    }
    fn interrupted(&self, ago: Duration) {
        self.add(format!("interrupted {} s ago", ago.as_secs()));
    }
    fn resumed(&self) {
        self.add("resumed");
    }
}

fn namespace(name: &str, version: &str, labels: Value) -> Json {
    let metadata = json!({"name": name, "uid": "u1", "resourceVersion": version, "labels": labels});
    Json(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}))
}

#[tokio::test(start_paused = true)]
async fn typed_handler_gets_objects_deletions_and_gaps() {
    let (client, sent) = client([
        list("7", "", [namespace("a", "1", json!({"x": "1"})), namespace("odd", "2", json!("none"))]),
        watch(
            [
                ("MODIFIED", namespace("a", "8", json!({"x": "2"}))),
                ("BOOKMARK", Json(json!({"kind": "Namespace", "metadata": {"resourceVersion": "9"}}))),
                ("ADDED", namespace("odd", "10", json!(5))),
                ("DELETED", namespace("odd", "11", json!(5))),
                ("ADDED", namespace("", "12", json!({}))),
            ],
            End::Breaks,
        ),
        Answer::Object(410, expired(410).0),
        list("20", "", [namespace("b", "15", json!({}))]),
        watch([], End::Stays),
    ]);
    let (calls, synced) = (Arc::new(Calls::default()), CancellationToken::new());
    let source = Source::<Namespace>::all("namespaces").labels("team");
    let metrics = Metrics::new("test", "0");
    let running = run(client, source, Arc::clone(&calls), metrics, synced.clone());
    let ended = calls.clone();
    tokio::select! {
        () = running => panic!("it ended"),
        () = eventually(move || ended.0.lock().unwrap().len() >= 10) => {}
    }
    assert!(synced.is_cancelled());
    assert_eq!(
        *calls.0.lock().unwrap(),
        [
            "apply a 1",
            "unreadable odd u1",
            "resumed",
            "apply a 2",
            "unreadable odd u1",
            "delete odd",
            "interrupted 0 s ago",
            "apply b",
            "delete a",
            "resumed",
        ]
    );
    let requests =
        ["list", "watch resourceVersion=7", "watch resourceVersion=12", "list", "watch resourceVersion=20"];
    assert_eq!(*sent.lock().unwrap(), requests);
}

#[test]
fn event_fields_are_read_in_any_order() {
    for text in [r#"{"type":"ADDED","object":{"a":[1]}}"#, r#"{"object":{"a":[1]},"type":"ADDED"}"#] {
        let event: Event<'_> = serde_json::from_str(text).unwrap();
        assert_eq!((event.kind.get(), event.object.get()), (Some("ADDED"), r#"{"a":[1]}"#));
    }
}
