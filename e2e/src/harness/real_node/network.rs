//! Code of ours in another network namespace.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::mpsc;

use anyhow::{Context as _, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Runs a future on a separate thread in this network namespace. Returns as soon as the thread has entered it.
pub(super) fn run_in<F>(network: &Path, work: impl FnOnce() -> F + Send + 'static) -> Result<()>
where
    F: Future<Output = ()>,
{
    let what = || format!("failed to enter {}", network.display());
    let namespace = File::open(network).with_context(what)?;
    let (entered, answer) = mpsc::channel();
    // A separate thread, because entering a namespace affects the whole thread for good.
    std::thread::spawn(move || {
        let runtime = move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(io::Error::from)
            .and_then(|()| tokio::runtime::Builder::new_current_thread().enable_all().build());
        match runtime {
            Ok(runtime) => {
                // The caller waits for this.
                let _ = entered.send(Ok(()));
                runtime.block_on(work());
            }
            Err(error) => drop(entered.send(Err(error))),
        }
    });
    answer.recv().with_context(what)?.with_context(what)
}
