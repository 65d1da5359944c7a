//! What a process uses, as the kernel tells.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::Process;

impl Process {
    /// Seconds of processor time that it has used so far, its own and the kernel's for it, to a hundredth or so.
    pub fn processor_seconds(&self) -> Result<f64> {
        let text = self.proc("stat")?;
        // The name before the last parenthesis may contain anything.
        let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
        let ticks: Vec<_> = fields.skip(11).take(2).map(str::parse::<u32>).collect::<Result<_, _>>()?;
        let per_second = u32::try_from(rustix::param::clock_ticks_per_second())?;
        Ok(ticks.into_iter().map(f64::from).sum::<f64>() / f64::from(per_second))
    }

    /// The processor time that its threads have used so far, those alone that are still there, to the nanosecond.
    pub fn processor_time(&self) -> Result<Duration> {
        let tasks = format!("/proc/{}/task", self.pid());
        let tasks = fs::read_dir(&tasks).with_context(|| format!("reading {tasks} of {}", self.name))?;
        let of_thread = |task: std::io::Result<fs::DirEntry>| -> Option<u64> {
            // A thread that has just ended cannot be read.
            let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse().ok()
        };
        Ok(Duration::from_nanos(tasks.filter_map(of_thread).sum()))
    }

    /// How many bytes of memory it holds.
    pub fn resident_bytes(&self) -> Result<f64> {
        let text = self.proc("status")?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
        Ok(1024.0 * kilobytes.with_context(|| format!("the kernel does not say how big {} is", self.name))?)
    }

    fn proc(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.pid());
        fs::read_to_string(&path).with_context(|| format!("reading {path} of {}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use crate::process::{Command, Process};

    /// Waits until the process waits for its time to pass: one that the kernel has not run yet has used nothing,
    /// and while it is started it has the memory of nobody.
    fn until_asleep(process: &Process) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let stat = process.proc("stat").unwrap();
            if stat.contains(") S ") && process.processor_time().unwrap() > Duration::ZERO {
                return;
            }
            assert!(Instant::now() < deadline, "it does not fall asleep: {stat}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_process_that_sleeps_is_small_and_takes_no_time() {
        let sleep = Command::new("sleep").arg("600").spawn("sleep").unwrap();
        until_asleep(&sleep);
        // Processor time, of which a busy machine gives it no more than it needs.
        assert!(sleep.processor_seconds().unwrap() < 0.5);
        let used = sleep.processor_time().unwrap();
        assert!(used < Duration::from_millis(500), "{used:?}");
        assert!((1e3..1e9).contains(&sleep.resident_bytes().unwrap()));
    }
}
