//! Evaluates the Tiltfile with the same interpreter as Tilt, and with built-ins that record their calls. The images
//! and objects match, and the API server accepts the objects.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use haulout_e2e::Handle;
use haulout_e2e::service::SERVED_CLASSES;
use serde_json::{Value, json};

use crate::chart::render::documents;
use crate::support::shared;

fn root() -> PathBuf {
    crate::chart::chart().ancestors().nth(2).unwrap().into()
}

/// The calls of the Tiltfile in this context.
async fn evaluate(cluster: &Handle, context: &str) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let starlark = haulout_e2e::tools::ensure_more(|_| ()).unwrap().path("starlark");
    let tiltfile = std::fs::read_to_string(root().join("Tiltfile")).unwrap();
    let mut rendered = "[]".to_owned();
    // Once to get the values that it passes to Helm, and once with Helm's output.
    loop {
        let text = format!(
            "CONTEXT = {}\nRENDERED = {}\n{}\n{tiltfile}\nprint(json.encode(_calls))\n",
            json!(context),
            json!(rendered),
            include_str!("tilt/builtins.star"),
        );
        let file = folder.path().join("Tiltfile.star");
        std::fs::write(&file, text).unwrap();
        let args = ["-globalreassign", &file.display().to_string()].map(ToOwned::to_owned);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let output = cluster.run(&starlark, &args, None).await.unwrap();
        assert!(output.status.success(), "{}", output.stderr);
        let calls: Vec<Value> = serde_json::from_str(output.stderr.lines().last().unwrap()).unwrap();
        if rendered != "[]" {
            return calls;
        }
        let helm = &calls.iter().find(|call| call["function"] == "helm").unwrap()["arguments"];
        let path = root().join(helm["path"].as_str().unwrap()).display().to_string();
        let values: Vec<String> = serde_json::from_value(helm["set"].clone()).unwrap();
        let mut args = vec!["template", "haulout", &path, "--namespace", helm["namespace"].as_str().unwrap()];
        args.extend(values.iter().flat_map(|value| ["--set", value]));
        // Tilt skips Helm tests.
        args.push("--skip-tests");
        rendered = json!(documents(&crate::chart::helm(cluster, &args).await)).to_string();
    }
}

fn arguments<'a>(calls: &'a [Value], function: &str) -> Vec<&'a Value> {
    calls.iter().filter(|call| call["function"] == function).map(|call| &call["arguments"]).collect()
}

fn deployments(calls: &[Value]) -> Vec<Value> {
    let objects = arguments(calls, "k8s_yaml").into_iter().filter_map(|call| call["yaml"].as_array());
    objects.flatten().filter(|object| object["kind"] == "Deployment").cloned().collect()
}

#[tokio::test]
async fn tiltfile_builds_and_deploys_valid_objects() {
    let cluster = shared().await;
    let calls = evaluate(&cluster, "kind-kind").await;
    let deployments = deployments(&calls);
    let containers = deployments.iter().map(|one| &one["spec"]["template"]["spec"]["containers"][0]);
    let deployed: BTreeSet<_> = containers
        .clone()
        .map(|one| one["image"].as_str().unwrap().rsplit_once(':').unwrap().0.to_owned())
        .collect();
    let builds = arguments(&calls, "docker_build");
    let built: BTreeSet<_> = builds.iter().map(|build| build["ref"].as_str().unwrap().to_owned()).collect();
    assert_eq!((built.len(), &built), (6, &deployed));
    for container in containers {
        assert_eq!(
            container["securityContext"]["readOnlyRootFilesystem"], false,
            "otherwise live updates are not possible"
        );
    }
    let compile =
        arguments(&calls, "local_resource").into_iter().find(|one| one["name"] == "compile").unwrap();
    for build in builds {
        let program = build["only"][0].as_str().unwrap();
        assert!(compile["cmd"].as_str().unwrap().contains(&format!("--bin {program}")));
        let synced = &build["live_update"][0]["sync"];
        assert_eq!(synced[0], json!(format!("{}/{program}", build["context"].as_str().unwrap())));
        assert_eq!(synced[1], "/app/service");
        assert!(build["dockerfile_contents"].as_str().unwrap().contains("/app/service"));
    }
    let names: BTreeSet<_> =
        deployments.iter().map(|one| one["metadata"]["name"].clone().to_string()).collect();
    let resources = arguments(&calls, "k8s_resource");
    let attached: BTreeSet<_> = resources.iter().map(|one| one["workload"].to_string()).collect();
    assert_eq!(names, attached);
    let ports: BTreeSet<_> = resources.iter().map(|one| one["port_forwards"].to_string()).collect();
    assert_eq!(ports.len(), 6, "each service has its own port");

    let objects = arguments(&calls, "k8s_yaml");
    let list =
        json!({"apiVersion": "v1", "kind": "List", "items": objects.last().unwrap()["yaml"]}).to_string();
    let dry =
        ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-"];
    cluster.kubectl_with(&dry, &list).await.unwrap().success().unwrap();
    run_button_commands(&cluster, &calls).await;
}

