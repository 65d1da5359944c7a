//! Shares what is equal in many pods: namespaces, node names, label sets, owners, tolerations. Values
//! that no pod uses any longer are swept out, at a cost in proportion to what comes and goes.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use super::Toleration;
use super::pod::Owner;

/// Below this many changes a sweep is not worth it.
const FEWEST_BETWEEN_SWEEPS: usize = 1024;

/// Everything that pods share, by type.
#[derive(Debug, Default)]
pub struct Interner {
    /// Namespaces, node names, label sets.
    pub(super) texts: Pool<str>,
    pub(super) owners: Pool<Owner>,
    pub(super) tolerations: Pool<[Toleration]>,
    pub(super) annotations: Pool<BTreeMap<String, String>>,
    /// Pods made or gone since the last sweep, each of which may have left something behind.
    changes: usize,
    /// How many values the last sweep left.
    kept: usize,
}

impl Interner {
    /// The shared copy of this text.
    pub fn share(&mut self, text: &str) -> Arc<str> {
        self.texts.share(text)
    }

    /// Tells that a pod has been made or has gone, and sweeps when it is time.
    pub fn changed(&mut self) {
        self.changes += 1;
        if self.changes > FEWEST_BETWEEN_SWEEPS.max(self.kept / 2) {
            self.sweep();
        }
    }

    /// Forgets what nobody uses.
    pub(super) fn sweep(&mut self) {
        self.changes = 0;
        self.texts.sweep();
        self.owners.sweep();
        self.tolerations.sweep();
        self.annotations.sweep();
        self.kept = self.len();
    }

    /// How many values are held.
    pub(super) fn len(&self) -> usize {
        self.texts.0.len() + self.owners.0.len() + self.tolerations.0.len() + self.annotations.0.len()
    }
}

/// Distinct values of one type.
#[derive(Debug)]
pub(super) struct Pool<T: ?Sized>(HashSet<Arc<T>>);

impl<T: ?Sized> Default for Pool<T> {
    fn default() -> Self {
        Self(HashSet::new())
    }
}

impl<T: ?Sized + Eq + Hash> Pool<T> {
    /// The shared copy of this value.
    pub(super) fn share<V: Borrow<T> + Into<Arc<T>>>(&mut self, value: V) -> Arc<T> {
        if let Some(shared) = self.0.get(value.borrow()) {
            return Arc::clone(shared);
        }
        let shared = value.into();
        self.0.insert(Arc::clone(&shared));
        shared
    }

    fn sweep(&mut self) {
        self.0.retain(|value| Arc::strong_count(value) > 1);
        if self.0.capacity() > 4 * self.0.len() {
            self.0.shrink_to(2 * self.0.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_one() {
        let mut interner = Interner::default();
        let (a, b, c) =
            (interner.texts.share("a=1\n"), interner.texts.share("a=1\n"), interner.texts.share("a=2\n"));
        assert!(Arc::ptr_eq(&a, &b));
        assert!(!Arc::ptr_eq(&a, &c));
        assert_eq!(interner.len(), 2);
    }

    #[test]
    fn what_nobody_uses_goes_and_the_rest_stays() {
        let mut interner = Interner::default();
        let kept = interner.texts.share("kept");
        drop(interner.texts.share("dropped"));
        let tolerations = interner.tolerations.share(vec![Toleration::default()]);
        interner.sweep();
        assert_eq!(interner.len(), 2);
        assert!(Arc::ptr_eq(&kept, &interner.texts.share("kept")));
        drop((kept, tolerations));
        interner.sweep();
        assert_eq!(interner.len(), 0);
        assert_eq!(interner.texts.0.capacity(), 0);
    }

    /// Pods that come and go for ever, each with labels of its own, leave no more behind than a few.
    #[test]
    fn it_does_not_grow_with_what_comes_and_goes() {
        let mut interner = Interner::default();
        let lasting: Vec<_> =
            (0..5_000).map(|i| interner.texts.share(format!("lasting-{i}").as_str())).collect();
        let mut largest = 0;
        for i in 0..200_000 {
            drop(interner.texts.share(format!("pod-{i}").as_str()));
            interner.changed();
            largest = largest.max(interner.len());
        }
        assert!(largest <= 2 * lasting.len() + FEWEST_BETWEEN_SWEEPS, "{largest}");
    }
}
