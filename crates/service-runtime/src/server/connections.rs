//! Decides which connection is closed when there are too many or when they hold too much memory: one of the address that
//! uses most. No sockets and no clock; `listener` acts on it.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// How long a connection may hold memory that clients with as much or more of it need.
const MEMORY_GRACE: Duration = Duration::from_secs(1);
/// How long a request may be processed while clients with less need its place or its memory. Usually it takes milliseconds.
const WORK_GRACE: Duration = Duration::from_secs(1);

/// Identifies a connection. Later connections have larger ones.
pub(super) type Id = u64;

/// What a connection that needs a place or memory has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// Close this connection, and wait until it is removed.
    Close(Id),
    /// Wait for any change: all other connections are in use, or one is already being closed. At this time, one in use can
    /// be closed.
    Wait(Option<Instant>),
}

#[derive(Debug)]
struct Connection {
    peer: IpAddr,
    /// Number of complete requests that are being processed. The client is responsible for any other wait.
    working: usize,
    /// Whether a request has been processed. Among the connections of one address, such a one is closed last: an API
    /// server keeps its connections, although idle and slow clients share its address.
    served: bool,
    idle_since: Instant,
    working_since: Instant,
    memory: usize,
    memory_since: Instant,
    closing: bool,
}

/// When a connection may be closed for another one.
struct Closable {
    /// Whether no complete request is lost. Such connections are closed first.
    unused: bool,
    /// Of one address, the earliest is closed first.
    since: Instant,
    /// Not before this time.
    from: Instant,
}

/// The open connections of a port.
#[derive(Debug)]
pub(super) struct Connections {
    max_connections: usize,
    max_memory: usize,
    next: Id,
    open: BTreeMap<Id, Connection>,
    memory: usize,
}

impl Connections {
    pub(super) fn new(max_connections: usize, max_memory: usize) -> Self {
        Self { max_connections, max_memory, next: 0, open: BTreeMap::new(), memory: 0 }
    }

    /// Adds a connection. If there is no place for it, the longest idle connection of the address with most connections
    /// is closed. API servers can share an address, so no address has a limit of its own. The new connection counts for
    /// its address, so that an address with many connections cannot close the only one of another address. If no
    /// connection is idle, a request that takes long is closed, of an address with more connections.
    pub(super) fn open(&mut self, peer: IpAddr, now: Instant) -> Result<Id, Full> {
        if self.open.len() < self.max_connections {
            let id = self.next;
            self.next += 1;
            let connection = Connection {
                peer,
                working: 0,
                served: false,
                idle_since: now,
                working_since: now,
                memory: 0,
                memory_since: now,
                closing: false,
            };
            self.open.insert(id, connection);
            return Ok(id);
        }
        if self.open.values().any(|connection| connection.closing) {
            return Err(Full::Wait(None));
        }
        let closable = |_, open: &Connection, holds: Ordering| match open.working {
            0 => (holds != Ordering::Less).then_some(Closable {
                unused: true,
                since: open.idle_since,
                from: now,
            }),
            _ => open.closable_while_working(holds),
        };
        Err(self.close_one((peer, 1), |_| 1, closable, now))
    }

    /// Removes a connection. Its memory has been released.
    pub(super) fn remove(&mut self, id: Id) {
        self.open.remove(&id);
    }

    /// The connection has a complete request, and is not idle until it has been processed.
    pub(super) fn start_work(&mut self, id: Id, now: Instant) {
        if let Some(connection) = self.open.get_mut(&id) {
            if connection.working == 0 {
                connection.working_since = now;
            }
            connection.working += 1;
        }
    }

    /// The client has sent the headers of a request. If the connection is idle, it is so only since now.
    pub(super) fn receives(&mut self, id: Id, now: Instant) {
        if let Some(connection) = self.open.get_mut(&id) {
            connection.idle_since = now;
        }
    }

    /// A request has been processed. The connection is idle if it was the last one.
    pub(super) fn end_work(&mut self, id: Id, now: Instant) {
        if let Some(connection) = self.open.get_mut(&id) {
            connection.working = connection.working.saturating_sub(1);
            connection.served = true;
            connection.idle_since = now;
        }
    }

