//! From installing to uninstalling, with drains of pretended and of real nodes between.

use k8s_openapi::api::policy::v1::PodDisruptionBudget;

use super::*;

#[tokio::test]
#[ignore = "slow"]
async fn real_nodes_are_drained_by_our_own_images() {
    if !possible() {
        return;
    }
    let distribution = Distribution::make();
    let world = World::boot(distribution.files(".oci.tar")).await;
    assert!(!cgroups().is_empty(), "the kubelets have cgroups of their own");
    let before = traces(&world).await;
    let nodes_before = node_marks(&world).await;
    world.install(&distribution.files(".tgz")[0]).await;

    let deployments = world.until_available(NAMESPACE).await;
    assert_eq!(deployments.len(), 4, "every service has its Deployment");
    assert_eq!(world.places(NAMESPACE).await, ["real-1", "real-2"].map(String::from).into());

    the_webhook_answers_through_its_service(&world).await;
    a_pretended_node_is_drained_while_pods_of_ours_die(&world).await;
    a_real_node_is_drained_with_our_own_pods_on_it(&world).await;

    world.helm(&["uninstall", "haulout", "--namespace", NAMESPACE, "--wait", "--timeout", "4m"]).await;
    // Pods are removed after their Deployments.
    let none = |pods: &[Pod]| pods.is_empty();
    let pods = wait::all(world.pods(NAMESPACE), watcher::Config::default(), "are gone", SOON, none).await;
    world.explained(pods).await;
    let left: BTreeSet<_> = traces(&world).await.difference(&before).cloned().collect();
    assert_eq!(left, BTreeSet::new(), "the cluster is as it was");
    assert_eq!(node_marks(&world).await, nodes_before, "nodes are as they were");
    world.cluster.shutdown().await;
    assert_eq!(cgroups(), [] as [PathBuf; 0], "what a node leaves on this machine");
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

/// Nora may do everything with NodeMaintenances and nothing with nodes, which only the webhook looks at.
async fn the_webhook_answers_through_its_service(world: &World) {
    let role = [
        "create",
        "clusterrole",
        "maintain",
        "--verb=*",
        "--resource=nodemaintenances.nodemaintenance.k8s.io",
    ];
    let binding = ["create", "clusterrolebinding", "nora", "--clusterrole=maintain", "--user=nora"];
    for args in [role.as_slice(), &binding] {
        world.cluster.kubectl(args).await.unwrap().success().unwrap();
    }
    let nora = world.cluster.user_kubeconfig("nora", &[]).unwrap().display().to_string();
    let maintenance = json!({
        "apiVersion": "nodemaintenance.k8s.io/v1alpha1", "kind": "NodeMaintenance", "metadata": {"name": "noras"},
        "spec": {"stage": "Idle", "nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["pretended-1"]}]},
        ]}},
    });
    let create = ["--kubeconfig", &nora, "create", "--filename", "-"];
    // Before her role is in force, it is not the webhook that refuses.
    let asked = wait::eventually("nora may write NodeMaintenances", SOON, async || {
        let refused = world.cluster.kubectl_with(&create, &maintenance.to_string()).await?;
        Ok((!refused.stderr.contains("cannot create resource")).then_some(refused))
    });
    let refused = asked.await.unwrap();
    assert!(refused.stderr.contains("may not delete node pretended-1"), "{}", refused.stderr);
    for what in [["delete", "clusterrole", "maintain"], ["delete", "clusterrolebinding", "nora"]] {
        world.cluster.kubectl(&what).await.unwrap().success().unwrap();
    }
}

