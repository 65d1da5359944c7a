//! Everything that is decided, in one place: what the outside tells goes in, and for each pod the next step
//! comes out. Whoever drives it does what the step says, and nothing else.

pub mod rate_limit;

use haulout_service_runtime::events::News;
use haulout_service_runtime::pods::{Change, Pod};
use jiff::{SignedDuration, Timestamp};

use self::rate_limit::RateLimit;
use crate::decide::{How, Verdict};
use crate::events::Announced;
use crate::index::{Index, Key};
use crate::policy::Policy;
use crate::sight::Gaps;

/// All that the taint manager knows.
#[derive(Debug)]
pub struct State {
    /// What pods are judged by.
    pub index: Index,
    /// Whether what we see is the present.
    pub gaps: Gaps,
    limit: RateLimit,
    announced: Announced,
}

/// What to do about a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Make it leave in this way.
    pub act: Option<How>,
    /// From when on it had to leave, if it has to.
    pub due: Option<Timestamp>,
    /// Take our instigator off its Evacuation.
    pub release: bool,
    /// Tell people.
    pub news: Option<News>,
    /// Look again at this time, even if nothing has changed.
    pub again: Option<Timestamp>,
    /// Why, in a word.
    pub reason: &'static str,
    /// Why, in a sentence.
    pub message: String,
}

impl State {
    /// Knows nothing yet. `settle` is how long nodes have to report after a gap, `rate` how many pods may be
    /// made to leave in a second.
    pub fn new(policy: Policy, settle: SignedDuration, rate: Option<f64>) -> Self {
        Self {
            index: Index::new(policy),
            gaps: Gaps::at_start(settle),
            limit: RateLimit::per_second(rate),
            announced: Announced::default(),
        }
    }

    /// Something happened to a pod; whether it has to be decided about.
    pub fn apply_pod(&mut self, change: &Change) -> Option<Key> {
        if change.new.is_none()
            && let Some(gone) = &change.old
        {
            self.announced.delete(gone.uid);
            self.limit.cancel(gone.uid);
        }
        self.index.apply_pod(change)
    }

    /// The next step for a pod.
    pub fn next(&mut self, pod: &Pod, now: Timestamp) -> Step {
        let decision = self.index.decide(pod, self.gaps.sight(), now);
        let mut step = Step {
            act: None,
            due: None,
            release: decision.release,
            news: None,
            again: decision.verdict.again(),
            reason: decision.reason.word(),
            message: decision.reason.to_string(),
        };
        if let Verdict::Act { how, due, .. } = decision.verdict {
            step.due = Some(due);
            // Asking for an evacuation disrupts nobody.
            let turn = if how == How::Evacuate { Ok(()) } else { self.limit.acquire(pod.uid, now) };
            if let Err(later) = turn {
                self.announced.rate_limited(pod.uid);
                step.again = Some(step.again.map_or(later, |again| again.min(later)));
                return step;
            }
            step.act = Some(how);
        } else {
            self.limit.cancel(pod.uid);
        }
        step.news = self.announced.record(pod, &decision);
        step
    }

