//! Accepts connections up to a limit. Beyond it, a new connection replaces one that is idle, so that idle and slow clients
//! cannot keep others out. `connections` decides which.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep, timeout_at};
use tracing::debug;

use super::connections::{Connections, Full, Id};

/// How many requests of a connection may wait for memory. Each checks again after every change. The limit is not one of
/// all connections, because the requests of one client would then reject those of others.
const MAX_WAITING: usize = 4;

/// The limits of a port.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Number of open connections.
    pub connections: usize,
    /// Bytes that all connections together may reserve with [`Connection::memory`].
    pub memory: usize,
    /// How long a client may refuse to receive anything.
    pub write: Duration,
}

/// Why the server closed a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseCause {
    /// A new connection needed its place.
    TooManyConnections,
    /// Another request needed its memory.
    TooMuchMemory,
    /// The client did not receive what was sent.
    WriteTimeout,
    /// It was open for too long.
    Timeout,
}

impl CloseCause {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            Self::TooManyConnections => "too_many_connections",
            Self::TooMuchMemory => "too_much_memory",
            Self::WriteTimeout => "write_timeout",
            Self::Timeout => "timeout",
        }
    }
}

#[derive(Debug)]
struct State {
    connections: Connections,
    causes: HashMap<Id, watch::Sender<Option<CloseCause>>>,
}

impl State {
    /// Closes a connection for another one. Returns the time at which to try again if nothing changes until then.
    fn make_room(&self, full: Full, cause: CloseCause) -> Option<Instant> {
        match full {
            Full::Close(id) => {
                self.close(id, cause);
                None
            }
            Full::Wait(until) => until.map(Instant::from_std),
        }
    }

    fn close(&self, id: Id, cause: CloseCause) {
        if let Some(sender) = self.causes.get(&id) {
            sender.send_if_modified(|known| {
                let first = known.is_none();
                *known = Some(known.unwrap_or(cause));
                first
            });
        }
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Something was released, or a connection became idle.
    changed: Notify,
}

/// A listener with a maximum number of open connections.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    shared: Arc<Shared>,
    write: Duration,
}

impl Listener {
    /// A listener with these limits.
    pub fn new(tcp: TcpListener, limits: ConnectionLimits) -> Self {
        let connections = Connections::new(limits.connections, limits.memory);
        let state = Mutex::new(State { connections, causes: HashMap::new() });
        let shared = Shared { state, changed: Notify::new() };
        Self { tcp, shared: Arc::new(shared), write: limits.write }
    }

