//! Our webhook configurations, as far as their `caBundle` goes: watched by name, patched where it differs.

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

use crate::args::CertificateArgs;

/// What is trusted through one configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Configuration {
    resource_version: String,
    /// By webhook, in its order.
    bundles: Vec<Vec<u8>>,
}

impl Configuration {
    /// Whether every webhook in it trusts this authority.
    pub(super) fn trusts(&self, authority: &[u8]) -> bool {
        self.bundles.iter().all(|bundle| bundle.windows(authority.len()).any(|part| part == authority))
    }

    #[cfg(test)]
    pub(super) fn with_bundles(bundles: Vec<Vec<u8>>) -> Self {
        Self { resource_version: String::new(), bundles }
    }

    /// What has to change so that every webhook trusts exactly this bundle. `None` if nothing does.
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
        // Webhooks are patched by their place, which another version may have changed.
        let path = PointerBuf::from_tokens(["metadata", "resourceVersion"]);
        let test = TestOperation { path, value: json!(self.resource_version) };
        operations.insert(0, PatchOperation::Test(test));
        Some(json_patch::Patch(operations))
    }
}

/// The two kinds of configurations.
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

/// The object with this name alone, which is all that our role lets us watch.
pub(super) fn named<K: Resource<DynamicType = ()>>(source: Source<K>, name: &str) -> Source<K> {
    source.fields(&format!("metadata.name={name}"))
}

/// Our configurations of one kind, by name.
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
            term.watch(named(Source::all(resource), name), &store);
            (name.clone(), store)
        };
        Self { api: Api::all(client.clone()), stores: names.iter().map(watch).collect() }
    }

    fn is_synced(&self) -> bool {
        self.stores.values().all(|store| store.is_synced())
    }

    fn present(&self) -> impl Iterator<Item = Configuration> {
        self.stores.iter().filter_map(|(name, store)| Some(store.get(name)?.configuration()))
    }

    async fn trust(&self, bundle: &str) -> kube::Result<bool> {
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

/// All our configurations; none where others write their `caBundle`.
pub(super) struct Configurations {
    mutating: Watched<MutatingWebhookConfiguration>,
    validating: Watched<ValidatingWebhookConfiguration>,
}

impl Configurations {
    /// Watches them, and notifies of every change.
    pub(super) fn watch(
        args: &CertificateArgs,
        client: &Client,
        term: &mut Term,
        changed: &Arc<Notify>,
    ) -> Self {
        let [mutating, validating] = args.managed_configurations();
        Self {
            mutating: Watched::start(mutating, client, term, changed),
            validating: Watched::start(validating, client, term, changed),
        }
    }

    /// Whether all of them have been looked for.
    pub(super) fn is_synced(&self) -> bool {
        self.mutating.is_synced() && self.validating.is_synced()
    }

    /// Those that there are. Through one that is not there nobody calls us.
    pub(super) fn present(&self) -> Vec<Configuration> {
        self.mutating.present().chain(self.validating.present()).collect()
    }

    /// Puts this bundle into all of them where it is not there yet; returns whether it wrote.
    pub(super) async fn trust(&self, bundle: &str) -> kube::Result<bool> {
        Ok(self.mutating.trust(bundle).await? | self.validating.trust(bundle).await?)
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
    fn only_what_differs_is_patched_and_only_in_the_known_version() {
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
    fn an_authority_is_trusted_when_every_webhook_has_it() {
        assert!(configuration(&[Some("old+new"), Some("new")]).trusts(b"new"));
        assert!(!configuration(&[Some("old+new"), Some("old")]).trusts(b"new"));
        assert!(!configuration(&[None]).trusts(b"new"));
        assert!(configuration(&[]).trusts(b"new"), "nobody calls us through it");
    }
}
