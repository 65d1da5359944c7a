//! Leader election on the real API server, with processes that are frozen, cut off and stopped.

use std::time::{Duration, Instant};

use haulout_e2e::{Cluster, Component, Handle, Mark, wait};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use rustix::process::Signal;
use serde_json::json;

use crate::probe::{LEASE, Probe, Probes, SOON, Write};
use crate::support::shared;

/// A Lease that expires soon, but not because the machine is busy.
const SHORT: u64 = 5;

fn by<'a>(history: &'a [Write], probe: &Probe) -> Vec<&'a Write> {
    history.iter().filter(|write| write.identity == probe.identity).collect()
}

/// Writes by others after this probe's first write, counted from `since` writes on.
fn writes_by_others(history: &[Write], since: usize, probe: &Probe) -> Vec<Write> {
    let later = history.iter().skip(since).skip_while(|write| write.identity != probe.identity);
    later.filter(|write| write.identity != probe.identity).cloned().collect()
}

/// A leader, and a standby that watches the Lease.
async fn leader_and_standby(cluster: &Handle, probes: &Probes, lease_seconds: u64) -> (Probe, Probe) {
    let leader = probes.start("one", lease_seconds);
    probes.first_of(&leader, 0).await;
    let standby = standby(cluster, probes, "two", lease_seconds).await;
    (leader, standby)
}

async fn standby(cluster: &Handle, probes: &Probes, name: &str, lease_seconds: u64) -> Probe {
    let mark = cluster.requests_mark().unwrap();
    let standby = probes.start(name, lease_seconds);
    wait::eventually("the standby watches the Lease", SOON, async || {
        let requests = cluster.requests_since(mark)?.by_user_agent(&standby.agent());
        Ok((requests.verb("watch").resource("leases", "").count() > 0).then_some(()))
    })
    .await
    .unwrap();
    standby
}

fn successful_writes(cluster: &Handle, since: Mark, probe: &Probe) -> usize {
    let requests = cluster.requests_since(since).unwrap().by_user_agent(&probe.agent()).writes();
    requests.resource("configmaps", "").only(|request| request.code < 300).count()
}

#[tokio::test]
async fn frozen_leader_writes_nothing_when_it_resumes() {
    let cluster = shared().await;
    let probes = Probes::new(&cluster, "leadership-frozen").await;
    let (one, two) = leader_and_standby(&cluster, &probes, SHORT).await;
    // Each probe is frozen once, because the effect depends on its state.
    for (frozen, other) in [(&one, &two), (&two, &one)] {
        let (terms_ended, fenced) = (frozen.said("probe: stopped leading"), frozen.said("fenced: "));
        frozen.process.pause().unwrap();
        let before = probes.history().len();
        probes.first_of(other, before).await;
        let mark = cluster.requests_mark().unwrap();
        frozen.process.resume().unwrap();
        frozen.until_said("probe: stopped leading", terms_ended + 1).await;
        frozen.until_said("fenced: ", fenced + 1).await;
        let history = probes.more(20).await;
        assert_eq!(writes_by_others(&history, before, other).len(), 0, "{history:?}");
        assert_eq!(successful_writes(&cluster, mark, frozen), 0);
        assert!(successful_writes(&cluster, mark, other) >= 20);
    }
    assert_eq!((one.terms(), two.terms()), (2, 1));
    probes.remove().await;
}

