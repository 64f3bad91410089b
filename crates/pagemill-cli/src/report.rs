//! The report at the end of `pagemill run`: memory of the process tree, returned memory, and refusals.
//!
//! The report has two counts of memory. The kernel's count ([`crate::tree_memory`]) includes all memory of all
//! processes. Pagemill's count has only the memory of its allocators, and how much of that memory could have been
//! returned.

use crate::columns::{self, DEFAULT_LINE_COLUMNS, Heading};
use crate::kernel_limit::LimitStatistics;
use crate::page;
use crate::statistics::amount_text;
use crate::timeline::{Returned, Timeline, returned_by_cause};
use crate::tree_memory::{Excess, MAX_LISTED_PROCESSES, Peak, Process, TreeMemory};
use pagemill_core::published::{self, Published};
use pagemill_core::reclaim::tree::{TreePage, UNLIMITED};
use pagemill_core::stats::{Counter, CounterKind, Snapshot, TABLE};
use pagemill_core::units::Bytes;
use pagemill_sys::child::End;
use pagemill_sys::process;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::time::Duration;

/// Statistics of processes of the tree that have ended, added up while the program runs.
#[derive(Default)]
pub struct CollectedStatistics {
    sum: Snapshot,
    largest: Vec<Snapshot>,
    /// Peak resident memory of each process's allocator in bytes, by process id.
    peaks: HashMap<u32, u64>,
}

impl CollectedStatistics {
    /// Adds the statistics of the processes that have ended since the last call. `folder` has the figures files of the
    /// tree.
    pub fn absorb_ended(&mut self, folder: &str) {
        for process in published::list(folder, true).unwrap_or_default() {
            if !process.is_alive {
                self.absorb(&process.snapshot);
            }
        }
    }

    /// Returns the bytes that all processes of the tree have returned, including those that have ended.
    pub fn returned(&self, folder: &str) -> Returned {
        let mut sum = returned_by_cause(&self.sum);
        for process in published::list(folder, false).unwrap_or_default() {
            for (bytes, more) in sum.iter_mut().zip(returned_by_cause(&process.snapshot)) {
                *bytes = bytes.saturating_add(more);
            }
        }
        sum
    }

    fn absorb(&mut self, snapshot: &Snapshot) {
        self.sum.absorb_ended(snapshot);
        let peak = self.peaks.entry(snapshot.identity.pid).or_default();
        *peak = (*peak).max(snapshot.get(Counter::ResidentPeak));
        self.largest.push(snapshot.clone());
        self.largest.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.get(Counter::ResidentPeak)));
        self.largest.truncate(MAX_LISTED_PROCESSES);
    }
}

/// The program that `run` started, after it has ended.
pub struct FinishedProgram<'run> {
    pub program: &'run OsStr,
    pub end: End,
    pub wall: Duration,
}

/// The limit that the kernel enforced on the program, and the kernel's statistics of that limit.
pub struct KernelLimitResult {
    pub limit_bytes: u64,
    pub statistics: LimitStatistics,
}

pub struct Report {
    program: String,
    end: End,
    wall: Duration,
    limit: Option<u64>,
    kernel: Option<KernelLimitResult>,
    /// Peak memory of the process tree, as the kernel counts it.
    tree: Peak,
    timeline: Timeline,
    largest: Vec<ProcessRow>,
    /// Peak memory in bytes of the allocators of all processes together, as Pagemill counts it.
    peak: u64,
    net_peak: u64,
    unlisted: u64,
    /// Number of all processes of the tree, including those too small to publish statistics.
    processes: usize,
    running: Vec<Published>,
    collected: CollectedStatistics,
}

/// A part of the report.
pub struct Section {
    pub heading: String,
    pub rows: Vec<Row>,
}

/// A line of a part: a name, its value, and what the value means.
pub struct Row {
    pub name: String,
    pub value: String,
    pub meaning: String,
}

impl Row {
    fn new(name: &str, value: String, meaning: &str) -> Self {
        Self { name: name.to_owned(), value, meaning: meaning.to_owned() }
    }

    fn of_bytes(name: &str, bytes: u64, meaning: &str) -> Self {
        Self::new(name, Bytes(bytes).to_string(), meaning)
    }
}

