//! The observer of a campaign, which **uses none of our code**: it reads the objects of the API server as plain JSON,
//! and the requests of our services from the audit log. A bug in our types, rules and clients therefore cannot hide
//! itself. A test enforces this.
//!
//! Throughout, it checks that
//! 1. no eviction of ours violates a budget, and no pod is deleted instead of evicted (`history`);
//! 2. whenever a maintenance that drains had no activity on its nodes for [`QUIET`], its status reports what blocks
//!    the drain or what it waits for, and the API server confirms that (`stall`, `claims`, `truth`, `replacements`);
//! 3. at the end nothing is left over (`leftovers`), no pod was evacuated that no maintenance wanted to leave, and no
//!    pod was evicted in a loop (`history`);
//! 4. at the end each pod of a Deployment belongs to one of its ReplicaSets, with the deletion cost of its template
//!    (`owners`), Deployments and budgets are as people have written them (`intents`), and Deployments with which
//!    nobody interferes have had a ready pod at every moment (`availability`).

mod activity;
mod audit;
mod availability;
mod changes;
mod claims;
mod history;
mod intents;
mod leftovers;
mod owners;
mod replacements;
mod stall;
#[cfg(test)]
mod tests;
mod timeline;
mod truth;
mod view;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::TryStreamExt as _;
use jiff::{SignedDuration, Timestamp};
use kube::Client;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher as watch};
use serde_json::Value;
use tokio::sync::watch as latest;
use tokio_util::task::AbortOnDropHandle;

use self::activity::{Activity, Leadership};
use self::audit::Audit;
use self::changes::described;
use self::history::{Change, History};
pub(super) use self::intents::Intents;
pub(super) use self::leftovers::Expected;
use self::stall::{Problem, problems};
pub(super) use self::timeline::Timeline;
use self::truth::{Answer, Facts, Rejection};
use self::view::{ClusterView, Kind, Read as _};

/// The namespace of our services and their Leases.
const SYSTEM: &str = "haulout-system";
/// The Leases of the controllers.
const MAINTENANCE_LEASE: &str = "haulout-maintenance-controller";
const EVACUATION_LEASE: &str = "haulout-evacuation-controller";
/// The Lease of the service that replaces pods of Deployments, its evacuator class, and its finalizer.
const WORKLOAD_LEASE: &str = "haulout-workload-evacuator";
const WORKLOAD_CLASS: &str = "deployment.apps.k8s.io";
const WORKLOAD_FINALIZER: &str = "evacuation.coordination.k8s.io/instigator_deployment.apps.k8s.io";
/// The annotation of pods that it moves, and the one with the deletion cost.
const FORMER_OWNER: &str = "evacuation.coordination.k8s.io/former-owner";
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// The namespace of the workloads.
const WORKLOADS: &str = "shop";
/// The message of policies that reject our writes.
pub(super) const DENIAL_MESSAGE: &str = "not during the sale";
/// Time without activity after which a status has to report the reason.
const QUIET: SignedDuration = SignedDuration::from_secs(10);
/// Time after which a status has to report that the evacuation controller is stopped.
const ABSENT_AFTER: SignedDuration = SignedDuration::from_secs(75);
/// Time after which pods may leave without a replacement while no workload evacuator leads: a little less than a minute.
const PASSED_OVER_AFTER: SignedDuration = SignedDuration::from_secs(50);
/// Time for which the same problem has to persist before it counts. A status is written once per second, and changes
/// by others are noticed a little later.
const PROBLEM_GRACE_PERIOD: SignedDuration = SignedDuration::from_secs(5);
/// How often statuses are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Time limit for the watches to start, and for the last observations to arrive.
const LIMIT: Duration = Duration::from_secs(60);

/// See the [module](self). Dropping it ends it.
pub(super) struct Observer {
    shared: Arc<Shared>,
    failure: latest::Receiver<Option<String>>,
    _tasks: Vec<AbortOnDropHandle<()>>,
}

struct Shared {
    client: Client,
    timeline: Timeline,
    state: Mutex<State>,
    failure: latest::Sender<Option<String>>,
    listed: latest::Sender<usize>,
}

struct State {
    view: ClusterView,
    activity: Activity,
    history: History,
    audit: Audit,
    facts: Facts,
    /// The problems, and since when each exists.
    wrong: HashMap<(String, String), Timestamp>,
    /// How many times a status was checked while there was no activity.
    checks: u32,
}

