//! Tests of evacuator annotations, resolution and Evacuation names.

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn annotations(of: &[(&str, &str)]) -> BTreeMap<String, String> {
    of.iter()
        .map(|(class, value)| (format!("{EVACUATOR_ANNOTATION_PREFIX}{class}"), (*value).into()))
        .collect()
}

fn summary(evacuators: &[Evacuator]) -> Vec<String> {
    evacuators.iter().map(|e| format!("{} {}", e.evacuator_class, e.annotation().1)).collect()
}

#[test]
fn annotation_is_parsed_or_violation_is_named() {
    type Read<'a> = Result<(i32, Option<&'a str>), Problem>;
    let long_class = format!("{}.example.com", "a".repeat(43));
    let long_role = format!("1/{}", "r".repeat(254));
    let cases: [(&str, &str, Read); 25] = [
        ("foo.example.com", "0", Ok((0, None))),
        ("foo.example.com", "2000", Ok((2000, None))),
        ("foo.example.com", "100000/x", Ok((100_000, Some("x")))),
        (
            "foo.example.com",
            "11000/knowledgeable-app-specific",
            Ok((11_000, Some("knowledgeable-app-specific"))),
        ),
        ("deployment.apps.k8s.io", "10000/controller", Ok((10_000, Some("controller")))),
        ("foo", "1/a/b", Ok((1, Some("a/b")))),
        ("foo", "", Err(Problem::Priority(String::new()))),
        ("foo", "-1", Err(Problem::Priority("-1".into()))),
        ("foo", "+1", Err(Problem::Priority("+1".into()))),
        ("foo", "01", Err(Problem::Priority("01".into()))),
        ("foo", "1.5", Err(Problem::Priority("1.5".into()))),
        ("foo", "100001", Err(Problem::Priority("100001".into()))),
        ("foo", "99999999999999999999", Err(Problem::Priority("99999999999999999999".into()))),
        ("foo", "high", Err(Problem::Priority("high".into()))),
        ("foo", " 1", Err(Problem::Priority(" 1".into()))),
        ("foo", "1/", Err(Problem::Role)),
        ("foo", &long_role, Err(Problem::Role)),
        ("foo", "10000", Err(Problem::ReservedPriority)),
        ("foo", "10000/other", Err(Problem::ReservedPriority)),
        ("foo", "9999/controller", Err(Problem::ControllerPriority(9999))),
        ("nodemaintenance.k8s.io", "1", Err(Problem::ReservedClass)),
        (names::instigator::TAINT_MANAGER, "1", Err(Problem::ReservedClass)),
        ("my-nodemaintenance.k8s.io", "1", Ok((1, None))),
        ("Foo_bar", "1", Err(Problem::Class)),
        (&long_class, "1", Err(Problem::Class)),
    ];
    for (class, value, expected) in cases {
        let read = Evacuator::parse(class, value);
        let read = read.as_ref().map(|e| (e.priority, e.role.as_deref()));
        assert_eq!(read, expected.as_ref().map(|(priority, role)| (*priority, *role)), "{class}: {value}");
    }
}

#[test]
fn kep_example_is_sorted_by_priority() {
    let (evacuators, violations) = read(&annotations(&[
        ("fallback-evacuator.rescue-company.com", "2000"),
        ("deployment.apps.k8s.io", "10000/controller"),
        ("sensitive-workload-operator.fruit-company.com", "11000/knowledgeable-app-specific"),
    ]));
    assert_eq!(
        summary(&evacuators),
        [
            "sensitive-workload-operator.fruit-company.com 11000/knowledgeable-app-specific",
            "deployment.apps.k8s.io 10000/controller",
            "fallback-evacuator.rescue-company.com 2000",
        ]
    );
    assert_eq!(violations, []);
}

#[test]
fn invalid_annotations_are_skipped_and_named() {
    let mut all = annotations(&[("b.example.com", "5"), ("a.example.com", "5"), ("c.example.com", "x")]);
    all.extend(annotations(&[("d.example.com", "10000/controller"), ("e.example.com", "10000/controller")]));
    all.insert("example.com/other".into(), "not ours".into());
    let (evacuators, violations) = read(&all);
    assert_eq!(
        summary(&evacuators),
        ["d.example.com 10000/controller", "a.example.com 5", "b.example.com 5"]
    );
    let messages: Vec<_> = violations.iter().map(ToString::to_string).collect();
    assert_eq!(
        messages,
        [
            "annotation evacuation.coordination.k8s.io/priority_c.example.com: the priority must be a whole number from 0 to 100000, not \"x\"",
            "annotation evacuation.coordination.k8s.io/priority_e.example.com: only one annotation can have the role controller, and the annotation of d.example.com already has it",
        ]
    );
}

