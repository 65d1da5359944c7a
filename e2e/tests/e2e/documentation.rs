//! What we tell people works: every YAML in `examples/`, the README and `docs/` is one that the API
//! server takes.

use std::path::{Path, PathBuf};

use crate::support::shared;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().into()
}

fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join(folder)).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == ending));
    files.sort();
    files
}

/// The YAML blocks of a Markdown file that are whole objects.
fn yaml_blocks(markdown: &str) -> Vec<String> {
    let blocks = markdown.split("```yaml\n").skip(1).filter_map(|rest| rest.split_once("```"));
    blocks.map(|(block, _)| block.to_string()).filter(|block| block.contains("apiVersion:")).collect()
}

#[tokio::test]
async fn every_example_is_accepted() {
    let cluster = shared().await;
    let examples = files("examples", "yaml");
    assert!(!examples.is_empty());
    for example in examples {
        let yaml = std::fs::read_to_string(&example).unwrap();
        // A dry run does not create the namespace that a later object of the file needs.
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
async fn every_yaml_in_the_documentation_is_accepted() {
    let cluster = shared().await;
    let mut pages = files("docs", "md");
    pages.push(root().join("README.md"));
    let mut count = 0;
    for page in pages {
        for block in yaml_blocks(&std::fs::read_to_string(&page).unwrap()) {
            let apply = ["apply", "--dry-run=server", "--validate=strict", "-f", "-"];
            let output = cluster.kubectl_with(&apply, &block).await.unwrap();
            assert!(output.status.success(), "{}: {}\n{block}", page.display(), output.stderr);
            count += 1;
        }
    }
    assert!(count > 0, "no YAML was found, so that nothing was checked");
}

/// Commands of the README that xtask has, so that a renamed one is noticed.
#[test]
fn every_command_in_the_readme_exists() {
    let readme = std::fs::read_to_string(root().join("README.md")).unwrap();
    let xtask = crate::support::xtask();
    let commands: std::collections::BTreeSet<_> = readme
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
