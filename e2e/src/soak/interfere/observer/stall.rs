//! Checks the status of a maintenance without activity on its nodes: does it report what blocks the drain, and is
//! that true?

use jiff::SignedDuration;
use serde_json::Value;

use super::claims::{Claim, claims};
use super::truth::{self, Facts};
use super::view::{ClusterView, Kind, Read as _, selects_node};

/// What `Blocked=False` says when no pod has to leave.
pub(super) const NOTHING_TO_DO: [&str; 3] =
    ["Nothing is left to evacuate", "No drain is in progress", "No node is selected"];

/// Maximum number of blockers in a status.
const LISTED: usize = 20;
/// Minimum age of a pod before its status must be explained.
const NEW: SignedDuration = SignedDuration::from_secs(10);

/// A problem with a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The maintenance.
    pub maintenance: String,
    /// The subject: equal as long as the problem is the same.
    pub about: String,
    /// For people.
    pub text: String,
}

/// The problems in the status of a maintenance without activity on its nodes. A maintenance that does not drain has
/// none.
pub fn problems(maintenance: &Value, view: &ClusterView, facts: &Facts) -> Vec<Problem> {
    if maintenance.text("/spec/stage") != "Drain" || maintenance.is_terminating() {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut add_problem = |about: String, text: String| {
        found.push(Problem { maintenance: maintenance.name().to_owned(), about, text });
    };
    let claims = claims(maintenance);
    for claim in &claims {
        if let Err(why) = truth::check(claim, maintenance, view, facts) {
            let said = format!("it says {}: {:?}. But {why}", claim.subject(), claim.message);
            add_problem(format!("untrue {}", claim.subject()), said);
        }
    }
    let leaving = view.leaving(maintenance);
    let nodes = view.nodes_of(maintenance);
    let open: Vec<&str> = nodes.iter().filter(|n| !n.flag("/spec/unschedulable")).map(|n| n.name()).collect();
    if maintenance.is_true("Drained") {
        if !(leaving.is_empty() && open.is_empty()) {
            let pods: Vec<String> = leaving.iter().map(|pod| pod.key()).collect();
            let text =
                format!("the status says drained, but these pods are left: {pods:?}; open nodes: {open:?}");
            add_problem("drained".into(), text);
        }
        return found;
    }
    for node in open.iter().filter(|open| !claims.iter().any(|claim| claim.is_about_node(open))) {
        add_problem(
            format!("open {node}"),
            format!("node {node} is not cordoned, and the status says {}", status_summary(maintenance)),
        );
    }
    if leaving.is_empty() {
        if claims.is_empty() && open.is_empty() && !nodes.is_empty() {
            add_problem(
                "not drained".into(),
                format!("nothing is left, but the status says {}", status_summary(maintenance)),
            );
        }
        return found;
    }
    let pods = leaving.len();
    if claims.is_empty() {
        add_problem(
            "silent".into(),
            format!("{pods} pods have to leave, but the status only says {}", status_summary(maintenance)),
        );
    } else if maintenance
        .condition("Blocked")
        .is_some_and(|(.., text)| NOTHING_TO_DO.iter().any(|nothing| text.contains(nothing)))
    {
        add_problem(
            "nothing to do".into(),
            format!("{pods} pods have to leave, but the status says {}", status_summary(maintenance)),
        );
    }
    if facts.absent_since.is_some() && !claims.iter().any(|c| c.reason == "EvacuationControllerUnavailable") {
        add_problem(
            "absent".into(),
            format!("no evacuation controller leads, but the status says {}", status_summary(maintenance)),
        );
    }
    for pod in unexplained(maintenance, view, facts, &claims, &leaving) {
        let text = format!(
            "the status does not mention pod {}, which has to leave now: {}",
            pod.key(),
            status_summary(maintenance)
        );
        add_problem(format!("unexplained {}", pod.key()), text);
    }
    found
}

/// The pods that have to leave now, do not leave, and are not mentioned. The order is only computed in simple cases:
/// no other maintenance drains these nodes, and the plan has only priorities.
fn unexplained<'a>(
    maintenance: &Value,
    view: &ClusterView,
    facts: &Facts,
    claims: &[Claim],
    leaving: &[&'a Value],
) -> Vec<&'a Value> {
    let nodes = view.nodes_of(maintenance);
    let shares = |other: &Value| {
        other.name() != maintenance.name()
            && other.text("/spec/stage") == "Drain"
            && nodes.iter().any(|node| selects_node(other, node))
    };
    let plan = maintenance.list("/spec/drainPlan");
    let simple = plan.iter().all(|entry| entry.pointer("/podSelector").is_none());
    if !simple || claims.len() >= LISTED || view.all(Kind::Maintenance).any(shares) {
        return Vec::new();
    }
    let own = plan.iter().filter(|entry| matches!(entry.text("/podType"), "" | "Default"));
    let own = own.map(|entry| entry.number("/podPriority"));
    let mut steps: Vec<i64> =
        own.chain([1_000_000_000, 2_000_000_000, 2_000_001_000, i64::from(i32::MAX)]).collect();
    steps.sort_unstable();
    let step = |pod: &Value| steps.iter().position(|step| pod.number("/spec/priority") <= *step);
    let waits = |pod: &Value| pod.label("cluster.x-k8s.io/drain") == Some("wait-completed");
    let first = leaving.iter().filter(|pod| !waits(pod)).map(|pod| step(pod)).min();
    let explained = |pod: &Value| {
        let (key, node) = (pod.key(), pod.text("/spec/nodeName"));
        claims.iter().any(|claim| claim.is_about_node(node) || claim.pod.as_ref() == Some(&key))
    };
    let is_new = |pod: &Value| {
        let created = pod.time("/metadata/creationTimestamp").unwrap_or_default();
        facts.now.duration_since(created) < NEW
    };
    // Waiting for the completion of a pod only holds back later pod types, and all of these are of the first type.
    let due =
        |pod: &&&Value| !waits(pod) && !pod.is_terminating() && Some(step(pod)) == first && !is_new(pod);
    leaving.iter().filter(due).filter(|pod| !explained(pod)).copied().collect()
}

/// The content of a status, in one line.
pub fn status_summary(maintenance: &Value) -> String {
    let condition = |kind: &str| {
        let (status, reason, message) = maintenance.condition(kind)?;
        Some(format!("{kind}={status} {reason} {message:?}"))
    };
    let conditions = ["Cordoned", "Drained", "Blocked"].into_iter().filter_map(condition);
    let entries = claims(maintenance).into_iter().map(|claim| claim.subject());
    let drain = "/status/drainStatus";
    let numbers = maintenance.pointer(drain).map(|_| {
        let of = |field: &str| maintenance.number(&format!("{drain}/{field}"));
        let (drained, nodes) = (of("nodesDrained"), of("nodesSelected"));
        format!("{} pods left, {drained} of {nodes} nodes drained", of("podsLeft"))
    });
    let all: Vec<String> = numbers.into_iter().chain(conditions).chain(entries).collect();
    if all.is_empty() { "nothing".into() } else { all.join("; ") }
}
