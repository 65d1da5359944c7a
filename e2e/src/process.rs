//! Child processes that never outlive us, however we end, and that are always reaped.
//!
//! This knows nothing of Kubernetes: the control plane, our services and the test binaries that
//! `xtask` runs are all started here.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, getppid, kill_process, kill_process_group,
    set_parent_process_death_signal, waitid,
};
use tokio::sync::watch;

/// What to start: a program, its arguments and where its output goes.
#[derive(Debug)]
pub struct Command {
    inner: std::process::Command,
    log: Option<PathBuf>,
}

impl Command {
    /// A command that inherits our environment and output and reads nothing.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        let mut inner = std::process::Command::new(program);
        inner.stdin(Stdio::null());
        Self { inner, log: None }
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.inner.arg(arg);
        self
    }

    /// Adds several arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.inner.args(args);
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.inner.env(key, value);
        self
    }

    /// Removes an inherited environment variable.
    #[must_use]
    pub fn env_remove(mut self, key: impl AsRef<OsStr>) -> Self {
        self.inner.env_remove(key);
        self
    }

    /// Sets the working directory.
    #[must_use]
    pub fn current_dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.inner.current_dir(dir);
        self
    }

    /// Appends stdout and stderr to this file instead of inheriting ours.
    #[must_use]
    pub fn log(mut self, path: impl Into<PathBuf>) -> Self {
        self.log = Some(path.into());
        self
    }

    /// Gives the process this text to read.
    pub fn stdin(mut self, text: &str) -> Result<Self> {
        // A file and not a pipe: nobody has to feed it while the process talks.
        let mut file = tempfile::tempfile().context("making a file for a command to read")?;
        file.write_all(text.as_bytes())
            .and_then(|()| file.rewind())
            .context("writing what a command is to read")?;
        self.inner.stdin(file);
        Ok(self)
    }

    /// Starts the process; `name` is what error messages call it.
    pub fn spawn(mut self, name: &str) -> Result<Process> {
        if let Some(path) = &self.log {
            let file = OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .with_context(|| format!("opening the log {} of {name}", path.display()))?;
            self.inner.stdout(file.try_clone().context("sharing a log file")?);
            self.inner.stderr(file);
        }
        // In a group of its own, so that Ctrl-C at the terminal reaches only us and we stop our
        // children in the right order.
        self.inner.process_group(0);
        die_with_parent(&mut self.inner);
        let program = self.inner.get_program().to_os_string();
        let child = spawn_on_lasting_thread(self.inner)
            .with_context(|| format!("starting {name} ({})", program.display()))?;
        Process::watch(name, child, self.log)
    }

    /// Runs the process to its end and returns what it said. Only one that could not be run is an
    /// error: see [`Output::success`]. Dropping the future kills it.
    pub async fn output(mut self, name: &str) -> Result<Output> {
        let what = || format!("making files for the output of {name}");
        let mut stdout = tempfile::tempfile().with_context(what)?;
        let mut stderr = tempfile::tempfile().with_context(what)?;
        self.inner.stdout(stdout.try_clone().with_context(what)?);
        self.inner.stderr(stderr.try_clone().with_context(what)?);
        self.log = None;
        let process = self.spawn(name)?;
        let status = process.exited().await;
        Ok(Output { stdout: read_back(&mut stdout)?, stderr: read_back(&mut stderr)?, status })
    }
}

fn read_back(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).context("reading a command's output")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// How a command ended and what it said.
#[derive(Clone, Debug)]
pub struct Output {
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
    /// How it ended.
    pub status: ExitStatus,
}

impl Output {
    /// Stdout of a command that succeeded, and else an error with everything it said.
    pub fn success(self) -> Result<String> {
        if self.status.success() {
            return Ok(self.stdout);
        }
        bail!("{}\n{}{}", self.status, self.stdout, self.stderr)
    }
}

/// Makes the kernel kill the child when we die, even by SIGKILL.
#[expect(unsafe_code, reason = "only a pre_exec hook runs between fork and exec, and it is unsafe")]
fn die_with_parent(command: &mut std::process::Command) {
    let parent = rustix::process::getpid();
    // SAFETY: the hook makes two system calls and allocates nothing, as is required after a fork.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // We may have died between fork and prctl: then the signal will never come.
            if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from_raw_os_error(3)) }
        });
    }
}

type SpawnRequest = (std::process::Command, mpsc::Sender<io::Result<Child>>);

