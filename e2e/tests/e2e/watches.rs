//! Watches whose connections die without a word, as behind a load balancer that forgets them.

use std::time::Duration;

use futures::future::join_all;
use haulout_e2e::{Cluster, Forwarder, Handle, Service, wait};

/// Noticed within 90 seconds, and a little later on a busy machine; the API server itself would end them after 230 and more.
const NOTICED: Duration = Duration::from_secs(150);

const REQUESTS: &str = "rest_client_requests_total";

/// The services, with the kinds that they watch.
const WATCHED: [(&str, &[&str]); 3] = [
    ("evacuation-controller", &["evacuations", "poddisruptionbudgets", "pods"]),
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
];

#[tokio::test]
#[ignore = "slow"]
async fn half_open_watches_of_every_kind_are_noticed() {
    let cluster = Cluster::builder().name("half-open").scheduler(false).boot().await.unwrap();
    cluster.install_chart(&[("taintManager.enabled", "true")]).await.unwrap();
    join_all(WATCHED.map(|(name, kinds)| notices(cluster.handle(), name, kinds))).await;
}

async fn notices(cluster: &Handle, name: &str, kinds: &[&str]) {
    let between = Forwarder::start().await.unwrap();
    between.add(cluster.server.trim_start_matches("https://").parse().unwrap());
    let mut behind = cluster.clone();
    behind.server = format!("https://{}", between.address());
    // A lease that outlives the connection on which it is renewed.
    let service = Service::start(&behind, name, &["--lease-seconds", "600"]).await.unwrap();
    service.leads().await.unwrap();
    // Each kind and the Lease; the maintenance controller watches its own pods besides all pods.
    let watched = u32::try_from(kinds.len()).unwrap() + 1 + u32::from(name == "maintenance-controller");
    let watching = wait::eventually("all kinds are watched", NOTICED, async || {
        let answered = service.metric_where(REQUESTS, "verb=\"watch\",code=\"200\"").await?;
        Ok((answered >= f64::from(watched)).then_some(()))
    });
    watching.await.unwrap();
    for connection in between.connections() {
        connection.hold(true);
    }
    for kind in kinds {
        let kind = format!("\"resource\":\"{kind}\"");
        let silent = |line: &str| line.contains(&kind) && line.contains("the API server was silent");
        let what = format!("{name} notices that its watch of {kind} is half-open");
        let noticed =
            wait::eventually(&what, NOTICED, async || Ok(service.text().lines().any(silent).then_some(())));
        noticed.await.unwrap_or_else(|error| panic!("{error:#}\n{}", service.text()));
    }
    assert!(service.metric("leader_election_master_status").await.unwrap() > 0.0, "{name} leads on");
}
