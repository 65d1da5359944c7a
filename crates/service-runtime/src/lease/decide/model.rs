//! Simulates candidates and an API server with random faults: messages are delayed, lost or repeated. At most one
//! candidate leads at any time, and after the faults end one candidate leads.

use std::collections::VecDeque;

use jiff::Timestamp;
use proptest::prelude::*;

use super::super::record::{held, released};
use super::*;

const STEP: Duration = Duration::from_millis(100);
const FAULTY_STEPS: u32 = 1200;
const CALM_STEPS: u32 = 700;

/// The faults of a simulation.
#[derive(Clone, Copy, Debug)]
struct Faults {
    candidates: usize,
    /// Probability of a fault, from 0 to 1.
    rate: f64,
    /// Candidates stop, and new ones start.
    restarts: bool,
    /// The Lease is deleted once. This excludes restarts, because a new candidate treats a missing Lease as a new
    /// installation, and requests that take effect after their timeout.
    deletion: bool,
    seed: u64,
}

fn faults() -> impl Strategy<Value = Faults> {
    (2..5_usize, 0.0..0.3, any::<bool>(), any::<bool>(), any::<u64>()).prop_map(
        |(candidates, rate, restarts, deletion, seed)| Faults {
            candidates,
            rate,
            restarts: restarts && !deletion,
            deletion,
            seed,
        },
    )
}

/// A request or an answer in flight.
enum InFlight {
    Request { request: Request, answered: bool },
    Answer(Answer),
}

struct Node {
    candidate: Candidate,
    /// Clocks have different offsets and speeds.
    started: Duration,
    clock_rate: f64,
    wake: Option<Moment>,
    /// Frozen until this step.
    frozen: u32,
    /// When the request times out.
    gives_up: Option<Moment>,
    request: Option<(u32, InFlight)>,
    watch: VecDeque<(u32, Option<Lease>)>,
}

struct Simulation {
    random: fastrand::Rng,
    faults: Faults,
    step: u32,
    version: u64,
    lease: Option<Lease>,
    nodes: Vec<Node>,
    /// Requests that have timed out and can still take effect: step, sender, request.
    late: Vec<(u32, String, Request)>,
    created: u32,
}

impl Simulation {
    fn new(faults: Faults) -> Self {
        let random = fastrand::Rng::with_seed(faults.seed);
        let (nodes, late) = (Vec::new(), Vec::new());
        let mut simulation =
            Self { random, faults, step: 0, version: 0, lease: None, nodes, late, created: 0 };
        for _ in 0..faults.candidates {
            let node = simulation.new_node();
            simulation.nodes.push(node);
        }
        simulation
    }

    fn new_node(&mut self) -> Node {
        self.created += 1;
        let random = fastrand::Rng::with_seed(self.random.u64(..));
        Node {
            candidate: Candidate::new(format!("candidate-{}", self.created), Timing::default(), random),
            started: Duration::from_secs(self.random.u64(1..1_000_000)),
            clock_rate: 0.95 + 0.1 * self.random.f64(),
            wake: None,
            frozen: 0,
            gives_up: None,
            request: None,
            watch: VecDeque::from([(self.step + 1, self.lease.clone())]),
        }
    }

    fn calm(&self) -> bool {
        self.step >= FAULTY_STEPS
    }

    fn has_fault(&mut self) -> bool {
        !self.calm() && self.random.f64() < self.faults.rate
    }

    /// The step in which a message that is sent now arrives.
    fn arrival(&mut self) -> u32 {
        let longest = if self.has_fault() { 250 } else { 3 };
        self.step + self.random.u32(1..=longest)
    }

    fn now(&self, node: usize) -> Moment {
        let node = &self.nodes[node];
        Moment::PAST + node.started + (STEP * self.step).mul_f64(node.clock_rate)
    }

    fn leaders(&self) -> usize {
        let leads = |node: &usize| {
            self.nodes[*node].candidate.leads_until().is_some_and(|until| self.now(*node) < until)
        };
        (0..self.nodes.len()).filter(leads).count()
    }