#[tokio::test]
async fn one_leader_after_an_api_server_outage() {
    let cluster = Cluster::builder().name("leadership").scheduler(false).kwok(false).boot().await.unwrap();
    let probes = Probes::new(&cluster, "leadership-outage").await;
    let (one, two) = leader_and_standby(&cluster, &probes, SHORT).await;
    // A stopped API server refuses connections; a frozen one accepts requests and may execute them much later.
    for frozen in [false, true] {
        let history = probes.more(1).await;
        let leads = |probe: &Probe| history.last().is_some_and(|last| last.identity == probe.identity);
        let (leader, standby) = if leads(&one) { (&one, &two) } else { (&two, &one) };
        let (terms_ended, gave_up) =
            (leader.said("probe: stopped leading"), standby.said("failed to take over the Lease"));
        if frozen {
            cluster.pause(Component::ApiServer).unwrap();
        } else {
            cluster.kill(Component::ApiServer).await.unwrap();
        }
        // The standby tries as soon as the Lease has expired by its own clock: by then, the leader has stopped.
        let mut acts = None;
        wait::eventually("the standby tries to take over", SOON, async || {
            let tries = standby.said("failed to take over the Lease") > gave_up;
            let stopped = leader.said("probe: stopped leading") > terms_ended;
            assert!(!tries || stopped, "the leader acted beyond its Lease");
            if stopped && acts.is_none() {
                acts = Some((leader.acts(), standby.acts()));
            }
            Ok(tries.then_some(()))
        })
        .await
        .unwrap();
        assert_eq!(Some((leader.acts(), standby.acts())), acts, "a probe acted without a Lease");

        let (before, terms) = (probes.history().len(), one.terms() + two.terms());
        if frozen {
            cluster.resume(Component::ApiServer).unwrap();
        } else {
            cluster.start(Component::ApiServer).await.unwrap();
        }
        let history = probes.more(40).await;
        let now = history.last().unwrap().identity.clone();
        // A write that the API server accepted before the outage may be executed after it.
        let after = history.iter().skip(before).skip_while(|write| write.identity == leader.identity);
        assert!(after.clone().all(|write| write.identity == now), "{history:?}");
        assert_eq!(one.terms() + two.terms(), terms + 1, "more than one has led since");
    }
    cluster.shutdown().await;
}

#[tokio::test]
async fn standby_takes_over_on_sigterm() {
    let cluster = shared().await;
    let probes = Probes::new(&cluster, "leadership-sigterm").await;
    // The default duration, so that the takeover cannot be due to an expired Lease.
    let (mut leader, mut next) = leader_and_standby(&cluster, &probes, 60).await;
    let mut gaps = Vec::new();
    for name in ["three", "four", "five"] {
        probes.more(5).await;
        let before = probes.history().len();
        leader.process.signal(Signal::TERM).unwrap();
        let history = probes.first_of(&next, before).await;
        let status = tokio::time::timeout(SOON, leader.process.exited()).await.unwrap();
        assert!(status.success(), "{status}");

        let (last, first) = (by(&history, &leader).pop().unwrap(), by(&history, &next)[0]);
        gaps.push(first.at - last.at);
        assert_eq!(writes_by_others(&history, before, &next).len(), 0, "{history:?}");
        let written: Vec<_> = by(&history, &leader).iter().map(|write| write.sequence).collect();
        assert_eq!(leader.wrote(), written, "a confirmed write is missing");
        leader = next;
        next = standby(&cluster, &probes, name, 60).await;
    }
    // A busy machine can delay one of them, but not for as long as the rest of the Lease.
    println!("hand-overs in {gaps:?}");
    assert!(gaps.iter().any(|gap| *gap < Duration::from_secs(2)), "{gaps:?}");
    assert!(gaps.iter().all(|gap| *gap < Duration::from_secs(20)), "{gaps:?}");
    probes.remove().await;
}

