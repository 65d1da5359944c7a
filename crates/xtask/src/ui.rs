//! What people see: one line a step, colour only on a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

fn paint(code: &str, text: &str) -> String {
    painted(code, text, std::io::stderr().is_terminal())
}

/// Colour for a part of a result.
pub fn paint_result(code: &str, text: &str) -> String {
    painted(code, text, std::io::stdout().is_terminal())
}

fn painted(code: &str, text: &str, terminal: bool) -> String {
    if terminal && std::env::var_os("NO_COLOR").is_none() {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.into()
    }
}

/// A result, on stdout. Whoever stops reading, as `head` does, has seen enough.
pub fn result(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// A line about what is going on.
pub fn note(text: &str) {
    eprintln!("{text}");
}

/// A line about something that is not as it should be, while the work goes on.
pub fn warning(text: &str) {
    eprintln!("{} {text}", paint("33", "warning:"));
}

/// The reason why the command ends.
pub fn error(text: &str) {
    eprintln!("{} {text}", paint("31;1", "error:"));
}

/// `1.2 s` or `3 min 04 s`.
pub fn duration(of: Duration) -> String {
    match of.as_secs() {
        seconds @ 60.. => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{:.1} s", of.as_secs_f64()),
    }
}

/// A piece of work with a beginning and an end, each a line.
pub struct Step {
    name: String,
    begun: Instant,
}

impl Step {
    /// Begins a step.
    pub fn begin(name: &str) -> Self {
        eprintln!("{} {name}", paint("36", "==>"));
        // The step's own output may go elsewhere; this line has to be first.
        let _ = std::io::stderr().flush();
        Self { name: name.into(), begun: Instant::now() }
    }

    /// Ends it and tells how long it took.
    pub fn end(self, good: bool, remark: &str) -> Duration {
        let took = self.begun.elapsed();
        let mark = if good { paint("32", "ok") } else { paint("31;1", "FAILED") };
        let remark = if remark.is_empty() { String::new() } else { format!(": {remark}") };
        eprintln!("    {mark} {} ({}){remark}", self.name, duration(took));
        took
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well() {
        let shown = [0.04, 59.94, 60.0, 184.0].map(|seconds| duration(Duration::from_secs_f64(seconds)));
        assert_eq!(shown, ["0.0 s", "59.9 s", "1 min 00 s", "3 min 04 s"]);
    }
}
