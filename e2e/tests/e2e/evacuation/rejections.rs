//! Rejections by the real Eviction API: each has its reason and message, and is retried until it succeeds.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use haulout_api_types::Evacuation;
use haulout_e2e::service::NAMESPACE;
use haulout_e2e::{Component, objects, wait};
use haulout_service_runtime::eviction::{self, Answer};
use haulout_service_runtime::pods;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::core::Status;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use super::{SOON, TestEnv, TestNamespace, failed};

impl TestNamespace {
    /// Waits until the Evacuation is blocked for this reason. Returns the message.
    async fn rejection(&self, evacuation: &str, reason: &str) -> String {
        let status = self.until_blocked(evacuation, reason).await.status.unwrap();
        assert!(status.failed_eviction_counter > 0 && status.last_failed_eviction_time.is_some());
        let blocked = status.conditions.iter().find(|condition| condition.type_ == "Blocked").unwrap();
        assert_eq!(blocked.message, status.message);
        self.until_event(evacuation, "Blocked").await;
        status.message
    }

    /// Keeps an eviction in flight while the task runs, with the controller's own account. With a wrong UID of a
    /// pending pod, the API server retries for ten seconds.
    async fn occupy_the_only_eviction_slot(&self) -> AbortOnDropHandle<()> {
        let pending = objects::pod("pending").namespace(&self.namespace).build();
        self.pods().create(&PostParams::default(), &pending).await.unwrap();
        let account = "haulout-evacuation-controller";
        let account = self.cluster.service_account_kubeconfig(NAMESPACE, account).await.unwrap();
        let client = self.cluster.client_from(&account, "somebody-else").await.unwrap();
        let pods: Api<Pod> = Api::namespaced(client, &self.namespace);
        let theirs = pods.clone();
        let holding = AbortOnDropHandle::new(tokio::spawn(async move {
            while dry_run_evict(&theirs, "pending", "wrong").await.is_err() {}
        }));
        wait::eventually("other evictions are rejected", SOON, async || {
            let rejected = dry_run_evict(&pods, "nobody", "").await.unwrap_err();
            Ok(matches!(rejected, kube::Error::Api(status) if status.code == 429).then_some(()))
        })
        .await
        .unwrap();
        holding
    }
}

/// Dry run of the eviction of the pod with this name and UID.
async fn dry_run_evict(pods: &Api<Pod>, name: &str, uid: &str) -> kube::Result<()> {
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    evict_with(pods, name, uid, &dry).await
}

/// Evicts the pod with this name and UID.
async fn evict(pods: &Api<Pod>, name: &str, uid: &str) -> kube::Result<()> {
    evict_with(pods, name, uid, &PostParams::default()).await
}

async fn evict_with(pods: &Api<Pod>, name: &str, uid: &str, params: &PostParams) -> kube::Result<()> {
    let uid = Some(uid).filter(|uid| !uid.is_empty());
    let eviction = json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name},
        "deleteOptions": {"preconditions": {"uid": uid}},
    });
    let done: kube::Result<Status> = pods.create_subresource("eviction", name, params, &eviction).await;
    done.map(drop)
}

pub async fn exhausted_budget_message_names_unready_pods(test: TestNamespace) {
    let pod = test.pod("web-1", &[]).await;
    test.pod_from(objects::pod("web-2").label("app", "web").not_ready(), &[]).await;
    test.pod_from(objects::pod("db-1").label("app", "db").not_ready(), &[]).await;
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let evacuation = test.evacuate(&pod).await;
    test.rejection(&evacuation, "DisruptionBudgetExhausted").await;
    let said = "PodDisruptionBudget web allows 0 disruptions: 1 of 2 pods are healthy, 1 required; pod web-2 is not ready.";
    // The controller's view of the budget may lag; the next attempt corrects it.
    let named = |e: &Evacuation| e.status.as_ref().is_some_and(|status| status.message == said);
    test.until(&evacuation, said, named).await;
    assert!(test.is_not_terminating(&pod).await);
    let ready = Patch::Merge(json!({"metadata": {"annotations": {"haulout.test/ready": null}}}));
    test.pods().patch("web-2", &PatchParams::default(), &ready).await.unwrap();
    test.until_gone(&pod, &evacuation).await;
}

