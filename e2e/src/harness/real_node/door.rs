//! A way into a network of its own: what connects to a port on loopback here comes out at the same port on loopback
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

/// Dropping it closes it, with every connection through it.
#[derive(Debug)]
pub(crate) struct Door {
    _open: oneshot::Sender<()>,
}

impl Door {
    /// Opens a door to this network.
    pub(crate) fn open(port: u16, network: &Path) -> Result<Self> {
        let what = || format!("opening a door to port {port} in {}", network.display());
        let listener = TcpListener::bind(("127.0.0.1", port)).with_context(what)?;
        listener.set_nonblocking(true).with_context(what)?;
        let network = File::open(network).with_context(what)?;
        let (open, closed) = oneshot::channel();
        let (entered, answer) = mpsc::channel();
        // A thread of its own: it is the thread that changes networks, and stays there. Its listener remains in ours.
        std::thread::spawn(move || {
            let runtime = move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(std::io::Error::from)
                .and_then(|()| tokio::runtime::Builder::new_current_thread().enable_all().build());
            match runtime {
                Ok(runtime) => {
                    // Whoever asked for the door is waiting for this.
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

/// Passes connections on until it is dropped.
async fn pass(listener: TcpListener, port: u16) {
    let Ok(listener) = tokio::net::TcpListener::from_std(listener) else { return };
    // Only the loss of the loopback device would end this.
    while let Ok((mut here, _)) = listener.accept().await {
        tokio::spawn(async move {
            // Nobody listens there yet, or no longer: the connection is closed, and the client tries again.
            let Ok(mut there) = TcpStream::connect(("127.0.0.1", port)).await else { return };
            // Without it small messages wait for others; the connection works all the same.
            let _ = (here.set_nodelay(true), there.set_nodelay(true));
            // Either side may break off.
            let _ = copy_bidirectional(&mut here, &mut there).await;
        });
    }
}
