//! An admission webhook of others that does not answer, for the evictions of one namespace.

use futures::future::join_all;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use tokio::net::TcpListener;

use super::*;

/// How many requests the controller has under way at once at most.
const REQUESTS: usize = 8;
/// So many pods of the slow namespace that they would hold up everything for minutes: the API server gives up on each
/// connection after 10 seconds.
const SLOW: usize = 12 * REQUESTS;

/// Accepts connections and never answers; where.
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

pub async fn a_slow_namespace_does_not_hold_up_others(ground: &Ground) {
    let requests = REQUESTS.to_string();
    let args = ["--lease-seconds", "30", "--max-requests", &requests];
    let controller = Arc::new(Service::start(&ground.cluster, "evacuation-controller", &args).await.unwrap());
    controller.leads().await.unwrap();
    let (slow, fast) = (ground.world(&controller).await, ground.world(&controller).await);
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
    let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(ground.client.clone());
    webhooks.create(&PostParams::default(), &serde_json::from_value(webhook).unwrap()).await.unwrap();
    let pods = join_all((0..SLOW).map(async |n| slow.pod(&format!("web-{n}"), &[]).await)).await;
    let evacuations = join_all(pods.iter().map(|pod| slow.evacuate(pod))).await;
    for n in 0..REQUESTS {
        let pod = fast.pod(&format!("web-{n}"), &[]).await;
        let evacuation = fast.evacuate(&pod).await;
        fast.until_evacuation_gone(&evacuation).await;
    }
    let left = slow.pods().list(&ListParams::default()).await.unwrap().items.len();
    assert_eq!(left, SLOW, "nobody answered for those");
    webhooks.delete("never-answers", &DeleteParams::default()).await.unwrap();
    for evacuation in evacuations {
        slow.until_evacuation_gone(&evacuation).await;
    }
    fast.end().await;
}
