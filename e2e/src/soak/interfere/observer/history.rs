//! Checks the whole history of a round: every change of pods, budgets, nodes, maintenances and Evacuations in the
//! order of the API server, and our evictions.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::audit::Request;
use super::availability::outages;
use super::view::{ClusterView, Kind, Read as _, controller, covers, is_healthy, is_moved, selects_node};

/// For how long the status of a budget may lag after somebody else deletes a pod or changes a budget.
const BEHIND: SignedDuration = SignedDuration::from_secs(10);
/// For how long a controller may act on outdated state.
const LATE: SignedDuration = SignedDuration::from_secs(3);
/// Maximum number of evictions of pods of the same owner from the same node. Pods that return wait longer each time.
const RETURNS: usize = 12;

/// One change of an object.
#[derive(Clone, Debug)]
pub struct Change {
    /// The resource version.
    pub revision: u64,
    /// When the observer received it.
    pub at: Timestamp,
    pub kind: Kind,
    pub key: String,
    /// The new state of the object; `None` if it is gone.
    pub object: Option<Arc<Value>>,
}

/// Everything that happened.
#[derive(Debug, Default)]
pub struct History {
    pub changes: Vec<Change>,
    /// Writes of our services.
    pub requests: Vec<Request>,
    /// When a watch had to restart, so that changes may be missing.
    pub gaps: Vec<Timestamp>,
    /// The Deployments with which nobody interferes.
    pub undisturbed: BTreeSet<String>,
    /// When evacuators may have missed their deadlines for the first time, so that pods leave without a replacement.
    pub deadlines_pass: Option<Timestamp>,
}

/// What people own: none of our services may write it.
const OWNED: [&str; 4] = ["deployments", "replicasets", "statefulsets", "poddisruptionbudgets"];

/// Pods and budgets at one moment, and since when budgets may lag.
#[derive(Default)]
struct Replay {
    view: ClusterView,
    /// When somebody else last deleted a healthy pod of the budget, or changed the budget.
    disturbed: HashMap<String, Timestamp>,
}

impl History {
    /// The changes in their order.
    fn ordered(&self) -> Vec<&Change> {
        let mut changes: Vec<&Change> = self.changes.iter().collect();
        changes.sort_by_key(|change| change.revision);
        changes
    }

    /// The pods that we have evicted: successful requests.
    fn evictions(&self) -> impl Iterator<Item = &Request> {
        self.requests.iter().filter(|request| request.resource == "pods/eviction" && request.code == 201)
    }

    /// Everything that must not happen.
    pub fn violations(&self) -> Vec<String> {
        let mut found = self.budgets();
        found.extend(self.deletions());
        found.extend(self.unwanted());
        found.extend(self.loops());
        found.extend(self.writes());
        found.extend(self.requested());
        found.extend(outages(&self.undisturbed, &self.ordered(), &self.gaps, self.deadlines_pass));
        found
    }

    /// Writes of ours to objects of people, and evictions by other services than the one for it, rejected or not.
    fn writes(&self) -> Vec<String> {
        let wrong = self.requests.iter().filter(|request| {
            let resource = request.resource.split('/').next().unwrap_or_default();
            let evicts = request.resource == "pods/eviction" && request.service != "evacuation-controller";
            evicts || OWNED.contains(&resource)
        });
        wrong
            .map(|request| {
                let Request { service, verb, resource, key, code, .. } = request;
                format!("{service} must not {verb} {resource} {key}: {code}")
            })
            .collect()
    }

    /// Evacuations that the workload evacuator requested for pods that it had not moved.
    fn requested(&self) -> Vec<String> {
        let (mut found, mut moved) = (Vec::new(), BTreeMap::new());
        for change in self.ordered() {
            let Some(object) = &change.object else { continue };
            match change.kind {
                Kind::Pod => {
                    moved.insert(object.uid().to_owned(), is_moved(object));
                }
                Kind::Evacuation => {
                    let ours = |request: &&Request| {
                        request.service == "workload-evacuator"
                            && (request.verb.as_str(), request.resource.as_str(), request.code)
                                == ("create", "evacuations", 201)
                            && request.key == change.key
                            && request.received <= change.at
                            && change.at <= later(request.answered, LATE)
                    };
                    let is_moved = moved.get(object.text("/spec/podRef/uid")).copied().unwrap_or_default();
                    if !is_moved && self.requests.iter().any(|request| ours(&request)) {
                        found.push(format!(
                            "the workload evacuator requested the evacuation {}, but its pod was not moved",
                            change.key
                        ));
                    }
                }
                _ => {}
            }
        }
        found
    }

