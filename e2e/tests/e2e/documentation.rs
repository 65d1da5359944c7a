//! The documentation is correct: the API server accepts every YAML in `examples/`, the README and `docs/`, every
//! command works, every link resolves, and every name exists.

mod commands;
mod links;
mod names;
mod pages;
mod places;

use std::path::PathBuf;

use haulout_e2e::repository as root;

use crate::support::shared;

/// The files with this extension in a folder and its subfolders.
fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let (mut folders, mut files) = (vec![root().join(folder)], Vec::new());
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

#[tokio::test]
async fn every_example_is_accepted() {
    let cluster = shared().await;
    let examples = files("examples", "yaml");
    assert!(!examples.is_empty());
    for example in examples {
        let yaml = std::fs::read_to_string(&example).unwrap();
        // A dry run does not create the namespace that a later object in the file needs.
        let documents = yaml.split("\n---\n").filter(|document| document.contains("apiVersion:"));
        for document in documents {
            let document = document.replace("namespace: shop", "namespace: default");
            let apply = ["apply", "--dry-run=server", "--validate=strict", "-f", "-"];
            let output = cluster.kubectl_with(&apply, &document).await.unwrap();
            assert!(output.status.success(), "{}: {}\n{document}", example.display(), output.stderr);
        }
    }
}

#[tokio::test]
async fn every_documented_yaml_is_accepted() {
    let cluster = shared().await;
    let mut count = 0;
    for page in pages::for_users() {
        let objects = page.blocks().into_iter().filter(|block| block.language == "yaml");
        for block in objects.filter(|block| block.text.contains("apiVersion:")) {
            let apply = ["apply", "--dry-run=server", "--validate=strict", "-f", "-"];
            let output = cluster.kubectl_with(&apply, &block.text).await.unwrap();
            assert!(output.status.success(), "{}: {}\n{}", page.name, output.stderr, block.text);
            count += 1;
        }
    }
    assert!(count > 0, "no YAML was found, so nothing was checked");
}

/// Every mentioned `cargo xtask` command exists, so that a renamed one is detected.
#[test]
fn every_documented_xtask_command_exists() {
    let xtask = crate::support::xtask();
    let all: String = pages::linked().into_iter().map(|page| page.text).collect();
    let commands: std::collections::BTreeSet<_> = all
        .split("cargo xtask ")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric()).next())
        .filter(|word| !word.is_empty())
        .collect();
    assert!(commands.contains("demo") && commands.contains("test"), "{commands:?}");
    for command in commands {
        let help = std::process::Command::new(&xtask).args([command, "--help"]).output().unwrap();
        assert!(help.status.success(), "cargo xtask {command} does not exist");
    }
}
