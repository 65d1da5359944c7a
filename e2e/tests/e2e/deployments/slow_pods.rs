//! Deployments whose replacements become ready only when a test makes them ready.

use haulout_e2e::objects::PodBuilder;

use super::*;

impl<'a> App<'a> {
    /// As [`App::new`]. The first pods are ready, and replacements are not until [`App::make_ready`].
    pub(super) async fn slow(env: &'a Env, name: &'static str, nodes: &[&str], replicas: i32) -> Self {
        let app = Box::pin(Self::empty(env, name, nodes)).await;
        Box::pin(app.deploy_slow(objects::deployment("web").replicas(replicas))).await;
        app
    }

    /// As [`App::deploy`]. The first pods are ready, and replacements are not.
    pub(super) async fn deploy_slow(&self, deployment: DeploymentBuilder) {
        let first_are_ready = async {
            self.until_pods("exist", |pods| !pods.is_empty()).await;
            let wanted = usize::try_from(self.replicas().await).unwrap();
            for pod in self.until_pods("exist", |pods| pods.len() == wanted).await {
                self.make_ready(&pod).await;
            }
        };
        tokio::join!(self.deploy(deployment.pods(PodBuilder::not_ready)), first_are_ready);
    }

    pub(super) async fn make_ready(&self, pod: &Pod) {
        self.patch_pod(pod, json!({"metadata": {"annotations": {"haulout.test/ready": "true"}}})).await;
    }

    /// Waits until a pod belongs to the Deployment, and its replacement runs on this node and is not ready. Returns both.
    pub(super) async fn until_moved(&self, node: &str) -> (Pod, Pod) {
        let node = self.scenario.of(node);
        let starts = |pod: &Pod| is_on(pod, &node) && runs(pod) && !is_ready(pod) && !is_terminating(pod);
        let is_old = |pod: &Pod| is_moved(pod) && !is_terminating(pod);
        let pods = self
            .until_pods("include a moved pod and its replacement", |pods| {
                pods.iter().any(is_old) && pods.iter().any(starts)
            })
            .await;
        let find = |is: &dyn Fn(&Pod) -> bool| pods.iter().find(|pod| is(pod)).cloned().unwrap();
        (find(&is_old), find(&starts))
    }

    /// A slow app with one replica on node `a`, which is being drained. The replacement runs on node `b`.
    pub(super) async fn moved(env: &'a Env, name: &'static str, budget: PdbBuilder) -> (Self, Pod, Pod) {
        let app = Box::pin(Self::slow(env, name, &["a", "b"], 1)).await;
        app.budget(budget.namespace(name).selects("app", "web").build()).await;
        app.open(&["b"]).await;
        app.drain().await;
        let (old, new) = app.until_moved("b").await;
        (app, old, new)
    }
}

pub(super) fn runs(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}
