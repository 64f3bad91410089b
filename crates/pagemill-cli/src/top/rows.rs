//! The rows of the table: what a process or a tree holds, and what it did since the previous sample.

use super::sample::{ProcessSample, RunSample, Sample};
use crate::statistics::{RETURN_CAUSES, resident_bytes};
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::stats::{Counter, Snapshot};
use pagemill_sys::process::{self, Identity};
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

/// Number of samples that the history of a row has.
pub const HISTORY_LEN: usize = 300;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A `pagemill run`: the sums over the processes of its tree.
    Run,
    Process,
    /// A program of a `pagemill run` that holds so little that the C library serves it.
    Small,
}

/// Amounts for each second since the previous sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// CPU time in percent of one CPU.
    pub cpu_percent: f64,
    /// Bytes returned to the system.
    pub returned: u64,
    /// Bytes read from the stores of cached files.
    pub read: u64,
    pub written: u64,
}

impl Rates {
    pub fn add(&mut self, other: &Self) {
        self.cpu_percent += other.cpu_percent;
        self.returned = self.returned.saturating_add(other.returned);
        self.read = self.read.saturating_add(other.read);
        self.written = self.written.saturating_add(other.written);
    }
}

/// Why a process returned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    pub word: &'static str,
    /// Whether memory was returned since the previous sample.
    pub is_now: bool,
}

/// A row of the table.
#[derive(Clone)]
pub struct Row {
    pub kind: Kind,
    pub identity: Identity,
    pub parent_pid: u32,
    /// The `pagemill run` to whose tree the process belongs.
    pub run: Option<Identity>,
    pub user: u32,
    pub name: String,
    /// Resident memory as the kernel counts it, including mapped files. Shared memory counts in each process.
    pub kernel_bytes: u64,
    /// The counters of the process, all 0 for a small one.
    pub figures: Snapshot,
    /// The limit of the tree (`run --limit`).
    pub limit: Option<u64>,
    /// `None` in the first sample of the process.
    pub rates: Option<Rates>,
    pub cause: Option<Cause>,
    /// Age of the measured counters.
    pub age: Option<Duration>,
    /// Why the process cannot be measured.
    pub stale: Option<&'static str>,
}

/// What is kept of a row for the next sample.
struct Track {
    at: Instant,
    cpu_ticks: u64,
    figures: Snapshot,
    cause: Option<&'static str>,
    history: VecDeque<u64>,
}

/// Compares each sample with the previous one.
#[derive(Default)]
pub struct Tracker {
    known: HashMap<Identity, Track>,
}

impl Tracker {
    /// Returns the rows of a sample. Forgets processes that have ended.
    pub fn update(&mut self, sample: &Sample) -> Vec<Row> {
        let mut rows: Vec<Row> = sample.processes.iter().map(|process| self.process_row(process, sample)).collect();
        for run in &sample.runs {
            let row = self.run_row(run, &rows, sample);
            rows.push(row);
        }
        let present: HashSet<Identity> = rows.iter().map(|row| row.identity).collect();
        self.known.retain(|identity, _| present.contains(identity));
        rows
    }

    /// Returns the resident memory of a row in the latest samples, oldest first.
    pub fn history(&self, identity: Identity) -> Vec<u64> {
        self.known.get(&identity).map(|track| track.history.iter().copied().collect()).unwrap_or_default()
    }

