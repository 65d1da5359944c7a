//! Our webhook configurations, as far as their `caBundle` goes: watched by name, patched where it differs.

use std::collections::BTreeMap;
use std::fmt::Debug;

use futures::stream::{BoxStream, SelectAll};
use futures::{StreamExt as _, TryStreamExt as _};
use json_patch::jsonptr::PointerBuf;
use json_patch::{AddOperation, PatchOperation, TestOperation};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration, WebhookClientConfig,
};
use kube::api::{Patch, PatchParams};
use kube::runtime::watcher::{self, Event, watcher};
use kube::runtime::{WatchStreamExt as _, watcher::Config};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

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

/// One of our configurations, by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Mutating(String),
    Validating(String),
}

/// The two kinds of configurations.
trait Webhooks:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize + Send + 'static
{
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

/// What a watch of one object has shown.
#[derive(Clone, Debug)]
pub(super) struct Slot<T> {
    listed: Option<T>,
    /// Whether a list has been complete, so that no object means that there is none.
    pub synced: bool,
    /// The object, if there is one.
    pub object: Option<T>,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self { listed: None, synced: false, object: None }
    }
}

impl<T> Slot<T> {
    pub(super) fn apply(&mut self, event: Event<T>) {
        match event {
            Event::Init => self.listed = None,
            Event::InitApply(object) => self.listed = Some(object),
            Event::InitDone => {
                self.object = self.listed.take();
                self.synced = true;
            }
            Event::Apply(object) => self.object = Some(object),
            Event::Delete(_) => self.object = None,
        }
    }
}

/// Watches one object by its name, which is all that our role lets us watch.
pub(super) fn watch_one<K>(api: Api<K>, name: &str) -> BoxStream<'static, watcher::Result<Event<K>>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    watcher(api, Config::default().fields(&format!("metadata.name={name}"))).default_backoff().boxed()
}

/// News of one configuration.
pub(super) type News = (Key, Event<Configuration>);

/// All our configurations.
pub(super) struct Configurations {
    client: Client,
    slots: BTreeMap<Key, Slot<Configuration>>,
}

impl Configurations {
    pub(super) fn new(client: &Client, mutating: &[String], validating: &[String]) -> Self {
        let mutating = mutating.iter().cloned().map(Key::Mutating);
        let keys = mutating.chain(validating.iter().cloned().map(Key::Validating));
        Self { client: client.clone(), slots: keys.map(|key| (key, Slot::default())).collect() }
    }

    /// The news of all of them.
    pub(super) fn watch(&self) -> SelectAll<BoxStream<'static, watcher::Result<News>>> {
        fn one<K: Webhooks>(
            client: &Client,
            name: &str,
            key: Key,
        ) -> BoxStream<'static, watcher::Result<News>> {
            let events = watch_one(Api::<K>::all(client.clone()), name);
            events.map_ok(move |event| (key.clone(), map(event, |object: K| object.configuration()))).boxed()
        }
        futures::stream::select_all(self.slots.keys().map(|key| match key {
            Key::Mutating(name) => one::<MutatingWebhookConfiguration>(&self.client, name, key.clone()),
            Key::Validating(name) => one::<ValidatingWebhookConfiguration>(&self.client, name, key.clone()),
        }))
    }

    pub(super) fn apply(&mut self, (key, event): News) {
        self.slots.entry(key).or_default().apply(event);
    }

    /// Whether all of them have been looked for.
    pub(super) fn synced(&self) -> bool {
        self.slots.values().all(|slot| slot.synced)
    }

    /// Those that there are. Through one that is not there nobody calls us.
    pub(super) fn present(&self) -> impl Iterator<Item = &Configuration> {
        self.slots.values().filter_map(|slot| slot.object.as_ref())
    }

    /// Puts this bundle into all of them where it is not there yet; returns whether it wrote.
    pub(super) async fn trust(&mut self, bundle: &str) -> kube::Result<bool> {
        let mut wrote = false;
        for (key, slot) in &mut self.slots {
            let Some(known) = &slot.object else { continue };
            let Some(patch) = known.patch(bundle.as_bytes()) else { continue };
            slot.object = Some(match key {
                Key::Mutating(name) => put::<MutatingWebhookConfiguration>(&self.client, name, patch).await?,
                Key::Validating(name) => {
                    put::<ValidatingWebhookConfiguration>(&self.client, name, patch).await?
                }
            });
            wrote = true;
        }
        Ok(wrote)
    }
}

async fn put<K: Webhooks>(
    client: &Client,
    name: &str,
    patch: json_patch::Patch,
) -> kube::Result<Configuration> {
    let api: Api<K> = Api::all(client.clone());
    let written = api.patch(name, &PatchParams::default(), &Patch::<()>::Json(patch)).await?;
    Ok(written.configuration())
}

fn map<T, U>(event: Event<T>, change: impl Fn(T) -> U) -> Event<U> {
    match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(object) => Event::InitApply(change(object)),
        Event::Apply(object) => Event::Apply(change(object)),
        Event::Delete(object) => Event::Delete(change(object)),
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
    fn only_what_differs_is_patched_and_only_in_the_version_that_was_seen() {
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

    #[test]
    fn nothing_is_known_before_a_list_is_complete_and_everything_stays_known_during_the_next() {
        let mut slot = Slot::default();
        slot.apply(Event::Init);
        slot.apply(Event::InitApply(1));
        assert_eq!((slot.synced, slot.object), (false, None));
        slot.apply(Event::InitDone);
        assert_eq!((slot.synced, slot.object), (true, Some(1)));
        slot.apply(Event::Init);
        assert_eq!((slot.synced, slot.object), (true, Some(1)));
        slot.apply(Event::InitDone);
        assert_eq!((slot.synced, slot.object), (true, None));
    }
}
