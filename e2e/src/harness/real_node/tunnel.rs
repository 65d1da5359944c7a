//! A tunnel into another network namespace: connections to a loopback port here are forwarded to the same loopback port
//! there.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::sync::mpsc;

use anyhow::{Context as _, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::os::fd::AsFd as _;
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

/// A tunnel. Dropping it closes all of its connections.
#[derive(Debug)]
pub(crate) struct Tunnel {
    _open: oneshot::Sender<()>,
}

impl Tunnel {
    /// Opens a tunnel to this network namespace.
    pub(crate) fn open(port: u16, network: &Path) -> Result<Self> {
        let what = || format!("failed to open a tunnel to port {port} in {}", network.display());
        let listener = TcpListener::bind(("127.0.0.1", port)).with_context(what)?;
        listener.set_nonblocking(true).with_context(what)?;
        let network = File::open(network).with_context(what)?;
        let (open, closed) = oneshot::channel();
        let (entered, answer) = mpsc::channel();
        // A separate thread, because entering a namespace affects the whole thread for good. The listener stays in
        // ours.
        std::thread::spawn(move || {
            let runtime = move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(std::io::Error::from)
                .and_then(|()| tokio::runtime::Builder::new_current_thread().enable_all().build());
            match runtime {
                Ok(runtime) => {
                    // The caller waits for this.
                    let _ = entered.send(Ok(()));
                    runtime.block_on(async {
                        tokio::select! {
                            _ = closed => {}
                            () = pass(listener, port) => {}
                        }
                    });
                }
                Err(error) => drop(entered.send(Err(error))),
            }
        });
        answer.recv().with_context(what)?.with_context(what)?;
        Ok(Self { _open: open })
    }
}

/// Forwards connections until it is dropped.
async fn pass(listener: TcpListener, port: u16) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    // Only the loss of the loopback device would make this fail.
    while let Ok((mut here, _)) = listener.accept().await {
        tokio::spawn(async move {
            // If nothing listens there, the connection is closed and the client retries.
            let Ok(mut there) = TcpStream::connect(("127.0.0.1", port)).await else { return };
            // Without it, small messages are delayed, but the connection works.
            let _ = (here.set_nodelay(true), there.set_nodelay(true));
            // Either side may close the connection.
            let _ = copy_bidirectional(&mut here, &mut there).await;
        });
    }
}