    /// Evictions by us after which a budget had fewer healthy pods than it requires, without a recent disruption by
    /// somebody else.
    fn budgets(&self) -> Vec<String> {
        let (mut found, mut replay) = (Vec::new(), Replay::default());
        let mut evictions: Vec<&Request> = self.evictions().collect();
        for change in self.ordered() {
            let Change { at, kind, key, object, .. } = change;
            let old = match object {
                Some(object) => replay.view.put(*kind, object.clone()),
                None => replay.view.remove(*kind, key),
            };
            let Some(old) = old else {
                if *kind == Kind::Budget {
                    replay.disturbed.insert(key.clone(), *at);
                }
                continue;
            };
            match kind {
                Kind::Budget => {
                    let spec = |of: &Value| of.pointer("/spec").cloned();
                    if object.as_ref().is_none_or(|new| spec(new) != spec(&old) || new.uid() != old.uid()) {
                        replay.disturbed.insert(key.clone(), *at);
                    }
                }
                Kind::Pod => {
                    let same = object.as_ref().filter(|new| new.uid() == old.uid());
                    if !is_healthy(&old) || same.is_some_and(|new| is_healthy(new)) {
                        continue;
                    }
                    let ours = |request: &&Request| {
                        request.key == *key && request.received <= *at && *at <= later(request.answered, LATE)
                    };
                    let ours = evictions.iter().position(ours).map(|place| evictions.swap_remove(place));
                    found.extend(replay.pod_left(&old, *at, ours.is_some(), &self.gaps));
                }
                _ => {}
            }
        }
        found
    }

    /// Pods that we deleted instead of evicting them.
    fn deletions(&self) -> Vec<String> {
        let deleted = self.requests.iter().filter(|request| {
            request.resource == "pods" && request.verb.starts_with("delete") && request.code < 300
        });
        deleted.map(|request| format!("{} deleted pod {}", request.service, request.key)).collect()
    }

    /// Evacuations that we created for pods that no maintenance wanted to leave.
    fn unwanted(&self) -> Vec<String> {
        let (mut found, mut past): (_, BTreeMap<(Kind, String), Vec<&Change>>) =
            (Vec::new(), BTreeMap::new());
        let mut pods: HashMap<String, Arc<Value>> = HashMap::new();
        for change in self.ordered() {
            let known = past.entry((change.kind, change.key.clone())).or_default();
            let before =
                known.last().and_then(|last| last.object.as_ref().map(|object| object.uid().to_owned()));
            known.push(change);
            let Some(object) = &change.object else { continue };
            if change.kind == Kind::Pod {
                pods.insert(object.uid().to_owned(), object.clone());
            }
            let is_made = change.kind == Kind::Evacuation && before.as_deref() != Some(object.uid());
            let ours = || {
                let created = |request: &&Request| {
                    request.verb == "create" && request.resource == "evacuations" && request.code == 201
                };
                let service = "maintenance-controller";
                let mut made =
                    self.requests.iter().filter(created).filter(|request| request.service == service);
                made.any(|request| request.key == change.key && request.received <= change.at)
            };
            if !is_made || !ours() {
                continue;
            }
            let Some(pod) = pods.get(object.text("/spec/podRef/uid")) else { continue };
            if !is_drained_at(&past, pod, change.at) {
                let (pod, node) = (pod.key(), pod.text("/spec/nodeName"));
                found.push(format!(
                    "an Evacuation was created for pod {pod}, but no maintenance drains its node {node}"
                ));
            }
        }
        found
    }

