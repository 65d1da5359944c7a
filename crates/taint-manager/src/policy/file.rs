//! Reads the policy file at the start and reloads it when it changes. If the new policy is invalid, the previous one
//! stays in effect.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::Policy;
use crate::events;
use crate::reconcile::Controller;

/// How often the file is read. The kubelet updates a mounted ConfigMap by replacing a symbolic link, which a watch of
/// the file does not detect.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// The last valid policy.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// The policy.
    pub policy: Policy,
    /// Its text.
    pub text: String,
    /// Whether the file has changed since then and is rejected.
    pub rejected: bool,
}

/// Reads the policy. Without a file, every pod that has to leave is deleted.
pub fn read(path: Option<&Path>) -> Result<Loaded, String> {
    let Some(path) = path else { return Ok(Loaded::default()) };
    let at = |problem: String| format!("failed to read policy {}: {problem}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| at(error.to_string()))?;
    let policy = Policy::from_yaml(&text).map_err(|error| at(error.to_string()))?;
    Ok(Loaded { policy, text, rejected: false })
}

/// Reloads the policy file when its text differs from `current`.
pub(crate) async fn reload_on_change(controller: Arc<Controller>, path: PathBuf, mut current: String) {
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let read = tokio::fs::read_to_string(&path).await.map_err(|error| error.to_string());
        // A file that cannot be read counts as empty, and an empty policy is invalid.
        let text = read.as_deref().unwrap_or_default();
        if text == current {
            continue;
        }
        text.clone_into(&mut current);
        match read.and_then(|text| Policy::from_yaml(&text).map_err(|error| error.to_string())) {
            Ok(policy) => {
                info!(path = %path.display(), "policy reloaded");
                controller.update(|state, pods| state.set_policy(policy, pods));
            }
            Err(problem) => {
                let file = path.display().to_string();
                warn!(path = file, problem, "policy rejected, keeping the previous policy");
                controller.state().policy_rejected = true;
                controller.publish(events::policy_rejected(&controller.own, &file, &problem));
            }
        }
    }
}
