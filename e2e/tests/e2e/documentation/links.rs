//! Links within the repository.

use std::path::Path;

use super::{files, pages, root};

#[test]
fn every_link_leads_somewhere() {
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
    assert!(broken.is_empty(), "these lead nowhere:\n{}", broken.join("\n"));
    assert!(count > 50, "only {count} links were found");
}

#[test]
fn the_readme_leads_to_every_page() {
    let links = pages::read("README.md").links();
    for page in files("docs", "md") {
        let name = format!("docs/{}", page.file_name().unwrap().to_str().unwrap());
        assert!(links.contains(&name), "the README has no link to {name}");
    }
}
