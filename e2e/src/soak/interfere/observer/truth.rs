//! Whether a claim of a status is true: for each documented reason, what must hold on the API server.

use std::collections::{BTreeSet, HashMap};

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::claims::Claim;
use super::replacements;
use super::view::{ClusterView, Kind, Read, has_to_leave};

/// How late something may be that is due at a certain time.
const LATE: SignedDuration = SignedDuration::from_secs(10);
/// How late the end of an evacuator's turn may be: after a watch gap, passed deadlines get a grace period.
const TURN_LATE: SignedDuration = SignedDuration::from_secs(60);
/// Maximum age of an attempt that failed with a temporary error.
const TRANSIENT: SignedDuration = SignedDuration::from_secs(12);
/// Maximum delay before a rejected write is retried.
const AGAIN: SignedDuration = SignedDuration::from_secs(70);
/// Time after which a controller that does not lead is missing.
const ABSENT_AFTER: SignedDuration = SignedDuration::from_secs(55);

/// Observations that cannot be read from the current objects.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub now: Timestamp,
    /// How far the controllers' clocks are ahead.
    pub ahead: SignedDuration,
    /// Since when no evacuation controller leads.
    pub absent_since: Option<Timestamp>,
    /// Since when the current leader has led.
    pub led_since: Option<Timestamp>,
    /// Since when no workload evacuator leads, and whether that has ever been the case for long.
    pub unserved_since: Option<Timestamp>,
    pub was_unserved: bool,
    /// The Deployments with which nobody interferes.
    pub undisturbed: BTreeSet<String>,
    /// The last answer to an eviction of ours, by pod.
    pub evictions: HashMap<String, Answer>,
    /// When requests of ours were rejected.
    pub rejections: Vec<Rejection>,
}

/// An answer of the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub at: Timestamp,
    pub code: i64,
}

/// A period in which requests for these resources, such as `pods/eviction`, were rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    pub name: String,
    pub resources: Vec<String>,
    pub from: Timestamp,
    pub until: Option<Timestamp>,
}

impl Facts {
    /// The time on the controllers' clocks.
    fn clock(&self) -> Timestamp {
        later(self.now, self.ahead)
    }

    /// Whether such requests are rejected now, and if not, when that ended.
    fn rejected(&self, resource: &str) -> Result<(), Option<Timestamp>> {
        let such =
            self.rejections.iter().filter(|rejection| rejection.resources.iter().any(|of| of == resource));
        if such.clone().any(|rejection| rejection.until.is_none()) {
            return Ok(());
        }
        Err(such.filter_map(|rejection| rejection.until).max())
    }
}

fn later(time: Timestamp, by: SignedDuration) -> Timestamp {
    time.saturating_add(by).unwrap_or(Timestamp::MAX)
}

/// The claim, its maintenance, and the state of the cluster.
struct Check<'a> {
    claim: &'a Claim,
    maintenance: &'a Value,
    view: &'a ClusterView,
    facts: &'a Facts,
}

/// An error says why a claim is not true.
type CheckResult = Result<(), String>;

/// Checks whether a claim of a maintenance is true.
pub fn check(claim: &Claim, maintenance: &Value, view: &ClusterView, facts: &Facts) -> CheckResult {
    let check = Check { claim, maintenance, view, facts };
    check.node()?;
    if check.is_quoted() {
        return Ok(());
    }
    match claim.reason.as_str() {
        "DisruptionBudgetExhausted" => check.budget_exhausted(),
        "DisruptionBudgetStale" => check.budget_stale(),
        "SeveralDisruptionBudgets" => check.several_budgets(),
        "EvictionForbidden" => check.eviction_forbidden(),
        "ServerBusy" => check.server_busy(),
        "HandledElsewhere" => check.handled_elsewhere(),
        "NamespaceTerminating" => check.namespace_terminating(),
        "EvacuatorActive" => check.evacuator_active(),
        "NoRoomForReplacement" => check.no_room(),
        "TerminationGracePeriod" => check.termination_grace_period(),
        "EvacuationRequested" => check.evacuation_requested(),
        "WaitingForNode" => check.waiting_for_node(),
        "EvacuationPending" => check.evacuation_pending(),
        "EvacuationControllerUnavailable" => check.controller_unavailable(),
        "EvacuationRejected" => check.rejected("evacuations"),
        "NodeUpdateRejected" => check.rejected("nodes"),
        "CordonRace" => check.open_node(),
        "NodeMissing" => check.missing_node(),
        "EvacuationHeld" => check.evacuation_held(),
        "ReturnsToNode" => check.returns(),
        "Terminating" => check.terminating(),
        "VolumesAttached" => check.volumes_attached(),
        "WaitingForCompletion" => check.waits_for_completion(),
        "WaitingForMaintenance" => check.waits_for_maintenance(),
        "NoNodes" | "NoNodesLeft" => check.no_nodes(),
        "Other" => check.foreign_reason(),
        // No such objects exist in this campaign.
        "Unsupported"
        | "DrainRuleUnreadable"
        | "Unreadable"
        | "NamespaceUnknown"
        | "NoNodeForController"
        | "DrainTargetsTooLarge"
        | "WaitingForOrder"
        | "MaintenanceUpdateRejected" => Err("the cluster has nothing that could cause this".into()),
        other => Err(format!("there is no check for the reason {other:?}: write one")),
    }
}

