//! Least privilege, checked in three ways: the chart's roles grant exactly the permissions that a program requires at
//! its start; without any one of them it does not start; and each is used by a test, which is named here.

mod documented;
mod owner_references;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{StreamExt as _, stream};
use haulout_e2e::service::NAMESPACE;
use haulout_e2e::{Handle, Service, rights};
use serde_json::{Value, json};

use crate::support::shared;

/// A rule that allows one verb on one resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Permission {
    namespaced: bool,
    group: String,
    resource: String,
    verb: String,
    name: Option<String>,
}

impl Permission {
    /// As in a program's error message.
    fn description(&self) -> String {
        let group = if self.group.is_empty() { String::new() } else { format!(" in {}", self.group) };
        let place = if self.namespaced { format!(" in namespace {NAMESPACE}") } else { String::new() };
        let name = self.name.as_ref().map(|name| format!(" named {name}")).unwrap_or_default();
        format!("{} {}{group}{place}{name}", self.verb, self.resource)
    }

    fn rule(&self) -> Value {
        let names: Vec<_> = self.name.iter().collect();
        json!({"apiGroups": [self.group], "resources": [self.resource], "verbs": [self.verb],
            "resourceNames": names})
    }
}

/// A program of the chart: its arguments and what its roles grant.
#[derive(Debug, Default)]
struct Program {
    args: Vec<String>,
    permissions: BTreeSet<Permission>,
}

/// All programs that the chart starts, by component name.
async fn programs(cluster: &Handle) -> BTreeMap<String, Program> {
    let mut programs = rendered(cluster, "taintManager.enabled=true").await;
    // It runs instead of the services that are switched off.
    let withdraw = rendered(cluster, WITHDRAW).await.remove_entry("withdraw");
    programs.extend(withdraw);
    programs
}

/// The values with which the chart renders the hook that withdraws.
const WITHDRAW: &str =
    "taintManager.withdraw=true,workloadEvacuator.enabled=false,workloadEvacuator.withdraw=true";

/// The programs that the chart starts with these values.
async fn rendered(cluster: &Handle, value: &str) -> BTreeMap<String, Program> {
    let chart = crate::chart::chart().display().to_string();
    let args = ["template", "haulout", &chart, "-n", NAMESPACE, "--set", value];
    let text = crate::chart::helm(cluster, &args).await;
    let mut programs: BTreeMap<String, Program> = BTreeMap::new();
    for document in crate::chart::render::documents(&text) {
        let Some(component) = document["metadata"]["labels"]["app.kubernetes.io/component"].as_str() else {
            continue;
        };
        let program = programs.entry(component.into()).or_default();
        match document["kind"].as_str().unwrap() {
            kind @ ("Role" | "ClusterRole") => program.permissions.extend(expand(&document, kind == "Role")),
            "Deployment" | "Job" => program.args = container_args(&document["spec"]["template"]["spec"]),
            "Pod" => program.args = container_args(&document["spec"]),
            _ => {}
        }
    }
    programs
}

fn container_args(pod: &Value) -> Vec<String> {
    serde_json::from_value(pod["containers"][0]["args"].clone()).unwrap_or_default()
}

fn expand(role: &Value, namespaced: bool) -> Vec<Permission> {
    let texts = |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).unwrap_or_default() };
    let mut permissions = Vec::new();
    for rule in role["rules"].as_array().unwrap() {
        let names: Vec<_> = texts(&rule["resourceNames"]).into_iter().map(Some).collect();
        let names = if names.is_empty() { vec![None] } else { names };
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                for verb in texts(&rule["verbs"]) {
                    permissions.extend(names.iter().map(|name| Permission {
                        namespaced,
                        group: group.clone(),
                        resource: resource.clone(),
                        verb: verb.clone(),
                        name: name.clone(),
                    }));
                }
            }
        }
    }
    permissions
}

/// The permissions that a program reports as missing, started with this account.
async fn missing_permissions(
    cluster: &Handle,
    component: &str,
    args: &[String],
    account: &str,
) -> BTreeSet<String> {
    let program =
        if ["check", "cleanup", "withdraw"].contains(&component) { "chart-hooks" } else { component };
    let kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, account).await.unwrap();
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let process = Service::start_as(cluster, program, &kubeconfig, &args).unwrap();
    let status = tokio::time::timeout(Duration::from_secs(60), process.exited()).await;
    let text = process.text();
    assert_eq!(status.expect("it does not start").code(), Some(1), "{component}: {text}");
    let missing = text
        .split_once(": missing permissions: ")
        .and_then(|(_, rest)| rest.split_once(": grant them in the ClusterRole"));
    let (missing, _) = missing.unwrap_or_else(|| panic!("{component}: {text}"));
    missing.split("; ").map(Into::into).collect()
}

async fn apply(cluster: &Handle, items: &[Value]) {
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string();
    cluster.kubectl_with(&["apply", "-f", "-"], &list).await.unwrap().success().unwrap();
}

