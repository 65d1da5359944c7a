use proptest::prelude::*;

use super::*;

const MIB: usize = 1 << 20;

fn address(last: u8) -> IpAddr {
    [10, 0, 0, last].into()
}

/// Opens one connection per address, a second apart, and returns the time of the next one.
fn opened(connections: &mut Connections, addresses: &[u8], start: Instant) -> Instant {
    let mut now = start;
    for last in addresses {
        connections.open(address(*last), now).unwrap();
        now += Duration::from_secs(1);
    }
    now
}

#[test]
fn longest_idle_of_the_largest_address_is_closed() {
    for (open, working, newcomer, closed) in [
        // All from one address.
        (vec![1, 1, 1, 1], vec![], 1, Full::Close(0)),
        (vec![1, 1, 1, 1], vec![], 2, Full::Close(0)),
        (vec![1, 1, 1, 1], vec![0, 2], 2, Full::Close(1)),
        // The address with most connections, and not the one that is idle longest.
        (vec![2, 1, 1, 1], vec![], 2, Full::Close(1)),
        (vec![2, 1, 1, 1], vec![1], 2, Full::Close(2)),
        // The address with most is busy: the next one.
        (vec![2, 1, 1, 1], vec![1, 2, 3], 3, Full::Close(0)),
        (vec![1, 1, 2, 2, 3], vec![0, 1], 4, Full::Close(2)),
        // An address cannot take the only connection of another one, also if all of its own are busy.
        (vec![2, 1, 1, 1], vec![1, 2, 3], 1, Full::Wait(None)),
        (vec![1, 2, 3, 4], vec![], 4, Full::Close(3)),
        (vec![1, 2, 3, 4], vec![], 5, Full::Close(0)),
        // Everything is busy, and nobody has more than the newcomer.
        (vec![1, 1, 2, 2], vec![0, 1, 2, 3], 1, Full::Wait(None)),
        (vec![1, 2], vec![0, 1], 3, Full::Wait(None)),
    ] {
        let mut connections = Connections::new(open.len(), 0);
        let now = opened(&mut connections, &open, Instant::now());
        for id in &working {
            connections.start_work(*id, now);
        }
        assert_eq!(connections.open(address(newcomer), now), Err(closed), "{open:?} {working:?} {newcomer}");
    }
}

#[test]
fn place_is_free_when_the_closed_connection_is_removed() {
    let mut connections = Connections::new(2, 0);
    let now = opened(&mut connections, &[1, 1], Instant::now());
    assert_eq!(connections.open(address(2), now), Err(Full::Close(0)));
    assert_eq!(connections.open(address(2), now), Err(Full::Wait(None)), "one is enough");
    connections.remove(0);
    assert_eq!(connections.open(address(2), now), Ok(2));
}

#[test]
fn idle_time_starts_when_the_last_request_ends() {
    let mut connections = Connections::new(2, 0);
    let now = opened(&mut connections, &[1, 1], Instant::now());
    connections.start_work(0, now);
    connections.start_work(0, now);
    connections.end_work(0, now);
    assert_eq!(connections.open(address(2), now), Err(Full::Close(1)), "one request remains");
    connections.remove(1);
    connections.open(address(1), now).unwrap();
    connections.end_work(0, now + Duration::from_secs(1));
    assert_eq!(connections.open(address(2), now), Err(Full::Close(2)), "0 became idle later");
}

#[test]
fn connection_that_was_useful_is_closed_last_of_its_address() {
    let mut connections = Connections::new(3, 0);
    let now = opened(&mut connections, &[1, 1, 2], Instant::now());
    connections.start_work(0, now);
    connections.end_work(0, now);
    let later = now + Duration::from_secs(9);
    connections.receives(1, later);
    assert_eq!(
        connections.open(address(1), later),
        Err(Full::Close(1)),
        "although it is idle since a shorter time"
    );
    connections.remove(1);
    connections.open(address(1), later).unwrap();
    connections.start_work(3, later);
    assert_eq!(connections.open(address(3), later), Err(Full::Close(0)), "no other one is idle");
}

