//! The walkthrough of a drain: each step explains itself, shows the command that a user would type, and its output.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use haulout_api_types::names::{condition, event};
use haulout_api_types::node_maintenance::{NodeMaintenanceStatus, Stage};
use haulout_e2e::{Handle, Output, wait};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::api::ListParams;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};

use super::state::{ClusterState, find_true, is_cordoned};
use super::view::View;
use crate::ui;

/// Where the pods of all [`WORKLOADS`] are.
pub const NAMESPACE: &str = "shop";
const MAINTENANCE: &str = "new-memory";
/// The Deployment with one replica and a budget that allows no disruption, which is replaced. Its Service has the same name.
const TIGHT: &str = "checkout";
/// The Deployment that cannot be replaced, and whose budget allows no disruption.
const BLOCKED: &str = "reports";
/// The files of the sample workload in `examples`, with their Deployments. The pods of a file are scheduled relative to those
/// of the files before it. Only the first one is needed without a drain.
pub const WORKLOADS: [(&str, &[&str]); 3] = [
    ("sample-workload.yaml", &["web", "database"]),
    ("tight-budget.yaml", &[TIGHT]),
    ("blocked-drain.yaml", &[BLOCKED]),
];
const STEPS: u32 = 7;
/// Time to read a step, on a terminal.
const PAUSE: Duration = Duration::from_secs(4);

/// Drains a node and returns it to service.
pub async fn run(cluster: &Handle) -> Result<()> {
    let client = cluster.client().await?;
    let node = choose(&pods(&client, "").await?)?;
    let mut view = View::open(&client, MAINTENANCE, &node, (NAMESPACE, TIGHT));
    let walkthrough = Walkthrough { cluster, node: &node };
    walkthrough.show_node().await?;
    let before = walkthrough.drain(&mut view).await?;
    walkthrough.show_replacement(&client, &view).await?;
    walkthrough.show_blocker(&client).await?;
    walkthrough.uncordon(&mut view).await?;
    walkthrough.unblock(&mut view).await?;
    walkthrough.complete(&mut view, &before).await
}

struct Walkthrough<'a> {
    cluster: &'a Handle,
    node: &'a str,
}

