//! Reloads mounted files. The kubelet updates them by swapping a symbolic link above them, which a file watch would
//! miss. Therefore the files are read every few seconds and compared.

use std::convert::Infallible;
use std::fmt::Display;
use std::time::Duration;

use tracing::{info, warn};

const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Reads every few seconds, and loads what differs from `last`. What cannot be read or loaded is logged, and what was
/// loaded before stays in use.
pub async fn reload<T: PartialEq, E: Display>(
    what: &str,
    mut last: T,
    read: impl AsyncFn() -> Result<T, E>,
    load: impl Fn(&T) -> Result<(), E>,
) -> Infallible {
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let loaded = match read().await {
            Ok(found) if found == last => continue,
            Ok(found) => {
                info!("{what} files changed");
                let loaded = load(&found);
                // Invalid contents are logged once, not at every poll.
                last = found;
                loaded
            }
            Err(error) => Err(error),
        };
        if let Err(error) = loaded {
            warn!(%error, "failed to load the new {what}; keeping the previous one");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_changed_and_readable_content_is_loaded() {
        let polls =
            RefCell::new(vec![Ok("a"), Ok("b"), Err("gone"), Ok("invalid"), Ok("invalid"), Ok("c"), Ok("c")]);
        let loaded = RefCell::new(Vec::new());
        let read = async || {
            let next = if polls.borrow().is_empty() { None } else { Some(polls.borrow_mut().remove(0)) };
            match next {
                Some(next) => next,
                None => std::future::pending().await,
            }
        };
        let load = |content: &&'static str| {
            loaded.borrow_mut().push(*content);
            if *content == "invalid" { Err("invalid") } else { Ok(()) }
        };
        let ended = tokio::time::timeout(Duration::from_secs(3600), reload("file", "a", read, load)).await;
        assert!(ended.is_err() && polls.borrow().is_empty());
        assert_eq!(loaded.into_inner(), ["b", "invalid", "c"]);
    }
}
