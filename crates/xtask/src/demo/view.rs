//! The live view: follows the cluster by watches and shows each change, on a terminal in place, else as a line.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures::stream::{BoxStream, SelectAll};
use futures::{StreamExt as _, TryStreamExt as _};
use haulout_e2e::wait::Watchable;
use kube::runtime::watcher::{self, Config};
use kube::runtime::{WatchStreamExt as _, watcher as watch};
use kube::{Api, Client};

use super::picture::{Known, Mood, Picture, Row};
use crate::ui;

/// After this long, what the story waits for does not come.
const LIMIT: Duration = Duration::from_secs(120);
/// How many changes that have come already make one new picture on a terminal; else each has its lines.
const AT_ONCE: usize = 64;

/// A change that a watch has delivered.
type Change = Box<dyn FnOnce(&mut Picture) + Send>;
type Changes = BoxStream<'static, Result<Change, watcher::Error>>;

/// Follows one maintenance, one node, its pods and all Evacuations.
pub struct View {
    picture: Picture,
    changes: futures::stream::ReadyChunks<SelectAll<Changes>>,
    canvas: Canvas,
}

impl View {
    /// Begins to follow these.
    pub fn open(client: &Client, maintenance: &str, node: &str) -> Self {
        let named = |name: &str| Config::default().fields(&format!("metadata.name={name}"));
        let on_node = Config::default().fields(&format!("spec.nodeName={node}"));
        let changes = futures::stream::select_all([
            follow(Api::all(client.clone()), named(maintenance), |picture| &mut picture.maintenances),
            follow(Api::all(client.clone()), named(node), |picture| &mut picture.nodes),
            follow(Api::all(client.clone()), on_node, |picture| &mut picture.pods),
            follow(Api::all(client.clone()), Config::default(), |picture| &mut picture.evacuations),
        ]);
        let canvas = Canvas::new();
        let at_once = if matches!(canvas, Canvas::Lines { .. }) { 1 } else { AT_ONCE };
        Self { picture: Picture::default(), changes: changes.ready_chunks(at_once), canvas }
    }

    /// Shows what changes until it meets the condition. `what` completes the sentence "timed out waiting until …".
    pub async fn until(&mut self, what: &str, mut condition: impl FnMut(&Picture) -> bool) -> Result<()> {
        self.canvas.begin();
        let mut trouble = None;
        let met = tokio::time::timeout(LIMIT, self.follow_until(&mut trouble, &mut condition)).await;
        match (met, trouble) {
            (Ok(met), _) => met,
            (Err(_), Some(error)) => Err(error).with_context(|| format!("timed out waiting until {what}")),
            (Err(_), None) => bail!("timed out after {} waiting until {what}", ui::duration(LIMIT)),
        }
    }

    async fn follow_until(
        &mut self,
        trouble: &mut Option<watcher::Error>,
        condition: &mut impl FnMut(&Picture) -> bool,
    ) -> Result<()> {
        // What is known already may be all that it takes.
        let mut met = self.picture.is_whole() && condition(&self.picture);
        loop {
            if self.picture.is_whole() {
                self.canvas.draw(&self.picture.rows());
            }
            if met {
                return Ok(());
            }
            for change in self.changes.next().await.context("the watches of the demo ended unexpectedly")? {
                match change {
                    Ok(change) => {
                        change(&mut self.picture);
                        *trouble = None;
                    }
                    // A watch that broke comes back by itself.
                    Err(error) => *trouble = Some(error),
                }
                // Of every single change: what is only so for a moment counts too.
                met |= self.picture.is_whole() && condition(&self.picture);
            }
        }
    }
}

fn follow<K: Watchable>(api: Api<K>, config: Config, known: fn(&mut Picture) -> &mut Known<K>) -> Changes {
    let events = watch(api, config).default_backoff();
    let change =
        move |event| -> Change { Box::new(move |picture: &mut Picture| known(picture).apply(event)) };
    events.map_ok(change).boxed()
}

