//! Measures for how long Deployments are unavailable, from outside: it watches pods and EndpointSlices, and uses none of our
//! services. The resource versions of both watches put all changes into one order.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures::{TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource, ResourceExt as _};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::super::is_ready;

/// The label of an EndpointSlice with the name of its Service.
const SERVICE: &str = "kubernetes.io/service-name";
/// How many watches there are.
const WATCHES: usize = 2;

/// Outages, in seconds, added up over all Deployments.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Outages {
    /// Without a ready pod, or without a ready endpoint.
    pub(super) unavailable: f64,
    /// With endpoints whose pods have all gone.
    pub(super) stale: f64,
}

/// Records changes from now on.
pub(super) struct Observer {
    task: JoinHandle<Result<()>>,
    changes: Arc<Mutex<Vec<Change>>>,
    begun: Instant,
}

/// A change of what serves a Deployment.
#[derive(Clone, Debug)]
struct Change {
    /// The resource version.
    version: u64,
    /// When it was received. Zero for the state at the beginning.
    at: Duration,
    /// The name of the Deployment, of its Service and of its label `app`.
    app: String,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    /// The EndpointSlice of this name lists these pods as ready, by their UIDs.
    Slice(String, Vec<String>),
    /// Whether the pod with this UID is ready and not terminating.
    Pod(String, bool),
}

/// An event of one of the watches.
enum Observed {
    Listing,
    Listed,
    Changed(String, What, u64),
}

impl Observer {
    /// Starts to watch, and returns when the state at the beginning is known.
    pub(super) async fn start(slices: Api<EndpointSlice>, pods: Api<Pod>) -> Result<Self> {
        let begun = Instant::now();
        let changes: Arc<Mutex<Vec<Change>>> = Arc::default();
        let (ready, started) = oneshot::channel();
        let task = tokio::spawn(record(slices, pods, Arc::clone(&changes), begun, ready));
        let observer = Self { task, changes, begun };
        if started.await.is_err() {
            observer.task.await.context("observing pods")??;
            bail!("the watches of the observer have ended");
        }
        Ok(observer)
    }

    /// Ends the watches. All Deployments should be available, because only past outages are of interest.
    pub(super) async fn finish(self) -> Result<Outages> {
        let end = self.begun.elapsed();
        if self.task.is_finished() {
            self.task.await.context("observing pods")??;
            bail!("the watches of the observer have ended");
        }
        self.task.abort();
        let changes = std::mem::take(&mut *self.changes.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(replay(changes, end))
    }
}

async fn record(
    slices: Api<EndpointSlice>,
    pods: Api<Pod>,
    changes: Arc<Mutex<Vec<Change>>>,
    begun: Instant,
    ready: oneshot::Sender<()>,
) -> Result<()> {
    let config = watcher::Config::default;
    let slices = watcher(slices, config()).map_ok(|event| observed(event, read_slice));
    let pods = watcher(pods, config()).map_ok(|event| observed(event, read_pod));
    let mut all = pin!(stream::select(slices, pods));
    let (mut listed, mut ready) = (0, Some(ready));
    while let Some(observed) = all.try_next().await.context("a watch of the observer failed")? {
        match observed? {
            Some(Observed::Listing) if listed == WATCHES => {
                bail!("a watch of the observer was interrupted, so that it may have missed an outage")
            }
            Some(Observed::Listing) | None => {}
            Some(Observed::Listed) => listed += 1,
            Some(Observed::Changed(app, what, version)) => {
                let at = if ready.is_some() { Duration::ZERO } else { begun.elapsed() };
                let change = Change { version, at, app, what };
                changes.lock().unwrap_or_else(PoisonError::into_inner).push(change);
            }
        }
        if listed == WATCHES
            && let Some(ready) = ready.take()
        {
            // Nobody waits any more.
            let _ = ready.send(());
        }
    }
    Ok(())
}

/// Reads an event. `read` returns the Deployment and the change; the flag tells whether the object has been deleted.
fn observed<K: Resource>(
    event: Event<K>,
    read: fn(&K, bool) -> Option<(String, What)>,
) -> Result<Option<Observed>> {
    let (object, deleted) = match event {
        Event::Init => return Ok(Some(Observed::Listing)),
        Event::InitDone => return Ok(Some(Observed::Listed)),
        Event::InitApply(object) | Event::Apply(object) => (object, false),
        Event::Delete(object) => (object, true),
    };
    let version = object.resource_version().unwrap_or_default();
    let version = version.parse().with_context(|| format!("reading the resource version {version}"))?;
    Ok(read(&object, deleted).map(|(app, what)| Observed::Changed(app, what, version)))
}

fn read_slice(slice: &EndpointSlice, deleted: bool) -> Option<(String, What)> {
    let ready = slice.endpoints.iter().filter(|endpoint| {
        !deleted && endpoint.conditions.as_ref().and_then(|conditions| conditions.ready) == Some(true)
    });
    let pods = ready.filter_map(|endpoint| endpoint.target_ref.as_ref()?.uid.clone()).collect();
    Some((slice.labels().get(SERVICE)?.clone(), What::Slice(slice.name_any(), pods)))
}

fn read_pod(pod: &Pod, deleted: bool) -> Option<(String, What)> {
    let serves = !deleted && pod.metadata.deletion_timestamp.is_none() && is_ready(pod);
    Some((pod.labels().get("app")?.clone(), What::Pod(pod.uid()?, serves)))
}

/// What serves one Deployment.
#[derive(Default)]
struct App {
    /// The ready pods of each EndpointSlice.
    slices: HashMap<String, Vec<String>>,
    /// The ready pods.
    pods: HashSet<String>,
    /// Until when its outages are added up.
    since: Duration,
}

impl App {
    fn add_to(&self, outages: &mut Outages, until: Duration) {
        let seconds = until.saturating_sub(self.since).as_secs_f64();
        let listed = || self.slices.values().flatten();
        if self.pods.is_empty() || listed().next().is_none() {
            outages.unavailable += seconds;
        } else if !listed().any(|pod| self.pods.contains(pod)) {
            outages.stale += seconds;
        }
    }

