//! The live view: watches the cluster and shows each change, in place on a terminal, otherwise as a line.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::stream::{BoxStream, SelectAll};
use futures::{StreamExt as _, TryStreamExt as _};
use haulout_api_types::Evacuation;
use haulout_e2e::wait::Watchable;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::{self, Config, Event};
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Api, Client};

use super::state::{ClusterState, Endpoints, Row, SERVICE_LABEL, Severity};
use crate::ui;

/// How long a step of the walkthrough may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Maximum number of changes per redraw on a terminal. Otherwise every change is printed.
const MAX_BATCH: usize = 64;

/// A change that a watch has delivered.
type Change = Box<dyn FnOnce(&mut ClusterState) + Send>;
type Changes = BoxStream<'static, Result<Change, watcher::Error>>;

/// Watches one maintenance, one node, its pods, all Evacuations, and the endpoints of one Service.
pub struct View {
    state: ClusterState,
    changes: futures::stream::ReadyChunks<SelectAll<Changes>>,
    output: Output,
}

impl View {
    /// Starts the watches. The Service has a namespace and a name.
    pub fn open(client: &Client, maintenance: &str, node: &str, service: (&str, &str)) -> Self {
        let named = |name: &str| Config::default().fields(&format!("metadata.name={name}"));
        let on_node = Config::default().fields(&format!("spec.nodeName={node}"));
        let (namespace, service) = service;
        let of_service = Config::default().labels(&format!("{SERVICE_LABEL}={service}"));
        let all: Api<Evacuation> = Api::all(client.clone());
        let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), namespace);
        let changes = futures::stream::select_all([
            follow(Api::all(client.clone()), named(maintenance), |state, event| {
                state.maintenances.apply(event);
            }),
            follow(Api::all(client.clone()), named(node), |state, event| {
                state.nodes.apply(event);
            }),
            follow(Api::all(client.clone()), on_node, |state, event| {
                state.pods.apply(event);
            }),
            follow(all, Config::default(), |state, event| {
                state.evacuations.apply(event);
            }),
            follow(slices, of_service, ClusterState::apply_endpoint_slice),
        ]);
        let output = Output::new();
        let at_once = if matches!(output, Output::Lines { .. }) { 1 } else { MAX_BATCH };
        Self { state: ClusterState::default(), changes: changes.ready_chunks(at_once), output }
    }

    /// The ready endpoints of the Service.
    pub fn endpoints(&self) -> Endpoints {
        self.state.endpoints
    }

    /// Shows changes until the condition is met. `what` completes the sentence "timed out waiting until …".
    pub async fn until(
        &mut self,
        what: &str,
        mut condition: impl FnMut(&ClusterState) -> bool,
    ) -> Result<()> {
        self.output.start();
        let mut watch_error = None;
        let met = tokio::time::timeout(LIMIT, self.follow_until(&mut watch_error, &mut condition)).await;
        match (met, watch_error) {
            (Ok(met), _) => met,
            (Err(_), Some(error)) => Err(error).with_context(|| format!("timed out waiting until {what}")),
            (Err(_), None) => bail!("timed out after {} waiting until {what}", ui::duration(LIMIT)),
        }
    }

    async fn follow_until(
        &mut self,
        watch_error: &mut Option<watcher::Error>,
        condition: &mut impl FnMut(&ClusterState) -> bool,
    ) -> Result<()> {
        // The condition may hold already.
        let mut met = self.state.is_synced() && condition(&self.state);
        loop {
            if self.state.is_synced() {
                self.output.draw(&self.state.rows());
            }
            if met {
                return Ok(());
            }
            for change in self.changes.next().await.context("the watches of the demo ended unexpectedly")? {
                match change {
                    Ok(change) => {
                        change(&mut self.state);
                        *watch_error = None;
                    }
                    // A failed watch restarts by itself.
                    Err(error) => *watch_error = Some(error),
                }
                // The condition is checked after every change, because it may hold only briefly.
                met |= self.state.is_synced() && condition(&self.state);
            }
        }
    }
}

