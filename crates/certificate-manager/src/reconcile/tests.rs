use clap::Parser as _;
use haulout_service_runtime::testing::{Call, Writes, recorded};
use k8s_openapi::ByteString;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;

const SECRETS: &str = "/api/v1/namespaces/default/secrets";
const CONFIGURATIONS: &str = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";

/// An API server with one Secret, or none, and one webhook configuration.
#[derive(Clone)]
struct Cluster(Arc<Mutex<(Option<Value>, Value)>>);

impl Cluster {
    fn new(secret: Option<Value>) -> Self {
        let configuration = json!({"metadata": {"name": "ours", "resourceVersion": "1", "uid": "u"}, "webhooks": [
            {"name": "a.b.c", "clientConfig": {"url": "https://x"}, "sideEffects": "None", "admissionReviewVersions": ["v1"]}
        ]});
        Self(Arc::new(Mutex::new((secret, configuration))))
    }

    fn answer(&self, call: &Call) -> Option<(u16, Value)> {
        let mut objects = self.0.lock();
        let (secret, configuration) = &mut *objects;
        let list =
            |items: Vec<&Value>| Some((200, json!({"metadata": {"resourceVersion": "7"}, "items": items})));
        match (call.method.as_str(), call.path.as_str()) {
            _ if call.query.contains("watch=") => None,
            ("GET", SECRETS) => list(secret.iter().collect()),
            ("GET", CONFIGURATIONS) => list(vec![configuration]),
            ("PUT", _) => {
                secret.as_ref()?;
                *secret = Some(call.body.clone());
                Some((200, call.body.clone()))
            }
            ("PATCH", _) => {
                configuration["webhooks"][0]["clientConfig"]["caBundle"] = call.body[1]["value"].clone();
                Some((200, configuration.clone()))
            }
            _ => None,
        }
    }

    fn bundle(&self) -> String {
        let bundle = self.0.lock().1["webhooks"][0]["clientConfig"]["caBundle"].clone();
        let bytes: Option<ByteString> = serde_json::from_value(bundle).unwrap();
        bytes.map(|bytes| String::from_utf8(bytes.0).unwrap()).unwrap_or_default()
    }

    /// Reconciles once in a new term. Returns the writes and whether the Secret was reported as missing.
    async fn reconcile(&self, args: &[&str]) -> (Vec<String>, bool) {
        self.lead(args, async |manager, writes| {
            manager.reconcile().await.unwrap();
            let text = manager.context.metrics.encode().unwrap();
            (writes.take_names(), text.contains("haulout_certificate_secret_missing 1\n"))
        })
        .await
    }

    async fn lead<T>(&self, args: &[&str], act: impl AsyncFnOnce(&mut Manager<'_>, Writes) -> T) -> T {
        let api = self.clone();
        let (context, writes) = recorded(move |call| api.answer(call));
        let all =
            ["certificate-manager", "--validating-configuration", "ours", "--certificate-secret", "mine"];
        let args = Args::parse_from(all.into_iter().chain(args.iter().copied()));
        let mut term = Term::new(&context);
        let metrics = Metrics::new(&context.metrics);
        let mut manager = Manager::start(&args, &context, &context.clients, metrics, &mut term);
        assert!(term.synced().await);
        act(&mut manager, writes).await
    }
}

fn empty() -> Value {
    json!({"metadata": {"name": "mine", "namespace": "default", "resourceVersion": "3", "uid": "s"}, "type": "Opaque"})
}

const OWN: [&str; 2] = ["--serving-name", "webhook.svc"];
const PUT: &str = "PUT /api/v1/namespaces/default/secrets/mine";
const PATCH: &str = "PATCH /apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/ours";

#[tokio::test]
async fn empty_secret_is_filled_and_trusted() {
    let cluster = Cluster::new(Some(empty()));
    assert_eq!(cluster.reconcile(&OWN).await, (vec![PUT.into(), PATCH.into()], false));
    let secret: Secret = serde_json::from_value(cluster.0.lock().0.clone().unwrap()).unwrap();
    let contents = Contents::read(&secret).unwrap();
    assert_eq!(cluster.bundle(), contents.bundle());
    assert_eq!(secret.type_.as_deref(), Some("Opaque"));
    // The next leader finds nothing to do.
    assert_eq!(cluster.reconcile(&OWN).await, (vec![], false));
}

#[tokio::test]
async fn missing_secret_is_reported_and_not_created() {
    let cluster = Cluster::new(None);
    assert_eq!(cluster.reconcile(&OWN).await, (vec![], true));
}

#[tokio::test]
async fn deleted_secret_that_is_back_empty_is_restored() {
    let cluster = Cluster::new(Some(empty()));
    cluster
        .lead(&OWN, async |manager, writes| {
            manager.reconcile().await.unwrap();
            let (before, bundle) = (manager.last_good.clone().unwrap(), cluster.bundle());
            manager.secret.delete("mine".into());
            // While it is missing, the configurations are kept up to date.
            cluster.0.lock().1["webhooks"][0]["clientConfig"]["caBundle"] = json!(null);
            let changed = serde_json::from_value(cluster.0.lock().1.clone()).unwrap();
            manager.configurations.put_validating("ours", changed);
            writes.take();
            manager.reconcile().await.unwrap();
            assert_eq!((writes.take_names(), cluster.bundle()), (vec![PATCH.to_owned()], bundle));
            manager.secret.put("mine", serde_json::from_value(empty()).unwrap());
            manager.reconcile().await.unwrap();
            assert_eq!(writes.take_names(), [PUT]);
            assert_eq!(manager.last_good.as_ref(), Some(&before), "the same certificate");
        })
        .await;
}

#[tokio::test]
async fn secret_of_others_is_only_read() {
    let mut secret = empty();
    let issued = || issue(&["a".into()], "1h".parse().unwrap(), Timestamp::now()).unwrap();
    let (first, second) = (issued(), issued());
    let data = |authority: &str, certificate: &str, key: &str| {
        let text = |text: &str| ByteString(text.into());
        json!({"ca.crt": text(authority), "tls.crt": text(certificate), "tls.key": text(key)})
    };
    let authority = first.authority;
    secret["data"] = data(&authority, &first.certificate, &first.key);
    let cluster = Cluster::new(Some(secret.clone()));
    assert_eq!(cluster.reconcile(&["--ca-bundle-only"]).await, (vec![PATCH.into()], false));
    assert_eq!(cluster.bundle(), authority);
    for unusable in [
        json!({}),
        data("nonsense", &first.certificate, &first.key),
        // The webhook keeps serving the first certificate.
        data(&second.authority, &second.certificate, &first.key),
        data(&second.authority, "", ""),
    ] {
        secret["data"] = unusable;
        cluster.0.lock().0 = Some(secret.clone());
        assert_eq!(cluster.reconcile(&["--ca-bundle-only"]).await, (vec![], false));
        assert_eq!(cluster.bundle(), authority, "it stays");
    }
}