#[test]
fn request_that_takes_long_is_closed_for_an_address_with_less() {
    let start = Instant::now();
    let mut connections = Connections::new(4, 0);
    opened(&mut connections, &[1, 1, 1, 2], start);
    let seconds = |seconds| start + Duration::from_secs(seconds);
    for (id, since) in [(0, 10), (1, 9), (2, 11), (3, 5)] {
        connections.start_work(id, seconds(since));
    }
    // Another request of a busy connection does not make it younger.
    connections.start_work(1, seconds(12));
    let soon = start + Duration::from_millis(9_500);
    assert_eq!(connections.open(address(3), soon), Err(Full::Wait(Some(seconds(10)))));
    assert_eq!(connections.open(address(1), seconds(99)), Err(Full::Wait(None)), "others have less");
    assert_eq!(connections.open(address(3), seconds(20)), Err(Full::Close(1)), "of the address with most");
    connections.remove(1);
    connections.open(address(3), seconds(20)).unwrap();
    assert_eq!(connections.open(address(4), seconds(20)), Err(Full::Close(4)), "idle ones first");
}

#[test]
fn memory_is_taken_from_the_address_that_holds_most() {
    let (short, long) = (Duration::from_millis(10), Duration::from_secs(10));
    let start = Instant::now();
    let later = Full::Wait(Some(start + MEMORY_GRACE));
    for (held, working, requester, age, expected) in [
        // Enough is free.
        (vec![(1, 3), (2, 4)], vec![], 3, short, Ok(())),
        // Another address holds more: at once, and the one that holds it longest.
        (vec![(1, 5), (1, 4), (2, 1)], vec![], 3, short, Err(Full::Close(0))),
        (vec![(1, 5), (1, 4), (2, 1)], vec![0], 3, short, Err(Full::Close(1))),
        (vec![(1, 5), (1, 4), (2, 1)], vec![0, 1], 3, short, Err(later)),
        // Requests in progress, which take long, and then only of an address that holds more.
        (vec![(1, 5), (1, 4), (2, 1)], vec![0, 1], 3, long, Err(Full::Close(0))),
        (vec![(1, 3), (2, 3), (3, 3)], vec![0, 1], 3, long, Err(Full::Close(2))),
        (vec![(1, 3), (2, 3), (3, 3)], vec![0, 1, 2], 3, long, Err(Full::Wait(None))),
        // The others hold as much or less, and the address itself: only after a while.
        (vec![(3, 4), (1, 3), (2, 3)], vec![], 3, short, Err(later)),
        (vec![(3, 4), (1, 3), (2, 3)], vec![], 3, long, Err(Full::Close(0))),
        (vec![(1, 2), (2, 3), (4, 2), (5, 3)], vec![], 3, long, Err(Full::Close(1))),
    ] {
        let mut connections = Connections::new(10, 10 * MIB);
        for (last, mib) in &held {
            let id = connections.open(address(*last), start).unwrap();
            connections.reserve(id, mib * MIB, start).unwrap();
        }
        for id in &working {
            connections.start_work(*id, start);
        }
        let id = connections.open(address(requester), start).unwrap();
        assert_eq!(connections.reserve(id, 3 * MIB, start + age), expected, "{held:?} {working:?} {age:?}");
    }
}

#[test]
fn requester_waits_for_own_memory_and_closing_connections() {
    let start = Instant::now();
    let later = start + Duration::from_secs(10);
    let mut connections = Connections::new(10, 10 * MIB);
    let own = connections.open(address(1), start).unwrap();
    connections.reserve(own, 10 * MIB, start).unwrap();
    assert_eq!(connections.reserve(own, 1, later), Err(Full::Wait(None)));
    let other = connections.open(address(2), start).unwrap();
    assert_eq!(connections.reserve(other, MIB, later), Err(Full::Close(own)));
    let third = connections.open(address(3), start).unwrap();
    assert_eq!(connections.reserve(third, MIB, later), Err(Full::Wait(None)), "what is released is enough");
    connections.release(own, 10 * MIB);
    connections.remove(own);
    assert_eq!(connections.reserve(other, MIB, later), Ok(()));
    assert_eq!(connections.reserve(third, MIB, later), Ok(()));
}

#[derive(Clone, Debug)]
enum Step {
    Open(u8),
    Work(usize),
    Rest(usize),
    Leave(usize),
    Reserve(usize, usize),
    Release(usize),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..5_u8).prop_map(Step::Open),
        3 => any::<usize>().prop_map(Step::Work),
        2 => any::<usize>().prop_map(Step::Rest),
        1 => any::<usize>().prop_map(Step::Leave),
        3 => (any::<usize>(), 1..6_usize).prop_map(|(index, units)| Step::Reserve(index, units)),
        1 => any::<usize>().prop_map(Step::Release),
    ]
}

