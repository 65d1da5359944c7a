//! From installation to uninstallation, with drains of simulated and real nodes in between.

use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use super::*;

#[tokio::test]
#[ignore = "slow"]
async fn real_nodes_are_drained_by_built_images() {
    if !can_run_nodes() {
        return;
    }
    let distribution = Distribution::make();
    let env = TestEnv::boot(distribution.files(".oci.tar")).await;
    env.add_simulated_nodes().await;
    assert!(!cgroups().is_empty(), "the kubelets have their own cgroups");
    let before = cluster_objects(&env).await;
    let nodes_before = node_fields(&env).await;
    env.install(&distribution.files(".tgz")[0]).await;

    let deployments = env.until_available(NAMESPACE).await;
    let services = BINARIES.iter().filter(|name| **name != "chart-hooks").count();
    assert_eq!(deployments.len(), services, "every service has its Deployment");
    assert_eq!(env.nodes_with_pods(NAMESPACE).await, ["real-1", "real-2"].map(String::from).into());

    webhook_answers_through_its_service(&env).await;
    simulated_node_is_drained_while_controllers_are_killed(&env).await;
    real_node_is_drained_with_controllers_on_it(&env).await;

    env.helm(&["uninstall", "haulout", "--namespace", NAMESPACE, "--wait", "--timeout", "4m"]).await;
    // Pods are removed after their Deployments.
    let none = |pods: &[Pod]| pods.is_empty();
    let pods = wait::all(env.pods(NAMESPACE), watcher::Config::default(), "are gone", SOON, none).await;
    env.explained(pods).await;
    let left: BTreeSet<_> = cluster_objects(&env).await.difference(&before).cloned().collect();
    assert_eq!(left, BTreeSet::new(), "the cluster is as it was");
    assert_eq!(node_fields(&env).await, nodes_before, "nodes are as they were");
    env.cluster.shutdown().await;
    assert_eq!(cgroups(), [] as [PathBuf; 0], "a node left cgroups on this machine");
}

/// The cgroups of our nodes.
fn cgroups() -> Vec<PathBuf> {
    let ours = format!("haulout-e2e-{}-", std::process::id());
    let hierarchies = std::fs::read_dir("/sys/fs/cgroup").unwrap();
    let all =
        hierarchies.flat_map(|hierarchy| std::fs::read_dir(hierarchy.unwrap().path()).into_iter().flatten());
    let all = all.map(|cgroup| cgroup.unwrap());
    all.filter(|cgroup| cgroup.file_name().to_string_lossy().starts_with(&ours))
        .map(|cgroup| cgroup.path())
        .collect()
}

/// Nora has all permissions on NodeMaintenances and none on nodes, which only the webhook checks.
async fn webhook_answers_through_its_service(env: &TestEnv) {
    let role = [
        "create",
        "clusterrole",
        "maintain",
        "--verb=*",
        "--resource=nodemaintenances.nodemaintenance.k8s.io",
    ];
    let binding = ["create", "clusterrolebinding", "nora", "--clusterrole=maintain", "--user=nora"];
    for args in [role.as_slice(), &binding] {
        env.cluster.kubectl(args).await.unwrap().success().unwrap();
    }
    let nora = env.cluster.user_kubeconfig("nora", &[]).unwrap().display().to_string();
    let maintenance = json!({
        "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "NodeMaintenance", "metadata": {"name": "noras"},
        "spec": {"stage": "Idle", "nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["simulated-1"]}]},
        ]}},
    });
    let create = ["--kubeconfig", &nora, "create", "--filename", "-"];
    // Until her role applies, RBAC rejects the request and not the webhook.
    let asked = wait::eventually("nora may write NodeMaintenances", SOON, async || {
        let rejected = env.cluster.kubectl_with(&create, &maintenance.to_string()).await?;
        Ok((!rejected.stderr.contains("cannot create resource")).then_some(rejected))
    });
    let rejected = asked.await.unwrap();
    assert!(rejected.stderr.contains("needs permission to delete node simulated-1"), "{}", rejected.stderr);
    for what in [["delete", "clusterrole", "maintain"], ["delete", "clusterrolebinding", "nora"]] {
        env.cluster.kubectl(&what).await.unwrap().success().unwrap();
    }
}

