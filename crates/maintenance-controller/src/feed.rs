//! Feeds the index with what the API server tells.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;

use futures::{FutureExt as _, Stream, TryStreamExt as _};
use haulout_api_types::{DrainRule, NodeMaintenance};
use haulout_service_runtime::access::lease_name;
use haulout_service_runtime::events::reference;
use haulout_service_runtime::metrics::Metrics;
use haulout_service_runtime::pods::{Change, LabelSet, Subscription};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::ListParams;
use kube::core::error_boundary::InvalidObject;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::watcher::{Config, Error, Event};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::BACKOFF;
use crate::controller::Controller;
use crate::index::Work;
use crate::leader::Leader;
use crate::news;
use crate::seen::{
    self, AttachmentSeen, EvacuationSeen, NodeSeen, SlimAttachment, SlimEvacuation, SlimNode, SlimOwnPod,
};

/// The labels that the chart gives to the pods of all services.
const OWN_PODS: &str = "app.kubernetes.io/name=haulout,app.kubernetes.io/component";

/// What all feeds need.
#[derive(Clone)]
pub(crate) struct Feed {
    pub(crate) controller: Arc<Controller>,
    pub(crate) metrics: Metrics,
    /// Cancelled when all objects have been told once.
    pub(crate) listed: CancellationToken,
}

/// Takes in all pods that there are, and returns what tells of them from then on.
pub(crate) fn learn_pods(controller: &Controller) -> Subscription {
    // What it has told once, it tells the end of: between looking at all pods and following them, one could go unseen.
    let mut subscription = controller.pods.subscribe();
    take_in(controller, subscription.changes().now_or_never().unwrap_or_default());
    subscription
}

/// Follows all pods.
pub(crate) async fn pods(controller: Arc<Controller>, mut subscription: Subscription) {
    loop {
        let changes = subscription.changes().await;
        take_in(&controller, changes);
    }
}

fn take_in(controller: &Controller, changes: Vec<Change>) {
    let now = controller.clock.now();
    for change in changes {
        let wake = controller.tell(|index| match (&change.old, &change.new) {
            (_, Some(pod)) => Some((pod.uid, index.put_pod(pod, now)?)),
            (Some(pod), None) => {
                index.remove_pod(pod, now);
                None
            }
            (None, None) => None,
        });
        if let Some((uid, when)) = wake {
            controller.queue.add_at(Work::Pod(uid), when);
        }
    }
}

/// Follows all nodes.
pub(crate) async fn nodes(feed: Feed) {
    let controller = &*feed.controller;
    let put = |name: Arc<str>, node: Option<SlimNode>| match node {
        Some(node) => controller.tell(|index| index.put_node(name, NodeSeen::new(node))),
        None => controller.tell(|index| index.remove_node(&name)),
    };
    follow(&feed, "nodes", feed.watch(), readable, named, put).await;
}

/// Follows all maintenances.
pub(crate) async fn maintenances(feed: Feed) {
    let controller = &*feed.controller;
    let put = |name: Arc<str>, maintenance: Option<Read<NodeMaintenance>>| {
        let (regarding, why) = match maintenance {
            None => return controller.tell(|index| index.remove_maintenance(&name)),
            Some(Ok(maintenance)) => {
                let regarding = reference(&maintenance);
                match controller.tell(|index| index.put_maintenance(maintenance)) {
                    Ok(()) => return,
                    Err(error) => (regarding, error.to_string()),
                }
            }
            Some(Err(problem)) => {
                let why = problem.error.clone();
                let uid = problem.metadata.uid.as_deref().unwrap_or_default();
                controller.tell(|index| index.do_not_follow(name.clone(), uid, None, why.clone()));
                (news::unreadable::<NodeMaintenance>(&problem.metadata), why)
            }
        };
        warn!(%name, why, "a NodeMaintenance cannot be followed; until it can, its nodes are not released");
        controller.events.publish(news::not_followed(regarding, &why));
    };
    follow(&feed, "nodemaintenances", feed.watch(), |guard| Some(guard.0), named, put).await;
}

