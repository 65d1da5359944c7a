//! Waits for conditions with a deadline, with a watch wherever possible.

use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use futures::TryStreamExt as _;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Api, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Kinds that can be watched.
pub trait Watchable:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize + Send + 'static
{
}
impl<K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize + Send + 'static> Watchable
    for K
{
}

/// Waits until the object with this name, or its absence (`None`), meets the condition, and returns it. `what`
/// completes the sentence "Pod web-1 …", as in "is Ready".
pub async fn until<K: Watchable>(
    api: Api<K>,
    name: &str,
    what: &str,
    limit: Duration,
    mut condition: impl FnMut(Option<&K>) -> bool,
) -> Result<Option<K>> {
    let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let sentence = format!("{} {name} {what}", K::kind(&()));
    let found = watch_until(api, only, &sentence, limit, |found| condition(found.first())).await?;
    Ok(found.into_iter().next())
}

/// Waits until the object with this name exists and meets the condition, and returns it.
pub async fn present<K: Watchable>(
    api: Api<K>,
    name: &str,
    what: &str,
    limit: Duration,
    mut condition: impl FnMut(&K) -> bool,
) -> Result<K> {
    let found = until(api, name, what, limit, |object| object.is_some_and(&mut condition)).await?;
    found.with_context(|| format!("{} {name} vanished", K::kind(&())))
}

/// Waits until there is no object with this name.
pub async fn gone<K: Watchable>(api: Api<K>, name: &str, limit: Duration) -> Result<()> {
    until(api, name, "is gone", limit, |object| object.is_none()).await?;
    Ok(())
}

/// Waits until all objects that `config` selects (`watcher::Config::default().labels(…)`) together meet the condition,
/// in no particular order. `what` completes the sentence "The Pods …".
pub async fn all<K: Watchable>(
    api: Api<K>,
    config: watcher::Config,
    what: &str,
    limit: Duration,
    condition: impl FnMut(&[K]) -> bool,
) -> Result<Vec<K>> {
    watch_until(api, config, &format!("the {}s {what}", K::kind(&())), limit, condition).await
}

async fn watch_until<K: Watchable>(
    api: Api<K>,
    config: watcher::Config,
    sentence: &str,
    limit: Duration,
    mut condition: impl FnMut(&[K]) -> bool,
) -> Result<Vec<K>> {
    let deadline = Instant::now() + limit;
    let mut objects: Vec<K> = Vec::new();
    let mut listed = false;
    // The watcher reconnects by itself after an outage of the API server. Its error is reported at the deadline.
    let mut watch_error = None;
    let mut events = pin!(watch(api, config).default_backoff());
    loop {
        let Ok(event) = timeout_at(deadline, events.try_next()).await else {
            break;
        };
        match event {
            Ok(Some(Event::Init)) => {
                listed = false;
                objects.clear();
            }
            Ok(Some(Event::InitApply(object) | Event::Apply(object))) => {
                remove(&mut objects, &object);
                objects.push(object);
            }
            Ok(Some(Event::Delete(object))) => remove(&mut objects, &object),
            Ok(Some(Event::InitDone)) => listed = true,
            Ok(None) => break,
            Err(error) => {
                watch_error = Some(error);
                continue;
            }
        }
        watch_error = None;
        if listed && condition(&objects) {
            return Ok(objects);
        }
    }
    let seconds = limit.as_secs_f64();
    match watch_error {
        Some(error) => {
            Err(anyhow!(error).context(format!("timed out after {seconds} s waiting until {sentence}")))
        }
        None => {
            bail!("timed out after {seconds} s waiting until {sentence}; last state:\n{}", describe(&objects))
        }
    }
}

/// Removes the earlier version of this object.
fn remove<K: Resource>(objects: &mut Vec<K>, object: &K) {
    let (name, namespace) = (&object.meta().name, &object.meta().namespace);
    let earlier = |other: &K| other.meta().name == *name && other.meta().namespace == *namespace;
    if let Some(position) = objects.iter().position(earlier) {
        objects.swap_remove(position);
    }
}

/// The objects as YAML without managed fields. Long lists are truncated.
fn describe<K: Serialize>(objects: &[K]) -> String {
    const MAX_SHOWN: usize = 10;
    let count = objects.len();
    if count == 0 {
        return "nothing".to_owned();
    }
    let mut text = String::new();
    for object in objects.iter().take(MAX_SHOWN) {
        let yaml = serde_json::to_value(object).map_err(|error| error.to_string()).and_then(|mut value| {
            if let Some(metadata) = value.get_mut("metadata").and_then(|metadata| metadata.as_object_mut()) {
                metadata.remove("managedFields");
            }
            serde_yaml::to_string(&value).map_err(|error| error.to_string())
        });
        text += "---\n";
        text += &yaml.unwrap_or_else(|error| error);
    }
    if count > MAX_SHOWN {
        text.extend(["and ", &(count - MAX_SHOWN).to_string(), " more\n"]);
    }
    text
}

/// Retries until `attempt` returns a value, for conditions that cannot be watched. An error ends the wait at once.
/// `Ok(None)` means not yet. `what` describes the condition, as in "the API server is ready".
pub async fn eventually<T>(
    what: &str,
    limit: Duration,
    mut attempt: impl AsyncFnMut() -> Result<Option<T>>,
) -> Result<T> {
    const POLL_INTERVAL: Duration = Duration::from_millis(50);
    let deadline = Instant::now() + limit;
    let seconds = limit.as_secs_f64();
    loop {
        let next = Instant::now() + POLL_INTERVAL;
        match timeout_at(deadline, attempt()).await {
            Ok(Ok(Some(value))) => return Ok(value),
            Ok(Ok(None)) if next < deadline => sleep_until(next).await,
            Ok(Err(error)) => return Err(error.context(format!("failed while waiting until {what}"))),
            _ => bail!("timed out after {seconds} s waiting until {what}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;

    use super::*;

    #[tokio::test]
    async fn eventually_returns_the_first_value_or_times_out() {
        let mut tries = 0;
        let value = eventually("three", Duration::from_secs(60), async || {
            tries += 1;
            Ok((tries == 3).then_some(tries))
        });
        assert_eq!(value.await.unwrap(), 3);
        let never = eventually("pigs fly", Duration::from_millis(200), async || Ok(None::<()>)).await;
        assert_eq!(never.unwrap_err().to_string(), "timed out after 0.2 s waiting until pigs fly");
        let hangs = eventually("it answers", Duration::from_millis(200), async || {
            std::future::pending::<()>().await;
            Ok(Some(()))
        });
        assert_eq!(hangs.await.unwrap_err().to_string(), "timed out after 0.2 s waiting until it answers");
    }

    #[test]
    fn long_lists_are_truncated() {
        let objects = vec![ConfigMap::default(); 12];
        let text = describe(&objects);
        assert_eq!(text.matches("---\n").count(), 10);
        assert!(text.ends_with("and 2 more\n"));
        assert_eq!(describe::<ConfigMap>(&[]), "nothing");
    }
}
