//! Parses a certificate and its key from PEM for rustls.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::{self, PemObject as _};
use thiserror::Error;
use x509_parser::prelude::{ASN1Time, FromDer as _, X509Certificate};

use crate::server::tls::names_of;

/// Why a certificate or key cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PairError {
    /// The file contains no certificate.
    #[error("tls.crt contains no PEM certificate")]
    NoCertificate,
    /// The certificate is invalid.
    #[error("tls.crt is not a valid certificate: {0}")]
    BadCertificate(String),
    /// The file contains no key.
    #[error("tls.key contains no PEM private key")]
    NoKey,
    /// The key is invalid.
    #[error("tls.key is not a usable private key: {0}")]
    BadKey(String),
    /// The key does not belong to the certificate.
    #[error("tls.key does not belong to the certificate in tls.crt")]
    Mismatch,
}

/// A certificate and key that can be served.
#[derive(Clone, Debug)]
pub(super) struct Pair {
    pub key: Arc<CertifiedKey>,
    pub not_before: Timestamp,
    pub expires: Timestamp,
    pub names: Vec<String>,
}

impl Pair {
    /// Parses a certificate chain and a key.
    pub(super) fn read(certificate: &[u8], key: &[u8]) -> Result<Self, PairError> {
        let bad = |error: &dyn std::fmt::Display| PairError::BadCertificate(error.to_string());
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate).collect();
        let chain = chain.map_err(|error| bad(&error))?;
        let leaf = chain.first().ok_or(PairError::NoCertificate)?;
        let (_, parsed) = X509Certificate::from_der(leaf).map_err(|error| bad(&error))?;
        let time = |time: ASN1Time| Timestamp::from_second(time.timestamp()).map_err(|error| bad(&error));
        let (not_before, expires) = (time(parsed.validity().not_before)?, time(parsed.validity().not_after)?);
        let names = names_of(leaf);
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| match error {
            pem::Error::NoItemsFound => PairError::NoKey,
            other => PairError::BadKey(other.to_string()),
        })?;
        let key =
            CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|error| match error {
                rustls::Error::InconsistentKeys(_) => PairError::Mismatch,
                other => PairError::BadKey(other.to_string()),
            })?;
        Ok(Self { key: Arc::new(key), not_before, expires, names })
    }
}

/// Expiry time of the first certificate in this PEM text.
pub(super) fn expiry(certificates: &[u8]) -> Option<Timestamp> {
    let first = CertificateDer::from_pem_slice(certificates).ok()?;
    let (_, parsed) = X509Certificate::from_der(&first).ok()?;
    Timestamp::from_second(parsed.validity().not_after.timestamp()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificates::issue::issue;

    #[test]
    fn errors_name_the_invalid_part() {
        let now = Timestamp::now();
        let issue = || issue(&["a.svc".into(), "127.0.0.1".into()], "24h".parse().unwrap(), now).unwrap();
        let (one, other) = (issue(), issue());
        let read = |certificate: &str, key: &str| Pair::read(certificate.as_bytes(), key.as_bytes()).err();
        assert_eq!(read(&one.certificate, &one.key), None);
        assert_eq!(read(&one.certificate, &other.key), Some(PairError::Mismatch));
        assert_eq!(read("", &one.key), Some(PairError::NoCertificate));
        assert_eq!(read(&one.key, &one.key), Some(PairError::NoCertificate));
        assert_eq!(read(&one.certificate, ""), Some(PairError::NoKey));
        assert_eq!(read(&one.certificate, &one.certificate), Some(PairError::NoKey));
        let truncated = one.certificate.get(..200).unwrap();
        assert!(matches!(read(truncated, &one.key), Some(PairError::BadCertificate(_))));
        let (begin, end) = ("-----BEGIN CERTIFICATE-----\n", "-----END CERTIFICATE-----\n");
        let nonsense = format!("{begin}bm9uc2Vuc2U=\n{end}");
        assert!(matches!(read(&nonsense, &one.key), Some(PairError::BadCertificate(_))));

        let pair = Pair::read(one.certificate.as_bytes(), one.key.as_bytes()).unwrap();
        assert!(pair.not_before < now && now < pair.expires);
        for name in ["a.svc", "127.0.0.1"] {
            assert!(pair.names.iter().any(|known| known == name), "{:?}", pair.names);
        }
        assert_eq!(
            expiry(one.authority.as_bytes()),
            Some(pair.expires),
            "the authority expires at the same time"
        );
    }
}