    fn advance(&mut self) {
        self.step += 1;
        self.inject_faults();
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

    fn inject_faults(&mut self) {
        if self.calm() {
            return;
        }
        if self.faults.deletion && self.step == 300 + u32::try_from(self.faults.seed % 500).unwrap() {
            self.write(None);
        }
        if self.random.f64() < 0.01 * self.faults.rate && self.lease.is_some() {
            let relabelled = self.lease.clone();
            self.write(relabelled);
        }
        if self.random.f64() < 0.05 * self.faults.rate {
            let node = self.random.usize(..self.nodes.len());
            self.nodes[node].frozen = self.step + self.random.u32(1..300);
        }
        if self.faults.restarts && self.random.f64() < 0.03 * self.faults.rate {
            let node = self.random.usize(..self.nodes.len());
            self.give_up(node);
            self.nodes[node] = self.new_node();
        }
        if self.faults.restarts && self.random.f64() < 0.03 * self.faults.rate {
            let node = self.random.usize(..self.nodes.len());
            self.deliver(node, Observation::Resign);
        }
    }

    /// Stores the Lease with a new version, and sends it to all watches, with individual delays and in order.
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

    /// Handles a request like the API server.
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

    /// The request in flight times out.
    fn give_up(&mut self, node: usize) {
        let here = &mut self.nodes[node];
        if let Some((at, InFlight::Request { request, .. })) = here.request.take()
            && !self.faults.deletion
        {
            self.late.push((at, here.candidate.identity.clone(), request));
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
            |(at, what): &mut (u32, InFlight)| *at <= step && matches!(what, InFlight::Request { .. });
        if let Some((_, InFlight::Request { request, answered })) = here.request.take_if(arrived) {
            let me = here.candidate.identity.clone();
            let answer = if self.has_fault() { Answer::Failed } else { self.serve(&me, request) };
            if answered {
                self.nodes[node].request = Some((self.arrival(), InFlight::Answer(answer)));
            }
        }
    }

    fn run(&mut self, node: usize) {
        let (step, now) = (self.step, self.now(node));
        let here = &mut self.nodes[node];
        let arrived = |(at, what): &mut (u32, InFlight)| *at <= step && matches!(what, InFlight::Answer(_));
        let mut observations = Vec::new();
        if let Some((_, InFlight::Answer(answer))) = here.request.take_if(arrived) {
            here.gives_up = None;
            observations.push(Observation::Answered(answer));
        } else if here.gives_up.is_some_and(|moment| now >= moment) {
            here.gives_up = None;
            self.give_up(node);
            observations.push(Observation::Answered(Answer::Failed));
        }
        let here = &mut self.nodes[node];
        while here.watch.front().is_some_and(|(at, _)| *at <= step) {
            observations.extend(here.watch.pop_front().map(|(_, lease)| Observation::Watched(lease)));
        }
        if here.wake.is_some_and(|moment| now >= moment) {
            observations.push(Observation::Tick);
        }
        // Observations of the same step are delivered in any order, except for those of the watch.
        if matches!(observations.first(), Some(Observation::Answered(_))) && self.random.bool() {
            observations.rotate_left(1);
        }
        for observation in observations {
            self.deliver(node, observation);
        }
    }

    fn deliver(&mut self, node: usize, observation: Observation) {
        let now = self.now(node);
        let action = self.nodes[node].candidate.decide(observation, now);
        self.nodes[node].wake = None;
        match action {
            Action::Wait(until) => self.nodes[node].wake = until,
            Action::Done => {
                self.give_up(node);
                self.nodes[node] = self.new_node();
            }
            Action::Send(request) => {
                assert!(self.nodes[node].gives_up.is_none(), "two requests at once");
                let answered = !self.has_fault();
                let at = self.arrival();
                let here = &mut self.nodes[node];
                here.request = Some((at, InFlight::Request { request, answered }));
                here.gives_up = Some(now + Timing::default().request_timeout);
                // The leader's deadline can pass while its request is in flight.
                here.wake = here.candidate.leads_until();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn at_most_one_leads_and_one_does_after_faults_end(faults in faults()) {
        let mut simulation = Simulation::new(faults);
        for _ in 0..FAULTY_STEPS + CALM_STEPS {
            simulation.advance();
            prop_assert!(simulation.leaders() <= 1, "two lead at step {}", simulation.step);
        }
        prop_assert_eq!(simulation.leaders(), 1, "nobody leads in the end");
    }

    #[test]
    fn first_leader_stays_without_faults(candidates in 2..5_usize, seed in any::<u64>()) {
        let faults = Faults { candidates, rate: 0.0, restarts: false, deletion: false, seed };
        let mut simulation = Simulation::new(faults);
        for step in 0..FAULTY_STEPS {
            simulation.advance();
            prop_assert!(step < 20 || simulation.leaders() == 1, "nobody leads at step {step}");
        }
        let spec = simulation.lease.unwrap().spec.unwrap();
        prop_assert_eq!(spec.lease_transitions, Some(0));
    }
}

/// The model has to detect a violation.
#[test]
fn model_detects_a_leader_that_acts_too_long() {
    let found = (0..400).any(|seed| {
        let mut simulation =
            Simulation::new(Faults { candidates: 3, rate: 0.25, restarts: false, deletion: false, seed });
        for node in &mut simulation.nodes {
            node.candidate.timing.renew_deadline = Duration::from_secs(25);
        }
        (0..FAULTY_STEPS).any(|_| {
            simulation.advance();
            simulation.leaders() > 1
        })
    });
    assert!(found);
}
