//! An observer of a campaign, who **uses none of our code**: it reads what the API server stores as plain JSON, and what
//! our services asked for from the audit log. What our own types, rules and clients get wrong, it does not get wrong
//! in the same way. (A test keeps it so.)
//!
//! Throughout, it checks that
//! 1. no eviction of ours violates a budget, and no pod is deleted instead of evicted (`history`);
//! 2. whenever nothing has moved for [`QUIET`] on the nodes of a maintenance that drains, its status says what is in the
//!    way or waited for, and that is true when checked against the API server (`stall`, `claims`, `truth`);
//! 3. at the end nothing is left over (`leftovers`), nobody was asked to leave whom no maintenance wanted to leave, and
//!    nobody was evicted over and over (`history`).

mod audit;
mod claims;
mod history;
mod leftovers;
mod motion;
mod stall;
#[cfg(test)]
mod tests;
mod timeline;
mod truth;
mod world;

use std::collections::{BTreeMap, HashMap, HashSet};
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

use self::audit::Audit;
use self::history::{Change, History};
pub(super) use self::leftovers::Expected;
use self::motion::{Leads, Motion};
use self::stall::{Complaint, complaints, said};
pub(super) use self::timeline::Timeline;
use self::truth::{Answer, Facts, Refusal};
use self::world::{Kind, Read as _, World};

/// The namespace of our services, in which their Leases are.
const SYSTEM: &str = "haulout-system";
/// The Leases of the two controllers.
const MAINTENANCE_LEASE: &str = "haulout-maintenance-controller";
const EVACUATION_LEASE: &str = "haulout-evacuation-controller";
/// What those who refuse our writes say.
pub(super) const WORDS: &str = "not during the sale";
/// For how long nothing has to have moved before a status has to say why.
const QUIET: SignedDuration = SignedDuration::from_secs(10);
/// How long after the evacuation controller was stopped a status has to say so.
const ABSENT: SignedDuration = SignedDuration::from_secs(75);
/// For how long the same thing has to be wrong before it counts: a status is written once a second, and after others
/// have changed something it takes a moment to find out.
const WRONG: SignedDuration = SignedDuration::from_secs(5);
/// How often statuses are judged.
const PACE: Duration = Duration::from_millis(500);
/// How long the watches may take to begin, and what is noticed at the end to come in.
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
    world: World,
    motion: Motion,
    history: History,
    audit: Audit,
    facts: Facts,
    /// Since when what is wrong.
    wrong: HashMap<(String, String), Timestamp>,
    /// How often a status was judged while nothing moved.
    judged: u32,
}

impl Observer {
    /// Starts to watch and to judge.
    pub(super) async fn start(client: Client, audit_log: PathBuf, timeline: Timeline) -> Result<Self> {
        let state = State {
            world: World::default(),
            motion: Motion::default(),
            history: History::default(),
            audit: Audit::new(audit_log)?,
            facts: Facts::default(),
            wrong: HashMap::new(),
            judged: 0,
        };
        let (sender, failure) = latest::channel(None);
        let listed = latest::Sender::new(0);
        let shared = Arc::new(Shared { client, timeline, state: Mutex::new(state), failure: sender, listed });
        let mut listed = shared.listed.subscribe();
        let mut tasks: Vec<_> = Kind::ALL.map(|kind| tokio::spawn(shared.clone().watch(kind))).into();
        tasks.push(tokio::spawn(shared.clone().judge()));
        let tasks = tasks.into_iter().map(AbortOnDropHandle::new).collect();
        let all = listed.wait_for(|listed| *listed == Kind::ALL.len());
        tokio::time::timeout(LIMIT, all).await.context("the observer's watches do not begin")??;
        Ok(Self { shared, failure, _tasks: tasks })
    }

    /// Resolves with what is wrong when something is.
    pub(super) async fn failed(&self) -> String {
        let mut failure = self.failure.clone();
        match failure.wait_for(Option::is_some).await {
            Ok(failure) => failure.clone().unwrap_or_default(),
            Err(_) => "the observer has gone".to_owned(),
        }
    }

    /// The clocks of the controllers have been put forward by this much.
    pub(super) fn clocks_are_ahead(&self, by: SignedDuration) {
        self.shared.state().facts.ahead = by;
    }

    /// How often a status was judged while nothing moved.
    pub(super) fn judged(&self) -> u32 {
        self.shared.state().judged
    }