/// 20 pods are replaced, and one is not. Its budget blocks the drain, so that every controller pod can be killed during it.
async fn simulated_node_is_drained_while_controllers_are_killed(env: &TestEnv) {
    let shop = |name: &str, replicas: i32| {
        let hosts = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [
                {"key": "kubernetes.io/hostname", "operator": "In", "values": ["simulated-1", "simulated-2"]},
            ]},
        ]}}});
        objects::deployment(name).replicas(replicas).pods(|pod| {
            pod.tolerates(SIMULATED, "NoSchedule", None)
                .with(|spec| spec.affinity = Some(serde_json::from_value(hosts).unwrap()))
        })
    };
    let deployments: Api<Deployment> = Api::namespaced(env.client.clone(), "default");
    env.nodes().cordon("simulated-2").await.unwrap();
    let database = shop("database", 1).annotation(names::REPLACE_ANNOTATION, "false");
    for deployment in [shop("web", 20), database] {
        deployments.create(&PostParams::default(), &deployment.build()).await.unwrap();
    }
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(env.client.clone(), "default");
    let budget = objects::pdb("database").min_available("1").build();
    budgets.create(&PostParams::default(), &budget).await.unwrap();
    env.until_available("default").await;
    env.nodes().uncordon("simulated-2").await.unwrap();

    env.maintain("simulated", "simulated-1").await;
    let held_up = |m: &NodeMaintenance| {
        let drain = m.status.as_ref().and_then(|status| status.drain_status.as_ref());
        drain.is_some_and(|drain| drain.pods_left == 1 && drain.pods_evacuated == 20)
    };
    let waits = wait::present(env.maintenances(), "simulated", "waits for the database", SOON, held_up).await;
    env.explained(waits).await;
    let ours = "app.kubernetes.io/component in (evacuation-controller, maintenance-controller)";
    let kill = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    env.pods(NAMESPACE).delete_collection(&kill, &ListParams::default().labels(ours)).await.unwrap();
    budgets.delete("database", &DeleteParams::default()).await.unwrap();
    env.until_drained("simulated").await;
    let maintenance = env.maintenances().get("simulated").await.unwrap();
    let drain = maintenance.status.unwrap().drain_status.unwrap();
    assert_eq!(drain.pods_left, 0);
    // The database may have left while no controller was running to count it.
    assert!((20..=21).contains(&drain.pods_evacuated), "{drain:?}");
    env.complete("simulated").await;
    for name in ["web", "database"] {
        deployments.delete(name, &DeleteParams::foreground()).await.unwrap();
        wait::gone(deployments.clone(), name, SOON).await.unwrap();
    }
    env.until_available(NAMESPACE).await;
}

/// Controller pods have to leave like all others, and the remaining ones continue the drain.
async fn real_node_is_drained_with_controllers_on_it(env: &TestEnv) {
    let sleepers = objects::deployment("sleepers")
        .replicas(4)
        .pods(|pod| pod.grace(1).with(|spec| spec.containers[0].image = Some(real_node::SLEEPER.to_owned())));
    let deployments: Api<Deployment> = Api::namespaced(env.client.clone(), "default");
    deployments.create(&PostParams::default(), &sleepers.build()).await.unwrap();
    env.until_available("default").await;
    let services = env.nodes_with_pods(NAMESPACE).await;
    assert_eq!(services, ["real-1", "real-2"].map(String::from).into(), "controllers run on both nodes");

    env.maintain("real", "real-2").await;
    env.until_drained("real").await;
    for namespace in [NAMESPACE, "default"] {
        env.until_available(namespace).await;
        assert_eq!(env.nodes_with_pods(namespace).await, ["real-1".to_owned()].into());
    }
    env.complete("real").await;
    deployments.delete("sleepers", &DeleteParams::foreground()).await.unwrap();
    wait::gone(deployments, "sleepers", SOON).await.unwrap();
}

/// Everything in the cluster that could be ours, by kind and name, without objects that change on their own.
async fn cluster_objects(env: &TestEnv) -> BTreeSet<String> {
    let listed = env.cluster.kubectl(&["api-resources", "--verbs=list", "--output=name"]).await.unwrap();
    let passing =
        ["events", "leases", "pods", "endpointslices", "controllerrevisions", "nodes", "namespaces"];
    let kinds: Vec<_> = listed
        .stdout
        .lines()
        .filter(|kind| !passing.iter().any(|name| kind.split('.').next() == Some(name)))
        .collect();
    let args = ["get", &kinds.join(","), "--all-namespaces", "--output=name"];
    let output = env.cluster.kubectl(&args).await.unwrap().success().unwrap();
    let leases = ["get", "leases", "--namespace", NAMESPACE, "--output=name", "--ignore-not-found"];
    let leases = env.cluster.kubectl(&leases).await.unwrap().stdout;
    // Every namespace gets these.
    let of_namespace = ["serviceaccount/default", "configmap/kube-root-ca.crt"];
    let all = output.lines().chain(leases.lines()).filter(|name| !of_namespace.contains(name));
    all.map(str::to_owned).collect()
}

/// The fields of nodes that a maintenance changes.
async fn node_fields(env: &TestEnv) -> BTreeSet<String> {
    let nodes = env.nodes().list(&ListParams::default()).await.unwrap();
    let marks = nodes.items.iter().flat_map(|node| {
        let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
        let conditions = conditions.map(|condition| condition.type_.clone());
        let cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable).map(|_| "cordoned".to_owned());
        let theirs = |key: &&String| {
            *key != "node.alpha.kubernetes.io/ttl" && !key.starts_with("volumes.kubernetes.io")
        };
        let annotations = node.annotations().keys().filter(theirs).cloned();
        let name = node.name_any();
        conditions
            .chain(cordoned)
            .chain(annotations)
            .map(move |mark| format!("{name}: {mark}"))
            .collect::<Vec<_>>()
    });
    marks.collect()
}
