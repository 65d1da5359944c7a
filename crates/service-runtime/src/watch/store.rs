//! All objects of one kind by name, for those who only look things up.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{Handler, Unreadable};

/// The objects of one kind that a watch has brought, of a cluster-scoped kind or of one namespace. One that cannot be read
/// is not in it.
pub struct Store<K> {
    objects: RwLock<BTreeMap<Arc<str>, Arc<K>>>,
    /// Removes what nobody reads.
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
    /// Keeps what `slim` leaves of the objects, and notifies of every change.
    pub fn new(slim: fn(&mut K), changed: Arc<Notify>) -> Self {
        Self { objects: RwLock::default(), slim, synced: CancellationToken::new(), changed }
    }

    /// The object with this name.
    pub fn get(&self, name: &str) -> Option<Arc<K>> {
        self.objects.read().get(name).cloned()
    }

    /// All objects, sorted by name. Waits until they have been listed: an empty store is no answer before that.
    pub async fn all(&self) -> Vec<Arc<K>> {
        self.synced().await;
        self.objects.read().values().cloned().collect()
    }

    /// Whether all objects have been listed once: before that, an object that is not here may exist.
    pub fn is_synced(&self) -> bool {
        self.synced.is_cancelled()
    }

    /// Waits until all objects have been listed once.
    pub async fn synced(&self) {
        self.synced.cancelled().await;
    }

    /// Takes the answer to a write, which the watch will bring later.
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
