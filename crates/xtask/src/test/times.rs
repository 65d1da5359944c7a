//! The duration of each test in its last run on this machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::runner::{Outcome, Verdict};
use crate::repo;

/// Durations of tests by name, as far as they are known.
#[derive(Debug, Default)]
pub struct Times {
    millis: BTreeMap<String, u64>,
}

impl Times {
    /// Reads the stored durations. Empty if they cannot be read, because only the order of tests depends on them.
    pub fn read() -> Self {
        let text = file().ok().and_then(|file| fs::read(file).ok()).unwrap_or_default();
        Self { millis: serde_json::from_slice(&text).unwrap_or_default() }
    }

    /// The duration of a test. An unknown test may be a long one.
    pub fn of(&self, test: &str) -> Duration {
        self.millis.get(test).map_or(Duration::MAX, |millis| Duration::from_millis(*millis))
    }

    /// Records the durations of tests that passed.
    pub fn record(&mut self, outcomes: &[Outcome]) {
        for outcome in outcomes.iter().filter(|outcome| outcome.verdict == Verdict::Passed) {
            let millis = u64::try_from(outcome.took.as_millis()).unwrap_or(u64::MAX);
            self.millis.insert(outcome.name.clone(), millis);
        }
    }

    /// Stores the durations for the next run.
    pub fn write(&self) -> Result<()> {
        let file = file()?;
        fs::write(&file, serde_json::to_vec(&self.millis)?)
            .with_context(|| format!("failed to write {}", file.display()))
    }
}

/// In the build directory, which clones share.
fn file() -> Result<PathBuf> {
    Ok(repo::build_dir()?.join("test-times.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_of_a_test_is_from_its_last_success() {
        let outcome =
            |seconds, verdict| Outcome { name: "e2e::a".into(), verdict, took: Duration::from_secs(seconds) };
        let mut times = Times::default();
        assert_eq!(times.of("e2e::a"), Duration::MAX, "unknown");
        times.record(&[outcome(5, Verdict::Passed)]);
        times.record(&[outcome(60, Verdict::Failed), outcome(0, Verdict::Skipped)]);
        assert_eq!(times.of("e2e::a"), Duration::from_secs(5));
        times.record(&[outcome(7, Verdict::Passed)]);
        assert_eq!(times.of("e2e::a"), Duration::from_secs(7));
    }
}