#[test]
fn at_most_99_evacuators_besides_the_controller() {
    let mut all = BTreeMap::new();
    for i in 0..101 {
        all.insert(format!("{EVACUATOR_ANNOTATION_PREFIX}e{i}"), i.to_string());
    }
    all.extend(annotations(&[("deployment.apps.k8s.io", "10000/controller")]));
    let (evacuators, violations) = read(&all);
    assert_eq!(evacuators.len(), 100);
    assert!(evacuators.iter().any(Evacuator::is_controller));
    let dropped: Vec<_> = violations.iter().map(|v| v.annotation.rsplit('_').next().unwrap()).collect();
    assert_eq!(dropped, ["e1", "e0"], "those of the lowest priority");
}

fn pod(
    owner: Option<(&str, &str)>,
    labels: &[(&str, &str)],
    annotations: BTreeMap<String, String>,
) -> ObjectMeta {
    let owners = owner.map(|(version, kind)| {
        json!([{"apiVersion": version, "kind": kind, "name": "x", "uid": "u", "controller": true}])
    });
    let labels: BTreeMap<_, _> = labels.iter().copied().collect();
    serde_json::from_value(json!({
        "name": "web-1", "namespace": "shop", "uid": "f5823a89-e03f-4752-b013-445643b8c7a0",
        "ownerReferences": owners, "labels": labels, "annotations": annotations
    }))
    .unwrap()
}

#[test]
fn owner_class_is_added_if_served_and_not_claimed() {
    let hash = [("pod-template-hash", "abc")];
    let served_all = [names::class::DEPLOYMENT, names::class::STATEFUL_SET, names::class::DAEMON_SET];
    let none = BTreeMap::new;
    let cases: [(ObjectMeta, &[&str], &[&str]); 10] = [
        (
            pod(Some(("apps/v1", "ReplicaSet")), &hash, none()),
            &served_all,
            &["deployment.apps.k8s.io 10000/controller"],
        ),
        (
            pod(Some(("apps/v1", "Deployment")), &hash, none()),
            &served_all,
            &["deployment.apps.k8s.io 10000/controller"],
        ),
        (pod(Some(("apps/v1", "ReplicaSet")), &[], none()), &served_all, &[]),
        (pod(Some(("apps/v1", "ReplicaSet")), &hash, none()), &[], &[]),
        (
            pod(Some(("apps/v1", "StatefulSet")), &[], none()),
            &served_all,
            &["statefulset.apps.k8s.io 10000/controller"],
        ),
        (
            pod(Some(("apps/v1", "DaemonSet")), &[], none()),
            &served_all,
            &["daemonset.apps.k8s.io 10000/controller"],
        ),
        (pod(Some(("batch/v1", "Job")), &[], none()), &served_all, &[]),
        (pod(Some(("apps.kruise.io/v1", "StatefulSet")), &[], none()), &served_all, &[]),
        (pod(None, &hash, none()), &served_all, &[]),
        (
            pod(
                Some(("apps/v1", "StatefulSet")),
                &[],
                annotations(&[("db.example.com", "10000/controller"), ("z", "1")]),
            ),
            &served_all,
            &["db.example.com 10000/controller", "z 1"],
        ),
    ];
    for (pod, served, expected) in cases {
        let served = served.iter().map(ToString::to_string).collect();
        assert_eq!(summary(&resolve(&pod, &served).0), expected, "{pod:?}");
    }
}

#[test]
fn annotation_for_the_built_in_class_keeps_its_role() {
    let pod = pod(
        Some(("apps/v1", "StatefulSet")),
        &[],
        annotations(&[(names::class::STATEFUL_SET, "500/fallback")]),
    );
    let served = BTreeSet::from([names::class::STATEFUL_SET.to_string()]);
    assert_eq!(summary(&resolve(&pod, &served).0), ["statefulset.apps.k8s.io 500/fallback"]);
}

