//! How long one pod waits when there is no other work.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use kube::ResourceExt as _;

use super::{BenchEnv, LIMIT, NODES, node_of};
use crate::wait;

impl BenchEnv {
    /// Latencies from the taint to the deletion, in milliseconds.
    pub(super) async fn one_by_one(&self) -> Result<Vec<f64>> {
        let pods = self.pods(NODES).await?;
        let mark = self.cluster.requests_mark()?;
        for (number, pod) in pods.iter().enumerate() {
            self.taint(number..number + 1).await?;
            wait::gone(self.api(), &pod.name_any(), LIMIT).await?;
        }
        // The audit log may contain a request later than the watch delivers its result.
        let complete = wait::eventually("the audit log has all deletions", LIMIT, async || {
            let requests = self.cluster.requests_since(mark)?;
            let deletions = requests.verb("delete").resource("pods", "").code(200).count();
            Ok((deletions >= NODES).then_some(requests))
        });
        let requests = complete.await?;
        self.untaint().await?;
        let by_us = requests.by_user_agent("haulout-e2e").verb("patch").resource("nodes", "").code(200);
        let tainted: HashMap<_, _> = by_us.iter().map(|request| (&request.name, request.answered)).collect();
        let deleted = requests.verb("delete").resource("pods", "").code(200);
        let deleted: HashMap<_, _> = deleted.iter().map(|r| (r.name.clone(), r.answered)).collect();
        let waits: Vec<_> = pods
            .iter()
            .filter_map(|pod| {
                let (from, to) = (tainted.get(&node_of(pod))?, deleted.get(&pod.name_any())?);
                Some(to.duration_since(*from).as_secs_f64() * 1e3)
            })
            .collect();
        ensure!(waits.len() == NODES, "{} of {NODES} pods were deleted by their names", waits.len());
        Ok(waits)
    }
}
