//! Groups of intersecting maintenances, and which maintenance each one ultimately waits for.

use std::collections::{BTreeMap, BTreeSet};

use fixedbitset::FixedBitSet;

use crate::planner::Id;

/// The groups of maintenances that intersect, directly or through others.
pub(crate) fn groups(
    ids: impl IntoIterator<Item = Id>,
    neighbours: impl IntoIterator<Item = (Id, Id)>,
) -> Vec<Vec<Id>> {
    let mut links: BTreeMap<Id, Vec<Id>> = ids.into_iter().map(|id| (id, Vec::new())).collect();
    for (a, b) in neighbours {
        links.entry(a).or_default().push(b);
        links.entry(b).or_default().push(a);
    }
    let mut visited = BTreeSet::new();
    let mut groups = Vec::new();
    for start in links.keys() {
        let mut group = Vec::new();
        let mut open = vec![*start];
        while let Some(id) = open.pop() {
            if visited.insert(id) {
                group.push(id);
                open.extend(links.get(&id).into_iter().flatten());
            }
        }
        if !group.is_empty() {
            groups.push(group);
        }
    }
    groups
}

/// A maintenance, whether pods that it has reached are leaving, and which maintenances limit it.
pub(crate) struct Waiter {
    pub id: Id,
    pub moves: bool,
    pub limiters: Vec<Id>,
}

/// For each maintenance, the maintenances that have to progress before it can.
///
/// - If no maintenance limits it: itself.
/// - Otherwise: the maintenances at the end of the chain of limiters.
/// - If the limiters form a cycle: those in the cycle whose pods are leaving.
/// - If none of them makes progress: its direct limiters. The planner breaks this tie later.
pub(crate) fn roots(waiters: &[Waiter]) -> Vec<(Id, Vec<Id>)> {
    let place: BTreeMap<Id, usize> =
        waiters.iter().enumerate().map(|(place, waiter)| (waiter.id, place)).collect();
    let limiters: Vec<FixedBitSet> = waiters
        .iter()
        .map(|waiter| {
            let mut limiters = FixedBitSet::with_capacity(waiters.len());
            limiters.extend(waiter.limiters.iter().filter_map(|id| place.get(id).copied()));
            limiters
        })
        .collect();
    let roots_of = |start: usize, waiter: &Waiter| -> Vec<Id> {
        let mut visited = FixedBitSet::with_capacity(waiters.len());
        visited.insert(start);
        let mut frontier = visited.clone();
        while !frontier.is_clear() {
            let mut next = FixedBitSet::with_capacity(waiters.len());
            for limiters in frontier.ones().filter_map(|place| limiters.get(place)) {
                next.union_with(limiters);
            }
            next.difference_with(&visited);
            visited.union_with(&next);
            frontier = next;
        }
        let reachable = || visited.ones().filter_map(|place| waiters.get(place));
        let ids =
            |found: &dyn Fn(&&Waiter) -> bool| reachable().filter(found).map(|waiter| waiter.id).collect();
        let ends: Vec<Id> = ids(&|waiter| waiter.limiters.is_empty());
        let movers: Vec<Id> = if ends.is_empty() { ids(&|waiter| waiter.moves) } else { ends };
        if movers.is_empty() { waiter.limiters.clone() } else { movers }
    };
    waiters.iter().enumerate().map(|(place, waiter)| (waiter.id, roots_of(place, waiter))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_transitive() {
        assert_eq!(groups([1, 2, 3, 4, 5], [(1, 2), (4, 2)]), [vec![1, 2, 4], vec![3], vec![5]]);
    }

    #[test]
    fn maintenance_waits_for_end_of_chain() {
        let waiter = |id, moves, limiters: &[Id]| Waiter { id, moves, limiters: limiters.into() };
        let cases: [(&[Waiter], &[Id]); 5] = [
            (&[waiter(1, true, &[])], &[1]),
            (&[waiter(1, true, &[2]), waiter(2, true, &[])], &[2]),
            (&[waiter(1, false, &[2]), waiter(2, false, &[3]), waiter(3, true, &[])], &[3]),
            (&[waiter(1, false, &[2]), waiter(2, true, &[3]), waiter(3, false, &[1])], &[2]),
            (&[waiter(1, false, &[2]), waiter(2, false, &[1])], &[2]),
        ];
        for (i, (waiters, expected)) in cases.iter().enumerate() {
            assert_eq!(roots(waiters)[0].1, *expected, "case {i}");
        }
    }
}
