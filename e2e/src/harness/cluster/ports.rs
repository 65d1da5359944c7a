//! Finds free loopback ports.

use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::net::TcpListener;
use std::ops::Range;

use anyhow::{Result, bail};

/// The ports of one control plane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    pub(super) etcd: u16,
    pub(super) etcd_peers: u16,
    pub(super) api_server: u16,
}

impl Ports {
    /// Three ports that are currently free. Another process may take one before it is used.
    pub(super) fn find() -> Result<Self> {
        let mut listeners = Vec::new();
        for _ in 0..10_000 {
            let port = random_port(range());
            // Held until all are found, so that they differ.
            if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)) {
                listeners.push((listener, port));
            }
            if let [(_, etcd), (_, etcd_peers), (_, api_server)] = *listeners.as_slice() {
                return Ok(Self { etcd, etcd_peers, api_server });
            }
        }
        bail!("no free ports on 127.0.0.1: is something holding thousands of them?")
    }
}

/// Below the range for outgoing connections. In that range, a client that retries to reach a stopped API server
/// eventually gets the server's own port, connects to itself and holds the port.
fn range() -> Range<u16> {
    const LOWEST: u16 = 10_000;
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let outgoing = text.split_whitespace().next().and_then(|low| low.parse().ok()).unwrap_or(32_768);
    if outgoing > LOWEST + 1_000 { LOWEST..outgoing } else { LOWEST..u16::MAX }
}

fn random_port(range: Range<u16>) -> u16 {
    // Every RandomState has new random keys, which is enough.
    let random = RandomState::new().hash_one(0) % u64::from(range.end - range.start);
    range.start + u16::try_from(random).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_differ_and_can_be_bound() {
        // Another process may take one of them first. A boot retries in this case.
        let bound = (0..10).any(|_| {
            let ports = Ports::find().unwrap();
            let all = [ports.etcd, ports.etcd_peers, ports.api_server];
            let differ = all.iter().collect::<std::collections::BTreeSet<_>>().len() == all.len();
            assert!(differ, "{all:?}");
            let listeners = all.map(|port| TcpListener::bind(("127.0.0.1", port)));
            listeners.iter().all(Result::is_ok)
        });
        assert!(bound, "another process took a port ten times");
    }
}
