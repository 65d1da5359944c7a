//! Writes an image with one program as an OCI archive. The result is reproducible: it does not depend on the time, the
//! machine or a container engine.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

/// User and group of the program, the same number as `nonroot` in distroless images.
pub const USER: &str = "65532:65532";

/// This machine's architecture, in OCI's spelling.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The contents of an image.
#[derive(Clone, Debug)]
pub struct Image<'a> {
    /// Its name with registry and tag, under which container engines import it.
    pub name: &'a str,
    /// The only file, as a path in the image.
    pub path: &'a str,
    /// The content of that file.
    pub program: &'a [u8],
    /// Arguments of the program.
    pub args: &'a [&'a str],
}

impl Image<'_> {
    /// Writes the image for this architecture, in OCI's spelling, such as `amd64`.
    pub fn write(&self, architecture: &str, to: &Path) -> Result<()> {
        let archive =
            self.archive(architecture).with_context(|| format!("failed to create image {}", self.name))?;
        std::fs::write(to, archive).with_context(|| format!("failed to write {}", to.display()))
    }

    fn archive(&self, architecture: &str) -> Result<Vec<u8>> {
        let layer = tar([(self.path.trim_start_matches('/'), 0o755, self.program)])?;
        let packed = gzip(&layer)?;
        let entrypoint: Vec<_> = [self.path].into_iter().chain(self.args.iter().copied()).collect();
        let config = serde_json::to_vec(&json!({
            "architecture": architecture,
            "os": "linux",
            "config": { "Entrypoint": entrypoint, "User": USER },
            "rootfs": { "type": "layers", "diff_ids": [digest(&layer)] },
        }))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob("application/vnd.oci.image.config.v1+json", &config),
            "layers": [blob("application/vnd.oci.image.layer.v1.tar+gzip", &packed)],
        }))?;
        let mut described = blob("application/vnd.oci.image.manifest.v1+json", &manifest);
        if let Some(fields) = described.as_object_mut() {
            let tag = self.name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
            fields.insert("platform".into(), json!({ "architecture": architecture, "os": "linux" }));
            // The first annotation is for containerd. The second is OCI's own, which has only the tag.
            let annotations =
                json!({ "io.containerd.image.name": self.name, "org.opencontainers.image.ref.name": tag });
            fields.insert("annotations".into(), annotations);
        }
        let index = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [described],
        }))?;
        let place = |bytes: &[u8]| format!("blobs/{}", digest(bytes).replace(':', "/"));
        tar([
            ("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#.as_slice()),
            ("index.json", 0o644, &index),
            (&place(&manifest), 0o644, &manifest),
            (&place(&config), 0o644, &config),
            (&place(&packed), 0o644, &packed),
        ])
    }
}

/// A descriptor of these bytes.
fn blob(media_type: &str, bytes: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": digest(bytes), "size": bytes.len() })
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{:x}", Sha256::digest(bytes))
}

/// A tar archive of these files with path and mode, without times and owners.
pub fn tar<'a>(files: impl IntoIterator<Item = (&'a str, u32, &'a [u8])>) -> Result<Vec<u8>> {
    let mut archive = Builder::new(Vec::new());
    for (path, mode, contents) in files {
        let mut header = Header::new_ustar();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(mode);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(contents.len() as u64);
        archive.append_data(&mut header, path, contents).with_context(|| format!("failed to pack {path}"))?;
    }
    archive.into_inner().context("failed to finish an archive")
}

/// Compresses, without a timestamp in the header.
pub fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(bytes).context("compressing")?;
    packed.finish().context("compressing")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(program: &[u8]) -> Vec<u8> {
        let image = Image { name: "example.com/pause:1", path: "/pause", program, args: &["now"] };
        image.archive("amd64").unwrap()
    }

    #[test]
    fn every_blob_path_is_its_digest() {
        let archive = image(b"a program");
        let mut names = Vec::new();
        for entry in tar::Archive::new(archive.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().display().to_string();
            let mut bytes = Vec::new();
            std::io::copy(&mut entry, &mut bytes).unwrap();
            if let Some(hash) = name.strip_prefix("blobs/sha256/") {
                assert_eq!(digest(&bytes), format!("sha256:{hash}"));
            }
            names.push(name);
        }
        assert_eq!(names.len(), 5, "{names:?}");
    }

    #[test]
    fn image_depends_only_on_the_program() {
        assert_eq!(image(b"a"), image(b"a"));
        assert_ne!(image(b"a"), image(b"b"));
    }
}
