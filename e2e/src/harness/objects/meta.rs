//! Metadata methods that all builders share.

/// Methods for a builder with a field `metadata`.
macro_rules! metadata_methods {
    () => {
        /// Sets a label.
        #[must_use]
        pub fn label(mut self, key: &str, value: &str) -> Self {
            self.metadata.labels.get_or_insert_default().insert(key.to_owned(), value.to_owned());
            self
        }

        /// Sets an annotation.
        #[must_use]
        pub fn annotation(mut self, key: &str, value: &str) -> Self {
            self.metadata.annotations.get_or_insert_default().insert(key.to_owned(), value.to_owned());
            self
        }

        /// Adds a finalizer.
        #[must_use]
        pub fn finalizer(mut self, finalizer: &str) -> Self {
            self.metadata.finalizers.get_or_insert_default().push(finalizer.to_owned());
            self
        }
    };
}

/// The method for a builder of namespaced objects.
macro_rules! namespace_method {
    () => {
        /// Sets the namespace, which is `default` otherwise.
        #[must_use]
        pub fn namespace(mut self, namespace: &str) -> Self {
            self.metadata.namespace = Some(namespace.to_owned());
            self
        }
    };
}

pub(super) use {metadata_methods, namespace_method};
