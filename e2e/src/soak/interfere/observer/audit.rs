//! The requests of our services, from the audit log of the API server. Only the audit log distinguishes an eviction
//! from a manual deletion.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use serde_json::Value;

use super::view::Read as _;

/// The prefix of our services' accounts.
const OURS: &str = "system:serviceaccount:haulout-system:haulout-";

/// A write request of one of our services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The service.
    pub service: String,
    pub verb: String,
    /// With its subresource, as in `pods/eviction`.
    pub resource: String,
    /// `namespace/name` or the name.
    pub key: String,
    pub code: i64,
    pub received: Timestamp,
    pub answered: Timestamp,
}

/// The audit log, from an offset on.
#[derive(Debug)]
pub struct Audit {
    path: PathBuf,
    offset: u64,
}

impl Audit {
    /// Starts at the current end.
    pub fn new(path: PathBuf) -> Result<Self> {
        let offset = path.metadata().with_context(|| format!("measuring {}", path.display()))?.len();
        Ok(Self { path, offset })
    }

    /// The requests since the last call.
    pub fn read(&mut self) -> Result<Vec<Request>> {
        let mut file = File::open(&self.path).with_context(|| format!("opening {}", self.path.display()))?;
        file.seek(SeekFrom::Start(self.offset)).context("finding the place in the audit log")?;
        let mut log = BufReader::new(file);
        let (mut requests, mut line) = (Vec::new(), String::new());
        loop {
            line.clear();
            let length = log.read_line(&mut line).context("reading the audit log")?;
            // A line without a newline is still being written.
            if !line.ends_with('\n') {
                return Ok(requests);
            }
            self.offset += length as u64;
            requests.extend(request(&line)?);
        }
    }
}

/// The request in a line, if it is an answered write request of ours.
pub fn request(line: &str) -> Result<Option<Request>> {
    if !line.contains(OURS) {
        return Ok(None);
    }
    let event: Value =
        serde_json::from_str(line).with_context(|| format!("reading an audit event: {line}"))?;
    let verb = event.text("/verb");
    let Some(service) = event.text("/user/username").strip_prefix(OURS) else { return Ok(None) };
    let writes = matches!(verb, "create" | "update" | "patch" | "delete" | "deletecollection");
    if event.text("/stage") != "ResponseComplete" || !writes {
        return Ok(None);
    }
    let part = |pointer: &str| event.text(pointer).to_owned();
    let join = |a: String, b: String| if a.is_empty() || b.is_empty() { a + &b } else { format!("{a}/{b}") };
    Ok(Some(Request {
        service: service.to_owned(),
        verb: verb.to_owned(),
        resource: join(part("/objectRef/resource"), part("/objectRef/subresource")),
        key: join(part("/objectRef/namespace"), part("/objectRef/name")),
        code: event.number("/responseStatus/code"),
        received: event.time("/requestReceivedTimestamp").unwrap_or_default(),
        answered: event.time("/stageTimestamp").unwrap_or_default(),
    }))
}