    /// When all maintenances are over: waits until nothing is left over, and judges what happened from first to last.
    pub(super) async fn finish(&self, nodes: &BTreeMap<String, Expected>) -> Result<()> {
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            let world = World::fetch(&self.shared.client).await?;
            let left = leftovers::leftovers(&world, nodes);
            if left.is_empty() {
                break;
            }
            if tokio::time::Instant::now() > deadline {
                bail!("everything is over, and this is left:\n{}", left.join("\n"));
            }
            tokio::time::sleep(PACE).await;
        }
        // What was asked last is in the audit log already; the watches get a moment to catch up.
        tokio::time::sleep(PACE).await;
        let mut state = self.shared.state();
        state.read_audit(&self.shared.timeline)?;
        let violations = state.history.violations();
        if !violations.is_empty() {
            bail!("this should not have happened:\n{}", violations.join("\n"));
        }
        Ok(())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what there is of one kind up to date.
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

    /// A watch has begun anew: what is not listed any more is gone.
    fn missed(&self, kind: Kind, listed: &HashSet<String>) {
        let mut state = self.state();
        state.history.gaps.push(Timestamp::now());
        let gone: Vec<Value> =
            state.world.all(kind).filter(|object| !listed.contains(&object.key())).cloned().collect();
        drop(state);
        for object in gone {
            self.changed(kind, object, false);
        }
    }

    /// Judges again and again, until something is wrong for too long.
    async fn judge(self: Arc<Self>) {
        loop {
            tokio::time::sleep(PACE).await;
            match self.judge_once().await {
                Ok(None) => {}
                Ok(Some(complaint)) => {
                    let Complaint { maintenance, text, .. } = complaint;
                    self.fail(format!("NodeMaintenance {maintenance} stalls: {text}"));
                    return;
                }
                // The API server may be restarting; a round that never gets an answer ends by its own limit.
                Err(error) => self.timeline.note("observer", format!("could not judge: {error:#}")),
            }
        }
    }

    fn fail(&self, text: String) {
        self.timeline.note("observer", text.clone());
        self.failure.send_replace(Some(text));
    }

    async fn judge_once(&self) -> Result<Option<Complaint>> {
        let overdue = {
            let mut state = self.state();
            state.read_audit(&self.timeline)?;
            state.facts.now = Timestamp::now();
            let (found, quiet) = state.complaints();
            state.judged += quiet;
            state.overdue(&found)
        };
        if overdue.is_empty() {
            return Ok(None);
        }
        // Watches may be behind: what counts is what the API server says now.
        let world = World::fetch(&self.client).await?;
        let mut state = self.state();
        state.facts.now = Timestamp::now();
        let still = |complaint: &Complaint| {
            let maintenance = world.get(Kind::Maintenance, &complaint.maintenance);
            let again = maintenance.map(|m| complaints(m, &world, &state.facts)).unwrap_or_default();
            again.into_iter().find(|again| again.about == complaint.about)
        };
        let confirmed = overdue.iter().find_map(still);
        if confirmed.is_none() {
            // The next look begins to count anew.
            state.wrong.clear();
        }
        Ok(confirmed)
    }
}

