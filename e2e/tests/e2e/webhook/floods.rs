//! Thousands of idle and slow connections to both ports of the real binary. Meanwhile probes and the API server are
//! served, and memory stays flat.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use futures::{StreamExt as _, stream};
use haulout_api_types::NodeMaintenance;
use haulout_e2e::service::Service;
use haulout_e2e::{Webhook, webhook};
use http_body_util::StreamBody;
use hyper::body::{Bytes, Frame};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::Api;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::{SOON, ask, cluster, connector};

/// How long a probe may take. The kubelet restarts a pod after three failures of one second. The flood runs on the same
/// processors.
const PROBE: Duration = Duration::from_secs(3);
/// Bytes by which the webhook's memory may grow: 64 MiB, and half of that for TLS and small frames (docs/security.md).
const GROWTH: f64 = 96.0 * 1024.0 * 1024.0;
/// How often a slow client sends one more byte.
const DRIP: Duration = Duration::from_secs(1);
/// How often everything is checked after all clients are connected.
const CHECKS: usize = 5;

/// What a client sends before it sends nothing, or one byte now and then.
#[derive(Clone, Copy, Debug)]
enum Client {
    /// Nothing.
    Idle,
    /// Part of the headers.
    Headers,
    /// A whole request. It does not receive the response.
    Unread,
    /// Part of a ClientHello.
    Handshake,
    /// Part of the headers, encrypted.
    EncryptedHeaders,
    /// Part of the body, encrypted.
    Body,
}

/// The clients of one flood: 2,000 idle and 2,000 slow ones on each port.
const PROBES_AND_METRICS: [(Client, usize); 3] =
    [(Client::Idle, 2000), (Client::Headers, 1000), (Client::Unread, 1000)];
const ADMISSION: [(Client, usize); 4] =
    [(Client::Idle, 2000), (Client::Handshake, 1000), (Client::EncryptedHeaders, 500), (Client::Body, 500)];

const PART_OF_HEADERS: &[u8] = b"POST /validate/pods HTTP/1.1\r\nhost: x\r\nx-";
const PART_OF_BODY: &[u8] =
    b"POST /validate/pods?timeout=30s HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n{";

impl Client {
    /// Runs until it is aborted.
    async fn run(
        self,
        source: Ipv4Addr,
        target: SocketAddr,
        tls: TlsConnector,
        connected: watch::Sender<usize>,
    ) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((source, 0).into()).unwrap();
        if matches!(self, Self::Unread) {
            socket.set_recv_buffer_size(4096).unwrap();
        }
        // The server may close the connection at any time.
        let count = || connected.send_modify(|count| *count += 1);
        let Ok(stream) = socket.connect(target).await else { return count() };
        let (first, encrypted): (&[u8], _) = match self {
            Self::Idle => (b"", false),
            Self::Headers => (b"GET /liv", false),
            Self::Unread => (b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", false),
            Self::Handshake => (&[0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc], false),
            Self::EncryptedHeaders => (PART_OF_HEADERS, true),
            Self::Body => (PART_OF_BODY, true),
        };
        let drips = !matches!(self, Self::Idle | Self::Unread);
        if !encrypted {
            return send(stream, first, drips, count).await;
        }
        match tls.connect(ServerName::try_from(webhook::HOST).unwrap(), stream).await {
            Ok(stream) => send(stream, first, drips, count).await,
            Err(_) => count(),
        }
    }
}

/// Sends this and, if it `drips`, one more byte now and then.
async fn send(mut stream: impl AsyncWrite + Unpin, first: &[u8], drips: bool, connected: impl FnOnce()) {
    let sent = stream.write_all(first).await;
    connected();
    while drips && sent.is_ok() {
        tokio::time::sleep(DRIP).await;
        if stream.write_all(b"x").await.and(stream.flush().await).is_err() {
            break;
        }
    }
    std::future::pending::<()>().await;
}

struct Setup {
    replica: Service,
    maintenances: Api<NodeMaintenance>,
    before: f64,
}

/// The slowest and largest that was measured.
#[derive(Debug, Default)]
struct Measured {
    checks: usize,
    probe: Duration,
    admission: Duration,
    growth: f64,
}

