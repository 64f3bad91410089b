//! Helpers for tests in which `strace` makes kernel calls fail one after the other.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

/// Returns whether no failures can be injected, because `strace` is missing or may not trace processes, as in most
/// containers. If so, prints that the test is skipped.
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

/// Returns whether every kernel call is to fail in turn (`FAULT_SWEEP=full`). Otherwise only a sample of the calls
/// fails.
pub fn is_full_sweep() -> bool {
    std::env::var_os("FAULT_SWEEP").is_some_and(|value| value == "full")
}

/// Counts the kernel calls of the first thread in a trace, by name. Returns for each name the number of calls before
/// the first call of `start`, and the number of calls from there on.
pub fn count_calls_by_name(trace: &str, start: &str) -> BTreeMap<String, (usize, usize)> {
    let (mut found, mut has_started) = (BTreeMap::<String, (usize, usize)>::new(), false);
    for line in trace.lines() {
        let Some((name, _)) = line.split_once('(') else { continue };
        has_started |= name == start;
        let (before, after) = found.entry(name.to_owned()).or_default();
        *if has_started { after } else { before } += 1;
    }
    found
}

/// In a full sweep, each of the first 40 calls of one system call fails in a run of its own. Of its later calls, the
/// 80th, 160th, 320th and so on fail, and the last one.
const FIRST_CALL_COUNT: usize = 40;

/// Returns which calls of one system call are to fail, as positions from 1 to `calls`. In a sample only one call fails,
/// which is chosen by `pair`, the index of the combination of system call and error.
pub fn failing_calls(calls: usize, pair: usize) -> Vec<usize> {
    if !is_full_sweep() {
        return vec![1 + pair * 7 % calls.max(1)];
    }
    let rare = std::iter::successors(Some(2 * FIRST_CALL_COUNT), |at| Some(at * 2)).take_while(|at| *at < calls);
    (1..=calls.min(FIRST_CALL_COUNT)).chain(rare).chain((calls > FIRST_CALL_COUNT).then_some(calls)).collect()
}

/// The totals of a sweep (runs in each of which one kernel call fails), and the problems that the runs showed.
#[derive(Default)]
pub struct Outcome {
    pub runs: usize,
    pub injected: usize,
    pub calls: usize,
    pub pairs: usize,
    pub problems: Vec<String>,
}

impl Outcome {
    pub fn count_run(&mut self, trace: &str) {
        self.runs += 1;
        self.injected += trace.matches("(INJECTED)").count();
    }

    /// Prints the totals of the sweep. Panics if there were problems, or if `strace` injected too few failures.
    pub fn assert_no_problems(self, name: &str) {
        let Self { runs, injected, calls, pairs, problems } = self;
        let kind = if is_full_sweep() { "full" } else { "sampled" };
        println!(
            "{name}, {kind}: {calls} calls seen, {runs} runs, {injected} injections, {pairs} pairs of a call and an error"
        );
        assert!(injected * 3 >= runs && runs > 0, "strace makes calls fail");
        assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n\n"));
    }
}
