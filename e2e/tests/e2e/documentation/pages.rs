//! Markdown, as far as our pages use it: fenced blocks, code in lines, links and headings.

use std::collections::BTreeSet;

use super::{files, root};

/// A page.
pub(super) struct Page {
    /// Its path in the repository.
    pub(super) name: String,
    pub(super) text: String,
}

/// What stands between two fences.
pub(super) struct Block {
    /// The first word behind the fence, such as `sh`.
    pub(super) language: String,
    /// Whether the words behind it say that nothing can be tried.
    pub(super) untested: bool,
    pub(super) text: String,
}

/// The pages that tell users what to do: the README and `docs/`.
pub(super) fn for_users() -> Vec<Page> {
    let mut paths = vec![root().join("README.md")];
    paths.extend(files("docs", "md"));
    paths.iter().map(|path| read(path.strip_prefix(root()).unwrap().to_str().unwrap())).collect()
}

/// All pages that people read.
pub(super) fn linked() -> Vec<Page> {
    let others = ["CONTRIBUTING.md", "CHANGELOG.md", "charts/haulout/README.md"];
    for_users().into_iter().chain(others.map(read)).collect()
}

pub(super) fn read(name: &str) -> Page {
    Page { name: name.into(), text: std::fs::read_to_string(root().join(name)).unwrap() }
}

impl Page {
    pub(super) fn blocks(&self) -> Vec<Block> {
        self.parts().1
    }

    /// Everything outside of the blocks, and the blocks.
    fn parts(&self) -> (String, Vec<Block>) {
        let (mut prose, mut blocks, mut open) = (String::new(), Vec::new(), None::<Block>);
        for line in self.text.lines() {
            match (line.strip_prefix("```"), &mut open) {
                (Some(_), Some(_)) => blocks.extend(open.take()),
                (Some(info), None) => {
                    let mut words = info.split_whitespace();
                    let language = words.next().unwrap_or_default().into();
                    let untested = words.any(|word| word == "no-test");
                    open = Some(Block { language, untested, text: String::new() });
                }
                (None, Some(block)) => block.text.extend([line, "\n"]),
                (None, None) => prose.extend([line, "\n"]),
            }
        }
        assert!(open.is_none(), "{}: a block does not end", self.name);
        (prose, blocks)
    }

    /// The paragraphs, each as pieces that are code (odd ones) and not (even ones).
    fn paragraphs(&self) -> Vec<Vec<String>> {
        let (prose, _) = self.parts();
        let paragraphs = prose.split("\n\n").map(|paragraph| {
            let joined = paragraph.lines().map(str::trim_start).collect::<Vec<_>>().join(" ");
            let pieces: Vec<_> = joined.split('`').map(Into::into).collect();
            assert!(pieces.len() % 2 == 1, "{}: code does not end in {paragraph}", self.name);
            pieces
        });
        paragraphs.collect()
    }

    /// All code that stands in lines.
    pub(super) fn spans(&self) -> Vec<String> {
        self.paragraphs().into_iter().flat_map(|pieces| pieces.into_iter().skip(1).step_by(2)).collect()
    }

    /// The targets of all links.
    pub(super) fn links(&self) -> Vec<String> {
        let links = self.paragraphs().into_iter().flat_map(|pieces| {
            // What is code may stand in a link's text, but is no link.
            let code = pieces.iter().enumerate().map(|(n, piece)| if n % 2 == 0 { piece } else { "" });
            let text = code.collect::<String>();
            let targets =
                text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned()));
            targets.collect::<Vec<_>>()
        });
        links.collect()
    }

    /// The anchors of its headings, as GitHub makes them.
    pub(super) fn anchors(&self) -> BTreeSet<String> {
        let (prose, _) = self.parts();
        let headings = prose.lines().filter(|line| line.starts_with('#'));
        let slug = |heading: &str| {
            let text = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
            text.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect()
        };
        headings.map(slug).collect()
    }

    /// What stands under a heading that contains this word, up to the next heading.
    pub(super) fn section(&self, word: &str) -> Option<Page> {
        let (prose, _) = self.parts();
        let mut sections = prose.split("\n#").skip(1).filter_map(|section| section.split_once('\n'));
        let (_, text) = sections.find(|(heading, _)| heading.contains(word))?;
        Some(Page { name: self.name.clone(), text: text.into() })
    }
}

#[test]
fn markdown_is_parsed() {
    let text = "# How it is: `it`\n\nSee [this `x`](a.md#b) and `code\n  in two lines`.\n\n```sh no-test\nls `x`\n```\n\n## Events\n\n`A`\n";
    let page = Page { name: "page".into(), text: text.into() };
    assert_eq!(page.spans(), ["it", "x", "code in two lines", "A"]);
    assert_eq!(page.links(), ["a.md#b"]);
    assert_eq!(page.anchors(), ["how-it-is-it".into(), "events".into()].into());
    assert_eq!(page.section("Events").unwrap().spans(), ["A"]);
    let block = page.blocks().remove(0);
    assert_eq!((block.language.as_str(), block.untested, block.text.as_str()), ("sh", true, "ls `x`\n"));
}
