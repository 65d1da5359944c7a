//! The content of the Secret: the current certificate, the next one during a renewal, and the previous authority. Each
//! change is one method. None of them reads the clock.

use std::collections::BTreeMap;

use haulout_service_runtime::certificate::{Pair, PairError, expiry};
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use thiserror::Error;

use crate::issue::Issued;

const SERVED_SINCE: &str = "nodemaintenance.k8s.io/served-since";
const NEXT_TRUSTED_SINCE: &str = "nodemaintenance.k8s.io/next-trusted-since";
const PREVIOUS_AUTHORITY: &str = "previous-ca.crt";

/// Prefix of the data keys of the next generation.
const NEXT: &str = "next-";

/// A certificate and its authority.
#[derive(Clone, Debug)]
pub struct Generation {
    pub issued: Issued,
    pub pair: Pair,
}

impl PartialEq for Generation {
    fn eq(&self, other: &Self) -> bool {
        self.issued == other.issued
    }
}

impl Generation {
    pub fn new(issued: Issued) -> Result<Self, PairError> {
        let pair = Pair::read(issued.certificate.as_bytes(), issued.key.as_bytes())?;
        Ok(Self { issued, pair })
    }
}

/// The content of the Secret.
#[derive(Clone, Debug, PartialEq)]
pub struct Contents {
    pub current: Generation,
    /// When the current certificate was promoted.
    pub served_since: Timestamp,
    /// The certificate that replaces the current one when it is trusted everywhere.
    pub next: Option<Generation>,
    /// When every configuration contained the next authority.
    pub next_trusted_since: Option<Timestamp>,
    /// The previous authority. A replica that lags behind may still serve its certificate.
    pub previous_authority: Option<String>,
}