#[tokio::test]
async fn relabelled_or_deleted_lease_keeps_its_holder() {
    let cluster = shared().await;
    let probes = Probes::new(&cluster, "leadership-outsider").await;
    let (leader, standby) = leader_and_standby(&cluster, &probes, SHORT).await;
    let mark = cluster.requests_mark().unwrap();
    let leases: Api<Lease> = Api::namespaced(cluster.client().await.unwrap(), &probes.namespace);
    let renewed = |lease: &Lease| lease.spec.as_ref().unwrap().renew_time.clone();
    // The suffix is random, because identities must be unique.
    let holder = |lease: &Lease| {
        let holder = lease.spec.as_ref().unwrap().holder_identity.clone().unwrap_or_default();
        holder.rsplit_once('_').map(|(replica, _)| replica.to_owned())
    };

    for number in 0..3 {
        let patch = Patch::Merge(json!({"metadata": {"labels": {"number": number.to_string()}}}));
        let labelled = leases.patch(LEASE, &PatchParams::default(), &patch).await.unwrap();
        let later = wait::present(leases.clone(), LEASE, "is renewed", SOON, |lease| {
            renewed(lease) != renewed(&labelled)
        });
        let later = later.await.unwrap();
        assert_eq!(later.metadata.labels, labelled.metadata.labels);
        assert_eq!(holder(&later), Some(leader.identity.clone()));
    }

    for _ in 0..2 {
        let old = leases.get(LEASE).await.unwrap();
        leases.delete(LEASE, &DeleteParams::default()).await.unwrap();
        let made = wait::present(leases.clone(), LEASE, "is recreated", SOON, |lease| {
            lease.metadata.uid != old.metadata.uid
        });
        assert_eq!(holder(&made.await.unwrap()), Some(leader.identity.clone()));
    }

    // By now, the standby would have acquired a Lease that it considers expired.
    let since = Instant::now();
    let history = probes
        .until("a Lease duration has passed", |history| {
            history.last().is_some_and(|last| last.at > since + Duration::from_secs(SHORT + 1))
        })
        .await;
    assert!(history.iter().all(|write| write.identity == leader.identity), "{history:?}");
    assert_eq!((leader.terms(), standby.terms()), (1, 0));
    let requests = cluster.requests_since(mark).unwrap().by_user_agent(&standby.agent());
    assert_eq!(requests.count(), 0, "a standby only watches: {requests:?}");
    probes.remove().await;
}

#[tokio::test]
async fn candidate_names_the_missing_permission() {
    let cluster = shared().await;
    let probes = Probes::new(&cluster, "leadership-rights").await;
    let namespace = probes.namespace.as_str();
    let kubectl = async |args: &[&str]| {
        cluster.kubectl(&[&["-n", namespace], args].concat()).await.unwrap().success().unwrap()
    };
    kubectl(&["create", "serviceaccount", "probe"]).await;
    let grant = async |name: &str, verbs: &str, resource: &str| {
        let verb = format!("--verb={verbs}");
        let mut role = vec!["create", "role", name, &verb, "--resource", resource];
        if !verbs.contains("create") {
            role.extend(["--resource-name", LEASE]);
        }
        kubectl(&role).await;
        let account = format!("--serviceaccount={namespace}:probe");
        kubectl(&["create", "rolebinding", name, "--role", name, &account]).await;
    };
    grant("count", "get,create,update,patch", "configmaps").await;
    let account = cluster.service_account_kubeconfig(namespace, "probe").await.unwrap();
    let probe = probes.start_with(&account, "one", SHORT);
    probe.until_said("failed to watch the Lease", 1).await;
    probe.until_said(r#"cannot list resource \"leases\""#, 1).await;
    grant("hold", "list,watch,update", "leases").await;
    probe.until_said("failed to create the Lease", 1).await;
    probe.until_said(r#"cannot create resource \"leases\""#, 1).await;
    assert_eq!(probe.acts(), 0);
    grant("make", "create", "leases").await;
    probes.first_of(&probe, 0).await;
    // The permissions to renew and release are proven by use.
    probes.more(40).await;
    probe.process.signal(Signal::TERM).unwrap();
    assert!(tokio::time::timeout(SOON, probe.process.exited()).await.unwrap().success());
    let leases: Api<Lease> = Api::namespaced(cluster.client().await.unwrap(), namespace);
    let holder = leases.get(LEASE).await.unwrap().spec.unwrap().holder_identity;
    assert_eq!(holder.unwrap_or_default(), "");
    assert_eq!(probe.terms(), 1);
    probes.remove().await;
}
