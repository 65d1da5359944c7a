//! Tests of the events that the API server receives.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::Value;
use tower::service_fn;

use super::*;

/// The requests to the API server, in order.
type SentRequests = Arc<Mutex<Vec<(Method, Value)>>>;

/// A publisher for an API server that answers with these codes, and then with 200.
fn start(
    codes: impl Into<Vec<u16>>,
) -> (Events, SentRequests, Metrics, CancellationToken, tokio::task::JoinHandle<()>) {
    let sent = SentRequests::default();
    let (log, codes) = (Arc::clone(&sent), Arc::new(Mutex::new(codes.into().into_iter())));
    let service = service_fn(move |request: Request<Body>| {
        let (log, code) = (Arc::clone(&log), codes.lock().unwrap().next().unwrap_or(200));
        async move {
            let (parts, body) = request.into_parts();
            let body = serde_json::from_slice(&body.collect_bytes().await?).unwrap();
            log.lock().unwrap().push((parts.method, body));
            let answer = match code {
                200 => serde_json::to_vec(&Event::default()).unwrap(),
                code => json!({"kind": "Status", "status": "Failure", "message": "no", "reason": "no", "code": code})
                    .to_string()
                    .into_bytes(),
            };
            Ok::<_, kube::Error>(Response::builder().status(code).body(Body::from(answer)).unwrap())
        }
    });
    let metrics = Metrics::new("test", "0");
    let client = Client::new(service, "default");
    let (events, writer) =
        Events::new(client, "haulout-test".into(), "test-1".into(), Clock::default(), metrics.clone());
    let stop = CancellationToken::new();
    let task = tokio::spawn(writer.run(stop.clone()));
    (events, sent, metrics, stop, task)
}

fn event(name: &str, note: &str) -> NewEvent {
    NewEvent {
        regarding: ObjectReference {
            name: Some(name.into()),
            uid: Some(name.into()),
            ..ObjectReference::default()
        },
        severity: Severity::Normal,
        reason: "Tested",
        action: "Test",
        note: note.into(),
    }
}

async fn wait_for_requests(sent: &SentRequests, times: usize) -> Vec<(Method, Value)> {
    let wait = async {
        while sent.lock().unwrap().len() < times {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("it is sent in time");
    sent.lock().unwrap().clone()
}

#[tokio::test]
async fn event_after_idle_time_has_its_own_timestamp() {
    let (events, sent, ..) = start([]);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let before = Timestamp::now();
    events.publish(event("a", "x"));
    let written = wait_for_requests(&sent, 1).await;
    let time: Timestamp = written[0].1["eventTime"].as_str().unwrap().parse().unwrap();
    assert!(time.as_microsecond() >= before.as_microsecond(), "{time} is before {before}");
}

#[tokio::test]
async fn note_is_truncated_to_the_api_server_limit() {
    let (events, sent, ..) = start([]);
    let cases = ["x".repeat(1024), "x".repeat(1025), "ä".repeat(600), format!("x{}", "…".repeat(1500))];
    for note in &cases {
        events.publish(event("a", note));
    }
    for ((_, event), note) in wait_for_requests(&sent, cases.len()).await.iter().zip(&cases) {
        let written = event["note"].as_str().unwrap();
        let start = written.strip_suffix('…').unwrap_or(written);
        assert!(written.len() <= 1024 && written.len() >= note.len().min(1019), "{} bytes", written.len());
        assert!(note.starts_with(start) || note == written, "{written}");
    }
}

#[tokio::test]
async fn failed_event_is_written_when_it_recurs() {
    for code in [500, 404] {
        let (events, sent, metrics, ..) = start([code]);
        events.publish(event("a", "x"));
        wait_for_requests(&sent, 1).await;
        let dropped = || metrics.encode().unwrap().contains("haulout_events_dropped_total 1");
        while !dropped() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        events.publish(event("a", "x"));
        let methods: Vec<_> =
            wait_for_requests(&sent, 2).await.into_iter().map(|(method, _)| method).collect();
        assert_eq!(methods, [Method::POST, Method::POST], "{code}");
    }
}

#[tokio::test]
async fn pending_events_are_written_at_shutdown() {
    let (events, sent, _, stop, task) = start([]);
    events.publish(event("a", "x"));
    wait_for_requests(&sent, 1).await;
    for _ in 0..9 {
        events.publish(event("a", "x"));
    }
    for number in 0..100 {
        events.publish(event(&format!("pod-{number}"), "y"));
    }
    stop.cancel();
    task.await.unwrap();
    let sent = sent.lock().unwrap();
    let counts: Vec<_> = sent.iter().filter_map(|(_, body)| body["series"]["count"].as_i64()).collect();
    assert_eq!(counts.last(), Some(&10), "{counts:?}");
    // The number of individual events depends on timing, but every object is counted.
    let notes: Vec<_> = sent.iter().filter_map(|(_, body)| body["note"].as_str()).collect();
    let of_their_own = notes.iter().filter(|note| note.starts_with('y')).count();
    let others =
        |note: &&str| note.split_once("(and ")?.1.split_once(" similar events")?.0.parse::<usize>().ok();
    let others: usize = notes.iter().filter_map(others).sum();
    assert_eq!(of_their_own + others, 100, "{:?}", sent.last());
    assert!(others > 0, "no event was suppressed");
}
