//! Issues a certificate and its own authority. The authority's key is discarded at once, so it cannot be stolen.

use std::fmt;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use time::OffsetDateTime;

/// Tolerated clock difference between API servers and this service.
const BACKDATED: SignedDuration = SignedDuration::from_hours(1);

/// A new certificate, in PEM.
#[derive(Clone, PartialEq)]
pub struct Issued {
    pub authority: String,
    pub certificate: String,
    pub key: String,
}

impl fmt::Debug for Issued {
    /// Omits the key, which must not be logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issued").field("certificate", &self.certificate).finish_non_exhaustive()
    }
}

/// Issues a certificate for these names.
pub fn issue(names: &[String], lifetime: SignedDuration, now: Timestamp) -> Result<Issued, rcgen::Error> {
    let set_common_fields = |params: &mut CertificateParams, name: String| {
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = date(now.saturating_sub(BACKDATED).unwrap_or(Timestamp::UNIX_EPOCH));
        params.not_after = date(now.saturating_add(lifetime).unwrap_or(Timestamp::MAX));
    };
    let mut authority = CertificateParams::default();
    // The old and the new authority are in the bundle at the same time. Verifiers find theirs by name.
    set_common_fields(&mut authority, format!("haulout-admission-webhook {now} {:08x}", fastrand::u32(..)));
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let authority_key = KeyPair::generate()?;
    let root = authority.self_signed(&authority_key)?;

    let mut serving = CertificateParams::new(names.to_vec())?;
    set_common_fields(&mut serving, "haulout-admission-webhook".into());
    serving.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    serving.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    serving.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = serving.signed_by(&key, &Issuer::new(authority, authority_key))?;
    Ok(Issued { authority: root.pem(), certificate: certificate.pem(), key: key.serialize_pem() })
}

fn date(time: Timestamp) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(time.as_second()).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use haulout_service_runtime::certificate::{Pair, expiry};

    use super::*;

    #[test]
    fn authority_expires_with_its_certificate() {
        let now = Timestamp::now();
        let issued =
            issue(&["a.svc".into(), "127.0.0.1".into()], SignedDuration::from_hours(24), now).unwrap();
        let pair = Pair::read(issued.certificate.as_bytes(), issued.key.as_bytes()).unwrap();
        assert!(pair.not_before < now && now < pair.expires);
        for name in ["a.svc", "127.0.0.1"] {
            assert!(pair.names.iter().any(|known| known == name), "{:?}", pair.names);
        }
        assert_eq!(expiry(issued.authority.as_bytes()), Some(pair.expires));
    }
}
