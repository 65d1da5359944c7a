//! `cargo xtask demo` without a terminal: its output step by step, its exit code, and that it leaves nothing behind,
//! however it ends.

use std::io::{BufRead as _, BufReader, PipeReader};
use std::process::{Child, Command};

use haulout_e2e::soak::processes_of;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::xtask;

/// A demo in its own folder. Dropping it kills it and everything that it started.
struct Demo {
    process: Child,
    output: BufReader<PipeReader>,
    folder: TempDir,
}

impl Drop for Demo {
    fn drop(&mut self) {
        // Has no effect if the demo has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Demo {
    fn start(args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        let process = Command::new(xtask())
            .arg("demo")
            .args(args)
            .env("TMPDIR", folder.path())
            .stdout(writer.try_clone().unwrap())
            .stderr(writer)
            .spawn()
            .unwrap();
        Self { process, output: BufReader::new(reader), folder }
    }

    /// The output up to a line with this text, or to the end.
    fn read_until(&mut self, text: Option<&str>) -> String {
        let mut said = String::new();
        loop {
            let mut line = String::new();
            let ended = self.output.read_line(&mut line).unwrap() == 0;
            said += &line;
            match text {
                Some(text) if line.contains(text) => return said,
                Some(text) => assert!(!ended, "the demo ended before it printed {text:?}:\n{said}"),
                None if ended => return said,
                None => {}
            }
        }
    }

    /// Waits for the end, checks that nothing is left, and returns the exit code. After a failure, the logs are left.
    fn end(&mut self) -> Option<i32> {
        let code = self.process.wait().unwrap().code();
        if code == Some(1) {
            return code;
        }
        let left: Vec<_> = std::fs::read_dir(self.folder.path()).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
        let left = processes_of(self.folder.path()).unwrap();
        assert!(left.is_empty(), "{left:?}");
        code
    }

    /// Sends Ctrl-C as soon as the demo prints this text. Returns the exit code.
    fn interrupt_at(mut self, text: &str) -> Option<i32> {
        self.read_until(Some(text));
        kill_process(Pid::from_child(&self.process), Signal::INT).unwrap();
        let rest = self.read_until(None);
        assert!(rest.contains("the cluster is stopped and removed"), "{rest}");
        self.end()
    }
}

/// The steps of the demo. The first one is the output before them.
fn steps(said: &str) -> Vec<&str> {
    let mut steps = Vec::new();
    let mut rest = said;
    for number in 1.. {
        let Some(at) = rest.find(&format!("\nStep {number} of ")) else { break };
        let (before, after) = rest.split_at(at);
        steps.push(before);
        rest = after.trim_start();
    }
    steps.push(rest);
    steps
}

/// Asserts that a text contains these parts in this order.
fn assert_says(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        let found = rest.split_once(part);
        assert!(found.is_some(), "{part:?} is missing or in the wrong place in:\n{text}");
        rest = found.unwrap().1;
    }
}