impl Setup {
    /// Probes are answered, the API server gets a verdict within its timeout, and memory has not grown.
    async fn check(&self, measured: &mut Measured) {
        for path in ["/livez", "/readyz"] {
            let begun = Instant::now();
            let answer = tokio::time::timeout(PROBE, self.replica.get(path)).await;
            let answer = answer.unwrap_or_else(|_| panic!("no answer to {path}: {measured:?}")).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer:?} {measured:?}");
            measured.probe = measured.probe.max(begun.elapsed());
        }
        let begun = Instant::now();
        ask(&self.maintenances).await.unwrap_or_else(|error| panic!("{error}: {measured:?}"));
        measured.admission = measured.admission.max(begun.elapsed());
        measured.growth = measured.growth.max(self.replica.resident_bytes().unwrap() - self.before);
        assert!(measured.growth <= GROWTH, "{measured:?}");
        measured.checks += 1;
    }

    /// Checks while the clients connect, and a few times more.
    async fn check_during(&self, mut clients: JoinSet<()>, connected: &watch::Sender<usize>) -> Measured {
        let (all, begun, mut measured) = (clients.len(), Instant::now(), Measured::default());
        while *connected.borrow() < all {
            assert!(begun.elapsed() < SOON, "{} of {all} are connected", *connected.borrow());
            self.check(&mut measured).await;
        }
        for _ in 0..CHECKS {
            self.check(&mut measured).await;
        }
        assert!(self.replica.try_wait().is_none(), "it still runs");
        clients.shutdown().await;
        measured
    }
}

/// As many files as this process may open.
fn raise_file_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_some_and(|current| current < 6_000) {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    }
    let enough = getrlimit(Resource::Nofile).current.is_none_or(|current| current >= 6_000);
    assert!(enough, "this test needs 6,000 open files: raise the limit with `ulimit -Hn`");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_floods_affect_nobody_else() {
    raise_file_limit();
    let cluster = cluster("webhook-floods").await;
    let (_webhook, replica) = Webhook::with_replica(&cluster).await.unwrap();
    let maintenances: Api<NodeMaintenance> = Api::all(cluster.client().await.unwrap());
    let metrics: SocketAddr = replica.address().await.unwrap().parse().unwrap();
    let admission = webhook::address(&replica).unwrap();
    let (http1, http2) = (connector(&cluster, "http/1.1").await, connector(&cluster, "h2").await);
    for _ in 0..20 {
        ask(&maintenances).await.unwrap();
    }
    let before = replica.resident_bytes().unwrap();
    let setup = Setup { replica, maintenances, before };

    // The API server and the probes have the address of the first flood.
    let fifty: Vec<_> = (1..=50).map(|last| Ipv4Addr::new(127, 0, 1, last)).collect();
    for addresses in [vec![Ipv4Addr::LOCALHOST], fifty] {
        for (target, kinds) in [(metrics, PROBES_AND_METRICS.as_slice()), (admission, &ADMISSION)] {
            let (mut clients, connected) = (JoinSet::new(), watch::Sender::new(0));
            for (client, count) in kinds {
                for number in 0..*count {
                    let source = addresses[number % addresses.len()];
                    clients.spawn(client.run(source, target, http1.clone(), connected.clone()));
                }
            }
            let measured = setup.check_during(clients, &connected).await;
            println!("{} addresses, {kinds:?}: {measured:?}", addresses.len());
        }
    }

    let (mut clients, connected) = (JoinSet::new(), watch::Sender::new(0));
    for _ in 0..300 {
        clients.spawn(fill_windows(admission, http2.clone(), connected.clone()));
    }
    let measured = setup.check_during(clients, &connected).await;
    println!("HTTP/2 windows: {measured:?}");
    for (name, cause) in [
        ("haulout_http_connections_closed_total", "too_many_connections"),
        ("haulout_admission_connections_closed_total", "too_many_connections"),
        ("haulout_admission_connections_closed_total", "too_much_memory"),
    ] {
        let closed = setup.replica.metric_where(name, &format!("cause=\"{cause}\"")).await.unwrap();
        assert!(closed > 0.0, "{name} {cause}");
    }
    drop(setup);
    cluster.shutdown().await;
}

/// Sends as much of a large body as the server's windows allow, and not its last byte.
async fn fill_windows(target: SocketAddr, tls: TlsConnector, connected: watch::Sender<usize>) {
    let stream = TcpStream::connect(target).await.unwrap();
    let stream = tls.connect(ServerName::try_from(webhook::HOST).unwrap(), stream).await;
    connected.send_modify(|count| *count += 1);
    let Ok(stream) = stream else { return };
    let Ok((mut sender, connection)) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await
    else {
        return;
    };
    let piece = || Ok::<_, Infallible>(Frame::data(Bytes::from_static(&[b' '; 16 << 10])));
    let body = stream::repeat_with(piece).take(511).chain(stream::pending());
    let request = http::Request::post("https://127.0.0.1/validate/pods?timeout=30s");
    let request = request.body(StreamBody::new(body)).unwrap();
    // However they end, the client has done what it can.
    let _ = tokio::join!(connection, sender.send_request(request));
}
