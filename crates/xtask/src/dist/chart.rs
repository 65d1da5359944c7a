//! Packages the chart. Helm puts the time into its archives: we take it out again.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use flate2::read::GzDecoder;
use haulout_e2e::{image, tools};
use serde_json::Value;

use crate::{repo, ui};

/// Where the chart looks for images, unless it is told otherwise.
pub fn repository() -> Result<String> {
    let image = read("values.yaml")?.get("image").cloned().context("the chart's values have no image")?;
    let field = |name: &str| image.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let repository = field("repository").context("the chart's values have no image.repository")?;
    Ok(format!("{}/{repository}", field("registry").unwrap_or("docker.io")))
}

fn read(file: &str) -> Result<Value> {
    let path = repo::root().join("charts/haulout").join(file);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    serde_yaml::from_str(&text).with_context(|| format!("reading {}", path.display()))
}

pub fn package(output: &Path) -> Result<()> {
    let version = read("Chart.yaml")?.get("appVersion").and_then(Value::as_str).map(str::to_owned);
    if version.as_deref() != Some(env!("CARGO_PKG_VERSION")) {
        bail!(
            "the chart's appVersion is {version:?}, and our crates' version is {}",
            env!("CARGO_PKG_VERSION")
        );
    }
    let helm = tools::ensure(ui::note)?.helm();
    let folder = tempfile::tempdir().context("making a folder for Helm")?;
    let packaged = Command::new(helm)
        .args(["package", "--destination"])
        .arg(folder.path())
        .arg(repo::root().join("charts/haulout"))
        .output()
        .context("running helm package")?;
    if !packaged.status.success() {
        bail!("helm package failed: {}", String::from_utf8_lossy(&packaged.stderr));
    }
    let mut entries = fs::read_dir(folder.path()).context("reading what Helm made")?;
    let package = entries.next().context("Helm made no package")?.context("reading what Helm made")?;
    let bytes = fs::read(package.path()).context("reading the chart's package")?;
    let to = output.join(package.file_name());
    fs::write(&to, without_time(&bytes)?).with_context(|| format!("writing {}", to.display()))
}

fn without_time(package: &[u8]) -> Result<Vec<u8>> {
    let what = "reading the chart's package";
    let mut files = Vec::new();
    for entry in tar::Archive::new(GzDecoder::new(package)).entries().context(what)? {
        let mut entry = entry.context(what)?;
        let mut contents = Vec::new();
        entry.read_to_end(&mut contents).context(what)?;
        files.push((entry.path().context(what)?.display().to_string(), contents));
    }
    let files = files.iter().map(|(path, contents)| (path.as_str(), 0o644, contents.as_slice()));
    image::gzip(&image::tar(files)?)
}