/// Follows all drain rules.
pub(crate) async fn rules(feed: Feed) {
    let controller = &*feed.controller;
    let put = |name: Arc<str>, rule: Option<Read<DrainRule>>| {
        let put = |rule| controller.tell(|index| index.put_rule(name.to_string(), rule));
        let (regarding, why) = match rule {
            None => return controller.tell(|index| index.remove_rule(&name)),
            Some(Ok(rule)) => {
                let regarding = reference(&rule);
                match put(Some(rule)) {
                    Ok(()) => return,
                    Err(error) => (regarding, error.to_string()),
                }
            }
            Some(Err(problem)) => {
                let _unread = put(None);
                (news::unreadable::<DrainRule>(&problem.metadata), problem.error)
            }
        };
        warn!(%name, why, "a DrainRule cannot be followed; until it can, pods that it may mean stay");
        controller.events.publish(news::not_followed(regarding, &why));
    };
    follow(&feed, "drainrules", feed.watch(), |guard| Some(guard.0), named, put).await;
}

/// Follows all Evacuations.
pub(crate) async fn evacuations(feed: Feed) {
    let controller = &*feed.controller;
    let put = |pod, evacuation: Option<SlimEvacuation>| {
        let (now, pods) = (controller.clock.now(), controller.pods.read());
        controller.tell(|index| match evacuation {
            Some(evacuation) => index.put_evacuation(pod, EvacuationSeen::new(evacuation), &pods, now),
            None => index.remove_evacuation(pod, &pods, now),
        });
    };
    follow(&feed, "evacuations", feed.watch(), readable, seen::pod_of, put).await;
}

/// Follows all attachments of volumes.
pub(crate) async fn attachments(feed: Feed) {
    let controller = &*feed.controller;
    let put = |name: Arc<str>, attachment: Option<SlimAttachment>| {
        controller.tell(|index| index.put_attachment(name, attachment.and_then(AttachmentSeen::new)));
    };
    follow(&feed, "volumeattachments", feed.watch(), readable, named, put).await;
}

/// Follows the labels of all namespaces.
pub(crate) async fn namespaces(feed: Feed) {
    let controller = &*feed.controller;
    let put = |name: Arc<str>, metadata: Option<PartialObjectMeta<Namespace>>| {
        let labels = metadata.map(|namespace| {
            let labels = namespace.labels().iter().map(|(key, value)| (key.as_str(), value.as_str()));
            labels.collect::<LabelSet>()
        });
        controller.tell(|index| index.put_namespace(&name, labels));
    };
    // Metadata alone are asked for, and can always be read.
    let api: Api<PartialObjectMeta<Namespace>> = Api::all(feed.client());
    follow(&feed, "namespaces", watcher(api, Config::default()), Some, named, put).await;
}

/// Follows the pods of Haulout itself, to know where else they can run.
pub(crate) async fn own_pods(feed: Feed, namespace: String) {
    let controller = &*feed.controller;
    let put = |name: Arc<str>, pod: Option<SlimOwnPod>| {
        let (now, pods) = (controller.clock.now(), controller.pods.read());
        controller.tell(|index| index.put_own_pod(name, pod.and_then(SlimOwnPod::keep), &pods, now));
    };
    let api: Api<DeserializeGuard<SlimOwnPod>> = Api::namespaced(feed.client(), &namespace);
    let ours = Config::default().labels(OWN_PODS);
    follow(&feed, "pods", watcher(api, ours), readable, named, put).await;
}

