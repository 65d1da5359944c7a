//! A TCP forwarder on loopback, in place of a Service with kube-proxy.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Forwards connections to its backends in rotation and skips those that refuse. Dropping it stops it.
#[derive(Debug)]
pub struct Forwarder {
    address: SocketAddr,
    backends: Arc<Mutex<Vec<SocketAddr>>>,
    connections: Arc<Mutex<Vec<Weak<Connection>>>>,
    task: JoinHandle<()>,
}

/// A connection that is being forwarded.
#[derive(Debug, Default)]
pub struct Connection {
    received: AtomicU64,
    held: watch::Sender<bool>,
}

impl Connection {
    /// How many bytes the backend has sent.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Holds back data from the backend, or releases it. The client observes a slow connection.
    pub fn hold(&self, held: bool) {
        self.held.send_replace(held);
    }
}

impl Forwarder {
    /// Listens on its own port. Connections are closed until there is a backend.
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("failed to listen on loopback")?;
        let address = listener.local_addr().context("failed to listen on loopback")?;
        let backends = Arc::<Mutex<Vec<SocketAddr>>>::default();
        let connections = Arc::<Mutex<Vec<Weak<Connection>>>>::default();
        let task = tokio::spawn(accept(listener, Arc::clone(&backends), Arc::clone(&connections)));
        Ok(Self { address, backends, connections, task })
    }

    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Adds a backend for new connections.
    pub fn add(&self, backend: SocketAddr) {
        lock(&self.backends).push(backend);
    }

    /// The connections that are open, oldest first.
    pub fn connections(&self) -> Vec<Arc<Connection>> {
        lock(&self.connections).iter().filter_map(Weak::upgrade).collect()
    }

    /// Removes a backend for new connections.
    pub fn remove(&self, backend: SocketAddr) {
        lock(&self.backends).retain(|known| *known != backend);
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    backends: Arc<Mutex<Vec<SocketAddr>>>,
    connections: Arc<Mutex<Vec<Weak<Connection>>>>,
) {
    let mut turn = 0_usize;
    // Only the loss of the loopback device would make this fail.
    while let Ok((client, _)) = listener.accept().await {
        let mut backends = lock(&backends).clone();
        if !backends.is_empty() {
            turn = turn.wrapping_add(1);
            let first = turn % backends.len();
            backends.rotate_left(first);
        }
        // Parts of requests should not wait for each other. If this fails, they do.
        let _ = client.set_nodelay(true);
        let connection = Arc::<Connection>::default();
        let mut open = lock(&connections);
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&connection));
        drop(open);
        tokio::spawn(forward(client, backends, connection));
    }
}

async fn forward(client: TcpStream, backends: Vec<SocketAddr>, connection: Arc<Connection>) {
    for backend in backends {
        if let Ok(server) = TcpStream::connect(backend).await {
            let _ = server.set_nodelay(true);
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            // However it ends, both sides are informed.
            let _ =
                tokio::try_join!(send(from_client, to_server), deliver(from_server, to_client, &connection));
            return;
        }
    }
}

async fn send(mut from: tcp::OwnedReadHalf, mut to: tcp::OwnedWriteHalf) -> io::Result<()> {
    copy(&mut from, &mut to).await?;
    to.shutdown().await
}

async fn deliver(
    mut from: tcp::OwnedReadHalf,
    mut to: tcp::OwnedWriteHalf,
    connection: &Connection,
) -> io::Result<()> {
    let mut held = connection.held.subscribe();
    let mut buffer = vec![0; 16 << 10];
    loop {
        let count = from.read(&mut buffer).await?;
        let Some(some) = buffer.get(..count).filter(|some| !some.is_empty()) else {
            return to.shutdown().await;
        };
        connection.received.fetch_add(u64::try_from(count).unwrap_or_default(), Ordering::Relaxed);
        // The sender is in the connection.
        let _ = held.wait_for(|held| !held).await;
        to.write_all(some).await?;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_rotate_and_skip_refusing_backends() {
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
        let request = async || {
            let mut answer = String::new();
            let mut stream = TcpStream::connect(forwarder.address()).await.unwrap();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let mut both = [request().await, request().await];
        both.sort();
        assert_eq!(both, ["a", "b"]);
        let dead = servers.remove(0);
        dead.abort();
        // Its listener is dropped with it.
        let _ = dead.await;
        assert_eq!([request().await, request().await], ["b", "b"]);
    }

    #[tokio::test]
    async fn held_data_is_delivered_later() {
        let forwarder = Forwarder::start().await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        forwarder.add(listener.local_addr().unwrap());
        let mut client = TcpStream::connect(forwarder.address()).await.unwrap();
        let (mut server, _) = listener.accept().await.unwrap();
        let connection = forwarder.connections().remove(0);
        connection.hold(true);
        server.write_all(b"late").await.unwrap();
        drop(server);
        while connection.received() < 4 {
            tokio::task::yield_now().await;
        }
        assert_eq!(client.try_read(&mut [0; 4]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        connection.hold(false);
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer, "late");
    }
}
