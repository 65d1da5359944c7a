//! Certificates, keys and Secrets. Who may write the Secret or the folder of an existing certificate chooses their content.

use haulout_service_runtime::certificate::{Pair, expiry};
use haulout_service_runtime::testing::fuzz;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Secret;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use serde_json::json;

use crate::decide::{Policy, decide};
use crate::issue::issue;
use crate::secret::{Contents, Generation};

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

/// Secrets as JSON, and certificates and keys as PEM and DER.
fn corpus() -> Vec<Vec<u8>> {
    let names = ["haulout-admission-webhook.haulout-system.svc".to_owned()];
    let issued = || issue(&names, SignedDuration::from_hours(24 * 365), now()).unwrap();
    let [one, two] = [issued(), issued()];
    let der = CertificateDer::from_pem_slice(one.certificate.as_bytes()).unwrap().to_vec();
    let both = format!("{}{}{}", one.authority, one.certificate, one.key);
    let mut inputs = vec![both.into_bytes(), one.certificate.clone().into_bytes(), der];
    let contents = Contents::initial(Generation::new(one).unwrap(), now());
    let staged = contents.clone().staged(Generation::new(two).unwrap()).trusted(now());
    for contents in [&contents, &staged, &staged.clone().promoted(now())] {
        let mut secret = Secret::default();
        contents.write(&mut secret);
        inputs.push(json!(secret).to_string().into_bytes());
    }
    inputs
}

fn read(input: &[u8]) {
    expiry(input);
    let _ = Pair::read(input, input);
    // As DER, in a valid PEM frame.
    let framed = k8s_openapi::ByteString(input.to_vec());
    let base64 = json!(framed).as_str().unwrap_or_default().to_owned();
    let framed = format!("-----BEGIN CERTIFICATE-----\n{base64}\n-----END CERTIFICATE-----\n");
    expiry(framed.as_bytes());
    let _ = Pair::read(framed.as_bytes(), input);
    let Ok(secret) = serde_json::from_slice::<Secret>(input) else { return };
    let Ok(contents) = Contents::read(&secret) else { return };
    let policy = Policy::new(vec!["a.example.com".into()], SignedDuration::from_hours(24));
    for now in [Timestamp::MIN, now(), Timestamp::MAX] {
        decide(Some(&contents), None, [], &policy, now);
    }
    let mut written = secret.clone();
    contents.write(&mut written);
    assert!(Contents::read(&written).is_ok(), "what is written can be read");
    assert!(contents.bundle().len() <= input.len());
}

#[test]
fn mutated_certificates_are_read_quickly() {
    fuzz::fuzz("certificates", fuzz::QUICK, &corpus(), read);
}

#[test]
#[ignore = "slow"]
fn mutated_certificates_are_read() {
    fuzz::fuzz("certificates", fuzz::SLOW, &corpus(), read);
}
