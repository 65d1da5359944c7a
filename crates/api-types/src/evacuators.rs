//! Evacuator annotations of pods, and the function that builds the Evacuation of a pod. Instigators and the webhook share it,
//! so that all Evacuations are equal, with and without the webhook.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use thiserror::Error;

use crate::evacuation::{
    DEFAULT_PROGRESS_DEADLINE_SECONDS, Evacuation, EvacuationSpec, Evacuator, LocalPodReference,
};
use crate::names::{self, CONTROLLER_PRIORITY, CONTROLLER_ROLE, EVACUATOR_ANNOTATION_PREFIX};
use crate::{instigators, pod};

/// Maximum number of evacuators of a pod, besides its controller.
pub const MAX_OTHER_EVACUATORS: usize = 99;
/// Maximum length of the pod's name in the name of its Evacuation.
pub const MAX_NAME_PREFIX: usize = 150;

const MAX_CLASS: usize = 54;
const MAX_ROLE: usize = 253;
const PRIORITIES: std::ops::RangeInclusive<i32> = 0..=100_000;

/// An invalid evacuator annotation.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("annotation {annotation}: {problem}")]
pub struct Violation {
    /// The annotation's key.
    pub annotation: String,
    /// What is wrong.
    pub problem: Problem,
}

/// What can be wrong with an evacuator annotation.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Problem {
    /// The class is not a DNS subdomain, or too long.
    #[error("the evacuator class must be a DNS subdomain of at most 54 characters, such as foo.example.com")]
    Class,
    /// The class is reserved: our own instigator finalizer would look like the finalizer of an evacuator.
    #[error("evacuator classes in nodemaintenance.k8s.io are reserved for Haulout's own instigators")]
    ReservedClass,
    /// The priority is not a number in the range.
    #[error("the priority must be a whole number from 0 to 100000, not {0:?}")]
    Priority(String),
    /// The role after the slash is empty or too long.
    #[error("the role after the slash must have 1 to 253 characters")]
    Role,
    /// The controller has a priority other than 10000.
    #[error("the role controller must have the priority 10000, not {0}")]
    ControllerPriority(i32),
    /// Another evacuator has the controller's priority.
    #[error(
        "the priority 10000 is reserved for the role controller: choose another, or set 10000/controller"
    )]
    ReservedPriority,
    /// There is more than one controller.
    #[error("only one annotation can have the role controller, and the annotation of {0} already has it")]
    SecondController(String),
    /// There are too many evacuators.
    #[error(
        "at most 99 evacuators besides the controller are allowed, and 99 with a higher priority exist already"
    )]
    TooMany,
}

impl Evacuator {
    /// Whether the evacuator is the pod's managing controller.
    pub fn is_controller(&self) -> bool {
        self.role.as_deref() == Some(CONTROLLER_ROLE)
    }

    /// The key and value of the pod annotation for this evacuator.
    pub fn annotation(&self) -> (String, String) {
        let value = match &self.role {
            Some(role) => format!("{}/{role}", self.priority),
            None => self.priority.to_string(),
        };
        (format!("{EVACUATOR_ANNOTATION_PREFIX}{}", self.evacuator_class), value)
    }

    /// Parses one annotation. The inverse of [`Evacuator::annotation`].
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

/// Whether the class is reserved for Haulout's own instigators.
fn is_reserved(class: &str) -> bool {
    let rest = class.strip_suffix(names::NODE_MAINTENANCE_GROUP);
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Accepts only the canonical form: no sign, no leading zeros.
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

/// Parses all evacuator annotations of a pod. Returns the evacuators in the order in which they become active, and the
/// invalid annotations.
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

/// Sorts evacuators in the order in which they become active: by priority, highest first, then by class.
pub fn sort(evacuators: &mut [Evacuator]) {
    evacuators.sort_by(|a, b| {
        (Reverse(a.priority), &a.evacuator_class).cmp(&(Reverse(b.priority), &b.evacuator_class))
    });
}

/// The evacuators of the pod with this metadata: those of its annotations and, if no annotation has the role controller, the
/// built-in class of its owner if this installation serves it.
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

/// The class of the pod's workload controller. A pod of a Deployment is owned by a ReplicaSet, or by the Deployment itself
/// while its replacement starts.
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

/// The name of the Evacuation for a pod: its UID, a dash, and at most 150 characters of its name. Object names must not end
/// with `-` or `.`, so these are removed at the end of a shortened name.
pub fn evacuation_name(uid: &str, pod_name: &str) -> String {
    let prefix = match pod_name.char_indices().nth(MAX_NAME_PREFIX) {
        Some((cut, _)) => pod_name.get(..cut).unwrap_or(pod_name).trim_end_matches(['-', '.']),
        None => pod_name,
    };
    format!("{uid}-{prefix}")
}

/// The labels of an Evacuation: its own and those of the pod. Labels of the pod override its own.
pub fn merge_labels(
    own: Option<BTreeMap<String, String>>,
    of_pod: Option<&BTreeMap<String, String>>,
) -> Option<BTreeMap<String, String>> {
    let mut merged = own.unwrap_or_default();
    merged.extend(of_pod.into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
    (!merged.is_empty()).then_some(merged)
}

/// The annotations of an Evacuation: its own, and those with which Argo CD leaves it alone. With the labels of its pod, it would
/// look like a part of the application that is missing in Git: out of sync, and to be pruned. Flux deletes only what it has
/// applied itself, and needs no annotation.
pub fn merge_annotations(own: Option<BTreeMap<String, String>>) -> BTreeMap<String, String> {
    let mut merged = own.unwrap_or_default();
    for (annotation, value) in [
        (names::ARGO_CD_COMPARE_OPTIONS_ANNOTATION, "IgnoreExtraneous"),
        (names::ARGO_CD_SYNC_OPTIONS_ANNOTATION, "Prune=false"),
    ] {
        merged.entry(annotation.to_owned()).or_insert_with(|| value.to_owned());
    }
    merged
}

/// A pod with incomplete metadata.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("the pod has no metadata.{0}, so no Evacuation can be created for it")]
pub struct IncompletePod(&'static str);

/// Builds the Evacuation of a pod for an instigator, given by its subdomain. Also returns the pod's invalid annotations.
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
    evacuation.metadata.annotations = Some(merge_annotations(None));
    evacuation.metadata.finalizers = Some(vec![instigators::finalizer(instigator)]);
    Ok((evacuation, violations))
}

#[cfg(test)]
mod tests;
