//! Volumes that have to be detached before the DaemonSet pods leave that detach them.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::storage::v1::VolumeAttachment;

use super::*;

pub async fn volumes_detach_before_daemon_sets_leave(env: &TestEnv) {
    let scenario = env.scenario("volumes").await;
    scenario.node("n1", "blue").await;
    let daemon_set = json!({
        "metadata": {"name": "csi"},
        "spec": {
            "selector": {"matchLabels": {"app": "csi"}},
            "template": {
                "metadata": {"labels": {"app": "csi"}},
                "spec": {
                    "containers": [{"name": "csi", "image": "csi"}],
                    "tolerations": [{"operator": "Exists"}],
                    "nodeSelector": {"pool": scenario.of("blue")},
                },
            },
        },
    });
    let daemon_sets: Api<k8s_openapi::api::apps::v1::DaemonSet> =
        Api::namespaced(env.client.clone(), scenario.name);
    daemon_sets.create(&PostParams::default(), &serde_json::from_value(daemon_set).unwrap()).await.unwrap();
    let runs = |pods: &[Pod]| pods.iter().any(|pod| pod.spec.as_ref().is_some_and(|s| s.node_name.is_some()));
    let pods = wait::all(scenario.pods(), watcher::Config::default(), "are bound", SOON, runs).await;
    let daemon = scenario.explained(pods)[0].name_any();
    let claim = json!({
        "metadata": {"name": "kept"},
        "spec": {"volumeName": "pv-kept", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    });
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(env.client.clone(), scenario.name);
    claims.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
    let stays = objects::pod("stays").label(names::DRAIN_LABEL, "skip").claim("kept");
    scenario.pod_from(stays, "n1").await;
    scenario.pod("web-1", "n1").await;
    let attachments: Api<VolumeAttachment> = Api::all(env.client.clone());
    let volumes: Api<PersistentVolume> = Api::all(env.client.clone());
    for volume in ["pv-kept", "pv-left"] {
        let object = json!({
            "metadata": {"name": volume},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "1Gi"},
                "csi": {"driver": "csi.example.com", "volumeHandle": volume},
            },
        });
        volumes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        let attachment = json!({
            "metadata": {"name": format!("attachment-of-{volume}")},
            "spec": {"attacher": "csi.example.com", "nodeName": scenario.of("n1"), "source": {"persistentVolumeName": volume}},
        });
        attachments
            .create(&PostParams::default(), &serde_json::from_value(attachment).unwrap())
            .await
            .unwrap();
        let attached = Patch::Merge(json!({"status": {"attached": true}}));
        let name = format!("attachment-of-{volume}");
        attachments.patch_status(&name, &PatchParams::default(), &attached).await.unwrap();
    }

    // The node reports the same two, and one that no other object names.
    let report = async |names: &[&str]| {
        let names: Vec<_> = names.iter().map(|name| json!({"name": name, "devicePath": ""})).collect();
        let patch = Patch::Merge(json!({"status": {"volumesAttached": names}}));
        scenario.nodes().patch_status(&scenario.of("n1"), &PatchParams::default(), &patch).await.unwrap();
    };
    let [kept, left] =
        ["pv-kept", "pv-left"].map(|volume| format!("kubernetes.io/csi/csi.example.com^{volume}"));
    report(&[&kept, &left, "kubernetes.io/iscsi/disk"]).await;

    scenario.maintain("m", "blue", Stage::Drain).await;
    scenario.until_pod_gone("web-1").await;
    let both = |m: &NodeMaintenance| drain(m).drain_message == "Waiting for 2 volumes to be detached.";
    let waiting = scenario.until("m", "waits for two volumes", both).await;
    assert!(
        drain(&waiting).blockers[0].message.contains("iscsi/disk, pv-left;"),
        "{:?}",
        drain(&waiting).blockers
    );
    report(&[&kept, &left]).await;
    let one = |m: &NodeMaintenance| drain(m).drain_message == "Waiting for 1 volume to be detached.";
    let waiting = scenario.until("m", "waits for one volume", one).await;
    assert_eq!(drain(&waiting).blockers[0].reason, names::reason::VOLUMES_ATTACHED);
    assert!(drain(&waiting).blockers[0].message.contains("pv-left"), "{:?}", drain(&waiting).blockers);
    assert_eq!(
        scenario.pods_with_evacuation().await,
        BTreeSet::new(),
        "the CSI driver has to detach it first"
    );
    // It is never detached: an admin lets the drain continue without it.
    let exclude = json!({"metadata": {"annotations": {names::EXCLUDE_VOLUME_DETACH_ANNOTATION: ""}}});
    scenario.patch_node("n1", exclude).await;
    scenario.until_evacuating(&[&daemon]).await;
    let message = scenario.until_event("m", names::event::VOLUMES_IGNORED).await;
    assert!(message.starts_with("1 volume is still attached to node volumes-n1"), "{message}");
    // The drain waits for it again, now for at most one second.
    let exclude = json!({"metadata": {"annotations": {names::EXCLUDE_VOLUME_DETACH_ANNOTATION: null}}});
    scenario.patch_node("n1", exclude).await;
    let waits =
        |m: &NodeMaintenance| drain(m).blockers.iter().any(|b| b.reason == names::reason::VOLUMES_ATTACHED);
    scenario.until("m", "waits for the volume", waits).await;
    let limit = Patch::Merge(json!({"spec": {"volumeDetachTimeoutSeconds": 1}}));
    scenario.maintenances().patch(&scenario.of("m"), &PatchParams::default(), &limit).await.unwrap();
    scenario.until("m", "continues", |m| !waits(m)).await;
    let limited = |event: &Event| event.note.iter().any(|note| note.contains("volumeDetachTimeoutSeconds"));
    scenario.event("m", names::event::VOLUMES_IGNORED, limited).await;
}
