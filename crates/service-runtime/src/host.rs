//! The machine that we run on.

/// The host's name, which in a pod is the pod's.
pub(crate) fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
