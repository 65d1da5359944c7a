//! Direct access to the cluster's storage, to create states that no client can create, or not in time.

use anyhow::{Context as _, Result};
use k8s_openapi::ByteString;
use kube::{Client, Config};
use serde_json::{Value, json};

/// Maximum number of keys and bytes in one transaction.
const MAX_KEYS: usize = 100;
const MAX_BYTES: usize = 1_000_000;

/// A client of etcd's JSON gateway.
#[derive(Clone)]
pub struct Etcd {
    client: Client,
}

impl Etcd {
    pub(crate) fn new(url: &str) -> Result<Self> {
        let config = Config::new(url.parse().context("failed to parse the address of etcd")?);
        Ok(Self { client: Client::try_from(config).context("failed to create a client for etcd")? })
    }

    /// The key of a pod.
    pub fn pod_key(namespace: &str, name: &str) -> String {
        format!("/registry/pods/{namespace}/{name}")
    }

    /// Writes values. The API server reads JSON as well as its own encoding.
    pub async fn put(&self, values: Vec<(String, Vec<u8>)>) -> Result<()> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        for (key, value) in values {
            if batch.len() == MAX_KEYS || bytes + value.len() > MAX_BYTES {
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

    /// Compacts the history, so that no earlier list or watch can be continued.
    pub async fn compact(&self) -> Result<()> {
        let now = self.call("range", json!({"key": encoded("/registry/".to_owned()), "limit": "1"})).await?;
        let revision = now.pointer("/header/revision").context("etcd's answer has no revision")?;
        self.call("compaction", json!({"revision": revision, "physical": true})).await?;
        Ok(())
    }

    async fn call(&self, what: &str, body: Value) -> Result<Value> {
        let request = kube::core::Request::new(format!("/v3/kv/{what}"));
        let request = request
            .create(&kube::api::PostParams::default(), serde_json::to_vec(&body)?)
            .context("failed to create a request")?;
        self.client.request(request).await.with_context(|| format!("etcd: {what}"))
    }
}

fn encoded(key: String) -> ByteString {
    ByteString(key.into_bytes())
}