    /// Reserves memory for a connection. If there is not enough, a connection of the address that holds most is closed:
    /// the one that has held memory for the longest time. It is closed only if its address holds more than the
    /// requesting one, or if it has held memory for a while, so that concurrent large requests of one client normally
    /// wait for each other. A request in progress is closed only if it takes long, for an address that holds less.
    pub(super) fn reserve(&mut self, id: Id, bytes: usize, now: Instant) -> Result<(), Full> {
        let free = self.max_memory.saturating_sub(self.memory);
        let Some(connection) = self.open.get_mut(&id) else { return Err(Full::Wait(None)) };
        if bytes <= free {
            if connection.memory == 0 {
                connection.memory_since = now;
            }
            connection.memory += bytes;
            self.memory += bytes;
            return Ok(());
        }
        let peer = connection.peer;
        let closing: usize =
            self.open.values().filter(|open| open.closing).map(|closing| closing.memory).sum();
        if bytes <= free + closing {
            return Err(Full::Wait(None));
        }
        let closable = |other, open: &Connection, holds| {
            if other == id || open.memory == 0 {
                return None;
            }
            if open.working > 0 {
                return open.closable_while_working(holds);
            }
            // After a request, the client has time to receive the response.
            let over = open.memory_since.max(open.idle_since) + MEMORY_GRACE;
            let from = if holds == Ordering::Greater { now } else { over };
            Some(Closable { unused: false, since: open.memory_since, from })
        };
        Err(self.close_one((peer, bytes), |open| open.memory, closable, now))
    }

    /// Releases memory of a connection.
    pub(super) fn release(&mut self, id: Id, bytes: usize) {
        self.memory = self.memory.saturating_sub(bytes);
        if let Some(connection) = self.open.get_mut(&id) {
            connection.memory = connection.memory.saturating_sub(bytes);
        }
    }

    /// Closes a connection that `closable` allows: an unused one if there is one, then of the address with the largest
    /// amount, then the one with the earliest time. `closable` gets the connection and how its address compares to that
    /// of the newcomer, which is an address and the amount that it needs. Linear in the number of connections, which
    /// takes microseconds.
    fn close_one(
        &mut self,
        newcomer: (IpAddr, usize),
        amount: impl Fn(&Connection) -> usize,
        closable: impl Fn(Id, &Connection, Ordering) -> Option<Closable>,
        now: Instant,
    ) -> Full {
        let (address, needed) = newcomer;
        let mut totals = HashMap::from([(address, needed)]);
        for open in self.open.values().filter(|open| !open.closing) {
            *totals.entry(open.peer).or_default() += amount(open);
        }
        let total = |address| totals.get(&address).copied().unwrap_or_default();
        let (mut chosen, mut until) = (None, None);
        for (id, open) in self.open.iter().filter(|(_, open)| !open.closing) {
            let holds = total(open.peer);
            let Some(Closable { unused, since, from }) = closable(*id, open, holds.cmp(&total(address)))
            else {
                continue;
            };
            if from <= now {
                let rank = (unused, holds, !open.served, Reverse(since), Reverse(*id));
                chosen = chosen.max(Some(rank));
            } else {
                until = Some(until.map_or(from, |until: Instant| until.min(from)));
            }
        }
        let Some((.., Reverse(id))) = chosen else { return Full::Wait(until) };
        if let Some(chosen) = self.open.get_mut(&id) {
            chosen.closing = true;
        }
        Full::Close(id)
    }
}

impl Connection {
    /// A request in progress is lost only to an address with less, and only if it takes long. With complete requests that
    /// take long, an attacker could otherwise keep everybody out.
    fn closable_while_working(&self, holds: Ordering) -> Option<Closable> {
        let since = self.working_since;
        (holds == Ordering::Greater).then_some(Closable { unused: false, since, from: since + WORK_GRACE })
    }
}

#[cfg(test)]
mod tests;