    /// How many pods wait for a deadline or are being made to leave.
    pub fn concerned(&self) -> usize {
        self.announced.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use haulout_service_runtime::pods::PodIndex;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::{Json, at, pod};

    /// A state that has seen one node, and its pods.
    fn with_policy(rules: &str, rate: Option<f64>) -> State {
        let policy = Policy::from_yaml(&format!("rules: [{rules}]")).unwrap();
        let mut state = State::new(policy, SignedDuration::from_secs(60), rate);
        state.gaps.end(at(-1000));
        state
    }

    fn taint(state: &mut State, taints: Value, now: i64) {
        let meta = ObjectMeta { name: Some("node".into()), ..ObjectMeta::default() };
        let taints: Vec<_> = serde_json::from_value(taints).unwrap();
        state.index.apply_node(&meta, &taints, true, &PodIndex::default(), at(now));
    }

    fn tainted() -> Value {
        json!([{"key": "k", "effect": "NoExecute"}])
    }

    fn step(state: &mut State, pod: &Json, now: i64) -> (Option<How>, Option<Timestamp>, Option<String>) {
        let step = state.next(&pod.read(), at(now));
        (step.act, step.again, step.news.map(|news| news.note))
    }

    #[test]
    fn a_pod_waits_is_cancelled_waits_again_and_leaves() {
        let mut state = with_policy("", None);
        let pod = pod(1).tolerating("k", 10);
        taint(&mut state, tainted(), 100);
        assert_eq!(step(&mut state, &pod, 101), (None, Some(at(110)), None));
        taint(&mut state, json!([]), 105);
        let cancelled = Some("Cancelling deletion of Pod default/pod-1".to_owned());
        assert_eq!(step(&mut state, &pod, 105), (None, None, cancelled));
        taint(&mut state, tainted(), 107);
        assert_eq!(step(&mut state, &pod, 110), (None, Some(at(117)), None), "it begins anew");
        let marked = Some("Marking for deletion Pod default/pod-1".to_owned());
        assert_eq!(step(&mut state, &pod, 117), (Some(How::Delete), None, marked));
        assert_eq!(step(&mut state, &pod, 118), (Some(How::Delete), None, None), "a retry is no news");
        let leaving = pod.terminating(148, 30);
        assert_eq!(step(&mut state, &leaving, 119), (None, None, None));
        assert_eq!(state.concerned(), 0);
    }

    #[test]
    fn the_limit_gives_turns_and_who_may_stay_gives_its_turn_away() {
        let mut state = with_policy("{key: soft, action: Evacuate}", Some(1.0));
        taint(&mut state, tainted(), 100);
        let marked = |n: u32| Some(format!("Marking for deletion Pod default/pod-{n}"));
        assert_eq!(step(&mut state, &pod(1), 100), (Some(How::Delete), None, marked(1)));
        assert_eq!(step(&mut state, &pod(2), 100), (None, Some(at(101)), None));
        assert_eq!(step(&mut state, &pod(3), 100), (None, Some(at(102)), None));
        let spared = pod(2).tolerating("k", None);
        let cancelled = Some("Cancelling deletion of Pod default/pod-2".to_owned());
        assert_eq!(step(&mut state, &spared, 100), (None, None, cancelled));
        assert_eq!(step(&mut state, &pod(3), 102), (Some(How::Delete), None, marked(3)));
        assert_eq!(step(&mut state, &pod(2), 102), (None, Some(at(103)), None), "it has to queue again");
        taint(&mut state, json!([{"key": "soft", "effect": "NoExecute"}]), 102);
        assert_eq!(step(&mut state, &pod(4), 102).0, Some(How::Evacuate), "evacuations need no turn");
    }

    #[test]
    fn a_pod_that_goes_is_forgotten() {
        let mut state = with_policy("", Some(1.0));
        taint(&mut state, tainted(), 100);
        step(&mut state, &pod(1), 100);
        step(&mut state, &pod(2), 100);
        assert_eq!(state.concerned(), 2);
        for n in [1, 2] {
            state.apply_pod(&Change { old: Some(Arc::new(pod(n).read())), new: None });
        }
        assert_eq!(state.concerned(), 0);
    }

    #[test]
    fn a_new_leader_waits_until_nodes_have_reported() {
        let mut state = State::new(Policy::default(), SignedDuration::from_secs(60), None);
        taint(&mut state, tainted(), 100);
        assert_eq!(step(&mut state, &pod(1), 100), (None, None, None), "it has not seen everything yet");
        state.gaps.end(at(101));
        assert_eq!(step(&mut state, &pod(1), 101), (None, Some(at(161)), None));
        assert_eq!(step(&mut state, &pod(1), 161).0, Some(How::Delete));
    }
}