proptest! {
    #[test]
    fn limits_hold_and_slow_or_idle_connections_are_closed(steps in prop::collection::vec(any_step(), 1..200)) {
        const MAX: usize = 12;
        const MEMORY: usize = 20;
        let mut connections = Connections::new(MAX, MEMORY);
        let mut now = Instant::now();
        for step in steps {
            now += Duration::from_millis(100);
            let before: Vec<_> = connections.open.iter().map(|(id, open)| (*id, copy(open))).collect();
            let pick = |index: usize| before.get(index % before.len().max(1)).map(|(id, _)| *id);
            match step {
                Step::Open(last) => match connections.open(address(last), now) {
                    Ok(_) => prop_assert!(before.len() < MAX),
                    Err(Full::Close(id)) => {
                        let (first, closed) = first_to_close(&before, address(last), now).unwrap();
                        prop_assert_eq!(id, first);
                        connections.release(id, closed.memory);
                        connections.remove(id);
                        prop_assert!(connections.open(address(last), now).is_ok(), "the newcomer is served");
                    }
                    Err(Full::Wait(until)) => {
                        let closable = |at| first_to_close(&before, address(last), at).is_some();
                        let right = !closable(now) && until.is_none_or(|until| until > now && closable(until));
                        prop_assert!(right || before.iter().any(|(_, open)| open.closing));
                    }
                },
                Step::Work(index) => pick(index).into_iter().for_each(|id| connections.start_work(id, now)),
                Step::Rest(index) => pick(index).into_iter().for_each(|id| connections.end_work(id, now)),
                Step::Leave(index) | Step::Release(index) => {
                    if let Some(id) = pick(index) {
                        let memory = connections.open[&id].memory;
                        connections.release(id, memory);
                        if matches!(step, Step::Leave(_)) {
                            connections.remove(id);
                        }
                    }
                }
                Step::Reserve(index, units) => {
                    if let Some(id) = pick(index)
                        && let Err(Full::Close(other)) = connections.reserve(id, units, now)
                    {
                        let (_, closed) = before.iter().find(|(known, _)| *known == other).unwrap();
                        prop_assert!(other != id && !closed.closing && closed.memory > 0);
                        if closed.working > 0 {
                            let held = |peer| -> usize {
                                let open = before.iter().map(|(_, open)| open);
                                open.filter(|open| open.peer == peer && !open.closing).map(|open| open.memory).sum()
                            };
                            prop_assert!(now >= closed.working_since + WORK_GRACE);
                            prop_assert!(held(closed.peer) > held(connections.open[&id].peer) + units);
                        }
                        let memory = closed.memory;
                        connections.release(other, memory);
                        connections.remove(other);
                    }
                }
            }
            prop_assert!(connections.open.len() <= MAX);
            prop_assert!(connections.memory <= MEMORY);
            prop_assert_eq!(connections.memory, connections.open.values().map(|open| open.memory).sum::<usize>());
        }
    }
}

fn copy(open: &Connection) -> Connection {
    Connection { ..*open }
}

/// The same rule, written in another way.
fn first_to_close(before: &[(Id, Connection)], newcomer: IpAddr, now: Instant) -> Option<(Id, &Connection)> {
    let count = |address: IpAddr| {
        before.iter().filter(|(_, open)| open.peer == address).count() + usize::from(address == newcomer)
    };
    let idle: Vec<_> = before
        .iter()
        .filter(|(_, open)| open.working == 0 && count(open.peer) >= count(newcomer))
        .map(|(id, open)| (*id, open, open.idle_since))
        .collect();
    let slow = before
        .iter()
        .filter(|(_, open)| open.working > 0 && count(open.peer) > count(newcomer))
        .filter(|(_, open)| open.working_since + WORK_GRACE <= now)
        .map(|(id, open)| (*id, open, open.working_since));
    let mut candidates = if idle.is_empty() { slow.collect() } else { idle };
    let most = candidates.iter().map(|(_, open, _)| count(open.peer)).max()?;
    candidates.retain(|(_, open, _)| count(open.peer) == most);
    let (id, open, _) = candidates.into_iter().min_by_key(|(id, open, since)| (open.served, *since, *id))?;
    Some((id, open))
}
