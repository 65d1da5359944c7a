//! Table and property tests for defaults and validation of Evacuations.

use std::collections::BTreeMap;

use super::*;
use haulout_api_types::names::EVACUATOR_ANNOTATION_PREFIX;
use proptest::prelude::*;

const UID: &str = "1f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11";

fn pod(uid: &str, annotations: &[(&str, &str)], labels: &Value) -> ObjectMeta {
    let annotations: BTreeMap<_, _> = annotations
        .iter()
        .map(|(class, value)| (format!("{EVACUATOR_ANNOTATION_PREFIX}{class}"), *value))
        .collect();
    serde_json::from_value(json!({
        "name": "web-1", "namespace": "shop", "uid": uid, "labels": labels, "annotations": annotations,
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "s", "controller": true}
        ]
    }))
    .unwrap()
}

fn evacuation(rest: Value) -> Evacuation {
    let mut object = json!({
        "apiVersion": "evacuation.coordination.k8s.io/v1alpha1", "kind": "Evacuation",
        "metadata": {"name": format!("{UID}-web-1"), "namespace": "shop", "annotations": evacuators::merge_annotations(None)},
        "spec": {"podRef": {"name": "web-1", "uid": UID}}
    });
    json_patch::merge(&mut object, &rest);
    serde_json::from_value(object).unwrap()
}

fn status(status: Value) -> Evacuation {
    evacuation(json!({"status": status}))
}

fn messages(verdict: &Verdict) -> Vec<&str> {
    verdict.violations.iter().map(|violation| violation.message.as_str()).collect()
}

/// The object after the patch.
fn prepared(new: &Evacuation, pod: &ObjectMeta, served: &BTreeSet<String>) -> Evacuation {
    let verdict = set_defaults(new, Some(pod), served);
    assert_eq!(verdict.violations, []);
    let mut object = serde_json::to_value(new).unwrap();
    json_patch::patch(&mut object, &verdict.patch).unwrap();
    serde_json::from_value(object).unwrap()
}

#[test]
fn new_evacuation_gets_labels_and_evacuators_of_its_pod() {
    let pod = pod(
        UID,
        &[("a.example.com", "5"), ("b.example.com", "20000/x"), ("bad.example.com", "no")],
        &json!({"app": "web"}),
    );
    let new = evacuation(json!({"metadata": {"labels": {"app": "mine", "team": "red"}}}));
    let served = BTreeSet::from(["statefulset.apps.k8s.io".to_owned()]);
    let done = prepared(&new, &pod, &served);
    assert_eq!(json!(done.metadata.labels), json!({"app": "web", "team": "red"}), "the pod's labels win");
    let classes: Vec<_> = done.spec.evacuators.iter().map(|e| e.evacuator_class.as_str()).collect();
    assert_eq!(classes, ["b.example.com", "statefulset.apps.k8s.io", "a.example.com"]);

    let verdict = validate_new(&done, "shop", Some(&pod), &served);
    assert_eq!(verdict.violations, [], "the defaults are valid");
    let key = format!("{EVACUATOR_ANNOTATION_PREFIX}bad.example.com");
    assert_eq!(verdict.warnings.len(), 1);
    assert!(verdict.warnings[0].starts_with(&format!("pod web-1: annotation {key}: the priority must be")));
    assert_eq!(set_defaults(&done, Some(&pod), &served), Verdict::default(), "no default is missing");
}

#[test]
fn new_evacuation_is_marked_for_argo_cd() {
    let pod = pod(UID, &[], &json!({"app.kubernetes.io/instance": "shop"}));
    let (compare, sync) = ("argocd.argoproj.io/compare-options", "argocd.argoproj.io/sync-options");
    let ours = json!({compare: "IgnoreExtraneous", sync: "Prune=false"});
    for (given, expected) in [
        (json!(null), ours.clone()),
        (json!({"mine": "x"}), json!({compare: "IgnoreExtraneous", sync: "Prune=false", "mine": "x"})),
        (json!({sync: "Prune=confirm"}), json!({compare: "IgnoreExtraneous", sync: "Prune=confirm"})),
    ] {
        let mut new = evacuation(json!({}));
        new.metadata.annotations = serde_json::from_value(given).unwrap();
        assert_eq!(json!(prepared(&new, &pod, &BTreeSet::new()).metadata.annotations), expected);
    }
}