impl Observer {
    /// Starts watching and checking.
    ///
    /// Nobody interferes with the Deployments called `undisturbed`.
    pub(super) async fn start(
        client: Client,
        audit_log: PathBuf,
        timeline: Timeline,
        undisturbed: &[&str],
    ) -> Result<Self> {
        let undisturbed: BTreeSet<String> = undisturbed.iter().map(|&name| name.to_owned()).collect();
        let state = State {
            view: ClusterView::default(),
            activity: Activity::default(),
            history: History { undisturbed: undisturbed.clone(), ..History::default() },
            audit: Audit::new(audit_log)?,
            facts: Facts { undisturbed, ..Facts::default() },
            wrong: HashMap::new(),
            checks: 0,
        };
        let (sender, failure) = latest::channel(None);
        let listed = latest::Sender::new(0);
        let shared = Arc::new(Shared { client, timeline, state: Mutex::new(state), failure: sender, listed });
        let mut listed = shared.listed.subscribe();
        let mut tasks: Vec<_> = Kind::ALL.map(|kind| tokio::spawn(shared.clone().watch(kind))).into();
        tasks.push(tokio::spawn(shared.clone().check_repeatedly()));
        let tasks = tasks.into_iter().map(AbortOnDropHandle::new).collect();
        let all = listed.wait_for(|listed| *listed == Kind::ALL.len());
        tokio::time::timeout(LIMIT, all).await.context("the observer's watches do not start")??;
        Ok(Self { shared, failure, _tasks: tasks })
    }

    /// Resolves with the problem when there is one.
    pub(super) async fn failed(&self) -> String {
        let mut failure = self.failure.clone();
        match failure.wait_for(Option::is_some).await {
            Ok(failure) => failure.clone().unwrap_or_default(),
            Err(_) => "the observer has stopped".to_owned(),
        }
    }

    /// Records that the clocks of the controllers are being moved forward by this much: evacuators may miss their
    /// deadlines from now on.
    pub(super) fn clocks_are_ahead(&self, by: SignedDuration) {
        let mut state = self.shared.state();
        state.facts.ahead = by;
        state.history.deadlines_pass.get_or_insert(Timestamp::now());
    }

    /// Fails unless the Deployments and budgets are as people have written them.
    pub(super) async fn check_intents(&self, intents: &Intents) -> Result<()> {
        let view = ClusterView::fetch(&self.shared.client).await?;
        let changed = intents.changed(&view);
        if !changed.is_empty() {
            bail!("somebody else has changed these:\n{}", changed.join("\n"));
        }
        Ok(())
    }

    /// How many times a status was checked while there was no activity.
    pub(super) fn checks(&self) -> u32 {
        self.shared.state().checks
    }

