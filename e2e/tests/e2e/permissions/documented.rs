//! docs/security.md lists every permission of every account that the chart creates, as `kubectl auth can-i --list`
//! reports them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use haulout_e2e::{Handle, wait};
use serde_json::Value;

use crate::support::shared;

/// The namespace of a second release, which consists of accounts and roles only.
const NAMESPACE: &str = "documented";
const SOON: Duration = Duration::from_secs(60);

/// Resource, object name if the permission is restricted to it, and verb.
type Rights = BTreeSet<(String, String, String)>;

/// The rights of an account: in every namespace, and only in the namespace of the release.
#[derive(Debug, Default, PartialEq, Eq)]
struct Account {
    everywhere: Rights,
    own_namespace: Rights,
}

/// Our own groups are omitted.
fn short(resource: &str) -> String {
    let ours = [".evacuation.coordination.k8s.io", ".nodemaintenance.k8s.io"];
    match ours.iter().find_map(|group| resource.split_once(group)) {
        Some((name, subresource)) => format!("{name}{subresource}"),
        None => resource.to_owned(),
    }
}

/// What `kubectl auth can-i --list` reports in this namespace.
async fn listed(cluster: &Handle, account: &str, namespace: &str) -> Rights {
    let user = format!("--as=system:serviceaccount:{NAMESPACE}:{account}");
    let list = ["auth", "can-i", "--list", "--no-headers", "--namespace", namespace, &user];
    let text = cluster.kubectl(&list).await.unwrap().success().unwrap();
    let mut rights = Rights::new();
    for line in text.lines() {
        // The columns after the resource are lists in brackets: URLs, names of objects and verbs.
        let mut columns = line.split('[');
        let resource = columns.next().unwrap().trim();
        let mut words = columns.map(|column| column.split(']').next().unwrap().split_whitespace());
        let (urls, names, verbs) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
        let names: Vec<_> =
            names.map(|name| name.replace(&format!("{NAMESPACE}."), "haulout-system.")).collect();
        let resources: Vec<_> = std::iter::once(resource).filter(|one| !one.is_empty()).chain(urls).collect();
        for verb in verbs {
            for resource in &resources {
                let names = if names.is_empty() { &[String::new()] } else { names.as_slice() };
                rights.extend(names.iter().map(|name| (short(resource), name.clone(), verb.to_owned())));
            }
        }
    }
    rights
}

async fn rights(cluster: &Handle, account: &str) -> Account {
    // What every ServiceAccount may do, such as ask for its own permissions.
    let anybody = listed(cluster, "default", NAMESPACE).await;
    let everywhere = &listed(cluster, account, "default").await - &anybody;
    let own_namespace = &(&listed(cluster, account, NAMESPACE).await - &anybody) - &everywhere;
    Account { everywhere, own_namespace }
}

/// The inline code of a text.
fn code(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(Into::into).collect()
}

/// Rights in the format of the page: `pods`, `nodes`: list, watch; `leases` named `x`: update.
fn parse(cell: &str) -> Rights {
    let mut rights = Rights::new();
    for part in cell.split(';').filter(|part| !part.trim().is_empty()) {
        let (resources, verbs) =
            part.split_once("`: ").unwrap_or_else(|| panic!("expected verbs in {part:?}"));
        let resources = format!("{resources}`");
        let (resources, names) = resources.split_once(" named ").unwrap_or((&resources, "``"));
        for resource in code(resources) {
            for name in code(names) {
                rights.extend(
                    verbs.split(',').map(|verb| (resource.clone(), name.clone(), verb.trim().to_owned())),
                );
            }
        }
    }
    rights
}

/// The rows of the page.
fn documented() -> BTreeMap<String, Account> {
    let page = std::fs::read_to_string(haulout_e2e::repository().join("docs/security.md")).unwrap();
    let mut lines = page.lines();
    lines.find(|line| line.starts_with("| account |")).unwrap();
    let rows = lines.skip(1).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let cells: Vec<_> = row.trim_matches('|').split('|').collect();
        let [account, everywhere, own_namespace, stolen] = cells.as_slice() else { panic!("{row}") };
        assert!(stolen.trim().len() > 20, "what an attacker could do is missing: {row}");
        let account = code(account).remove(0);
        (account, Account { everywhere: parse(everywhere), own_namespace: parse(own_namespace) })
    })
    .collect()
}

