//! What the clients of a Deployment observe while its node is drained.

use std::net::SocketAddr;

use haulout_e2e::Service;
use haulout_e2e::service::{SERVED_CLASSES, program};
use k8s_openapi::api::core::v1::Service as ClusterService;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde_json::Value;

use super::client::{Client as HttpClient, Results};
use super::*;

/// Requests per second of all clients together, half of them from each node.
const RATE: u32 = 200;
/// Requests per second to the Deployment that is not replaced.
const COMPARISON_RATE: u32 = 20;
/// The application needs this long to start, and continues to serve for a while after it is evicted. As it starts slower
/// than it stops, a pod that is evicted without a replacement leaves a gap.
const START_SECONDS: i32 = 15;
const PRE_STOP_SECONDS: i64 = 8;
const PORT: u16 = 8080;

/// One replica with a strict budget moves from one node to the other. Another one, which is evicted without a replacement
/// in the same drain, shows that these clients would notice.
#[tokio::test]
#[ignore = "slow"]
async fn no_request_fails_while_a_deployment_moves() {
    if !can_run_nodes() {
        return;
    }
    let env = TestEnv::boot(vec![]).await;
    env.nodes().cordon("real-1").await.unwrap();
    let strict = App::deploy(&env, objects::deployment("strict")).await;
    let budget = objects::pdb("strict").min_available("1").build();
    strict.budgets().create(&PostParams::default(), &budget).await.unwrap();
    let evicted = objects::deployment("evicted").annotation(names::REPLACE_ANNOTATION, "false");
    let evicted = App::deploy(&env, evicted).await;
    env.cluster.install_chart(&[]).await.unwrap();
    let _services = start_services(&env.cluster).await;
    env.until_available("default").await;
    let observed = |budget: &PodDisruptionBudget| {
        budget.status.as_ref().is_some_and(|status| status.current_healthy == 1)
    };
    wait::present(strict.budgets(), "strict", "is observed", SOON, observed).await.unwrap();
    env.nodes().uncordon("real-1").await.unwrap();
    let (before, old) = (strict.specs().await, strict.pod().await);

    let [first, second] = env.cluster.real_nodes() else { panic!("two nodes") };
    let clients = [strict.client(first, RATE / 2).await, strict.client(second, RATE / 2).await];
    let comparison = evicted.client(first, COMPARISON_RATE).await;
    env.maintain("real", "real-2").await;
    env.until_drained("real").await;
    // The comparison responds again.
    env.until_available("default").await;
    let new = strict.pod().await;
    for client in &clients {
        client.continue_for_a_second(RATE / 2).await;
    }

    assert_ne!(new, old);
    for client in clients {
        assert_all_succeeded(&client.stop().await, RATE / 2, &[&old, &new]);
    }
    let results = comparison.stop().await;
    println!("without a replacement: {results:?}");
    assert!(!results.failures.is_empty(), "the clients would not notice an outage: {results:?}");
    assert_eq!(strict.specs().await, before);
    assert_eq!(env.nodes_with_pods("default").await, ["real-1".to_owned()].into());
    env.cluster.shutdown().await;
}

/// All requests that were due were sent, none failed, and both pods have responded.
fn assert_all_succeeded(results: &Results, rate: u32, pods: &[&str]) {
    println!("with a replacement: {results:?}");
    assert_eq!(results.failures, [].into());
    assert_eq!(results.completed(), results.sent);
    let due = results.duration.unwrap().as_secs_f64() * f64::from(rate);
    // On a busy machine, the client may have stopped shortly before the last ones were due.
    assert!((0.9..=1.01).contains(&(f64::from(results.sent) / due)), "{due} were due: {results:?}");
    for pod in pods {
        assert!(results.of(pod) > rate, "{pod} hardly responded: {results:?}");
    }
}

/// One replica of each service that takes part in a drain.
async fn start_services(cluster: &Cluster) -> Vec<Service> {
    let mut services = Vec::new();
    for (name, args) in [
        ("maintenance-controller", [SERVED_CLASSES].as_slice()),
        ("evacuation-controller", &[]),
        ("workload-evacuator", &[]),
    ] {
        let service = Service::start(cluster, name, args).await.unwrap();
        service.leads().await.unwrap();
        services.push(service);
    }
    services
}

/// A Deployment with one replica of a web server, and its Service.
struct App<'a> {
    env: &'a TestEnv,
    name: String,
    address: SocketAddr,
}

impl<'a> App<'a> {
    async fn deploy(env: &'a TestEnv, deployment: objects::DeploymentBuilder) -> Self {
        let deployment = deployment.pods(|pod| pod.grace(30).with(web_server)).build();
        let name = deployment.name_any();
        let service: ClusterService = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": PORT}]},
        }))
        .unwrap();
        let services: Api<ClusterService> = Api::namespaced(env.client.clone(), "default");
        let service = services.create(&PostParams::default(), &service).await.unwrap();
        let address = service.spec.unwrap().cluster_ip.unwrap();
        let deployments: Api<Deployment> = Api::namespaced(env.client.clone(), "default");
        deployments.create(&PostParams::default(), &deployment).await.unwrap();
        Self { env, name, address: (address.parse::<std::net::IpAddr>().unwrap(), 80).into() }
    }

    async fn client(&self, node: &RealNode, per_second: u32) -> HttpClient {
        HttpClient::start(node, self.address, per_second).await
    }

    fn budgets(&self) -> Api<PodDisruptionBudget> {
        Api::namespaced(self.env.client.clone(), "default")
    }

    /// What its owner wants, with generations.
    async fn specs(&self) -> Value {
        let deployments: Api<Deployment> = Api::namespaced(self.env.client.clone(), "default");
        let deployment = deployments.get(&self.name).await.unwrap();
        let budget = self.budgets().get(&self.name).await.unwrap();
        json!([deployment.spec, deployment.metadata.generation, budget.spec, budget.metadata.generation])
    }

    /// The name of its only pod.
    async fn pod(&self) -> String {
        let own = unfinished().labels(&format!("app={}", self.name));
        let pods = self.env.pods("default").list(&own).await.unwrap().items;
        assert_eq!(pods.len(), 1, "{pods:?}");
        pods[0].name_any()
    }
}

/// A web server that responds with the name of its pod.
fn web_server(spec: &mut PodSpec) {
    let container = json!({
        "name": "main",
        "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "readinessProbe": {
            "httpGet": {"path": "/", "port": PORT},
            "initialDelaySeconds": START_SECONDS,
            "periodSeconds": 1,
        },
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_SECONDS}}},
    });
    spec.containers = vec![serde_json::from_value(container).unwrap()];
    let port = format!("--port={PORT}");
    real_node::run_program(spec, &program("web-server").unwrap(), &["--name=$(POD)", &port]);
}