#[test]
fn evacuation_for_a_pod_is_complete() {
    let pod = pod(
        Some(("apps/v1", "StatefulSet")),
        &[("app", "web")],
        annotations(&[("a.example.com", "7"), ("b", "x")]),
    );
    let (evacuation, violations) =
        evacuation_for(&pod, names::instigator::NODE_MAINTENANCE, &BTreeSet::new()).unwrap();
    assert_eq!(violations.len(), 1);
    insta::assert_yaml_snapshot!(evacuation, @r"
    apiVersion: evacuation.coordination.k8s.io/v1alpha1
    kind: Evacuation
    metadata:
      annotations:
        argocd.argoproj.io/compare-options: IgnoreExtraneous
        argocd.argoproj.io/sync-options: Prune=false
      finalizers:
        - evacuation.coordination.k8s.io/instigator_nodemaintenance.k8s.io
      labels:
        app: web
      name: f5823a89-e03f-4752-b013-445643b8c7a0-web-1
      namespace: shop
    spec:
      podRef:
        name: web-1
        uid: f5823a89-e03f-4752-b013-445643b8c7a0
      evacuators:
        - evacuatorClass: a.example.com
          priority: 7
      progressDeadlineSeconds: 1800
    ");
    let nameless = ObjectMeta::default();
    let error = evacuation_for(&nameless, "x", &BTreeSet::new()).unwrap_err();
    assert_eq!(error.to_string(), "the pod has no metadata.name, so no Evacuation can be created for it");
}

#[test]
fn name_is_cut_at_150_and_never_ends_in_punctuation() {
    let uid = "f5823a89-e03f-4752-b013-445643b8c7a0";
    let a = |n: usize| "a".repeat(n);
    let cases = [
        ("web-1".to_string(), "web-1".to_string()),
        (a(150), a(150)),
        (a(151), a(150)),
        (a(253), a(150)),
        (format!("{}-b", a(149)), a(149)),
        (format!("{}--.{}", a(147), a(20)), a(147)),
    ];
    for (pod, expected) in cases {
        assert_eq!(evacuation_name(uid, &pod), format!("{uid}-{expected}"), "{pod}");
    }
}

#[test]
fn pod_labels_override() {
    let map = |of: &[(&str, &str)]| {
        of.iter().map(|(k, v)| ((*k).to_string(), (*v).to_string())).collect::<BTreeMap<_, _>>()
    };
    let merged = merge_labels(Some(map(&[("app", "mine"), ("team", "x")])), Some(&map(&[("app", "web")])));
    assert_eq!(merged, Some(map(&[("app", "web"), ("team", "x")])));
    assert_eq!(merge_labels(None, None), None);
}

fn any_evacuator() -> impl Strategy<Value = Evacuator> {
    ("[a-z]{1,8}(\\.[a-z]{1,8}){0,2}", 0..=100_000, proptest::option::of("[a-z/-]{1,20}")).prop_map(
        |(evacuator_class, priority, role)| {
            let controller = role.as_deref() == Some(CONTROLLER_ROLE);
            let priority = match (controller, priority) {
                (true, _) => CONTROLLER_PRIORITY,
                (false, CONTROLLER_PRIORITY) => CONTROLLER_PRIORITY + 1,
                (false, other) => other,
            };
            Evacuator { evacuator_class, priority, role }
        },
    )
}

proptest! {
    #[test]
    fn annotation_round_trips(evacuator in any_evacuator()) {
        let (key, value) = evacuator.annotation();
        let class = key.strip_prefix(EVACUATOR_ANNOTATION_PREFIX).unwrap();
        prop_assert_eq!(Evacuator::parse(class, &value), Ok(evacuator));
    }

    #[test]
    fn parsed_annotation_prints_unchanged(class in "[a-zA-Z0-9.-]{0,60}", value in "[0-9]{0,7}(/.{0,20})?") {
        if let Ok(evacuator) = Evacuator::parse(&class, &value) {
            prop_assert_eq!(evacuator.annotation(), (format!("{EVACUATOR_ANNOTATION_PREFIX}{class}"), value));
        }
    }

    /// Every annotation is either an evacuator or a violation, and the order is total.
    #[test]
    fn evacuators_are_sorted_by_priority_then_class(
        values in proptest::collection::btree_map("[a-z]{1,3}", "[0-9]{1,6}(/[a-z]{0,3}|/controller)?", 0..120),
    ) {
        let all: Vec<_> = values.iter().map(|(class, value)| (class.as_str(), value.as_str())).collect();
        let (evacuators, violations) = read(&annotations(&all));
        prop_assert_eq!(evacuators.len() + violations.len(), values.len());
        prop_assert!(evacuators.iter().filter(|e| e.is_controller()).count() <= 1);
        prop_assert!(evacuators.iter().filter(|e| !e.is_controller()).count() <= MAX_OTHER_EVACUATORS);
        for pair in evacuators.windows(2) {
            prop_assert!(pair[0].priority > pair[1].priority
                || (pair[0].priority == pair[1].priority && pair[0].evacuator_class < pair[1].evacuator_class));
        }
    }

    #[test]
    fn names_are_valid_and_unique_per_pod(
        name in "[a-z]([a-z.-]{0,250}[a-z])?", uid in "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    ) {
        let evacuation = evacuation_name(&uid, &name);
        prop_assert!(evacuation.len() <= 36 + 1 + MAX_NAME_PREFIX);
        prop_assert!(evacuation.ends_with(|c: char| c.is_ascii_alphanumeric()));
        let prefix = evacuation.strip_prefix(&format!("{uid}-")).unwrap();
        prop_assert!(name.starts_with(prefix));
    }
}
