//! Records which permissions the chart's ServiceAccounts used, for the test that compares them with the chart's roles.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::handle::Handle;
use crate::service::NAMESPACE;

/// Environment variable with the folder in which clusters record them on shutdown. Nothing is recorded without it.
pub const ENV: &str = "HAULOUT_RIGHTS_USED";

/// A permission in the format that both sides use, such as `maintenance-controller: patch nodes/status`.
pub fn line(service: &str, verb: &str, group: &str, resource: &str) -> String {
    let group = if group.is_empty() { String::new() } else { format!(" in {group}") };
    format!("{service}: {verb} {resource}{group}")
}

/// Records the permissions used in this cluster, in a file named after the test.
pub(crate) fn record(cluster: &Handle) -> Result<()> {
    let Some(folder) = std::env::var_os(ENV).map(PathBuf::from) else { return Ok(()) };
    let test = std::env::args().nth(1).unwrap_or_default().replace("::", "-");
    let path = folder.join(test);
    let prefix = format!("system:serviceaccount:{NAMESPACE}:haulout-");
    let mut lines = BTreeSet::new();
    for request in &cluster.requests()? {
        let Some(service) = request.user.strip_prefix(&prefix).filter(|_| request.allowed) else {
            continue;
        };
        let slash = if request.subresource.is_empty() { "" } else { "/" };
        let resource = format!("{}{slash}{}", request.resource, request.subresource);
        lines.insert(line(service, &request.verb, &request.group, &resource) + "\n");
    }
    let mut file = OpenOptions::new().create(true).append(true).open(&path);
    let file = file.as_mut().map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    file.write_all(lines.into_iter().collect::<String>().as_bytes()).context("failed to record permissions")
}

/// The permissions that a test has recorded.
pub fn recorded(folder: &Path, test: &str) -> Result<BTreeSet<String>> {
    let path = folder.join(test.replace("::", "-"));
    let read = fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
    Ok(read.lines().map(Into::into).collect())
}
