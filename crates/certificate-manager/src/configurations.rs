//! Watches Haulout's webhook configurations by name and keeps their `caBundle` up to date.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use haulout_service_runtime::term::Term;
use haulout_service_runtime::watch::{Source, Store};
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, TestOperation};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::sync::Notify;

use crate::args::Args;

/// The CA bundles of one configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    resource_version: String,
    /// One per webhook, in order.
    bundles: Vec<Vec<u8>>,
}

impl Configuration {
    /// Whether the bundle of every webhook contains this authority.
    pub fn trusts(&self, authority: &[u8]) -> bool {
        self.bundles.iter().all(|bundle| bundle.windows(authority.len()).any(|part| part == authority))
    }

    #[cfg(test)]
    pub fn with_bundles(bundles: Vec<Vec<u8>>) -> Self {
        Self { resource_version: String::new(), bundles }
    }

    /// The patch that sets this bundle for every webhook. `None` if nothing changes.
    fn patch(&self, bundle: &[u8]) -> Option<json_patch::Patch> {
        let others = self.bundles.iter().enumerate().filter(|(_, known)| *known != bundle);
        let mut operations: Vec<_> = others
            .map(|(index, _)| {
                let index = index.to_string();
                let path = PointerBuf::from_tokens(["webhooks", &index, "clientConfig", "caBundle"]);
                PatchOperation::Add(AddOperation { path, value: json!(ByteString(bundle.to_vec())) })
            })
            .collect();
        if operations.is_empty() {
            return None;
        }
        // The patch addresses webhooks by index, which may differ in another version.
        let path = PointerBuf::from_tokens(["metadata", "resourceVersion"]);
        let test = TestOperation { path, value: json!(self.resource_version) };
        operations.insert(0, PatchOperation::Test(test));
        Some(json_patch::Patch(operations))
    }
}

/// Implemented by both kinds of webhook configurations.
trait Webhooks: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static {
    fn clients(&self) -> Vec<&WebhookClientConfig>;

    fn configuration(&self) -> Configuration {
        let bundle = |client: &WebhookClientConfig| {
            client.ca_bundle.clone().map(|bundle| bundle.0).unwrap_or_default()
        };
        Configuration {
            resource_version: self.resource_version().unwrap_or_default(),
            bundles: self.clients().into_iter().map(bundle).collect(),
        }
    }
}

impl Webhooks for MutatingWebhookConfiguration {
    fn clients(&self) -> Vec<&WebhookClientConfig> {
        self.webhooks.iter().flatten().map(|webhook| &webhook.client_config).collect()
    }
}

impl Webhooks for ValidatingWebhookConfiguration {
    fn clients(&self) -> Vec<&WebhookClientConfig> {
        self.webhooks.iter().flatten().map(|webhook| &webhook.client_config).collect()
    }
}

/// The watched configurations of one kind, by name.
struct Watched<K> {
    api: Api<K>,
    stores: BTreeMap<String, Arc<Store<K>>>,
}

impl<K: Webhooks> Watched<K> {
    fn start(
        (resource, names): (&'static str, &[String]),
        client: &Client,
        term: &mut Term,
        changed: &Arc<Notify>,
    ) -> Self {
        let watch = |name: &String| {
            let store = Arc::new(Store::new(|_| {}, Arc::clone(changed)));
            term.watch(Source::all(resource).named(name), &store);
            (name.clone(), store)
        };
        Self { api: Api::all(client.clone()), stores: names.iter().map(watch).collect() }
    }

    fn present(&self) -> impl Iterator<Item = Configuration> {
        self.stores.iter().filter_map(|(name, store)| Some(store.get(name)?.configuration()))
    }

    async fn apply_bundle(&self, bundle: &str) -> kube::Result<bool> {
        let mut wrote = false;
        for (name, store) in &self.stores {
            let known = store.get(name).map(|known| known.configuration());
            let Some(patch) = known.and_then(|known| known.patch(bundle.as_bytes())) else { continue };
            let written = self.api.patch(name, &PatchParams::default(), &Patch::<()>::Json(patch)).await?;
            store.put(name, written);
            wrote = true;
        }
        Ok(wrote)
    }
}

/// All configurations whose `caBundle` this service writes.
pub struct Configurations {
    mutating: Watched<MutatingWebhookConfiguration>,
    validating: Watched<ValidatingWebhookConfiguration>,
}

impl Configurations {
    /// Starts the watches, and notifies `changed` of every change.
    pub fn watch(args: &Args, client: &Client, term: &mut Term, changed: &Arc<Notify>) -> Self {
        let [mutating, validating] = args.configurations();
        Self {
            mutating: Watched::start(mutating, client, term, changed),
            validating: Watched::start(validating, client, term, changed),
        }
    }

    /// The configurations that exist. The API server sends no requests through the others.
    pub fn present(&self) -> Vec<Configuration> {
        self.mutating.present().chain(self.validating.present()).collect()
    }

    #[cfg(test)]
    pub fn put_validating(&self, name: &str, changed: ValidatingWebhookConfiguration) {
        if let Some(store) = self.validating.stores.get(name) {
            store.put(name, changed);
        }
    }

    /// Writes this bundle into all configurations that differ. Returns whether it wrote any.
    pub async fn apply_bundle(&self, bundle: &str) -> kube::Result<bool> {
        Ok(self.mutating.apply_bundle(bundle).await? | self.validating.apply_bundle(bundle).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(bundles: &[Option<&str>]) -> Configuration {
        let webhooks: Vec<_> = bundles
            .iter()
            .map(|bundle| {
                let mut client = json!({"url": "https://127.0.0.1/"});
                if let Some(bundle) = bundle {
                    client["caBundle"] = json!(ByteString(bundle.as_bytes().to_vec()));
                }
                json!({"name": "a.b.c", "clientConfig": client, "sideEffects": "None", "admissionReviewVersions": ["v1"]})
            })
            .collect();
        let object: ValidatingWebhookConfiguration = serde_json::from_value(json!({
            "metadata": {"name": "haulout", "resourceVersion": "7"}, "webhooks": webhooks
        }))
        .unwrap();
        object.configuration()
    }

    #[test]
    fn patch_changes_only_differences_and_tests_the_version() {
        assert_eq!(configuration(&[Some("new"), Some("new")]).patch(b"new"), None);
        let patch = configuration(&[Some("new"), None, Some("old")]).patch(b"new").unwrap();
        let expected = json!([
            {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "add", "path": "/webhooks/1/clientConfig/caBundle", "value": "bmV3"},
            {"op": "add", "path": "/webhooks/2/clientConfig/caBundle", "value": "bmV3"}
        ]);
        assert_eq!(serde_json::to_value(patch).unwrap(), expected);
    }

    #[test]
    fn authority_is_trusted_if_every_webhook_has_it() {
        assert!(configuration(&[Some("old+new"), Some("new")]).trusts(b"new"));
        assert!(!configuration(&[Some("old+new"), Some("old")]).trusts(b"new"));
        assert!(!configuration(&[None]).trusts(b"new"));
        assert!(configuration(&[]).trusts(b"new"), "it has no webhooks");
    }
}
