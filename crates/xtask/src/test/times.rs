//! How long each test took the last time on this machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::runner::{Outcome, Verdict};
use crate::repo;

/// The times of tests by their names, as far as they are known.
#[derive(Debug, Default)]
pub struct Times {
    millis: BTreeMap<String, u64>,
}

impl Times {
    /// What was kept. Nothing if it cannot be read: the order of tests is all that depends on it.
    pub fn read() -> Self {
        let text = file().ok().and_then(|file| fs::read(file).ok()).unwrap_or_default();
        Self { millis: serde_json::from_slice(&text).unwrap_or_default() }
    }

    /// A test of which nothing is known may be a long one.
    pub fn of(&self, test: &str) -> Duration {
        self.millis.get(test).map_or(Duration::MAX, |millis| Duration::from_millis(*millis))
    }

    /// Learns from tests that came to their end.
    pub fn learn(&mut self, outcomes: &[Outcome]) {
        for outcome in outcomes.iter().filter(|outcome| outcome.verdict == Verdict::Passed) {
            let millis = u64::try_from(outcome.took.as_millis()).unwrap_or(u64::MAX);
            self.millis.insert(outcome.name.clone(), millis);
        }
    }

    /// Keeps them for the next time.
    pub fn write(&self) -> Result<()> {
        let file = file()?;
        fs::write(&file, serde_json::to_vec(&self.millis)?)
            .with_context(|| format!("writing {}", file.display()))
    }
}

/// Beside what cargo builds, which outlives a clone.
fn file() -> Result<PathBuf> {
    Ok(repo::build_dir()?.join("test-times.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_test_is_that_of_its_last_success() {
        let outcome =
            |seconds, verdict| Outcome { name: "e2e::a".into(), verdict, took: Duration::from_secs(seconds) };
        let mut times = Times::default();
        assert_eq!(times.of("e2e::a"), Duration::MAX, "nothing is known");
        times.learn(&[outcome(5, Verdict::Passed)]);
        times.learn(&[outcome(60, Verdict::Failed), outcome(0, Verdict::Skipped)]);
        assert_eq!(times.of("e2e::a"), Duration::from_secs(5));
        times.learn(&[outcome(7, Verdict::Passed)]);
        assert_eq!(times.of("e2e::a"), Duration::from_secs(7));
    }
}
