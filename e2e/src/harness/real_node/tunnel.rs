//! A tunnel into another network namespace: connections to a loopback port here are forwarded to the same loopback port
//! there.

use std::net::TcpListener;
use std::path::Path;

use anyhow::{Context as _, Result};
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::network;

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
        let (open, closed) = oneshot::channel();
        // The listener stays in our namespace.
        let pass = move || async move {
            tokio::select! {
                _ = closed => {}
                () = pass(listener, port) => {}
            }
        };
        network::run_in(network, pass).with_context(what)?;
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
