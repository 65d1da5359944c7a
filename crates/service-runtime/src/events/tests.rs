//! Which events reach the API server, and how they look there.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::Value;
use tower::service_fn;

use super::*;

/// What the API server was asked to do, in order.
type Asked = Arc<Mutex<Vec<(Method, Value)>>>;

/// A recorder whose events go to an API server that answers with these codes, and then with 200.
fn start(
    codes: impl Into<Vec<u16>>,
) -> (Events, Asked, Metrics, CancellationToken, tokio::task::JoinHandle<()>) {
    let asked = Asked::default();
    let (log, codes) = (Arc::clone(&asked), Arc::new(Mutex::new(codes.into().into_iter())));
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
    (events, asked, metrics, stop, task)
}

fn news(name: &str, note: &str) -> News {
    News {
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

async fn until_asked(asked: &Asked, times: usize) -> Vec<(Method, Value)> {
    let wait = async {
        while asked.lock().unwrap().len() < times {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("it is asked in time");
    asked.lock().unwrap().clone()
}

#[tokio::test]
async fn an_event_after_a_long_silence_carries_the_time_at_which_it_happened() {
    let (events, asked, ..) = start([]);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let before = Timestamp::now();
    events.publish(news("a", "x"));
    let written = until_asked(&asked, 1).await;
    let time: Timestamp = written[0].1["eventTime"].as_str().unwrap().parse().unwrap();
    assert!(time.as_microsecond() >= before.as_microsecond(), "{time} is before {before}");
}

#[tokio::test]
async fn a_note_is_as_long_as_the_api_server_takes_it_in_bytes() {
    let (events, asked, ..) = start([]);
    let cases = ["x".repeat(1024), "x".repeat(1025), "ä".repeat(600), format!("x{}", "…".repeat(1500))];
    for note in &cases {
        events.publish(news("a", note));
    }
    for ((_, event), note) in until_asked(&asked, cases.len()).await.iter().zip(&cases) {
        let written = event["note"].as_str().unwrap();
        let start = written.strip_suffix('…').unwrap_or(written);
        assert!(written.len() <= 1024 && written.len() >= note.len().min(1019), "{} bytes", written.len());
        assert!(note.starts_with(start) || note == written, "{written}");
    }
}

#[tokio::test]
async fn an_event_that_could_not_be_written_is_written_when_it_happens_again() {
    for code in [500, 404] {
        let (events, asked, metrics, ..) = start([code]);
        events.publish(news("a", "x"));
        until_asked(&asked, 1).await;
        let dropped = || metrics.encode().unwrap().contains("events_dropped_total 1");
        while !dropped() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        events.publish(news("a", "x"));
        let methods: Vec<_> = until_asked(&asked, 2).await.into_iter().map(|(method, _)| method).collect();
        assert_eq!(methods, [Method::POST, Method::POST], "{code}");
    }
}

#[tokio::test]
async fn what_waits_for_its_time_is_written_at_the_end() {
    let (events, asked, _, stop, task) = start([]);
    events.publish(news("a", "x"));
    until_asked(&asked, 1).await;
    for _ in 0..9 {
        events.publish(news("a", "x"));
    }
    for number in 0..100 {
        events.publish(news(&format!("pod-{number}"), "y"));
    }
    stop.cancel();
    task.await.unwrap();
    let asked = asked.lock().unwrap();
    let counts: Vec<_> = asked.iter().filter_map(|(_, body)| body["series"]["count"].as_i64()).collect();
    assert_eq!(counts.last(), Some(&10), "{counts:?}");
    // How many get an event of their own depends on how much time has passed; nobody is left out.
    let notes: Vec<_> = asked.iter().filter_map(|(_, body)| body["note"].as_str()).collect();
    let of_their_own = notes.iter().filter(|note| note.starts_with('y')).count();
    let others =
        |note: &&str| note.split_once("the like for ")?.1.split_once(" others")?.0.parse::<usize>().ok();
    let others: usize = notes.iter().filter_map(others).sum();
    assert_eq!(of_their_own + others, 100, "{:?}", asked.last());
    assert!(others > 0, "they were not too many");
}
