//! What the status of a maintenance reports: its blockers, and what it waits for.

use jiff::Timestamp;
use serde_json::Value;

use super::view::Read as _;

/// One entry of a status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    pub reason: String,
    pub message: String,
    /// The node that it names, if any.
    pub node: Option<String>,
    /// The pod that it names, if any, as `namespace/name`.
    pub pod: Option<String>,
    /// The evacuator that it names, if any.
    pub class: Option<String>,
    /// All times that it names, except for the start.
    pub times: Vec<Timestamp>,
}

impl Claim {
    /// The subject, for people.
    pub fn subject(&self) -> String {
        let pod = self.pod.iter().map(|pod| format!(" of pod {pod}"));
        let node = self.node.iter().map(|node| format!(" on node {node}"));
        [self.reason.clone()].into_iter().chain(pod).chain(node).collect()
    }

    /// Whether it concerns this node as a whole.
    pub fn is_about_node(&self, node: &str) -> bool {
        self.pod.is_none() && self.node.as_deref().is_none_or(|named| named == node)
    }
}

/// Reasons of conditions that only report that the drain is running.
const UNDER_WAY: [&str; 3] = ["Evacuating", "Cordoning", "NotBlocked"];

/// All claims of a maintenance's status: each list entry in `drainStatus` with a reason, and each condition with a
/// reason that no entry has.
pub fn claims(maintenance: &Value) -> Vec<Claim> {
    let lists = maintenance.map("/status/drainStatus").into_iter().flatten();
    let entries = lists.filter_map(|(_, list)| list.as_array()).flatten();
    let mut found: Vec<Claim> =
        entries.filter(|entry| !entry.text("/reason").is_empty()).map(entry).collect();
    let drain_message = maintenance.text("/status/drainStatus/drainMessage");
    for (kind, opposite) in [("Drained", "False"), ("Blocked", "True"), ("Cordoned", "False")] {
        let Some((status, reason, message)) = maintenance.condition(kind) else { continue };
        let known = found.iter().any(|claim| claim.reason == reason);
        if status == opposite && !known && !UNDER_WAY.contains(&reason) {
            let message = format!("{message} {drain_message}");
            found.push(Claim {
                reason: reason.to_owned(),
                times: times(&message),
                message,
                ..Claim::default()
            });
        }
    }
    found
}

fn entry(entry: &Value) -> Claim {
    let given = |pointer: &str| Some(entry.text(pointer).to_owned()).filter(|text| !text.is_empty());
    let others = entry.as_object().into_iter().flatten().filter(|(key, _)| *key != "since");
    Claim {
        reason: entry.text("/reason").to_owned(),
        message: entry.text("/message").to_owned(),
        node: given("/node"),
        pod: given("/pod").map(|pod| format!("{}/{pod}", entry.text("/namespace"))),
        class: given("/evacuatorClass"),
        times: others.filter_map(|(_, value)| value.as_str()).flat_map(times).collect(),
    }
}

/// The timestamps in a text.
fn times(text: &str) -> Vec<Timestamp> {
    let words = text.split(|c: char| c.is_whitespace() || ",;()".contains(c));
    words.filter_map(|word| word.trim_end_matches('.').parse().ok()).collect()
}