    fn process_row(&mut self, process: &ProcessSample, sample: &Sample) -> Row {
        let usage = &process.usage;
        let kind = if process.pagemill.is_some() { Kind::Process } else { Kind::Small };
        let figures = process.pagemill.as_ref().map_or_else(Snapshot::default, |process| process.sum.clone());
        let before = self.known.get(&usage.identity);
        let rates = before.and_then(|before| {
            let seconds = sample.at.duration_since(before.at).as_secs_f64();
            let ticks = usage.cpu_ticks.saturating_sub(before.cpu_ticks) as f64;
            let cpu_percent = 100.0 * ticks / process::ticks_per_second() as f64 / seconds;
            // The increase of a counter for each second.
            let each_second = |counter: Counter| rate(before.figures.get(counter), figures.get(counter), seconds);
            let returned =
                RETURN_CAUSES.iter().fold(0u64, |sum, (counter, _)| sum.saturating_add(each_second(*counter)));
            let (read, written) = (each_second(Counter::StoreRead), each_second(Counter::StoreWritten));
            (seconds > 0.0).then_some(Rates { cpu_percent, returned, read, written })
        });
        let now = largest_cause(&figures, before.map(|before| &before.figures)).filter(|_| before.is_some());
        let earlier = before.map_or_else(|| largest_cause(&figures, None), |before| before.cause);
        let cause = now.or(earlier).map(|word| Cause { word, is_now: now.is_some() });
        let bytes = if kind == Kind::Small { usage.resident_bytes } else { resident_bytes(&figures) };
        self.remember(usage.identity, sample.at, usage.cpu_ticks, &figures, cause, bytes);
        Row {
            kind,
            identity: usage.identity,
            parent_pid: usage.parent_pid,
            run: process.run,
            user: process.user,
            name: process::printable_letters(&usage.name).collect(),
            kernel_bytes: usage.resident_bytes,
            limit: None,
            rates,
            cause,
            age: figures.age(),
            stale: process.pagemill.as_ref().and_then(|process| process.stale),
            figures,
        }
    }

    /// Returns the row of a `run`, which has the sums over the rows of its processes.
    fn run_row(&mut self, run: &RunSample, rows: &[Row], sample: &Sample) -> Row {
        let (mut figures, mut rates, mut kernel_bytes) = (Snapshot::default(), None::<Rates>, 0u64);
        let mut cause: Option<Cause> = None;
        let mut members = 0;
        for row in rows.iter().filter(|row| row.run == Some(run.identity)) {
            members += 1;
            figures.add(&row.figures);
            kernel_bytes = kernel_bytes.saturating_add(row.kernel_bytes);
            if let Some(of_row) = &row.rates {
                rates.get_or_insert_default().add(of_row);
            }
            if row.cause.is_some_and(|of_row| of_row.is_now || cause.is_none()) {
                cause = row.cause;
            }
        }
        // A peak of the tree is the peak of the sum, not the sum of the peaks.
        figures.set(Counter::ResidentPeak, run.header.peak);
        figures.set(Counter::NetPeak, run.header.net_peak);
        let bytes = if resident_bytes(&figures) > 0 { resident_bytes(&figures) } else { kernel_bytes };
        self.remember(run.identity, sample.at, 0, &figures, cause, bytes);
        let name = match (run.is_alive, run.command.as_str()) {
            (false, _) => "run (ended)".to_owned(),
            (true, "") => "run".to_owned(),
            (true, command) => format!("run {command}"),
        };
        let stale = (members == 0).then_some("none of its processes is on Pagemill");
        Row {
            kind: Kind::Run,
            identity: run.identity,
            parent_pid: 0,
            run: None,
            user: run.user,
            name,
            kernel_bytes,
            figures,
            limit: Some(run.header.limit).filter(|limit| *limit != UNLIMITED),
            rates,
            cause,
            age: None,
            stale,
        }
    }

    fn remember(
        &mut self,
        identity: Identity,
        at: Instant,
        cpu_ticks: u64,
        figures: &Snapshot,
        cause: Option<Cause>,
        bytes: u64,
    ) {
        let mut history = self.known.remove(&identity).map(|track| track.history).unwrap_or_default();
        history.push_back(bytes);
        if history.len() > HISTORY_LEN {
            history.pop_front();
        }
        let cause = cause.map(|cause| cause.word);
        self.known.insert(identity, Track { at, cpu_ticks, figures: figures.clone(), cause, history });
    }
}

fn rate(before: u64, now: u64, seconds: f64) -> u64 {
    (now.saturating_sub(before) as f64 / seconds) as u64
}

/// Returns the cause for which most bytes were returned, since `before` or since the start. `None` if none were.
fn largest_cause(figures: &Snapshot, before: Option<&Snapshot>) -> Option<&'static str> {
    let increase =
        |counter: Counter| figures.get(counter).saturating_sub(before.map_or(0, |before| before.get(counter)));
    let causes = RETURN_CAUSES.iter().map(|(counter, word)| (increase(*counter), *word));
    causes.filter(|(bytes, _)| *bytes > 0).max_by_key(|(bytes, _)| *bytes).map(|(_, word)| word)
}
