//! The cluster's storage behind the API server's back: for a state that no client could make, or not in
//! the time that a test has.

use anyhow::{Context as _, Result};
use k8s_openapi::ByteString;
use kube::{Client, Config};
use serde_json::{Value, json};

/// How many keys etcd writes in one transaction, and how many bytes of ours.
const KEYS_AT_ONCE: usize = 100;
const BYTES_AT_ONCE: usize = 1_000_000;

/// An etcd, over its JSON gateway.
#[derive(Clone)]
pub struct Etcd {
    client: Client,
}

impl Etcd {
    pub(crate) fn new(url: &str) -> Result<Self> {
        let config = Config::new(url.parse().context("the address of etcd")?);
        Ok(Self { client: Client::try_from(config).context("making a client for etcd")? })
    }

    /// The key under which an API server keeps a pod.
    pub fn pod_key(namespace: &str, name: &str) -> String {
        format!("/registry/pods/{namespace}/{name}")
    }

    /// Writes values. An API server reads them as JSON just as well as in its own encoding.
    pub async fn put(&self, values: Vec<(String, Vec<u8>)>) -> Result<()> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        for (key, value) in values {
            if batch.len() == KEYS_AT_ONCE || bytes + value.len() > BYTES_AT_ONCE {
                self.write(std::mem::take(&mut batch)).await?;
                bytes = 0;
            }
            bytes += value.len();
            batch.push(json!({"requestPut": {"key": encoded(key), "value": ByteString(value)}}));
        }
        self.write(batch).await
    }

    async fn write(&self, puts: Vec<Value>) -> Result<()> {
        if !puts.is_empty() {
            self.call("txn", json!({"success": puts})).await?;
        }
        Ok(())
    }

    /// Removes one key.
    pub async fn delete(&self, key: String) -> Result<()> {
        self.call("deleterange", json!({"key": encoded(key)})).await?;
        Ok(())
    }

    /// Forgets everything that was before now, so that no list and no watch can go on from it.
    pub async fn compact(&self) -> Result<()> {
        let now = self.call("range", json!({"key": encoded("/registry/".to_owned()), "limit": "1"})).await?;
        let revision = now.pointer("/header/revision").context("etcd does not tell its revision")?;
        self.call("compaction", json!({"revision": revision, "physical": true})).await?;
        Ok(())
    }

    async fn call(&self, what: &str, body: Value) -> Result<Value> {
        let request = kube::core::Request::new(format!("/v3/kv/{what}"));
        let request = request
            .create(&kube::api::PostParams::default(), serde_json::to_vec(&body)?)
            .context("making a request")?;
        self.client.request(request).await.with_context(|| format!("etcd: {what}"))
    }
}

fn encoded(key: String) -> ByteString {
    ByteString(key.into_bytes())
}
