//! Child processes that never outlive this process, however it exits, and that are always reaped.
//!
//! This module is independent of Kubernetes. It starts the control plane, the services and the test binaries that
//! `xtask` runs.

mod command;
mod usage;

use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use tokio::sync::watch;

pub use self::command::{Command, Output};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the process has been reaped. Signals are sent under this lock, because a process ID can be reused after its
/// process is reaped.
#[derive(Debug)]
struct Shared {
    reaped: Mutex<Option<ExitStatus>>,
    changed: Condvar,
    status: watch::Sender<Option<ExitStatus>>,
}

/// A running or finished child process. Dropping it kills and reaps it.
#[derive(Debug)]
pub struct Process {
    name: String,
    pid: Pid,
    log: Option<PathBuf>,
    shared: Arc<Shared>,
}

impl Process {
    fn watch(name: &str, mut child: Child, log: Option<PathBuf>) -> Result<Self> {
        let pid = Pid::from_raw(child.id().cast_signed()).context("a child has process id 0")?;
        let shared = Arc::new(Shared {
            reaped: Mutex::new(None),
            changed: Condvar::new(),
            status: watch::Sender::new(None),
        });
        let theirs = Arc::clone(&shared);
        std::thread::spawn(move || {
            // NOWAIT keeps the process ID in use until the lock is held.
            while let Err(rustix::io::Errno::INTR) =
                waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
            {}
            let mut reaped = lock(&theirs.reaped);
            // Only this thread waits for this child, so it cannot have been reaped before.
            let status = child.wait().unwrap_or_default();
            *reaped = Some(status);
            theirs.changed.notify_all();
            theirs.status.send_replace(Some(status));
        });
        Ok(Self { name: name.to_owned(), pid, log, shared })
    }