    /// When all maintenances are over: waits until nothing is left over, and checks the whole history.
    pub(super) async fn finish(&self, nodes: &BTreeMap<String, Expected>, intents: &Intents) -> Result<()> {
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            let view = ClusterView::fetch(&self.shared.client).await?;
            let mut left = leftovers::leftovers(&view, nodes);
            left.extend(owners::orphans(&view));
            left.extend(owners::costs(&view, intents));
            if left.is_empty() {
                break;
            }
            if tokio::time::Instant::now() > deadline {
                bail!("all maintenances are over, but these are left:\n{}", left.join("\n"));
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        self.check_intents(intents).await?;
        // The last requests are in the audit log already. The watches get a moment to catch up.
        tokio::time::sleep(CHECK_INTERVAL).await;
        let mut state = self.shared.state();
        state.read_audit(&self.shared.timeline)?;
        let violations = state.history.violations();
        if !violations.is_empty() {
            bail!("violations:\n{}", violations.join("\n"));
        }
        Ok(())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the objects of one kind up to date.
    async fn watch(self: Arc<Self>, kind: Kind) {
        let mut events = pin!(watch(kind.api(&self.client), watcher::Config::default()).default_backoff());
        let mut listed: Option<HashSet<String>> = None;
        let mut begun = false;
        loop {
            let event = match events.try_next().await {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(error) => {
                    self.timeline.note("observer", format!("watching {kind:?}s failed: {error}"));
                    continue;
                }
            };
            match event {
                Event::Init => listed = Some(HashSet::new()),
                Event::InitApply(object) | Event::Apply(object) => {
                    let Ok(object) = serde_json::to_value(object) else { continue };
                    if let Some(listed) = &mut listed {
                        listed.insert(object.key());
                    }
                    self.changed(kind, object, true);
                }
                Event::Delete(object) => {
                    let Ok(object) = serde_json::to_value(object) else { continue };
                    self.changed(kind, object, false);
                }
                Event::InitDone => {
                    let listed = listed.take().unwrap_or_default();
                    if begun {
                        self.missed(kind, &listed);
                    } else {
                        begun = true;
                        self.listed.send_modify(|listed| *listed += 1);
                    }
                }
            }
        }
    }

    fn changed(&self, kind: Kind, object: Value, exists: bool) {
        let now = Timestamp::now();
        let mut state = self.state();
        let lines = state.changed(kind, Arc::new(object), exists, now);
        for (who, what) in lines {
            self.timeline.note(who, what);
        }
    }

    /// Handles a restarted watch: objects that are not listed are gone.
    fn missed(&self, kind: Kind, listed: &HashSet<String>) {
        let mut state = self.state();
        state.history.gaps.push(Timestamp::now());
        let gone: Vec<Value> =
            state.view.all(kind).filter(|object| !listed.contains(&object.key())).cloned().collect();
        drop(state);
        for object in gone {
            self.changed(kind, object, false);
        }
    }

    /// Checks repeatedly, until a problem persists too long.
    async fn check_repeatedly(self: Arc<Self>) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            match self.check_once().await {
                Ok(None) => {}
                Ok(Some(problem)) => {
                    let Problem { maintenance, text, .. } = problem;
                    self.fail(format!("NodeMaintenance {maintenance} stalls: {text}"));
                    return;
                }
                // The API server may be restarting. A round that never gets an answer ends by its own time limit.
                Err(error) => self.timeline.note("observer", format!("check failed: {error:#}")),
            }
        }
    }

    fn fail(&self, text: String) {
        self.timeline.note("observer", text.clone());
        self.failure.send_replace(Some(text));
    }

    async fn check_once(&self) -> Result<Option<Problem>> {
        let overdue = {
            let mut state = self.state();
            state.read_audit(&self.timeline)?;
            state.facts.now = Timestamp::now();
            let (found, quiet) = state.problems();
            state.checks += quiet;
            state.overdue(&found)
        };
        if overdue.is_empty() {
            return Ok(None);
        }
        // Watches may lag: what the API server returns now is what counts.
        let view = ClusterView::fetch(&self.client).await?;
        let mut state = self.state();
        state.facts.now = Timestamp::now();
        let still = |problem: &Problem| {
            let maintenance = view.get(Kind::Maintenance, &problem.maintenance);
            let again = maintenance.map(|m| problems(m, &view, &state.facts)).unwrap_or_default();
            again.into_iter().find(|again| again.about == problem.about)
        };
        let confirmed = overdue.iter().find_map(still);
        if confirmed.is_none() {
            // The next check starts to count again.
            state.wrong.clear();
        }
        Ok(confirmed)
    }
}

impl State {
    /// Applies a change. Returns a line for the timeline if the change is interesting.
    fn changed(
        &mut self,
        kind: Kind,
        object: Arc<Value>,
        exists: bool,
        now: Timestamp,
    ) -> Vec<(&'static str, String)> {
        let key = object.key();
        let revision = object.text("/metadata/resourceVersion").parse().unwrap_or_default();
        let new = exists.then(|| object.clone());
        let old = match &new {
            Some(new) => self.view.put(kind, new.clone()),
            None => self.view.remove(kind, &key),
        };
        // A new object with the name of a deleted one is not a change of that one.
        let old = old.filter(|old| old.uid() == object.uid());
        let mut lines = Vec::new();
        let moved = self.activity.apply(kind, old.as_deref(), new.as_deref(), now);
        lines.extend(moved.map(|moved| ("observer", moved)));
        lines.extend(described(kind, old.as_deref(), new.as_deref(), &key));
        match kind {
            Kind::Policy | Kind::FlowSchema => self.rejections(kind, &object, exists, now),
            Kind::Lease | Kind::Namespace | Kind::Deployment | Kind::ReplicaSet => {}
            _ => self.history.changes.push(Change { revision, at: now, kind, key, object: new }),
        }
        lines
    }

