//! Policies of a cluster that reject requests of ours, or of Kubernetes' own controllers.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration,
};

use super::*;

/// What the message of the policies says.
pub(super) const POLICY: &str = "the owner of the cluster has other rules";

impl App<'_> {
    /// Rejects these operations on a resource in the namespace of this app unless the expression is true. `attempt` is such a
    /// request as a dry run, to detect when the policy is in force.
    pub(super) async fn reject(
        &self,
        (group, resource, operations): (&str, &str, &[&str]),
        unless: &str,
        attempt: impl AsyncFn() -> kube::Result<()>,
    ) {
        let name = self.scenario.of("policy");
        let policy = json!({
            "metadata": {"name": name},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [
                    {"apiGroups": [group], "apiVersions": ["*"], "operations": operations, "resources": [resource]},
                ]},
                "validations": [{"expression": unless, "message": POLICY}],
            },
        });
        let here = json!({"matchLabels": {"kubernetes.io/metadata.name": self.scenario.name}});
        let binding = json!({
            "metadata": {"name": name},
            "spec": {
                "policyName": name, "validationActions": ["Deny"],
                "matchResources": {"namespaceSelector": here},
            },
        });
        let policies: Api<ValidatingAdmissionPolicy> = Api::all(self.client());
        let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(self.client());
        policies.create(&PostParams::default(), &serde_json::from_value(policy).unwrap()).await.unwrap();
        bindings.create(&PostParams::default(), &serde_json::from_value(binding).unwrap()).await.unwrap();
        let in_force = wait::eventually("the policy is in force", SOON, async || {
            let answer = attempt().await;
            Ok(matches!(answer, Err(kube::Error::Api(status)) if status.message.contains(POLICY))
                .then_some(()))
        });
        in_force.await.unwrap();
    }

    /// Rejects that pods get a Deployment as owner.
    pub(super) async fn reject_moves(&self, pod: &Pod) {
        let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "u"});
        let patch = Patch::Merge(json!({"metadata": {"ownerReferences": [deployment]}}));
        let unless =
            "!object.metadata.?ownerReferences.orValue([]).exists(owner, owner.kind == 'Deployment')";
        self.reject(("", "pods", &["UPDATE"]), unless, async || {
            self.scenario.pods().patch(&pod.name_any(), &dry(), &patch).await.map(drop)
        })
        .await;
    }

    /// Rejects new pods.
    pub(super) async fn reject_pods(&self) {
        let pod = objects::pod("attempt").namespace(self.scenario.name).build();
        let params = PostParams { dry_run: true, ..PostParams::default() };
        self.reject(("", "pods", &["CREATE"]), "false", async || {
            self.scenario.pods().create(&params, &pod).await.map(drop)
        })
        .await;
    }

    /// Rejects the finalizer of the workload evacuator on Evacuations.
    pub(super) async fn reject_finalizers(&self, pod: &Pod) {
        let ours = haulout_api_types::instigators::finalizer(class::DEPLOYMENT);
        let unless = format!("!('{ours}' in object.metadata.?finalizers.orValue([]))");
        let mut attempt = evacuation(pod, "attempt.example.com");
        attempt.metadata.finalizers = Some(vec![ours]);
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let what = (names::EVACUATION_GROUP, "evacuations", ["CREATE", "UPDATE"].as_slice());
        self.reject(what, &unless, async || {
            self.scenario.evacuations().create(&params, &attempt).await.map(drop)
        })
        .await;
    }

    /// Makes all changes of pods fail, because a webhook that has to be asked does not exist. Returns its configuration.
    pub(super) async fn fail_changes(&self, pod: &Pod) -> Api<ValidatingWebhookConfiguration> {
        let webhooks: Api<ValidatingWebhookConfiguration> = Api::all(self.client());
        let webhook = json!({
            "metadata": {"name": self.scenario.of("policy")},
            "webhooks": [{
                "name": "missing.example.com",
                "clientConfig": {"service": {"namespace": self.scenario.name, "name": "missing"}},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["pods"]}],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.scenario.name}},
                "failurePolicy": "Fail", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            }],
        });
        webhooks.create(&PostParams::default(), &serde_json::from_value(webhook).unwrap()).await.unwrap();
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"example.com/a": "b"}}}));
        let in_force = wait::eventually("changes of pods fail", SOON, async || {
            Ok(self.scenario.pods().patch(&pod.name_any(), &dry(), &patch).await.err().map(drop))
        });
        in_force.await.unwrap();
        webhooks
    }
}

/// The Evacuation of a pod, as another instigator requests it.
pub(super) fn evacuation(pod: &Pod, instigator: &str) -> Evacuation {
    let served = [class::DEPLOYMENT.to_owned()].into();
    let (evacuation, _) =
        haulout_api_types::evacuators::evacuation_for(&pod.metadata, instigator, &served).unwrap();
    evacuation
}

fn dry() -> PatchParams {
    PatchParams { dry_run: true, ..PatchParams::default() }
}
