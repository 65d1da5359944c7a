//! TLS configuration and client authentication. The CA of clients is reloaded without a restart.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;

use haulout_service_runtime::certificate::names_of;
use parking_lot::RwLock;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ResolvesServerCert, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig,
    SignatureScheme,
};
use rustls_pki_types::pem::PemObject as _;
use thiserror::Error as ThisError;
use tokio_rustls::TlsAcceptor;

use crate::args::ClientArgs;
use crate::files;

/// Why TLS cannot be set up.
#[derive(Debug, ThisError)]
pub enum TlsError {
    #[error("failed to load --client-ca {}: {problem}", path.display())]
    ClientCa { path: PathBuf, problem: String },
    #[error("failed to set up TLS: {0}")]
    Library(#[from] Error),
}

/// The TLS configuration for new connections. Clones share it.
#[derive(Clone)]
pub struct Tls {
    certificates: Arc<dyn ResolvesServerCert>,
    clients: ClientArgs,
    /// The contents of --client-ca at the start; empty without it.
    authorities: Vec<u8>,
    current: Arc<RwLock<Arc<ServerConfig>>>,
}

impl Tls {
    /// Loads the CA of clients, if there is one.
    pub fn load(certificates: Arc<dyn ResolvesServerCert>, clients: &ClientArgs) -> Result<Self, TlsError> {
        let unreadable = |path: &PathBuf, error: std::io::Error| TlsError::ClientCa {
            path: path.clone(),
            problem: error.to_string(),
        };
        let authorities = match &clients.client_ca {
            Some(path) => std::fs::read(path).map_err(|error| unreadable(path, error))?,
            None => Vec::new(),
        };
        let current = Arc::new(RwLock::new(config(&certificates, clients, &authorities)?));
        Ok(Self { certificates, clients: clients.clone(), authorities, current })
    }

    /// For a new connection. Existing ones keep the configuration with which they were accepted.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.current.read()))
    }

    /// Accepts clients of these authorities from now on.
    pub fn replace_authorities(&self, authorities: &[u8]) -> Result<(), TlsError> {
        let config = config(&self.certificates, &self.clients, authorities)?;
        *self.current.write() = config;
        Ok(())
    }

    /// Follows the file with the CA of clients.
    pub async fn follow_client_ca(&self) -> Infallible {
        let Some(path) = &self.clients.client_ca else { return std::future::pending().await };
        let read = async || {
            let read = tokio::fs::read(path).await;
            read.map_err(|error| TlsError::ClientCa { path: path.clone(), problem: error.to_string() })
        };
        let load = |authorities: &Vec<u8>| self.replace_authorities(authorities);
        files::reload("client CA", self.authorities.clone(), read, load).await
    }
}

/// The server configuration: TLS 1.3 and 1.2, HTTP/2 and 1.1. It has its own session storage, so that no client resumes
/// a session for which another configuration accepted its certificate.
fn config(
    certificates: &Arc<dyn ResolvesServerCert>,
    clients: &ClientArgs,
    authorities: &[u8],
) -> Result<Arc<ServerConfig>, TlsError> {
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?;
    let builder = match &clients.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let unusable = |problem| TlsError::ClientCa { path: path.clone(), problem };
            let verifier = verifier(authorities, &clients.client_names).map_err(unusable)?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_cert_resolver(Arc::clone(certificates));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Returns a description of what is wrong with these PEM certificates.
fn verifier(authorities: &[u8], names: &[String]) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authorities) {
        let certificate = certificate.map_err(|error| error.to_string())?;
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    let inner =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(ring::default_provider()))
            .build()
            .map_err(|error| match error {
                VerifierBuilderError::NoRootAnchors => "the file contains no certificate".into(),
                other => other.to_string(),
            })?;
    if names.is_empty() {
        return Ok(inner);
    }
    Ok(Arc::new(Named { inner, names: names.to_vec() }))
}

/// Accepts clients that the inner verifier accepts and that have one of these names.
#[derive(Debug)]
struct Named {
    inner: Arc<dyn ClientCertVerifier>,
    names: Vec<String>,
}

impl ClientCertVerifier for Named {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        if names_of(end_entity).iter().any(|name| self.names.contains(name)) {
            return Ok(verified);
        }
        // The client receives `access_denied`.
        Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
