//! Watches whose connections silently stop, as behind a load balancer that drops them.

use std::time::Duration;

use futures::future::join_all;
use haulout_e2e::service::chart_args;
use haulout_e2e::{Cluster, Forwarder, Handle, Service, wait};

/// Detected within 90 seconds, and a little later on a busy machine. The API server itself would end the watches
/// after 230 seconds or more.
const DETECTION_LIMIT: Duration = Duration::from_secs(150);

const REQUESTS: &str = "rest_client_requests_total";

/// Services, with the kinds that they watch.
const WATCHED: [(&str, &[&str]); 6] = [
    ("admission-webhook", &["drainrules", "nodemaintenances", "nodes", "pods", "secrets"]),
    ("certificate-manager", &["mutatingwebhookconfigurations", "secrets", "validatingwebhookconfigurations"]),
    ("evacuation-controller", &["evacuations", "leases", "poddisruptionbudgets", "pods"]),
    (
        "maintenance-controller",
        &[
            "drainrules",
            "evacuations",
            "leases",
            "namespaces",
            "nodemaintenances",
            "nodes",
            "pods",
            "volumeattachments",
        ],
    ),
    ("taint-manager", &["evacuations", "events", "namespaces", "nodes", "pods"]),
    ("workload-evacuator", &["deployments", "evacuations", "namespaces", "pods", "replicasets"]),
];

#[tokio::test]
#[ignore = "slow"]
async fn half_open_watches_are_detected_for_every_kind() {
    let cluster = Cluster::builder().name("half-open").scheduler(false).boot().await.unwrap();
    let values = [
        ("taintManager.enabled", "true"),
        ("admissionWebhook.enabled", "true"),
        ("admissionWebhook.url", "https://127.0.0.1:1"),
    ];
    cluster.install_chart(&values).await.unwrap();
    join_all(WATCHED.map(|(name, kinds)| detects_half_open_watches(cluster.handle(), name, kinds))).await;
}

async fn detects_half_open_watches(cluster: &Handle, name: &str, kinds: &[&str]) {
    let between = Forwarder::start().await.unwrap();
    between.add(cluster.server.trim_start_matches("https://").parse().unwrap());
    let mut handle = cluster.clone();
    handle.server = format!("https://{}", between.address());
    let mut args = match name {
        // Its policy is a file in its pod.
        "taint-manager" => Vec::new(),
        _ => chart_args(cluster, name).await.unwrap().unwrap(),
    };
    let elected = name != "admission-webhook";
    // A Lease that outlives the connection on which it is renewed.
    args.extend(elected.then(|| "--lease-seconds=600".to_owned()));
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let service = Service::start(&handle, name, &args).await.unwrap();
    if elected {
        service.leads().await.unwrap();
    }
    // Each kind and the Lease. The maintenance controller watches its own pods in addition to all pods.
    let more = u32::from(elected) + u32::from(name == "maintenance-controller");
    let watched = u32::try_from(kinds.len()).unwrap() + more;
    let watching = wait::eventually("all kinds are watched", DETECTION_LIMIT, async || {
        let answered = service.metric_where(REQUESTS, "verb=\"watch\",code=\"200\"").await?;
        Ok((answered >= f64::from(watched)).then_some(()))
    });
    watching.await.unwrap();
    for connection in between.connections() {
        connection.hold(true);
    }
    for kind in kinds {
        let kind = format!("\"resource\":\"{kind}\"");
        let silent = |line: &str| line.contains(&kind) && line.contains("API server sent nothing for");
        let what = format!("{name} detects that its watch of {kind} is half-open");
        let detected = wait::eventually(&what, DETECTION_LIMIT, async || {
            Ok(service.text().lines().any(silent).then_some(()))
        });
        detected.await.unwrap_or_else(|error| panic!("{error:#}\n{}", service.text()));
    }
    if elected {
        assert!(service.metric("leader_election_master_status").await.unwrap() > 0.0, "{name} leads on");
    }
}
