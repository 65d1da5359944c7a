//! The artifacts of `cargo xtask dist`.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::Command;

use haulout_e2e::service::BINARIES as SERVICES;
use serde_json::{Value, json};

use crate::support::xtask;

fn dist(output: &Path, args: &[&str]) -> BTreeMap<String, String> {
    let made = Command::new(xtask()).args(["dist", "--output"]).arg(output).args(args).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let sums = fs::read_to_string(output.join("SHA256SUMS")).unwrap();
    let lines = sums.lines().map(|line| line.split_once("  ").unwrap());
    lines.map(|(sum, name)| (name.to_owned(), sum.to_owned())).collect()
}

/// The files in an archive: path, mode, owner and time, contents.
fn unpack(archive: impl std::io::Read) -> BTreeMap<String, (u32, u64, Vec<u8>)> {
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(archive).entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut contents = Vec::new();
        entry.read_to_end(&mut contents).unwrap();
        let (path, header) = (entry.path().unwrap().display().to_string(), entry.header());
        files.insert(path, (header.mode().unwrap(), header.mtime().unwrap(), contents));
    }
    files
}

#[test]
#[ignore = "slow"]
fn images_are_small_and_hold_one_static_program() {
    let folder = tempfile::tempdir().unwrap();
    let sums = dist(folder.path(), &[]);
    let checked = Command::new("sha256sum")
        .args(["--check", "--strict", "SHA256SUMS"])
        .current_dir(folder.path())
        .output();
    assert!(checked.unwrap().status.success());
    let platform = format!("linux-{}", haulout_e2e::image::architecture());
    for service in SERVICES {
        let program = fs::read(folder.path().join(format!("{service}-{platform}"))).unwrap();
        let archive = fs::read(folder.path().join(format!("{service}-{platform}.oci.tar"))).unwrap();
        let files = unpack(archive.as_slice());
        let read = |name: &str| files[name].2.as_slice();
        let blob = |descriptor: &Value| {
            read(&format!("blobs/{}", descriptor["digest"].as_str().unwrap().replace(':', "/")))
        };
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let manifest = json(blob(&json(read("index.json"))["manifests"][0]));
        let config = json(blob(&manifest["config"]));
        assert_eq!(config["config"], json!({"Entrypoint": ["/service"], "User": "65532:65532"}));
        let layers = manifest["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 1);
        let layer = unpack(flate2::read::GzDecoder::new(blob(&layers[0])));
        assert_eq!(layer.keys().collect::<Vec<_>>(), ["service"], "nothing else is in the image");
        assert_eq!(layer["service"], (0o755, 0, program.clone()));
        // Users care about the uncompressed size on disk.
        assert!(program.len() < 25 << 20, "{service} has {} bytes", program.len());

        let bill = json(&fs::read(folder.path().join(format!("{service}-{platform}.cdx.json"))).unwrap());
        let names: Vec<_> = bill["components"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
        assert!(names.iter().any(|name| *name == "kube") && names.iter().all(|name| *name != "haulout-e2e"));
        let help =
            Command::new(folder.path().join(format!("{service}-{platform}"))).arg("--help").output().unwrap();
        assert!(help.status.success(), "{help:?}");
    }
    // A binary, an image and an SBOM per service, and the chart.
    assert_eq!(sums.len(), 3 * SERVICES.len() + 1, "{sums:?}");
}

#[test]
#[ignore = "slow"]
fn builds_are_reproducible_in_another_folder() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let once = dist(&place("once"), &["--service", "taint-manager"]);
    let build_dir = place("a-build-dir-with-another-name").display().to_string();
    let again = dist(&place("again"), &["--service", "taint-manager", "--build-dir", &build_dir]);
    assert_eq!(once.len(), 4, "a binary, its image and SBOM, and the chart: {once:?}");
    assert_eq!(once, again);
}