    /// Accepts the next connection, and closes another one if there are too many.
    pub async fn next(&self) -> Stream {
        loop {
            match self.tcp.accept().await {
                Ok((tcp, peer)) => {
                    // An IPv4 client has an IPv6 address on a socket for both.
                    let connection = Connection::open(&self.shared, peer.ip().to_canonical()).await;
                    return Stream { tcp, connection, write: self.write, stalled: None };
                }
                // Wait before the next attempt: if no more files can be opened, an immediate retry fails too.
                Err(error) => {
                    debug!(%error, "failed to accept connection");
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// An open connection. It keeps its place until the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Connection(Arc<Place>);

#[derive(Debug)]
struct Place {
    shared: Arc<Shared>,
    id: Id,
    cause: watch::Receiver<Option<CloseCause>>,
    /// For requests that wait for memory.
    waiting: Semaphore,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.connections.remove(self.id);
        state.causes.remove(&self.id);
        drop(state);
        self.shared.changed.notify_waiters();
    }
}

impl Connection {
    async fn open(shared: &Arc<Shared>, peer: IpAddr) -> Self {
        loop {
            // Created before the check, so that no change is missed.
            let changed = shared.changed.notified();
            let until = {
                let mut state = shared.state.lock();
                match state.connections.open(peer, now()) {
                    Ok(id) => {
                        let (sender, cause) = watch::channel(None);
                        state.causes.insert(id, sender);
                        let waiting = Semaphore::new(MAX_WAITING);
                        return Self(Arc::new(Place { shared: Arc::clone(shared), id, cause, waiting }));
                    }
                    Err(full) => state.make_room(full, CloseCause::TooManyConnections),
                }
            };
            wait(changed, until).await;
        }
    }

    /// A connection without a socket and without others, for tests of request handlers.
    #[cfg(any(test, feature = "testing"))]
    pub async fn fake(memory: usize) -> Self {
        let connections = Connections::new(usize::MAX, memory);
        let state = Mutex::new(State { connections, causes: HashMap::new() });
        let shared = Shared { state, changed: Notify::new() };
        Self::open(&Arc::new(shared), std::net::Ipv4Addr::LOCALHOST.into()).await
    }

    /// Resolves when the connection has to be dropped at once.
    pub async fn closed(&self) -> CloseCause {
        let mut cause = self.0.cause.clone();
        // The sender lives as long as the connection.
        match cause.wait_for(Option::is_some).await.map(|cause| *cause) {
            Ok(Some(cause)) => cause,
            _ => std::future::pending().await,
        }
    }

    /// Why the connection has to be dropped, if it has to.
    pub fn close_cause(&self) -> Option<CloseCause> {
        *self.0.cause.borrow()
    }

    /// Closes the connection for this cause.
    pub fn close(&self, cause: CloseCause) {
        self.0.shared.state.lock().close(self.0.id, cause);
    }

    /// The client has sent the headers of a request.
    pub fn receives_request(&self) {
        self.0.shared.state.lock().connections.receives(self.0.id, now());
    }

    /// The connection is not idle until the returned value is dropped. Use this only while a complete request is processed.
    /// If it takes long, it can be closed all the same, for a client that needs less.
    pub fn work(&self) -> Work {
        self.0.shared.state.lock().connections.start_work(self.0.id, now());
        Work(self.clone())
    }

    /// Memory of this connection, at first none. Dropping it releases the memory.
    pub fn memory(&self) -> Memory {
        Memory { connection: self.clone(), bytes: 0 }
    }
}

/// A request that is being processed.
#[derive(Debug)]
pub struct Work(Connection);

impl Drop for Work {
    fn drop(&mut self) {
        let place = &self.0.0;
        place.shared.state.lock().connections.end_work(place.id, now());
        place.shared.changed.notify_waiters();
    }
}

/// Too many requests of the connection wait for memory already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory;

/// Reserved memory.
#[derive(Debug)]
pub struct Memory {
    connection: Connection,
    bytes: usize,
}

impl Memory {
    /// Reserves more if this is less than `bytes`. This can close another connection, or wait for it.
    pub async fn grow_to(&mut self, bytes: usize) -> Result<(), OutOfMemory> {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let (shared, id) = (&self.connection.0.shared, self.connection.0.id);
        let mut waiting = None;
        loop {
            let changed = shared.changed.notified();
            let until = {
                let mut state = shared.state.lock();
                match state.connections.reserve(id, more, now()) {
                    Ok(()) => {
                        self.bytes += more;
                        drop(state);
                        // This memory may be what another request has to wait for now.
                        shared.changed.notify_waiters();
                        return Ok(());
                    }
                    Err(full) => state.make_room(full, CloseCause::TooMuchMemory),
                }
            };
            if waiting.is_none() {
                waiting = Some(self.connection.0.waiting.try_acquire().map_err(|_| OutOfMemory)?);
            }
            wait(changed, until).await;
        }
    }

    /// Releases what is reserved beyond `bytes`.
    pub fn shrink_to(&mut self, bytes: usize) {
        let less = self.bytes.saturating_sub(bytes);
        if less > 0 {
            let place = &self.connection.0;
            place.shared.state.lock().connections.release(place.id, less);
            place.shared.changed.notify_waiters();
            self.bytes -= less;
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// The stream of a connection. Its client has to receive something within the write timeout.
#[derive(Debug)]
pub struct Stream {
    tcp: TcpStream,
    connection: Connection,
    write: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Stream {
    /// The connection.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// The socket.
    pub fn tcp(&self) -> &TcpStream {
        &self.tcp
    }

    /// Starts the timeout if the write has to wait.
    fn limit(
        &mut self,
        written: Poll<io::Result<usize>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.write;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(stalled.as_mut().poll(context));
        self.connection.close(CloseCause::WriteTimeout);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.connection.close_cause().is_some() {
            // With a reset, the kernel also drops what the client did not receive. If this fails, that takes longer.
            let _ = self.tcp.set_zero_linger();
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tcp).poll_write(context, bytes);
        self.limit(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tcp).poll_write_vectored(context, buffers);
        self.limit(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(context)
    }
}

/// Waits for a change, and no longer than until this time.
async fn wait(changed: Notified<'_>, until: Option<Instant>) {
    match until {
        // Whether it was notified does not matter.
        Some(until) => drop(timeout_at(until, changed).await),
        None => changed.await,
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}