pub async fn forbidden_eviction_is_retried_until_allowed(test: TestNamespace) {
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(test.client.clone());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(test.client.clone());
    let policy = json!({
        "metadata": {"name": "stay"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"]},
            ]},
            "validations": [{"expression": "false", "message": "not during the sale"}],
        },
    });
    let here = json!({"matchLabels": {"kubernetes.io/metadata.name": test.namespace}});
    let binding = json!({
        "metadata": {"name": "stay"},
        "spec": {"policyName": "stay", "validationActions": ["Deny"], "matchResources": {"namespaceSelector": here}},
    });
    policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
    bindings.create(&PostParams::default(), &serde_json::from_value(binding).unwrap()).await.unwrap();
    let pod = test.pod("web-1", &[]).await;
    let rejected = wait::eventually("evictions are rejected", SOON, async || {
        Ok(dry_run_evict(&test.pods(), "web-1", "").await.err().map(drop))
    });
    rejected.await.unwrap();

    let evacuation = test.evacuate(&pod).await;
    let message = test.rejection(&evacuation, "EvictionForbidden").await;
    assert!(
        message.starts_with("The eviction was rejected by an admission webhook or policy: "),
        "{message}"
    );
    assert!(message.ends_with("denied request: not during the sale"), "{message}");
    test.until(&evacuation, "was rejected again", |e| failed(e) > 1).await;
    assert!(test.is_not_terminating(&pod).await);
    bindings.delete("stay", &DeleteParams::default()).await.unwrap();
    test.until_gone(&pod, &evacuation).await;
}

/// The API server rejects the evictions of one namespace with 429.
pub(super) struct Overload {
    schemas: Api<FlowSchema>,
    name: String,
    _holding: AbortOnDropHandle<()>,
}

impl Overload {
    pub(super) async fn end(self) {
        self.schemas.delete(&self.name, &DeleteParams::default()).await.unwrap();
    }
}

impl TestNamespace {
    /// The API server accepts one eviction at a time in this namespace, and another client occupies it.
    pub(super) async fn overload(&self, name: &str) -> Overload {
        let levels: Api<PriorityLevelConfiguration> = Api::all(self.client.clone());
        let schemas: Api<FlowSchema> = Api::all(self.client.clone());
        let (level, schema) = overload(name, &self.namespace);
        levels.create(&PostParams::default(), &serde_json::from_value(level).unwrap()).await.unwrap();
        schemas.create(&PostParams::default(), &serde_json::from_value(schema).unwrap()).await.unwrap();
        Overload { schemas, name: name.to_owned(), _holding: self.occupy_the_only_eviction_slot().await }
    }
}

fn overload(name: &str, namespace: &str) -> (Value, Value) {
    let level = json!({
        "metadata": {"name": name},
        "spec": {"type": "Limited", "limited": {
            "nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0,
            "limitResponse": {"type": "Reject"},
        }},
    });
    let schema = json!({
        "metadata": {"name": name},
        "spec": {
            "matchingPrecedence": 2,
            "priorityLevelConfiguration": {"name": name},
            "rules": [{
                // Requests of the group of admins are never limited.
                "subjects": [{"kind": "Group", "group": {"name": "system:serviceaccounts"}}],
                "resourceRules": [{
                    "verbs": ["create"], "apiGroups": [""], "resources": ["pods/eviction"],
                    "namespaces": [namespace],
                }],
            }],
        },
    });
    (level, schema)
}

pub async fn eviction_is_retried_while_the_server_is_busy(test: TestNamespace) {
    let pod = test.pod("web-1", &[]).await;
    let overload = test.overload("overload").await;
    let evacuation = test.evacuate(&pod).await;
    let message = test.rejection(&evacuation, "ServerBusy").await;
    assert_eq!(
        message,
        "The API server rejected the request because of its rate limits: Too many requests, please try again later."
    );
    assert!(test.is_not_terminating(&pod).await);
    overload.end().await;
    test.until_gone(&pod, &evacuation).await;
}

