//! A test server and its clients.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use haulout_service_runtime::metrics::Metrics as ServiceMetrics;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion};
use rustls_pki_types::pem::PemObject as _;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::args::ClientArgs;
use crate::decide::Verdict;
use crate::metrics::Metrics;
use crate::review::{Admit, Hook, Request};
use crate::server::tls::Tls;
use crate::server::{Limits, Server};

/// Deadline for everything that must happen.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Behaves as the namespace of the object says.
pub struct FakeRules(watch::Sender<Vec<String>>);

impl Admit for FakeRules {
    async fn admit(&self, _: Hook, request: Request, _: Duration) -> Verdict {
        let namespace = request.namespace.unwrap_or_default();
        self.0.send_modify(|asked| asked.push(namespace.clone()));
        match namespace.as_str() {
            "panics" => panic!("requested by the test"),
            "sleeps" => tokio::time::sleep(Duration::from_millis(300)).await,
            namespace if namespace.starts_with("hangs") => std::future::pending().await,
            _ => {}
        }
        Verdict::default()
    }
}

/// A review of a pod in this namespace.
pub fn review(namespace: &str) -> Bytes {
    let review = json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "kind": {"version": "v1", "kind": "Pod"},
            "resource": {"version": "v1", "resource": "pods"},
            "namespace": namespace,
            "operation": "CREATE"
        }
    });
    Bytes::from(review.to_string())
}

/// A certificate with its key.
pub type Identity = (CertificateDer<'static>, PrivateKeyDer<'static>);

/// A certificate authority.
pub struct Authority {
    params: CertificateParams,
    key: KeyPair,
    pub pem: String,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { params, key, pem }
    }

    pub fn client(&self, name: &str) -> Identity {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Identity {
        let key = KeyPair::generate().unwrap();
        let issuer = Issuer::from_params(&self.params, &self.key);
        let certificate = params.signed_by(&key, &issuer).unwrap();
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        (certificate.der().clone(), key)
    }
}

/// A running server.
pub struct Setup {
    pub address: SocketAddr,
    pub stop: CancellationToken,
    pub served: JoinHandle<()>,
    pub metrics: ServiceMetrics,
    pub tls: Tls,
    asked: watch::Receiver<Vec<String>>,
    roots: Arc<RootCertStore>,
}

impl Setup {
    pub async fn start(limits: Limits) -> Self {
        Self::start_for(limits, None).await
    }

    /// With a CA for clients and the accepted names.
    pub async fn start_for(limits: Limits, clients: Option<(&Authority, &[&str])>) -> Self {
        let authority = Authority::new();
        let (certificate, key) = authority.sign(CertificateParams::new(vec!["127.0.0.1".into()]).unwrap());
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
        let provider = ring::default_provider();
        let key = CertifiedKey::from_der(vec![certificate], key, &provider).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let clients = clients.map(|(authority, names)| {
            let file = folder.path().join("ca.crt");
            std::fs::write(&file, &authority.pem).unwrap();
            let client_names = names.iter().map(|name| (*name).to_owned()).collect();
            ClientArgs { client_ca: Some(file), client_names }
        });
        let tls = Tls::load(Arc::new(SingleCertAndKey::from(key)), &clients.unwrap_or_default()).unwrap();
        let metrics = ServiceMetrics::new("test", "1");
        let (sender, asked) = watch::channel(Vec::new());
        let server = Server::new(FakeRules(sender), tls.clone(), limits, Metrics::new(&metrics));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let end = tokio::spawn(server.serve(listener, stop.clone()));
        Self { address, stop, served: end, metrics, tls, asked, roots: Arc::new(roots) }
    }

    /// Waits until the rules have received an object in this namespace.
    pub async fn asked(&self, namespace: &str) {
        let known = |asked: &Vec<String>| asked.iter().any(|known| known == namespace);
        tokio::time::timeout(TIMEOUT, self.asked.clone().wait_for(known)).await.unwrap().unwrap();
    }

    /// Waits until this many connections have been closed for this cause.
    pub async fn closed(&self, cause: &str, times: u64) {
        let line = format!("haulout_admission_connections_closed_total{{cause=\"{cause}\"}} {times}\n");
        let counted = async {
            while !self.metrics.encode().unwrap().contains(&line) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let counted = tokio::time::timeout(TIMEOUT, counted).await;
        counted.unwrap_or_else(|_| panic!("{line} is not in\n{}", self.metrics.encode().unwrap()));
    }

    /// A TLS connection without any request.
    pub async fn connect(
        &self,
        version: &'static SupportedProtocolVersion,
        protocol: &str,
        identity: Option<Identity>,
    ) -> io::Result<TlsStream<TcpStream>> {
        self.connect_from(Ipv4Addr::LOCALHOST, version, protocol, identity).await
    }

    /// The same from this address.
    pub async fn connect_from(
        &self,
        source: Ipv4Addr,
        version: &'static SupportedProtocolVersion,
        protocol: &str,
        identity: Option<Identity>,
    ) -> io::Result<TlsStream<TcpStream>> {
        let provider = Arc::new(ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(Arc::clone(&self.roots));
        let mut config = match identity {
            Some((certificate, key)) => config.with_client_auth_cert(vec![certificate], key).unwrap(),
            None => config.with_no_client_auth(),
        };
        config.alpn_protocols = vec![protocol.into()];
        let socket = TcpSocket::new_v4()?;
        socket.bind((source, 0).into())?;
        let stream = socket.connect(self.address).await?;
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(protocol.as_bytes()));
        Ok(stream)
    }

    /// An HTTP client.
    pub async fn client(
        &self,
        version: &'static SupportedProtocolVersion,
        protocol: &str,
        identity: Option<Identity>,
    ) -> io::Result<Client> {
        self.client_from(Ipv4Addr::LOCALHOST, version, protocol, identity).await
    }

    /// The same from this address.
    pub async fn client_from(
        &self,
        source: Ipv4Addr,
        version: &'static SupportedProtocolVersion,
        protocol: &str,
        identity: Option<Identity>,
    ) -> io::Result<Client> {
        let io = TokioIo::new(self.connect_from(source, version, protocol, identity).await?);
        Ok(if protocol == "h2" {
            let (sender, connection) =
                http2::handshake(TokioExecutor::new(), io).await.map_err(io::Error::other)?;
            tokio::spawn(connection);
            Client::Two(sender)
        } else {
            let (sender, connection) = http1::handshake(io).await.map_err(io::Error::other)?;
            tokio::spawn(connection);
            Client::One(Arc::new(tokio::sync::Mutex::new(sender)))
        })
    }
}

/// A client for HTTP/1.1 or HTTP/2.
#[derive(Clone)]
pub enum Client {
    One(Arc<tokio::sync::Mutex<http1::SendRequest<Full<Bytes>>>>),
    Two(http2::SendRequest<Full<Bytes>>),
}

impl Client {
    /// Returns the status code and the response.
    pub async fn post(&mut self, path: &str, body: Bytes) -> hyper::Result<(u16, Value)> {
        let request = http::Request::post(path).header("host", "127.0.0.1").body(Full::new(body)).unwrap();
        let response: http::Response<Incoming> = match self {
            Self::One(sender) => {
                let mut sender = sender.lock().await;
                sender.ready().await?;
                sender.send_request(request).await?
            }
            Self::Two(sender) => {
                sender.ready().await?;
                sender.send_request(request).await?
            }
        };
        let code = response.status().as_u16();
        let body = response.into_body().collect().await?.to_bytes();
        Ok((code, serde_json::from_slice(&body).unwrap()))
    }
}
