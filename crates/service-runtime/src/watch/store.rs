//! A store of objects of one kind by name, for lookups.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{Handler, Unreadable};

/// The objects of a cluster-scoped kind or of one namespace. Unreadable objects are not included.
pub struct Store<K> {
    objects: RwLock<BTreeMap<Arc<str>, Arc<K>>>,
    /// Removes unused fields.
    slim: fn(&mut K),
    synced: CancellationToken,
    changed: Arc<Notify>,
}

impl<K> Default for Store<K> {
    fn default() -> Self {
        Self::new(|_| {}, Arc::default())
    }
}

impl<K> Store<K> {
    /// A store that applies `slim` to every object and notifies `changed` of every change.
    pub fn new(slim: fn(&mut K), changed: Arc<Notify>) -> Self {
        Self { objects: RwLock::default(), slim, synced: CancellationToken::new(), changed }
    }

    /// The object with this name.
    pub fn get(&self, name: &str) -> Option<Arc<K>> {
        self.objects.read().get(name).cloned()
    }

    /// All objects, sorted by name. Waits until the store is synced.
    pub async fn all(&self) -> Vec<Arc<K>> {
        self.synced().await;
        self.objects.read().values().cloned().collect()
    }

    /// Whether all objects have been listed once. Before that, objects can be missing.
    pub fn is_synced(&self) -> bool {
        self.synced.is_cancelled()
    }

    /// Waits until all objects have been listed once.
    pub async fn synced(&self) {
        self.synced.cancelled().await;
    }

    /// Stores the result of a write before the watch reports it.
    pub fn put(&self, name: &str, object: K) {
        self.change(|objects| drop(objects.insert(name.into(), Arc::new(object))));
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<Arc<str>, Arc<K>>)) {
        change(&mut self.objects.write());
        self.changed.notify_one();
    }
}

impl<K: Send + Sync + 'static> Handler<K> for Store<K> {
    type Key = Arc<str>;

    fn apply(&self, name: Arc<str>, mut object: K) {
        (self.slim)(&mut object);
        self.change(|objects| drop(objects.insert(name, Arc::new(object))));
    }

    fn unreadable(&self, name: Arc<str>, _: Unreadable) {
        self.delete(name);
    }

    fn delete(&self, name: Arc<str>) {
        self.change(|objects| drop(objects.remove(&name)));
    }

    fn resumed(&self) {
        self.synced.cancel();
        self.changed.notify_one();
    }
}