/// Forks on one thread that lives as long as we do, because the death signal fires when the forking
/// *thread* ends, and runtimes end threads.
fn spawn_on_lasting_thread(command: std::process::Command) -> Result<Child> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<SpawnRequest>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, requests) = mpsc::channel::<SpawnRequest>();
        std::thread::spawn(move || {
            for (mut command, answer) in requests {
                // A caller that no longer listens drops its child's only handle; nobody does.
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(sender)
    });
    let (answer, answered) = mpsc::channel();
    lock(spawner)
        .send((command, answer))
        .map_err(|_| anyhow!("the thread that starts processes has ended"))?;
    Ok(answered.recv().context("the thread that starts processes has ended")??)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the process has been reaped. Signals are sent under this lock: a process id may be given
/// to somebody else as soon as its owner has been reaped.
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
            // NOWAIT leaves the process id taken until the lock is held.
            while let Err(rustix::io::Errno::INTR) =
                waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
            {}
            let mut reaped = lock(&theirs.reaped);
            // Only this thread waits for this child, so that it cannot have been reaped before.
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

    /// The process id. It may belong to someone else once the process has ended.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_pid().cast_unsigned()
    }

    /// The file that stdout and stderr are appended to, if any.
    pub fn log(&self) -> Option<&Path> {
        self.log.as_deref()
    }

    /// How the process ended, or `None` while it runs.
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

    /// Blocks until the process has ended or the time is up.
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

    /// Resolves when the process has ended. The future borrows nothing, so that one can wait for a
    /// process and control it at the same time.
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

    /// Asks the process to end (SIGTERM), waits up to `limit`, then kills it. Blocks.
    pub fn stop(&self, limit: Duration) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        // A paused process would not see the SIGTERM.
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
                    .with_context(|| format!("killing {} (pid {})", self.name, self.pid()))?;
            }
        }
        Ok(self.wait())
    }

    /// Freezes the process (SIGSTOP): it keeps its connections and answers nothing.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets a frozen process go on (SIGCONT).
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Sends any signal; nothing happens when the process has already ended.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let reaped = lock(&self.shared.reaped);
        if reaped.is_some() {
            return Ok(());
        }
        ignore_gone(kill_process(self.pid, signal))
            .with_context(|| format!("sending {signal:?} to {} (pid {})", self.name, self.pid()))
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
            // Killing our own child cannot be refused, and there is nobody to tell.
            let _ = self.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleep() -> Process {
        Command::new("sleep").arg("60").spawn("sleep").unwrap()
    }

    #[test]
    fn a_stopped_process_is_reaped_and_its_status_known() {
        let process = sleep();
        assert_eq!(process.try_wait(), None);
        let status = process.stop(Duration::from_secs(5)).unwrap();
        assert!(!status.success());
        assert_eq!(process.try_wait(), Some(status));
        process.signal(Signal::TERM).expect("signalling an ended process is harmless");
    }

    #[test]
    fn a_paused_process_can_be_stopped() {
        let process = sleep();
        process.pause().unwrap();
        let begun = Instant::now();
        process.stop(Duration::from_secs(5)).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(4), "SIGTERM was not seen");
    }

    #[test]
    fn one_that_ignores_sigterm_is_killed_with_its_group() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let process = Command::new("sh")
            .args(["-c", "trap '' TERM; sleep 60 & echo $!; while :; do wait; done"])
            .log(&log)
            .spawn("stubborn")
            .unwrap();
        let grandchild = loop {
            let text = std::fs::read_to_string(&log).unwrap();
            if text.ends_with('\n') {
                break text.trim().to_owned();
            }
        };
        process.stop(Duration::from_millis(100)).unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        while std::fs::read_to_string(format!("/proc/{grandchild}/stat")).is_ok_and(|s| !s.contains(") Z ")) {
            assert!(Instant::now() < deadline, "the grandchild {grandchild} outlived its group");
        }
    }

    #[test]
    fn a_child_outlives_the_thread_that_asked_for_it() {
        let process = std::thread::spawn(sleep).join().unwrap();
        assert_eq!(process.wait_timeout(Duration::from_millis(200)), None);
    }

    #[tokio::test]
    async fn the_end_can_be_awaited_more_than_once() {
        let process = Command::new("sh").args(["-c", "exit 3"]).spawn("three").unwrap();
        assert_eq!(process.exited().await.code(), Some(3));
        assert_eq!(process.exited().await.code(), Some(3));
        assert_eq!(process.wait().code(), Some(3));
    }

    #[tokio::test]
    async fn output_is_captured_apart_and_failure_tells_all_of_it() {
        let script = "cat; echo problem >&2; exit 4";
        let output =
            Command::new("sh").args(["-c", script]).stdin("hello\n").unwrap().output("cat").await.unwrap();
        assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("hello\n", "problem\n"));
        let error = output.success().unwrap_err();
        assert_eq!(error.to_string(), "exit status: 4\nhello\nproblem\n");
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = Command::new("/does/not/exist").spawn("nothing").unwrap_err();
        assert_eq!(error.to_string(), "starting nothing (/does/not/exist)");
    }
}
