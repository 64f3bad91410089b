//! Two processes of one process tree: a hoarder that holds much free memory, and an asker that requests the memory and
//! times the requests.

use std::ffi::CString;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use pagemill_core::published::{TREE_FILE, TREE_VARIABLE};
use pagemill_core::reclaim::tree::TreePage;

use super::{Failure, WorkloadResult, ensure};
use crate::child;
use crate::histogram::Histogram;
use crate::native::TaggedAllocation;

const ALLOCATION_BYTES: usize = 1 << 20;

/// Pause after the hoarder process has freed its memory. In this time the helper thread of that process starts, and the
/// memory counters that the process publishes become stable.
const PAUSE_AFTER_REFILL: Duration = Duration::from_millis(100);

/// Time limit of a request. A request that takes longer counts as late, and this time is recorded as its latency.
const REQUEST_TIME_LIMIT: Duration = Duration::from_secs(1);

crate::workload::arguments! {
    /// Arguments of the asker, the process that requests memory. It starts the hoarder, the process that holds free
    /// memory.
    AskerArguments:
    /// MiB of free memory that the hoarder holds before the first request and after each refill.
    hoard_mib: usize,
    ask_mib: usize,
    asks: u64,
}

crate::workload::arguments! {
    /// Arguments of the hoarder, the process that holds much free memory.
    HoarderArguments:
    mib: usize,
}

/// The hoarder process and the pipes to it. The process ends when its standard input is closed.
struct HoarderProcess {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl HoarderProcess {
    fn start(mib: usize) -> Result<Self, Failure> {
        let mut command = child::workload_command(["__hoarder", "--mib", &mib.to_string()])?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(requests), Some(answers)) => Ok(Self { child, requests, answers: BufReader::new(answers) }),
            _ => Err("the hoarder has no pipes".into()),
        }
    }

    /// Makes the hoarder process fill and free its memory again.
    fn refill(&mut self) -> Result<(), Failure> {
        let mut answer = String::new();
        writeln!(self.requests)?;
        self.answers.read_line(&mut answer)?;
        if answer.trim() != "free" {
            return Err(format!("the hoarder answered {answer:?}").into());
        }
        thread::sleep(PAUSE_AFTER_REFILL);
        Ok(())
    }
}

impl Drop for HoarderProcess {
    fn drop(&mut self) {
        // Both calls fail only if the hoarder has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends requests for free memory to the hoarder process. The resulting JSON has the median and the 99th percentile of
/// the times until the memory was returned.
pub fn run_asker(arguments: &AskerArguments) -> WorkloadResult {
    let page = join_process_tree()?;
    let bytes = (arguments.ask_mib << 20) as u64;
    // Number of requests before the hoarder fills its memory again. Its free memory would suffice for one more request,
    // but the last free memory may be too scattered to be returned.
    let asks_per_refill = (arguments.hoard_mib / arguments.ask_mib).saturating_sub(1).max(1) as u64;
    let mut hoard = HoarderProcess::start(arguments.hoard_mib)?;
    let (mut times, mut late) = (Histogram::new(), 0_u64);
    while times.count() < arguments.asks {
        hoard.refill()?;
        // A request for zero bytes makes the processes of the tree measure their overcommitted memory now. Measured
        // later, that memory would count as new memory during the requests.
        page.ask(0, None, || false);
        for _ in 0..asks_per_refill.min(arguments.asks - times.count()) {
            let took = time_request(page, bytes);
            late += u64::from(took.is_none());
            times.add(took.unwrap_or(REQUEST_TIME_LIMIT));
        }
    }
    Ok(serde_json::json!({
        "median_us": times.percentile_ms(0.5) * 1e3,
        "p99_us": times.percentile_ms(0.99) * 1e3,
        "late": late,
    }))
}

/// Returns the time from a request until the published resident memory of the process tree has fallen by `bytes`.
/// Returns none if that takes longer than [`REQUEST_TIME_LIMIT`].
fn time_request(page: &TreePage, bytes: u64) -> Option<Duration> {
    let before = page.totals().resident;
    let is_returned = || before.saturating_sub(page.totals().resident) >= bytes;
    let begun = Instant::now();
    page.ask(bytes, None, is_returned);
    // A sibling publishes its new total shortly after it has answered.
    while !is_returned() {
        if begun.elapsed() > REQUEST_TIME_LIMIT {
            return None;
        }
        thread::yield_now();
    }
    Some(begun.elapsed())
}

fn join_process_tree() -> Result<&'static TreePage, Failure> {
    let name = TREE_VARIABLE.to_str().unwrap_or_default();
    let folder = std::env::var(name).map_err(|_| format!("{name} is not set: there is no tree to ask"))?;
    let path = CString::new(format!("{folder}/{TREE_FILE}"))?;
    TreePage::join(&path).map_err(Failure::from)
}

/// For each line of standard input, fills memory, frees it, and prints a line as the answer.
pub fn run_hoarder(arguments: &HoarderArguments) -> WorkloadResult {
    let (mut refills, mut answers) = (0_u64, io::stdout());
    for request in io::stdin().lines() {
        request?;
        let held: Vec<_> =
            (0..arguments.mib as u64).map(|tag| TaggedAllocation::touched(ALLOCATION_BYTES, tag)).collect();
        let is_right = (0..).zip(&held).all(|(tag, piece)| piece.as_ref().is_some_and(|piece| piece.tag() == tag));
        drop(held);
        ensure(is_right, || "the hoarder's memory lost a tag")?;
        writeln!(answers, "free").and_then(|()| answers.flush())?;
        refills += 1;
    }
    Ok(serde_json::json!({ "refills": refills }))
}
