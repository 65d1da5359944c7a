//! Packages the chart, without the timestamps that Helm adds to its archives.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use flate2::read::GzDecoder;
use haulout_e2e::{image, tools};
use serde_json::Value;

use crate::{repo, ui};

/// The default repository of the chart's images.
pub fn repository() -> Result<String> {
    let image = read("values.yaml")?.get("image").cloned().context("the chart's values have no image")?;
    let field = |name: &str| image.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    let repository = field("repository").context("the chart's values have no image.repository")?;
    Ok(format!("{}/{repository}", field("registry").unwrap_or("docker.io")))
}

fn read(file: &str) -> Result<Value> {
    let path = repo::root().join("charts/haulout").join(file);
    let text = fs::read_to_string(&path).with_context(|| format!("failed to read {}", path.display()))?;
    serde_yaml::from_str(&text).with_context(|| format!("failed to read {}", path.display()))
}

/// Packages the chart. Its images are in this repository, if one is given.
pub fn package(output: &Path, repository: Option<&str>) -> Result<()> {
    let chart = read("Chart.yaml")?;
    for field in ["version", "appVersion"] {
        let version = chart.get(field).and_then(Value::as_str);
        if version != Some(env!("CARGO_PKG_VERSION")) {
            bail!(
                "the chart's {field} is {version:?}, but the version of the crates is {}: set both to the same version",
                env!("CARGO_PKG_VERSION")
            );
        }
    }
    let helm = tools::ensure(ui::note)?.helm();
    let folder = tempfile::tempdir().context("failed to create a folder for Helm")?;
    let packaged = Command::new(helm)
        .args(["package", "--destination"])
        .arg(folder.path())
        .arg(repo::root().join("charts/haulout"))
        .output()
        .context("failed to run helm package")?;
    if !packaged.status.success() {
        bail!("helm package failed: {}", String::from_utf8_lossy(&packaged.stderr));
    }
    let mut entries = fs::read_dir(folder.path()).context("failed to list Helm's output")?;
    let package =
        entries.next().context("Helm created no package")?.context("failed to list Helm's output")?;
    let bytes = fs::read(package.path()).context("failed to read the chart's package")?;
    let to = output.join(package.file_name());
    fs::write(&to, repack(&bytes, repository)?).with_context(|| format!("failed to write {}", to.display()))
}

/// The package without timestamps, and with this repository in its values.
fn repack(package: &[u8], repository: Option<&str>) -> Result<Vec<u8>> {
    let what = "failed to read the chart's package";
    let mut files = Vec::new();
    for entry in tar::Archive::new(GzDecoder::new(package)).entries().context(what)? {
        let mut entry = entry.context(what)?;
        let mut contents = Vec::new();
        entry.read_to_end(&mut contents).context(what)?;
        let path = entry.path().context(what)?.display().to_string();
        if let Some(repository) = repository.filter(|_| path == "haulout/values.yaml") {
            let values = String::from_utf8(contents).context(what)?;
            contents = with_repository(&values, repository)?.into_bytes();
        }
        files.push((path, contents));
    }
    let files = files.iter().map(|(path, contents)| (path.as_str(), 0o644, contents.as_slice()));
    image::gzip(&image::tar(files)?)
}

/// The values, comments included, with another `image.registry` and `image.repository`.
fn with_repository(values: &str, repository: &str) -> Result<String> {
    let (registry, path) = repository.split_once('/').context("the repository has no registry")?;
    let (before, image) = values.split_once("\nimage:\n").context("the chart's values have no image")?;
    let mut image = image.to_owned();
    for (field, value) in [("registry", registry), ("repository", path)] {
        let start = image.find(&format!("\n  {field}: ")).context("the chart's image has no such field")? + 1;
        let end = start + image[start..].find('\n').context("the chart's values end early")?;
        image.replace_range(start..end, &format!("  {field}: {value:?}"));
    }
    Ok(format!("{before}\nimage:\n{image}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packaged_chart_uses_the_given_repository() {
        let values = fs::read_to_string(repo::root().join("charts/haulout/values.yaml")).unwrap();
        let changed = with_repository(&values, "registry.example.com/2026").unwrap();
        let mut expected: Value = serde_yaml::from_str(&values).unwrap();
        expected["image"]["registry"] = "registry.example.com".into();
        expected["image"]["repository"] = "2026".into();
        assert_eq!(serde_yaml::from_str::<Value>(&changed).unwrap(), expected);
        assert_eq!(changed.lines().count(), values.lines().count(), "comments stay");
    }
}