/// In the format of the page, for the message of a failure.
fn print(rights: &Rights) -> String {
    let mut verbs = BTreeMap::<_, Vec<_>>::new();
    for (resource, name, verb) in rights {
        verbs.entry((name, resource)).or_default().push(verb.as_str());
    }
    let mut resources = BTreeMap::<_, Vec<_>>::new();
    for ((name, resource), verbs) in verbs {
        resources.entry((name, verbs.join(", "))).or_default().push(format!("`{resource}`"));
    }
    let parts = resources.into_iter().map(|((name, verbs), resources)| {
        let name = if name.is_empty() { String::new() } else { format!(" named `{name}`") };
        format!("{}{name}: {verbs}", resources.join(", "))
    });
    parts.collect::<Vec<_>>().join("; ")
}

/// The accounts, roles and bindings of the chart, including those of its hooks.
async fn rendered(cluster: &Handle) -> Vec<Value> {
    let chart = crate::chart::chart().display().to_string();
    let mut objects = Vec::new();
    for value in ["taintManager.enabled=true", super::WITHDRAW] {
        let args = ["template", "haulout", &chart, "-n", NAMESPACE, "--set", value];
        let mut rendered = crate::chart::render::documents(&crate::chart::helm(cluster, &args).await);
        // The other accounts have fewer permissions while services are switched off.
        let component = |object: &Value| object["metadata"]["labels"]["app.kubernetes.io/component"].clone();
        rendered.retain(|object| value != super::WITHDRAW || component(object) == "withdraw");
        objects.extend(rendered);
    }
    let is_needed = |object: &Value| {
        let is_view = object["metadata"]["name"].as_str().unwrap().ends_with("-view");
        let kind = object["kind"].as_str().unwrap();
        kind == "ServiceAccount" || (!is_view && kind.contains("Role"))
    };
    objects.retain(is_needed);
    objects
}

#[tokio::test]
async fn security_page_lists_all_rights_of_all_accounts() {
    let cluster = shared().await;
    cluster.kubectl(&["create", "namespace", NAMESPACE]).await.unwrap().success().unwrap();
    let objects = rendered(&cluster).await;
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    let accounts = objects.iter().filter(|object| object["kind"] == "ServiceAccount");
    let accounts: BTreeSet<_> = accounts.map(name).collect();
    super::apply(&cluster, &objects).await;
    let documented = documented();
    let mut wrong = Vec::new();
    for account in &accounts {
        let mut found = Account::default();
        // New roles apply a little later.
        let same = wait::eventually("the rights are those on the page", SOON / 4, async || {
            found = rights(&cluster, account).await;
            Ok((Some(&found) == documented.get(account)).then_some(()))
        });
        if same.await.is_err() {
            wrong.push(format!(
                "| `{account}` | {} | {} |",
                print(&found.everywhere),
                print(&found.own_namespace)
            ));
        }
    }
    for kind in ["ClusterRole", "ClusterRoleBinding"] {
        let names: BTreeSet<_> = objects.iter().filter(|object| object["kind"] == kind).map(name).collect();
        let delete = ["delete", kind].into_iter().chain(names.iter().map(String::as_str)).collect::<Vec<_>>();
        cluster.kubectl(&delete).await.unwrap().success().unwrap();
    }
    cluster.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"]).await.unwrap().success().unwrap();
    assert!(
        wrong.is_empty(),
        "docs/security.md differs from `kubectl auth can-i --list`:\n{}",
        wrong.join("\n")
    );
    assert_eq!(
        documented.into_keys().collect::<BTreeSet<_>>(),
        accounts,
        "documented accounts and rendered ones differ"
    );
}