/// Runs the commands of the buttons without effect: they find a node, and the rest is a dry run.
async fn run_button_commands(cluster: &Handle, calls: &[Value]) {
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "tilt-1"}}).to_string();
    cluster.kubectl_with(&["create", "-f", "-"], &node).await.unwrap().success().unwrap();
    let kubectl = cluster.tools.kubectl().display().to_string();
    let mut outputs = Vec::new();
    for button in arguments(calls, "local_resource").into_iter().filter(|one| one["trigger_mode"] == "manual")
    {
        assert_eq!(button["auto_init"], false);
        let command = button["cmd"].as_str().unwrap().replace("kubectl ", &format!("{kubectl} "));
        let dry = [
            ("apply", "apply --dry-run=client --output=yaml"),
            ("delete", "delete --dry-run=client"),
            ("rollout", "version --client >&2 #"),
        ];
        let command = dry.iter().fold(command, |command, (verb, dry)| {
            command.replace(&format!("{kubectl} {verb} "), &format!("{kubectl} {dry} "))
        });
        let shell = cluster.command(Path::new("/bin/sh")).args(["-c", &command]);
        let output = shell.current_dir(root()).output("pressing a button").await.unwrap();
        outputs.push((button["name"].clone(), output));
    }
    cluster.kubectl(&["delete", "node", "tilt-1"]).await.unwrap().success().unwrap();
    for (button, output) in &outputs {
        assert!(output.status.success(), "{button}: {}", output.stderr);
    }
    let (_, drain) = outputs.iter().find(|(button, _)| button == "sample drain").unwrap();
    let maintenance = drain.stdout.split("kind: NodeMaintenance").nth(1).unwrap();
    let nodes = maintenance.split("values:").nth(1).unwrap().trim_start();
    assert!(nodes.starts_with("- ") && !nodes.contains("node-1"), "a node of this cluster: {nodes}");
}

#[tokio::test]
async fn tiltfile_runs_services_locally_for_the_demo() {
    let cluster = shared().await;
    let config = std::fs::read_to_string(&cluster.kubeconfig).unwrap();
    assert!(config.contains("current-context: haulout"), "the Tiltfile expects this context");
    let calls = evaluate(&cluster, "haulout").await;
    assert_eq!(arguments(&calls, "docker_build").len(), 0);
    let deployments = deployments(&calls);
    assert_eq!(deployments.len(), 4);
    assert!(deployments.iter().all(|deployment| deployment["spec"]["replicas"] == 0));
    let serving =
        arguments(&calls, "local_resource").into_iter().map(|one| one["serve_cmd"].as_str().unwrap());
    let serving: Vec<_> = serving.filter(|command| !command.is_empty()).collect();
    assert_eq!(serving.len(), 4);
    for command in serving {
        // Not together with kube-controller-manager, which already deletes pods from tainted nodes.
        assert_eq!(command.contains("--dry-run"), command.contains("taint-manager"), "{command}");
        assert_eq!(command.contains(SERVED_CLASSES), !command.contains("workload-evacuator"), "{command}");
    }
}
