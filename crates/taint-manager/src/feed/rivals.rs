//! Looks for others who act on the same taints, and says so.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;

use futures::TryStreamExt as _;
use haulout_service_runtime::metrics::Metrics;
use k8s_openapi::api::core::v1 as core;
use kube::Api;
use kube::runtime::{WatchStreamExt as _, watcher};
use tracing::{debug, warn};

use crate::controller::Controller;
use crate::notice;
use crate::rival::{field_selector, rival};

/// Follows the events that tell of rivals.
pub(crate) async fn rivals(controller: Arc<Controller>, metrics: Metrics) {
    let began = controller.clock.now();
    let api: Api<core::Event> = Api::all(controller.clients.direct.clone());
    let config = watcher::Config::default().fields(&field_selector());
    let mut events = pin!(watcher::watcher(api, config).default_backoff());
    let mut known = BTreeSet::new();
    loop {
        let event = match events.try_next().await {
            Ok(Some(watcher::Event::InitApply(event) | watcher::Event::Apply(event))) => event,
            Ok(Some(_)) => continue,
            Ok(None) => return,
            Err(error) => {
                debug!(%error, "events cannot be watched; trying again");
                metrics.watch_restarted("events");
                continue;
            }
        };
        let Some(source) = rival(&event, began) else { continue };
        controller.metrics.rival();
        if known.insert(source.to_owned()) {
            warn!(source, "somebody else makes pods leave tainted nodes too: {}", notice::RIVAL_ADVICE);
            controller.publish(notice::rival(&controller.own, source));
        }
    }
}