impl Walkthrough<'_> {
    async fn show_node(&self) -> Result<()> {
        let node = self.node;
        step(
            1,
            &format!("Show {node}, which will get new memory, and the pods that run on it"),
            &format!(
                "The Deployments {TIGHT} and {BLOCKED} have one pod each, both on {node}. Their PodDisruptionBudgets allow no \
                 disruption, so `kubectl drain` would never finish."
            ),
        )
        .await;
        let on_node = format!("spec.nodeName={node}");
        self.kubectl(&["get", "nodes"]).await?;
        self.kubectl(&["get", "pods", "-n", NAMESPACE, "--field-selector", &on_node]).await?;
        self.kubectl(&["get", "poddisruptionbudgets", "-n", NAMESPACE]).await
    }

    /// Returns the node as it was before the drain.
    async fn drain(&self, view: &mut View) -> Result<Node> {
        step(
            2,
            "Drain the node: create a NodeMaintenance in stage Drain",
            &format!(
                "The maintenance controller cordons the node and creates an Evacuation for each pod except DaemonSet pods. The \
                 workload evacuator starts a replacement for each pod of a Deployment. When the replacement is available, the \
                 evacuation controller evicts the pod. Watch the Service {TIGHT}: it always has a ready endpoint."
            ),
        )
        .await;
        let mut before = None;
        view.until("the node is listed", |state| {
            before = state.nodes.only().cloned();
            before.is_some()
        })
        .await?;
        self.apply(&manifest(self.node)).await?;
        view.until(&format!("the pod of {BLOCKED} is the only one left and is blocked"), |state| {
            let drain = status(state).and_then(|status| status.drain_status.as_ref());
            drain.is_some_and(|drain| {
                let blocker = drain.blockers.first().and_then(|blocker| blocker.pod.as_deref());
                drain.pods_left == 1 && blocker.is_some_and(|pod| pod.starts_with(BLOCKED))
            })
        })
        .await?;
        before.with_context(|| format!("node {} was deleted during the demo", self.node))
    }

    async fn show_replacement(&self, client: &Client, view: &View) -> Result<()> {
        step(
            3,
            &format!("{TIGHT} has moved: one replica, a budget that allows no disruption, no downtime"),
            "Nobody has changed the number of replicas, the pod template or the budget. The event names the pod that was evicted.",
        )
        .await;
        wait_for_event(client, event::POD_REPLACED, TIGHT).await?;
        let tight = format!("app={TIGHT}");
        self.kubectl(&["get", "pods", "-n", NAMESPACE, "-l", &tight, "-o", "wide"]).await?;
        self.kubectl(&["get", "deployments,poddisruptionbudgets", "-n", NAMESPACE, TIGHT]).await?;
        self.kubectl(&["events", "-n", NAMESPACE, "--for", &format!("deployment/{TIGHT}")]).await?;
        let count = view.endpoints().count();
        ui::result(&format!("\nWhile the pod moved, the Service {TIGHT} had {count}."));
        Ok(())
    }

    async fn show_blocker(&self, client: &Client) -> Result<()> {
        step(
            4,
            "One pod is blocked: find out why",
            &format!(
                "The strategy of the Deployment {BLOCKED} is Recreate, so it gets no replacement. The NodeMaintenance and the \
                 Evacuation name the pod and what blocks its eviction. The event has only the reason."
            ),
        )
        .await;
        wait_for_event(client, event::BLOCKED, MAINTENANCE).await?;
        let blockers = r#"jsonpath={range .status.drainStatus.blockers[*]}{.pod}: {.message}{"\n"}{end}"#;
        self.kubectl(&["get", "nodemaintenances", MAINTENANCE]).await?;
        self.kubectl(&["get", "nodemaintenances", MAINTENANCE, "-o", blockers]).await?;
        self.kubectl(&["get", "evacuations", "-n", NAMESPACE]).await?;
        self.kubectl(&["events", "--for", &format!("nodemaintenance/{MAINTENANCE}")]).await
    }

    async fn uncordon(&self, view: &mut View) -> Result<()> {
        step(
            5,
            "Try to uncordon the node by hand: Haulout keeps it cordoned",
            "The admission webhook prints a warning, and the maintenance controller cordons the node again.",
        )
        .await;
        self.kubectl(&["uncordon", self.node]).await?;
        let mut uncordoned = false;
        view.until("the node is cordoned again", |state| {
            let cordoned = state.nodes.only().is_some_and(is_cordoned);
            uncordoned |= !cordoned;
            uncordoned && cordoned
        })
        .await
    }

    async fn unblock(&self, view: &mut View) -> Result<()> {
        step(
            6,
            "Unblock the pod: allow a disruption",
            "When the budget allows a disruption, the evacuation controller evicts the blocked pod at once.",
        )
        .await;
        let allow = r#"{"spec": {"minAvailable": 0}}"#;
        let budget = ["patch", "poddisruptionbudgets", BLOCKED, "-n", NAMESPACE];
        self.kubectl(&[&budget[..], &["--type", "merge", "-p", allow]].concat()).await?;
        view.until("the node is drained", |state| {
            status(state).is_some_and(|status| find_true(&status.conditions, condition::DRAINED).is_some())
        })
        .await?;
        self.kubectl(&["get", "nodemaintenances", MAINTENANCE]).await?;
        ui::result(&format!("\n{} is drained. You could now work on the machine.", self.node));
        Ok(())
    }

    async fn complete(&self, view: &mut View, before: &Node) -> Result<()> {
        step(
            7,
            "Return the node to service: set the stage to Complete",
            "The maintenance controller removes everything that the maintenance added to the node, including the cordon.",
        )
        .await;
        let complete = r#"{"spec": {"stage": "Complete"}}"#;
        self.kubectl(&["patch", "nodemaintenances", MAINTENANCE, "--type", "merge", "-p", complete]).await?;
        view.until("the node is as it was before", |state| {
            let stage = state.maintenances.only().map(|maintenance| maintenance.spec.stage);
            let node = state.nodes.only();
            stage == Some(Stage::Complete)
                && node.is_some_and(|node| maintained_state(node) == maintained_state(before))
        })
        .await?;
        self.kubectl(&["get", "nodemaintenances", MAINTENANCE]).await?;
        self.kubectl(&["get", "nodes"]).await?;
        ui::result(&format!("\n{} is schedulable again, and restored to its previous state.", self.node));
        Ok(())
    }

    /// Shows a command and runs it.
    async fn kubectl(&self, args: &[&str]) -> Result<()> {
        let line = format!("kubectl {}", args.iter().map(|arg| quoted(arg)).collect::<Vec<_>>().join(" "));
        show_command(&line);
        show_output(&line, self.cluster.kubectl(args).await?)
    }

    /// Shows a manifest and applies it.
    async fn apply(&self, manifest: &str) -> Result<()> {
        show_command(&format!("kubectl apply -f - <<'END'\n{manifest}END"));
        show_output("kubectl apply", self.cluster.kubectl_with(&["apply", "-f", "-"], manifest).await?)
    }
}

/// Prints the title and text of a step, on a terminal after a pause.
async fn step(number: u32, title: &str, text: &str) {
    if number > 1 && std::io::stdout().is_terminal() {
        tokio::time::sleep(PAUSE).await;
    }
    ui::result(&format!(
        "\n{}\n{text}",
        ui::paint_result("1", &format!("Step {number} of {STEPS}. {title}"))
    ));
}

fn show_command(line: &str) {
    ui::result(&format!("\n{}", ui::paint_result("36", &format!("$ {line}"))));
}

/// Shows the output of a command; warnings of the API server first, as on a terminal.
fn show_output(command: &str, output: Output) -> Result<()> {
    ui::result(format!("{}{}", output.stderr, output.stdout).trim_end());
    output.success().with_context(|| format!("{command} failed"))?;
    Ok(())
}

