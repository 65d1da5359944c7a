//! Who did what and when, to find out why a round failed.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum length of a line.
const WIDTH: usize = 300;

/// A shared record of what happened.
#[derive(Clone, Debug)]
pub struct Timeline(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    begun: Instant,
    lines: Mutex<Vec<Line>>,
}

#[derive(Debug)]
struct Line {
    at: Duration,
    who: &'static str,
    what: String,
    repeated: u32,
}

impl Timeline {
    /// A timeline that starts now.
    pub fn new() -> Self {
        Self(Arc::new(Inner { begun: Instant::now(), lines: Mutex::default() }))
    }

    /// Adds a line. An immediate repetition only increments a counter.
    pub fn note(&self, who: &'static str, what: impl Into<String>) {
        let (at, mut what) = (self.0.begun.elapsed(), what.into());
        if let Some((cut, _)) = what.char_indices().nth(WIDTH) {
            what.truncate(cut);
            what.push('…');
        }
        let mut lines = self.lines();
        match lines.last_mut() {
            Some(last) if last.who == who && last.what == what => last.repeated += 1,
            _ => lines.push(Line { at, who, what, repeated: 0 }),
        }
    }

    /// The last lines, and how many precede them.
    pub fn last(&self, most: usize) -> String {
        let lines = self.lines();
        let left_out = lines.len().saturating_sub(most);
        let mut text = String::new();
        if left_out > 0 {
            text.extend(["    … ", &left_out.to_string(), " lines before\n"]);
        }
        for Line { at, who, what, repeated } in lines.iter().skip(left_out) {
            let times = if *repeated > 0 { format!(" (and {repeated} times more)") } else { String::new() };
            // Writing to a String never fails.
            let _ = writeln!(text, "{:>7.2} s  {who:<22} {what}{times}", at.as_secs_f64());
        }
        text
    }

    fn lines(&self) -> MutexGuard<'_, Vec<Line>> {
        self.0.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
