//! Fault campaigns: things that must hold whatever is killed when. `cargo xtask soak` runs them, and
//! the end-to-end tests do a few rounds.

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

/// What a round gets.
pub struct Round {
    /// The path of the `xtask` program.
    pub xtask: PathBuf,
    /// From which everything follows that is left to chance.
    pub seed: u64,
    /// Whether it may take its time.
    pub full: bool,
    /// Of a campaign in which people interfere, the only actions that they take; all if empty.
    pub only: Vec<String>,
    /// Told in a few words what is going on.
    pub progress: Rc<dyn Fn(&str)>,
}

impl Round {
    fn random(&self) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.seed)
    }
}

/// One campaign. A round says in a few words what it did.
pub struct Campaign {
    /// Its name on the command line.
    pub name: &'static str,
    /// Whether people interfere, which `--interfere` asks for.
    pub interfere: bool,
    /// What it shows.
    pub about: &'static str,
    /// How many rounds it has unless told otherwise.
    pub rounds: u32,
    /// Runs one round.
    pub round: fn(Round) -> LocalBoxFuture<'static, Result<String>>,
}

/// All campaigns.
pub const CAMPAIGNS: &[Campaign] = &[
    Campaign {
        name: "cluster",
        interfere: false,
        about: "whatever is killed, no process is left behind",
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
        about: "whenever the controllers are killed, a drain completes, evicts each pod once and leaves nothing behind",
        rounds: 10,
        round: |round| drain::round(round.random()).boxed_local(),
    },
    Campaign {
        name: "drain",
        interfere: true,
        about: "whatever people do to it, a drain moves on or says truly what holds it, and leaves nothing behind",
        rounds: 10,
        round: |round| interfere::round(round).boxed_local(),
    },
    Campaign {
        name: "evacuation",
        interfere: false,
        about: "whenever the evacuation controller is killed, each pod leaves once and no budget is violated",
        rounds: 20,
        round: |round| evacuation::round(round.random(), round.full).boxed_local(),
    },
];

/// Whether the API server let each of these pods be evicted at most once, and nobody else.
fn each_evicted_once(requests: &Requests, pods: &[Pod]) -> Result<()> {
    let mut evictions: HashMap<&str, u32> = HashMap::new();
    let evicted = requests.resource("pods", "eviction").code(201);
    for eviction in &evicted {
        *evictions.entry(&eviction.name).or_default() += 1;
    }
    let wanted: HashSet<_> = pods.iter().map(ResourceExt::name_any).collect();
    for (pod, times) in evictions {
        ensure!(wanted.contains(pod), "{pod} was evicted and nobody had asked for it");
        ensure!(times == 1, "{pod} was evicted {times} times");
    }
    Ok(())
}

/// What is killed in a running demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The program that started everything.
    Xtask,
    /// One of its children.
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
        .args(["demo", "--no-story", "--nodes", "1"])
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
    // The logs were for somebody who wants to know why it died; we do. What a killed xtask could not
    // remove, the next boot would.
    std::fs::remove_dir_all(&root).with_context(|| format!("removing {}", root.display()))
}

/// Processes whose command line or environment names something below this folder: id and program.
pub fn processes_of(folder: &Path) -> Result<Vec<(i32, String)>> {
    let needle = folder.display().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("listing processes")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process that has just ended has no command line any more.
        let line = std::fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        // Our services are told of the cluster in KUBECONFIG. Nobody may read that of another user's processes.
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if line.contains(&needle) || String::from_utf8_lossy(&environment).contains(&needle) {
            found.push((pid, line.split('\0').next().unwrap_or_default().to_owned()));
        }
    }
    Ok(found)
}
