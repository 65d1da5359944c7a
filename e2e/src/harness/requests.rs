//! Counts requests to the API server from its audit log.
//!
//! The log is written in blocking mode: the event of a request is in the file before its answer is complete. A caller
//! that has read an answer finds its request in the log. (In batch mode it would appear up to 30 seconds later.) A
//! watch counts once, when it starts.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Seek as _, SeekFrom};

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use serde::Deserialize;

use crate::handle::Handle;

/// A position in the audit log.
#[derive(Clone, Copy, Debug)]
pub struct Mark(u64);

/// One request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub verb: String,
    /// The user.
    pub user: String,
    /// The user agent.
    pub user_agent: String,
    /// The API group, empty for the core group.
    pub group: String,
    /// The resource, such as `pods`; empty for requests like `/readyz`.
    pub resource: String,
    /// The subresource, such as `eviction`, or empty.
    pub subresource: String,
    /// The object's namespace, or empty.
    pub namespace: String,
    /// The object's name, or empty.
    pub name: String,
    /// The status code of the answer.
    pub code: u16,
    /// Whether the user was authorized.
    pub allowed: bool,
    /// When the API server received it.
    pub received: Timestamp,
    /// When its answer was complete or, for a watch, when it started.
    pub answered: Timestamp,
}

/// Requests that can be filtered and counted.
#[derive(Clone, Debug, Default)]
pub struct Requests(Vec<Request>);

impl Handle {
    /// The current end of the audit log. An error if the cluster has none.
    pub fn requests_mark(&self) -> Result<Mark> {
        let metadata =
            self.open_audit_log()?.metadata().context("failed to read the size of the audit log")?;
        Ok(Mark(metadata.len()))
    }

    /// All requests answered since the mark, by all users.
    pub fn requests_since(&self, mark: Mark) -> Result<Requests> {
        let mut file = BufReader::new(self.open_audit_log()?);
        if let Some(before) = mark.0.checked_sub(1) {
            // A line that was incomplete at the mark belongs to a request that was answered before.
            file.seek(SeekFrom::Start(before)).context("failed to find the mark in the audit log")?;
            file.skip_until(b'\n')
                .context("failed to find the first line after the mark in the audit log")?;
        }
        read(file)
    }

    /// All requests since the cluster was booted.
    pub fn requests(&self) -> Result<Requests> {
        self.requests_since(Mark(0))
    }

    fn open_audit_log(&self) -> Result<File> {
        let path = self.audit_log.as_ref().with_context(|| {
            format!("cluster {} was booted without an audit log: use audit(true)", self.name)
        })?;
        File::open(path).with_context(|| format!("failed to open the audit log {}", path.display()))
    }
}

impl Requests {
    /// Requests whose user agent has this prefix.
    #[must_use]
    pub fn by_user_agent(&self, prefix: &str) -> Self {
        self.only(|request| request.user_agent.starts_with(prefix))
    }

    /// Requests of this user. ServiceAccounts are called `system:serviceaccount:NAMESPACE:NAME`.
    #[must_use]
    pub fn by_user(&self, user: &str) -> Self {
        self.only(|request| request.user == user)
    }

    /// Requests with this verb.
    #[must_use]
    pub fn verb(&self, verb: &str) -> Self {
        self.only(|request| request.verb == verb)
    }

    /// Requests to this resource and subresource. An empty subresource is the object itself.
    #[must_use]
    pub fn resource(&self, resource: &str, subresource: &str) -> Self {
        self.only(|request| request.resource == resource && request.subresource == subresource)
    }

    /// Requests answered with this status code.
    #[must_use]
    pub fn code(&self, code: u16) -> Self {
        self.only(|request| request.code == code)
    }

    /// Requests that write.
    #[must_use]
    pub fn writes(&self) -> Self {
        self.only(|request| !matches!(request.verb.as_str(), "get" | "list" | "watch"))
    }

    /// Requests for which `keep` is true.
    #[must_use]
    pub fn only(&self, keep: impl Fn(&Request) -> bool) -> Self {
        Self(self.0.iter().filter(|request| keep(request)).cloned().collect())
    }

    /// The number of requests.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// All requests, in the order of their answers.
    pub fn iter(&self) -> std::slice::Iter<'_, Request> {
        self.0.iter()
    }
}

impl<'a> IntoIterator for &'a Requests {
    type Item = &'a Request;
    type IntoIter = std::slice::Iter<'a, Request>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// The fields of an audit event that are used.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Event {
    stage: String,
    verb: String,
    #[serde(default)]
    user: User,
    #[serde(default)]
    user_agent: String,
    #[serde(default)]
    object_ref: ObjectRef,
    #[serde(default)]
    response_status: ResponseStatus,
    #[serde(default)]
    annotations: Annotations,
    #[serde(default)]
    request_received_timestamp: Timestamp,
    #[serde(default)]
    stage_timestamp: Timestamp,
}

