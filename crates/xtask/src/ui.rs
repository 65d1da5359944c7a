//! Terminal output: one line per step, colours only on a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

fn paint(code: &str, text: &str) -> String {
    painted(code, text, std::io::stderr().is_terminal())
}

/// Colours a part of a result.
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

/// Prints a result on stdout. Errors are ignored, because the reader, such as `head`, may stop early.
pub fn result(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Prints a line about progress.
pub fn note(text: &str) {
    eprintln!("{text}");
}

/// Prints a warning. The work continues.
pub fn warning(text: &str) {
    eprintln!("{} {text}", paint("33", "warning:"));
}

/// Prints the error with which the command fails.
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

/// A step of a command. Its start and its end print a line each.
pub struct Step {
    name: String,
    started: Instant,
}

impl Step {
    /// Starts a step.
    pub fn begin(name: &str) -> Self {
        eprintln!("{} {name}", paint("36", "==>"));
        // The step's own output may use another stream. This line has to come first.
        let _ = std::io::stderr().flush();
        Self { name: name.into(), started: Instant::now() }
    }

    /// Ends the step, prints its duration and returns it.
    pub fn end(self, good: bool, remark: &str) -> Duration {
        let took = self.started.elapsed();
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
