//! The Kubernetes versions that tests can run on, one Go module each. `control-plane` pins the main version and all
//! other programs. `control-plane-MINOR` pins only Kubernetes' own programs of another version.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::key::Source;

/// The folder of the main version, and the prefix of the other folders.
const MODULE: &str = "control-plane";

/// A version of Kubernetes that can be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kubernetes {
    /// Major, minor and patch.
    numbers: Vec<u32>,
    /// With its `v`.
    version: String,
    module: PathBuf,
}

impl Kubernetes {
    /// The environment variable in which `xtask` passes the chosen version to tests.
    pub const ENV: &str = "HAULOUT_E2E_KUBERNETES";

    /// The version in the environment variable, or the main one.
    pub fn chosen() -> Result<Self> {
        match std::env::var_os(Self::ENV).filter(|version| !version.is_empty()) {
            Some(version) => Self::find(&version.to_string_lossy())
                .with_context(|| format!("failed to read the environment variable {}", Self::ENV)),
            None => Self::main(),
        }
    }

    /// The version for most tests. All versions use its etcd, Helm and KWOK.
    pub fn main() -> Result<Self> {
        Self::read(main_module())
    }

    /// The oldest version.
    pub fn oldest() -> Result<Self> {
        all()?.into_iter().next().context("no version of Kubernetes was found")
    }

    /// Finds a version by a name such as `1.33`, `1.33.13` or `v1.33.13`.
    pub fn find(version: &str) -> Result<Self> {
        find(all()?, version)
    }

    /// Whether this is the main version.
    pub fn is_main(&self) -> bool {
        self.module == main_module()
    }

    /// Whether it is this version or a newer one.
    pub fn is_at_least(&self, major: u32, minor: u32) -> bool {
        self.numbers.as_slice() >= [major, minor].as_slice()
    }

    pub(super) fn module(&self) -> &Path {
        &self.module
    }

    fn read(module: PathBuf) -> Result<Self> {
        let version = Source::read(&module)?.kubernetes_version;
        Self::new(&version, module)
    }

    fn new(version: &str, module: PathBuf) -> Result<Self> {
        let numbers = numbers(version)
            .with_context(|| format!("{version:?} in {} is not a version", module.display()))?;
        Ok(Self { numbers, version: version.to_owned(), module })
    }
}

impl fmt::Display for Kubernetes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.version)
    }
}

/// The Go module of the main version.
pub(super) fn main_module() -> PathBuf {
    crate::repository().join("e2e").join(MODULE)
}

/// All versions, the oldest first.
fn all() -> Result<Vec<Kubernetes>> {
    let folder = crate::repository().join("e2e");
    let listing = || format!("failed to list the versions of Kubernetes in {}", folder.display());
    let mut versions = Vec::new();
    for entry in fs::read_dir(&folder).with_context(listing)? {
        let path = entry.with_context(listing)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let suffix = name.strip_prefix(MODULE);
        if suffix.is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('-')) {
            versions.push(Kubernetes::read(path)?);
        }
    }
    versions.sort_by(|a, b| a.numbers.cmp(&b.numbers));
    Ok(versions)
}

/// The newest of these versions that starts with the given numbers, of which there must be at least two.
fn find(versions: Vec<Kubernetes>, asked: &str) -> Result<Kubernetes> {
    let wanted = numbers(asked).filter(|numbers| numbers.len() >= 2);
    let known: Vec<_> = versions.iter().map(ToString::to_string).collect();
    let found = versions
        .into_iter()
        .rfind(|version| wanted.as_ref().is_some_and(|wanted| version.numbers.starts_with(wanted)));
    let Some(found) = found else {
        bail!("unknown Kubernetes version {asked}: choose one of {}", known.join(", "))
    };
    Ok(found)
}

/// The numbers of a version such as `v1.33.13` or `1.33`.
fn numbers(version: &str) -> Option<Vec<u32>> {
    let version = version.strip_prefix('v').unwrap_or(version);
    version.split('.').map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::KUBERNETES_TOOLS;

    fn version(version: &str) -> Kubernetes {
        Kubernetes::new(version, PathBuf::new()).unwrap()
    }

    #[test]
    fn version_is_found_by_two_or_three_numbers() {
        let versions = || vec![version("v1.3.9"), version("v1.33.13"), version("v1.36.3")];
        for asked in ["1.33", "v1.33", "1.33.13", "v1.33.13"] {
            assert_eq!(find(versions(), asked).unwrap().to_string(), "v1.33.13", "{asked}");
        }
        for asked in ["", "v", "1", "1.", "1.33.1", "1.34", "1.33.13.0", "latest"] {
            let error = find(versions(), asked).unwrap_err().to_string();
            assert!(error.ends_with(": choose one of v1.3.9, v1.33.13, v1.36.3"), "{asked}: {error}");
        }
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(version("v1.35.0").is_at_least(1, 35));
        assert!(version("v1.100.0").is_at_least(1, 35));
        assert!(!version("v1.34.9").is_at_least(1, 35));
    }

    #[test]
    fn modules_of_other_versions_have_only_kubernetes_tools() {
        let others: Vec<_> = all().unwrap().into_iter().filter(|version| !version.is_main()).collect();
        assert!(!others.is_empty());
        for other in others {
            let source = Source::read(other.module()).unwrap();
            let tools = source.tools.iter().map(|import| import.rsplit('/').next().unwrap());
            assert_eq!(tools.collect::<Vec<_>>(), KUBERNETES_TOOLS, "{other}");
            let minor = format!("{MODULE}-{}.{}", other.numbers[0], other.numbers[1]);
            assert_eq!(other.module().file_name().unwrap().to_string_lossy(), minor);
        }
    }

    #[test]
    fn oldest_version_is_the_oldest_that_the_chart_accepts() {
        let chart = crate::repository().join("charts/haulout/Chart.yaml");
        let chart: serde_json::Value = serde_yaml::from_str(&fs::read_to_string(chart).unwrap()).unwrap();
        let oldest = Kubernetes::oldest().unwrap();
        let accepted = format!(">={}.{}.0-0", oldest.numbers[0], oldest.numbers[1]);
        assert_eq!(chart["kubeVersion"], accepted.as_str());
    }

    #[test]
    fn readme_names_the_tested_versions() {
        let readme = crate::repository().join("README.md");
        let words = fs::read_to_string(readme).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        let versions = all().unwrap();
        let minors: Vec<_> =
            versions.iter().map(|version| format!("{}.{}", version.numbers[0], version.numbers[1])).collect();
        let tested = format!("the end-to-end tests run on {}.", minors.join(" and "));
        assert!(words.contains(&tested), "the README does not contain: {tested}");
    }
}
