//! Creates more objects than a client could in a reasonable time: copies of one that came through the API server,
//! written directly into etcd.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use haulout_api_types::Evacuation;
use haulout_api_types::evacuators::evacuation_for;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Serialize;

use super::is_ready;
use crate::etcd::Etcd;
use crate::wait;

/// The etcd prefixes of these kinds.
pub(super) const NODES: &str = "minions";
pub(super) const PODS: &str = "pods";
pub(super) const BUDGETS: &str = "poddisruptionbudgets";
pub(super) const EVACUATIONS: &str = "evacuation.coordination.k8s.io/evacuations";

const INSTIGATOR: &str = "bench.example.com";
const LIMIT: Duration = Duration::from_secs(60);
const OBJECTS_AT_ONCE: usize = 100;
const IN_FLIGHT: usize = 4;
const IN_FLIGHT_WATCHED: usize = 16;

/// Creates and runs a pod, and deletes it again. The result is the pod that others are copied from.
pub(super) async fn pod(client: &Client, pod: &Pod) -> Result<Pod> {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let name = pods.create(&PostParams::default(), pod).await.context("creating a pod to copy")?.name_any();
    let mut made = wait::present(pods.clone(), &name, "is ready", LIMIT, is_ready).await?;
    pods.delete(&name, &DeleteParams::default()).await.context("deleting the pod that was copied")?;
    wait::gone(pods, &name, LIMIT).await?;
    made.metadata.resource_version = None;
    Ok(made)
}

/// A copy of this pod, on this node.
pub(super) fn copy(template: &Pod, name: String, node: String) -> Pod {
    let mut pod = template.clone();
    pod.metadata.name = Some(name);
    pod.metadata.uid = Some(uid());
    if let Some(spec) = &mut pod.spec {
        spec.node_name = Some(node);
    }
    pod
}

/// The Evacuation of this pod.
pub(super) fn evacuation(pod: &Pod) -> Result<Evacuation> {
    let (evacuation, _) = evacuation_for(&pod.metadata, INSTIGATOR, &BTreeSet::new())?;
    Ok(evacuation)
}

/// A unique UID.
pub(super) fn uid() -> String {
    let random = fastrand::u128(..);
    format!(
        "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}",
        random >> 96,
        random >> 80 & 0xffff,
        random >> 68 & 0xfff,
        random >> 56 & 0xfff,
        random & 0xffff_ffff_ffff
    )
}

/// Writes objects to the etcd prefix of this kind, many in one revision. A client that watches them at the same time
/// may miss some: the API server closes a slow watch, and the next one starts after the last received revision.
pub(super) async fn store<K: Resource + Serialize>(etcd: &Etcd, kind: &str, objects: &[K]) -> Result<()> {
    write(etcd, kind, objects, OBJECTS_AT_ONCE, IN_FLIGHT).await
}

/// Writes objects, each in its own revision as an API server does, while others watch.
pub(super) async fn store_while_watched<K: Resource + Serialize>(
    etcd: &Etcd,
    kind: &str,
    objects: &[K],
) -> Result<()> {
    write(etcd, kind, objects, 1, IN_FLIGHT_WATCHED).await
}

async fn write<K: Resource + Serialize>(
    etcd: &Etcd,
    kind: &str,
    objects: &[K],
    at_once: usize,
    in_flight: usize,
) -> Result<()> {
    let batches = objects.chunks(at_once).map(async |objects| {
        let values = objects.iter().map(|object| {
            let namespace = object.namespace().map(|namespace| format!("{namespace}/")).unwrap_or_default();
            let value = serde_json::to_vec(object).context("writing an object")?;
            Ok((format!("/registry/{kind}/{namespace}{}", object.name_any()), value))
        });
        etcd.put(values.collect::<Result<_>>()?).await
    });
    stream::iter(batches).buffer_unordered(in_flight).try_collect().await
}
