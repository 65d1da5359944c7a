//! Processor time and memory of a process, from the kernel.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result};

use super::Process;

impl Process {
    /// Processor time used so far, in seconds, in user and kernel mode, with a resolution of about 10 ms.
    pub fn processor_seconds(&self) -> Result<f64> {
        let text = self.proc("stat")?;
        // The name before the last parenthesis may contain anything.
        let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
        let ticks: Vec<_> = fields.skip(11).take(2).map(str::parse::<u32>).collect::<Result<_, _>>()?;
        let per_second = u32::try_from(rustix::param::clock_ticks_per_second())?;
        Ok(ticks.into_iter().map(f64::from).sum::<f64>() / f64::from(per_second))
    }

    /// Processor time used so far by its threads that still exist, to the nanosecond.
    pub fn processor_time(&self) -> Result<Duration> {
        let tasks = format!("/proc/{}/task", self.pid());
        let tasks =
            fs::read_dir(&tasks).with_context(|| format!("failed to read {tasks} of {}", self.name))?;
        let of_thread = |task: std::io::Result<fs::DirEntry>| -> Option<u64> {
            // A thread that has just exited cannot be read.
            let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            text.split_whitespace().next()?.parse().ok()
        };
        Ok(Duration::from_nanos(tasks.filter_map(of_thread).sum()))
    }

    /// Its resident memory, in bytes.
    pub fn resident_bytes(&self) -> Result<f64> {
        let text = self.proc("status")?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
        Ok(1024.0
            * kilobytes.with_context(|| format!("the kernel does not report the memory of {}", self.name))?)
    }

    fn proc(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.pid());
        fs::read_to_string(&path).with_context(|| format!("failed to read {path} of {}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use crate::process::{Command, Process};

    /// Waits until the process sleeps. A process that the kernel has not run yet has used no time, and during its start
    /// it has no memory.
    fn until_asleep(process: &Process) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let stat = process.proc("stat").unwrap();
            if stat.contains(") S ") && process.processor_time().unwrap() > Duration::ZERO {
                return;
            }
            assert!(Instant::now() < deadline, "the process does not sleep: {stat}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn sleeping_process_uses_little_memory_and_no_cpu() {
        let sleep = Command::new("sleep").arg("600").spawn("sleep").unwrap();
        until_asleep(&sleep);
        // Processor time does not depend on how busy the machine is.
        assert!(sleep.processor_seconds().unwrap() < 0.5);
        let used = sleep.processor_time().unwrap();
        assert!(used < Duration::from_millis(500), "{used:?}");
        assert!((1e3..1e9).contains(&sleep.resident_bytes().unwrap()));
    }
}
