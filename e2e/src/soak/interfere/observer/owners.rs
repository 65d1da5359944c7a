//! To whom the pods of Deployments belong when all maintenances are over, and their deletion costs.

use serde_json::Value;

use super::intents::Intents;
use super::view::{ClusterView, Kind, Read as _, controller, covers, is_moved};
use super::{DELETION_COST, FORMER_OWNER, WORKLOADS};

/// Pods that nobody would replace or scale down: everything except a ReplicaSet of the Deployment as their controller.
pub fn orphans(view: &ClusterView) -> Vec<String> {
    let mut found = Vec::new();
    for pod in view.all(Kind::Pod) {
        let key = pod.key();
        if let Some(former) = pod.annotation(FORMER_OWNER) {
            found.push(format!("pod {key} still has the annotation {FORMER_OWNER}: {former}"));
        }
        if is_moved(pod) {
            found.push(format!("pod {key} still belongs directly to its Deployment"));
            continue;
        }
        let living = view.all(Kind::Deployment).filter(|deployment| !deployment.is_terminating());
        // A budget and a Deployment select pods in the same way.
        for deployment in living.filter(|deployment| covers(deployment, pod)) {
            let owner = view.deployment_of(pod);
            if owner.is_none_or(|owner| owner.uid() != deployment.uid()) {
                let (name, owner) = (deployment.key(), controller(pod).map(describe).unwrap_or_default());
                found.push(format!(
                    "pod {key} belongs to {owner:?}, not to a ReplicaSet of Deployment {name}"
                ));
            }
        }
    }
    found
}

fn describe(owner: &Value) -> String {
    format!("{} {}", owner.text("/kind"), owner.text("/name"))
}

/// Pods of ReplicaSets whose deletion cost is not that of the template.
pub fn costs(view: &ClusterView, intents: &Intents) -> Vec<String> {
    let sets: Vec<&Value> = view.all(Kind::ReplicaSet).collect();
    let workloads = view.all(Kind::Pod).filter(|pod| pod.text("/metadata/namespace") == WORKLOADS);
    let known = workloads.filter(|pod| !pod.is_terminating() && !intents.without_cost.contains(pod.uid()));
    let wrong = known.filter_map(|pod| {
        let owner = controller(pod)?;
        let set = sets.iter().find(|set| set.uid() == owner.text("/uid"))?;
        let wanted = set.entry("/spec/template/metadata/annotations", DELETION_COST);
        let cost = pod.annotation(DELETION_COST);
        (cost != wanted)
            .then(|| format!("the deletion cost of pod {} is {cost:?}, and was {wanted:?}", pod.key()))
    });
    wrong.collect()
}
