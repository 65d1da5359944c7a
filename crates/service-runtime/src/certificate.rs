//! Parses certificates and keys from PEM, for the program that serves them and the one that issues them.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::{self, PemObject as _};
use thiserror::Error;
use x509_parser::prelude::{ASN1Time, FromDer as _, GeneralName, X509Certificate};

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
pub struct Pair {
    /// The chain and the key, for rustls.
    pub key: Arc<CertifiedKey>,
    /// The start of its validity.
    pub not_before: Timestamp,
    /// The end of its validity.
    pub expires: Timestamp,
    /// The names for which it is valid.
    pub names: Vec<String>,
}

impl Pair {
    /// Parses a certificate chain and a key.
    pub fn read(certificate: &[u8], key: &[u8]) -> Result<Self, PairError> {
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
pub fn expiry(certificates: &[u8]) -> Option<Timestamp> {
    let first = CertificateDer::from_pem_slice(certificates).ok()?;
    let (_, parsed) = X509Certificate::from_der(&first).ok()?;
    Timestamp::from_second(parsed.validity().not_after.timestamp()).ok()
}

/// The common name and the alternative names of a certificate. Empty if it is invalid.
pub fn names_of(certificate: &[u8]) -> Vec<String> {
    let Ok((_, parsed)) = X509Certificate::from_der(certificate) else { return Vec::new() };
    let common = parsed.subject().iter_common_name().filter_map(|name| name.as_str().ok()).map(str::to_owned);
    let alternatives = parsed.subject_alternative_name().ok().flatten();
    let alternatives = alternatives.into_iter().flat_map(|extension| &extension.value.general_names);
    common.chain(alternatives.filter_map(readable)).collect()
}

fn readable(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(std::net::IpAddr::from);
            let v6 = <[u8; 16]>::try_from(*bytes).map(std::net::IpAddr::from);
            v4.or(v6).ok().map(|address| address.to_string())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_invalid_part() {
        let now = Timestamp::now();
        let issue = || {
            let names = ["a.svc".to_owned(), "127.0.0.1".to_owned()];
            let issued = rcgen::generate_simple_self_signed(names).unwrap();
            (issued.cert.pem(), issued.signing_key.serialize_pem())
        };
        let ((one, key), (_, other)) = (issue(), issue());
        let read = |certificate: &str, key: &str| Pair::read(certificate.as_bytes(), key.as_bytes()).err();
        assert_eq!(read(&one, &key), None);
        assert_eq!(read(&one, &other), Some(PairError::Mismatch));
        assert_eq!(read("", &key), Some(PairError::NoCertificate));
        assert_eq!(read(&key, &key), Some(PairError::NoCertificate));
        assert_eq!(read(&one, ""), Some(PairError::NoKey));
        assert_eq!(read(&one, &one), Some(PairError::NoKey));
        let truncated = one.get(..200).unwrap();
        assert!(matches!(read(truncated, &key), Some(PairError::BadCertificate(_))));
        let (begin, end) = ("-----BEGIN CERTIFICATE-----\n", "-----END CERTIFICATE-----\n");
        let nonsense = format!("{begin}bm9uc2Vuc2U=\n{end}");
        assert!(matches!(read(&nonsense, &key), Some(PairError::BadCertificate(_))));

        let pair = Pair::read(one.as_bytes(), key.as_bytes()).unwrap();
        assert!(pair.not_before < now && now < pair.expires);
        for name in ["a.svc", "127.0.0.1"] {
            assert!(pair.names.iter().any(|known| known == name), "{:?}", pair.names);
        }
        assert_eq!(expiry(one.as_bytes()), Some(pair.expires));
    }
}
