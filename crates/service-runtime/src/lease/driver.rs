//! Sends the requests of a candidate and passes the answers to it. The driver runs in its own task, so that a busy
//! leader does not delay renewals. The decisions are in `decide`.

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
use crate::error_chain::error_chain;

/// The Lease, the identity and the timing of a candidate.
#[derive(Clone)]
pub(super) struct CandidateConfig {
    pub api: Api<Lease>,
    pub name: String,
    /// The Lease as `namespace/name`.
    pub lease: String,
    pub identity: String,
    pub timing: Timing,
}

pub(super) struct Driver {
    config: CandidateConfig,
    candidate: Candidate,
    term: TermPublisher,
    requests: FailureLog,
    watching: FailureLog,
}

impl Driver {
    pub fn new(
        config: CandidateConfig,
        sender: watch::Sender<Option<Leadership>>,
        leading: watch::Sender<bool>,
    ) -> Self {
        let candidate = Candidate::new(&config.identity, config.timing, fastrand::Rng::new());
        let term = TermPublisher { current: None, sender, leading };
        Self { config, candidate, term, requests: FailureLog::default(), watching: FailureLog::default() }
    }

    /// Runs until the Lease is released, after `resign` is cancelled.
    pub async fn run(mut self, resign: CancellationToken) {
        let mut events = pin!(watch_lease(&self.config));
        let mut request: Option<BoxFuture<'static, Outcome>> = None;
        let mut resigning = false;
        let mut observation = Observation::Tick;
        loop {
            // Read the clock before the request is sent: leadership starts at this time.
            let now = Moment::now();
            let action = self.candidate.decide(observation, now);
            self.publish(resigning);
            let wake = match action {
                Action::Done => return,
                Action::Wait(until) => until,
                Action::Send(what) => {
                    request = Some(send(self.config.clone(), what).boxed());
                    self.candidate.leads_until()
                }
            };
            observation = tokio::select! {
                outcome = answered(&mut request) => self.on_answer(outcome),
                event = events.next() => self.on_watch_event(event),
                () = wait_until(wake) => Observation::Tick,
                () = resign.cancelled(), if !resigning => {
                    resigning = true;
                    Observation::Resign
                }
            };
        }
    }

    fn on_answer(&mut self, outcome: Outcome) -> Observation {
        let Outcome { what, answer } = outcome;
        let answer = match answer {
            Ok(answer) => {
                self.requests.recovered(&self.config);
                answer
            }
            Err(error) => {
                self.requests.failed(&self.config, what, error);
                Answer::Failed
            }
        };
        Observation::Answered(answer)
    }

    fn on_watch_event(&mut self, event: Option<Result<Option<Lease>, watcher::Error>>) -> Observation {
        match event {
            Some(Ok(lease)) => {
                self.watching.recovered(&self.config);
                // A standby sends no requests, so the watch also shows that the API server works again.
                self.requests.recovered(&self.config);
                Observation::Watched(lease)
            }
            Some(Err(error)) => {
                self.watching.failed(&self.config, "watch", explain_watch(&error));
                Observation::Tick
            }
            // The stream never ends.
            None => Observation::Tick,
        }
    }

    /// Publishes changes of leadership.
    fn publish(&mut self, resigning: bool) {
        let CandidateConfig { lease, identity, .. } = &self.config;
        match (self.candidate.leads_until(), &self.term.current) {
            (None, None) => {}
            (Some(until), Some(leadership)) if leadership.extend(until) => {}
            (Some(until), _) => {
                info!(lease, identity, "acquired leadership");
                self.term.begin(Leadership::new(lease, identity, until));
            }
            (None, Some(_)) => {
                self.term.end();
                if resigning {
                    info!(lease, identity, "releasing leadership");
                } else {
                    let last_error = self.requests.last.as_ref().map(|(_, error)| error);
                    warn!(lease, identity, last_error, "lost leadership, waiting as standby");
                }
            }
        }
    }
}

/// The current term of leadership, and the channels that publish it.
struct TermPublisher {
    current: Option<Leadership>,
    sender: watch::Sender<Option<Leadership>>,
    leading: watch::Sender<bool>,
}

