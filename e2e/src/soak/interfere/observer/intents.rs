//! The Deployments and budgets as people have written them last. Nobody else may change them.

use std::collections::{BTreeMap, BTreeSet};

use kube::api::ObjectMeta;

use super::WORKLOADS;
use super::view::{ClusterView, Kind, Read as _};

/// See the [module](self).
#[derive(Clone, Debug, Default)]
pub struct Intents {
    /// The UID and generation of each object, by kind and name.
    written: BTreeMap<(&'static str, String), (String, i64)>,
    /// The UIDs of pods whose earlier deletion cost people have removed.
    pub without_cost: BTreeSet<String>,
}

impl Intents {
    /// Records the answer to a write by people.
    pub fn wrote(&mut self, kind: &'static str, metadata: &ObjectMeta) {
        let (name, uid) =
            (metadata.name.clone().unwrap_or_default(), metadata.uid.clone().unwrap_or_default());
        self.written.insert((kind, name), (uid, metadata.generation.unwrap_or_default()));
    }

    /// Records a deletion by people.
    pub fn removed(&mut self, kind: &'static str, name: &str) {
        self.written.remove(&(kind, name.to_owned()));
    }

    /// Records that people have deleted all objects of a kind.
    pub fn removed_all(&mut self, kind: &'static str) {
        self.written.retain(|(of, _), _| *of != kind);
    }

    /// The objects that differ from what people have written.
    pub fn changed(&self, view: &ClusterView) -> Vec<String> {
        let mut found = Vec::new();
        let kinds = [(Kind::Deployment, "Deployment"), (Kind::Budget, "PodDisruptionBudget")];
        let mut missing = self.written.clone();
        for (kind, name) in kinds {
            for object in view.all(kind).filter(|object| object.text("/metadata/namespace") == WORKLOADS) {
                let (now, what) = ((object.uid(), object.number("/metadata/generation")), object.key());
                match missing.remove(&(name, object.name().to_owned())) {
                    None => found.push(format!("{name} {what} was created by somebody else")),
                    Some((uid, _)) if uid != now.0 => found.push(format!("{name} {what} was recreated")),
                    Some((_, generation)) if generation != now.1 => found.push(format!(
                        "{name} {what} was changed: people wrote generation {generation}, and it is {}",
                        now.1
                    )),
                    Some(_) => {}
                }
            }
        }
        found.extend(
            missing.into_keys().map(|(kind, name)| format!("{kind} {name} was deleted by somebody else")),
        );
        found
    }
}
