//! A foreign admission webhook that does not answer evictions of one namespace.

use futures::future::join_all;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use tokio::net::TcpListener;

use super::*;

/// Maximum number of requests that the controller has in flight.
const REQUESTS: usize = 8;
/// Enough pods in the slow namespace to block everything for minutes: the API server closes each connection after 10
/// seconds.
const SLOW: usize = 12 * REQUESTS;

/// Accepts connections and never answers. Returns the address.
async fn never_answer() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok(connection) = listener.accept().await {
            open.push(connection);
        }
    });
    format!("https://{address}/")
}

pub async fn slow_namespace_does_not_delay_others(env: &TestEnv) {
    let requests = REQUESTS.to_string();
    let args = ["--lease-seconds", "30", "--max-requests", &requests];
    let controller = Arc::new(Service::start(&env.cluster, "evacuation-controller", &args).await.unwrap());
    controller.leads().await.unwrap();
    let (slow, fast) = (env.test_namespace(&controller).await, env.test_namespace(&controller).await);
    let webhook = json!({
        "metadata": {"name": "never-answers"},
        "webhooks": [{
            "name": "never.answers.example.com",
            "clientConfig": {"url": never_answer().await},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": slow.namespace}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"]}],
            "timeoutSeconds": 30, "failurePolicy": "Fail", "sideEffects": "None", "admissionReviewVersions": ["v1"],
        }],
    });
    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(env.client.clone());
    webhooks.create(&PostParams::default(), &serde_json::from_value(webhook).unwrap()).await.unwrap();
    let pods = join_all((0..SLOW).map(async |n| slow.pod(&format!("web-{n}"), &[]).await)).await;
    let evacuations = join_all(pods.iter().map(|pod| slow.evacuate(pod))).await;
    for n in 0..REQUESTS {
        let pod = fast.pod(&format!("web-{n}"), &[]).await;
        let evacuation = fast.evacuate(&pod).await;
        fast.until_evacuation_gone(&evacuation).await;
    }
    let left = slow.pods().list(&ListParams::default()).await.unwrap().items.len();
    assert_eq!(left, SLOW, "no eviction in the slow namespace was answered");
    webhooks.delete("never-answers", &DeleteParams::default()).await.unwrap();
    for evacuation in evacuations {
        slow.until_evacuation_gone(&evacuation).await;
    }
    fast.end().await;
}