#[test]
fn given_evacuators_must_match_the_pod() {
    let pod = pod(UID, &[("a.example.com", "5"), ("b.example.com", "7/x")], &json!({}));
    let none = BTreeSet::new();
    let given = |evacuators: Value| evacuation(json!({"spec": {"evacuators": evacuators}}));
    let [a, b] = [
        json!({"evacuatorClass": "a.example.com", "priority": 5}),
        json!({"evacuatorClass": "b.example.com", "priority": 7, "role": "x"}),
    ];
    let same = given(json!([a, b]));
    assert_eq!(set_defaults(&same, Some(&pod), &none), Verdict::default());
    assert_eq!(
        validate_new(&same, "shop", Some(&pod), &none),
        Verdict::default(),
        "their order does not matter"
    );
    for (wrong, shown) in [(json!([a]), "a.example.com (5)"), (json!([]), "none")] {
        let verdict = validate_new(&given(wrong), "shop", Some(&pod), &none);
        assert_eq!(
            messages(&verdict),
            [format!(
                "spec.evacuators: must match the evacuators of pod web-1: expected b.example.com (7/x), a.example.com \
                 (5), got {shown}; omit the field to use the pod's"
            )]
        );
    }
}

#[test]
fn pod_with_another_uid_is_not_used_for_defaults() {
    let new = evacuation(json!({}));
    let other =
        pod("2f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11", &[("a.example.com", "5")], &json!({"app": "web"}));
    let none = BTreeSet::new();
    assert_eq!(set_defaults(&new, Some(&other), &none), Verdict::default());
    assert_eq!(set_defaults(&new, None, &none), Verdict::default());
    assert_eq!(
        messages(&validate_new(&new, "shop", None, &none)),
        ["spec.podRef.name: there is no pod web-1 in namespace shop"]
    );
    let verdict = validate_new(&new, "shop", Some(&other), &none);
    assert!(
        messages(&verdict)[0].starts_with("spec.podRef.uid: pod web-1 in namespace shop has another UID")
    );
}

#[test]
fn new_evacuation_with_a_status_is_rejected() {
    let new =
        status(json!({"activeEvacuatorClass": "a.example.com", "evacuationCancellationPolicy": "Forbid"}));
    let verdict = set_defaults(&new, None, &BTreeSet::new());
    let messages = messages(&verdict);
    assert_eq!(messages.len(), 2);
    assert!(messages[0].starts_with("status.activeEvacuatorClass: must be empty in a new Evacuation"));
    assert!(messages[1].starts_with("status.evacuationCancellationPolicy: must be Allow or absent"));
    let harmless = status(json!({"message": "x", "evacuationCancellationPolicy": "Allow"}));
    assert_eq!(set_defaults(&harmless, None, &BTreeSet::new()), Verdict::default());
}

#[test]
fn forbidden_cancellation_is_rejected_while_the_pod_exists() {
    let there = pod(UID, &[], &json!({}));
    let other = pod("2f0c3a52-7f0e-4a52-9f57-0d8a1c7f0e11", &[], &json!({}));
    let forbid =
        status(json!({"evacuationCancellationPolicy": "Forbid", "activeEvacuatorClass": "a.example.com"}));
    assert_eq!(
        messages(&validate_cancellation(&forbid, Some(&there), "it cannot be deleted")),
        [
            "status.evacuationCancellationPolicy is Forbid, so it cannot be deleted while pod web-1 exists; the \
             Evacuation is deleted when the pod is gone; to cancel it earlier, ask the owner of evacuator a.example.com"
        ]
    );
    for allowed in [evacuation(json!({})), status(json!({"evacuationCancellationPolicy": "Allow"}))] {
        assert_eq!(validate_cancellation(&allowed, Some(&there), ""), Verdict::default());
    }
    for gone in [None, Some(&other)] {
        assert_eq!(validate_cancellation(&forbid, gone, ""), Verdict::default());
    }
}

