//! Helpers for tests in which `strace` makes kernel calls fail one after the other.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

/// Returns whether failures cannot be injected: `strace` is missing, or may not trace, as in most containers. If so,
/// prints that the test is skipped.
pub fn cannot_inject() -> bool {
    if super::is_missing("strace") {
        return true;
    }
    let mut command = Command::new("strace");
    command.args([
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=?openat",
        "-e",
        "inject=?openat:error=EPERM:when=999",
        "true",
    ]);
    let can = command.stdin(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !can {
        println!("skipped: strace may not trace here");
    }
    !can
}

/// Returns whether the sweep is full (`FAULT_SWEEP=full`). Otherwise only a sample of the calls is to fail.
pub fn is_full() -> bool {
    std::env::var_os("FAULT_SWEEP").is_some_and(|value| value == "full")
}

/// Counts the calls of the first thread in a trace. Returns for each name of a call: the number of calls before the
/// first call of `start`, and the number from there on.
pub fn counts(trace: &str, start: &str) -> BTreeMap<String, (usize, usize)> {
    let (mut found, mut has_started) = (BTreeMap::<String, (usize, usize)>::new(), false);
    for line in trace.lines() {
        let Some((name, _)) = line.split_once('(') else { continue };
        has_started |= name == start;
        let (before, after) = found.entry(name.to_owned()).or_default();
        *if has_started { after } else { before } += 1;
    }
    found
}

/// In a full sweep, each of the first 40 calls of a name fails in a run of its own. Of the later calls, the 80th, 160th
/// and so on fail, and the last one.
const FIRST_CALLS: usize = 40;

/// Returns which of `calls` calls of one name are to fail, as numbers from 1. In a sample only one call is to fail. It
/// is chosen by `pair`, the index of the combination of call name and error.
pub fn failing_calls(calls: usize, pair: usize) -> Vec<usize> {
    if !is_full() {
        return vec![1 + pair * 7 % calls.max(1)];
    }
    let rare = std::iter::successors(Some(2 * FIRST_CALLS), |at| Some(at * 2)).take_while(|at| *at < calls);
    (1..=calls.min(FIRST_CALLS)).chain(rare).chain((calls > FIRST_CALLS).then_some(calls)).collect()
}

/// The totals of a sweep, and the problems that it showed.
#[derive(Default)]
pub struct Outcome {
    pub runs: usize,
    pub injected: usize,
    pub calls: usize,
    pub pairs: usize,
    pub problems: Vec<String>,
}

impl Outcome {
    pub fn count(&mut self, trace: &str) {
        self.runs += 1;
        self.injected += trace.matches("(INJECTED)").count();
    }

    /// Prints the totals. Panics if there are problems, or if `strace` injected too few failures.
    pub fn end(self, name: &str) {
        let Self { runs, injected, calls, pairs, problems } = self;
        let kind = if is_full() { "full" } else { "sampled" };
        println!(
            "{name}, {kind}: {calls} calls seen, {runs} runs, {injected} injections, {pairs} pairs of a call and an error"
        );
        assert!(injected * 3 >= runs && runs > 0, "strace makes calls fail");
        assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n\n"));
    }
}