/// An interrupted eviction: the API server has counted it in the budget, and nobody deletes the pod.
pub async fn exhausted_budget_message_names_disrupted_pods(test: TestNamespace) {
    let pod = test.pod("web-1", &[]).await;
    test.pod("web-2", &[]).await;
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let allows = |budget: &PodDisruptionBudget| {
        budget.status.as_ref().is_some_and(|status| status.disruptions_allowed == 1)
    };
    wait::present(test.budgets(), "web", "has counted both", SOON, allows).await.unwrap();
    let other_uid = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";
    evict(&test.pods(), "web-2", other_uid).await.unwrap_err();
    let spent = |budget: &PodDisruptionBudget| {
        let disrupted = budget.status.as_ref().and_then(|status| status.disrupted_pods.as_ref());
        disrupted.is_some_and(|pods| pods.contains_key("web-2"))
    };
    let budget =
        wait::present(test.budgets(), "web", "counts web-2 as disrupted", SOON, spent).await.unwrap();
    let since = budget.status.unwrap().disrupted_pods.unwrap()["web-2"].0;
    let until = since.saturating_add(Duration::from_secs(120)).unwrap();
    // The controller's view of the budget may lag; a pod that it evicts itself is enough to update it.
    test.let_controller_act("other").await;
    let evacuation = test.evacuate(&pod).await;
    test.rejection(&evacuation, "DisruptionBudgetExhausted").await;
    let said = format!("; pod web-2 counts as disrupted until {until}.");
    let named = |e: &Evacuation| e.status.as_ref().is_some_and(|status| status.message.ends_with(&said));
    test.until(&evacuation, &said, named).await;
    test.delete_budget("web").await;
    test.until_gone(&pod, &evacuation).await;
}

/// The answers of API server v1.36 and of a foreign webhook.
pub async fn eviction_api_answers_map_to_reasons(test: TestNamespace) {
    let webhook = FakeWebhook::start(&test).await;
    let reason = async |pod: &Pod| {
        let pod = pods::Pod::from_json(&serde_json::to_vec(pod).unwrap()).unwrap();
        match eviction::evict(&test.client, &pod).await {
            Answer::Failed(failure) => failure.reason.to_owned(),
            other => format!("{other:?}"),
        }
    };
    let recreated = |pod: &Pod| {
        let mut other = pod.clone();
        other.metadata.uid = Some("1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11".into());
        other
    };
    let covered =
        |name: &str| objects::pdb(name).namespace(&test.namespace).selects("app", "db").min_available("1");
    let pod = test.pod("web-1", &[]).await;
    let db = test.pod_from(objects::pod("db-1").label("app", "db"), &[]).await;
    assert_eq!(reason(&recreated(&pod)).await, "Gone", "another pod has its name");
    assert_eq!(reason(&recreated(&db)).await, "Gone", "another pod has its name");
    test.budget(covered("one").build()).await;
    assert_eq!(reason(&db).await, "DisruptionBudgetExhausted");
    test.budget(covered("two").build()).await;
    assert_eq!(reason(&db).await, "SeveralDisruptionBudgets");
    for (code, message, expected) in [
        (404, "pods \"web-1\" not found", "EvictionForbidden"),
        (409, "the UID in the precondition (a) does not match", "EvictionForbidden"),
        (429, "not now", "EvictionForbidden"),
        (429, "Eviction triggered evacuation of VMI \"shop/vm\"", "HandledElsewhere"),
    ] {
        webhook.answers(code, message);
        assert_eq!(reason(&pod).await, expected, "{code} {message}");
    }
    // The Evacuation reports the same.
    let evacuation = test.evacuate(&pod).await;
    let message = test.rejection(&evacuation, "HandledElsewhere").await;
    assert!(message.starts_with("Another program is moving the pod: admission webhook"), "{message}");
    webhook.end().await;
    let mut gone = pod.clone();
    gone.metadata.name = Some("nobody".into());
    assert_eq!(reason(&gone).await, "Gone", "no pod has its name");
    // The next attempt may be some seconds away.
    test.until_gone(&pod, &evacuation).await;
}

/// A webhook that denies evictions of a namespace with a given answer.
struct FakeWebhook {
    configurations: Api<ValidatingWebhookConfiguration>,
    name: String,
    answer: Arc<Mutex<Option<(u16, String)>>>,
    _task: AbortOnDropHandle<()>,
}

