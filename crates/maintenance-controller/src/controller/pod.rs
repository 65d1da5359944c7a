//! The Evacuation of one pod: made, shared or given up.

use std::collections::BTreeSet;

use haulout_api_types::evacuators::evacuation_for;
use haulout_api_types::names::instigator;
use haulout_service_runtime::pods::{Pod, Uid};
use haulout_service_runtime::queue::Outcome;
use jiff::Timestamp;
use tracing::warn;

use super::{Controller, Next};
use crate::act::{self, Written};
use crate::facts::EvacuationOf;
use crate::index::{Unsettled, Wish};
use crate::seen::EvacuationSeen;

impl Controller {
    pub(super) async fn pod(&self, uid: Uid) -> kube::Result<Next> {
        let now = self.clock.now();
        let Some(pod) = self.pods.read().get(uid).cloned() else { return Ok(Next::Rest(Outcome::Done)) };
        // Time may have changed something: a pod that should have ended has not.
        let wake = self.tell(|index| index.put_pod(&pod, now));
        let rest = wake.map_or(Outcome::Done, Outcome::Until);
        let (wish, evacuation) = {
            let mut index = self.index();
            match index.wish(&pod) {
                Ok(Some(wish)) => (wish, index.evacuation(uid).cloned()),
                Ok(None) => return Ok(Next::Rest(rest)),
                Err(Unsettled) => return Ok(self.later()),
            }
        };
        match (wish, evacuation) {
            (Wish::Evacuate, None) => self.create(&pod, now).await,
            (Wish::Evacuate, Some(seen)) if seen.of() == EvacuationOf::Us => Ok(Next::Rest(rest)),
            // It takes no new finalizers: when it is gone, there will be another.
            (Wish::Evacuate, Some(seen)) if seen.deleting => Ok(Next::Rest(rest)),
            (Wish::Evacuate, Some(seen)) => self.write_finalizers(uid, &seen, true).await,
            (Wish::Withdraw, Some(seen)) if seen.of() == EvacuationOf::Us => {
                self.write_finalizers(uid, &seen, false).await
            }
            (Wish::Withdraw, _) => Ok(Next::Rest(rest)),
        }
    }

    async fn create(&self, pod: &Pod, now: Timestamp) -> kube::Result<Next> {
        if let Err(until) = self.index().making(pod.uid, now) {
            return Ok(Next::Rest(Outcome::Until(until)));
        }
        let made = evacuation_for(&pod.metadata(), instigator::NODE_MAINTENANCE, &BTreeSet::new());
        let (evacuation, violations) = match made {
            Ok(made) => made,
            Err(error) => {
                warn!(namespace = %pod.namespace, pod = %pod.name, %error, "a pod cannot be evacuated");
                return Ok(Next::Rest(Outcome::Done));
            }
        };
        for violation in violations {
            warn!(namespace = %pod.namespace, pod = %pod.name, %violation, "an annotation is ignored");
        }
        match act::create_evacuation(&self.clients.retrying, &evacuation).await {
            Ok(Written::Done(())) => Ok(Next::Rest(Outcome::Done)),
            // There is one that we have not seen yet; or its namespace is gone, and the pod with it.
            Ok(Written::Outdated | Written::Gone) => {
                self.index().not_made(pod.uid);
                Ok(Next::Rest(Outcome::Failed))
            }
            Err(error) => {
                self.index().not_made(pod.uid);
                Err(error)
            }
        }
    }

    async fn write_finalizers(&self, pod: Uid, seen: &EvacuationSeen, ours: bool) -> kube::Result<Next> {
        let finalizers = seen.finalizers_with_ours(ours);
        match act::write_finalizers(&self.clients.retrying, seen, &finalizers).await? {
            Written::Done(evacuation) => {
                let (now, pods) = (self.clock.now(), self.pods.read());
                let seen = EvacuationSeen::new(evacuation);
                self.tell(|index| index.refresh_evacuation(pod, seen, &pods, now));
                Ok(Next::Rest(Outcome::Done))
            }
            Written::Outdated => Ok(Next::Rest(Outcome::Failed)),
            Written::Gone => Ok(Next::Rest(Outcome::Done)),
        }
    }
}