/// Where rows are drawn.
enum Canvas {
    /// The lines that stand there, which the next ones replace.
    Terminal { standing: Vec<String> },
    /// What was last said of everything.
    Lines { said: BTreeMap<String, String> },
}

impl Canvas {
    fn new() -> Self {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        if std::io::stdout().is_terminal() && !dumb {
            Self::Terminal { standing: Vec::new() }
        } else {
            Self::Lines { said: BTreeMap::new() }
        }
    }

    /// Leaves what stands there for good.
    fn begin(&mut self) {
        if let Self::Terminal { standing } = self {
            standing.clear();
        }
    }

    fn draw(&mut self, rows: &[Row]) {
        let text = match self {
            Self::Terminal { standing } => {
                let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
                let (height, width) = size.map_or((24, 80), |size| (size.ws_row, size.ws_col));
                let lines = fitted(rows, height.into(), width.into());
                if *standing == lines {
                    return;
                }
                let back = match standing.len() {
                    0 => String::new(),
                    count => format!("\x1b[{count}A\x1b[J"),
                };
                *standing = lines;
                back + &standing.concat()
            }
            Self::Lines { said } => changed(rows, said).concat(),
        };
        // Whoever stops reading has seen enough.
        let mut stdout = std::io::stdout().lock();
        let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    }
}

/// Lines for a screen of this size: a line that wraps, or scrolls away, could not be replaced.
fn fitted(rows: &[Row], height: usize, width: usize) -> Vec<String> {
    let (room, width) = (height.saturating_sub(2).max(1), width.saturating_sub(1));
    let shown = if rows.len() > room { room.saturating_sub(1) } else { rows.len() };
    let column = rows.iter().take(shown).map(|row| row.about.chars().count()).max().unwrap_or_default();
    let mut lines: Vec<_> = rows
        .iter()
        .take(shown)
        .map(|row| {
            let line = format!("  {:column$}  {}", row.about, row.says);
            let line: String = line.chars().take(width).collect();
            let colour = match row.mood {
                Mood::Calm => return format!("{line}\n"),
                Mood::Busy => "33",
                Mood::Good => "32",
                Mood::Bad => "31;1",
            };
            format!("{}\n", ui::paint_result(colour, &line))
        })
        .collect();
    if shown < rows.len() {
        lines.push(format!("  and {} more\n", rows.len() - shown));
    }
    lines
}

/// A line for each row that says something new.
fn changed(rows: &[Row], said: &mut BTreeMap<String, String>) -> Vec<String> {
    let changed = rows
        .iter()
        .filter(|row| said.insert(row.about.clone(), row.says.clone()).as_ref() != Some(&row.says));
    changed.map(|row| format!("  {}: {}\n", row.about, row.says)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(about: &str, says: &str) -> Row {
        Row { about: about.into(), says: says.into(), mood: Mood::Calm }
    }

    #[test]
    fn only_changed_rows_are_printed() {
        let mut said = BTreeMap::new();
        assert_eq!(changed(&[row("a", "1"), row("b", "1")], &mut said), ["  a: 1\n", "  b: 1\n"]);
        assert_eq!(changed(&[row("a", "1"), row("b", "2")], &mut said), ["  b: 2\n"]);
        assert_eq!(changed(&[row("b", "2")], &mut said), [""; 0]);
    }

    #[test]
    fn a_screen_is_never_overrun() {
        let rows = [row("a", "1"), row("bcd", "12345678"), row("e", "2"), row("f", "3")];
        assert_eq!(fitted(&rows, 24, 11), ["  a    1\n", "  bcd  123\n", "  e    2\n", "  f    3\n"]);
        assert_eq!(fitted(&rows, 5, 80), ["  a    1\n", "  bcd  12345678\n", "  and 2 more\n"]);
        assert_eq!(fitted(&rows, 0, 0), ["  and 4 more\n"]);
    }
}
