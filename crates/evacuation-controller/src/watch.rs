//! Which kinds are watched, and what each change means for the index.

use std::collections::HashSet;

use haulout_api_types::Evacuation;
use haulout_service_runtime::pods::{Change, Subscriber};
use haulout_service_runtime::watch::{Handler, Identity, Unreadable};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use tracing::warn;

use crate::controller::Controller;
use crate::index::Key;
use crate::record::Record;

impl Subscriber for Controller {
    fn apply(&self, changes: Vec<Change>) {
        for change in changes {
            let keys = self.index().pod_changed(&change, &self.pods.read());
            self.enqueue(keys);
        }
    }

    fn resumed(&self) {
        self.resumed();
    }
}

impl Handler<Evacuation> for Controller {
    type Key = Key;

    fn key(identity: Identity<'_>) -> Option<Key> {
        identity.uid.parse().ok()
    }

    fn apply(&self, key: Key, evacuation: Evacuation) {
        let mut index = self.index();
        let read = Record::read(evacuation, |text| index.share(text));
        let changed = read.map(|record| index.apply(record));
        drop(index);
        match changed {
            Ok(true) => self.enqueue(vec![key]),
            Ok(false) => {}
            Err(problem) => {
                warn!(uid = %key, %problem, "failed to read Evacuation, ignoring it");
                self.forget(key);
            }
        }
    }

    fn unreadable(&self, key: Key, _: Unreadable) {
        self.forget(key);
    }

    fn delete(&self, key: Key) {
        self.removed(key);
    }

    fn reset(&self, listed: &HashSet<Key>) {
        let gone: Vec<_> = self.index().keys().into_iter().filter(|key| !listed.contains(key)).collect();
        for key in gone {
            self.removed(key);
        }
    }

    fn resumed(&self) {
        self.resumed();
    }
}

/// A namespace and the name of a budget in it.
pub(crate) type BudgetKey = (String, String);

impl Handler<PodDisruptionBudget> for Controller {
    type Key = BudgetKey;

    fn key(identity: Identity<'_>) -> Option<BudgetKey> {
        Some((identity.namespace.into(), identity.name.into()))
    }

    fn apply(&self, _: BudgetKey, budget: PodDisruptionBudget) {
        let woken = self.index().budget_applied(budget, &self.pods.read());
        self.enqueue(woken);
    }

    fn delete(&self, (namespace, name): BudgetKey) {
        let woken = self.index().budget_deleted(&namespace, &name, &self.pods.read());
        self.enqueue(woken);
    }

    fn reset(&self, listed: &HashSet<BudgetKey>) {
        let woken = self.index().retain_budgets(listed, &self.pods.read());
        self.enqueue(woken);
    }

    fn resumed(&self) {
        let woken = self.index().budgets_synced(&self.pods.read());
        self.enqueue(woken);
    }
}