impl TermPublisher {
    fn begin(&mut self, leadership: Leadership) {
        if let Some(before) = self.current.replace(leadership.clone()) {
            before.end();
        }
        self.sender.send_replace(Some(leadership));
        self.leading.send_replace(true);
    }

    fn end(&mut self) {
        if let Some(leadership) = self.current.take() {
            leadership.end();
            self.sender.send_replace(None);
            self.leading.send_replace(false);
        }
    }
}

impl Drop for TermPublisher {
    /// The Lease is no longer renewed.
    fn drop(&mut self) {
        self.end();
    }
}

/// Logs repeated failures of the same kind only once.
#[derive(Default)]
struct FailureLog {
    /// The failed operation and its error.
    last: Option<(&'static str, String)>,
}

impl FailureLog {
    fn failed(&mut self, config: &CandidateConfig, what: &'static str, error: String) {
        let CandidateConfig { lease, identity, .. } = config;
        if self.last.as_ref().is_some_and(|last| last.0 == what && last.1 == error) {
            debug!(lease, identity, error, "failed to {what} the Lease again, retrying");
        } else {
            warn!(lease, identity, error, "failed to {what} the Lease, retrying");
            self.last = Some((what, error));
        }
    }

    fn recovered(&mut self, config: &CandidateConfig) {
        if let Some((what, _)) = self.last.take() {
            let CandidateConfig { lease, identity, .. } = config;
            info!(lease, identity, failed = what, "API server responds again");
        }
    }
}

struct Outcome {
    /// The operation, as a verb.
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

async fn send(config: CandidateConfig, request: Request) -> Outcome {
    let what = match &request {
        Request::Read => "read",
        Request::Release(_) => "release",
        Request::Hold(None) => "create",
        Request::Hold(Some(over)) if holder(over) == Some(&config.identity) => "renew",
        Request::Hold(Some(_)) => "take over",
    };
    let answer = match timeout(config.timing.request_timeout, perform(&config, request)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(explain(&error)),
        Err(_) => Err(format!("no response within {:?}", config.timing.request_timeout)),
    };
    Outcome { what, answer }
}

async fn perform(config: &CandidateConfig, request: Request) -> Result<Answer, kube::Error> {
    let CandidateConfig { api, name, identity, timing, .. } = config;
    let post = PostParams::default();
    let now = Timestamp::now();
    let (written, replaces) = match request {
        Request::Read => {
            // A list needs no other permissions than the watch.
            let own = ListParams::default().fields(&format!("metadata.name={name}"));
            return Ok(Answer::Read(api.list(&own).await?.items.into_iter().next()));
        }
        Request::Hold(None) => {
            let mut lease = held(None, identity, timing, now);
            lease.metadata.name = Some(name.clone());
            (api.create(&post, &lease).await, false)
        }
        // The Lease contains the resourceVersion.
        Request::Hold(Some(over)) => {
            (api.replace(name, &post, &held(Some(&over), identity, timing, now)).await, true)
        }
        Request::Release(lease) => (api.replace(name, &post, &released(&lease, now)).await, true),
    };
    match written {
        Ok(lease) => Ok(Answer::Written(lease)),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(Answer::Conflict),
        // On create, 404 would mean that the namespace is missing.
        Err(kube::Error::Api(status)) if status.code == 404 && replaces => Ok(Answer::Missing),
        Err(error) => Err(error),
    }
}

/// A stream of changes of the Lease; `None` if it is deleted.
fn watch_lease(
    config: &CandidateConfig,
) -> impl Stream<Item = Result<Option<Lease>, watcher::Error>> + Send + use<> {
    let CandidateConfig { api, name, timing, .. } = config.clone();
    let watch = move || watcher::watch_object(api.clone(), &name).boxed();
    futures::stream::unfold((watch(), false), move |(mut events, mut failed)| {
        let watch = watch.clone();
        async move {
            loop {
                if failed {
                    let spread = timing.renew_interval.saturating_sub(timing.retry_period);
                    sleep(timing.retry_period + spread.mul_f64(fastrand::f64())).await;
                }
                // A leader renews far more often. Without events for this long, the connection may be dead, which would be
                // detected only minutes later.
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

/// The message of the API server, or the error with its causes if the request did not reach it.
fn explain(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("{} ({})", status.message, status.code);
    }
    error_chain(error)
}
