//! The documented tables of files and functions match the code.

use std::path::Path;

use super::{pages, root};

/// The table rows of a page that name a file and a function, by heading.
fn places(page: &str) -> Vec<(String, String, String)> {
    let (mut heading, mut found) = (String::new(), Vec::new());
    for line in pages::read(page).text.lines() {
        if let Some(text) = line.strip_prefix("## ") {
            heading = text.into();
        }
        let code: Vec<&str> = line.split('`').skip(1).step_by(2).collect();
        let is_file = |code: &&str| Path::new(code).extension().is_some_and(|ending| ending == "rs");
        if let Some(at) = code.iter().position(|code| is_file(code) && code.starts_with("crates/"))
            && let (true, Some(function)) = (line.starts_with('|'), code.get(at + 1))
        {
            found.push((heading.clone(), code[at].into(), (*function).into()));
        }
    }
    found
}

#[test]
fn files_and_functions_named_in_docs_exist() {
    let mut wrong = Vec::new();
    let all = [places("docs/architecture.md"), places("CONTRIBUTING.md")].concat();
    for (heading, file, function) in &all {
        let text = std::fs::read_to_string(root().join(file)).unwrap_or_default();
        let defines = |line: &str| {
            let call = line.split_once("fn ").and_then(|(_, rest)| rest.strip_prefix(function.as_str()));
            call.is_some_and(|rest| rest.starts_with(['(', '<']))
        };
        if !text.lines().any(defines) {
            wrong.push(format!("{heading}: {file} has no function {function}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(all.len() >= 40, "only {} table rows were found", all.len());
}

/// A newcomer can follow a pod through each controller.
#[test]
fn pod_path_has_at_most_15_steps_per_controller() {
    let all = places("docs/architecture.md");
    for controller in ["maintenance controller", "evacuation controller", "workload evacuator"] {
        let heading = format!("Path of a pod through the {controller}");
        let hops = all.iter().filter(|(of, ..)| *of == heading).count();
        assert!((1..=15).contains(&hops), "{heading}: {hops} hops");
    }
}