#[tokio::test]
async fn chart_grants_exactly_what_services_need() {
    let cluster = shared().await;
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "may-nothing", "namespace": NAMESPACE}});
    apply(&cluster, &[account]).await;
    let programs = programs(&cluster).await;
    assert_eq!(programs.len(), 9, "{:?}", programs.keys());
    for (component, program) in programs {
        let asked = missing_permissions(&cluster, &component, &program.args, "may-nothing").await;
        let granted: BTreeSet<_> = program.permissions.iter().map(Permission::description).collect();
        assert_eq!(
            asked, granted,
            "{component}: required permissions (left) and granted ones (right) differ"
        );
    }
    let delete = ["delete", "serviceaccount", "may-nothing", "-n", NAMESPACE];
    cluster.kubectl(&delete).await.unwrap().success().unwrap();
}

/// An account with all of these permissions except one.
fn all_but(permissions: &BTreeSet<Permission>, missing: &Permission, account: &str) -> Vec<Value> {
    let rules = |namespaced: bool| -> Vec<Value> {
        let some = permissions
            .iter()
            .filter(|permission| *permission != missing && permission.namespaced == namespaced);
        some.map(Permission::rule).collect()
    };
    let metadata = json!({"name": account, "namespace": NAMESPACE, "labels": {"rights": "all-but-one"}});
    let api = "rbac.authorization.k8s.io";
    let object = |kind: &str, mut more: Value| {
        more["apiVersion"] = json!(format!("{api}/v1"));
        more["kind"] = json!(kind);
        more["metadata"] = metadata.clone();
        if kind.starts_with("Cluster") {
            more["metadata"].as_object_mut().unwrap().remove("namespace");
        }
        more
    };
    let subjects = json!([{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]);
    let binding = |kind: &str| json!({"roleRef": {"apiGroup": api, "kind": kind, "name": account}, "subjects": subjects});
    vec![
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}),
        object("ClusterRole", json!({"rules": rules(false)})),
        object("ClusterRoleBinding", binding("ClusterRole")),
        object("Role", json!({"rules": rules(true)})),
        object("RoleBinding", binding("Role")),
    ]
}

#[tokio::test]
#[ignore = "slow"]
async fn service_names_the_missing_permission() {
    let cluster = shared().await;
    let (mut cases, mut objects) = (Vec::new(), Vec::new());
    for (component, program) in programs(&cluster).await {
        for permission in program.permissions.clone() {
            let account = format!("all-but-{}", cases.len());
            objects.extend(all_but(&program.permissions, &permission, &account));
            cases.push((component.clone(), program.args.clone(), account, permission.description()));
        }
    }
    apply(&cluster, &objects).await;
    assert!(cases.len() > 80, "{}", cases.len());
    let check = async |(component, args, account, missing): (String, Vec<String>, String, String)| {
        let mut reported = BTreeSet::new();
        // New permissions apply a little later.
        for _ in 0..10 {
            reported = missing_permissions(&cluster, &component, &args, &account).await;
            if reported.len() == 1 {
                break;
            }
        }
        assert_eq!(reported, BTreeSet::from([missing]), "{component}");
    };
    stream::iter(cases).for_each_concurrent(4, check).await;
    let kinds = "serviceaccounts,roles,rolebindings";
    for args in
        [["-n", NAMESPACE, kinds], ["--wait=false", "clusterroles,clusterrolebindings", "--ignore-not-found"]]
    {
        let delete = [["delete", "-l", "rights=all-but-one"].as_slice(), &args].concat();
        cluster.kubectl(&delete).await.unwrap().success().unwrap();
    }
}

#[tokio::test]
async fn every_permission_names_a_test() {
    let cluster = shared().await;
    let mut granted = BTreeSet::new();
    for (component, program) in programs(&cluster).await {
        for permission in program.permissions {
            granted.insert(rights::line(
                &component,
                &permission.verb,
                &permission.group,
                &permission.resource,
            ));
        }
    }
    let named: BTreeSet<_> = table::permissions().into_keys().collect();
    assert_eq!(named, granted, "the table (left) and the chart (right) differ");
    let list = std::process::Command::new(std::env::current_exe().unwrap());
    let list = { list }.args(["--list", "--format", "terse"]).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    for test in table::permissions().into_values().collect::<BTreeSet<_>>() {
        assert!(list.lines().any(|line| line == format!("{test}: test")), "there is no test {test}");
    }
}

#[tokio::test]
#[ignore = "slow"]
async fn every_permission_is_used_by_its_test() {
    let folder = tempfile::tempdir().unwrap();
    let table = table::permissions();
    for test in table.values().collect::<BTreeSet<_>>() {
        let output = tokio::process::Command::new(std::env::current_exe().unwrap())
            .args([*test, "--exact", "--include-ignored", "--nocapture"])
            .env(rights::ENV, folder.path())
            // In its own cluster, whose requests are all from this test.
            .env_remove(Handle::ENV)
            .output()
            .await
            .unwrap();
        assert!(output.status.success(), "{test}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let others = table::checked_in_other_requests();
    let is_unused = |(permission, test): &(&String, &&str)| {
        !rights::recorded(folder.path(), test).unwrap().contains(*permission)
    };
    let unused: Vec<_> =
        table.iter().filter(|(permission, _)| !others.contains(*permission)).filter(is_unused).collect();
    assert!(unused.is_empty(), "permissions that their named test does not use: {unused:#?}");
}