#[test]
fn last_instigator_is_kept_only_under_forbid() {
    let finalizer = instigators::finalizer;
    let (mine, other, own) =
        (finalizer("x.example.com"), finalizer("y.example.com"), finalizer("a.example.com"));
    let with = |finalizers: &[&str], policy: &str| {
        evacuation(json!({
            "metadata": {"finalizers": finalizers}, "status": {"evacuationCancellationPolicy": policy},
            "spec": {"evacuators": [{"evacuatorClass": "a.example.com", "priority": 5}]},
        }))
    };
    let cases: [(&[&str], &[&str], bool); 6] = [
        (&[&mine], &[], true),
        (&[&mine, &own, "example.com/x"], &[&own, "example.com/x"], true),
        (&[&mine, &other], &[&other], false),
        (&[&own], &[], false),
        (&[], &[], false),
        (&[&mine], &[&mine, &other], false),
    ];
    for (old, new, taken) in cases {
        let forbid = removes_last_instigator(&with(old, "Forbid"), &with(new, "Forbid"));
        assert_eq!(forbid, taken, "{old:?} {new:?}");
        assert!(!removes_last_instigator(&with(old, "Allow"), &with(new, "Allow")), "{old:?} {new:?}");
    }
}

#[test]
fn deletion_warning_names_instigators_and_how_to_cancel() {
    let wanted_by = |instigators: &[&str]| {
        let finalizers: Vec<_> = instigators.iter().map(|name| instigators::finalizer(name)).collect();
        evacuation(json!({"metadata": {"finalizers": finalizers}}))
    };
    let all =
        wanted_by(&[instigator::NODE_MAINTENANCE, instigator::TAINT_MANAGER, "descheduler.example.com"]);
    assert_eq!(
        deletion_warnings(&all, &["blue".into()]).warnings,
        [
            "instigator nodemaintenance.k8s.io still requests the evacuation of pod web-1, so it continues; to cancel \
             it, complete or \
             delete NodeMaintenance blue, or label the pod cluster.x-k8s.io/drain=skip",
            "instigator taint-manager.nodemaintenance.k8s.io still requests the evacuation of pod web-1, so it \
             continues; to cancel it, remove the NoExecute taint from its node",
            "instigator descheduler.example.com still requests the evacuation of pod web-1, so it continues; to \
             cancel it, remove the \
             finalizer evacuation.coordination.k8s.io/instigator_descheduler.example.com",
        ]
    );
    let names: Vec<_> = ["a", "b", "c", "d", "e"].map(Into::into).to_vec();
    for (count, expected) in
        [(0, "its NodeMaintenance,"), (3, "NodeMaintenances a, b, c,"), (5, "a, b, c and 2 more,")]
    {
        let warnings =
            deletion_warnings(&wanted_by(&[instigator::NODE_MAINTENANCE]), &names[..count]).warnings;
        assert!(warnings[0].contains(expected), "{warnings:?}");
    }
    assert_eq!(deletion_warnings(&wanted_by(&[]), &[]), Verdict::default());
}

proptest! {
    /// The result has every label of the pod, and every other label of the Evacuation. Applying it again changes
    /// nothing.
    #[test]
    fn labels_are_merged_and_pod_labels_win(
        own in proptest::collection::btree_map("[a-d]", "[x-z]", 0..5),
        of_pod in proptest::collection::btree_map("[a-d]", "[x-z]", 0..5),
    ) {
        let pod = pod(UID, &[], &json!(of_pod));
        let done = prepared(&evacuation(json!({"metadata": {"labels": own}})), &pod, &BTreeSet::new());
        let merged = done.metadata.labels.clone().unwrap_or_default();
        prop_assert!(of_pod.iter().all(|(key, value)| merged.get(key) == Some(value)));
        prop_assert!(own.iter().all(|(key, value)| of_pod.contains_key(key) || merged.get(key) == Some(value)));
        prop_assert_eq!(merged.len(), own.keys().chain(of_pod.keys()).collect::<BTreeSet<_>>().len());
        prop_assert_eq!(set_defaults(&done, Some(&pod), &BTreeSet::new()), Verdict::default());
    }

    /// The defaults for any pod pass validation.
    #[test]
    fn defaulted_evacuation_is_valid(
        annotations in proptest::collection::btree_map("[a-c]{1,2}", "(1|7|10000|x)(/(controller|r))?", 0..6),
        serves: bool,
    ) {
        let annotations: Vec<_> = annotations.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let pod = pod(UID, &annotations, &json!({}));
        let served = serves.then(|| "statefulset.apps.k8s.io".to_owned()).into_iter().collect();
        let done = prepared(&evacuation(json!({})), &pod, &served);
        let verdict = validate_new(&done, "shop", Some(&pod), &served);
        prop_assert_eq!(&verdict.violations, &[]);
        prop_assert_eq!(verdict, validate_new(&done, "shop", Some(&pod), &served));
    }
}