/// Why a Secret is invalid.
#[derive(Debug, Error)]
pub enum SecretError {
    #[error("{0} is missing or not text")]
    Missing(String),
    #[error("{0} contains no certificate")]
    NoCertificate(String),
    #[error("invalid certificate in {0}tls.crt: {1}")]
    Pair(&'static str, PairError),
    #[error("annotation {0} is missing or not a time")]
    Time(&'static str),
}

impl Contents {
    /// The first certificate, served at once.
    pub fn initial(current: Generation, now: Timestamp) -> Self {
        let served_since = now;
        Self { current, served_since, next: None, next_trusted_since: None, previous_authority: None }
    }

    pub fn staged(self, next: Generation) -> Self {
        Self { next: Some(next), next_trusted_since: None, ..self }
    }

    pub fn trusted(self, now: Timestamp) -> Self {
        Self { next_trusted_since: Some(now), ..self }
    }

    pub fn promoted(self, now: Timestamp) -> Self {
        match self.next {
            Some(next) => {
                Self { previous_authority: Some(self.current.issued.authority), ..Self::initial(next, now) }
            }
            None => self,
        }
    }

    pub fn without_previous(self) -> Self {
        Self { previous_authority: None, ..self }
    }

    /// The CA bundle, oldest first, so that a promotion does not change it.
    pub fn bundle(&self) -> String {
        let next = self.next.as_ref().map(|next| &next.issued.authority);
        let all = self.previous_authority.iter().chain([&self.current.issued.authority]).chain(next);
        all.map(String::as_str).collect()
    }

    /// Parses a Secret.
    pub fn read(secret: &Secret) -> Result<Self, SecretError> {
        let text = |key: &str| {
            let bytes = secret.data.as_ref()?.get(key)?;
            String::from_utf8(bytes.0.clone()).ok()
        };
        let generation = |prefix: &'static str| {
            let part = |name: &str| {
                let key = format!("{prefix}{name}");
                text(&key).ok_or(SecretError::Missing(key))
            };
            let issued =
                Issued { authority: part("ca.crt")?, certificate: part("tls.crt")?, key: part("tls.key")? };
            if expiry(issued.authority.as_bytes()).is_none() {
                return Err(SecretError::NoCertificate(format!("{prefix}ca.crt")));
            }
            Generation::new(issued).map_err(|source| SecretError::Pair(prefix, source))
        };
        let annotation = |key: &str| secret.metadata.annotations.as_ref()?.get(key);
        let time = |key: &str| annotation(key).map(|text| text.parse()).transpose();
        let has_next = secret.data.as_ref().is_some_and(|data| data.contains_key("next-tls.crt"));
        Ok(Self {
            current: generation("")?,
            served_since: time(SERVED_SINCE).ok().flatten().ok_or(SecretError::Time(SERVED_SINCE))?,
            next: has_next.then(|| generation(NEXT)).transpose()?,
            next_trusted_since: time(NEXT_TRUSTED_SINCE)
                .map_err(|_| SecretError::Time(NEXT_TRUSTED_SINCE))?,
            // A damaged one would make the whole bundle invalid, and nobody needs it.
            previous_authority: text(PREVIOUS_AUTHORITY).filter(|text| expiry(text.as_bytes()).is_some()),
        })
    }

    /// Writes into a Secret and keeps other data.
    pub fn write(&self, secret: &mut Secret) {
        let data = secret.data.get_or_insert_default();
        put(data, PREVIOUS_AUTHORITY, self.previous_authority.as_deref());
        for (prefix, generation) in [("", Some(&self.current)), (NEXT, self.next.as_ref())] {
            let issued = generation.map(|generation| &generation.issued);
            let mut part = |name, text| put(data, &format!("{prefix}{name}"), text);
            part("ca.crt", issued.map(|issued| issued.authority.as_str()));
            part("tls.crt", issued.map(|issued| issued.certificate.as_str()));
            part("tls.key", issued.map(|issued| issued.key.as_str()));
        }
        let annotations = secret.metadata.annotations.get_or_insert_default();
        annotations.insert(SERVED_SINCE.into(), self.served_since.to_string());
        match self.next_trusted_since {
            Some(time) => annotations.insert(NEXT_TRUSTED_SINCE.into(), time.to_string()),
            None => annotations.remove(NEXT_TRUSTED_SINCE),
        };
    }
}

fn put(data: &mut BTreeMap<String, ByteString>, key: &str, text: Option<&str>) {
    match text {
        Some(text) => data.insert(key.into(), ByteString(text.into())),
        None => data.remove(key),
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::issue::issue;

    fn generation(now: Timestamp) -> Generation {
        Generation::new(issue(&["a.svc".into()], "24h".parse().unwrap(), now).unwrap()).unwrap()
    }

    #[test]
    fn contents_round_trip_and_foreign_data_stays() {
        let now: Timestamp = "2026-11-16T05:00:00Z".parse().unwrap();
        let mut store = Contents::initial(generation(now), now);
        let mut secret = Secret::default();
        put(secret.data.get_or_insert_default(), "theirs", Some("keep me"));
        let stages: [fn(Contents, Timestamp) -> Contents; 4] = [
            |store, now| store.staged(generation(now)),
            Contents::trusted,
            Contents::promoted,
            |store, _| store.without_previous(),
        ];
        for stage in stages {
            store.write(&mut secret);
            assert_eq!(Contents::read(&secret).unwrap(), store);
            store = stage(store, now);
        }
        store.write(&mut secret);
        let names: Vec<_> = secret.data.as_ref().unwrap().keys().map(String::as_str).collect();
        assert_eq!(names, ["ca.crt", "theirs", "tls.crt", "tls.key"], "nothing of the renewal remains");
        assert_eq!(secret.metadata.annotations.unwrap().len(), 1);
    }

    #[test]
    fn error_names_the_damaged_part_of_the_secret() {
        let now = Timestamp::now();
        let whole = |store: &Contents| {
            let mut secret = Secret::default();
            store.write(&mut secret);
            secret
        };
        let store = Contents::initial(generation(now), now).staged(generation(now));
        let broken = |key: &str, text: Option<&str>| {
            let mut secret = whole(&store);
            put(secret.data.as_mut().unwrap(), key, text);
            Contents::read(&secret).unwrap_err().to_string()
        };
        assert_eq!(
            Contents::read(&Secret::default()).unwrap_err().to_string(),
            "ca.crt is missing or not text"
        );
        assert_eq!(broken("tls.key", None), "tls.key is missing or not text");
        for nonsense in ["", "garbage"] {
            assert_eq!(broken("ca.crt", Some(nonsense)), "ca.crt contains no certificate");
            assert_eq!(broken("next-ca.crt", Some(nonsense)), "next-ca.crt contains no certificate");
        }
        let mut secret = whole(&store);
        put(secret.data.as_mut().unwrap(), PREVIOUS_AUTHORITY, Some("garbage"));
        assert_eq!(Contents::read(&secret).unwrap().previous_authority, None);
        let other = generation(now).issued.key;
        let mismatch =
            "invalid certificate in tls.crt: tls.key does not belong to the certificate in tls.crt";
        assert_eq!(broken("tls.key", Some(&other)), mismatch);
        assert!(broken("next-tls.crt", Some("x")).starts_with("invalid certificate in next-tls.crt: "));
        let mut secret = whole(&store);
        secret.metadata.annotations.as_mut().unwrap().insert(SERVED_SINCE.into(), "long ago".into());
        assert!(Contents::read(&secret).unwrap_err().to_string().contains(SERVED_SINCE));
    }
}