impl State {
    /// Takes in a change. What is worth a line of the timeline.
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
            Some(new) => self.world.put(kind, new.clone()),
            None => self.world.remove(kind, &key),
        };
        // A new object under the name of one that is gone is not a change of that one.
        let old = old.filter(|old| old.uid() == object.uid());
        let mut lines = Vec::new();
        let moved = self.motion.apply(kind, old.as_deref(), new.as_deref(), now);
        lines.extend(moved.map(|moved| ("observer", moved)));
        lines.extend(described(kind, old.as_deref(), new.as_deref(), &key));
        match kind {
            Kind::Policy | Kind::FlowSchema => self.refusals(kind, &object, exists, now),
            Kind::Lease | Kind::Namespace => {}
            _ => self.history.changes.push(Change { revision, at: now, kind, key, object: new }),
        }
        lines
    }

    /// Keeps account of who refuses requests of ours, and when.
    fn refusals(&mut self, kind: Kind, object: &Value, exists: bool, now: Timestamp) {
        let (rules, jam) = match kind {
            Kind::Policy => ("/spec/matchConstraints/resourceRules", ""),
            _ => ("/spec/rules/0/resourceRules", "jam "),
        };
        let resources = object.list(rules).iter().flat_map(|rule| rule.list("/resources"));
        let resources: Vec<_> = resources.filter_map(Value::as_str).map(|of| format!("{jam}{of}")).collect();
        let name = object.name();
        let known = self.facts.refusals.iter_mut().find(|known| known.name == name && known.until.is_none());
        match (known, exists) {
            (Some(known), false) => known.until = Some(now),
            (None, true) => {
                let refusal = Refusal { name: name.to_owned(), resources, from: now, until: None };
                self.facts.refusals.push(refusal);
            }
            _ => {}
        }
    }

    /// Takes in what our services have asked for.
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

    /// What is wrong with maintenances on whose nodes nothing moves while both controllers lead, or the evacuation
    /// controller does not for too long; and of how many that is so.
    fn complaints(&mut self) -> (Vec<Complaint>, u32) {
        let now = self.facts.now;
        let clock = now.saturating_add(self.facts.ahead).unwrap_or(Timestamp::MAX);
        let (mut found, mut quiet) = (Vec::new(), 0);
        let Leads::Since(mut led) = self.motion.leads(MAINTENANCE_LEASE, now) else {
            return (found, quiet);
        };
        (self.facts.led_since, self.facts.absent_since) = match self.motion.leads(EVACUATION_LEASE, now) {
            Leads::Since(since) => {
                led = led.max(since);
                (Some(since), None)
            }
            // A new maintenance controller has to find that out itself.
            Leads::Nobody(since) if now.duration_since(since.max(led)) < ABSENT => return (found, quiet),
            Leads::Nobody(since) => (None, Some(since)),
        };
        for maintenance in self.world.all(Kind::Maintenance) {
            let Some(since) = self.motion.quiet_since(maintenance, &self.world, clock) else { continue };
            if now.duration_since(since.max(led)) >= QUIET {
                quiet += 1;
                found.extend(complaints(maintenance, &self.world, &self.facts));
            }
        }
        (found, quiet)
    }

    /// The complaints that have been there for too long.
    fn overdue(&mut self, found: &[Complaint]) -> Vec<Complaint> {
        let now = self.facts.now;
        let key = |complaint: &Complaint| (complaint.maintenance.clone(), complaint.about.clone());
        let known = std::mem::take(&mut self.wrong);
        self.wrong =
            found.iter().map(key).map(|key| (key.clone(), *known.get(&key).unwrap_or(&now))).collect();
        let is_overdue = |complaint: &&Complaint| {
            self.wrong.get(&key(complaint)).is_some_and(|since| now.duration_since(*since) >= WRONG)
        };
        found.iter().filter(is_overdue).cloned().collect()
    }
}

/// What of a change people want to read.
fn described(
    kind: Kind,
    old: Option<&Value>,
    new: Option<&Value>,
    key: &str,
) -> Option<(&'static str, String)> {
    match kind {
        Kind::Maintenance => {
            let text = |of: &Value| {
                let deleted = if of.is_terminating() { ", being deleted" } else { "" };
                format!("{}{deleted}: {}", of.text("/spec/stage"), said(of))
            };
            let (old, new) = (old.map(text), new.map(text));
            (old != new).then(|| ("status", format!("{key}: {}", new.unwrap_or("is gone".into()))))
        }
        Kind::Evacuation => {
            let text = |of: &Value| {
                let blocked =
                    of.condition("Blocked").map(|(status, reason, _)| format!(" Blocked={status} {reason}"));
                let deleted = if of.is_terminating() { " being deleted," } else { "" };
                let completed = if of.flag("/status/activeEvacuatorCompleted") { " completed" } else { "" };
                let policy = of.text("/status/evacuationCancellationPolicy").replace("Allow", "");
                let finalizers: Vec<_> =
                    of.finalizers().iter().filter_map(|f| f.rsplit(['/', '_']).next()).collect();
                format!("{deleted}{}{completed} {policy} held by {finalizers:?}", blocked.unwrap_or_default())
            };
            let pod = new.or(old).map(|of| of.text("/spec/podRef/name").to_owned()).unwrap_or_default();
            let (old, new) = (old.map(text), new.map(text));
            let text = format!("evacuation of {pod}:{}", new.clone().unwrap_or(" is gone".into()));
            (old != new).then_some(("observer", text))
        }
        Kind::Budget => {
            let text = |of: &Value| {
                let of = |field: &str| of.number(&format!("/status/{field}"));
                let (allowed, healthy) = (of("disruptionsAllowed"), of("currentHealthy"));
                format!("allows {allowed}: {healthy} healthy of {}", of("desiredHealthy"))
            };
            let (old, new) = (old.map(text), new.map(text));
            (old != new).then(|| ("observer", format!("budget {key} {}", new.unwrap_or("is gone".into()))))
        }
        Kind::Node => {
            let text = |of: &Value| {
                let cordoned = if of.flag("/spec/unschedulable") { "cordoned" } else { "open" };
                format!("{cordoned}, pool {:?}", of.label("pool").unwrap_or_default())
            };
            let (old, new) = (old.map(text), new.map(text));
            (old != new).then(|| ("observer", format!("node {key} is {}", new.unwrap_or("gone".into()))))
        }
        _ => None,
    }
}
