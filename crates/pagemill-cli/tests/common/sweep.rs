//! Which kernel calls are made to fail, and how often each: for sweeps with strace.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

/// Says so and returns true where strace is missing or may not trace, as in most containers.
pub fn cannot_inject() -> bool {
    if super::lacks("strace") {
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

/// Whether the calls are tried one by one (`FAULT_SWEEP=full`), or a sample of them.
pub fn is_full() -> bool {
    std::env::var_os("FAULT_SWEEP").is_some_and(|value| value == "full")
}

/// Calls of the first thread in a trace, by name: how many before the first call of `start`, and how many after.
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

/// In a full sweep so many calls are tried one by one, then every second as often, and the last.
const ONE_BY_ONE: usize = 40;

/// Which of so many calls are tried in a full sweep; else one, another for each `pair` of a call and an error.
pub fn sample(calls: usize, pair: usize) -> Vec<usize> {
    if !is_full() {
        return vec![1 + pair * 7 % calls.max(1)];
    }
    let rare = std::iter::successors(Some(2 * ONE_BY_ONE), |at| Some(at * 2)).take_while(|at| *at < calls);
    (1..=calls.min(ONE_BY_ONE)).chain(rare).chain((calls > ONE_BY_ONE).then_some(calls)).collect()
}

/// What a sweep has done, and what it found.
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

    /// Prints the totals; panics if there are problems, or if strace made too few calls fail.
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
