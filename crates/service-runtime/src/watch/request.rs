//! Requests whose answers are read as they come, without the copies that kube's own methods make.

use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body as _;
use kube::Client;
use kube::client::Body;
use thiserror::Error;
use tokio::time::timeout;

use super::object::Status;

/// How long the API server may take to begin an answer, and to go on with a list.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why objects could not be listed or watched.
#[derive(Debug, Error)]
pub enum Error {
    /// The request could not be made, or the connection broke.
    #[error("the request failed: {0}")]
    Client(#[from] Box<kube::Error>),
    /// The API server refused.
    #[error("the API server answered {code}: {message}")]
    Refused {
        /// The HTTP status.
        code: u16,
        /// What it said.
        message: String,
    },
    /// The API server was silent.
    #[error("the API server was silent for {} s", .0.as_secs())]
    Silent(Duration),
    /// The API server does not remember what came after the version that we know.
    #[error("the resourceVersion has expired: {0}")]
    Expired(String),
    /// The API server closed a watch before it had begun.
    #[error("the API server closed the watch at once")]
    Closed,
    /// The answer is no JSON.
    #[error("the API server's answer cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// A list without a version, from which no watch can go on.
    #[error("the API server sent a list without a resourceVersion")]
    NoVersion,
}

impl Error {
    pub(crate) fn refused(code: u16, message: Option<&str>) -> Self {
        let message = message.unwrap_or("it did not say why").to_owned();
        match code {
            410 => Self::Expired(message),
            _ => Self::Refused { code, message },
        }
    }
}

/// A request as kube makes them.
pub(crate) type Request = Result<http::Request<Vec<u8>>, kube::core::request::Error>;

/// Sends a request and waits for the beginning of a good answer.
pub(crate) async fn open(client: &Client, request: Request) -> Result<Body, Error> {
    let request = request.map_err(|error| Box::new(kube::Error::BuildRequest(error)))?;
    let answer = timeout(PATIENCE, client.send(request.map(Body::from))).await;
    let answer = answer.map_err(|_| Error::Silent(PATIENCE))?.map_err(Box::new)?;
    let (status, mut body) = (answer.status(), answer.into_body());
    if status.is_success() {
        return Ok(body);
    }
    let mut text = Vec::new();
    read(&mut body, &mut text).await?;
    // What is no Status, from a proxy on the way perhaps, has no message.
    let said = serde_json::from_slice::<Status<'_>>(&text).unwrap_or_default();
    Err(Error::refused(status.as_u16(), said.message.get()))
}

/// Appends the whole body to the buffer.
pub(crate) async fn read(body: &mut Body, buffer: &mut Vec<u8>) -> Result<(), Error> {
    loop {
        match timeout(PATIENCE, data(body)).await {
            Ok(Some(data)) => buffer.extend_from_slice(&data?),
            Ok(None) => return Ok(()),
            Err(_) => return Err(Error::Silent(PATIENCE)),
        }
    }
}

/// The next piece of a body; `None` at its end.
pub(crate) async fn data(body: &mut Body) -> Option<Result<Bytes, Error>> {
    loop {
        match std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await? {
            Ok(frame) => {
                // Trailers tell us nothing.
                if let Ok(data) = frame.into_data() {
                    return Some(Ok(data));
                }
            }
            Err(error) => return Some(Err(Box::new(error).into())),
        }
    }
}

/// Cuts what comes in pieces into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    buffer: Vec<u8>,
    /// Up to here the buffer has been given out.
    given: usize,
    /// Up to here the buffer has no end of a line.
    searched: usize,
}

/// What a quiet watch may keep of the space that a burst needed.
const KEPT_CAPACITY: usize = 64 * 1024;

impl Lines {
    /// Adds a piece.
    pub(crate) fn push(&mut self, piece: &[u8]) {
        self.buffer.drain(..self.given);
        self.searched -= self.given;
        self.given = 0;
        self.buffer.shrink_to(KEPT_CAPACITY);
        self.buffer.extend_from_slice(piece);
    }

    /// The next whole line, without its end.
    pub(crate) fn next(&mut self) -> Option<&[u8]> {
        let end = self.buffer.get(self.searched..)?.iter().position(|byte| *byte == b'\n');
        let Some(end) = end else {
            self.searched = self.buffer.len();
            return None;
        };
        let line = self.given..self.searched + end;
        self.given = line.end + 1;
        self.searched = self.given;
        self.buffer.get(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_however_they_are_cut() {
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
    fn the_space_of_a_burst_is_given_back() {
        let mut lines = Lines::default();
        lines.push(&vec![b'\n'; 1_000_000]);
        while lines.next().is_some() {}
        lines.push(b"x");
        assert!(lines.buffer.capacity() <= 2 * KEPT_CAPACITY, "{}", lines.buffer.capacity());
    }
}
