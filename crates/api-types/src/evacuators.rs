//! Who may evacuate a pod: the annotations with which evacuators register, and the one function that
//! makes the whole Evacuation for a pod. Instigators and the webhook share it, so that an Evacuation
//! looks the same whoever asks for it, and whether or not the webhook is up.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use thiserror::Error;

use crate::evacuation::{
    DEFAULT_PROGRESS_DEADLINE_SECONDS, Evacuation, EvacuationSpec, Evacuator, LocalPodReference,
};
use crate::names::{self, CONTROLLER_PRIORITY, CONTROLLER_ROLE, EVACUATOR_ANNOTATION_PREFIX};
use crate::{instigators, pod};

/// How many evacuators a pod can have beside its controller, for which one slot is kept.
pub const MAX_OTHER_EVACUATORS: usize = 99;
/// How much of a pod's name goes into the name of its Evacuation.
pub const MAX_NAME_PREFIX: usize = 150;

const MAX_CLASS: usize = 54;
const MAX_ROLE: usize = 253;
const PRIORITIES: std::ops::RangeInclusive<i32> = 0..=100_000;

/// An evacuator annotation that breaks a rule.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("annotation {annotation}: {problem}")]
pub struct Violation {
    /// The annotation's key.
    pub annotation: String,
    /// The rule.
    pub problem: Problem,
}

/// What can be wrong with an evacuator annotation.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Problem {
    /// The class is no DNS subdomain, or too long.
    #[error("the evacuator class must be a DNS subdomain of at most 54 characters, such as foo.example.com")]
    Class,
    /// The class is one of ours, and would make our own wish look like an evacuator's clean-up.
    #[error("evacuator classes in nodemaintenance.k8s.io are reserved for Haulout's own instigators")]
    ReservedClass,
    /// The priority is no number in the range.
    #[error("the priority must be a whole number from 0 to 100000, not {0:?}")]
    Priority(String),
    /// There is a slash and no role after it, or a very long one.
    #[error("the role after the slash must have 1 to 253 characters")]
    Role,
    /// The controller has another priority than its own.
    #[error("the role controller must have the priority 10000, not {0}")]
    ControllerPriority(i32),
    /// Somebody else has the controller's priority.
    #[error(
        "the priority 10000 is reserved for the role controller: choose another, or set 10000/controller"
    )]
    ReservedPriority,
    /// There is more than one controller.
    #[error("only one annotation can have the role controller, and that of {0} has it already")]
    SecondController(String),
    /// There are more evacuators than fit.
    #[error(
        "at most 99 evacuators besides the controller are allowed, and 99 of higher priority are there already"
    )]
    TooMany,
}

impl Evacuator {
    /// Whether it is the pod's managing controller.
    pub fn is_controller(&self) -> bool {
        self.role.as_deref() == Some(CONTROLLER_ROLE)
    }

    /// The annotation, key and value, with which it registers on a pod.
    pub fn annotation(&self) -> (String, String) {
        let value = match &self.role {
            Some(role) => format!("{}/{role}", self.priority),
            None => self.priority.to_string(),
        };
        (format!("{EVACUATOR_ANNOTATION_PREFIX}{}", self.evacuator_class), value)
    }

    /// Reads one annotation, judged on its own. The opposite of [`Evacuator::annotation`].
    pub fn parse(class: &str, value: &str) -> Result<Self, Problem> {
        if class.len() > MAX_CLASS || !is_dns_subdomain(class) {
            return Err(Problem::Class);
        }
        if is_reserved(class) {
            return Err(Problem::ReservedClass);
        }
        let (priority, role) =
            value.split_once('/').map_or((value, None), |(priority, role)| (priority, Some(role)));
        let priority = parse_priority(priority).ok_or_else(|| Problem::Priority(priority.into()))?;
        if role.is_some_and(|role| role.is_empty() || role.chars().count() > MAX_ROLE) {
            return Err(Problem::Role);
        }
        match (role == Some(CONTROLLER_ROLE), priority == CONTROLLER_PRIORITY) {
            (true, false) => Err(Problem::ControllerPriority(priority)),
            (false, true) => Err(Problem::ReservedPriority),
            _ => Ok(Self { evacuator_class: class.into(), priority, role: role.map(Into::into) }),
        }
    }
}

/// Whether only our own instigators may be called so.
fn is_reserved(class: &str) -> bool {
    let rest = class.strip_suffix(names::NODE_MAINTENANCE_GROUP);
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Only the form in which we would print it: no sign, no leading zeros.
fn parse_priority(text: &str) -> Option<i32> {
    let number = text.parse().ok().filter(|number| PRIORITIES.contains(number))?;
    (number.to_string() == text).then_some(number)
}

fn is_dns_subdomain(text: &str) -> bool {
    text.split('.').all(|label| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    })
}

