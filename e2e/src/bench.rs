//! Benchmarks. Each boots what it needs and measures ours and its peer side by side in one run; figures
//! of different runs or machines do not compare.

mod baseline;
mod cache;

use anyhow::Result;
use futures::FutureExt as _;
use futures::future::LocalBoxFuture;

/// Named figures, in the order in which they are shown.
pub type Results = Vec<(&'static str, f64)>;

/// Takes the lines that tell what a benchmark is doing.
pub type Progress = fn(&str);

/// One benchmark.
pub struct Benchmark {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it measures.
    pub about: &'static str,
    /// Runs it, telling what it is doing.
    pub run: fn(Progress) -> LocalBoxFuture<'static, Result<Results>>,
}

/// All benchmarks.
pub const BENCHMARKS: &[Benchmark] = &[
    Benchmark {
        name: "baseline",
        about: "what this machine's control plane can do at all: boot, evictions, kubectl drain",
        run: |progress| baseline::run(progress).boxed_local(),
    },
    Benchmark {
        name: "cache",
        about: "what the slim pod cache costs with 50,000 pods: memory, first list, rest",
        run: |progress| cache::run(progress).boxed_local(),
    },
];

/// The median; of an even number, the upper of the middle two.
fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
        assert!(median(vec![]).is_nan());
    }
}