    fn apply(&mut self, what: What) {
        match what {
            What::Slice(name, pods) => drop(self.slices.insert(name, pods)),
            What::Pod(uid, true) => drop(self.pods.insert(uid)),
            What::Pod(uid, false) => drop(self.pods.remove(&uid)),
        }
    }
}

/// Adds up the outages in these changes, in the order in which the API server made them.
fn replay(mut changes: Vec<Change>, end: Duration) -> Outages {
    changes.sort_by_key(|change| (!change.at.is_zero(), change.version));
    let (mut apps, mut outages, mut now) =
        (HashMap::<String, App>::new(), Outages::default(), Duration::ZERO);
    for Change { at, app, what, .. } in changes {
        // One watch may be a little behind the other.
        now = now.max(at);
        let app = apps.entry(app).or_default();
        app.add_to(&mut outages, now);
        app.apply(what);
        app.since = now;
    }
    for app in apps.values() {
        app.add_to(&mut outages, end);
    }
    outages
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(pods: &[&str]) -> What {
        What::Slice("slice".to_owned(), pods.iter().map(ToString::to_string).collect())
    }

    fn pod(uid: &str, serves: bool) -> What {
        What::Pod(uid.to_owned(), serves)
    }

    /// Changes of one Deployment that begins with the ready pod `old`. Each has its resource version and second.
    fn outages(changes: Vec<(u64, u64, What)>) -> Outages {
        let begin = [(5, 0, lists(&["old"])), (1, 0, pod("old", true))];
        let change = |(version, second, what)| Change {
            version,
            at: Duration::from_secs(second),
            app: "app".to_owned(),
            what,
        };
        replay(begin.into_iter().chain(changes).map(change).collect(), Duration::from_secs(10))
    }

    #[test]
    fn outages_last_until_another_pod_is_ready_and_listed() {
        let cases = [
            ("nothing happens", vec![], (0.0, 0.0)),
            (
                "the replacement is listed before the old pod goes",
                vec![
                    (10, 1, pod("new", true)),
                    (11, 2, lists(&["old", "new"])),
                    (12, 3, pod("old", false)),
                    (13, 4, lists(&["new"])),
                ],
                (0.0, 0.0),
            ),
            (
                "the replacement starts after the old pod has gone",
                vec![
                    (10, 1, pod("old", false)),
                    (11, 2, lists(&[])),
                    (12, 4, pod("new", true)),
                    (13, 6, lists(&["new"])),
                ],
                (5.0, 0.0),
            ),
            (
                "the old pod goes before the replacement is listed",
                vec![(10, 1, pod("new", true)), (11, 2, pod("old", false)), (12, 5, lists(&["new"]))],
                (0.0, 3.0),
            ),
            (
                "the watch of the EndpointSlices is late",
                vec![(13, 3, pod("old", false)), (10, 1, pod("new", true)), (11, 4, lists(&["old", "new"]))],
                (0.0, 0.0),
            ),
            ("the outage does not end", vec![(10, 4, pod("old", false))], (6.0, 0.0)),
        ];
        for (case, changes, (unavailable, stale)) in cases {
            assert_eq!(outages(changes), Outages { unavailable, stale }, "{case}");
        }
    }

    #[test]
    fn outages_of_all_deployments_are_added_up() {
        let gone = |app: &str| {
            let change = |version, second, what| Change {
                version,
                at: Duration::from_secs(second),
                app: app.to_owned(),
                what,
            };
            [change(1, 0, pod("old", true)), change(2, 0, lists(&["old"])), change(3, 8, pod("old", false))]
        };
        let changes = ["a", "b"].iter().flat_map(|app| gone(app)).collect();
        assert_eq!(replay(changes, Duration::from_secs(10)), Outages { unavailable: 4.0, stale: 0.0 });
    }
}
