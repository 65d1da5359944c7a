//! Serves the certificate from a watched Secret. The service can only read it: the certificate manager writes it.

use std::convert::Infallible;
use std::sync::Arc;

use haulout_service_runtime::watch::Store;
use k8s_openapi::api::core::v1::Secret;
use tokio::sync::Notify;
use tracing::{info, warn};

use super::Pem;
use super::serving::ServingCertificate;

/// Serves what is in the Secret. A missing, empty or invalid Secret keeps the previous certificate.
pub(super) async fn follow(
    store: Arc<Store<Secret>>,
    name: String,
    changed: Arc<Notify>,
    serving: &ServingCertificate,
) -> Infallible {
    let mut last = None;
    loop {
        if store.is_synced() {
            let found = store.get(&name).as_deref().and_then(read);
            match &found {
                // Each content is loaded and reported once.
                _ if last.as_ref() == Some(&found) => {}
                None => info!(
                    secret = name,
                    "certificate Secret has no certificate, waiting for the certificate manager"
                ),
                Some(pem) => {
                    if let Err(error) = pem.serve(serving) {
                        warn!(%error, secret = name, "failed to load the new certificate; keeping the previous one");
                    }
                }
            }
            last = Some(found);
        }
        changed.notified().await;
    }
}

/// The current generation. A renewal first puts the next one under other keys.
fn read(secret: &Secret) -> Option<Pem> {
    let data = secret.data.as_ref()?;
    let part = |key: &str| data.get(key).map(|bytes| bytes.0.clone());
    Some(Pem { certificate: part("tls.crt")?, key: part("tls.key")?, authority: part("ca.crt") })
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use haulout_service_runtime::metrics::Metrics as ServiceMetrics;
    use haulout_service_runtime::server::Readiness;
    use haulout_service_runtime::watch::Handler as _;
    use k8s_openapi::ByteString;

    use super::*;
    use crate::metrics::Metrics;

    fn secret(parts: &[(&str, &str)]) -> Secret {
        let data = parts.iter().map(|(key, text)| ((*key).into(), ByteString((*text).into()))).collect();
        Secret { data: Some(data), ..Secret::default() }
    }

    #[tokio::test]
    async fn last_valid_content_of_the_secret_is_served() {
        let issue = || {
            let issued = rcgen::generate_simple_self_signed(["a.svc".to_owned()]).unwrap();
            let (certificate, key) = (issued.cert.pem(), issued.signing_key.serialize_pem());
            (issued.cert.der().clone(), secret(&[("tls.crt", &certificate), ("tls.key", &key)]))
        };
        let ((first, one), (second, other)) = (issue(), issue());
        let serving =
            ServingCertificate::new(Metrics::new(&ServiceMetrics::new("test", "1")), Readiness::default());
        let changed: Arc<Notify> = Arc::default();
        let store = Arc::new(Store::new(|_| {}, Arc::clone(&changed)));
        store.resumed();
        let mut following = pin!(follow(Arc::clone(&store), "ours".into(), changed, &serving));
        let mut damaged = other.clone();
        damaged.data.as_mut().unwrap().insert("tls.key".into(), ByteString("nonsense".into()));
        for (what, secret, served) in [
            ("missing", None, None),
            ("empty, as the chart renders it", Some(Secret::default()), None),
            ("issued", Some(one.clone()), Some(&first)),
            ("damaged", Some(damaged), Some(&first)),
            ("emptied", Some(secret(&[])), Some(&first)),
            ("deleted", None, Some(&first)),
            ("renewed", Some(other), Some(&second)),
        ] {
            match secret {
                Some(secret) => store.put("ours", secret),
                None => store.delete("ours".into()),
            }
            // It ends never, and has done everything when it waits.
            assert!(futures::poll!(following.as_mut()).is_pending());
            assert_eq!(serving.leaf().as_ref(), served, "{what}");
        }
    }
}