fn follow<K: Watchable>(api: Api<K>, config: Config, apply: fn(&mut ClusterState, Event<K>)) -> Changes {
    let events = watch(api, config).default_backoff();
    let change = move |event| -> Change { Box::new(move |state: &mut ClusterState| apply(state, event)) };
    events.map_ok(change).boxed()
}

/// Where rows are printed.
enum Output {
    /// The lines on the screen, which the next ones replace.
    Terminal { drawn: Vec<String> },
    /// The last printed text of every row.
    Lines { printed: BTreeMap<String, String> },
}

impl Output {
    fn new() -> Self {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        if std::io::stdout().is_terminal() && !dumb {
            Self::Terminal { drawn: Vec::new() }
        } else {
            Self::Lines { printed: BTreeMap::new() }
        }
    }

    /// Keeps the lines on the screen and starts below them.
    fn start(&mut self) {
        if let Self::Terminal { drawn } = self {
            drawn.clear();
        }
    }

    fn draw(&mut self, rows: &[Row]) {
        let text = match self {
            Self::Terminal { drawn } => {
                let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
                let (height, width) = size.map_or((24, 80), |size| (size.ws_row, size.ws_col));
                let lines = fitted(rows, height.into(), width.into());
                if *drawn == lines {
                    return;
                }
                let back = match drawn.len() {
                    0 => String::new(),
                    count => format!("\x1b[{count}A\x1b[J"),
                };
                *drawn = lines;
                back + &drawn.concat()
            }
            Self::Lines { printed } => changed(rows, printed).concat(),
        };
        // Errors are ignored, because the reader may stop early.
        let mut stdout = std::io::stdout().lock();
        let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    }
}

/// Lines that fit a screen of this size. A line that wraps or scrolls away could not be replaced.
fn fitted(rows: &[Row], height: usize, width: usize) -> Vec<String> {
    let (room, width) = (height.saturating_sub(2).max(1), width.saturating_sub(1));
    let shown = if rows.len() > room { room.saturating_sub(1) } else { rows.len() };
    let column = rows.iter().take(shown).map(|row| row.subject.chars().count()).max().unwrap_or_default();
    let mut lines: Vec<_> = rows
        .iter()
        .take(shown)
        .map(|row| {
            let line = format!("  {:column$}  {}", row.subject, row.text);
            let line: String = line.chars().take(width).collect();
            let colour = match row.severity {
                Severity::Neutral => return format!("{line}\n"),
                Severity::Active => "33",
                Severity::Good => "32",
                Severity::Bad => "31;1",
            };
            format!("{}\n", ui::paint_result(colour, &line))
        })
        .collect();
    if shown < rows.len() {
        lines.push(format!("  and {} more\n", rows.len() - shown));
    }
    lines
}

/// A line for each changed row.
fn changed(rows: &[Row], printed: &mut BTreeMap<String, String>) -> Vec<String> {
    let changed = rows
        .iter()
        .filter(|row| printed.insert(row.subject.clone(), row.text.clone()).as_ref() != Some(&row.text));
    changed.map(|row| format!("  {}: {}\n", row.subject, row.text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(subject: &str, text: &str) -> Row {
        Row { subject: subject.into(), text: text.into(), severity: Severity::Neutral }
    }

    #[test]
    fn only_changed_rows_are_printed() {
        let mut printed = BTreeMap::new();
        assert_eq!(changed(&[row("a", "1"), row("b", "1")], &mut printed), ["  a: 1\n", "  b: 1\n"]);
        assert_eq!(changed(&[row("a", "1"), row("b", "2")], &mut printed), ["  b: 2\n"]);
        assert_eq!(changed(&[row("b", "2")], &mut printed), [""; 0]);
    }

    #[test]
    fn rows_fit_the_screen() {
        let rows = [row("a", "1"), row("bcd", "12345678"), row("e", "2"), row("f", "3")];
        assert_eq!(fitted(&rows, 24, 11), ["  a    1\n", "  bcd  123\n", "  e    2\n", "  f    3\n"]);
        assert_eq!(fitted(&rows, 5, 80), ["  a    1\n", "  bcd  12345678\n", "  and 2 more\n"]);
        assert_eq!(fitted(&rows, 0, 0), ["  and 4 more\n"]);
    }
}
