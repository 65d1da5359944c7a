//! `cargo xtask dist`: builds a release. Static binaries, an image for each, the chart's package, bills of materials
//! and checksums. Builds are reproducible: the same sources, compiler and libc give the same bytes.

mod binaries;
mod chart;
mod images;
mod sbom;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use haulout_e2e::image::architecture;
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

pub use self::images::Builder;
use crate::ui::{self, Step};
use crate::{needs, repo};

pub use haulout_e2e::service::BINARIES as SERVICES;

const CHECKSUMS: &str = "SHA256SUMS";

#[derive(clap::Args)]
pub struct Args {
    /// Builds only this service; can be repeated
    #[arg(long = "service", value_name = "NAME", value_parser = SERVICES)]
    services: Vec<String>,
    /// Output folder; must be new or contain an earlier release, which is replaced [default: target/distribution]
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// What builds the images; only the built-in writer is reproducible everywhere
    #[arg(long, value_enum, default_value_t = Builder::Own)]
    builder: Builder,
    /// Repository of the images, such as example.com/haulout, for their names and for the chart's package; by default,
    /// that of the chart
    #[arg(long, value_parser = repository)]
    repository: Option<String>,
    /// Cargo's build directory, instead of the usual one
    #[arg(long, value_name = "FOLDER")]
    build_dir: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    let target = repo::root().join("target");
    let output = match &args.output {
        Some(folder) => {
            check_output_folder(std::path::absolute(folder).context("failed to find the output folder")?)?
        }
        // Not `dist`, which is cargo's folder for that profile.
        None => target.join("distribution"),
    };
    needs::free_disk(&repo::root(), 5)?;
    fs::create_dir_all(&target).with_context(|| format!("failed to create {}", target.display()))?;
    let lock =
        File::create(target.join("dist.lock")).context("failed to create the lock of `cargo xtask dist`")?;
    flock(&lock, FlockOperation::LockExclusive).context("failed to wait for another `cargo xtask dist`")?;
    if output.exists() {
        fs::remove_dir_all(&output).with_context(|| format!("failed to empty {}", output.display()))?;
    }
    fs::create_dir_all(&output).with_context(|| format!("failed to create {}", output.display()))?;

    let services: Vec<_> = SERVICES
        .into_iter()
        .filter(|name| args.services.is_empty() || args.services.iter().any(|one| one == name))
        .collect();
    step("programs", || binaries::build(&services, &output, args.build_dir.as_deref()))?;
    step("images", || {
        let repository = args.repository.clone().map_or_else(chart::repository, Ok)?;
        images::build(&services, &output, args.builder, &repository)
    })?;
    step("chart", || chart::package(&output, args.repository.as_deref()))?;
    step("bills of materials", || sbom::write(&services, &output))?;
    step("checksums", || checksums(&output))?;
    for (name, path) in files(&output)? {
        let size = fs::metadata(&path).map_or(0, |metadata| metadata.len());
        ui::result(&format!("{:>7.1} MiB  {name}", mebibytes(size)));
    }
    ui::result(&format!("the release is in {}", output.display()));
    Ok(())
}

/// Builds the binaries, so that the next `cargo xtask dist` finds them.
pub fn prepare() -> Result<()> {
    let folder = tempfile::tempdir().context("failed to create a folder for the programs")?;
    binaries::build(&SERVICES, folder.path(), None)
}

/// Parses a registry and a path in it.
fn repository(text: &str) -> std::result::Result<String, &'static str> {
    let parts: Vec<_> = text.split('/').collect();
    if parts.len() < 2 || parts.iter().any(|part| part.is_empty() || part.contains(char::is_whitespace)) {
        return Err("expected a registry and a path, such as example.com/haulout");
    }
    Ok(text.to_owned())
}

/// Returns the folder if it contains nothing but files of an earlier run.
fn check_output_folder(folder: PathBuf) -> Result<PathBuf> {
    let is_ours = |name: &str| {
        let prefixes = SERVICES.map(|service| format!("{service}-linux-"));
        name == CHECKSUMS
            || name.starts_with("haulout-")
            || prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    let present = if folder.exists() { files(&folder)? } else { Vec::new() };
    if let Some((name, _)) = present.iter().find(|(name, _)| !is_ours(name)) {
        bail!(
            "--output {}: the folder would be emptied, but {name} is not from an earlier run; use another folder",
            folder.display()
        );
    }
    Ok(folder)
}

/// The name of a file that is specific to this architecture.
fn for_platform(service: &str, suffix: &str) -> String {
    format!("{service}-linux-{}{suffix}", architecture())
}

fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let step = Step::begin(name);
    let result = work();
    step.end(result.is_ok(), "");
    result
}

/// Writes [`CHECKSUMS`], which `sha256sum --check` reads.
fn checksums(output: &Path) -> Result<()> {
    let sums = files(output)?.into_iter().map(|(name, path)| {
        let bytes = fs::read(&path).with_context(|| format!("failed to read {}", path.display()))?;
        Ok(format!("{:x}  {name}\n", Sha256::digest(&bytes)))
    });
    let sums = sums.collect::<Result<String>>()?;
    fs::write(output.join(CHECKSUMS), sums).context("failed to write the checksums")
}

/// Names and paths of the files in the folder, sorted.
fn files(output: &Path) -> Result<Vec<(String, PathBuf)>> {
    let entries = fs::read_dir(output).with_context(|| format!("failed to list {}", output.display()))?;
    let entries = entries.map(|entry| {
        let entry = entry.with_context(|| format!("failed to list {}", output.display()))?;
        Ok((entry.file_name().to_string_lossy().into_owned(), entry.path()))
    });
    let mut files = entries.collect::<Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

#[expect(clippy::cast_precision_loss, reason = "it is only shown")]
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_with_other_files_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_path_buf();
        check_output_folder(path.join("new")).unwrap();
        for ours in [CHECKSUMS, "haulout-0.1.0.tgz", "taint-manager-linux-amd64.oci.tar"] {
            fs::write(path.join(ours), "").unwrap();
        }
        check_output_folder(path.clone()).unwrap();
        fs::write(path.join("letter"), "precious").unwrap();
        let refused = check_output_folder(path).unwrap_err().to_string();
        assert!(refused.starts_with("--output ") && refused.contains("letter is not from"), "{refused}");
    }

    #[test]
    fn repository_needs_a_registry_and_a_path() {
        assert_eq!(repository("example.com/ours/haulout").unwrap(), "example.com/ours/haulout");
        for wrong in ["haulout", "/owner/repository", "example.com/", "example.com/haulout/", "a b/c"] {
            assert!(repository(wrong).unwrap_err().contains("example.com/haulout"), "{wrong}");
        }
    }
}
