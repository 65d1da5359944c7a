//! Stores values that many pods share only once: namespaces, node names, label sets, owners, tolerations. A sweep removes
//! unused values. Its cost is proportional to the number of changes.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use super::Toleration;
use super::pod::Owner;

/// Minimum number of changes between two sweeps.
const MIN_CHANGES_BETWEEN_SWEEPS: usize = 1024;

/// The shared values of pods, by type.
#[derive(Debug, Default)]
pub struct Interner {
    /// Namespaces, node names, label sets.
    pub(super) texts: Pool<str>,
    pub(super) owners: Pool<Owner>,
    pub(super) tolerations: Pool<[Toleration]>,
    pub(super) annotations: Pool<BTreeMap<String, String>>,
    /// Number of pods created or deleted since the last sweep.
    changes: usize,
    /// Number of values after the last sweep.
    kept: usize,
}

impl Interner {
    /// The shared copy of this text.
    pub fn share(&mut self, text: &str) -> Arc<str> {
        self.texts.share(text)
    }

    /// Counts a created or deleted pod, and sweeps if enough pods have changed.
    pub fn changed(&mut self) {
        self.changes += 1;
        if self.changes > MIN_CHANGES_BETWEEN_SWEEPS.max(self.kept / 2) {
            self.sweep();
        }
    }

    /// Removes unused values.
    pub(super) fn sweep(&mut self) {
        self.changes = 0;
        self.texts.sweep();
        self.owners.sweep();
        self.tolerations.sweep();
        self.annotations.sweep();
        self.kept = self.len();
    }

    /// Number of stored values.
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
    fn equal_values_are_shared() {
        let mut interner = Interner::default();
        let (a, b, c) =
            (interner.texts.share("a=1\n"), interner.texts.share("a=1\n"), interner.texts.share("a=2\n"));
        assert!(Arc::ptr_eq(&a, &b));
        assert!(!Arc::ptr_eq(&a, &c));
        assert_eq!(interner.len(), 2);
    }

    #[test]
    fn sweep_removes_only_unused_values() {
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

    /// Pods with unique labels are created and deleted, and the number of stored values stays bounded.
    #[test]
    fn interner_does_not_grow_with_churn() {
        let mut interner = Interner::default();
        let lasting: Vec<_> =
            (0..5_000).map(|i| interner.texts.share(format!("lasting-{i}").as_str())).collect();
        let mut largest = 0;
        for i in 0..200_000 {
            drop(interner.texts.share(format!("pod-{i}").as_str()));
            interner.changed();
            largest = largest.max(interner.len());
        }
        assert!(largest <= 2 * lasting.len() + MIN_CHANGES_BETWEEN_SWEEPS, "{largest}");
    }
}
