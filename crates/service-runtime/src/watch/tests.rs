//! The reflector against an API server that follows a script: which requests it makes, what it makes of the answers,
//! and which gaps it reports. Most tests use the pod cache, some a typed kind.

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
    /// A watch that sends what comes out of here, and breaks on `Err`.
    Watch(mpsc::UnboundedReceiver<Result<Bytes, std::io::Error>>),
    /// No connection at all.
    Unreachable,
}

/// A body that ends when its sender goes.
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

/// What was asked for, as path and query without what is always the same.
type Asked = Arc<Mutex<Vec<String>>>;

/// Gives the answers one after the other, and then none.
#[derive(Clone)]
struct Script {
    answers: Arc<Mutex<VecDeque<Answer>>>,
    asked: Asked,
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
        let telling = ["continue=", "resourceVersion="];
        let told: Vec<_> = parameters.filter(|p| telling.iter().any(|t| p.starts_with(t))).collect();
        let watch = request.uri().query().unwrap_or_default().contains("watch=true");
        let what = if watch { "watch" } else { "list" };
        self.asked.lock().unwrap().push(format!("{what} {}", told.join(" ")).trim_end().to_owned());
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

fn client(answers: impl IntoIterator<Item = Answer>) -> (Client, Asked) {
    let asked = Asked::default();
    let answers = Arc::new(Mutex::new(answers.into_iter().collect()));
    let script = Script { answers, asked: Arc::clone(&asked) };
    (Client::new(script, "default"), asked)
}

fn start(answers: impl IntoIterator<Item = Answer>) -> (PodCache, Asked) {
    let (cache, asked, _) = start_counted(answers);
    (cache, asked)
}

fn start_counted(answers: impl IntoIterator<Item = Answer>) -> (PodCache, Asked, Metrics) {
    let (client, asked) = client(answers);
    let metrics = Metrics::new("test", "0");
    (PodCache::start(client, metrics.clone()), asked, metrics)
}

fn list(version: &str, more: &str, pods: impl IntoIterator<Item = Json>) -> Answer {
    let items: Vec<_> = pods.into_iter().map(|pod| pod.0).collect();
    Answer::Object(200, json!({"metadata": {"resourceVersion": version, "continue": more}, "items": items}))
}

/// A watch that sends these events, cut into small pieces, and then ends as told.
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

/// Waits, in the test's own time, which passes when nothing else does.
async fn eventually(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(3600);
    while !condition() {
        assert!(Instant::now() < deadline, "it did not happen");
        sleep(Duration::from_millis(10)).await;
    }
}

async fn until_asked(asked: &Asked, times: usize) -> Vec<String> {
    eventually(|| asked.lock().unwrap().len() >= times).await;
    asked.lock().unwrap().clone()
}

async fn until(cache: &PodCache, mut condition: impl FnMut(&Continuity) -> bool) -> Continuity {
    *cache.watch_continuity().wait_for(|continuity| condition(continuity)).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_list_comes_in_pages_and_the_watch_goes_on_from_it() {
    let (cache, asked) = start([
        list("7", "page-2", [at(1, "1")]),
        list("7", "", [at(2, "2")]),
        watch([("ADDED", at(3, "8")), ("MODIFIED", at(1, "9")), ("DELETED", at(2, "10"))], End::Stays),
    ]);
    cache.ready().await;
    eventually(|| cache.read().get(uid(2)).is_none()).await;
    let mut there: Vec<_> =
        cache.read().iter().map(|pod| (pod.uid, pod.resource_version().unwrap())).collect();
    there.sort();
    assert_eq!(there, [(uid(1), "9".into()), (uid(3), "8".into())]);
    assert_eq!(*asked.lock().unwrap(), ["list", "list continue=page-2", "watch resourceVersion=7"]);
    assert_eq!(cache.continuity(), Continuity { ready: true, ..Continuity::default() });
    let late = cache.subscribe().changes().await;
    assert_eq!(late.len(), 2, "who comes late is told of all that is there");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_is_closed_is_resumed_where_it_ended_without_a_gap() {
    let bookmark = Json(json!({"kind": "Pod", "metadata": {"resourceVersion": "12"}}));
    let (cache, asked, metrics) = start_counted([
        list("7", "", []),
        watch([("ADDED", at(1, "8"))], End::Closes),
        watch([("BOOKMARK", bookmark)], End::Closes),
        watch([], End::Stays),
    ]);
    let asked = until_asked(&asked, 4).await;
    assert_eq!(
        asked[1..],
        ["watch resourceVersion=7", "watch resourceVersion=8", "watch resourceVersion=12"]
    );
    assert_eq!((metrics.watch_restarts("pods"), cache.relists(), cache.continuity().gaps), (2, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_breaks_makes_a_gap_until_it_works_again() {
    let (cache, asked, metrics) = start_counted([
        list("7", "", [at(1, "1")]),
        watch([("ADDED", at(2, "8"))], End::Breaks),
        Answer::Unreachable,
        Answer::Object(503, json!({"kind": "Status", "message": "starting", "code": 503})),
        watch([], End::Stays),
    ]);
    let open = until(&cache, |continuity| continuity.gap_since.is_some()).await;
    assert_eq!((open.gaps, open.last_gap_ended), (1, None));
    let closed = until(&cache, |continuity| continuity.last_gap_ended.is_some()).await;
    assert_eq!((closed.gaps, closed.gap_since), (1, None));
    assert_eq!(
        asked.lock().unwrap()[1..],
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
async fn an_expired_version_makes_a_gap_and_a_new_list() {
    let answers_410 = [
        ("as an event", watch([("ERROR", expired(410))], End::Stays)),
        ("as an answer", Answer::Object(410, expired(410).0)),
    ];
    for (how, answer) in answers_410 {
        let (cache, asked, metrics) = start_counted([
            list("7", "", [at(1, "1"), at(2, "2")]),
            answer,
            list("20", "", [at(2, "2"), at(3, "19")]),
            watch([], End::Stays),
        ]);
        let mut changes = cache.subscribe();
        let gap = until(&cache, |continuity| continuity.last_gap_ended.is_some()).await;
        assert_eq!((gap.gaps, gap.gap_since), (1, None), "{how}");
        assert_eq!(
            asked.lock().unwrap()[1..],
            ["watch resourceVersion=7", "list", "watch resourceVersion=20"],
            "{how}"
        );
        assert_eq!((metrics.watch_restarts("pods"), cache.relists()), (1, 1), "{how}");
        let mut told: Vec<_> =
            changes.changes().await.iter().map(|change| change.pod().unwrap().uid).collect();
        told.sort();
        assert_eq!(told, [uid(2), uid(3)], "{how}: what came and went meanwhile is not told");
        assert!(cache.read().get(uid(1)).is_none(), "{how}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_that_fails_halfway_begins_again_and_nothing_is_taken_for_gone() {
    let (cache, asked) = start([
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
        until(&cache, |continuity| continuity.last_gap_ended.is_some()).await.gaps,
        1,
        "it is one gap"
    );
    assert_eq!(
        asked.lock().unwrap()[2..],
        ["list", "list continue=page-2", "list", "list continue=page-2", "watch resourceVersion=30"]
    );
    assert!(changes.changes().await.iter().all(|change| change.old.is_none() && change.new.is_some()));
    assert_eq!(cache.read().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn it_is_not_ready_before_the_first_list_and_has_no_gap_before_either() {
    let (cache, asked) =
        start([Answer::Unreachable, Answer::Object(403, json!({"message": "no"})), list("7", "", [])]);
    assert_eq!(cache.continuity(), Continuity::default());
    cache.ready().await;
    assert_eq!(cache.continuity().gaps, 0);
    assert_eq!(until_asked(&asked, 4).await, ["list", "list", "list", "watch resourceVersion=7"]);
}

/// A connection may die at any time, also before the first bookmark of a watch.
#[tokio::test(start_paused = true)]
async fn half_open_watch_is_noticed_within_90_seconds() {
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
        let (cache, asked) = start([list("7", "", [])].into_iter().chain(watches));
        until_asked(&asked, 1 + watched).await;
        let begun = Instant::now();
        until_asked(&asked, 2 + watched).await;
        let took = begun.elapsed().as_secs();
        assert!((60..=90).contains(&took), "{when}: {took}");
        assert!(cache.continuity().gaps >= 1, "{when}");
    }
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_are_not_hammered() {
    let mut answers = vec![list("7", "", [])];
    answers.extend((0..10).map(|_| watch([], End::Closes)));
    let (_cache, asked) = start(answers);
    let begun = Instant::now();
    until_asked(&asked, 12).await;
    assert!(begun.elapsed() >= Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn versions_that_expire_at_once_are_not_hammered() {
    let again = || [list("7", "", []), Answer::Object(410, expired(410).0)];
    let (_cache, asked) = start((0..10).flat_map(|_| again()));
    let begun = Instant::now();
    until_asked(&asked, 20).await;
    assert!(begun.elapsed() >= Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_watch_ends_with_the_last_who_needs_it() {
    let (sender, receiver) = mpsc::unbounded_channel();
    let (cache, asked) = start([list("7", "", []), Answer::Watch(receiver)]);
    until_asked(&asked, 2).await;
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
    let (client, asked) = client([
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
    assert_eq!(*asked.lock().unwrap(), requests);
}

#[test]
fn events_are_read_in_any_order_of_their_fields() {
    for text in [r#"{"type":"ADDED","object":{"a":[1]}}"#, r#"{"object":{"a":[1]},"type":"ADDED"}"#] {
        let event: Event<'_> = serde_json::from_str(text).unwrap();
        assert_eq!((event.kind.get(), event.object.get()), (Some("ADDED"), r#"{"a":[1]}"#));
    }
}
