//! Whether what a status says is true: for each reason that we document, what has to be so on the API server.

use std::collections::HashMap;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::claims::Claim;
use super::world::{Kind, Read, World, has_to_leave};

/// How late somebody may be with what is due at a certain time.
const LATE: SignedDuration = SignedDuration::from_secs(10);
/// How late the end of an evacuator's turn may be: deadlines that passed in a gap are not missed at once.
const TURN_LATE: SignedDuration = SignedDuration::from_secs(60);
/// How long ago an attempt may be that failed for a reason which passes by itself.
const TRANSIENT: SignedDuration = SignedDuration::from_secs(12);
/// After how long at most a write that was refused is tried again.
const AGAIN: SignedDuration = SignedDuration::from_secs(70);
/// After how long a controller that does not lead is absent.
const ABSENT: SignedDuration = SignedDuration::from_secs(55);

/// What happened, and cannot be read from the objects that are there now.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub now: Timestamp,
    /// How much the controllers' clocks are ahead.
    pub ahead: SignedDuration,
    /// Since when no evacuation controller leads.
    pub absent_since: Option<Timestamp>,
    /// Since when the one that leads has done so.
    pub led_since: Option<Timestamp>,
    /// The last answer to an eviction of ours, by pod.
    pub evictions: HashMap<String, Answer>,
    /// When requests of ours were refused.
    pub refusals: Vec<Refusal>,
}

/// An answer of the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub at: Timestamp,
    pub code: i64,
}

/// A time in which requests for these resources, such as `pods/eviction`, were refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub name: String,
    pub resources: Vec<String>,
    pub from: Timestamp,
    pub until: Option<Timestamp>,
}

impl Facts {
    /// What time it is on the controllers' clocks.
    fn clock(&self) -> Timestamp {
        later(self.now, self.ahead)
    }

    /// Whether such requests are refused now, and if not, when that ended last.
    fn refused(&self, resource: &str) -> Result<(), Option<Timestamp>> {
        let such = self.refusals.iter().filter(|refusal| refusal.resources.iter().any(|of| of == resource));
        if such.clone().any(|refusal| refusal.until.is_none()) {
            return Ok(());
        }
        Err(such.filter_map(|refusal| refusal.until).max())
    }
}

fn later(time: Timestamp, by: SignedDuration) -> Timestamp {
    time.saturating_add(by).unwrap_or(Timestamp::MAX)
}

/// What is said, by whom, and what there is.
struct Check<'a> {
    claim: &'a Claim,
    maintenance: &'a Value,
    world: &'a World,
    facts: &'a Facts,
}

/// Why a claim is not true.
type Untrue = Result<(), String>;

/// Whether a claim of a maintenance is true; why not.
pub fn check(claim: &Claim, maintenance: &Value, world: &World, facts: &Facts) -> Untrue {
    let check = Check { claim, maintenance, world, facts };
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
        "TerminationGracePeriod" => check.ending(),
        "EvacuationRequested" => check.evacuation_requested(),
        "WaitingForNode" => check.node_unprepared(),
        "EvacuationPending" => check.evacuation_pending(),
        "EvacuationControllerUnavailable" => check.controller_absent(),
        "EvacuationRefused" => check.refused("evacuations"),
        "NodeUpdateRefused" => check.refused("nodes"),
        "CordonRace" => check.open_node(),
        "NodeMissing" => check.missing_node(),
        "EvacuationHeld" => check.evacuation_held(),
        "ReturnsToNode" => check.returns(),
        "Terminating" => check.terminating(),
        "VolumesAttached" => check.volumes_attached(),
        "WaitingForCompletion" => check.waits_for_completion(),
        "WaitingForMaintenance" => check.waits_for_maintenance(),
        "NoNodes" | "NoNodesLeft" => check.no_nodes(),
        "Other" => check.others_reason(),
        // Nobody makes such objects here.
        "Unsupported"
        | "DrainRuleUnreadable"
        | "NotFollowed"
        | "NamespaceUnknown"
        | "NoNodeForController"
        | "DrainTargetsTooLarge"
        | "WaitingForOrder"
        | "MaintenanceUpdateRefused" => Err("there is nothing like that in the cluster".into()),
        other => Err(format!("nobody knows how to check the reason {other:?}: write a check for it")),
    }
}

