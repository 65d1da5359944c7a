//! Which rights the chart's ServiceAccounts made use of, for the test that holds them against the chart's roles.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::handle::Handle;
use crate::service::NAMESPACE;

/// The folder in which a cluster that goes notes them, if it is to.
pub const ENV: &str = "HAULOUT_RIGHTS_USED";

/// A right as both sides write it, such as `maintenance-controller: patch nodes/status`.
pub fn line(service: &str, verb: &str, group: &str, resource: &str) -> String {
    let group = if group.is_empty() { String::new() } else { format!(" in {group}") };
    format!("{service}: {verb} {resource}{group}")
}

/// Notes what was done in this cluster, in a file that is called like the test.
pub(crate) fn note(cluster: &Handle) -> Result<()> {
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
    file.write_all(lines.into_iter().collect::<String>().as_bytes()).context("noting rights")
}

/// What a test has noted.
pub fn noted(folder: &Path, test: &str) -> Result<BTreeSet<String>> {
    let path = folder.join(test.replace("::", "-"));
    let read = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    Ok(read.lines().map(Into::into).collect())
}
