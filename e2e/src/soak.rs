//! Fault campaigns: invariants that must hold no matter what is killed and when. `cargo xtask soak` runs them, and
//! the end-to-end tests run a few rounds.

mod drain;
mod evacuation;
mod interfere;
mod replicas;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use rustix::process::{Pid, Signal, kill_process};

use crate::cluster::Component;
use crate::requests::Requests;
use crate::wait;

/// The input of a round.
pub struct Round {
    /// The path of the `xtask` program.
    pub xtask: PathBuf,
    /// The seed of all random choices.
    pub seed: u64,
    /// Whether the round runs at full size.
    pub full: bool,
    /// For campaigns with interference, the only actions to take; all if empty.
    pub only: Vec<String>,
    /// Receives progress messages.
    pub progress: Rc<dyn Fn(&str)>,
}

impl Round {
    fn random(&self) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.seed)
    }
}

/// One campaign. A round returns a short summary.
pub struct Campaign {
    /// The name on the command line.
    pub name: &'static str,
    /// Whether the campaign interferes, as requested by `--interfere`.
    pub interfere: bool,
    /// What the campaign verifies.
    pub about: &'static str,
    /// The default number of rounds.
    pub rounds: u32,
    /// Runs one round.
    pub round: fn(Round) -> LocalBoxFuture<'static, Result<String>>,
}

/// All campaigns.
pub const CAMPAIGNS: &[Campaign] = &[
    Campaign {
        name: "cluster",
        interfere: false,
        about: "no process is left behind, whatever is killed",
        rounds: 20,
        round: |round| {
            async move {
                let mut random = round.random();
                let victims: Vec<_> =
                    Component::ALL.into_iter().map(Victim::Component).chain([Victim::Xtask]).collect();
                let victim = *random.choice(&victims).context("there are victims")?;
                kill_in_demo(&round.xtask, victim).await?;
                Ok(format!("killed {victim}"))
            }
            .boxed_local()
        },
    },
    Campaign {
        name: "drain",
        interfere: false,
        about: "a drain completes, evicts each pod once and leaves nothing behind, whenever the controllers are killed",
        rounds: 10,
        round: |round| drain::round(round.random()).boxed_local(),
    },
    Campaign {
        name: "drain",
        interfere: true,
        about: "a drain continues or reports the true blocker, and leaves nothing behind, whatever people do to it",
        rounds: 10,
        round: |round| interfere::round(round).boxed_local(),
    },
    Campaign {
        name: "evacuation",
        interfere: false,
        about: "each pod leaves once and no budget is violated, whenever the evacuation controller is killed",
        rounds: 20,
        round: |round| evacuation::round(round.random(), round.full).boxed_local(),
    },
];

/// Fails unless each of these pods was evicted at most once, and no other pod was evicted.
fn each_evicted_once(requests: &Requests, pods: &[Pod]) -> Result<()> {
    let mut evictions: HashMap<&str, u32> = HashMap::new();
    let evicted = requests.resource("pods", "eviction").code(201);
    for eviction in &evicted {
        *evictions.entry(&eviction.name).or_default() += 1;
    }
    let wanted: HashSet<_> = pods.iter().map(ResourceExt::name_any).collect();
    for (pod, times) in evictions {
        ensure!(wanted.contains(pod), "{pod} was evicted without a request");
        ensure!(times == 1, "{pod} was evicted {times} times");
    }
    Ok(())
}

/// What is killed in a running demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The `xtask` process that started everything.
    Xtask,
    /// One of its child processes.
    Component(Component),
}

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xtask => f.write_str("xtask"),
            Self::Component(component) => component.fmt(f),
        }
    }
}

/// Starts a demo, kills the victim with SIGKILL, and checks that every process of it ends.
pub async fn kill_in_demo(xtask: &Path, victim: Victim) -> Result<()> {
    let mut demo = Command::new(xtask)
        .args(["demo", "--no-drain", "--nodes", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("starting {} demo", xtask.display()))?;
    let output = demo.stdout.take().context("the demo has an output")?;
    let root = tokio::task::spawn_blocking(move || {
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        let kubeconfig =
            lines.find_map(|line| line.trim().strip_prefix("export KUBECONFIG=").map(PathBuf::from));
        kubeconfig.and_then(|path| path.parent().map(Path::to_path_buf))
    });
    let root = root.await?.context("the demo ended before it was ready")?;
    let before = processes_of(&root)?;
    ensure!(before.len() >= Component::ALL.len(), "the demo runs only {before:?}");
    let pid = match victim {
        Victim::Xtask => demo.id().cast_signed(),
        Victim::Component(component) => {
            let program = component.program();
            let found = before.iter().find(|(_, command)| command.ends_with(program));
            found.with_context(|| format!("{program} does not run in the demo, only {before:?}"))?.0
        }
    };
    kill_process(Pid::from_raw(pid).context("a process id is never 0")?, Signal::KILL).context("killing")?;
    let status = tokio::task::spawn_blocking(move || demo.wait()).await?.context("waiting for the demo")?;
    match victim {
        Victim::Xtask => ensure!(status.signal() == Some(9), "xtask ended with {status}"),
        Victim::Component(_) => {
            ensure!(status.code() == Some(1), "xtask ended with {status} instead of an error");
        }
    }
    wait::eventually("every process of the demo has ended", Duration::from_secs(60), async || {
        Ok(processes_of(&root)?.is_empty().then_some(()))
    })
    .await
    .with_context(|| format!("after killing {victim}; left: {:?}", processes_of(&root)))?;
    let left: Vec<_> =
        std::fs::read_dir(&root).into_iter().flatten().flatten().map(|e| e.file_name()).collect();
    if victim != Victim::Xtask && left.iter().any(|name| name != "logs") {
        bail!("besides logs, the demo left {left:?} in {}", root.display());
    }
    // The logs are for the investigation of a failure, and this one was intended. The next boot would remove the rest that
    // a killed xtask left.
    std::fs::remove_dir_all(&root).with_context(|| format!("removing {}", root.display()))
}

/// Processes whose command line or environment contains a path below this folder: id and program.
pub fn processes_of(folder: &Path) -> Result<Vec<(i32, String)>> {
    let needle = folder.display().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("listing processes")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process that has just ended has no command line.
        let line = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        // Our services get the cluster from KUBECONFIG. The environment of another user's processes is not readable.
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if line.contains(&needle) || String::from_utf8_lossy(&environment).contains(&needle) {
            found.push((pid, line.split('\0').next().unwrap_or_default().to_owned()));
        }
    }
    Ok(found)
}
