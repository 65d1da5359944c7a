//! The lifecycle of a service, with the probe as example: its errors when it cannot start, its endpoints while it
//! runs, and how it stops.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use haulout_e2e::{Cluster, Handle, Process, objects, wait};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::{ListParams, PostParams};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::support::{shared, xtask};

const SOON: Duration = Duration::from_secs(30);

/// A running probe.
struct Probe {
    process: Process,
    log: PathBuf,
}

impl Probe {
    fn start(cluster: &Handle, namespace: &str, kubeconfig: &Path, args: &[&str]) -> Self {
        let log = cluster.logs.join(format!("service-{namespace}.log"));
        let process = cluster
            .command(&xtask().with_file_name("probe"))
            .args(["--listen", "127.0.0.1:0", "--namespace", namespace, "--instance", "probe-1"])
            .args(args)
            .env("KUBECONFIG", kubeconfig)
            .log(&log)
            .spawn("probe")
            .unwrap();
        Self { process, log }
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    async fn says(&self, what: &str) {
        let awaited = format!("the service says {what:?}");
        let wait = wait::eventually(&awaited, SOON, async || {
            Ok(self.text().lines().any(|line| line == what).then_some(()))
        });
        wait.await.unwrap_or_else(|error| panic!("{error:#}\n{}", self.text()));
    }

    /// The address on which it listens, from its log.
    async fn address(&self) -> String {
        wait::eventually("the service logs its address", SOON, async || {
            let text = self.text();
            let line = text.lines().find(|line| line.contains("\"listening\":"));
            let line = line.and_then(|line| serde_json::from_str::<serde_json::Value>(line).ok());
            Ok(line.and_then(|line| line["listening"].as_str().map(String::from)))
        })
        .await
        .unwrap()
    }

    async fn ask(&self, request: &str, body: &str) -> String {
        let address = self.address().await;
        let mut stream = tokio::net::TcpStream::connect(&address).await.unwrap();
        let length = body.len();
        let text = format!(
            "{request} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        );
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }
}

async fn namespace(cluster: &Handle, name: &str) {
    let api: Api<Namespace> = Api::all(cluster.client().await.unwrap());
    api.create(&PostParams::default(), &objects::namespace(name)).await.unwrap();
    // An object to publish events on.
    let maps: Api<k8s_openapi::api::core::v1::ConfigMap> =
        Api::namespaced(cluster.client().await.unwrap(), name);
    wait::present(maps, "kube-root-ca.crt", "exists", SOON, |_| true).await.unwrap();
}

/// Waits until the service exits. Returns its only line.
async fn rejection(probe: Probe) -> String {
    let status = tokio::time::timeout(SOON, probe.process.exited()).await.expect("the service exits");
    assert_eq!(status.code(), Some(1), "{}", probe.text());
    let text = probe.text();
    assert_eq!(text.lines().count(), 1, "{text}");
    text.trim().into()
}

#[tokio::test]
async fn missing_permission_is_named_in_one_line() {
    let cluster = shared().await;
    namespace(&cluster, "service-rights").await;
    for args in [
        &["create", "serviceaccount", "probe"][..],
        &["create", "role", "most", "--verb=get", "--resource=configmaps"],
        &["create", "rolebinding", "most", "--role=most", "--serviceaccount=service-rights:probe"],
        &[
            "create",
            "role",
            "leases",
            "--verb=get,list,watch,create",
            "--resource=leases.coordination.k8s.io",
        ],
        &["create", "rolebinding", "leases", "--role=leases", "--serviceaccount=service-rights:probe"],
        &["create", "role", "events", "--verb=create,patch", "--resource=events.events.k8s.io"],
        &["create", "rolebinding", "events", "--role=events", "--serviceaccount=service-rights:probe"],
    ] {
        cluster.kubectl(&[args, &["-n", "service-rights"]].concat()).await.unwrap().success().unwrap();
    }
    let config = cluster.service_account_kubeconfig("service-rights", "probe").await.unwrap();
    // New permissions apply a little later, all except the missing one.
    let expected = "haulout-probe: missing permissions: update leases in coordination.k8s.io in namespace service-rights \
                    named haulout-probe: \
                    grant them in the ClusterRole or Role of this service, as the chart does";
    let mut said = String::new();
    for _ in 0..10 {
        let log = cluster.logs.join("service-service-rights.log");
        let _ = std::fs::remove_file(log);
        said = rejection(Probe::start(&cluster, "service-rights", &config, &[])).await;
        if said == expected {
            break;
        }
    }
    assert_eq!(said, expected);
}

#[tokio::test]
async fn unreachable_cluster_is_reported_in_one_line() {
    let cluster = shared().await;
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = std::fs::read_to_string(&cluster.kubeconfig).unwrap();
    let nobody = format!("https://127.0.0.1:{port}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config");
    std::fs::write(&file, config.replace(&cluster.server, &nobody)).unwrap();
    let said = rejection(Probe::start(&cluster, "service-nobody", &file, &[])).await;
    assert!(
        said.starts_with(&format!("haulout-probe: failed to reach the API server at {nobody}/: ")),
        "{said}"
    );
}

/// The kernel does not even kill the first process of a container for a signal that it does not handle.
#[tokio::test]
async fn service_stops_while_the_api_server_hangs() {
    let cluster = shared().await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://{}", silent.local_addr().unwrap());
    let config = std::fs::read_to_string(&cluster.kubeconfig).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config");
    std::fs::write(&file, config.replace(&cluster.server, &address)).unwrap();
    let probe = Probe::start(&cluster, "service-silent", &file, &[]);
    let _connection = tokio::time::timeout(SOON, silent.accept()).await.expect("it connects").unwrap();
    probe.process.signal(Signal::TERM).unwrap();
    let status = tokio::time::timeout(SOON, probe.process.exited()).await.unwrap();
    assert_eq!(status.code(), Some(0), "{}", probe.text());
}

#[tokio::test]
async fn missing_kinds_are_reported_in_one_line() {
    let bare = Cluster::builder().name("bare").scheduler(false).kwok(false).boot().await.unwrap();
    let said = rejection(Probe::start(&bare, "default", &bare.kubeconfig, &[])).await;
    assert_eq!(
        said,
        "haulout-probe: the API server does not serve evacuations.evacuation.coordination.k8s.io v1alpha1: install the CRDs, \
         for example with `helm upgrade --install` and crds.install=true"
    );
    bare.shutdown().await;
}

#[tokio::test]
async fn service_serves_health_and_metrics_and_stops() {
    let cluster = shared().await;
    namespace(&cluster, "service-health").await;
    let probe = Probe::start(&cluster, "service-health", &cluster.kubeconfig, &[]);
    probe.says("probe: started leading").await;
    probe.says("probe: reconciled early").await;
    assert!(probe.ask("GET /livez", "").await.starts_with("HTTP/1.1 200 OK"));
    let ready = probe.ask("GET /readyz", "").await;
    assert!(ready.starts_with("HTTP/1.1 200 OK"), "{ready}");
    let metrics = probe.ask("GET /metrics", "").await;
    for line in [
        "haulout_build_info{service=\"probe\",version=",
        "leader_election_master_status{name=\"probe\"} 1",
        "workqueue_adds_total{name=\"probe\"} 1",
        "workqueue_work_duration_seconds_count{name=\"probe\"} 1",
        "rest_client_requests_total{verb=\"create\",code=\"201\"}",
        "process_resident_memory_bytes",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    let begun = Instant::now();
    probe.process.signal(Signal::TERM).unwrap();
    let status = tokio::time::timeout(SOON, probe.process.exited()).await.unwrap();
    assert_eq!(status.code(), Some(0), "{}", probe.text());
    assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
    let text = probe.text();
    let position = |what: &str| {
        text.lines().position(|line| line.contains(what)).unwrap_or_else(|| panic!("no {what} in {text}"))
    };
    assert!(position("shutting down") < position("probe: exiting"), "{text}");
}

/// A leader with a dead watch would look alive and do nothing.
#[tokio::test]
async fn panic_in_a_background_task_ends_the_service() {
    let cluster = shared().await;
    namespace(&cluster, "service-panic").await;
    let probe = Probe::start(&cluster, "service-panic", &cluster.kubeconfig, &["--panic-on", "straw"]);
    probe.says("probe: reconciled early").await;
    let create = ["create", "configmap", "straw", "-n", "service-panic"];
    cluster.kubectl(&create).await.unwrap().success().unwrap();
    let status = tokio::time::timeout(SOON, probe.process.exited()).await.expect("the service exits");
    let text = probe.text();
    assert_eq!(status.code(), Some(101), "{text}");
    let said = text.lines().find(|line| line.contains("background task panicked, ending the service"));
    assert!(said.is_some_and(|line| line.contains("panicking on ConfigMap straw")), "{text}");
}

#[tokio::test]
async fn burst_of_equal_events_costs_few_writes() {
    let cluster = shared().await;
    namespace(&cluster, "service-events").await;
    let mark = cluster.requests_mark().unwrap();
    let probe = Probe::start(&cluster, "service-events", &cluster.kubeconfig, &["--events", "1000"]);
    probe.says("probe: started leading").await;
    let events: Api<Event> = Api::namespaced(cluster.client().await.unwrap(), "service-events");
    let counted = wait::eventually("the event series counts all events", SOON, async || {
        let list = events.list(&ListParams::default()).await?;
        let found = list.items.into_iter().find(|event| event.reason.as_deref() == Some("Probed"));
        Ok(found.filter(|event| event.series.as_ref().is_some_and(|series| series.count == 1000)))
    });
    let event = counted.await.unwrap();
    assert_eq!(event.reporting_controller.as_deref(), Some("haulout-probe"));
    let writes =
        cluster.requests_since(mark).unwrap().by_user_agent("haulout-probe/").resource("events", "").writes();
    let here = writes.only(|request| request.namespace == "service-events").count();
    assert!(here <= 3, "{here} writes");
}

#[tokio::test]
async fn key_due_in_an_hour_waits_without_cost() {
    let cluster = shared().await;
    namespace(&cluster, "service-clock").await;
    let probe = Probe::start(&cluster, "service-clock", &cluster.kubeconfig, &["--wake-after", "3600"]);
    probe.says("probe: reconciled early").await;
    probe.ask("POST /shift-clock", "3000").await;
    assert!(!probe.text().contains("sleeper"), "ten minutes are left");
    probe.ask("POST /shift-clock", "3601").await;
    probe.says("probe: reconciled sleeper").await;
}