    /// The name given at the start.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process ID. It may belong to another process after this one has exited.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_pid().cast_unsigned()
    }

    /// The file that stdout and stderr are appended to, if any.
    pub fn log(&self) -> Option<&Path> {
        self.log.as_deref()
    }

    /// The exit status, or `None` while the process runs.
    pub fn try_wait(&self) -> Option<ExitStatus> {
        *lock(&self.shared.reaped)
    }

    /// Blocks until the process has ended.
    pub fn wait(&self) -> ExitStatus {
        let mut reaped = lock(&self.shared.reaped);
        loop {
            match *reaped {
                Some(status) => return status,
                None => {
                    reaped = self.shared.changed.wait(reaped).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Blocks until the process has exited or the time is up.
    pub fn wait_timeout(&self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        let mut reaped = lock(&self.shared.reaped);
        while reaped.is_none() {
            let left = deadline.checked_duration_since(Instant::now())?;
            let woken = self.shared.changed.wait_timeout(reaped, left);
            reaped = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        *reaped
    }

    /// Resolves when the process has exited. The future borrows nothing, so that one can wait for a process and control
    /// it at the same time.
    pub fn exited(&self) -> impl Future<Output = ExitStatus> + Send + use<> {
        let mut status = self.shared.status.subscribe();
        async move {
            loop {
                if let Some(status) = *status.borrow_and_update() {
                    return status;
                }
                if status.changed().await.is_err() {
                    // The reaper holds the sender until it has sent a status.
                    return ExitStatus::default();
                }
            }
        }
    }

    /// Stops the process with SIGTERM, waits up to `limit`, then kills it. Blocks.
    pub fn stop(&self, limit: Duration) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        // A paused process would not handle SIGTERM.
        self.signal(Signal::CONT)?;
        match self.wait_timeout(limit) {
            Some(status) => Ok(status),
            None => self.kill(),
        }
    }

    /// Kills the process and its process group (SIGKILL) and waits until it is gone.
    pub fn kill(&self) -> Result<ExitStatus> {
        {
            let reaped = lock(&self.shared.reaped);
            if reaped.is_none() {
                ignore_gone(kill_process_group(self.pid, Signal::KILL))
                    .with_context(|| format!("failed to kill {} (pid {})", self.name, self.pid()))?;
            }
        }
        Ok(self.wait())
    }

    /// Freezes the process (SIGSTOP): it keeps its connections and does not respond.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Resumes a frozen process (SIGCONT).
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Sends any signal. Does nothing if the process has exited.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let reaped = lock(&self.shared.reaped);
        if reaped.is_some() {
            return Ok(());
        }
        ignore_gone(kill_process(self.pid, signal))
            .with_context(|| format!("failed to send {signal:?} to {} (pid {})", self.name, self.pid()))
    }
}

fn ignore_gone(sent: rustix::io::Result<()>) -> rustix::io::Result<()> {
    match sent {
        Err(rustix::io::Errno::SRCH) => Ok(()),
        other => other,
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.try_wait().is_none() {
            // Killing a child process cannot fail, and the error could not be reported here.
            let _ = self.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;

    /// Long enough for a busy machine.
    const TIMEOUT: Duration = Duration::from_secs(60);
    const SIGTERM: i32 = 15;

    fn sleep() -> Process {
        Command::new("sleep").arg("600").spawn("sleep").unwrap()
    }

    #[test]
    fn stopped_process_is_reaped_with_its_status() {
        let process = sleep();
        assert_eq!(process.try_wait(), None);
        let status = process.stop(TIMEOUT).unwrap();
        assert_eq!(status.signal(), Some(SIGTERM));
        assert_eq!(process.try_wait(), Some(status));
        process.signal(Signal::TERM).expect("signalling an ended process is harmless");
    }

    #[test]
    fn paused_process_can_be_stopped() {
        let process = sleep();
        process.pause().unwrap();
        let status = process.stop(TIMEOUT).unwrap();
        assert_eq!(status.signal(), Some(SIGTERM), "it was killed because it did not handle SIGTERM");
    }

    #[test]
    fn process_that_ignores_sigterm_is_killed_with_its_group() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let process = Command::new("sh")
            .args(["-c", "trap '' TERM; sleep 600 & echo $!; while :; do wait; done"])
            .log(&log)
            .spawn("stubborn")
            .unwrap();
        let until = |what: &str, condition: &dyn Fn() -> bool| {
            let deadline = Instant::now() + TIMEOUT;
            while !condition() {
                assert!(Instant::now() < deadline, "timed out waiting until {what}");
                std::thread::sleep(Duration::from_millis(10));
            }
        };
        let said = || std::fs::read_to_string(&log).unwrap();
        until("it names its child", &|| said().ends_with('\n'));
        let grandchild = format!("/proc/{}/stat", said().trim());
        process.stop(Duration::from_millis(100)).unwrap();
        until("its child has ended with it", &|| {
            std::fs::read_to_string(&grandchild).map_or(true, |stat| stat.contains(") Z "))
        });
    }

    #[test]
    fn child_outlives_the_thread_that_spawned_it() {
        let process = std::thread::spawn(sleep).join().unwrap();
        assert_eq!(process.wait_timeout(Duration::from_millis(200)), None);
    }

    #[tokio::test]
    async fn exit_can_be_awaited_more_than_once() {
        let process = Command::new("sh").args(["-c", "exit 3"]).spawn("three").unwrap();
        assert_eq!(process.exited().await.code(), Some(3));
        assert_eq!(process.exited().await.code(), Some(3));
        assert_eq!(process.wait().code(), Some(3));
    }

    #[tokio::test]
    async fn output_is_captured_and_failure_contains_it() {
        let script = "cat; echo problem >&2; exit 4";
        let output =
            Command::new("sh").args(["-c", script]).stdin("hello\n").unwrap().output("cat").await.unwrap();
        assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("hello\n", "problem\n"));
        let error = output.success().unwrap_err();
        assert_eq!(error.to_string(), "exit status: 4\nhello\nproblem\n");
    }

    #[test]
    fn error_names_a_missing_program() {
        let error = Command::new("/does/not/exist").spawn("nothing").unwrap_err();
        assert_eq!(error.to_string(), "failed to start nothing (/does/not/exist)");
    }
}