/// An argument, quoted for a shell.
fn quoted(arg: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,".contains(c);
    if arg.chars().all(plain) { arg.to_owned() } else { format!("'{arg}'") }
}

fn manifest(node: &str) -> String {
    format!(
        "apiVersion: nodemaintenance.k8s.io/v1alpha1
kind: NodeMaintenance
metadata:
  name: {MAINTENANCE}
spec:
  reason: New memory
  stage: Drain
  nodeSelector:
    nodeSelectorTerms:
      - matchFields:
          - {{key: metadata.name, operator: In, values: [{node}]}}
"
    )
}

fn status(state: &ClusterState) -> Option<&NodeMaintenanceStatus> {
    state.maintenances.only()?.status.as_ref()
}

/// Waits for an event of this object. Events are written in the background.
async fn wait_for_event(client: &Client, reason: &str, name: &str) -> Result<()> {
    let of_reason = watcher::Config::default().fields(&format!("reason={reason}"));
    let events: Api<Event> = Api::all(client.clone());
    let ours = |event: &Event| event.involved_object.name.as_deref() == Some(name);
    let what = format!("include {reason} of {name}");
    wait::all(events, of_reason, &what, Duration::from_secs(60), |all| all.iter().any(ours)).await?;
    Ok(())
}

async fn pods(client: &Client, selector: &str) -> Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    Ok(pods
        .list(&ListParams::default().labels(selector))
        .await
        .context("failed to list the sample pods")?
        .items)
}

/// The node of the database's pod, whose evacuator does not run.
pub async fn node_of_the_database(cluster: &Handle) -> Result<String> {
    let found = pods(&cluster.client().await?, "app=database").await?;
    let node = found.into_iter().find_map(|pod| pod.spec?.node_name);
    node.context("no pod of the Deployment database is scheduled")
}

/// The node with the pod that is replaced and the one that blocks the drain. The database's node is not suitable, because its
/// evacuator does not run.
fn choose(pods: &[Pod]) -> Result<String> {
    let mut nodes: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for pod in pods {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        if let (Some(node), Some(app)) = (node, pod.labels().get("app")) {
            nodes.entry(node).or_default().push(app);
        }
    }
    let fits =
        |apps: &[&str]| apps.contains(&TIGHT) && apps.contains(&BLOCKED) && !apps.contains(&"database");
    let node = nodes.into_iter().find(|(_, apps)| fits(apps)).map(|(node, _)| node.to_owned());
    node.with_context(|| {
        format!(
            "the pods of {TIGHT} and {BLOCKED} are not on the same node, or are on that of the database: run the demo again"
        )
    })
}

/// The parts of a node that a maintenance changes.
fn maintained_state(node: &Node) -> impl PartialEq + std::fmt::Debug + use<> {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let conditions: BTreeSet<_> = conditions.map(|one| (one.type_.clone(), one.status.clone())).collect();
    let spec = node.spec.clone().unwrap_or_default();
    let annotations = node.metadata.annotations.clone().unwrap_or_default();
    let labels = node.metadata.labels.clone().unwrap_or_default();
    (is_cordoned(node), spec.taints.unwrap_or_default(), annotations, labels, conditions)
}

#[cfg(test)]
mod tests {
    use haulout_e2e::objects;

    use super::*;

    fn pods(placed: &[(&str, &str)]) -> Vec<Pod> {
        let pod = |(app, node): &(&str, &str)| objects::pod(app).label("app", app).node(node).build();
        placed.iter().map(pod).collect()
    }

    #[test]
    fn chosen_node_has_both_pods_and_no_database() {
        let placed =
            [("web", "n1"), ("checkout", "n2"), ("web", "n2"), ("reports", "n2"), ("database", "n3")];
        assert_eq!(choose(&pods(&placed)).unwrap(), "n2");
        let apart = [("checkout", "n1"), ("reports", "n2"), ("database", "n3")];
        assert!(choose(&pods(&apart)).unwrap_err().to_string().contains("checkout"));
        let together = [("checkout", "n1"), ("reports", "n1"), ("database", "n1")];
        assert!(choose(&pods(&together)).unwrap_err().to_string().contains("database"));
    }

    #[test]
    fn commands_can_be_pasted() {
        let args = ["-n", "spec.nodeName=node-1", "jsonpath={.pod}", r#"{"spec": {}}"#];
        let shown = args.map(quoted);
        assert_eq!(shown, ["-n", "spec.nodeName=node-1", "'jsonpath={.pod}'", r#"'{"spec": {}}'"#]);
    }

    #[test]
    fn node_under_maintenance_differs_from_before() {
        let node = || objects::node("n");
        let before = maintained_state(&node().build());
        assert_eq!(before, maintained_state(&node().build()));
        assert_ne!(before, maintained_state(&node().unschedulable().build()));
        assert_ne!(
            before,
            maintained_state(&node().annotation("karpenter.sh/do-not-disrupt", "true").build())
        );
    }
}