/// A budget holds the drain up, so that there is a middle in which every pod of both controllers is killed.
async fn a_pretended_node_is_drained_while_pods_of_ours_die(world: &World) {
    let shop = |name: &str, replicas: i32| {
        let pods = objects::deployment(name).replicas(replicas).pods(|pod| {
            pod.tolerates(PRETENDED, "NoSchedule", None).with(|spec| {
                spec.node_selector =
                    Some([("kubernetes.io/hostname".to_owned(), "pretended-1".to_owned())].into());
            })
        });
        pods.build()
    };
    let deployments: Api<Deployment> = Api::namespaced(world.client.clone(), "default");
    for deployment in [shop("web", 20), shop("database", 1)] {
        deployments.create(&PostParams::default(), &deployment).await.unwrap();
    }
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(world.client.clone(), "default");
    let budget = objects::pdb("database").min_available("1").build();
    budgets.create(&PostParams::default(), &budget).await.unwrap();
    world.until_available("default").await;

    world.maintain("pretended", "pretended-1").await;
    let held_up = |m: &NodeMaintenance| {
        let drain = m.status.as_ref().and_then(|status| status.drain_status.as_ref());
        drain.is_some_and(|drain| drain.pods_left == 1 && drain.pods_evacuated == 20)
    };
    let waits =
        wait::present(world.maintenances(), "pretended", "waits for the database", SOON, held_up).await;
    world.explained(waits).await;
    let ours = "app.kubernetes.io/component in (evacuation-controller, maintenance-controller)";
    let kill = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    world.pods(NAMESPACE).delete_collection(&kill, &ListParams::default().labels(ours)).await.unwrap();
    budgets.delete("database", &DeleteParams::default()).await.unwrap();
    world.until_drained("pretended").await;
    let maintenance = world.maintenances().get("pretended").await.unwrap();
    let drain = maintenance.status.unwrap().drain_status.unwrap();
    assert_eq!(drain.pods_left, 0);
    // The database may have left while nobody was there to count it.
    assert!((20..=21).contains(&drain.pods_evacuated), "{drain:?}");
    world.complete("pretended").await;
    for name in ["web", "database"] {
        deployments.delete(name, &DeleteParams::foreground()).await.unwrap();
        wait::gone(deployments.clone(), name, SOON).await.unwrap();
    }
    world.until_available(NAMESPACE).await;
}

/// Pods of our own have to leave like all others, and somebody has to see to that meanwhile.
async fn a_real_node_is_drained_with_our_own_pods_on_it(world: &World) {
    let sleepers = objects::deployment("sleepers")
        .replicas(4)
        .pods(|pod| pod.grace(1).with(|spec| spec.containers[0].image = Some(real_node::SLEEPER.to_owned())));
    let deployments: Api<Deployment> = Api::namespaced(world.client.clone(), "default");
    deployments.create(&PostParams::default(), &sleepers.build()).await.unwrap();
    world.until_available("default").await;
    let services = world.places(NAMESPACE).await;
    assert_eq!(services, ["real-1", "real-2"].map(String::from).into(), "ours are on both nodes");

    world.maintain("real", "real-2").await;
    world.until_drained("real").await;
    for namespace in [NAMESPACE, "default"] {
        world.until_available(namespace).await;
        assert_eq!(world.places(namespace).await, ["real-1".to_owned()].into());
    }
    world.complete("real").await;
    deployments.delete("sleepers", &DeleteParams::foreground()).await.unwrap();
    wait::gone(deployments, "sleepers", SOON).await.unwrap();
}

/// Everything in the cluster that could be ours, by kind and name. What comes and goes by itself is left out.
async fn traces(world: &World) -> BTreeSet<String> {
    let listed = world.cluster.kubectl(&["api-resources", "--verbs=list", "--output=name"]).await.unwrap();
    let passing =
        ["events", "leases", "pods", "endpointslices", "controllerrevisions", "nodes", "namespaces"];
    let kinds: Vec<_> = listed
        .stdout
        .lines()
        .filter(|kind| !passing.iter().any(|name| kind.split('.').next() == Some(name)))
        .collect();
    let args = ["get", &kinds.join(","), "--all-namespaces", "--output=name"];
    let output = world.cluster.kubectl(&args).await.unwrap().success().unwrap();
    let leases = ["get", "leases", "--namespace", NAMESPACE, "--output=name", "--ignore-not-found"];
    let leases = world.cluster.kubectl(&leases).await.unwrap().stdout;
    // Every namespace gets these.
    let of_namespace = ["serviceaccount/default", "configmap/kube-root-ca.crt"];
    let all = output.lines().chain(leases.lines()).filter(|name| !of_namespace.contains(name));
    all.map(str::to_owned).collect()
}

/// What nodes carry that a maintenance changes.
async fn node_marks(world: &World) -> BTreeSet<String> {
    let nodes = world.nodes().list(&ListParams::default()).await.unwrap();
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