/// A process with its peak memory as the kernel counts it and as Pagemill counts it. A peak is `None` if it is not
/// known.
struct ProcessRow {
    pid: u32,
    name: String,
    resident: Option<u64>,
    allocator: Option<u64>,
    is_running: bool,
}

impl ProcessRow {
    fn largest_bytes(&self) -> u64 {
        self.resident.max(self.allocator).unwrap_or(0)
    }
}

impl Report {
    pub fn new(
        ran: FinishedProgram<'_>,
        page: &TreePage,
        folder: &str,
        memory: &TreeMemory,
        mut collected: CollectedStatistics,
        kernel: Option<KernelLimitResult>,
    ) -> Self {
        let running = published::list(folder, false).unwrap_or_default();
        for process in &running {
            collected.absorb(&process.snapshot);
        }
        let (peak, net_peak) = page.peak();
        // The tree's page has the peak of the sum over all processes. The peak of a single process, which was measured
        // at its end, can be larger.
        let single = |counter| collected.largest.iter().map(|snapshot| snapshot.get(counter)).max().unwrap_or(0);
        let (peak, net_peak) = (peak.max(single(Counter::ResidentPeak)), net_peak.max(single(Counter::NetPeak)));
        Self {
            program: ran.program.to_string_lossy().into_owned(),
            end: ran.end,
            wall: ran.wall,
            limit: Some(page.limit()).filter(|limit| *limit != UNLIMITED),
            kernel,
            tree: memory.peak.clone(),
            timeline: memory.timeline.clone(),
            largest: merge_largest(memory.largest_processes(), &collected),
            peak,
            net_peak: net_peak.min(peak),
            unlisted: page.unlisted(),
            processes: memory.process_count().max(page.started() as usize),
            running,
            collected,
        }
    }

    /// Writes the report to the file or, if there is no file, to standard error.
    ///
    /// # Errors
    ///
    /// The error of writing to the file. Errors of standard error are ignored.
    pub fn write(&self, as_json: bool, file: Option<&mut File>) -> io::Result<()> {
        let text = if as_json { format!("{}\n", self.json()) } else { self.text() };
        match file {
            Some(file) => file.write_all(text.as_bytes()),
            None => {
                let _ = io::stderr().write_all(text.as_bytes());
                Ok(())
            }
        }
    }

    /// Returns by how many bytes the peak of the allocators' memory would have been lower without the memory that could
    /// have been returned at once.
    fn giveable_at_peak(&self) -> u64 {
        self.peak - self.net_peak
    }

    fn text(&self) -> String {
        let width =
            terminal_size::terminal_size_of(io::stderr()).map_or(DEFAULT_LINE_COLUMNS, |(width, _)| width.0.into());
        let mut text = format!("pagemill: {}\n", self.summary());
        for Section { heading, rows } in [self.kernels_count(), self.allocators_count()] {
            let _ = writeln!(text, "  {heading}");
            for row in rows {
                let _ = writeln!(text, "    {:<18} {:>10}  {}", row.name, row.value, row.meaning);
            }
        }
        self.write_largest(&mut text);
        text + &self.timeline.text(width, self.wall, self.limit)
    }

    /// Returns how the program ended, its times, and the number of processes.
    fn summary(&self) -> String {
        let how = match self.end.signal {
            Some(signal) => format!("killed by signal {signal}"),
            None => format!("exit {}", self.end.code),
        };
        let seconds = |time: Duration| time.as_secs_f64();
        format!(
            "{}: {how}, {:.2} s ({:.2} s user, {:.2} s system), {} process{}",
            self.program,
            seconds(self.wall),
            seconds(self.end.user),
            seconds(self.end.system),
            self.processes,
            if self.processes == 1 { "" } else { "es" },
        )
    }

