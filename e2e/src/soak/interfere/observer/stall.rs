//! Judges the status of a maintenance on whose nodes nothing has moved for a while: does it say what holds the drain,
//! and is that true?

use jiff::SignedDuration;
use serde_json::Value;

use super::claims::{Claim, claims};
use super::truth::{self, Facts};
use super::world::{Kind, Read as _, World, selects_node};

/// How many blockers a status lists at most.
const LISTED: usize = 20;
/// How old a pod has to be before it has to be explained.
const NEW: SignedDuration = SignedDuration::from_secs(10);

/// Something that is wrong with a status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// The maintenance.
    pub maintenance: String,
    /// What it is about: equal as long as the same thing is wrong.
    pub about: String,
    /// For people.
    pub text: String,
}

/// What is wrong with the status of a maintenance on whose nodes nothing moves. Nothing is expected of one that does
/// not drain.
pub fn complaints(maintenance: &Value, world: &World, facts: &Facts) -> Vec<Complaint> {
    if maintenance.text("/spec/stage") != "Drain" || maintenance.is_terminating() {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut complain = |about: String, text: String| {
        found.push(Complaint { maintenance: maintenance.name().to_owned(), about, text });
    };
    let claims = claims(maintenance);
    for claim in &claims {
        if let Err(why) = truth::check(claim, maintenance, world, facts) {
            let said = format!("it says {}: {:?}. But {why}", claim.subject(), claim.message);
            complain(format!("untrue {}", claim.subject()), said);
        }
    }
    let leaving = world.leaving(maintenance);
    let nodes = world.nodes_of(maintenance);
    let open: Vec<&str> = nodes.iter().filter(|n| !n.flag("/spec/unschedulable")).map(|n| n.name()).collect();
    if maintenance.is_true("Drained") {
        if !(leaving.is_empty() && open.is_empty()) {
            let pods: Vec<String> = leaving.iter().map(|pod| pod.key()).collect();
            let text = format!(
                "it says that it is drained, and there are the pods {pods:?}; open nodes are {open:?}"
            );
            complain("drained".into(), text);
        }
        return found;
    }
    for node in open.iter().filter(|open| !claims.iter().any(|claim| claim.is_about_node(open))) {
        complain(
            format!("open {node}"),
            format!("node {node} is not cordoned, and it says {}", said(maintenance)),
        );
    }
    if leaving.is_empty() {
        if claims.is_empty() && open.is_empty() && !nodes.is_empty() {
            complain("not drained".into(), format!("nothing is left, and it says {}", said(maintenance)));
        }
        return found;
    }
    let pods = leaving.len();
    if claims.is_empty() {
        complain(
            "silent".into(),
            format!("{pods} pods have to leave, and it only says {}", said(maintenance)),
        );
    } else if maintenance
        .condition("Blocked")
        .is_some_and(|(.., text)| text.contains("Nothing is in the way"))
    {
        complain(
            "in the way".into(),
            format!("{pods} pods have to leave, and it says {}", said(maintenance)),
        );
    }
    if facts.absent_since.is_some() && !claims.iter().any(|c| c.reason == "EvacuationControllerUnavailable") {
        complain(
            "absent".into(),
            format!("no evacuation controller leads, and it says {}", said(maintenance)),
        );
    }
    for pod in unexplained(maintenance, world, facts, &claims, &leaving) {
        let text =
            format!("nothing is said of pod {}, which has to leave now: {}", pod.key(), said(maintenance));
        complain(format!("unexplained {}", pod.key()), text);
    }
    found
}

/// The pods that have to leave now, do not, and of which nothing is said. What leaves when is only worked out where
/// it is simple: nobody else drains these nodes, and the plan goes by priority alone.
fn unexplained<'a>(
    maintenance: &Value,
    world: &World,
    facts: &Facts,
    claims: &[Claim],
    leaving: &[&'a Value],
) -> Vec<&'a Value> {
    let nodes = world.nodes_of(maintenance);
    let shares = |other: &Value| {
        other.name() != maintenance.name()
            && other.text("/spec/stage") == "Drain"
            && nodes.iter().any(|node| selects_node(other, node))
    };
    let plan = maintenance.list("/spec/drainPlan");
    let simple = plan.iter().all(|entry| entry.pointer("/podSelector").is_none());
    if !simple || claims.len() >= LISTED || world.all(Kind::Maintenance).any(shares) {
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
    // A pod that is waited for holds back those of later types only, and all of these are of the first.
    let due =
        |pod: &&&Value| !waits(pod) && !pod.is_terminating() && Some(step(pod)) == first && !is_new(pod);
    leaving.iter().filter(due).filter(|pod| !explained(pod)).copied().collect()
}

/// What a status says, in one line.
pub fn said(maintenance: &Value) -> String {
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
