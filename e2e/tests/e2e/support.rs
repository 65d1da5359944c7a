//! What several tests need.

use std::ops::Deref;

use haulout_e2e::{Cluster, Handle};

/// The cluster that tests share, with the chart installed.
pub enum Shared {
    /// Booted by xtask.
    Attached(Handle),
    /// Booted for this test alone, because it was not started by xtask.
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

/// The shared cluster. Tests in it keep to names and namespaces of their own.
pub async fn shared() -> Shared {
    if let Some(handle) = Handle::from_env(Handle::ENV).unwrap() {
        return Shared::Attached(handle);
    }
    let cluster = Cluster::builder().name("test").audit(true).boot().await.unwrap();
    cluster.install_chart(&[]).await.unwrap();
    Shared::Owned(cluster)
}

/// The program under test where a test is about the commands themselves.
pub fn xtask() -> std::path::PathBuf {
    let path =
        std::env::var_os(haulout_e2e::service::XTASK_ENV).expect("run this test with `cargo xtask e2e`");
    path.into()
}