fn ensure(good: bool, why: impl FnOnce() -> String) -> CheckResult {
    if good { Ok(()) } else { Err(why()) }
}

impl<'a> Check<'a> {
    /// The node belongs to the maintenance.
    fn node(&self) -> CheckResult {
        let Some(name) = self.claim.node.as_ref().filter(|_| self.claim.reason != "NodeMissing") else {
            return Ok(());
        };
        let nodes = self.view.nodes_of(self.maintenance);
        ensure(nodes.iter().any(|node| node.name() == name), || {
            format!("node {name} does not exist or is not selected")
        })
    }

    /// Whether the status repeats what an Evacuation says while no evacuation controller leads that could correct it.
    /// The status also has to report that none leads.
    fn is_quoted(&self) -> bool {
        let blocked = || {
            let evacuation = self.view.evacuation_of(self.staying().ok()?)?;
            let (status, reason, message) = evacuation.condition("Blocked")?;
            Some((status, reason) == ("True", &self.claim.reason) && self.claim.message.contains(message))
        };
        self.facts.absent_since.is_some() && blocked().unwrap_or_default()
    }

    /// The pod is on that node and has to leave.
    fn pod(&self) -> Result<&'a Value, String> {
        let key = self.claim.pod.as_ref().ok_or("it names no pod")?;
        let pod = self.view.get(Kind::Pod, key).ok_or_else(|| format!("pod {key} does not exist"))?;
        let node = pod.text("/spec/nodeName");
        ensure(self.claim.node.as_deref() == Some(node), || format!("the pod is on node {node:?}"))?;
        ensure(has_to_leave(pod), || "the pod does not have to leave".into())?;
        Ok(pod)
    }

    /// The same, and the pod is not terminating.
    fn staying(&self) -> Result<&'a Value, String> {
        let pod = self.pod()?;
        ensure(!pod.is_terminating(), || "the pod is terminating already".into())?;
        Ok(pod)
    }

    fn evacuation(&self, pod: &Value) -> Result<&'a Value, String> {
        self.view.evacuation_of(pod).ok_or_else(|| "the pod has no Evacuation".into())
    }

    /// The budgets that the message names cover the pod.
    fn names_budgets_of(&self, budgets: &[&Value]) -> CheckResult {
        let mut words = self.claim.message.split(|c: char| c.is_whitespace() || ",;:()".contains(c));
        while words.any(|word| word == "PodDisruptionBudget") {
            let Some(name) = words.next().map(|name| name.trim_end_matches('.')) else { break };
            let plain =
                name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c));
            // No name follows in messages such as "the PodDisruptionBudget has changed".
            let is_name = plain
                && !name.is_empty()
                && !["allows", "has", "is", "does", "that", "which", "of", "to"].contains(&name);
            if is_name && !budgets.iter().any(|budget| budget.name() == name) {
                return Err(format!("PodDisruptionBudget {name} does not exist or does not cover the pod"));
            }
        }
        Ok(())
    }

    fn budget_exhausted(&self) -> CheckResult {
        let pod = self.staying()?;
        replacements::should_have_moved(pod, self.view, self.facts)?;
        let budgets = self.view.covering(pod);
        ensure(!budgets.is_empty(), || "no PodDisruptionBudget covers the pod".into())?;
        self.names_budgets_of(&budgets)?;
        // If several budgets cover the pod, none of them allows the eviction.
        let [budget] = budgets.as_slice() else { return Ok(()) };
        let allowed = budget.number("/status/disruptionsAllowed");
        // While evictions are rejected, the first pod in the queue blocks the others.
        let overloaded =
            ["pods/eviction", "overload pods/eviction"].into_iter().any(|of| match self.facts.rejected(of) {
                Ok(()) => true,
                Err(ended) => ended.is_some_and(|ended| self.facts.now <= later(ended, LATE)),
            });
        ensure(allowed == 0 || is_stale(budget) || overloaded, || {
            format!("PodDisruptionBudget {} allows {allowed} disruptions", budget.name())
        })
    }

    fn budget_stale(&self) -> CheckResult {
        let budgets = self.view.covering(self.staying()?);
        ensure(budgets.iter().any(|budget| is_stale(budget)), || {
            "no PodDisruptionBudget of the pod is stale".into()
        })
    }

    fn several_budgets(&self) -> CheckResult {
        let budgets = self.view.covering(self.staying()?);
        ensure(budgets.len() > 1, || format!("{} PodDisruptionBudgets cover the pod", budgets.len()))?;
        // Such as "The pod is covered by web, web-2."
        let listed = self.claim.message.split_once("is covered by ").map_or("", |(_, listed)| listed);
        let unknown = listed.trim_end_matches('.').split(", ").find(|name| {
            !name.is_empty() && !name.contains(' ') && !budgets.iter().any(|budget| budget.name() == *name)
        });
        match unknown {
            Some(name) => Err(format!("PodDisruptionBudget {name} does not exist or does not cover the pod")),
            None => self.names_budgets_of(&budgets),
        }
    }

    /// Evictions are rejected now; or the last attempt was rejected and the next one is not overdue: 5 seconds after
    /// the first rejection, then 10, and so on up to 15 minutes.
    fn eviction_forbidden(&self) -> CheckResult {
        let evacuation = self.evacuation(self.staying()?)?;
        let Err(ended) = self.facts.rejected("pods/eviction") else { return Ok(()) };
        let ended = ended.ok_or("nothing has ever rejected evictions")?;
        let last = evacuation.time("/status/lastFailedEvictionTime").ok_or("no eviction has failed")?;
        let failed = u32::try_from(evacuation.number("/status/failedEvictionCounter")).unwrap_or_default();
        let pause = 5_i64.saturating_mul(2_i64.saturating_pow(failed.saturating_sub(1))).min(900);
        let due = later(last, SignedDuration::from_secs(pause));
        ensure(last <= later(later(ended, self.facts.ahead), LATE), || {
            format!("evictions are accepted since {ended}, but one failed at {last}")
        })?;
        ensure(self.facts.clock() <= later(due, LATE), || {
            format!("evictions are accepted since {ended}, but the attempt due at {due} was not made")
        })
    }

    /// The API server is overloaded now, or was at the last attempt a moment ago.
    fn server_busy(&self) -> CheckResult {
        let pod = self.staying()?;
        if self.facts.rejected("overload pods/eviction").is_ok() {
            return Ok(());
        }
        let last = self.facts.evictions.get(&pod.key()).ok_or("nobody has tried to evict the pod")?;
        ensure(last.code == 429 || last.code >= 500, || {
            format!("the last eviction was answered with {}", last.code)
        })?;
        ensure(self.facts.now <= later(last.at, TRANSIENT), || {
            format!("the API server is not busy, and the last attempt was at {}", last.at)
        })
    }

    fn handled_elsewhere(&self) -> CheckResult {
        let pod = self.staying()?;
        let last = self.facts.evictions.get(&pod.key()).ok_or("nobody has tried to evict the pod")?;
        ensure(last.code == 429, || format!("the last eviction was answered with {}", last.code))
    }

    fn namespace_terminating(&self) -> CheckResult {
        let pod = self.pod()?;
        let namespace = self.view.get(Kind::Namespace, pod.text("/metadata/namespace"));
        ensure(namespace.is_some_and(Read::is_terminating), || "the namespace is not being deleted".into())
    }

    fn no_room(&self) -> CheckResult {
        let pod = self.staying()?;
        let (evacuation, message) = (self.evacuation(pod)?, &self.claim.message);
        replacements::has_no_room(message, evacuation, pod, self.view, self.facts)
    }

    fn evacuator_active(&self) -> CheckResult {
        let pod = self.staying()?;
        let evacuation = self.evacuation(pod)?;
        let class = evacuation.text("/status/activeEvacuatorClass");
        ensure(!class.is_empty(), || "no evacuator is active".into())?;
        ensure(!evacuation.flag("/status/activeEvacuatorCompleted"), || {
            format!("the evacuator {class} has completed")
        })?;
        ensure(self.claim.class.as_deref() == Some(class), || format!("the active evacuator is {class}"))?;
        replacements::has_turn(evacuation, pod, self.view, self.facts)?;
        let progress = evacuation.time("/status/evacuationProgressTimestamp");
        let since = progress.or_else(|| evacuation.time("/metadata/creationTimestamp")).unwrap_or_default();
        let deadline = SignedDuration::from_secs(evacuation.number("/spec/progressDeadlineSeconds"));
        let until = later(since, deadline);
        let now = self.facts.clock();
        // A new leader lets evacuators report first.
        let new = self.facts.led_since.is_some_and(|since| self.facts.now <= later(since, TURN_LATE));
        ensure(new || now <= later(until, TURN_LATE), || {
            format!("its deadline passed at {until}, and it is {now}")
        })?;
        // It is rounded up to the minute.
        let rounded = later(until, SignedDuration::from_mins(1));
        let close = |time: &Timestamp| later(*time, LATE) >= until && *time <= later(rounded, LATE);
        ensure(self.claim.times.iter().any(close), || {
            format!("the status does not say that the deadline is {until}")
        })
    }

    fn termination_grace_period(&self) -> CheckResult {
        let end = self.pod()?.time("/metadata/deletionTimestamp").ok_or("the pod is not terminating")?;
        ensure(self.facts.clock() <= later(end, TURN_LATE + LATE), || {
            format!("the pod should have terminated by {end}")
        })
    }

    /// The Evacuation was created a moment ago.
    fn evacuation_requested(&self) -> CheckResult {
        let evacuation = self.evacuation(self.staying()?)?;
        let created = evacuation.time("/metadata/creationTimestamp").unwrap_or_default();
        let absent = self.facts.absent_since.is_some();
        ensure(absent || self.facts.now <= later(created, TRANSIENT), || {
            format!("the evacuation controller leads and has had time since {created}")
        })
    }

    /// Nobody requests that the pod leaves, and its node is not cordoned or cannot be written. An Evacuation that was cancelled
    /// may be left while the evacuation controller does not run.
    fn waiting_for_node(&self) -> CheckResult {
        let pod = self.staying()?;
        let is_cancelled = |evacuation: &Value| {
            !evacuation.finalizers().iter().any(|finalizer| finalizer.contains("/instigator_"))
        };
        ensure(self.view.evacuation_of(pod).is_none_or(is_cancelled), || "the pod has an Evacuation".into())?;
        let rejected = match self.facts.rejected("nodes") {
            Ok(()) => true,
            Err(ended) => ended.is_some_and(|ended| self.facts.now <= later(ended, AGAIN)),
        };
        if rejected { Ok(()) } else { self.open_node() }
    }

    /// The pod has no Evacuation yet, and there was hardly any time to create one.
    fn evacuation_pending(&self) -> CheckResult {
        let pod = self.staying()?;
        ensure(self.view.evacuation_of(pod).is_none(), || "the pod has an Evacuation".into())?;
        let created = pod.time("/metadata/creationTimestamp").unwrap_or_default();
        ensure(self.facts.now <= later(created, TRANSIENT), || {
            "the maintenance controller leads and had time to create one".into()
        })
    }

    /// Such writes are rejected, or were until a minute ago: after that, they are retried. The message has the API
    /// server's answer.
    fn rejected(&self, resource: &str) -> CheckResult {
        match self.facts.rejected(resource) {
            Ok(()) => {}
            Err(None) => return Err(format!("nothing has ever rejected {resource}")),
            Err(Some(ended)) => ensure(self.facts.now <= later(ended, AGAIN), || {
                format!("{resource} can be written since {ended}")
            })?,
        }
        ensure(self.claim.message.contains(super::DENIAL_MESSAGE), || {
            "it does not have the API server's answer".into()
        })
    }

    fn open_node(&self) -> CheckResult {
        let name = self.claim.node.as_ref().ok_or("it names no node")?;
        let node = self.view.get(Kind::Node, name);
        ensure(node.is_some_and(|node| !node.flag("/spec/unschedulable")), || "the node is cordoned".into())
    }

    fn missing_node(&self) -> CheckResult {
        let name = self.claim.node.as_ref().ok_or("it names no node")?;
        ensure(self.view.get(Kind::Node, name).is_none(), || format!("node {name} exists"))
    }

    fn controller_unavailable(&self) -> CheckResult {
        let since = self.facts.absent_since.ok_or("the evacuation controller leads")?;
        ensure(self.facts.now >= later(since, ABSENT_AFTER), || {
            format!("the evacuation controller is missing only since {since}")
        })
    }

    /// An Evacuation that should be gone has a finalizer that the message names.
    fn evacuation_held(&self) -> CheckResult {
        let key = self.claim.pod.as_ref().ok_or("it names no pod")?;
        let held = self.view.all(Kind::Evacuation).any(|evacuation| {
            let pod = format!(
                "{}/{}",
                evacuation.text("/metadata/namespace"),
                evacuation.text("/spec/podRef/name")
            );
            let named =
                evacuation.finalizers().iter().any(|finalizer| self.claim.message.contains(finalizer));
            pod == *key && evacuation.is_terminating() && named
        });
        ensure(held, || {
            "no Evacuation of the pod is being deleted and has a finalizer that is named".into()
        })?;
        replacements::may_hold(&self.claim.message, self.facts)
    }

    fn returns(&self) -> CheckResult {
        let pod = self.pod()?;
        let tolerates = pod.list("/spec/tolerations").iter().any(|toleration| {
            matches!(toleration.text("/key"), "" | "node.kubernetes.io/unschedulable")
                && matches!(toleration.text("/effect"), "" | "NoSchedule")
        });
        let said = if self.claim.message.contains("uncordoned") { "uncordoned" } else { "tolerates" };
        ensure(tolerates == (said == "tolerates"), || {
            format!("the status says {said:?}, and the pod tolerates the cordon: {tolerates}")
        })?;
        if !tolerates {
            let node = self.claim.node.as_ref().and_then(|name| self.view.get(Kind::Node, name));
            let was_open = node.is_some_and(|node| {
                let before = node.annotation("nodemaintenance.k8s.io/before-maintenance").unwrap_or_default();
                !node.flag("/spec/unschedulable") || before.contains("reverts")
            });
            ensure(was_open, || "nobody uncordoned the node".into())?;
        }
        let stages = self.maintenance.list("/status/stageStatuses");
        let drain = stages.iter().find(|stage| stage.text("/name") == "Drain");
        let began = drain.and_then(|stage| stage.time("/startTimestamp")).unwrap_or_default();
        let created = pod.time("/metadata/creationTimestamp").unwrap_or_default();
        ensure(created >= later(began, -SignedDuration::from_secs(1)), || {
            format!("the pod was created at {created}, but the drain started at {began}")
        })
    }

    fn terminating(&self) -> CheckResult {
        let end = self.pod()?.time("/metadata/deletionTimestamp").ok_or("the pod is not terminating")?;
        ensure(self.facts.clock() >= later(end, SignedDuration::from_secs(50)), || {
            format!("the grace period ended only at {end}")
        })
    }

    fn waits_for_completion(&self) -> CheckResult {
        let label = self.pod()?.label("cluster.x-k8s.io/drain");
        ensure(label == Some("wait-completed"), || format!("the label of the pod says {label:?}"))
    }

    /// The message names another maintenance that drains and is not finished.
    fn waits_for_maintenance(&self) -> CheckResult {
        let others = self.view.all(Kind::Maintenance).filter(|other| other.name() != self.maintenance.name());
        let named = |other: &&Value| {
            let mut words = self.claim.message.split(|c: char| c.is_whitespace() || ",;:()".contains(c));
            words.any(|word| word.trim_end_matches('.') == other.name())
        };
        let mut named = others.filter(named).peekable();
        ensure(named.peek().is_some(), || "it names no maintenance that exists".into())?;
        for other in named {
            let draining = other.text("/spec/stage") == "Drain" && !other.is_terminating();
            ensure(draining && !self.view.leaving(other).is_empty(), || {
                format!("the maintenance {} has nothing left to do", other.name())
            })?;
        }
        Ok(())
    }

    fn no_nodes(&self) -> CheckResult {
        let nodes = self.view.nodes_of(self.maintenance).len();
        ensure(nodes == 0, || format!("it selects {nodes} nodes"))
    }

    fn volumes_attached(&self) -> CheckResult {
        let nodes = self.view.nodes_of(self.maintenance);
        let named = nodes.into_iter().find(|node| Some(node.name()) == self.claim.node.as_deref());
        ensure(named.is_some_and(|node| !node.list("/status/volumesAttached").is_empty()), || {
            "no volume is attached to the node".into()
        })
    }

    /// Another program has reported that the Evacuation is blocked.
    fn foreign_reason(&self) -> CheckResult {
        let evacuation = self.evacuation(self.pod()?)?;
        ensure(evacuation.is_true("Blocked"), || "the Evacuation is not blocked".into())
    }
}

fn is_stale(budget: &Value) -> bool {
    budget.number("/status/observedGeneration") < budget.number("/metadata/generation")
}
