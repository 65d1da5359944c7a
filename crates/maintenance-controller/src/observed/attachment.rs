//! A VolumeAttachment, as observed.

use std::sync::Arc;

use k8s_openapi::api::storage::v1::VolumeAttachment;

/// A volume that is attached to a node, as last observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedAttachment {
    /// The node.
    pub node: Arc<str>,
    /// The persistent volume; for an inline volume, the name of the VolumeAttachment.
    pub volume: Arc<str>,
}

impl ObservedAttachment {
    /// Keeps what is needed of a VolumeAttachment; `None` if nothing is attached.
    ///
    /// The attacher sets `status.attached` when the volume is attached, and clears it together with its finalizer when the
    /// volume is detached. Before that, the kubelet has not used the volume. After a failed attempt, the volume may be attached.
    /// <https://github.com/kubernetes-csi/external-attacher/blob/v4.10.0/pkg/controller/csi_handler.go>
    pub fn new(attachment: VolumeAttachment) -> Option<Self> {
        let VolumeAttachment { metadata, spec, status } = attachment;
        let volume = spec.source.persistent_volume_name.or(metadata.name).unwrap_or_default();
        let status = status.unwrap_or_default();
        let attached = status.attached || status.attach_error.is_some() || status.detach_error.is_some();
        attached.then(|| Self { node: spec.node_name.into(), volume: volume.into() })
    }
}
