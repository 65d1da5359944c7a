//! Pods, alone or as the template of a workload.

use k8s_openapi::api::core::v1::{
    Container, EmptyDirVolumeSource, PersistentVolumeClaimVolumeSource, Pod, PodSpec, PodTemplateSpec,
    Toleration, Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Resource;
use kube::api::ObjectMeta;

use super::meta::{metadata_methods, namespace_method};

/// A pod with one container.
#[derive(Clone, Debug)]
pub struct PodBuilder {
    metadata: ObjectMeta,
    spec: PodSpec,
}

/// A pod with this name in the namespace `default`.
pub fn pod(name: &str) -> PodBuilder {
    let container = Container {
        name: "main".to_owned(),
        image: Some("example.invalid/main".to_owned()),
        ..Container::default()
    };
    PodBuilder {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some("default".to_owned()),
            ..ObjectMeta::default()
        },
        spec: PodSpec { containers: vec![container], ..PodSpec::default() },
    }
}

impl PodBuilder {
    metadata_methods!();
    namespace_method!();

    /// Places the pod on this node without the scheduler.
    #[must_use]
    pub fn node(mut self, node: &str) -> Self {
        self.spec.node_name = Some(node.to_owned());
        self
    }

    /// Makes this object, which must have come from the API server, the pod's controller.
    #[must_use]
    pub fn controlled_by<K: Resource<DynamicType = ()>>(mut self, owner: &K) -> Self {
        self.metadata.owner_references.get_or_insert_default().extend(owner.controller_owner_ref(&()));
        self
    }

    /// Adds any owner reference.
    #[must_use]
    pub fn owner(mut self, owner: OwnerReference) -> Self {
        self.metadata.owner_references.get_or_insert_default().push(owner);
        self
    }

    /// Sets the name of the pod's `PriorityClass`, which gives it its priority.
    #[must_use]
    pub fn priority_class(mut self, name: &str) -> Self {
        self.spec.priority_class_name = Some(name.to_owned());
        self
    }

    /// Tolerates every taint.
    #[must_use]
    pub fn tolerates_everything(self) -> Self {
        self.toleration(Toleration { operator: Some("Exists".to_owned()), ..Toleration::default() })
    }

    /// Tolerates all taints with this key and effect, for this many seconds or forever.
    #[must_use]
    pub fn tolerates(self, key: &str, effect: &str, seconds: Option<i64>) -> Self {
        self.toleration(Toleration {
            key: Some(key.to_owned()),
            operator: Some("Exists".to_owned()),
            effect: Some(effect.to_owned()),
            toleration_seconds: seconds,
            value: None,
        })
    }

    /// Adds any toleration.
    #[must_use]
    pub fn toleration(mut self, toleration: Toleration) -> Self {
        self.spec.tolerations.get_or_insert_default().push(toleration);
        self
    }

    /// Sets the termination grace period.
    #[must_use]
    pub fn grace(mut self, seconds: i64) -> Self {
        self.spec.termination_grace_period_seconds = Some(seconds);
        self
    }

    /// Adds an emptyDir volume.
    #[must_use]
    pub fn empty_dir(self, name: &str) -> Self {
        self.volume(Volume {
            name: name.to_owned(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        })
    }

    /// Adds a volume of this `PersistentVolumeClaim`.
    #[must_use]
    pub fn claim(self, claim: &str) -> Self {
        let source = PersistentVolumeClaimVolumeSource { claim_name: claim.to_owned(), ..Default::default() };
        self.volume(Volume {
            name: claim.to_owned(),
            persistent_volume_claim: Some(source),
            ..Volume::default()
        })
    }

    /// Adds any volume.
    #[must_use]
    pub fn volume(mut self, volume: Volume) -> Self {
        self.spec.volumes.get_or_insert_default().push(volume);
        self
    }

    /// Makes KWOK run the pod without it becoming ready until the annotation is removed.
    #[must_use]
    pub fn not_ready(self) -> Self {
        self.annotation("haulout.test/ready", "false")
    }

    /// Makes the pod take this many seconds, and at most one more, to terminate.
    #[must_use]
    pub fn delete_delay(self, seconds: u32) -> Self {
        self.annotation("haulout.test/delete-delay", &seconds.to_string())
    }

    /// Makes the pod succeed after this time, such as `10s`.
    #[must_use]
    pub fn runs_for(self, duration: &str) -> Self {
        self.annotation("haulout.test/run-for", duration)
    }

    /// Changes other fields.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut PodSpec)) -> Self {
        change(&mut self.spec);
        self
    }

    /// The pod.
    pub fn build(self) -> Pod {
        Pod { metadata: self.metadata, spec: Some(self.spec), status: None }
    }

    /// The pod as a template, without name and namespace.
    pub fn template(mut self) -> PodTemplateSpec {
        self.metadata.name = None;
        self.metadata.namespace = None;
        PodTemplateSpec { metadata: Some(self.metadata), spec: Some(self.spec) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_has_only_the_given_fields() {
        let built = pod("web-1").namespace("web").node("n1").label("app", "web").delete_delay(3).build();
        let expected = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "web-1",
                "namespace": "web",
                "labels": { "app": "web" },
                "annotations": { "haulout.test/delete-delay": "3" },
            },
            "spec": {
                "nodeName": "n1",
                "containers": [{ "name": "main", "image": "example.invalid/main" }],
            },
        });
        assert_eq!(serde_json::to_value(built).unwrap(), expected);
    }
}
