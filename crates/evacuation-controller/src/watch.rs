//! The watched kinds, and the state method that each watch event calls.

use std::sync::Arc;

use haulout_api_types::Evacuation;
use haulout_service_runtime::pods::{Change, Subscriber};
use haulout_service_runtime::watch::{Handler, Unreadable};
use jiff::Timestamp;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use tracing::warn;

use crate::reconcile::Controller;
use crate::record::Record;
use crate::state::{Key, State};

impl Subscriber for Controller {
    fn apply(&self, changes: Vec<Change>) {
        for change in changes {
            self.update(|state, pods| state.apply_pod(&change, pods));
        }
    }

    fn resumed(&self) {
        self.resumed();
    }
}

impl Handler<Evacuation> for Controller {
    type Key = Key;

    fn apply(&self, key: Key, evacuation: Evacuation) {
        let mut state = self.state();
        let read = Record::read(evacuation, |text| state.share(text));
        let changed = read.map(|record| state.apply(record));
        drop(state);
        match changed {
            Ok(true) => self.enqueue(vec![key]),
            Ok(false) => {}
            Err(problem) => {
                warn!(uid = %key, %problem, "failed to read Evacuation, ignoring it");
                self.delete_evacuation(key);
            }
        }
    }

    fn unreadable(&self, key: Key, _: Unreadable) {
        self.delete_evacuation(key);
    }

    fn delete(&self, key: Key) {
        self.evacuation_deleted(key);
    }

    fn resumed(&self) {
        self.resumed();
    }
}

impl Controller {
    /// The service behind a built-in evacuator class has had no leader since this time; `None` if it has one.
    pub(crate) fn service_observed(&self, class: &'static str, absent_since: Option<Timestamp>) {
        let keys = self.state().apply_service(class, absent_since);
        self.enqueue(keys);
    }
}

/// The namespace and name of a PodDisruptionBudget.
type BudgetKey = (Arc<str>, Arc<str>);

impl Handler<PodDisruptionBudget> for Controller {
    type Key = BudgetKey;

    fn apply(&self, _: BudgetKey, budget: PodDisruptionBudget) {
        self.update(|state, pods| state.apply_budget(budget, pods));
    }

    fn delete(&self, (namespace, name): BudgetKey) {
        self.update(|state, pods| state.delete_budget(&namespace, &name, pods));
    }

    fn resumed(&self) {
        self.update(State::budgets_synced);
    }
}
