//! Writes a bill of materials for each binary in CycloneDX format: its crates and their dependencies, from cargo.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::for_platform;
use crate::repo;

pub fn write(services: &[&str], output: &Path) -> Result<()> {
    let metadata = cargo(&["metadata", "--format-version", "1", "--locked"])?;
    let metadata: Metadata =
        serde_json::from_str(&metadata).context("failed to parse the output of cargo metadata")?;
    let lock = fs::read_to_string(repo::root().join("Cargo.lock")).context("failed to read Cargo.lock")?;
    let packages = Packages::new(metadata, &lock);
    for &service in services {
        let name = format!("haulout-{service}");
        // `cargo metadata` unifies the features of the whole workspace. `cargo tree` has those of one binary.
        let options = ["tree", "--locked", "--prefix", "none", "--format", "{p}"];
        let edges = ["--edges", "normal,no-proc-macro", "--package", &name];
        let tree = cargo(&[options.as_slice(), &edges].concat())?;
        let bill = serde_json::to_string_pretty(&packages.bill(&name, &included(&tree)))
            .with_context(|| format!("failed to serialize the bill of materials of {service}"))?;
        let path = output.join(for_platform(service, ".cdx.json"));
        fs::write(&path, bill + "\n").with_context(|| format!("failed to write {}", path.display()))?;
    }
    Ok(())
}

fn cargo(args: &[&str]) -> Result<String> {
    let output = repo::cargo().args(args).current_dir(repo::root()).output();
    let output = output.with_context(|| format!("failed to run cargo {}", args.join(" ")))?;
    if !output.status.success() {
        bail!("cargo {} failed: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    String::from_utf8(output.stdout).context("failed to parse cargo's output")
}

/// A crate's name and version.
type Crate = (String, String);

/// Parses the output of `cargo tree`: lines of `name v1.2.3 (source)`.
fn included(tree: &str) -> BTreeSet<Crate> {
    let crates = tree.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
    });
    crates.collect()
}

/// The fields of `cargo metadata` that are used.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<ResolveNode>,
}

#[derive(Deserialize)]
struct ResolveNode {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// `dev` or `build`; absent for dependencies in the binary.
    kind: Option<String>,
}

/// Data about each crate of the workspace.
struct Packages {
    licenses: BTreeMap<Crate, String>,
    checksums: BTreeMap<Crate, String>,
    dependencies: BTreeMap<Crate, BTreeSet<Crate>>,
}

impl Packages {
    fn new(metadata: Metadata, lock: &str) -> Self {
        let mut ids = BTreeMap::new();
        let mut licenses = BTreeMap::new();
        for package in metadata.packages {
            let key = (package.name, package.version);
            // Some crates still have `MIT/Apache-2.0`, which is not an SPDX expression.
            let license = package.license.map(|license| license.replace('/', " OR "));
            licenses.extend(license.map(|license| (key.clone(), license)));
            ids.insert(package.id, key);
        }
        let dependencies = metadata.resolve.nodes.iter().filter_map(|node| {
            let in_program = |dep: &&Dependency| dep.dep_kinds.iter().any(|kind| kind.kind.is_none());
            let needed = node.deps.iter().filter(in_program).filter_map(|dep| ids.get(&dep.pkg).cloned());
            Some((ids.get(&node.id)?.clone(), needed.collect()))
        });
        Self { dependencies: dependencies.collect(), licenses, checksums: checksums(lock) }
    }

    fn bill(&self, program: &str, included: &BTreeSet<Crate>) -> Value {
        let component = |one: &Crate| {
            let (name, version) = one;
            let license = self.licenses.get(one).map(|license| json!({ "expression": license }));
            let hash = self.checksums.get(one).map(|sum| json!({ "alg": "SHA-256", "content": sum }));
            json!({
                "type": if name == program { "application" } else { "library" },
                "bom-ref": reference(one),
                "name": name,
                "version": version,
                "purl": reference(one),
                "licenses": Vec::from_iter(license),
                "hashes": Vec::from_iter(hash),
            })
        };
        let (main, others): (Vec<_>, Vec<_>) = included.iter().partition(|(name, _)| name == program);
        let dependencies = included.iter().map(|one| {
            let needed =
                self.dependencies.get(one).into_iter().flatten().filter(|dep| included.contains(*dep));
            json!({ "ref": reference(one), "dependsOn": needed.map(reference).collect::<Vec<_>>() })
        });
        json!({
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "version": 1,
            "metadata": { "component": main.into_iter().map(component).next() },
            "components": others.into_iter().map(component).collect::<Vec<_>>(),
            "dependencies": dependencies.collect::<Vec<_>>(),
        })
    }
}

/// The package URL (purl) of a crate.
fn reference((name, version): &Crate) -> String {
    format!("pkg:cargo/{name}@{version}")
}

/// The checksums in `Cargo.lock`, whose entries are lines of `field = "value"`.
fn checksums(lock: &str) -> BTreeMap<Crate, String> {
    let entries = lock.split("[[package]]").filter_map(|entry| {
        let field = |name: &str| {
            let mut lines = entry.lines().filter_map(|line| line.split_once(" = "));
            lines.find(|(field, _)| *field == name).map(|(_, value)| value.trim_matches('"').to_owned())
        };
        Some(((field("name")?, field("version")?), field("checksum")?))
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sbom_lists_only_crates_in_the_program() {
        let metadata = json!({
            "packages": [
                {"id": "1", "name": "ours", "version": "0.1.0", "license": "Apache-2.0"},
                {"id": "2", "name": "theirs", "version": "2.0.0", "license": "MIT/Apache-2.0"},
                {"id": "3", "name": "tests-only", "version": "3.0.0", "license": "MIT"},
            ],
            "resolve": {"nodes": [{"id": "1", "deps": [
                {"pkg": "2", "dep_kinds": [{"kind": null}]},
                {"pkg": "3", "dep_kinds": [{"kind": "dev"}]},
            ]}]},
        });
        let lock = "[[package]]\nname = \"theirs\"\nversion = \"2.0.0\"\nchecksum = \"abc\"\n";
        let bill = Packages::new(serde_json::from_value(metadata).unwrap(), lock)
            .bill("ours", &included("ours v0.1.0 (/x)\ntheirs v2.0.0\n"));
        assert_eq!(bill["metadata"]["component"]["purl"], "pkg:cargo/ours@0.1.0");
        assert_eq!(
            bill["components"],
            json!([{"type": "library", "bom-ref": "pkg:cargo/theirs@2.0.0", "name": "theirs",
                "version": "2.0.0", "purl": "pkg:cargo/theirs@2.0.0",
                "licenses": [{"expression": "MIT OR Apache-2.0"}],
                "hashes": [{"alg": "SHA-256", "content": "abc"}]}])
        );
        assert_eq!(bill["dependencies"][0]["dependsOn"], json!(["pkg:cargo/theirs@2.0.0"]));
    }
}
