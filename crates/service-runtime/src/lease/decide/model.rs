//! Candidates against an API server of which anything can be late, lost or repeated, over random runs:
//! never two of them lead at once, and when the trouble ends one does.

use std::collections::VecDeque;

use jiff::Timestamp;
use proptest::prelude::*;

use super::super::record::{held, released};
use super::*;

const STEP: Duration = Duration::from_millis(100);
const TROUBLE: u32 = 1200;
const CALM: u32 = 700;

/// What may go wrong in a run.
#[derive(Clone, Copy, Debug)]
struct Trouble {
    candidates: usize,
    /// How often things go wrong, from 0 to 1.
    rate: f64,
    /// Candidates end and new ones come.
    restarts: bool,
    /// Somebody deletes the Lease, once. This is without restarts, because a newcomer takes a missing
    /// Lease for a new installation, and without requests that take effect after they were given up.
    deletion: bool,
    seed: u64,
}

fn trouble() -> impl Strategy<Value = Trouble> {
    (2..5_usize, 0.0..0.3, any::<bool>(), any::<bool>(), any::<u64>()).prop_map(
        |(candidates, rate, restarts, deletion, seed)| Trouble {
            candidates,
            rate,
            restarts: restarts && !deletion,
            deletion,
            seed,
        },
    )
}

/// A request between its sender and the API server, or an answer on its way back.
enum Travelling {
    There { request: Request, answered: bool },
    Back(Answer),
}

struct Node {
    candidate: Candidate,
    /// Clocks start anywhere and run differently fast.
    started: Duration,
    pace: f64,
    wake: Option<Moment>,
    /// Frozen until this step.
    frozen: u32,
    /// When the answer is no longer waited for.
    gives_up: Option<Moment>,
    request: Option<(u32, Travelling)>,
    watch: VecDeque<(u32, Option<Lease>)>,
}

struct World {
    random: fastrand::Rng,
    trouble: Trouble,
    step: u32,
    version: u64,
    lease: Option<Lease>,
    nodes: Vec<Node>,
    /// Requests that were given up and may yet take effect: when, whose and which.
    late: Vec<(u32, String, Request)>,
    born: u32,
}

impl World {
    fn new(trouble: Trouble) -> Self {
        let random = fastrand::Rng::with_seed(trouble.seed);
        let (nodes, late) = (Vec::new(), Vec::new());
        let mut world = Self { random, trouble, step: 0, version: 0, lease: None, nodes, late, born: 0 };
        for _ in 0..trouble.candidates {
            let node = world.newcomer();
            world.nodes.push(node);
        }
        world
    }

    fn newcomer(&mut self) -> Node {
        self.born += 1;
        let random = fastrand::Rng::with_seed(self.random.u64(..));
        Node {
            candidate: Candidate::new(format!("candidate-{}", self.born), Timing::default(), random),
            started: Duration::from_secs(self.random.u64(1..1_000_000)),
            pace: 0.95 + 0.1 * self.random.f64(),
            wake: None,
            frozen: 0,
            gives_up: None,
            request: None,
            watch: VecDeque::from([(self.step + 1, self.lease.clone())]),
        }
    }

    fn calm(&self) -> bool {
        self.step >= TROUBLE
    }

    fn goes_wrong(&mut self) -> bool {
        !self.calm() && self.random.f64() < self.trouble.rate
    }

    /// When something sent now arrives.
    fn arrival(&mut self) -> u32 {
        let longest = if self.goes_wrong() { 250 } else { 3 };
        self.step + self.random.u32(1..=longest)
    }

    fn now(&self, node: usize) -> Moment {
        let node = &self.nodes[node];
        Moment::PAST + node.started + (STEP * self.step).mul_f64(node.pace)
    }

    fn leaders(&self) -> usize {
        let leads = |node: &usize| {
            self.nodes[*node].candidate.leads_until().is_some_and(|until| self.now(*node) < until)
        };
        (0..self.nodes.len()).filter(leads).count()
    }

    fn advance(&mut self) {
        self.step += 1;
        self.outsiders();
        self.deliver_late_requests();
        let first = self.random.usize(..self.nodes.len());
        for offset in 0..self.nodes.len() {
            let node = (first + offset) % self.nodes.len();
            self.deliver_request(node);
            if self.nodes[node].frozen <= self.step {
                self.run(node);
            }
        }
    }

    fn outsiders(&mut self) {
        if self.calm() {
            return;
        }
        if self.trouble.deletion && self.step == 300 + u32::try_from(self.trouble.seed % 500).unwrap() {
            self.write(None);
        }
        if self.random.f64() < 0.01 * self.trouble.rate && self.lease.is_some() {
            let relabelled = self.lease.clone();
            self.write(relabelled);
        }
        if self.random.f64() < 0.05 * self.trouble.rate {
            let node = self.random.usize(..self.nodes.len());
            self.nodes[node].frozen = self.step + self.random.u32(1..300);
        }
        if self.trouble.restarts && self.random.f64() < 0.03 * self.trouble.rate {
            let node = self.random.usize(..self.nodes.len());
            self.give_up(node);
            self.nodes[node] = self.newcomer();
        }
        if self.trouble.restarts && self.random.f64() < 0.03 * self.trouble.rate {
            let node = self.random.usize(..self.nodes.len());
            self.hear(node, Observation::Resign);
        }
    }

    /// Stores the Lease under a new version and tells all that watch, each in its own time and in order.
    fn write(&mut self, lease: Option<Lease>) -> Option<Lease> {
        self.version += 1;
        self.lease = lease.map(|mut lease| {
            lease.metadata.resource_version = Some(self.version.to_string());
            lease
        });
        for node in 0..self.nodes.len() {
            let after = self.nodes[node].watch.back().map_or(0, |(step, _)| *step);
            let step = self.arrival().max(after);
            self.nodes[node].watch.push_back((step, self.lease.clone()));
        }
        self.lease.clone()
    }