/// Follows the Lease of the evacuation controller, and notices when nobody renews it any longer.
pub(crate) async fn evacuation_controller(feed: Feed, namespace: String) {
    let controller = &*feed.controller;
    let field = format!("metadata.name={}", lease_name("evacuation-controller"));
    let api: Api<Lease> = Api::namespaced(feed.client(), &namespace);
    let mut events = pin!(watcher(api.clone(), Config::default().fields(&field)).default_backoff());
    let mut leader = Leader::new(controller.clock.now());
    let (mut confirmed, mut failures) = (false, 0);
    loop {
        let now = controller.clock.now();
        let absent = leader.absent_since(now);
        let ask_at = match absent {
            None => {
                (confirmed, failures) = (false, 0);
                leader.due()
            }
            // The watch tells when somebody leads again.
            Some(_) if confirmed => Timestamp::MAX,
            Some(_) if failures == 0 => now,
            Some(_) => now.saturating_add(BACKOFF.delay(failures, fastrand::f64())).unwrap_or(Timestamp::MAX),
        };
        controller.tell(|index| index.put_evacuation_controller(absent.filter(|_| confirmed)));
        tokio::select! {
            event = events.try_next() => match event {
                Ok(Some(Event::InitApply(lease) | Event::Apply(lease))) => {
                    leader.observe(lease.spec.as_ref(), controller.clock.now());
                }
                Ok(Some(Event::Delete(_))) => leader.observe(None, controller.clock.now()),
                Ok(Some(Event::Init | Event::InitDone)) => {}
                Ok(None) => return,
                Err(error) => {
                    warn!(%error, "leases cannot be watched; trying again");
                    feed.metrics.watch_restarted("leases");
                }
            },
            // A watch that hangs looks like a leader that is gone: the API server knows which it is.
            () = controller.clock.sleep_until(ask_at) => {
                match api.list(&ListParams::default().fields(&field)).await {
                    Ok(found) => {
                        let lease = found.items.first().and_then(|lease| lease.spec.as_ref());
                        leader.observe(lease, controller.clock.now());
                        confirmed = true;
                    }
                    Err(error) => {
                        warn!(%error, "failed to read the Lease of the evacuation controller");
                        failures += 1;
                    }
                }
            }
        }
    }
}

impl Feed {
    fn client(&self) -> Client {
        self.controller.clients.direct.clone()
    }

    /// Watches all objects of a kind, of which some may not be readable.
    fn watch<K>(&self) -> impl Stream<Item = Result<Event<DeserializeGuard<K>>, Error>> + Send
    where
        K: Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + 'static,
    {
        watcher(Api::all(self.client()), Config::default())
    }
}

/// An object, or what of one that cannot be read.
type Read<K> = Result<K, InvalidObject>;

fn readable<K: Resource<DynamicType = ()>>(guard: DeserializeGuard<K>) -> Option<K> {
    match guard.0 {
        Ok(object) => Some(object),
        Err(problem) => {
            let (kind, metadata) = (K::kind(&()), &problem.metadata);
            let (namespace, name) = (&metadata.namespace, &metadata.name);
            warn!(%kind, ?namespace, ?name, %problem, "an object that cannot be read is left as it was");
            None
        }
    }
}

#[allow(clippy::unnecessary_wraps, reason = "not every kind has its key in the name")]
fn named(name: &str) -> Option<Arc<str>> {
    Some(name.into())
}

/// Tells what is there and what is gone, by the key that is in each object's name.
async fn follow<K, T, Key: Ord + Clone>(
    feed: &Feed,
    resource: &'static str,
    events: impl Stream<Item = Result<Event<K>, Error>> + Send,
    read: impl Fn(K) -> Option<T>,
    key: impl Fn(&str) -> Option<Key>,
    put: impl Fn(Key, Option<T>),
) where
    K: Resource<DynamicType = ()> + Send,
{
    let mut events = pin!(events.default_backoff());
    let (mut known, mut unseen) = (BTreeSet::new(), BTreeSet::new());
    loop {
        match events.try_next().await {
            Ok(Some(Event::Init)) => unseen.clone_from(&known),
            Ok(Some(Event::InitApply(object) | Event::Apply(object))) => {
                let Some(key) = key(&object.name_any()) else { continue };
                unseen.remove(&key);
                if let Some(object) = read(object) {
                    known.insert(key.clone());
                    put(key, Some(object));
                }
            }
            Ok(Some(Event::InitDone)) => {
                for key in std::mem::take(&mut unseen) {
                    known.remove(&key);
                    put(key, None);
                }
                feed.listed.cancel();
            }
            Ok(Some(Event::Delete(object))) => {
                if let Some(key) = key(&object.name_any()) {
                    known.remove(&key);
                    put(key, None);
                }
            }
            Ok(None) => return,
            Err(error) => {
                warn!(%error, "{resource} cannot be watched; trying again");
                feed.metrics.watch_restarted(resource);
            }
        }
    }
}