impl FakeWebhook {
    async fn start(test: &TestNamespace) -> Self {
        let pki = test.cluster.pki();
        let serving = pki.serving(&["127.0.0.1"]).unwrap();
        let certificates: Vec<_> =
            CertificateDer::pem_slice_iter(serving.certificate.as_bytes()).map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_slice(serving.key.as_bytes()).unwrap();
        let config =
            ServerConfig::builder().with_no_client_auth().with_single_cert(certificates, key).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answer = Arc::<Mutex<Option<(u16, String)>>>::default();
        let shared = Arc::clone(&answer);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, answer) = (acceptor.clone(), Arc::clone(&shared));
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        // The API server retries.
                        let _ = review(stream, &answer).await;
                    }
                });
            }
        });
        let configurations: Api<ValidatingWebhookConfiguration> = Api::all(test.client.clone());
        let name = format!("mover-{}", test.namespace);
        let configuration = json!({
            "metadata": {"name": name},
            "webhooks": [{
                "name": "mover.example.com", "admissionReviewVersions": ["v1"], "sideEffects": "None",
                "failurePolicy": "Fail",
                "clientConfig": {"url": format!("https://{address}/"), "caBundle": ByteString(pki.ca_certificate().unwrap().into())},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": test.namespace}},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/eviction"]}],
            }],
        });
        let configuration = serde_json::from_value(configuration).unwrap();
        configurations.create(&PostParams::default(), &configuration).await.unwrap();
        let webhook = Self { configurations, name, answer, _task: AbortOnDropHandle::new(task) };
        // The API server has to receive the configuration.
        webhook.answers(400, "here");
        test.pod_from(objects::pod("probe"), &[]).await;
        wait::eventually("the webhook is called", SOON, async || {
            let denied = dry_run_evict(&test.pods(), "probe", "").await.err();
            Ok(denied.filter(|error| error.to_string().contains("here")).map(drop))
        })
        .await
        .unwrap();
        *webhook.answer.lock().unwrap() = None;
        webhook
    }

    /// Denies evictions with this answer from now on.
    fn answers(&self, code: u16, message: &str) {
        *self.answer.lock().unwrap() = Some((code, message.to_owned()));
    }

    async fn end(self) {
        *self.answer.lock().unwrap() = None;
        self.configurations.delete(&self.name, &DeleteParams::default()).await.unwrap();
    }
}

/// Answers the reviews of one connection.
async fn review(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: &Mutex<Option<(u16, String)>>,
) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut length = 0;
        let mut line = String::new();
        while stream.read_line(&mut line).await? > 2 {
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or_default();
            }
            line.clear();
        }
        if length == 0 {
            return Ok(());
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        let asked: Value = serde_json::from_slice(&body)?;
        let denied = answer.lock().unwrap().clone();
        let status = denied.as_ref().map(|(code, message)| json!({"code": code, "message": message}));
        let reviewed = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "response": {"uid": asked["request"]["uid"], "allowed": denied.is_none(), "status": status},
        });
        let reviewed = reviewed.to_string();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            reviewed.len()
        );
        stream.get_mut().write_all(format!("{head}{reviewed}").as_bytes()).await?;
        stream.get_mut().flush().await?;
    }
}

pub async fn eviction_in_a_terminating_namespace_is_reported(env: &TestEnv) {
    let test = env.test_namespace_with_controller().await;
    test.budget(objects::pdb("web").namespace(&test.namespace).min_available("1").build()).await;
    let pod = test.pod("web-1", &[]).await;
    let evacuation = test.evacuate(&pod).await;
    let before = failed(&test.until_blocked(&evacuation, "DisruptionBudgetExhausted").await);
    // The namespace cannot be emptied for now.
    test.cluster.pause(Component::ControllerManager).unwrap();
    let namespaces: Api<Namespace> = Api::all(test.client.clone());
    namespaces.delete(&test.namespace, &DeleteParams::default()).await.unwrap();
    test.controller.shift_clock(Duration::from_secs(6)).await.unwrap();
    let status = test.until_blocked(&evacuation, "NamespaceTerminating").await.status.unwrap();
    assert_eq!(
        status.message,
        "The namespace is being deleted, so evictions are forbidden; its pods are deleted with it."
    );
    // Rejected for another reason than before, and the counter continues. A busy machine leaves time for more than
    // one attempt.
    let rejected = status.failed_eviction_counter;
    assert!(rejected > before, "{rejected} after {before}");
    test.controller.shift_clock(Duration::from_secs(6 + 5 * (1_u64 << rejected))).await.unwrap();
    test.until(&evacuation, "was rejected again", |e| failed(e) > rejected).await;
    assert!(test.is_not_terminating(&pod).await);
    test.cluster.resume(Component::ControllerManager).unwrap();
    test.until_gone(&pod, &evacuation).await;
    test.end().await;
}