    /// What the API server does with a request.
    fn serve(&mut self, me: &str, request: Request) -> Answer {
        let (base, written) = match request {
            Request::Read => return Answer::Read(self.lease.clone()),
            Request::Hold(over) => {
                let wall = Timestamp::from_second(self.random.i64(0..1_000_000)).unwrap();
                let written = held(over.as_ref(), me, &Timing::default(), wall);
                (over, written)
            }
            Request::Release(lease) => {
                let written = released(&lease, Timestamp::UNIX_EPOCH);
                (Some(lease), written)
            }
        };
        let version =
            |lease: &Option<Lease>| lease.as_ref().and_then(|l| l.metadata.resource_version.clone());
        match (&base, &self.lease) {
            (Some(_), None) => Answer::Missing,
            _ if version(&base) != version(&self.lease) => Answer::Conflict,
            _ => Answer::Written(self.write(Some(written)).unwrap()),
        }
    }

    /// The request on its way is no longer waited for.
    fn give_up(&mut self, node: usize) {
        let here = &mut self.nodes[node];
        if let Some((at, Travelling::There { request, .. })) = here.request.take()
            && !self.trouble.deletion
        {
            self.late.push((at, here.candidate.me.clone(), request));
        }
    }

    fn deliver_late_requests(&mut self) {
        let (due, late): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.late).into_iter().partition(|(at, _, _)| *at <= self.step);
        self.late = late;
        for (_, me, request) in due {
            self.serve(&me, request);
        }
    }

    fn deliver_request(&mut self, node: usize) {
        let (step, here) = (self.step, &mut self.nodes[node]);
        let arrived =
            |(at, what): &mut (u32, Travelling)| *at <= step && matches!(what, Travelling::There { .. });
        if let Some((_, Travelling::There { request, answered })) = here.request.take_if(arrived) {
            let me = here.candidate.me.clone();
            let answer = if self.goes_wrong() { Answer::Failed } else { self.serve(&me, request) };
            if answered {
                self.nodes[node].request = Some((self.arrival(), Travelling::Back(answer)));
            }
        }
    }

    fn run(&mut self, node: usize) {
        let (step, now) = (self.step, self.now(node));
        let here = &mut self.nodes[node];
        let arrived = |(at, what): &mut (u32, Travelling)| *at <= step && matches!(what, Travelling::Back(_));
        let mut heard = Vec::new();
        if let Some((_, Travelling::Back(answer))) = here.request.take_if(arrived) {
            here.gives_up = None;
            heard.push(Observation::Answered(answer));
        } else if here.gives_up.is_some_and(|moment| now >= moment) {
            here.gives_up = None;
            self.give_up(node);
            heard.push(Observation::Answered(Answer::Failed));
        }
        let here = &mut self.nodes[node];
        while here.watch.front().is_some_and(|(at, _)| *at <= step) {
            heard.extend(here.watch.pop_front().map(|(_, lease)| Observation::Watched(lease)));
        }
        if here.wake.is_some_and(|moment| now >= moment) {
            heard.push(Observation::Tick);
        }
        // What has come at the same time is heard in any order, but the watch in its own.
        if matches!(heard.first(), Some(Observation::Answered(_))) && self.random.bool() {
            heard.rotate_left(1);
        }
        for observation in heard {
            self.hear(node, observation);
        }
    }

    fn hear(&mut self, node: usize, observation: Observation) {
        let now = self.now(node);
        let action = self.nodes[node].candidate.decide(observation, now);
        self.nodes[node].wake = None;
        match action {
            Action::Wait(until) => self.nodes[node].wake = until,
            Action::Done => {
                self.give_up(node);
                self.nodes[node] = self.newcomer();
            }
            Action::Send(request) => {
                assert!(self.nodes[node].gives_up.is_none(), "two requests at once");
                let answered = !self.goes_wrong();
                let at = self.arrival();
                let here = &mut self.nodes[node];
                here.request = Some((at, Travelling::There { request, answered }));
                here.gives_up = Some(now + Timing::default().request_timeout);
                // A leader's deadline is noticed while its request is on its way.
                here.wake = here.candidate.leads_until();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn never_two_lead_and_one_does_when_the_trouble_is_over(trouble in trouble()) {
        let mut world = World::new(trouble);
        for _ in 0..TROUBLE + CALM {
            world.advance();
            prop_assert!(world.leaders() <= 1, "two lead at step {}", world.step);
        }
        prop_assert_eq!(world.leaders(), 1, "nobody leads in the end");
    }

    #[test]
    fn without_trouble_the_first_leader_stays(candidates in 2..5_usize, seed in any::<u64>()) {
        let trouble = Trouble { candidates, rate: 0.0, restarts: false, deletion: false, seed };
        let mut world = World::new(trouble);
        for step in 0..TROUBLE {
            world.advance();
            prop_assert!(step < 20 || world.leaders() == 1, "nobody leads at step {step}");
        }
        let spec = world.lease.unwrap().spec.unwrap();
        prop_assert_eq!(spec.lease_transitions, Some(0));
    }
}

/// The model would be worth nothing if it let everything pass.
#[test]
fn the_model_finds_a_leader_that_acts_too_long() {
    let found = (0..400).any(|seed| {
        let mut world =
            World::new(Trouble { candidates: 3, rate: 0.25, restarts: false, deletion: false, seed });
        for node in &mut world.nodes {
            node.candidate.timing.act_for = Duration::from_secs(25);
        }
        (0..TROUBLE).any(|_| {
            world.advance();
            world.leaders() > 1
        })
    });
    assert!(found);
}
