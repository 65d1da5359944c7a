//! Requests with streamed answers, without the copies that kube's own methods make.

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body as _;
use kube::Client;
use kube::client::Body;
use thiserror::Error;
use tokio::time::timeout;

use super::object::Status;

/// Timeout for the start of an answer, and between two chunks of a list.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// Why objects could not be listed or watched.
#[derive(Debug, Error)]
pub enum Error {
    /// The request or the connection failed.
    #[error("request failed: {0}")]
    Client(#[from] Box<kube::Error>),
    /// The API server rejected the request.
    #[error("API server answered {code}: {message}")]
    Rejected {
        /// The HTTP status.
        code: u16,
        /// The message of the API server.
        message: String,
    },
    /// The API server sent nothing for this long.
    #[error("API server sent nothing for {}s", .0.as_secs())]
    TimedOut(Duration),
    /// The API server no longer has the events after the known version.
    #[error("resourceVersion expired: {0}")]
    Expired(String),
    /// The API server closed the watch immediately.
    #[error("API server closed the watch immediately")]
    Closed,
    /// The answer is not valid JSON.
    #[error("failed to parse the answer of the API server: {0}")]
    Json(#[from] serde_json::Error),
    /// The list has no version, so that no watch can continue from it.
    #[error("API server sent a list without a resourceVersion")]
    NoVersion,
}

impl Error {
    pub(crate) fn rejected(code: u16, message: Option<&str>) -> Self {
        let message = message.unwrap_or("no message").to_owned();
        match code {
            410 => Self::Expired(message),
            _ => Self::Rejected { code, message },
        }
    }
}

/// A request built by kube.
pub(crate) type Request = Result<http::Request<Vec<u8>>, kube::core::request::Error>;

/// Sends a request, and returns the body of a successful answer.
pub(crate) async fn open(client: &Client, request: Request) -> Result<Body, Error> {
    let request = request.map_err(|error| Box::new(kube::Error::BuildRequest(error)))?;
    let answer = timeout(RESPONSE_TIMEOUT, client.send(request.map(Body::from))).await;
    let answer = answer.map_err(|_| Error::TimedOut(RESPONSE_TIMEOUT))?.map_err(Box::new)?;
    let (status, mut body) = (answer.status(), answer.into_body());
    if status.is_success() {
        return Ok(body);
    }
    let mut text = Vec::new();
    read(&mut body, &mut text).await?;
    // An answer that is not a Status, for example of a proxy, has no message.
    let status_body = serde_json::from_slice::<Status<'_>>(&text).unwrap_or_default();
    Err(Error::rejected(status.as_u16(), status_body.message.get()))
}

/// Appends the whole body to the buffer.
pub(crate) async fn read(body: &mut Body, buffer: &mut Vec<u8>) -> Result<(), Error> {
    loop {
        match timeout(RESPONSE_TIMEOUT, data(body)).await {
            Ok(Some(data)) => buffer.extend_from_slice(&data?),
            Ok(None) => return Ok(()),
            Err(_) => return Err(Error::TimedOut(RESPONSE_TIMEOUT)),
        }
    }
}

/// The next chunk of a body; `None` at its end.
pub(crate) async fn data(body: &mut Body) -> Option<Result<Bytes, Error>> {
    loop {
        match std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await? {
            Ok(frame) => {
                // Trailers are ignored.
                if let Ok(data) = frame.into_data() {
                    return Some(Ok(data));
                }
            }
            Err(error) => return Some(Err(Box::new(error).into())),
        }
    }
}

/// Splits chunks into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    buffer: Vec<u8>,
    /// The buffer is consumed up to this index.
    consumed: usize,
    /// The unconsumed part has no line break before this index.
    searched: usize,
}

/// Capacity that a buffer keeps after a burst.
const KEPT_CAPACITY: usize = 64 * 1024;

impl Lines {
    /// Adds a chunk.
    pub(crate) fn push(&mut self, piece: &[u8]) {
        self.buffer.drain(..self.consumed);
        self.searched -= self.consumed;
        self.consumed = 0;
        self.buffer.shrink_to(KEPT_CAPACITY);
        self.buffer.extend_from_slice(piece);
    }

    /// The next complete line, without its line break.
    pub(crate) fn next(&mut self) -> Option<&[u8]> {
        let end = self.buffer.get(self.searched..)?.iter().position(|byte| *byte == b'\n');
        let Some(end) = end else {
            self.searched = self.buffer.len();
            return None;
        };
        let line = self.consumed..self.searched + end;
        self.consumed = line.end + 1;
        self.searched = self.consumed;
        self.buffer.get(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_reassembled_from_any_chunks() {
        let text = b"one\ntwo\n\nfour\nno end";
        for size in 1..=text.len() {
            let mut lines = Lines::default();
            let mut found = Vec::new();
            for piece in text.chunks(size) {
                lines.push(piece);
                while let Some(line) = lines.next() {
                    found.push(String::from_utf8(line.to_vec()).unwrap());
                }
            }
            assert_eq!(found, ["one", "two", "", "four"], "in pieces of {size}");
        }
    }

    #[test]
    fn buffer_shrinks_after_a_burst() {
        let mut lines = Lines::default();
        lines.push(&vec![b'\n'; 1_000_000]);
        while lines.next().is_some() {}
        lines.push(b"x");
        assert!(lines.buffer.capacity() <= 2 * KEPT_CAPACITY, "{}", lines.buffer.capacity());
    }
}