    fn kernels_count(&self) -> Section {
        let mut rows = vec![
            Row::of_bytes("resident peak", self.tree.resident_bytes, "whole tree at one moment"),
            Row::of_bytes(
                "without files",
                self.tree.anonymous_bytes,
                "whole tree at one moment: anonymous and shared memory",
            ),
            Row::of_bytes(
                "not allocator's",
                self.tree.outside_bytes,
                "of that, outside the allocators: mapped directly, stacks, programs without Pagemill",
            ),
            Row::of_bytes("largest process", self.end.max_resident_bytes, "largest resident memory of one process"),
        ];
        if let Some(kernel) = &self.kernel {
            let peak = kernel.statistics.peak_bytes.map_or("-".to_owned(), |bytes| Bytes(bytes).to_string());
            let meaning = format!("largest usage, with file pages, of {} (--limit-kernel)", Bytes(kernel.limit_bytes));
            rows.push(Row::new("in the group", peak, &meaning));
            if let Some(kills) = kernel.statistics.kills.filter(|kills| *kills > 0) {
                rows.push(Row::new("killed", kills.to_string(), "processes, by the kernel at that limit"));
            }
        }
        if let Some(excess) = &self.tree.excess {
            rows.push(Row::of_bytes("over the limit", excess.bytes_over_limit(), &describe_excess(excess)));
        }
        Section {
            heading: "all memory, as the kernel counts it (shared memory counts in each process)".to_owned(),
            rows,
        }
    }

    fn allocators_count(&self) -> Section {
        let limit = self.limit.map_or("no limit".to_owned(), |limit| format!("limit {}", Bytes(limit)));
        let mut rows = vec![
            Row::of_bytes("peak", self.peak, "resident, whole tree"),
            Row::of_bytes("net peak", self.net_peak, "largest sum without the memory that could be returned at once"),
            Row::of_bytes(
                "could be given",
                self.giveable_at_peak(),
                "the difference: memory that could have been returned at the peak",
            ),
        ];
        for table_row in TABLE.iter().filter(|row| row.kind == CounterKind::Sum) {
            let value = self.collected.sum.get(table_row.counter);
            if value > 0 {
                let text = amount_text(table_row.unit, value);
                rows.push(Row::new(table_row.name, text, &sentence_part(table_row.meaning)));
            }
        }
        if self.unlisted > 0 {
            let meaning = "processes beyond the first 1024, whose memory is not counted here";
            rows.push(Row::new("unlisted", self.unlisted.to_string(), meaning));
        }
        Section { heading: format!("memory of the allocator, as Pagemill counts it ({limit})"), rows }
    }

    /// Returns the report as an HTML page.
    pub fn html(&self) -> String {
        page::Page {
            title: format!("pagemill run {}", self.program),
            summary: self.summary(),
            timeline: &self.timeline,
            wall: self.wall,
            limit: self.limit,
            sections: vec![self.kernels_count(), self.allocators_count(), self.largest_section()],
        }
        .html()
    }

    fn largest_section(&self) -> Section {
        let bytes = |bytes: Option<u64>| bytes.map_or("-".to_owned(), |bytes| Bytes(bytes).to_string());
        let rows = self.largest.iter().map(|row| {
            let note = if row.is_running { ", still running" } else { "" };
            let meaning = format!("of that the allocator {}{note}", bytes(row.allocator));
            Row::new(&format!("{} {}", row.pid, row.name), bytes(row.resident), &meaning)
        });
        Section { heading: "largest processes: peak resident memory".to_owned(), rows: rows.collect() }
    }

    fn write_largest(&self, text: &mut String) {
        if self.processes < 2 || self.largest.is_empty() {
            return;
        }
        let headings = [
            Heading::left_aligned("largest processes", 26, 2),
            Heading::right_aligned("resident", 10, 1),
            Heading::right_aligned("allocator", 12, 1),
            Heading::left_aligned("", 0, 2),
        ];
        let bytes = |bytes: Option<u64>| bytes.map_or("-".to_owned(), |bytes| Bytes(bytes).to_string());
        let rows = self.largest.iter().map(|row| {
            let note = if row.is_running { "still running" } else { "" };
            vec![format!("{:>10} {}", row.pid, row.name), bytes(row.resident), bytes(row.allocator), note.to_owned()]
        });
        *text += &columns::aligned_table(&headings, rows);
    }

