//! Programs of this machine in pods. A real node has the files of the machine, so a pod can mount them and needs no image of
//! its own.

use std::path::Path;

use k8s_openapi::api::core::v1::{HostPathVolumeSource, PodSpec, Volume, VolumeMount};

use super::{SLEEPER, text};

/// Where a machine may have libraries.
const LIBRARIES: [&str; 3] = ["/lib", "/lib64", "/usr/lib"];

/// Makes the containers of a pod run this program with these arguments.
pub fn run_program(spec: &mut PodSpec, program: &Path, args: &[&str]) {
    let program = text(program);
    let libraries = LIBRARIES.into_iter().filter(|folder| Path::new(folder).exists());
    let places = libraries.map(|folder| (folder, folder)).chain([(program.as_str(), "/program")]);
    for (number, (from, to)) in places.enumerate() {
        let name = format!("machine-{number}");
        let host_path = HostPathVolumeSource { path: from.to_owned(), type_: None };
        let volume = Volume { name: name.clone(), host_path: Some(host_path), ..Volume::default() };
        spec.volumes.get_or_insert_default().push(volume);
        for container in &mut spec.containers {
            container.volume_mounts.get_or_insert_default().push(VolumeMount {
                name: name.clone(),
                mount_path: to.to_owned(),
                read_only: Some(true),
                ..VolumeMount::default()
            });
        }
    }
    for container in &mut spec.containers {
        container.image = Some(SLEEPER.to_owned());
        let command = ["/program"].iter().chain(args);
        container.command = Some(command.map(|&part| part.to_owned()).collect());
    }
}
