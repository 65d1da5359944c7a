//! TLS configuration and client authentication.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use haulout_service_runtime::certificate::names_of;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ResolvesServerCert, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig,
    SignatureScheme,
};
use rustls_pki_types::pem::{self, PemObject as _};
use thiserror::Error as ThisError;

use crate::args::ClientArgs;

/// Why TLS cannot be set up.
#[derive(Debug, ThisError)]
pub enum TlsError {
    #[error("failed to load --client-ca {}: {problem}", path.display())]
    ClientCa { path: PathBuf, problem: String },
    #[error("failed to set up TLS: {0}")]
    Library(#[from] Error),
}

/// The server configuration: TLS 1.3 and 1.2, HTTP/2 and 1.1.
pub fn config(
    certificates: Arc<dyn ResolvesServerCert>,
    clients: &ClientArgs,
) -> Result<Arc<ServerConfig>, TlsError> {
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?;
    let builder = match &clients.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => builder.with_client_cert_verifier(verifier(path, &clients.client_names)?),
    };
    let mut config = builder.with_cert_resolver(certificates);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn verifier(path: &Path, names: &[String]) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let unusable = |problem: String| TlsError::ClientCa { path: path.into(), problem };
    let unreadable = |error: pem::Error| unusable(error.to_string());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(path).map_err(unreadable)? {
        roots.add(certificate.map_err(unreadable)?).map_err(|error| unusable(error.to_string()))?;
    }
    let inner =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(ring::default_provider()))
            .build()
            .map_err(|error| match error {
                VerifierBuilderError::NoRootAnchors => unusable("the file contains no certificate".into()),
                other => unusable(other.to_string()),
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
