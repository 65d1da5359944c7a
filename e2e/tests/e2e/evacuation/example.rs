//! The example evacuator works as documented.

use haulout_e2e::wait;
use kube::ResourceExt as _;

use super::{SOON, TestNamespace};
use crate::support::xtask;

const CLASS: &str = "copier.example.com";

pub async fn example_evacuator_reports_completes_and_aborts(test: TestNamespace) {
    let log = test.cluster.logs.join("example-evacuator.log");
    test.reporter_account("copier", &[CLASS]).await;
    let account = test.cluster.service_account_kubeconfig(&test.namespace, "copier").await.unwrap();
    let _example = test
        .cluster
        .command(&xtask().with_file_name("example-evacuator"))
        .env("KUBECONFIG", account)
        .args([
            "--namespace",
            &test.namespace,
            "--selector",
            "app=web",
            "--steps",
            "3",
            "--step-seconds",
            "2",
        ])
        .log(&log)
        .spawn("example-evacuator")
        .unwrap();
    let registered = async |name: &str| {
        test.pod(name, &[]).await;
        let key = format!("evacuation.coordination.k8s.io/priority_{CLASS}");
        let is_marked = |pod: &k8s_openapi::api::core::v1::Pod| pod.annotations().contains_key(&key);
        wait::present(test.pods(), name, "has the evacuator's annotation", SOON, is_marked).await.unwrap()
    };
    let pod = registered("web-1").await;
    let evacuation = test.evacuate(&pod).await;
    let says = |text: &'static str| {
        move |e: &haulout_api_types::Evacuation| e.status.as_ref().is_some_and(|s| s.message == text)
    };
    let working = test.until(&evacuation, "reports progress", says("copied 1 of 3 parts")).await;
    let status = working.status.unwrap();
    assert_eq!(status.active_evacuator_class.as_deref(), Some(CLASS));
    assert!(
        status.evacuation_progress_timestamp.is_some() && status.expected_evacuation_finish_time.is_some()
    );
    assert!(test.is_not_terminating(&pod).await);
    test.until_gone(&pod, &evacuation).await;

    let pod = registered("web-2").await;
    let evacuation = test.evacuate(&pod).await;
    test.until(&evacuation, "reports progress", says("copied 0 of 3 parts")).await;
    test.set_finalizers(&evacuation, &[]).await;
    let found = format!("{evacuation}: no longer active, aborted");
    let aborted = wait::eventually("the evacuator aborts", SOON, async || {
        Ok(std::fs::read_to_string(&log)?.lines().any(|line| line == found).then_some(()))
    });
    aborted.await.unwrap();
    assert!(test.is_not_terminating(&pod).await);
}
