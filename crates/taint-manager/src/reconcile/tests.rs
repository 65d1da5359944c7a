//! The writes to the API server: their order, preconditions and reaction to responses.

use std::sync::Arc;

use haulout_service_runtime::testing::{Call, Writes, recorded, rejection};
use haulout_service_runtime::watch::Handler;
use jiff::SignedDuration;
use serde_json::{Value, json};

use super::*;
use crate::policy::Policy;
use crate::state::watch_gap::WATCHES;
use crate::testing::uid;
use crate::watch;

const POD: &str = "/api/v1/namespaces/default/pods/pod-1";
const EVACUATIONS: &str = "/apis/evacuation.coordination.k8s.io/v1alpha1/namespaces/default/evacuations";

/// A leader with one pod on a node that has the taint `k:NoExecute`.
struct Setup {
    controller: Arc<Controller>,
    writes: Writes,
}

impl Setup {
    async fn new(
        policy: &str,
        dry_run: bool,
        reject: impl Fn(&Call) -> Option<(u16, Value)> + Clone + Send + Sync + 'static,
    ) -> Self {
        let answer = move |call: &Call| match call.path.as_str() {
            "/api/v1/pods" if !call.query.contains("watch=true") => {
                let pod = json!({
                    "metadata": {"name": "pod-1", "namespace": "default", "uid": uid(1).to_string(), "resourceVersion": "5"},
                    "spec": {"nodeName": "node"}, "status": {"phase": "Running"},
                });
                Some((200, json!({"metadata": {"resourceVersion": "7"}, "items": [pod]})))
            }
            path if call.method == http::Method::GET && path.starts_with(&format!("{EVACUATIONS}/")) => {
                let name = path.rsplit('/').next();
                Some((
                    200,
                    json!({
                        "apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
                        "metadata": {
                            "name": name, "namespace": "default", "uid": "uid of others", "resourceVersion": "9",
                            "finalizers": ["x/y"],
                        },
                    }),
                ))
            }
            _ if call.method == http::Method::GET => None,
            _ => reject(call).or_else(|| Some((200, json!({"metadata": {"name": "x"}})))),
        };
        let (context, writes) = recorded(answer);
        let policy = Policy::from_yaml(policy).unwrap();
        let state = State::new(policy, SignedDuration::ZERO, None);
        let (clients, metrics) = (context.clients.clone(), Metrics::new(&context.metrics));
        let served = BTreeSet::from(["deployment.apps.k8s.io".to_owned()]);
        let controller = Arc::new(Controller::new(&context, clients, metrics, state, served, dry_run));
        controller.pods.ready().await;
        let node: watch::Node = serde_json::from_value(json!({
            "metadata": {"name": "node", "uid": "uid of node", "resourceVersion": "3"},
            "spec": {"taints": [{"key": "k", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}]},
        }))
        .unwrap();
        Handler::<watch::Node>::apply(&*controller, "node".into(), node);
        for watch in WATCHES {
            controller.watch_resumed(watch);
        }
        Self { controller, writes }
    }

    async fn handle(&self) -> Result<Outcome, ReconcileError> {
        let pod = self.controller.pods.read().get(uid(1)).cloned().unwrap();
        Arc::clone(&self.controller).handle(Key::of(&pod).unwrap()).await
    }
}

#[tokio::test]
async fn reason_is_written_before_the_deletion() {
    let setup = Setup::new("rules: []", false, |_| None).await;
    setup.handle().await.unwrap();
    let writes = setup.writes.take();
    let names: Vec<_> = writes.iter().map(ToString::to_string).collect();
    assert_eq!(names, [format!("PATCH {POD}/status"), format!("DELETE {POD}")]);
    assert_eq!(writes[0].body["metadata"]["uid"], uid(1).to_string());
    assert_eq!(writes[0].body["status"]["conditions"][0]["reason"], "DeletionByTaintManager");
    assert_eq!(writes[1].body["preconditions"]["uid"], uid(1).to_string());
}

#[tokio::test]
async fn pod_that_is_gone_is_not_deleted() {
    let gone = |call: &Call| call.path.ends_with("/status").then(|| rejection(404, "not found")).flatten();
    let setup = Setup::new("rules: []", false, gone).await;
    setup.handle().await.unwrap();
    assert_eq!(setup.writes.take_names(), [format!("PATCH {POD}/status")]);
}

#[tokio::test]
async fn rejected_deletion_is_an_error_that_names_the_pod() {
    let rejected =
        |call: &Call| (call.method == http::Method::DELETE).then(|| rejection(403, "no")).flatten();
    let setup = Setup::new("rules: []", false, rejected).await;
    let error = setup.handle().await.unwrap_err().to_string();
    assert!(error.starts_with("failed to remove pod default/pod-1 (Delete)"), "{error}");
}

#[tokio::test]
async fn policy_evacuate_joins_an_existing_evacuation() {
    let policy = "rules: [{key: k, action: Evacuate}]";
    let exists =
        |call: &Call| (call.method == http::Method::POST).then(|| rejection(409, "exists")).flatten();
    let setup = Setup::new(policy, false, exists).await;
    setup.handle().await.unwrap();
    let writes = setup.writes.take();
    let evacuation = format!("{EVACUATIONS}/{}-pod-1", uid(1));
    let names: Vec<_> = writes.iter().map(ToString::to_string).collect();
    assert_eq!(names, [format!("POST {EVACUATIONS}"), format!("PATCH {evacuation}")]);
    let metadata = &writes[1].body["metadata"];
    let ours = haulout_api_types::instigators::finalizer(haulout_api_types::names::instigator::TAINT_MANAGER);
    assert_eq!(metadata["finalizers"], json!(["x/y", ours]));
    assert_eq!((&metadata["uid"], &metadata["resourceVersion"]), (&json!("uid of others"), &json!("9")));
}

#[tokio::test]
async fn dry_run_writes_nothing() {
    let setup = Setup::new("rules: []", true, |_| None).await;
    setup.handle().await.unwrap();
    assert_eq!(setup.writes.take_names(), [""; 0]);
}
