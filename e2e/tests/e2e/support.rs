//! Helpers for several tests.

use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::time::Instant;

use futures::FutureExt as _;
use futures::future::{LocalBoxFuture, join_all};
use haulout_e2e::{Cluster, Handle};

/// The cluster that tests share, with the chart installed.
pub enum Shared {
    /// Booted by xtask.
    Attached(Handle),
    /// Booted for this test only, because the test was not started by xtask.
    Owned(Cluster),
}

impl Deref for Shared {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        match self {
            Self::Attached(handle) => handle,
            Self::Owned(cluster) => cluster,
        }
    }
}

/// The shared cluster. Tests use their own names and namespaces in it.
pub async fn shared() -> Shared {
    if let Some(handle) = Handle::from_env(Handle::ENV).unwrap() {
        return Shared::Attached(handle);
    }
    let cluster = Cluster::builder().name("test").audit(true).boot().await.unwrap();
    cluster.install_chart(&[]).await.unwrap();
    Shared::Owned(cluster)
}

/// The xtask binary, for tests of its commands.
pub fn xtask() -> std::path::PathBuf {
    let path =
        std::env::var_os(haulout_e2e::service::XTASK_ENV).expect("run this test with `cargo xtask e2e`");
    path.into()
}

/// A scenario with its name.
type NamedScenario<'a> = (&'static str, LocalBoxFuture<'a, ()>);

/// Runs independent scenarios at the same time, so that they share one cluster. All run to their end, and the failed
/// ones are reported.
pub async fn all_at_once(scenarios: Vec<NamedScenario<'_>>) {
    let failed: Vec<_> = join_all(scenarios.into_iter().map(run)).await.into_iter().flatten().collect();
    assert!(failed.is_empty(), "these failed: {}", failed.join(", "));
}

/// Runs scenarios one after the other, up to the first failure.
pub async fn one_by_one(scenarios: Vec<NamedScenario<'_>>) {
    for scenario in scenarios {
        let failed = run(scenario).await;
        assert!(failed.is_none(), "{failed:?} failed");
    }
}

/// Returns the name if the scenario fails.
async fn run((name, scenario): NamedScenario<'_>) -> Option<&'static str> {
    let begun = Instant::now();
    let failed = AssertUnwindSafe(scenario).catch_unwind().await.is_err();
    let verdict = if failed { "FAILED" } else { "ok" };
    println!("{verdict} {name} ({:.1} s)", begun.elapsed().as_secs_f64());
    failed.then_some(name)
}

/// Async functions of one argument, with their names.
macro_rules! scenarios {
    ($argument:expr; $($scenario:path),+ $(,)?) => {
        vec![$((
            stringify!($scenario),
            Box::pin($scenario($argument)) as futures::future::LocalBoxFuture<'_, ()>,
        )),+]
    };
}
pub(crate) use scenarios;
