//! What the admission webhook rejects, warns of and defaults, through `kubectl` and the real API server. Every rule
//! is tested with its message and with an object that it accepts. The tables per kind are in the modules.

mod drain_rules;
mod evacuations;
mod node_maintenances;
mod nodes;
mod pods;
mod reports;

use std::time::Duration;

use haulout_api_types::Evacuation;
use haulout_e2e::{Cluster, Handle, Output, Webhook, objects, service, wait};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Secret};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde::Deserialize as _;
use serde_json::{Value, json};

const NAMESPACE: &str = "shop";
const USER_GRACE: &str = "grace";
const POD_REMOVERS: &str = "pod-removers";
const NODES: &str = "system:nodes";
const LIMIT: Duration = Duration::from_secs(60);

/// The expected result of kubectl.
enum Expected<'a> {
    /// It succeeds without a warning.
    Accepted,
    /// It succeeds with a warning that contains this text.
    Warned(&'a str),
    /// It fails with a message that contains all these texts.
    Rejected(&'a [&'a str]),
}

/// Runs the cases of the tables and collects all unexpected results.
struct CaseRunner<'a> {
    cluster: &'a Handle,
    client: Client,
    wrong: Vec<String>,
    count: usize,
}

impl CaseRunner<'_> {
    /// Runs one case: kubectl as this user (empty: the admin) with these arguments and this object on stdin.
    async fn check(
        &mut self,
        what: &str,
        user: &str,
        args: &[&str],
        object: Option<&Value>,
        expected: Expected<'_>,
    ) {
        self.count += 1;
        let output = self.kubectl(user, args, object).await;
        let warned = output.stderr.lines().any(|line| line.starts_with("Warning: "));
        let (fits, wanted) = match expected {
            Expected::Accepted => {
                (output.status.success() && !warned, "to be accepted without a warning".to_owned())
            }
            Expected::Warned(part) => {
                let found =
                    output.stderr.lines().any(|line| line.starts_with("Warning: ") && line.contains(part));
                (output.status.success() && found, format!("the warning {part:?}"))
            }
            Expected::Rejected(parts) => {
                let found = parts.iter().all(|part| output.stderr.contains(part));
                (!output.status.success() && found, format!("the rejection {parts:?}"))
            }
        };
        if !fits {
            let got = output.stderr.chars().take(1500).collect::<String>();
            self.wrong.push(format!("{what}\n  expected {wanted}\n  got {}: {got}", output.status));
        }
    }

    /// Runs `kubectl patch` with this merge patch of the status of an Evacuation.
    async fn report(&mut self, what: &str, user: &str, name: &str, status: &Value, expected: Expected<'_>) {
        let patch = json!({ "status": status }).to_string();
        let args = ["--subresource=status", "--type=merge", "-p", &patch];
        let args = [&["patch", "evacuation", name, "-n", NAMESPACE], args.as_slice()].concat();
        self.check(what, user, &args, None, expected).await;
    }

    /// Writes a status as the evacuation controller.
    async fn write_as_controller(&self, name: &str, status: Value) {
        let account = "haulout-evacuation-controller";
        let account = self.cluster.service_account_kubeconfig(service::NAMESPACE, account).await.unwrap();
        let controller = self.cluster.client_from(&account, "controller").await.unwrap();
        Api::<Evacuation>::namespaced(controller, NAMESPACE)
            .patch_status(name, &PatchParams::default(), &Patch::Merge(json!({ "status": status })))
            .await
            .expect("the evacuation controller may write its own fields");
    }

    /// Runs `kubectl create` with this object.
    async fn create(&mut self, what: &str, user: &str, object: &Value, expected: Expected<'_>) {
        self.check(what, user, &["create", "-f", "-"], Some(object), expected).await;
    }

    async fn kubectl(&self, user: &str, args: &[&str], object: Option<&Value>) -> Output {
        let config = match user {
            "" => self.cluster.kubeconfig.clone(),
            USER_GRACE => self.cluster.user_kubeconfig(user, &[POD_REMOVERS]).unwrap(),
            user if user.starts_with("system:node:") => self.cluster.user_kubeconfig(user, &[NODES]).unwrap(),
            user => self.cluster.user_kubeconfig(user, &[]).unwrap(),
        };
        let config = config.display().to_string();
        let args = [&["--kubeconfig", &config], args].concat();
        let stdin = object.map(Value::to_string);
        self.cluster.run(&self.cluster.tools.kubectl(), &args, stdin.as_deref()).await.unwrap()
    }

    /// Waits until the webhook prints this warning: its caches are updated by watches.
    async fn until_warned(&self, args: &[&str], object: Option<&Value>, part: &str) {
        wait::eventually(&format!("the webhook warns of {part:?}"), LIMIT, async || {
            let output = self.kubectl("", &[args, &["--dry-run=server"]].concat(), object).await;
            Ok(output.stderr.contains(part).then_some(()))
        })
        .await
        .unwrap();
    }

    async fn json(&self, args: &[&str]) -> Value {
        let text = self.kubectl("", &[&["get", "-o", "json"], args].concat(), None).await.success().unwrap();
        serde_json::from_str(&text).unwrap()
    }

    async fn pod(&self, name: &str) -> Pod {
        Api::<Pod>::namespaced(self.client.clone(), NAMESPACE).get(name).await.unwrap()
    }
}

