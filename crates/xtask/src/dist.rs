//! `cargo xtask dist`: what a release is made of. Static programs, an image for each, the chart's package, bills of
//! materials and checksums: the same sources, compiler and libc give the same bytes.

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

/// The services that are shipped, and what the chart runs once: their programs, and with `haulout-` before them their
/// packages.
pub const SERVICES: [&str; 5] =
    ["admission-webhook", "chart-hooks", "evacuation-controller", "maintenance-controller", "taint-manager"];

const CHECKSUMS: &str = "SHA256SUMS";

#[derive(clap::Args)]
pub struct Args {
    /// Only this service; may be given more than once
    #[arg(long = "service", value_name = "NAME", value_parser = SERVICES)]
    services: Vec<String>,
    /// Where everything is put, instead of target/distribution: a new folder, or that of an earlier run, which goes
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// What makes the images; only our own writer makes the same bytes everywhere
    #[arg(long, value_enum, default_value_t = Builder::Own)]
    builder: Builder,
    /// What comes before the service's name in the images' names, such as example.com/haulout, here and in the chart's
    /// package; else what the chart says
    #[arg(long, value_parser = repository)]
    repository: Option<String>,
    /// Where cargo builds; else where it builds everything of ours
    #[arg(long, value_name = "FOLDER")]
    build_dir: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<()> {
    let target = repo::root().join("target");
    let output = match &args.output {
        Some(folder) => not_in_use(std::path::absolute(folder).context("finding the output folder")?)?,
        // Not `dist`, where cargo keeps what it builds with that profile.
        None => target.join("distribution"),
    };
    needs::free_disk(&repo::root(), 5)?;
    fs::create_dir_all(&target).with_context(|| format!("creating {}", target.display()))?;
    let lock = File::create(target.join("dist.lock")).context("creating the lock of `cargo xtask dist`")?;
    flock(&lock, FlockOperation::LockExclusive).context("waiting for another `cargo xtask dist`")?;
    if output.exists() {
        fs::remove_dir_all(&output).with_context(|| format!("emptying {}", output.display()))?;
    }
    fs::create_dir_all(&output).with_context(|| format!("creating {}", output.display()))?;

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
    ui::result(&format!("everything is in {}", output.display()));
    Ok(())
}

/// Has cargo build the programs, so that the next `cargo xtask dist` finds them.
pub fn prepare() -> Result<()> {
    let folder = tempfile::tempdir().context("making a folder for the programs")?;
    binaries::build(&SERVICES, folder.path(), None)
}

/// A registry and a path in it.
fn repository(text: &str) -> std::result::Result<String, &'static str> {
    let parts: Vec<_> = text.split('/').collect();
    if parts.len() < 2 || parts.iter().any(|part| part.is_empty() || part.contains(char::is_whitespace)) {
        return Err("give a registry and a path in it, as in example.com/haulout");
    }
    Ok(text.to_owned())
}

/// This folder, if nothing else is in it than what an earlier run may have made.
fn not_in_use(folder: PathBuf) -> Result<PathBuf> {
    let is_ours = |name: &str| {
        let prefixes = SERVICES.map(|service| format!("{service}-linux-"));
        name == CHECKSUMS
            || name.starts_with("haulout-")
            || prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    let present = if folder.exists() { files(&folder)? } else { Vec::new() };
    if let Some((name, _)) = present.iter().find(|(name, _)| !is_ours(name)) {
        bail!(
            "--output {}: everything in it would go, and {name} is not from an earlier run; name another folder",
            folder.display()
        );
    }
    Ok(folder)
}

/// What a file is called that is made for this architecture only.
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
        let bytes = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(format!("{:x}  {name}\n", Sha256::digest(&bytes)))
    });
    let sums = sums.collect::<Result<String>>()?;
    fs::write(output.join(CHECKSUMS), sums).context("writing the checksums")
}

/// The names and paths of what has been made, sorted.
fn files(output: &Path) -> Result<Vec<(String, PathBuf)>> {
    let entries = fs::read_dir(output).with_context(|| format!("listing {}", output.display()))?;
    let entries = entries.map(|entry| {
        let entry = entry.with_context(|| format!("listing {}", output.display()))?;
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
    fn a_folder_with_other_files_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_path_buf();
        not_in_use(path.join("new")).unwrap();
        for ours in [CHECKSUMS, "haulout-0.1.0.tgz", "taint-manager-linux-amd64.oci.tar"] {
            fs::write(path.join(ours), "").unwrap();
        }
        not_in_use(path.clone()).unwrap();
        fs::write(path.join("letter"), "precious").unwrap();
        let refused = not_in_use(path).unwrap_err().to_string();
        assert!(refused.starts_with("--output ") && refused.contains("letter is not from"), "{refused}");
    }

    #[test]
    fn a_repository_is_a_registry_and_a_path() {
        assert_eq!(repository("example.com/ours/haulout").unwrap(), "example.com/ours/haulout");
        for wrong in ["haulout", "/owner/repository", "example.com/", "example.com/haulout/", "a b/c"] {
            assert!(repository(wrong).unwrap_err().contains("example.com/haulout"), "{wrong}");
        }
    }
}