#[derive(Default, Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ObjectRef {
    api_group: String,
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
}

#[derive(Default, Deserialize)]
struct Annotations {
    #[serde(default, rename = "authorization.k8s.io/decision")]
    decision: String,
}

#[derive(Default, Deserialize)]
struct ResponseStatus {
    #[serde(default)]
    code: u16,
}

impl Event {
    /// The end of a watch. Its start was counted, so its end is not another request. A rejected watch never started.
    fn ends_a_watch(&self) -> bool {
        self.verb == "watch" && self.stage == "ResponseComplete" && self.response_status.code == 200
    }
}

impl From<Event> for Request {
    fn from(event: Event) -> Self {
        Self {
            verb: event.verb,
            user: event.user.username,
            user_agent: event.user_agent,
            group: event.object_ref.api_group,
            resource: event.object_ref.resource,
            subresource: event.object_ref.subresource,
            namespace: event.object_ref.namespace,
            name: event.object_ref.name,
            code: event.response_status.code,
            allowed: event.annotations.decision == "allow",
            received: event.request_received_timestamp,
            answered: event.stage_timestamp,
        }
    }
}

fn read(mut log: impl std::io::BufRead) -> Result<Requests> {
    let mut requests = Vec::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        log.read_until(b'\n', &mut line).context("failed to read the audit log")?;
        // An incomplete line is being written, so its request has not been answered.
        if line.last() != Some(&b'\n') {
            return Ok(Requests(requests));
        }
        let event: Event = serde_json::from_slice(&line)
            .with_context(|| format!("failed to read an audit event: {}", String::from_utf8_lossy(&line)))?;
        if !event.ends_a_watch() {
            requests.push(event.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = concat!(
        r#"{"kind":"Event","stage":"ResponseComplete","verb":"create","user":{"username":"admin"},"userAgent":"haulout-evacuation/1","objectRef":{"resource":"pods","namespace":"web","name":"web-1","subresource":"eviction","apiVersion":"v1"},"responseStatus":{"code":201},"requestReceivedTimestamp":"2026-11-16T06:00:00.250000Z","stageTimestamp":"2026-11-16T06:00:00.375000Z"}"#,
        "\n",
        r#"{"kind":"Event","stage":"ResponseStarted","verb":"watch","user":{"username":"kwok"},"userAgent":"kwok/v0","objectRef":{"resource":"pods","apiVersion":"v1"},"responseStatus":{"code":200}}"#,
        "\n",
        r#"{"kind":"Event","stage":"ResponseComplete","verb":"watch","user":{"username":"kwok"},"userAgent":"kwok/v0","objectRef":{"resource":"pods","apiVersion":"v1"},"responseStatus":{"code":200}}"#,
        "\n",
        r#"{"kind":"Event","stage":"ResponseComplete","verb":"watch","user":{"username":"alice"},"objectRef":{"resource":"pods","apiVersion":"v1"},"responseStatus":{"code":403}}"#,
        "\n",
        r#"{"kind":"Event","stage":"ResponseComplete","verb":"get","user":{"username":"system:anonymous"},"userAgent":"haulout-e2e","requestURI":"/readyz","responseStatus":{"code":200}}"#,
        "\n",
        r#"{"kind":"Event","stage":"Resp"#,
    );

    #[test]
    fn complete_requests_count_once() {
        let requests = read(LOG.as_bytes()).unwrap();
        assert_eq!(requests.count(), 4);
        assert_eq!(requests.verb("watch").count(), 2);
        assert_eq!(requests.verb("watch").code(403).by_user("alice").count(), 1);
    }

    #[test]
    fn request_filters_can_be_combined() {
        let requests = read(LOG.as_bytes()).unwrap();
        let ours = requests.by_user_agent("haulout-");
        assert_eq!(ours.count(), 2);
        assert_eq!(ours.writes().count(), 1);
        assert_eq!(ours.resource("pods", "eviction").code(201).count(), 1);
        assert_eq!(ours.resource("pods", "").count(), 0);
        assert_eq!(ours.iter().map(|request| request.name.as_str()).collect::<Vec<_>>(), ["web-1", ""]);
        let took = ours.iter().next().map(|request| request.answered.duration_since(request.received));
        assert_eq!(took, Some(jiff::SignedDuration::from_millis(125)));
    }

    #[test]
    fn invalid_audit_event_is_an_error() {
        assert!(read(&b"{}\n"[..]).is_err());
    }
}
