//! Everything that anybody can have observed of an object.

use tokio_util::task::AbortOnDropHandle;

use super::*;

/// All values of an object since the start of a watch.
pub(super) struct History<T> {
    values: Arc<Mutex<Vec<T>>>,
    watch: AbortOnDropHandle<()>,
}

impl<T: Clone + PartialEq + std::fmt::Debug + Send + 'static> History<T> {
    /// Starts with the current value, if the object exists. The watch receives every change.
    pub(super) async fn start<K: wait::Watchable>(
        api: Api<K>,
        name: &str,
        value: impl Fn(&K) -> T + Send + 'static,
    ) -> Self {
        use futures::TryStreamExt as _;
        use kube::runtime::watcher::Event;
        let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let (values, started) = (Arc::<Mutex<Vec<T>>>::default(), Arc::new(tokio::sync::Notify::new()));
        let (observed, start) = (Arc::clone(&values), Arc::clone(&started));
        let watch = tokio::spawn(async move {
            let mut events = std::pin::pin!(watcher(api, only));
            while let Some(event) = events.try_next().await.expect("a watch without gaps") {
                match event {
                    Event::Apply(object) | Event::InitApply(object) => {
                        let (mut values, new) = (observed.lock().unwrap(), value(&object));
                        if values.last() != Some(&new) {
                            values.push(new);
                        }
                    }
                    Event::InitDone => start.notify_one(),
                    Event::Init | Event::Delete(_) => {}
                }
            }
        });
        started.notified().await;
        Self { values, watch: AbortOnDropHandle::new(watch) }
    }

    /// The values so far, without repetitions.
    pub(super) fn values(&self) -> Vec<T> {
        assert!(!self.watch.is_finished(), "the watch has ended");
        self.values.lock().unwrap().clone()
    }

    /// Waits for a value that meets the condition.
    pub(super) async fn until(&self, what: &str, condition: impl Fn(&T) -> bool) {
        let found =
            wait::eventually(what, SOON, async || Ok(self.values().iter().any(&condition).then_some(())));
        found.await.unwrap_or_else(|error| panic!("{error:#}: {:?}", self.values()));
    }

    /// Waits until the last value meets the condition. Returns all values.
    pub(super) async fn until_last(&self, what: &str, condition: impl Fn(&T) -> bool) -> Vec<T> {
        let found = wait::eventually(what, SOON, async || {
            Ok(self.values().last().is_some_and(&condition).then_some(()))
        });
        found.await.unwrap_or_else(|error| panic!("{error:#}: {:?}", self.values()));
        self.values()
    }
}
