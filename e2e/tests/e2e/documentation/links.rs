//! Links within the repository.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use super::{pages, root};

/// A path without `..`, as used for page names.
fn normalized(path: &Path) -> Option<String> {
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            part => parts.push(part.as_os_str().to_str()?),
        }
    }
    Some(parts.join("/"))
}

#[test]
fn every_link_resolves() {
    let mut broken = Vec::new();
    let mut count = 0;
    for page in pages::linked() {
        for link in page.links() {
            if link.contains("://") {
                continue;
            }
            count += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let folder = Path::new(&page.name).parent().unwrap();
            let target = if path.is_empty() { page.name.as_str().into() } else { folder.join(path) };
            let there = root().join(&target);
            let found = there.exists()
                && (anchor.is_empty() || pages::read(target.to_str().unwrap()).anchors().contains(anchor));
            if !found {
                broken.push(format!("{}: {link}", page.name));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
    assert!(count > 50, "only {count} links were found");
}

#[test]
fn every_page_is_reachable_from_the_readme() {
    let (mut open, mut reached) = (vec!["README.md".to_owned()], BTreeSet::new());
    while let Some(name) = open.pop() {
        let page = pages::read(&name);
        if !reached.insert(name) {
            continue;
        }
        let folder = Path::new(&page.name).parent().unwrap();
        let targets = page.links().into_iter().filter(|link| !link.contains("://"));
        let targets = targets.filter_map(|link| normalized(&folder.join(link.split('#').next()?)));
        let is_page =
            |target: &String| target.starts_with("docs/") && Path::new(target).extension().is_some();
        open.extend(targets.filter(is_page));
    }
    for page in pages::for_users() {
        assert!(reached.contains(&page.name), "no link from the README leads to {}", page.name);
    }
}
