//! A TCP forwarder on loopback: what a Service is in a cluster with kube-proxy.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, Result};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Passes connections on to its backends in turn, past those that refuse. Dropping it ends it.
#[derive(Debug)]
pub struct Forwarder {
    address: SocketAddr,
    backends: Arc<Mutex<Vec<SocketAddr>>>,
    task: JoinHandle<()>,
}

impl Forwarder {
    /// Listens on a port of its own, with no backends yet: until there is one, connections are closed.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listening on loopback")?;
        let address = listener.local_addr().context("listening on loopback")?;
        let backends = Arc::<Mutex<Vec<SocketAddr>>>::default();
        let task = tokio::spawn(accept(listener, Arc::clone(&backends)));
        Ok(Self { address, backends, task })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Passes new connections on to this one, too.
    pub fn add(&self, backend: SocketAddr) {
        lock(&self.backends).push(backend);
    }

    /// Passes no new connections on to this one.
    pub fn remove(&self, backend: SocketAddr) {
        lock(&self.backends).retain(|known| *known != backend);
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, backends: Arc<Mutex<Vec<SocketAddr>>>) {
    let mut turn = 0_usize;
    // Only the loss of the loopback device would end this.
    while let Ok((client, _)) = listener.accept().await {
        let mut backends = lock(&backends).clone();
        if !backends.is_empty() {
            turn = turn.wrapping_add(1);
            let first = turn % backends.len();
            backends.rotate_left(first);
        }
        // Pieces of requests are not to wait for each other; if that fails, they do.
        let _ = client.set_nodelay(true);
        tokio::spawn(forward(client, backends));
    }
}

async fn forward(mut client: TcpStream, backends: Vec<SocketAddr>) {
    for backend in backends {
        if let Ok(mut server) = TcpStream::connect(backend).await {
            let _ = server.set_nodelay(true);
            // However it ends, both sides have seen it.
            let _ = copy_bidirectional(&mut client, &mut server).await;
            return;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn connections_go_in_turn_and_past_those_that_refuse() {
        let forwarder = Forwarder::start().await.unwrap();
        let mut servers = Vec::new();
        for name in ["a", "b"] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            forwarder.add(listener.local_addr().unwrap());
            servers.push(tokio::spawn(async move {
                while let Ok((mut client, _)) = listener.accept().await {
                    client.write_all(name.as_bytes()).await.unwrap();
                }
            }));
        }
        let ask = async || {
            let mut answer = String::new();
            let mut stream = TcpStream::connect(forwarder.address()).await.unwrap();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let mut both = [ask().await, ask().await];
        both.sort();
        assert_eq!(both, ["a", "b"]);
        let dead = servers.remove(0);
        dead.abort();
        // Its listener is dropped with it.
        let _ = dead.await;
        assert_eq!([ask().await, ask().await], ["b", "b"]);
    }
}
