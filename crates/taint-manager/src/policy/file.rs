//! The policy file: read at the start and whenever it has changed. A new one that is wrong leaves the old one in force.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::Policy;
use crate::events;
use crate::reconcile::Controller;

/// The kubelet brings a changed ConfigMap within a minute, by a new link that a watch on the file would not see.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Reads the policy, and returns it with its text. Without a file, every pod that has to leave is deleted.
pub fn read(path: Option<&Path>) -> Result<(Policy, String), String> {
    let Some(path) = path else { return Ok((Policy::default(), String::new())) };
    let at = |problem: String| format!("the policy {}: {problem}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| at(error.to_string()))?;
    let policy = Policy::from_yaml(&text).map_err(|error| at(error.to_string()))?;
    Ok((policy, text))
}

/// Follows the policy file, of which this text is in force.
pub(crate) async fn follow(controller: Arc<Controller>, path: PathBuf, mut known: String) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let read = tokio::fs::read_to_string(&path).await.map_err(|error| error.to_string());
        // A file that cannot be read counts as empty, which no policy is.
        let text = read.as_deref().unwrap_or_default();
        if text == known {
            continue;
        }
        text.clone_into(&mut known);
        match read.and_then(|text| Policy::from_yaml(&text).map_err(|error| error.to_string())) {
            Ok(policy) => {
                info!(path = %path.display(), "a new policy is in force");
                controller.metrics.policy_refused(false);
                controller.update(|state, pods| state.set_policy(policy, pods));
            }
            Err(problem) => {
                let file = path.display().to_string();
                warn!(
                    path = file,
                    problem, "the new policy is refused, and the one of before stays in force"
                );
                controller.metrics.policy_refused(true);
                controller.publish(events::policy_refused(&controller.own, &file, &problem));
            }
        }
    }
}