/// Reads all evacuator annotations of a pod: the evacuators, first to act first, and what had to be
/// left out.
pub fn read(annotations: &BTreeMap<String, String>) -> (Vec<Evacuator>, Vec<Violation>) {
    let mut evacuators: Vec<Evacuator> = Vec::new();
    let mut violations = Vec::new();
    for (annotation, value) in annotations {
        let Some(class) = annotation.strip_prefix(EVACUATOR_ANNOTATION_PREFIX) else {
            continue;
        };
        let controller = || evacuators.iter().find(|evacuator| evacuator.is_controller());
        let evacuator = Evacuator::parse(class, value).and_then(|evacuator| match controller() {
            Some(first) if evacuator.is_controller() => {
                Err(Problem::SecondController(first.evacuator_class.clone()))
            }
            _ => Ok(evacuator),
        });
        match evacuator {
            Ok(evacuator) => evacuators.push(evacuator),
            Err(problem) => violations.push(Violation { annotation: annotation.clone(), problem }),
        }
    }
    sort(&mut evacuators);
    let mut others = 0;
    evacuators.retain(|evacuator| {
        others += usize::from(!evacuator.is_controller());
        let fits = evacuator.is_controller() || others <= MAX_OTHER_EVACUATORS;
        if !fits {
            violations.push(Violation { annotation: evacuator.annotation().0, problem: Problem::TooMany });
        }
        fits
    });
    (evacuators, violations)
}

/// Puts evacuators into the order in which they act: by priority, equal ones by class.
pub fn sort(evacuators: &mut [Evacuator]) {
    evacuators.sort_by(|a, b| {
        (Reverse(a.priority), &a.evacuator_class).cmp(&(Reverse(b.priority), &b.evacuator_class))
    });
}

/// The evacuators of the pod with this metadata: those of its annotations and, where no annotation
/// claims that role, the built-in controller class of its owner if this installation serves it.
pub fn resolve(pod: &ObjectMeta, served: &BTreeSet<String>) -> (Vec<Evacuator>, Vec<Violation>) {
    let none = BTreeMap::new();
    let (mut evacuators, violations) = read(pod.annotations.as_ref().unwrap_or(&none));
    let class = built_in_class(pod).filter(|class| served.contains(*class));
    if let Some(class) = class
        && !evacuators.iter().any(|e| e.is_controller() || e.evacuator_class == class)
    {
        evacuators.push(Evacuator {
            evacuator_class: class.into(),
            priority: CONTROLLER_PRIORITY,
            role: Some(CONTROLLER_ROLE.into()),
        });
        sort(&mut evacuators);
    }
    (evacuators, violations)
}

/// The class of the workload controller behind a pod. A pod of a Deployment belongs to a ReplicaSet, or
/// to the Deployment itself while it is being replaced before it leaves.
fn built_in_class(pod: &ObjectMeta) -> Option<&'static str> {
    let owner = pod::controller_of(pod).filter(|owner| owner.api_version.starts_with("apps/"))?;
    let of_deployment =
        || pod.labels.as_ref().is_some_and(|l| l.contains_key(names::POD_TEMPLATE_HASH_LABEL));
    match owner.kind.as_str() {
        "Deployment" => Some(names::class::DEPLOYMENT),
        "ReplicaSet" if of_deployment() => Some(names::class::DEPLOYMENT),
        "StatefulSet" => Some(names::class::STATEFUL_SET),
        "DaemonSet" => Some(names::class::DAEMON_SET),
        _ => None,
    }
}

/// The name of the Evacuation for a pod: its UID, a dash, and at most 150 characters of its name. A cut
/// that would end in `-` or `.`, which no object name may, is shortened further.
pub fn evacuation_name(uid: &str, pod_name: &str) -> String {
    let prefix = match pod_name.char_indices().nth(MAX_NAME_PREFIX) {
        Some((cut, _)) => pod_name.get(..cut).unwrap_or(pod_name).trim_end_matches(['-', '.']),
        None => pod_name,
    };
    format!("{uid}-{prefix}")
}

/// Labels for an Evacuation: its own and the pod's, which win.
pub fn merge_labels(
    own: Option<BTreeMap<String, String>>,
    of_pod: Option<&BTreeMap<String, String>>,
) -> Option<BTreeMap<String, String>> {
    let mut merged = own.unwrap_or_default();
    merged.extend(of_pod.into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
    (!merged.is_empty()).then_some(merged)
}

/// A pod whose metadata cannot come from the API server.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the pod has no metadata.{0}, so no Evacuation can be made for it")]
pub struct IncompletePod(&'static str);

/// The Evacuation that `instigator` (a subdomain) wants for the pod with this metadata, and the
/// annotations of the pod that had to be left out.
pub fn evacuation_for(
    pod: &ObjectMeta,
    instigator: &str,
    served: &BTreeSet<String>,
) -> Result<(Evacuation, Vec<Violation>), IncompletePod> {
    let name = pod.name.clone().ok_or(IncompletePod("name"))?;
    let uid = pod.uid.clone().ok_or(IncompletePod("uid"))?;
    let namespace = pod.namespace.clone().ok_or(IncompletePod("namespace"))?;
    let (evacuators, violations) = resolve(pod, served);
    let spec = EvacuationSpec {
        pod_ref: LocalPodReference { name: name.clone(), uid: uid.clone() },
        evacuators,
        progress_deadline_seconds: DEFAULT_PROGRESS_DEADLINE_SECONDS,
    };
    let mut evacuation = Evacuation::new(&evacuation_name(&uid, &name), spec);
    evacuation.metadata.namespace = Some(namespace);
    evacuation.metadata.labels = merge_labels(None, pod.labels.as_ref());
    evacuation.metadata.finalizers = Some(vec![instigators::finalizer(instigator)]);
    Ok((evacuation, violations))
}

#[cfg(test)]
mod tests;