#[test]
fn demo_drains_and_restores_a_node() {
    let mut demo = Demo::start(&["--once"]);
    let said = demo.read_until(None);
    assert_eq!(demo.end(), Some(0), "{said}");
    assert!(!said.contains('\x1b'), "escape sequences without a terminal:\n{said}");
    let [boot, before, drain, moved, find, uncordon, release, complete] = steps(&said)[..] else {
        panic!("the demo has other steps:\n{said}");
    };
    assert_says(boot, &["export KUBECONFIG="]);

    let node = before.split_once("Show ").unwrap().1.split(',').next().unwrap();
    let (tight, blocked) = (pod_of("checkout", before), pod_of("reports", before));
    assert_says(before, &["$ kubectl get nodes", "$ kubectl get pods", tight, blocked]);
    assert_says(before, &["$ kubectl get poddisruptionbudgets", "checkout", "1", "N/A", "0"]);

    assert_says(
        drain,
        &["$ kubectl apply", &format!("values: [{node}]"), "nodemaintenance.k8s.io/new-memory created"],
    );
    assert_says(drain, &[&format!("node {node}: schedulable"), &format!("node {node}: cordoned")]);
    assert_says(drain, &[&format!("pod shop/{blocked}: Evacuation blocked: DisruptionBudgetExhausted")]);
    let last = drain.lines().rfind(|line| line.contains("maintenance new-memory: Drain")).unwrap();
    // All pods of Deployments have left except for this one.
    let of_deployment =
        |line: &&str| ["checkout-", "reports-", "web-"].iter().any(|app| line.starts_with(app));
    let all = before.lines().filter(of_deployment).count();
    let gone = format!("blocked by DisruptionBudgetExhausted, {} of {all} pods have left", all - 1);
    assert_says(last, &[&gone]);

    assert_moved_without_downtime((node, tight), drain, moved);

    let why = find.lines().find_map(|line| line.strip_prefix(&format!("shop/{blocked}: ")));
    let why = why.or_else(|| find.lines().find_map(|line| line.strip_prefix(&format!("{blocked}: "))));
    assert!(why.expect(find).contains("PodDisruptionBudget"), "{find}");
    assert_says(find, &["$ kubectl get nodemaintenances new-memory", "Drain", "DisruptionBudgetExhausted"]);
    assert_says(find, &["$ kubectl get evacuations -n shop", blocked, "DisruptionBudgetExhausted"]);
    assert_says(find, &["$ kubectl events --for nodemaintenance/new-memory", "Blocked"]);

    let warning = format!("Warning: node {node} is under maintenance by NodeMaintenance new-memory");
    let (free, cordoned) = (format!("node {node}: schedulable"), format!("node {node}: cordoned"));
    assert_says(uncordon, &["$ kubectl uncordon", &warning, "uncordoned", &free, &cordoned]);

    assert_says(
        release,
        &[
            "$ kubectl patch poddisruptionbudgets reports",
            "patched",
            &format!("pod shop/{blocked}: has left"),
        ],
    );
    assert_says(
        release,
        &["Drained, ", "$ kubectl get nodemaintenances", "True", &format!("{node} is drained")],
    );

    assert_says(
        complete,
        &["$ kubectl patch", "patched", "maintenance new-memory: Complete", &free, "$ kubectl get nodes"],
    );
    assert_says(complete, &[&format!("{node} is schedulable again"), "the cluster is stopped and removed"]);
    assert!(!complete.contains("SchedulingDisabled"), "{complete}");
}

/// The name of the only pod of a Deployment in a table of pods.
fn pod_of<'a>(app: &str, table: &'a str) -> &'a str {
    let names = table.lines().filter_map(|line| line.split(' ').next());
    let pods: Vec<_> = names.filter(|name| name.starts_with(&format!("{app}-"))).collect();
    assert_eq!(pods.len(), 1, "{table}");
    pods[0]
}

/// The only pod of the Deployment with the strict budget is on another node. Its Service always had a ready endpoint, and more
/// than one for some time.
fn assert_moved_without_downtime((node, pod): (&str, &str), drain: &str, moved: &str) {
    assert_says(drain, &[&format!("pod shop/{pod}: has left")]);
    let endpoints: Vec<_> =
        drain.lines().filter_map(|line| line.trim().strip_prefix("service shop/checkout: ")).collect();
    let count = "0 moments without a ready endpoint";
    let one = format!("1 ready endpoint; {count}");
    assert_eq!(endpoints, [one.as_str(), &format!("2 ready endpoints; {count}"), &one], "{drain}");

    let new = pod_of("checkout", moved);
    assert_ne!(new, pod, "{moved}");
    let row = moved.lines().find(|line| line.starts_with(new)).unwrap();
    assert!(!row.contains(&format!(" {node} ")), "{row}");
    assert_says(moved, &["deployment.apps/checkout", "1/1", "poddisruptionbudget.policy/checkout", "1"]);
    assert_says(moved, &["PodReplaced", pod]);
    assert_says(moved, &[&format!("While the pod moved, the Service checkout had {count}.")]);
}

#[test]
fn ctrl_c_during_boot_leaves_nothing() {
    assert_eq!(Demo::start(&[]).interrupt_at("installing the chart"), Some(130));
}

#[test]
#[ignore = "slow"]
fn ctrl_c_during_the_drain_leaves_nothing() {
    assert_eq!(Demo::start(&[]).interrupt_at("Evacuation blocked"), Some(130));
}

#[test]
#[ignore = "slow"]
fn demo_without_drain_runs_until_ctrl_c() {
    assert_eq!(Demo::start(&["--no-drain"]).interrupt_at("Press Ctrl-C to stop"), Some(0));
}

#[test]
fn invalid_demo_arguments_are_rejected() {
    for (args, way_out) in [
        (&["--nodes", "1"][..], "--no-drain"),
        (&["--once", "--no-drain"], "cannot be used with"),
        (&["--once", "--without-services"], "cannot be used with"),
    ] {
        let mut demo = Demo::start(args);
        let said = demo.read_until(None);
        assert_eq!(demo.end(), Some(2), "{said}");
        assert!(said.contains(way_out), "{said}");
    }
}