    /// Records which requests of ours are rejected, and when.
    fn rejections(&mut self, kind: Kind, object: &Value, exists: bool, now: Timestamp) {
        let (rules, overload) = match kind {
            Kind::Policy => ("/spec/matchConstraints/resourceRules", ""),
            _ => ("/spec/rules/0/resourceRules", "overload "),
        };
        let resources = object.list(rules).iter().flat_map(|rule| rule.list("/resources"));
        let resources: Vec<_> =
            resources.filter_map(Value::as_str).map(|of| format!("{overload}{of}")).collect();
        let name = object.name();
        let known =
            self.facts.rejections.iter_mut().find(|known| known.name == name && known.until.is_none());
        match (known, exists) {
            (Some(known), false) => known.until = Some(now),
            (None, true) => {
                let rejection = Rejection { name: name.to_owned(), resources, from: now, until: None };
                self.facts.rejections.push(rejection);
            }
            _ => {}
        }
    }

    /// Reads the new requests of our services.
    fn read_audit(&mut self, timeline: &Timeline) -> Result<()> {
        for request in self.audit.read()? {
            if request.resource == "pods/eviction" {
                let answer = Answer { at: request.answered, code: request.code };
                self.facts.evictions.insert(request.key.clone(), answer);
                timeline.note("evacuation controller", format!("evicts {}: {}", request.key, request.code));
            } else if request.code >= 400 && request.code != 409 && request.code != 404 {
                let (service, verb, resource) = (&request.service, &request.verb, &request.resource);
                let text = format!("{service} may not {verb} {resource} {}: {}", request.key, request.code);
                timeline.note("API server", text);
            }
            self.history.requests.push(request);
        }
        Ok(())
    }

    /// The problems of maintenances without activity on their nodes, while both controllers lead or the evacuation
    /// controller has been missing for too long. Also returns the number of such maintenances.
    fn problems(&mut self) -> (Vec<Problem>, u32) {
        let now = self.facts.now;
        let clock = now.saturating_add(self.facts.ahead).unwrap_or(Timestamp::MAX);
        let (mut found, mut quiet) = (Vec::new(), 0);
        if let Leadership::Nobody(since) = self.activity.leads(WORKLOAD_LEASE, now)
            && now.duration_since(since) > PASSED_OVER_AFTER
        {
            self.facts.was_unserved = true;
            self.history.deadlines_pass.get_or_insert(now);
        }
        let Leadership::Since(mut led) = self.activity.leads(MAINTENANCE_LEASE, now) else {
            return (found, quiet);
        };
        (self.facts.led_since, self.facts.absent_since) = match self.activity.leads(EVACUATION_LEASE, now) {
            Leadership::Since(since) => {
                led = led.max(since);
                (Some(since), None)
            }
            // A new maintenance controller has to detect the outage itself.
            Leadership::Nobody(since) if now.duration_since(since.max(led)) < ABSENT_AFTER => {
                return (found, quiet);
            }
            Leadership::Nobody(since) => (None, Some(since)),
        };
        match self.activity.leads(WORKLOAD_LEASE, now) {
            Leadership::Since(since) => {
                led = led.max(since);
                self.facts.unserved_since = None;
            }
            // Nobody can correct what it has reported.
            Leadership::Nobody(since) if now.duration_since(since.max(led)) < ABSENT_AFTER => {
                return (found, quiet);
            }
            Leadership::Nobody(since) => self.facts.unserved_since = Some(since),
        }
        for maintenance in self.view.all(Kind::Maintenance) {
            let Some(since) = self.activity.quiet_since(maintenance, &self.view, clock) else { continue };
            if now.duration_since(since.max(led)) >= QUIET {
                quiet += 1;
                found.extend(problems(maintenance, &self.view, &self.facts));
            }
        }
        (found, quiet)
    }

    /// The problems that have persisted too long.
    fn overdue(&mut self, found: &[Problem]) -> Vec<Problem> {
        let now = self.facts.now;
        let key = |problem: &Problem| (problem.maintenance.clone(), problem.about.clone());
        let known = std::mem::take(&mut self.wrong);
        self.wrong =
            found.iter().map(key).map(|key| (key.clone(), *known.get(&key).unwrap_or(&now))).collect();
        let is_overdue = |problem: &&Problem| {
            self.wrong
                .get(&key(problem))
                .is_some_and(|since| now.duration_since(*since) >= PROBLEM_GRACE_PERIOD)
        };
        found.iter().filter(is_overdue).cloned().collect()
    }
}