    fn json(&self) -> Value {
        let counters = |snapshot: &Snapshot| -> Map<String, Value> {
            let rows = TABLE.iter().filter(|row| matches!(row.kind, CounterKind::Sum | CounterKind::Peak));
            rows.map(|row| (row.name.to_owned(), json!(snapshot.get(row.counter)))).collect()
        };
        let largest = self.collected.largest.iter().map(|snapshot| {
            let is_running = self.running.iter().any(|process| process.identity == snapshot.identity);
            json!({"pid": snapshot.identity.pid, "name": snapshot.name(), "running": is_running, "counters": counters(snapshot)})
        });
        let rows = self.largest.iter().map(|row| {
            json!({"pid": row.pid, "name": row.name, "running": row.is_running,
                "resident_peak_bytes": row.resident, "allocator_peak_bytes": row.allocator})
        });
        json!({
            "program": self.program,
            "status": self.end.code,
            "signal": self.end.signal,
            "wall_s": self.wall.as_secs_f64(),
            "user_s": self.end.user.as_secs_f64(),
            "system_s": self.end.system.as_secs_f64(),
            "processes": self.processes,
            "unlisted": self.unlisted,
            "limit_bytes": self.limit,
            "peak_bytes": self.peak,
            "giveable_at_peak_bytes": self.giveable_at_peak(),
            "net_peak_bytes": self.net_peak,
            "max_resident_bytes": self.end.max_resident_bytes,
            "tree_resident_peak_bytes": self.tree.resident_bytes,
            "tree_anonymous_peak_bytes": self.tree.anonymous_bytes,
            "tree_outside_allocator_bytes": self.tree.outside_bytes,
            "over_limit": self.tree.excess.as_ref().map(excess_json),
            "kernel_limit": self.kernel.as_ref().map(|kernel| json!({
                "limit_bytes": kernel.limit_bytes,
                "peak_bytes": kernel.statistics.peak_bytes,
                "kills": kernel.statistics.kills,
            })),
            "timeline": self.timeline.json(),
            "largest_processes": rows.collect::<Vec<_>>(),
            "counters": counters(&self.collected.sum),
            "largest": largest.collect::<Vec<_>>(),
        })
    }
}

fn merge_largest(by_kernel: Vec<Process>, collected: &CollectedStatistics) -> Vec<ProcessRow> {
    let allocator = |pid| collected.peaks.get(&pid).copied();
    let of_kernel = |process: Process| ProcessRow {
        pid: process.identity.pid,
        is_running: process::is_alive(process.identity),
        name: process.name,
        resident: Some(process.bytes),
        allocator: allocator(process.identity.pid),
    };
    let mut rows: Vec<ProcessRow> = by_kernel.into_iter().map(of_kernel).collect();
    for snapshot in &collected.largest {
        let identity = snapshot.identity;
        if rows.iter().all(|row| row.pid != identity.pid) {
            let (name, is_running) = (snapshot.name().to_string(), process::is_alive(identity));
            rows.push(ProcessRow {
                pid: identity.pid,
                name,
                resident: None,
                allocator: allocator(identity.pid),
                is_running,
            });
        }
    }
    rows.sort_by_key(|row| std::cmp::Reverse(row.largest_bytes()));
    rows.truncate(MAX_LISTED_PROCESSES);
    rows
}

/// Describes by how much and by which processes a limit was exceeded, as a part of a sentence.
pub fn describe_excess(excess: &Excess) -> String {
    let names = excess.largest.iter().take(3);
    let names: Vec<_> =
        names.map(|process| format!("{} ({}) {}", process.name, process.identity.pid, Bytes(process.bytes))).collect();
    format!(
        "{} without files at one moment, shared memory counted once; of it the allocators held at most {}; most in {}",
        Bytes(excess.held_bytes),
        Bytes(excess.allocator_bytes.min(excess.held_bytes)),
        names.join(", ")
    )
}

fn excess_json(excess: &Excess) -> Value {
    let largest = excess
        .largest
        .iter()
        .map(|process| json!({"pid": process.identity.pid, "name": process.name, "bytes": process.bytes}));
    json!({
        "bytes": excess.bytes_over_limit(),
        "held_bytes": excess.held_bytes,
        "allocator_bytes": excess.allocator_bytes,
        "outside_allocator_bytes": excess.bytes_outside_allocators(),
        "largest": largest.collect::<Vec<_>>(),
    })
}

/// Returns a counter's meaning as a part of a line: with a lower-case first letter and without a full stop.
fn sentence_part(meaning: &str) -> String {
    let mut letters = meaning.trim_end_matches('.').chars();
    letters.next().map_or(String::new(), |first| first.to_lowercase().chain(letters).collect())
}