fn ensure(good: bool, why: impl FnOnce() -> String) -> Untrue {
    if good { Ok(()) } else { Err(why()) }
}

impl<'a> Check<'a> {
    /// The node is one of the maintenance's.
    fn node(&self) -> Untrue {
        let Some(name) = self.claim.node.as_ref().filter(|_| self.claim.reason != "NodeMissing") else {
            return Ok(());
        };
        let nodes = self.world.nodes_of(self.maintenance);
        ensure(nodes.iter().any(|node| node.name() == name), || {
            format!("node {name} does not exist or is not selected")
        })
    }

    /// Whether nobody leads who could correct what an Evacuation says, and the status says the same. That nobody leads, it
    /// has to say as well.
    fn is_quoted(&self) -> bool {
        let blocked = || {
            let evacuation = self.world.evacuation_of(self.staying().ok()?)?;
            let (status, reason, message) = evacuation.condition("Blocked")?;
            Some((status, reason) == ("True", &self.claim.reason) && self.claim.message.contains(message))
        };
        self.facts.absent_since.is_some() && blocked().unwrap_or_default()
    }

    /// The pod is on that node and has to leave.
    fn pod(&self) -> Result<&'a Value, String> {
        let key = self.claim.pod.as_ref().ok_or("it names no pod")?;
        let pod = self.world.get(Kind::Pod, key).ok_or_else(|| format!("pod {key} does not exist"))?;
        let node = pod.text("/spec/nodeName");
        ensure(self.claim.node.as_deref() == Some(node), || format!("the pod is on node {node:?}"))?;
        ensure(has_to_leave(pod), || "the pod does not have to leave".into())?;
        Ok(pod)
    }

    /// The same, and nobody has asked it to end yet.
    fn staying(&self) -> Result<&'a Value, String> {
        let pod = self.pod()?;
        ensure(!pod.is_terminating(), || "the pod is terminating already".into())?;
        Ok(pod)
    }

    fn evacuation(&self, pod: &Value) -> Result<&'a Value, String> {
        self.world.evacuation_of(pod).ok_or_else(|| "the pod has no Evacuation".into())
    }

    /// The budgets that the message names: those that cover the pod, or none is true.
    fn names_budgets_of(&self, budgets: &[&Value]) -> Untrue {
        let mut words = self.claim.message.split(|c: char| c.is_whitespace() || ",;:()".contains(c));
        while words.any(|word| word == "PodDisruptionBudget") {
            let Some(name) = words.next().map(|name| name.trim_end_matches('.')) else { break };
            let plain =
                name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c));
            // In "the PodDisruptionBudget has changed" and the like no name follows.
            let is_name = plain && !["has", "is", "does", "that", "which", "of", "to"].contains(&name);
            if is_name && !budgets.iter().any(|budget| budget.name() == name) {
                return Err(format!("PodDisruptionBudget {name} does not exist or does not cover the pod"));
            }
        }
        Ok(())
    }

    fn budget_exhausted(&self) -> Untrue {
        let budgets = self.world.covering(self.staying()?);
        ensure(!budgets.is_empty(), || "no PodDisruptionBudget covers the pod".into())?;
        self.names_budgets_of(&budgets)?;
        // With several, none of them lets the pod go.
        let [budget] = budgets.as_slice() else { return Ok(()) };
        let allowed = budget.number("/status/disruptionsAllowed");
        // While evictions are refused, who is first in line keeps the others waiting.
        let jammed =
            ["pods/eviction", "jam pods/eviction"].into_iter().any(|of| match self.facts.refused(of) {
                Ok(()) => true,
                Err(ended) => ended.is_some_and(|ended| self.facts.now <= later(ended, LATE)),
            });
        ensure(allowed == 0 || is_stale(budget) || jammed, || {
            format!("PodDisruptionBudget {} allows {allowed} disruptions", budget.name())
        })
    }

    fn budget_stale(&self) -> Untrue {
        let budgets = self.world.covering(self.staying()?);
        ensure(budgets.iter().any(|budget| is_stale(budget)), || {
            "no PodDisruptionBudget of the pod is stale".into()
        })
    }

    fn several_budgets(&self) -> Untrue {
        let budgets = self.world.covering(self.staying()?);
        ensure(budgets.len() > 1, || format!("{} PodDisruptionBudgets cover the pod", budgets.len()))?;
        self.names_budgets_of(&budgets)
    }

    /// Refused now; or it was when it was last tried, and the next attempt is not overdue: 5 seconds after the first
    /// refusal, then 10, and so on up to 15 minutes.
    fn eviction_forbidden(&self) -> Untrue {
        let evacuation = self.evacuation(self.staying()?)?;
        let Err(ended) = self.facts.refused("pods/eviction") else { return Ok(()) };
        let ended = ended.ok_or("nothing has ever refused evictions")?;
        let last = evacuation.time("/status/lastFailedEvictionTime").ok_or("no eviction has failed")?;
        let failed = u32::try_from(evacuation.number("/status/failedEvictionCounter")).unwrap_or_default();
        let pause = 5_i64.saturating_mul(2_i64.saturating_pow(failed.saturating_sub(1))).min(900);
        let due = later(last, SignedDuration::from_secs(pause));
        ensure(last <= later(later(ended, self.facts.ahead), LATE), || {
            format!("evictions have been possible since {ended}, and one has failed at {last}")
        })?;
        ensure(self.facts.clock() <= later(due, LATE), || {
            format!("evictions have been possible since {ended}, and the attempt due at {due} was not made")
        })
    }

    /// The API server is jammed; or the last attempt failed a moment ago.
    fn server_busy(&self) -> Untrue {
        let pod = self.staying()?;
        if self.facts.refused("jam pods/eviction").is_ok() {
            return Ok(());
        }
        let last = self.facts.evictions.get(&pod.key()).ok_or("nobody has tried to evict the pod")?;
        ensure(last.code == 429 || last.code >= 500, || {
            format!("the last eviction was answered with {}", last.code)
        })?;
        ensure(self.facts.now <= later(last.at, TRANSIENT), || {
            format!("the API server is not busy any more, and the last attempt was at {}", last.at)
        })
    }

    fn handled_elsewhere(&self) -> Untrue {
        let pod = self.staying()?;
        let last = self.facts.evictions.get(&pod.key()).ok_or("nobody has tried to evict the pod")?;
        ensure(last.code == 429, || format!("the last eviction was answered with {}", last.code))
    }

    fn namespace_terminating(&self) -> Untrue {
        let pod = self.pod()?;
        let namespace = self.world.get(Kind::Namespace, pod.text("/metadata/namespace"));
        ensure(namespace.is_some_and(Read::is_terminating), || "the namespace is not being deleted".into())
    }

    fn evacuator_active(&self) -> Untrue {
        let evacuation = self.evacuation(self.staying()?)?;
        let class = evacuation.text("/status/activeEvacuatorClass");
        ensure(!class.is_empty(), || "no evacuator is active".into())?;
        ensure(!evacuation.flag("/status/activeEvacuatorCompleted"), || {
            format!("the evacuator {class} has completed")
        })?;
        ensure(self.claim.class.as_deref() == Some(class), || format!("the active evacuator is {class}"))?;
        let progress = evacuation.time("/status/evacuationProgressTimestamp");
        let since = progress.or_else(|| evacuation.time("/metadata/creationTimestamp")).unwrap_or_default();
        let deadline = SignedDuration::from_secs(evacuation.number("/spec/progressDeadlineSeconds"));
        let until = later(since, deadline);
        let now = self.facts.clock();
        // A new leader lets evacuators report first.
        let new = self.facts.led_since.is_some_and(|since| self.facts.now <= later(since, TURN_LATE));
        ensure(new || now <= later(until, TURN_LATE), || {
            format!("its time was up at {until}, and it is {now}")
        })?;
        // It is rounded up to the minute.
        let rounded = later(until, SignedDuration::from_mins(1));
        let close = |time: &Timestamp| later(*time, LATE) >= until && *time <= later(rounded, LATE);
        ensure(self.claim.times.iter().any(close), || {
            format!("it does not say that the evacuator has time until {until}")
        })
    }

    fn ending(&self) -> Untrue {
        let end = self.pod()?.time("/metadata/deletionTimestamp").ok_or("the pod is not terminating")?;
        ensure(self.facts.clock() <= later(end, TURN_LATE + LATE), || {
            format!("the pod should have ended by {end}")
        })
    }

    /// Somebody has asked the evacuation controller a moment ago.
    fn evacuation_requested(&self) -> Untrue {
        let evacuation = self.evacuation(self.staying()?)?;
        let created = evacuation.time("/metadata/creationTimestamp").unwrap_or_default();
        let absent = self.facts.absent_since.is_some();
        ensure(absent || self.facts.now <= later(created, TRANSIENT), || {
            format!("the evacuation controller leads and has had time since {created}")
        })
    }

    /// There is no Evacuation, and its node is not cordoned or cannot be written.
    fn node_unprepared(&self) -> Untrue {
        let pod = self.staying()?;
        ensure(self.world.evacuation_of(pod).is_none(), || "the pod has an Evacuation".into())?;
        let refused = match self.facts.refused("nodes") {
            Ok(()) => true,
            Err(ended) => ended.is_some_and(|ended| self.facts.now <= later(ended, AGAIN)),
        };
        if refused { Ok(()) } else { self.open_node() }
    }

    /// There is no Evacuation yet, and there has been hardly any time to make one.
    fn evacuation_pending(&self) -> Untrue {
        let pod = self.staying()?;
        ensure(self.world.evacuation_of(pod).is_none(), || "the pod has an Evacuation".into())?;
        let created = pod.time("/metadata/creationTimestamp").unwrap_or_default();
        ensure(self.facts.now <= later(created, TRANSIENT), || {
            "the maintenance controller leads and has had time to make one".into()
        })
    }

    /// Such writes are refused, or were until a minute ago: then it is tried again. The API server's words are given.
    fn refused(&self, resource: &str) -> Untrue {
        match self.facts.refused(resource) {
            Ok(()) => {}
            Err(None) => return Err(format!("nothing has ever refused {resource}")),
            Err(Some(ended)) => ensure(self.facts.now <= later(ended, AGAIN), || {
                format!("{resource} could be written since {ended}")
            })?,
        }
        ensure(self.claim.message.contains(super::WORDS), || "it does not have the API server's words".into())
    }

    fn open_node(&self) -> Untrue {
        let name = self.claim.node.as_ref().ok_or("it names no node")?;
        let node = self.world.get(Kind::Node, name);
        ensure(node.is_some_and(|node| !node.flag("/spec/unschedulable")), || "the node is cordoned".into())
    }

    fn missing_node(&self) -> Untrue {
        let name = self.claim.node.as_ref().ok_or("it names no node")?;
        ensure(self.world.get(Kind::Node, name).is_none(), || format!("node {name} exists"))
    }

    fn controller_absent(&self) -> Untrue {
        let since = self.facts.absent_since.ok_or("the evacuation controller leads")?;
        ensure(self.facts.now >= later(since, ABSENT), || {
            format!("the evacuation controller has been absent only since {since}")
        })
    }

    /// An Evacuation that should be gone has a finalizer that is named.
    fn evacuation_held(&self) -> Untrue {
        let key = self.claim.pod.as_ref().ok_or("it names no pod")?;
        let held = self.world.all(Kind::Evacuation).any(|evacuation| {
            let pod = format!(
                "{}/{}",
                evacuation.text("/metadata/namespace"),
                evacuation.text("/spec/podRef/name")
            );
            let named =
                evacuation.finalizers().iter().any(|finalizer| self.claim.message.contains(finalizer));
            pod == *key && evacuation.is_terminating() && named
        });
        ensure(held, || "no Evacuation of the pod is being deleted and has a finalizer that is named".into())
    }

    fn returns(&self) -> Untrue {
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
            let node = self.claim.node.as_ref().and_then(|name| self.world.get(Kind::Node, name));
            let was_open = node.is_some_and(|node| {
                let before = node.annotation("nodemaintenance.k8s.io/before-maintenance").unwrap_or_default();
                !node.flag("/spec/unschedulable") || before.contains("reverts")
            });
            ensure(was_open, || "nobody has uncordoned the node".into())?;
        }
        let stages = self.maintenance.list("/status/stageStatuses");
        let drain = stages.iter().find(|stage| stage.text("/name") == "Drain");
        let began = drain.and_then(|stage| stage.time("/startTimestamp")).unwrap_or_default();
        let created = pod.time("/metadata/creationTimestamp").unwrap_or_default();
        ensure(created >= later(began, -SignedDuration::from_secs(1)), || {
            format!("the pod is from {created}, and the drain began at {began}")
        })
    }

    fn terminating(&self) -> Untrue {
        let end = self.pod()?.time("/metadata/deletionTimestamp").ok_or("the pod is not terminating")?;
        ensure(self.facts.clock() >= later(end, SignedDuration::from_secs(50)), || {
            format!("the pod has only been due since {end}")
        })
    }

    fn waits_for_completion(&self) -> Untrue {
        let label = self.pod()?.label("cluster.x-k8s.io/drain");
        ensure(label == Some("wait-completed"), || format!("the label of the pod says {label:?}"))
    }

    /// Somebody is named who drains, is not finished and is not this one.
    fn waits_for_maintenance(&self) -> Untrue {
        let others =
            self.world.all(Kind::Maintenance).filter(|other| other.name() != self.maintenance.name());
        let named = |other: &&Value| {
            let mut words = self.claim.message.split(|c: char| c.is_whitespace() || ",;:()".contains(c));
            words.any(|word| word.trim_end_matches('.') == other.name())
        };
        let mut named = others.filter(named).peekable();
        ensure(named.peek().is_some(), || "it names no maintenance that there is".into())?;
        for other in named {
            let draining = other.text("/spec/stage") == "Drain" && !other.is_terminating();
            ensure(draining && !self.world.leaving(other).is_empty(), || {
                format!("the maintenance {} has nothing left to do", other.name())
            })?;
        }
        Ok(())
    }

    fn no_nodes(&self) -> Untrue {
        let nodes = self.world.nodes_of(self.maintenance).len();
        ensure(nodes == 0, || format!("it selects {nodes} nodes"))
    }

    fn volumes_attached(&self) -> Untrue {
        let nodes = self.world.nodes_of(self.maintenance);
        let named = nodes.into_iter().find(|node| Some(node.name()) == self.claim.node.as_deref());
        ensure(named.is_some_and(|node| !node.list("/status/volumesAttached").is_empty()), || {
            "no volume is attached to the node".into()
        })
    }

    /// Somebody else has said that the Evacuation is blocked.
    fn others_reason(&self) -> Untrue {
        let evacuation = self.evacuation(self.pod()?)?;
        ensure(evacuation.is_true("Blocked"), || "the Evacuation is not blocked".into())
    }
}

fn is_stale(budget: &Value) -> bool {
    budget.number("/status/observedGeneration") < budget.number("/metadata/generation")
}
