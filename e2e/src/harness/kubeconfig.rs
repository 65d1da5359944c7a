//! Self-contained kubeconfig files, which can be passed to any process.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::pki::{Credentials, Pki, write_private};

/// How a kubeconfig's user authenticates.
#[derive(Clone, Debug)]
pub enum Identity {
    /// With a client certificate.
    Certificate(Credentials),
    /// With a bearer token, as ServiceAccounts do.
    Token(String),
}

/// Writes a kubeconfig for one user, readable only by us. An existing file is replaced atomically, so that a process
/// that starts at the same time never reads a part of it.
pub fn write(path: &Path, server: &str, pki: &Pki, namespace: &str, identity: &Identity) -> Result<()> {
    static WRITES: AtomicU32 = AtomicU32::new(0);
    let config = render(server, &pki.ca_certificate()?, namespace, identity);
    let text = serde_yaml::to_string(&config).context("failed to write a kubeconfig as YAML")?;
    let number = WRITES.fetch_add(1, Ordering::Relaxed);
    let new = path.with_extension(format!("{}-{number}.new", std::process::id()));
    write_private(&new, text.as_bytes())?;
    fs::rename(&new, path).with_context(|| format!("failed to replace {}", path.display()))
}

fn render(server: &str, ca: &str, namespace: &str, identity: &Identity) -> Value {
    let user = match identity {
        Identity::Certificate(credentials) => json!({
            "client-certificate-data": base64(credentials.certificate.as_bytes()),
            "client-key-data": base64(credentials.key.as_bytes()),
        }),
        Identity::Token(token) => json!({ "token": token }),
    };
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "haulout",
            "cluster": { "server": server, "certificate-authority-data": base64(ca.as_bytes()) },
        }],
        "users": [{ "name": "user", "user": user }],
        "contexts": [{
            "name": "haulout",
            "context": { "cluster": "haulout", "user": "user", "namespace": namespace },
        }],
        "current-context": "haulout",
    })
}

/// k8s-openapi serializes byte strings as base64, so no other crate is needed.
fn base64(bytes: &[u8]) -> Value {
    json!(k8s_openapi::ByteString(bytes.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubeconfig_is_readable_by_kube() {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::create(&dir.path().join("pki")).unwrap();
        let path = dir.path().join("alice.kubeconfig");
        let identity = Identity::Certificate(pki.client("alice", &["devs"]).unwrap());
        write(&path, "https://127.0.0.1:6443", &pki, "web", &identity).unwrap();
        let read = kube::config::Kubeconfig::read_from(&path).unwrap();
        let cluster = read.clusters.first().and_then(|named| named.cluster.as_ref()).unwrap();
        assert_eq!(cluster.server.as_deref(), Some("https://127.0.0.1:6443"));
        let context = read.contexts.first().and_then(|named| named.context.as_ref()).unwrap();
        assert_eq!(context.namespace.as_deref(), Some("web"));
        let user = read.auth_infos.first().and_then(|named| named.auth_info.as_ref()).unwrap();
        assert!(user.client_certificate_data.is_some());
    }

    #[test]
    fn token_identity_has_no_certificate() {
        let config = render("https://127.0.0.1:1", "ca", "default", &Identity::Token("secret".to_owned()));
        assert_eq!(config["users"][0]["user"], json!({ "token": "secret" }));
        assert_eq!(config["clusters"][0]["cluster"]["certificate-authority-data"], json!("Y2E="));
    }
}
