//! Reads the policy file again when it has changed. A new one that is wrong leaves the old one in force.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::events;
use crate::policy::Policy;
use crate::reconcile::Controller;

/// The kubelet brings a changed ConfigMap within a minute, by a new link that a watch on the file would not see.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Follows the policy file, of which this text is in force.
pub(crate) async fn follow(controller: Arc<Controller>, path: PathBuf, mut known: String) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let read = tokio::fs::read_to_string(&path).await.map_err(|error| error.to_string());
        if read.as_ref() == Ok(&known) {
            continue;
        }
        let parsed =
            read.clone().and_then(|text| Policy::from_yaml(&text).map_err(|error| error.to_string()));
        let changed = read.unwrap_or_default();
        let first = changed != known;
        known = changed;
        match parsed {
            Ok(policy) => {
                info!(path = %path.display(), "a new policy is in force");
                controller.metrics.policy_refused(false);
                controller.tell(|state, pods| state.index.set_policy(policy, pods));
            }
            Err(problem) if first => {
                let file = path.display().to_string();
                warn!(
                    path = file,
                    problem, "the new policy is refused, and the one of before stays in force"
                );
                controller.metrics.policy_refused(true);
                controller.publish(events::policy_refused(&controller.own, &file, &problem));
            }
            Err(_) => {}
        }
    }
}
