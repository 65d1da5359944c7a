//! Commands, and the single thread that starts them.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, mpsc};

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use super::{Process, lock};

/// A command: a program, its arguments and where its output goes.
#[derive(Debug)]
pub struct Command {
    inner: std::process::Command,
    log: Option<PathBuf>,
}

impl Command {
    /// A command that inherits environment and output, with empty stdin.
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

    /// Appends stdout and stderr to this file instead of inheriting them.
    #[must_use]
    pub fn log(mut self, path: impl Into<PathBuf>) -> Self {
        self.log = Some(path.into());
        self
    }

    /// Passes this text on stdin.
    pub fn stdin(mut self, text: &str) -> Result<Self> {
        // A file instead of a pipe, because nothing writes to a pipe while the process runs.
        let mut file = tempfile::tempfile().context("failed to create a file for a command's stdin")?;
        file.write_all(text.as_bytes())
            .and_then(|()| file.rewind())
            .context("failed to write a command's stdin")?;
        self.inner.stdin(file);
        Ok(self)
    }

    /// Starts the process. `name` identifies it in error messages.
    pub fn spawn(mut self, name: &str) -> Result<Process> {
        if let Some(path) = &self.log {
            let file = OpenOptions::new()
                .create(true)
                .append(true)
                .open(path)
                .with_context(|| format!("failed to open the log {} of {name}", path.display()))?;
            self.inner.stdout(file.try_clone().context("failed to share a log file")?);
            self.inner.stderr(file);
        }
        // In its own process group, so that Ctrl-C reaches only this process, which stops its children in the right
        // order.
        self.inner.process_group(0);
        die_with_parent(&mut self.inner);
        let program = self.inner.get_program().to_os_string();
        let child = spawn_on_permanent_thread(self.inner)
            .with_context(|| format!("failed to start {name} ({})", program.display()))?;
        Process::watch(name, child, self.log)
    }

    /// Runs the process until it exits and returns its output. Only a failure to start it is an error: see
    /// [`Output::success`]. Dropping the future kills it.
    pub async fn output(mut self, name: &str) -> Result<Output> {
        let what = || format!("failed to create files for the output of {name}");
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
    file.rewind().and_then(|()| file.read_to_end(&mut bytes)).context("failed to read a command's output")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The exit status and output of a command.
#[derive(Clone, Debug)]
pub struct Output {
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
    /// The exit status.
    pub status: ExitStatus,
}

impl Output {
    /// Returns stdout if the command succeeded, otherwise an error with all of its output.
    pub fn success(self) -> Result<String> {
        if self.status.success() {
            return Ok(self.stdout);
        }
        bail!("{}\n{}{}", self.status, self.stdout, self.stderr)
    }
}

/// Makes the kernel kill the child when this process dies, even by SIGKILL.
#[expect(unsafe_code, reason = "only a pre_exec hook runs between fork and exec, and it is unsafe")]
fn die_with_parent(command: &mut std::process::Command) {
    let parent = rustix::process::getpid();
    // SAFETY: the hook makes two system calls and allocates nothing, as is required after a fork.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died between fork and prctl. In that case the signal never arrives.
            if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from_raw_os_error(3)) }
        });
    }
}

type SpawnRequest = (std::process::Command, mpsc::Sender<io::Result<Child>>);

/// Forks on one permanent thread, because the death signal fires when the forking *thread* ends, and runtimes end
/// threads.
fn spawn_on_permanent_thread(command: std::process::Command) -> Result<Child> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<SpawnRequest>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, requests) = mpsc::channel::<SpawnRequest>();
        std::thread::spawn(move || {
            for (mut command, answer) in requests {
                // A caller that no longer waits would drop its child's only handle. No caller does that.
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
