//! Documented names exist in the code: metrics, events, reasons, values, flags, annotations. A renamed one is
//! detected here.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use haulout_api_types::names;

use super::pages::{self, Page};
use super::root;
use crate::support::{shared, xtask};

/// The prefixes of our metrics.
const METRICS: [&str; 5] =
    ["evacuation_controller_", "haulout_", "leader_election_", "taint_eviction_controller_", "workqueue_"];

/// The text of all Rust files under a folder.
fn sources(folder: &Path) -> String {
    let mut text = String::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            text += &sources(&path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text += &std::fs::read_to_string(path).unwrap();
        }
    }
    text
}

fn words(span: &str) -> impl Iterator<Item = &str> {
    span.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

#[test]
fn every_documented_metric_exists() {
    let sources = sources(&root().join("crates"));
    let registered = |name: &str| {
        let suffixes = ["", "_total", "_seconds", "_seconds_total", "_bytes", "_info"];
        let mut stems = suffixes.iter().filter_map(|suffix| name.strip_suffix(suffix));
        stems.any(|stem| sources.contains(&format!("\"{stem}\"")))
    };
    let mut documented = BTreeSet::new();
    for page in pages::for_users() {
        for span in page.spans().into_iter().filter(|span| !span.contains("::")) {
            for word in words(&span) {
                if !METRICS.iter().any(|prefix| word.len() > prefix.len() && word.starts_with(prefix)) {
                    continue;
                }
                assert!(registered(word), "{}: there is no metric {word}", page.name);
                documented.insert(word.to_owned());
            }
        }
    }
    assert!(documented.len() > 20, "only {documented:?}");
}

/// The constants of a module in `names.rs`.
fn constants(module: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join("crates/api-types/src/names.rs")).unwrap();
    let (_, rest) = text.split_once(&format!("pub mod {module} {{")).unwrap();
    let (inside, _) = rest.split_once("\n}").unwrap();
    inside.split("&str = \"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())).collect()
}

#[test]
fn events_and_reasons_match_the_code() {
    let (events, reasons) = (constants("event"), constants("reason"));
    let mut documented = BTreeSet::new();
    for page in pages::for_users() {
        let is_name = |span: &String| span.starts_with(|c: char| c.is_ascii_uppercase());
        let section = page.section("Events").map(|section| section.text).unwrap_or_default();
        // The section ends before a table of metrics.
        let section = section.split("\n|").next().unwrap_or_default().to_owned();
        for event in (Page { name: page.name.clone(), text: section }).spans().into_iter().filter(is_name) {
            assert!(events.contains(&event), "{}: there is no event {event}", page.name);
            documented.insert(event);
        }
        let mut lines = page.text.lines();
        while lines.any(|line| line.starts_with("| reason |")) {
            for row in lines.by_ref().skip(1).take_while(|line| line.starts_with('|')) {
                let reason = row.split('`').nth(1).unwrap_or_default();
                assert!(reasons.contains(reason), "{}: there is no reason {reason}", page.name);
            }
        }
    }
    assert_eq!(documented, events, "every event is documented under a heading Events");
}

#[test]
fn every_documented_value_exists() {
    let values = std::fs::read_to_string(root().join("charts/haulout/values.yaml")).unwrap();
    let values: serde_yaml::Value = serde_yaml::from_str(&values).unwrap();
    let mut count = 0;
    for page in pages::for_users() {
        for span in page.spans() {
            let path = span.split([':', '=', ' ']).next().unwrap_or_default();
            let parts: Vec<_> = path.split('.').collect();
            // Other kinds have fields with these names, too.
            if parts.len() < 2 || values.get(parts[0]).is_none() || path.contains('/') {
                continue;
            }
            let found = parts.iter().try_fold(&values, |value, part| value.get(part));
            assert!(found.is_some(), "{}: there is no value {path}", page.name);
            count += 1;
        }
    }
    assert!(count > 10, "only {count} values were found");
}

#[test]
fn names_on_other_objects_are_documented() {
    let spans = pages::read("docs/api.md").section("Names on other objects").unwrap().spans();
    let names = [
        names::EVACUATOR_ANNOTATION_PREFIX,
        names::INSTIGATOR_FINALIZER_PREFIX,
        names::MAINTENANCE_STATUS_ANNOTATION,
        names::BEFORE_MAINTENANCE_ANNOTATION,
        names::SCALE_DOWN_DISABLED_ANNOTATION,
        names::DO_NOT_DISRUPT_ANNOTATION,
        names::DRAIN_LABEL,
        names::TAINTS_FIRST_SEEN_ANNOTATION,
        names::TAINT_ACTION_LABEL,
        names::COMPLETION_FINALIZER,
        names::instigator::NODE_MAINTENANCE,
        names::instigator::TAINT_MANAGER,
        names::instigator::WORKLOAD_EVACUATOR,
        names::FORMER_OWNER_ANNOTATION,
        names::REPLACE_ANNOTATION,
        names::POD_DELETION_COST_ANNOTATION,
    ];
    for name in names {
        let documented = spans.iter().any(|span| span.split('<').next() == Some(name));
        assert!(documented, "{name} is not documented in docs/api.md");
    }
}

/// The flags in a text.
fn flags(text: &str) -> BTreeSet<String> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let words = text.split(|c: char| !allowed(c)).filter(|word| word.len() > 3 && word.starts_with("--"));
    words.map(Into::into).collect()
}

#[tokio::test]
async fn every_documented_flag_exists() {
    let tools = shared().await.tools.clone();
    let service = |name: &str| xtask().with_file_name(name);
    let mut programs = vec![
        (tools.kubectl(), vec!["options"]),
        (tools.kubectl(), vec!["auth", "can-i", "--help"]),
        (service("chart-hooks"), vec!["cleanup", "--help"]),
        (tools.path("kube-controller-manager"), vec!["--help"]),
        (tools.path("kube-apiserver"), vec!["--help"]),
    ];
    programs.extend(haulout_e2e::service::BINARIES.map(|name| (service(name), vec!["--help"])));
    programs.extend(
        ["demo", "test", "e2e", "bench", "soak", "generate"].map(|name| (xtask(), vec![name, "--help"])),
    );
    programs.extend(
        ["apply", "delete", "drain", "logs", "patch", "wait"]
            .map(|name| (tools.kubectl(), vec![name, "--help"])),
    );
    programs.extend(["upgrade", "uninstall", "template"].map(|name| (tools.helm(), vec![name, "--help"])));
    let mut known = BTreeSet::new();
    for (program, args) in programs {
        let output = Command::new(&program).args(&args).output().unwrap();
        assert!(output.status.success(), "{} {args:?}", program.display());
        known.extend(flags(&String::from_utf8_lossy(&output.stdout)));
    }
    let mut count = 0;
    for page in pages::for_users() {
        for flag in page.spans().iter().flat_map(|span| flags(span)) {
            assert!(known.contains(&flag), "{}: no program has a flag {flag}", page.name);
            count += 1;
        }
    }
    assert!(count > 10, "only {count} flags were found");
}
