//! Whether claims about pods that wait for a replacement are true.

use jiff::SignedDuration;
use serde_json::Value;

use super::truth::Facts;
use super::view::{ClusterView, Kind, Read as _, is_healthy, is_moved};
use super::{WORKLOAD_CLASS, WORKLOAD_FINALIZER};

/// How long after the last leader of the workload evacuator the evacuation controller may leave the turn to it: a minute,
/// and a little to notice it.
const PASSED_OVER: SignedDuration = SignedDuration::from_secs(75);

/// An error says why a claim is not true.
type CheckResult = Result<(), String>;

fn ensure(good: bool, why: impl FnOnce() -> String) -> CheckResult {
    if good { Ok(()) } else { Err(why()) }
}

/// The workload evacuator has the turn: its service runs, and the Evacuation says what it waits for.
pub fn has_turn(evacuation: &Value, pod: &Value, view: &ClusterView, facts: &Facts) -> CheckResult {
    if evacuation.text("/status/activeEvacuatorClass") != WORKLOAD_CLASS {
        return Ok(());
    }
    if let Some(since) = facts.unserved_since {
        // The evacuation controller has to detect it, too.
        let known = since.max(facts.led_since.unwrap_or(facts.now));
        return ensure(facts.now.duration_since(known) < PASSED_OVER, || {
            format!("no workload evacuator has led since {since}: it should have been passed over")
        });
    }
    let message = evacuation.text("/status/message");
    let deployment = view.deployment_of(pod).ok_or("the pod belongs to no Deployment")?;
    let pods = view.pods_of_deployment(deployment);
    let waits = format!("the Evacuation says {message:?}");
    if message.starts_with("In the queue of Deployment") {
        let leaves =
            pods.iter().any(|other| is_moved(other) && !other.is_terminating() && other.uid() != pod.uid());
        return ensure(leaves, || format!("{waits}, but no other pod of the Deployment is being replaced"));
    }
    ensure(is_moved(pod), || format!("{waits}, but the pod still belongs to its ReplicaSet"))?;
    let of_sets = || pods.iter().filter(|other| !is_moved(other) && !other.is_terminating());
    if message.starts_with("Waiting until Deployment") {
        let ready = of_sets().filter(|other| is_healthy(other)).count();
        let wanted = usize::try_from(deployment.number("/spec/replicas")).unwrap_or_default();
        return ensure(ready < wanted, || format!("{waits}, but it has {ready} of {wanted} replicas"));
    }
    ensure(message.starts_with("Waiting until the replacement is available: "), || {
        format!("{waits}, which does not say what the workload evacuator waits for")
    })?;
    let is_named = |other: &&&Value| message.split([' ', ',', '.', ';']).any(|word| word == other.name());
    let starting = of_sets().filter(is_named).any(|named| !is_healthy(named));
    ensure(starting, || {
        format!("{waits}, which names no pod of a ReplicaSet of the Deployment that is not ready")
    })
}

/// No node has room for the replacement that the message names, and the scheduler says why.
pub fn has_no_room(
    message: &str,
    evacuation: &Value,
    pod: &Value,
    view: &ClusterView,
    facts: &Facts,
) -> CheckResult {
    ensure(evacuation.is_true("Blocked"), || "the Evacuation is not blocked".into())?;
    ensure(facts.unserved_since.is_none(), || "no workload evacuator leads".into())?;
    ensure(is_moved(pod), || "the pod still belongs to its ReplicaSet".into())?;
    let deployment = view.deployment_of(pod).ok_or("the pod belongs to no Deployment")?;
    let pods = view.pods_of_deployment(deployment);
    let named = pods.iter().find(|other| message.split([' ', ',', ':']).any(|word| word == other.name()));
    let named = named.ok_or("it names no pod of the Deployment")?;
    let (name, scheduled) = (named.name(), named.condition("PodScheduled"));
    let Some(("False", _, why)) = scheduled else { return Err(format!("pod {name} has a node")) };
    let short = why.split(" preemption:").next().unwrap_or_default().trim_end_matches(['.', ' ']);
    ensure(message.contains(short), || format!("the scheduler says about pod {name}: {why}"))?;
    let open = view.all(Kind::Node).filter(|node| !node.flag("/spec/unschedulable")).count();
    ensure(open == 0, || format!("{open} nodes are schedulable, and none of them is ever full"))
}

/// A pod of a Deployment with which nobody interferes waits for its budget: it should have been replaced before.
pub fn should_have_moved(pod: &Value, view: &ClusterView, facts: &Facts) -> CheckResult {
    let deployment = view.deployment_of(pod);
    let name = deployment.map(super::view::Read::name).unwrap_or_default();
    let expected = facts.undisturbed.contains(name) && !facts.was_unserved && facts.ahead.is_zero();
    ensure(!expected, || {
        format!("Deployment {name} should have got a replacement, and nobody interferes with it")
    })
}

/// The finalizer of the workload evacuator holds an Evacuation that is over only while it has no leader.
pub fn may_hold(message: &str, facts: &Facts) -> CheckResult {
    let held = message.contains(WORKLOAD_FINALIZER) && facts.unserved_since.is_none();
    ensure(!held, || "the workload evacuator leads, and does not remove its finalizer".into())
}
