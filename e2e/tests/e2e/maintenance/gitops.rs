//! Maintenances in Git, and Evacuations in namespaces that a GitOps tool manages. The admission webhook is enabled.

use super::*;

impl Scenario<'_> {
    /// Applies a manifest as a GitOps tool does.
    async fn apply(&self, manager: &str, manifest: &Value, dry_run: bool) -> NodeMaintenance {
        let name = manifest["metadata"]["name"].as_str().unwrap();
        let params = PatchParams { dry_run, ..PatchParams::apply(manager).force() };
        self.maintenances().patch(name, &params, &Patch::Apply(manifest)).await.unwrap()
    }

    /// Waits until applying the manifest again changes nothing, not even a version: no write of ours comes in between.
    async fn until_in_sync(&self, manager: &str, manifest: &Value) {
        let name = manifest["metadata"]["name"].as_str().unwrap();
        let what = format!("{name} is in sync");
        let found = wait::eventually(&what, SOON, async || {
            let before = json!(self.maintenances().get(name).await.unwrap());
            let dry = json!(self.apply(manager, manifest, true).await);
            let after = json!(self.apply(manager, manifest, false).await);
            Ok((before == dry && before == after).then_some(()))
        });
        self.explained(found.await);
    }
}

/// The webhook completes the drain plan, and the controllers write status, finalizer and stage.
pub async fn maintenance_in_git_stays_in_sync(env: &TestEnv) {
    let scenario = env.scenario("git").await;
    let own_entry = json!([{"podPriority": 5, "podSelector": {"matchLabels": {"app": "web"}}}]);
    for (manager, plan) in [
        ("argocd-controller", None),
        ("kustomize-controller", None),
        ("kustomize-controller", Some(own_entry)),
    ] {
        let name = format!("{manager}-{}", plan.is_some());
        scenario.node(&name, &name).await;
        scenario.pod("web", &name).await;
        let mut manifest = json!({
            "apiVersion": "nodemaintenance.k8s.io/v1alpha1",
            "kind": "NodeMaintenance",
            "metadata": {"name": scenario.of(&name), "labels": {"app.kubernetes.io/instance": "maintenances"}},
            "spec": {
                "reason": "from Git",
                "stage": "Drain",
                "nodeSelector": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "pool", "operator": "In", "values": [scenario.of(&name)]}]},
                ]},
            },
        });
        if let Some(plan) = plan {
            manifest["spec"]["drainPlan"] = plan;
        }
        let made = scenario.apply(manager, &manifest, false).await;
        assert!(made.spec.drain_plan.len() >= 12, "the webhook has completed the plan");
        let drained = scenario.until_drained(&name).await;
        assert_eq!(drained.spec.drain_plan, made.spec.drain_plan);
        scenario.until_in_sync(manager, &manifest).await;
        manifest["spec"]["stage"] = json!("Complete");
        scenario.apply(manager, &manifest, false).await;
        scenario.until_completed(&name).await;
        scenario.until_in_sync(manager, &manifest).await;
    }
}

/// Argo CD may track objects by this label, which an Evacuation has from its pod.
pub async fn evacuations_are_marked_for_argo_cd(env: &TestEnv) {
    let scenario = env.scenario("argo").await;
    scenario.node("n1", "blue").await;
    let instance = "app.kubernetes.io/instance";
    let pod = objects::pod("web").annotation(&slow(), "100").label(instance, "shop");
    let pod = scenario.pod_from(pod, "n1").await;
    scenario.maintain("blue", "blue", Stage::Drain).await;
    let name = scenario.until_evacuator_active(&pod).await;
    let evacuation = scenario.evacuations().get(&name).await.unwrap();
    assert_eq!(evacuation.labels()[instance], "shop");
    for (annotation, value) in [
        ("argocd.argoproj.io/compare-options", "IgnoreExtraneous"),
        ("argocd.argoproj.io/sync-options", "Prune=false"),
        (names::MAINTENANCES_ANNOTATION, &scenario.of("blue")),
    ] {
        assert_eq!(evacuation.annotations()[annotation], value);
    }
    scenario.set_stage("blue", Stage::Complete).await;
    scenario.until_completed("blue").await;
}
