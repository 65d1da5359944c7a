//! What a change costs, by the number of nodes. Prints; run it with
//! `cargo test --release -p haulout-maintenance-controller costs -- --ignored --nocapture`.

use std::time::{Duration, Instant};

use haulout_api_types::node_maintenance::PodType;

use super::*;
use crate::facts::EvacuationOf;
use crate::testing::*;

const PODS_PER_NODE: usize = 30;
const MAINTENANCES: usize = 50;

fn cluster(nodes: usize, random: &mut fastrand::Rng) -> (Planner<Map>, Vec<PodFacts<Map>>) {
    let mut planner = Planner::new(Served::DEFAULT);
    let names: Vec<String> = (0..nodes).map(|i| format!("node-{i}")).collect();
    let mut pods = Vec::new();
    for name in &names {
        planner.apply(Change::Node(node(name)));
        for i in 0..PODS_PER_NODE {
            let labels = labels(&[
                ("app", random.choice(["web", "db", "cache"]).unwrap()),
                ("pod-template-hash", "x"),
            ]);
            let pod = PodFacts { labels, ..pod(name, &format!("{name}-{i}"), random.i32(0..5000)) };
            planner.apply(Change::Pod(pod.clone()));
            pods.push(pod);
        }
    }
    for i in 0..MAINTENANCES {
        let some: Vec<&str> = names.iter().map(String::as_str).filter(|_| random.bool()).collect();
        let plan = [
            entry(PodType::Default, random.i32(0..200), None),
            entry(PodType::Default, random.i32(200..400), random.bool().then_some("db")),
            entry(PodType::Default, random.i32(400..800), None),
            entry(PodType::Default, 5000, None),
        ];
        let facts = maintenance(&format!("m{i}"), i64::try_from(i).unwrap(), &some, &plan, Served::DEFAULT);
        planner.apply(Change::Maintenance(facts));
    }
    planner.settle();
    (planner, pods)
}

fn show(what: &str, nodes: usize, mut all: Vec<Duration>) {
    all.sort();
    let nth = |percent: usize| all[(all.len() - 1) * percent / 100];
    println!(
        "{nodes:5} nodes  {what:<34} p50 {:>9.1?}  p99 {:>9.1?}  max {:>9.1?}",
        nth(50),
        nth(99),
        nth(100)
    );
}

#[test]
#[ignore = "prints figures and checks nothing"]
fn costs_of_one_event() {
    for nodes in [100, 300, 1000] {
        let mut random = fastrand::Rng::with_seed(7);
        let (mut planner, mut pods) = cluster(nodes, &mut random);
        // In about the order in which they leave, so that maintenances move on.
        pods.sort_by_key(|pod| pod.priority);
        let (mut own, mut follow_ups, mut whole, mut reports) = (vec![], vec![], vec![], vec![]);
        let events = pods.into_iter().enumerate().flat_map(|(i, pod)| {
            let evacuated = Change::Pod(PodFacts { evacuation: EvacuationOf::Us, ..pod.clone() });
            let cordoned = Change::Node(NodeFacts { cordoned: i.is_multiple_of(2), ..node(&pod.node) });
            let sample = i.is_multiple_of(10);
            [sample.then_some(evacuated), sample.then_some(cordoned), Some(Change::PodGone(pod.key))]
        });
        for change in events.flatten().take(6000) {
            planner.take_changed_nodes();
            let start = Instant::now();
            planner.apply(change);
            planner.settle_one();
            own.push(start.elapsed());
            loop {
                let step = Instant::now();
                if !planner.settle_one() {
                    break;
                }
                follow_ups.push(step.elapsed());
            }
            whole.push(start.elapsed());
            let name = planner.take_changed_nodes().into_iter().next();
            let start = Instant::now();
            let _plan = name.and_then(|name| planner.node(&name));
            let _plan = planner.maintenance("m7");
            reports.push(start.elapsed());
        }
        show("taking it in, its own node", nodes, own);
        if !follow_ups.is_empty() {
            println!("{nodes:5} nodes  {} other nodes had to be looked at", follow_ups.len());
            show("one other node", nodes, follow_ups);
        }
        show("all that follows", nodes, whole);
        show("reports on a node and a maintenance", nodes, reports);
    }
}