    /// Owners whose pods are evicted from the same node repeatedly.
    fn loops(&self) -> Vec<String> {
        let mut pods: HashMap<(String, String), String> = HashMap::new();
        for Change { object, key, kind, .. } in &self.changes {
            let Some(pod) = object.as_ref().filter(|_| *kind == Kind::Pod) else { continue };
            if let Some(owner) = controller(pod) {
                let owner = format!("{} {}", owner.text("/kind"), owner.text("/name"));
                pods.insert((key.clone(), pod.text("/spec/nodeName").to_owned()), owner);
            }
        }
        // If a name was used on several nodes, the node of the eviction is unknown.
        let mut evicted: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for request in self.evictions() {
            let mut places = pods.iter().filter(|((key, _), _)| *key == request.key);
            if let (Some(((_, node), owner)), None) = (places.next(), places.next()) {
                *evicted.entry((owner, node)).or_default() += 1;
            }
        }
        let often = evicted.into_iter().filter(|(_, times)| *times > RETURNS);
        often
            .map(|((owner, node), times)| format!("{times} pods of {owner} were evicted from node {node}"))
            .collect()
    }
}

fn later(time: Timestamp, by: SignedDuration) -> Timestamp {
    time.saturating_add(by).unwrap_or(Timestamp::MAX)
}

/// Whether a maintenance drains the node of this pod, or did until a moment ago.
fn is_drained_at(past: &BTreeMap<(Kind, String), Vec<&Change>>, pod: &Value, at: Timestamp) -> bool {
    // Each version counts until the next one is received.
    let recent = |changes: &'_ [&Change]| -> Vec<Arc<Value>> {
        let ends = changes.iter().skip(1).map(|next| next.at).chain([Timestamp::MAX]);
        let versions = changes.iter().zip(ends).filter(|(_, end)| at <= later(*end, LATE));
        versions.filter_map(|(change, _)| change.object.clone()).collect()
    };
    let node = (Kind::Node, pod.text("/spec/nodeName").to_owned());
    let nodes = past.get(&node).map(|changes| recent(changes)).unwrap_or_default();
    let maintenances = past.iter().filter(|((kind, _), _)| *kind == Kind::Maintenance);
    let mut versions = maintenances.flat_map(|(_, changes)| recent(changes));
    versions.any(|maintenance| {
        maintenance.text("/spec/stage") == "Drain"
            && !maintenance.is_terminating()
            && nodes.iter().any(|node| selects_node(&maintenance, node))
    })
}

impl Replay {
    /// Records that a healthy pod was removed, by us or by somebody else. Returns the violations.
    fn pod_left(&mut self, pod: &Value, at: Timestamp, by_us: bool, gaps: &[Timestamp]) -> Vec<String> {
        let budgets: Vec<&Value> = self.view.all(Kind::Budget).filter(|budget| covers(budget, pod)).collect();
        let keys: Vec<String> = budgets.iter().map(|budget| budget.key()).collect();
        if !by_us {
            self.disturbed.extend(keys.into_iter().map(|key| (key, at)));
            return Vec::new();
        }
        let just = |time: Timestamp| at.duration_since(time) < BEHIND;
        let quiet = |budget: &&&Value| {
            !self.disturbed.get(&budget.key()).is_some_and(|time| just(*time))
                && !gaps.iter().copied().any(just)
        };
        let mut found = Vec::new();
        for budget in budgets.iter().filter(quiet) {
            let covered = self.view.all(Kind::Pod).filter(|other| covers(budget, other));
            let healthy = covered.filter(|other| is_healthy(other)).count();
            let wanted = usize::try_from(budget.number("/status/desiredHealthy")).unwrap_or_default();
            if healthy < wanted || keys.len() > 1 {
                let (name, pod) = (budget.key(), pod.key());
                let text = format!(
                    "we evicted pod {pod}, and PodDisruptionBudget {name} has {healthy} healthy pods of {wanted}"
                );
                let several =
                    if keys.len() > 1 { format!("; the pod is covered by {keys:?}") } else { String::new() };
                found.push(text + &several);
            }
        }
        found
    }
}
