//! Builders for unit tests. Objects are identified by numbers. The ReplicaSet is number 100, the Deployment number 200.

use std::sync::Arc;

use haulout_api_types::former_owner::FormerOwner;
use haulout_api_types::instigators;
use haulout_api_types::names::class;
use haulout_service_runtime::pods::Uid;
use jiff::{SignedDuration, Timestamp};

use crate::decide::{Local, PodView, View};
use crate::objects::{Deployment, Evac, Former, Owner, Pod, Problem, ReplicaSet, Strategy, Turn};

/// The time this many seconds into a test.
pub fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + seconds).unwrap()
}

pub fn uid(n: u32) -> Uid {
    format!("00000000-0000-0000-0000-0000{n:08x}").parse().unwrap()
}

pub const SET: u32 = 100;
pub const DEPLOYMENT: u32 = 200;

/// A ReplicaSet with one pod.
pub fn set(wanted: i32) -> ReplicaSet {
    ReplicaSet {
        name: "web-5d".into(),
        deployment: Some(uid(DEPLOYMENT)),
        other_owner: None,
        wanted,
        reported: wanted,
        current: true,
        failure: None,
        deleted: false,
    }
}

pub fn deployment(replicas: i32, max_surge: i32) -> Deployment {
    Deployment {
        namespace: "shop".into(),
        name: "web".into(),
        uid: uid(DEPLOYMENT),
        replicas,
        max_surge,
        strategy: Strategy::RollingUpdate,
        min_ready: SignedDuration::ZERO,
        progress_deadline: SignedDuration::from_secs(600),
        opted_out: false,
        current: true,
        deleted: false,
    }
}

/// A pod of the ReplicaSet, ready since the beginning of the test.
pub fn pod(n: u32) -> Pod {
    Pod {
        namespace: "shop".into(),
        name: format!("web-{n}").into(),
        uid: uid(n),
        owner: Some(Owner::ReplicaSet(uid(SET))),
        former: Former::None,
        created: at(-100),
        ready: Some(at(-50)),
        leaving: false,
        finished: false,
        problem: None,
        claims: Box::new([]),
        version: 0,
    }
}

/// A pod that was moved to the Deployment at the beginning of the test, when this many pods were available.
pub fn moved(n: u32, available: i32) -> Pod {
    let owner = Some(Owner::Deployment(uid(DEPLOYMENT)));
    Pod { owner, former: former(available), ..pod(n) }
}

/// A pod that was given back.
pub fn returned(n: u32) -> Pod {
    Pod { former: former(1), ..pod(n) }
}

fn former(available: i32) -> Former {
    former_since(available, 0)
}

/// The annotation of a pod that was moved at this second.
pub fn former_since(available: i32, since: i64) -> Former {
    let former = FormerOwner {
        replica_set: "web-5d".into(),
        uid: uid(SET).to_string(),
        available,
        since: at(since).as_second(),
        ..FormerOwner::default()
    };
    Former::Known(former.into())
}

/// A pod that was created after the first was moved, and is not ready.
pub fn starting(n: u32, problem: Option<Problem>) -> Pod {
    Pod { created: at(1), ready: None, problem: problem.map(Box::new), ..pod(n) }
}

pub fn unschedulable(message: &str) -> Problem {
    Problem::Unschedulable(message.into(), at(1))
}

/// The Evacuation of a pod: it is our turn, and it has our finalizer.
pub fn evac(n: u32) -> Evac {
    Evac {
        namespace: "shop".into(),
        name: format!("{}-web-{n}", uid(n)).into(),
        uid: format!("e{n}").into(),
        version: "1".into(),
        created: at(-i64::from(100 - n)),
        pod: uid(n),
        finalizers: Box::new([instigators::finalizer(class::DEPLOYMENT).into()]),
        deleted: false,
        cancelled: false,
        turn: Turn::Active,
        progress: None,
        deadline: SignedDuration::from_secs(1800),
        expected_end: None,
        message: "".into(),
        blocked: None,
        conditions: Box::new([]),
    }
}

/// We have completed, and the pod is about to be evicted.
pub fn over(n: u32) -> Evac {
    Evac { turn: Turn::Over, ..evac(n) }
}

pub fn cancelled(n: u32) -> Evac {
    Evac { cancelled: true, ..evac(n) }
}

pub fn view(deployment: Deployment, set: ReplicaSet, pods: Vec<(Pod, Option<Evac>)>) -> View {
    let view = |(pod, evac): (Pod, Option<Evac>)| PodView {
        pod: Arc::new(pod),
        evac: evac.map(Arc::new),
        local: Local::default(),
    };
    View {
        deployment,
        namespace_opted_out: false,
        sets: [(uid(SET), set)].into(),
        pods: pods.into_iter().map(view).collect(),
    }
}
