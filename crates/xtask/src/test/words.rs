//! Checks that identifiers avoid words with a private meaning. Comments and strings are not checked.

use std::fs;
use std::path::Path;

use crate::repo;

/// Common words to use instead: watch, apply, report, event, desired, converge, conflict, gap, fix.
const AVOIDED: &[&str] = &[
    "anew",
    "blind",
    "door",
    "doubt",
    "doubts",
    "everybody",
    "fate",
    "feed",
    "forgiving",
    "intake",
    "meddle",
    "mend",
    "mended",
    "news",
    "office",
    "oversee",
    "rival",
    "settle",
    "settled",
    "sight",
    "tell",
    "tells",
    "told",
    "treat",
    "treatment",
    "unseen",
    "unsettled",
    "whoever",
    "wish",
    "wishes",
];

/// The identifiers in a Rust file with their line numbers, without comments and strings.
fn names(source: &str) -> Vec<(usize, String)> {
    let mut names = Vec::new();
    let mut chars = source.chars().peekable();
    let (mut line, mut name) = (1, String::new());
    while let Some(c) = chars.next() {
        if c.is_ascii_alphanumeric() || c == '_' {
            name.push(c);
            continue;
        }
        let raw = matches!(name.as_str(), "r" | "br");
        if !name.is_empty() {
            names.push((line, std::mem::take(&mut name)));
        }
        let hashes =
            if raw && c == '#' { 1 + std::iter::from_fn(|| chars.next_if_eq(&'#')).count() } else { 0 };
        match c {
            '\n' => line += 1,
            '/' if chars.peek() == Some(&'/') => while chars.next_if(|c| *c != '\n').is_some() {},
            '\'' => {
                // A character, not a lifetime.
                let mut ahead = chars.clone();
                let first = ahead.next();
                if first == Some('\\') || ahead.next() == Some('\'') {
                    chars.next();
                    chars.next();
                    while chars.next_if(|c| first == Some('\\') && *c != '\'').is_some() {}
                    chars.next_if_eq(&'\'');
                }
            }
            '"' | '#' if c == '"' || hashes > 0 && chars.next_if_eq(&'"').is_some() => {
                while let Some(c) = chars.next() {
                    line += usize::from(c == '\n');
                    match c {
                        '\\' if !raw => line += usize::from(chars.next() == Some('\n')),
                        '"' if (0..hashes).all(|_| chars.next_if_eq(&'#').is_some()) => break,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    names
}

/// Splits an identifier: `FirstSeen` and `first_seen` both give `first` and `seen`.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = '_';
    for c in name.chars() {
        if c == '_' || c.is_ascii_uppercase() && before.is_ascii_lowercase() {
            words.push(String::new());
        }
        if let (Some(word), true) = (words.last_mut(), c != '_') {
            word.push(c.to_ascii_lowercase());
        }
        before = c;
    }
    words
}

fn check(folder: &Path, found: &mut Vec<String>) {
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() && !path.ends_with("target") {
            check(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = fs::read_to_string(&path).unwrap();
            let avoided = names(&source).into_iter().filter(|(_, name)| {
                name.starts_with("MOST_") || words(name).iter().any(|word| AVOIDED.contains(&word.as_str()))
            });
            found.extend(avoided.map(|(line, name)| format!("{}:{line}: {name}", path.display())));
        }
    }
}

#[test]
fn names_avoid_private_words() {
    let mut found = Vec::new();
    for folder in ["crates", "e2e", "examples"] {
        check(&repo::root().join(folder), &mut found);
    }
    assert!(found.is_empty(), "use words that every Kubernetes engineer knows:\n{}", found.join("\n"));
}

#[test]
fn comments_and_texts_are_not_names() {
    let source = "fn told<'a>() { // wish\n    let x = \"news \\\" fate\"; r#\"a \" sight\"#; '\"'; '\\n'; feed('x') }\n";
    let names: Vec<_> = names(source).into_iter().map(|(line, name)| format!("{line}:{name}")).collect();
    assert_eq!(names, ["1:fn", "1:told", "1:a", "2:let", "2:x", "2:r", "2:feed"]);
    assert_eq!(words("tell_MaxSettled"), ["tell", "max", "settled"]);
}
