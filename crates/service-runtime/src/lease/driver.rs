//! Turns a candidate's decisions into requests, and what comes back into observations. It decides
//! nothing itself and runs on a task of its own, so that a busy leader does not keep it from renewing.

use std::pin::pin;

use futures::future::BoxFuture;
use futures::{FutureExt as _, Stream, StreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::{ListParams, PostParams};
use kube::runtime::watcher;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::decide::{Action, Answer, Candidate, Observation, Request};
use super::leadership::Leadership;
use super::moment::Moment;
use super::record::{held, holder, released};
use super::timing::Timing;
use crate::causes::chain;

/// Where the Lease is and who wants it.
#[derive(Clone)]
pub(super) struct Place {
    pub api: Api<Lease>,
    pub name: String,
    /// The Lease as `namespace/name`.
    pub lease: String,
    pub identity: String,
    pub timing: Timing,
}

pub(super) struct Driver {
    place: Place,
    candidate: Candidate,
    office: Office,
    requests: Troubles,
    watching: Troubles,
}

impl Driver {
    pub fn new(place: Place, terms: watch::Sender<Option<Leadership>>, leading: watch::Sender<bool>) -> Self {
        let candidate = Candidate::new(&place.identity, place.timing, fastrand::Rng::new());
        let office = Office { current: None, terms, leading };
        Self { place, candidate, office, requests: Troubles::default(), watching: Troubles::default() }
    }

    /// Runs until it has given up the Lease, which it does when `resign` is cancelled.
    pub async fn run(mut self, resign: CancellationToken) {
        let mut events = pin!(watch_lease(&self.place));
        let mut request: Option<BoxFuture<'static, Outcome>> = None;
        let mut resigning = false;
        let mut observation = Observation::Tick;
        loop {
            // Read before the request is sent: leadership counts from here.
            let now = Moment::now();
            let action = self.candidate.decide(observation, now);
            self.publish(resigning);
            let wake = match action {
                Action::Done => return,
                Action::Wait(until) => until,
                Action::Send(what) => {
                    request = Some(send(self.place.clone(), what).boxed());
                    self.candidate.leads_until()
                }
            };
            observation = tokio::select! {
                outcome = answered(&mut request) => self.heard(outcome),
                event = events.next() => self.watched(event),
                () = wait_until(wake) => Observation::Tick,
                () = resign.cancelled(), if !resigning => {
                    resigning = true;
                    Observation::Resign
                }
            };
        }
    }

    fn heard(&mut self, outcome: Outcome) -> Observation {
        let Outcome { what, answer } = outcome;
        let answer = match answer {
            Ok(answer) => {
                self.requests.over(&self.place);
                answer
            }
            Err(error) => {
                self.requests.had(&self.place, what, error);
                Answer::Failed
            }
        };
        Observation::Answered(answer)
    }

    fn watched(&mut self, event: Option<Result<Option<Lease>, watcher::Error>>) -> Observation {
        match event {
            Some(Ok(lease)) => {
                self.watching.over(&self.place);
                // A standby sends no request by which it would find out.
                self.requests.over(&self.place);
                Observation::Watched(lease)
            }
            Some(Err(error)) => {
                self.watching.had(&self.place, "watch", explain_watch(&error));
                Observation::Tick
            }
            // It never ends.
            None => Observation::Tick,
        }
    }

    /// Tells those who wait for it what the candidate has come to.
    fn publish(&mut self, resigning: bool) {
        let Place { lease, identity, .. } = &self.place;
        match (self.candidate.leads_until(), &self.office.current) {
            (None, None) => {}
            (Some(until), Some(leadership)) if leadership.prolong(until) => {}
            (Some(until), _) => {
                info!(lease, identity, "leading");
                self.office.begin(Leadership::new(lease, identity, until));
            }
            (None, Some(_)) => {
                self.office.end();
                if resigning {
                    info!(lease, identity, "giving up leadership");
                } else {
                    let trouble = self.requests.last.as_ref().map(|(_, error)| error);
                    warn!(lease, identity, trouble, "leadership lost: standing by");
                }
            }
        }
    }
}

/// The present term, if there is one, and those who want to know of it.
struct Office {
    current: Option<Leadership>,
    terms: watch::Sender<Option<Leadership>>,
    leading: watch::Sender<bool>,
}

impl Office {
    fn begin(&mut self, leadership: Leadership) {
        if let Some(before) = self.current.replace(leadership.clone()) {
            before.end();
        }
        self.terms.send_replace(Some(leadership));
        self.leading.send_replace(true);
    }

    fn end(&mut self) {
        if let Some(leadership) = self.current.take() {
            leadership.end();
            self.terms.send_replace(None);
            self.leading.send_replace(false);
        }
    }
}

impl Drop for Office {
    /// Nobody renews any more.
    fn drop(&mut self) {
        self.end();
    }
}

/// Failures in a row are told once for each kind.
#[derive(Default)]
struct Troubles {
    /// What was tried, and why it failed.
    last: Option<(&'static str, String)>,
}

impl Troubles {
    fn had(&mut self, place: &Place, what: &'static str, error: String) {
        let Place { lease, identity, .. } = place;
        if self.last.as_ref().is_some_and(|last| last.0 == what && last.1 == error) {
            debug!(lease, identity, error, "could not {what} the Lease once more");
        } else {
            warn!(lease, identity, error, "could not {what} the Lease, trying again");
            self.last = Some((what, error));
        }
    }

    fn over(&mut self, place: &Place) {
        if let Some((what, _)) = self.last.take() {
            let Place { lease, identity, .. } = place;
            info!(lease, identity, failed = what, "the API server answers again");
        }
    }
}

struct Outcome {
    /// What was tried, as a verb.
    what: &'static str,
    answer: Result<Answer, String>,
}

async fn answered(request: &mut Option<BoxFuture<'static, Outcome>>) -> Outcome {
    let Some(future) = request else { return std::future::pending().await };
    let outcome = future.await;
    *request = None;
    outcome
}

async fn wait_until(moment: Option<Moment>) {
    match moment {
        Some(moment) => sleep(moment.left(Moment::now())).await,
        None => std::future::pending().await,
    }
}

async fn send(place: Place, request: Request) -> Outcome {
    let what = match &request {
        Request::Read => "read",
        Request::Release(_) => "release",
        Request::Hold(None) => "create",
        Request::Hold(Some(over)) if holder(over) == Some(&place.identity) => "renew",
        Request::Hold(Some(_)) => "take over",
    };
    let answer = match timeout(place.timing.request_timeout, perform(&place, request)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(explain(&error)),
        Err(_) => Err(format!("no answer within {:?}", place.timing.request_timeout)),
    };
    Outcome { what, answer }
}

async fn perform(place: &Place, request: Request) -> Result<Answer, kube::Error> {
    let Place { api, name, identity, timing, .. } = place;
    let post = PostParams::default();
    let now = Timestamp::now();
    let (written, replaces) = match request {
        Request::Read => {
            // With the right that the watch needs too.
            let own = ListParams::default().fields(&format!("metadata.name={name}"));
            return Ok(Answer::Read(api.list(&own).await?.items.into_iter().next()));
        }
        Request::Hold(None) => {
            let mut lease = held(None, identity, timing, now);
            lease.metadata.name = Some(name.clone());
            (api.create(&post, &lease).await, false)
        }
        // The resourceVersion is in it.
        Request::Hold(Some(over)) => {
            (api.replace(name, &post, &held(Some(&over), identity, timing, now)).await, true)
        }
        Request::Release(lease) => (api.replace(name, &post, &released(&lease, now)).await, true),
    };
    match written {
        Ok(lease) => Ok(Answer::Written(lease)),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(Answer::Conflict),
        // On create it would be the namespace that is missing.
        Err(kube::Error::Api(status)) if status.code == 404 && replaces => Ok(Answer::Missing),
        Err(error) => Err(error),
    }
}

/// The Lease whenever it changes, and that it is gone.
fn watch_lease(place: &Place) -> impl Stream<Item = Result<Option<Lease>, watcher::Error>> + Send + use<> {
    let Place { api, name, timing, .. } = place.clone();
    let watch = move || watcher::watch_object(api.clone(), &name).boxed();
    futures::stream::unfold((watch(), false), move |(mut events, mut failed)| {
        let watch = watch.clone();
        async move {
            loop {
                if failed {
                    let spread = timing.renew_every.saturating_sub(timing.retry_after);
                    sleep(timing.retry_after + spread.mul_f64(fastrand::f64())).await;
                }
                // A leader writes far more often than that: after so much silence the connection may
                // be dead, and what is left of it would be noticed only minutes later.
                match timeout(timing.lease_duration, events.next()).await {
                    Ok(Some(event)) => {
                        let failed = event.is_err();
                        return Some((event, (events, failed)));
                    }
                    Ok(None) => failed = true,
                    Err(_) => failed = false,
                }
                events = watch();
            }
        }
    })
}

fn explain_watch(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => explain(error),
        watcher::Error::WatchError(status) => format!("{} ({})", status.message, status.code),
        other @ watcher::Error::NoResourceVersion => other.to_string(),
    }
}

/// What the API server said, or everything down to the cause for what never reached it.
fn explain(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("{} ({})", status.message, status.code);
    }
    chain(error)
}
