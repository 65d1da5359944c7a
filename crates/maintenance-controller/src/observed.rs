//! What the controller keeps of the objects that it watches, one file per kind: the fields that decisions need, and the
//! version that a write needs as its precondition.

mod attachment;
mod evacuation;
mod maintenance;
mod node;
mod own_pod;
mod version;

pub use attachment::ObservedAttachment;
pub use evacuation::{ObservedEvacuation, SlimEvacuation};
pub use maintenance::ObservedMaintenance;
pub use node::{ObservedNode, SlimNode, tolerates_cordon};
pub use own_pod::ObservedOwnPod;
pub use version::Version;