/// The users. All of them except vera may write our kinds and their statuses as far as RBAC is concerned. The webhook and
/// the policies require more.
///
/// | user | additional permissions |
/// |---|---|
/// | nils | nothing |
/// | dora | delete pods in the namespace `shop` |
/// | grace | evict every pod, as one of the group `pod-removers` |
/// | evi | evict pod `web-1` in the namespace `shop` |
/// | nora | delete the nodes n1 and n2 |
/// | amy | delete every node |
/// | rita | report for the evacuator a.example.com in the namespace `shop` |
/// | rob | report for the evacuator b.example.com in the namespace `shop` |
/// | system:node:n1, system:node:n2 | those of kubelets |
/// | vera | only the role `view` in the namespace `shop` |
fn users() -> Vec<Value> {
    let rbac = "rbac.authorization.k8s.io";
    let user = |name: &str| json!([{"apiGroup": rbac, "kind": "User", "name": name}]);
    let cluster_role = |name: &str, rules: Value| json!({"apiVersion": format!("{rbac}/v1"), "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules});
    let binding = |kind: &str, role: &str, subjects: Value| {
        json!({"apiVersion": format!("{rbac}/v1"), "kind": kind,
            "metadata": {"name": role, "namespace": (kind == "RoleBinding").then_some(NAMESPACE)},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": role}, "subjects": subjects})
    };
    let ours = json!([{"apiGroups": ["evacuation.coordination.k8s.io", "nodemaintenance.k8s.io"],
        "resources": ["evacuations", "evacuations/status", "nodemaintenances", "drainrules"], "verbs": ["*"]}]);
    let writers = ["nils", "dora", USER_GRACE, "evi", "nora", "amy", "rita", "rob"];
    let writers = writers.map(|name| json!({"apiGroup": rbac, "kind": "User", "name": name}));
    let kubelets = [json!({"apiGroup": rbac, "kind": "Group", "name": NODES})];
    let reporter = |class: &str| {
        json!([{"apiGroups": ["evacuation.coordination.k8s.io"], "resources": ["evacuators"],
            "resourceNames": [class], "verbs": ["report"]}])
    };
    vec![
        cluster_role("test-writers", ours),
        binding("ClusterRoleBinding", "test-writers", json!([writers.as_slice(), &kubelets].concat())),
        cluster_role("test-rita", reporter("a.example.com")),
        binding("RoleBinding", "test-rita", user("rita")),
        cluster_role("test-rob", reporter("b.example.com")),
        binding("RoleBinding", "test-rob", user("rob")),
        json!({"apiVersion": format!("{rbac}/v1"), "kind": "RoleBinding",
            "metadata": {"name": "test-vera", "namespace": NAMESPACE},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "view"}, "subjects": user("vera")}),
        cluster_role("test-dora", json!([{"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]}])),
        binding("RoleBinding", "test-dora", user("dora")),
        cluster_role(
            "test-grace",
            json!([{"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}]),
        ),
        binding(
            "ClusterRoleBinding",
            "test-grace",
            json!([{"apiGroup": rbac, "kind": "Group", "name": POD_REMOVERS}]),
        ),
        cluster_role(
            "test-evi",
            json!([{"apiGroups": [""], "resources": ["pods/eviction"], "resourceNames": ["web-1"], "verbs": ["create"]}]),
        ),
        binding("RoleBinding", "test-evi", user("evi")),
        cluster_role(
            "test-nora",
            json!([{"apiGroups": [""], "resources": ["nodes"], "resourceNames": ["n1", "n2"], "verbs": ["delete"]}]),
        ),
        binding("ClusterRoleBinding", "test-nora", user("nora")),
        cluster_role("test-amy", json!([{"apiGroups": [""], "resources": ["nodes"], "verbs": ["delete"]}])),
        binding("ClusterRoleBinding", "test-amy", user("amy")),
    ]
}

/// The API server watches roles and bindings, so new ones apply a little later.
async fn until_permissions_apply(client: &Client) {
    let reviews: Api<SubjectAccessReview> = Api::all(client.clone());
    let pods = |verb: &str, subresource: &str| json!({"namespace": NAMESPACE, "verb": verb, "resource": "pods", "subresource": subresource, "name": "web-1"});
    let node = json!({"verb": "delete", "resource": "nodes", "name": "n1"});
    let ours = json!({"verb": "create", "group": "nodemaintenance.k8s.io", "resource": "nodemaintenances"});
    let evacuation = |verb: &str, resource: &str, name: &str| json!({"namespace": NAMESPACE, "verb": verb, "group": "evacuation.coordination.k8s.io", "resource": resource, "name": name});
    for (user, attributes) in [
        ("nils", ours),
        ("rita", evacuation("report", "evacuators", "a.example.com")),
        ("rob", evacuation("report", "evacuators", "b.example.com")),
        // The view role is aggregated.
        ("vera", evacuation("get", "evacuations", "")),
        ("system:node:n2", evacuation("create", "evacuations", "")),
        ("dora", pods("delete", "")),
        (USER_GRACE, pods("create", "eviction")),
        ("evi", pods("create", "eviction")),
        ("nora", node.clone()),
        ("amy", node),
    ] {
        let group = match user {
            USER_GRACE => POD_REMOVERS,
            kubelet if kubelet.starts_with("system:node:") => NODES,
            _ => "system:authenticated",
        };
        let asked = json!({"spec": {"user": user, "groups": [group], "resourceAttributes": attributes}});
        let asked: SubjectAccessReview = serde_json::from_value(asked).unwrap();
        wait::eventually(&format!("{user} has all permissions"), LIMIT, async || {
            let answer = reviews.create(&PostParams::default(), &asked).await?;
            Ok(answer.status.is_some_and(|status| status.allowed).then_some(()))
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn every_admission_rule_works_through_kubectl() {
    let cluster = Cluster::builder().name("admission").scheduler(false).kwok(false).boot().await.unwrap();
    let client = cluster.client().await.unwrap();
    let params = PostParams::default();
    Api::<Namespace>::all(client.clone()).create(&params, &objects::namespace(NAMESPACE)).await.unwrap();
    // Without the scheduler, nothing touches the pods. Their annotations are invalid, as if they had been set while
    // the webhook was down.
    let all_pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    for pod in pods::early() {
        all_pods
            .create(&params, &pod)
            .await
            .unwrap_or_else(|error| panic!("pod {}: {error}", pod.name_any()));
    }
    let nodes: Api<Node> = Api::all(client.clone());
    for node in nodes::all() {
        nodes.create(&params, &node).await.unwrap();
    }
    let (webhook, service) = Webhook::with_replica(&cluster).await.unwrap();
    for object in users() {
        cluster.kubectl_with(&["create", "-f", "-"], &object.to_string()).await.unwrap().success().unwrap();
    }
    until_permissions_apply(&client).await;

    let mut runner = CaseRunner { cluster: &cluster, client, wrong: Vec::new(), count: 0 };
    pods::table(&mut runner).await;
    reports::table(&mut runner).await;
    evacuations::table(&mut runner).await;
    node_maintenances::table(&mut runner).await;
    drain_rules::table(&mut runner).await;
    nodes::table(&mut runner).await;

    let reached = async |resource: &str| {
        let label = format!("resource=\"{resource}\"");
        service.metric_where("haulout_admission_requests_total", &label).await.unwrap()
    };
    let before = (reached("pods").await, reached("nodes").await);
    assert!(before.0 > 0.0 && before.1 > 0.0);
    pods::harmless(&mut runner).await;
    nodes::harmless(&mut runner).await;
    assert_eq!(
        before,
        (reached("pods").await, reached("nodes").await),
        "harmless requests do not reach the webhook"
    );

    let cached =
        service.metric_where("haulout_admission_access_reviews_total", "result=\"cached\"").await.unwrap();
    assert!(cached > 0.0, "no access review was answered from the cache");

    drop((service, webhook));
    reports::table_without_webhook(&mut runner).await;
    let CaseRunner { wrong, count, .. } = runner;
    assert!(wrong.is_empty(), "{} of {count} cases:\n{}", wrong.len(), wrong.join("\n"));
    upgrade_keeps_the_ca_bundle(&cluster).await;
    cluster.shutdown().await;
}

/// The chart contains neither the CA in the configurations nor the certificate in the Secret. No certificate manager runs
/// that could restore them.
async fn upgrade_keeps_the_ca_bundle(cluster: &Handle) {
    let client = cluster.client().await.unwrap();
    let name = "haulout-system.haulout-admission-webhook";
    let ways = async || {
        let mutating = Api::<MutatingWebhookConfiguration>::all(client.clone()).get(name).await.unwrap();
        let validating = Api::<ValidatingWebhookConfiguration>::all(client.clone()).get(name).await.unwrap();
        let mutating = mutating.webhooks.into_iter().flatten().map(|webhook| webhook.client_config);
        let validating = validating.webhooks.into_iter().flatten().map(|webhook| webhook.client_config);
        mutating.chain(validating).collect::<Vec<_>>()
    };
    let secrets: Api<Secret> = Api::namespaced(client.clone(), haulout_e2e::service::NAMESPACE);
    let secret = async || secrets.get("haulout-webhook-certificate").await.unwrap();
    let (before, certificate) = (ways().await, secret().await);
    assert!(certificate.data.as_ref().is_some_and(|data| data.contains_key("tls.key")));
    assert!(before.iter().all(|way| way.ca_bundle.as_ref().is_some_and(|bundle| !bundle.0.is_empty())));
    let url = "https://127.0.0.1:1";
    cluster
        .install_chart(&[("admissionWebhook.enabled", "true"), ("admissionWebhook.url", url)])
        .await
        .unwrap();
    let after = ways().await;
    assert!(
        after.iter().all(|way| way.url.as_ref().is_some_and(|there| there.starts_with(url))),
        "{after:?}"
    );
    let bundles =
        |ways: &[WebhookClientConfig]| ways.iter().map(|way| way.ca_bundle.clone()).collect::<Vec<_>>();
    assert_eq!(bundles(&before), bundles(&after));
    assert_eq!(secret().await.data, certificate.data);
}

#[tokio::test]
async fn services_of_another_release_are_exempt() {
    let cluster = crate::support::shared().await;
    let chart = haulout_e2e::repository().join("charts/haulout");
    let chart = chart.display().to_string();
    let template = ["template", "x", &chart, "-n", "elsewhere", "-s", "templates/admission-webhook.yaml"];
    let text = cluster.helm(&template).await.unwrap().success().unwrap();
    assert!(!text.contains("haulout-system"), "the rendered files are for another namespace");
    let objects: Vec<Value> =
        serde_yaml::Deserializer::from_str(&text).map(|one| Value::deserialize(one).unwrap()).collect();
    let webhooks = objects.iter().filter_map(|object| object["webhooks"].as_array()).flatten();
    let conditions: Vec<_> =
        webhooks.map(|webhook| webhook["matchConditions"][0]["expression"].as_str().unwrap()).collect();
    assert_eq!(conditions.len(), 7);
    for service in ["admission-webhook", "evacuation-controller", "maintenance-controller", "taint-manager"] {
        let user = format!("'system:serviceaccount:elsewhere:x-haulout-{service}'");
        assert!(conditions.iter().all(|condition| condition.contains(&user)), "{user}: {conditions:?}");
    }
}
