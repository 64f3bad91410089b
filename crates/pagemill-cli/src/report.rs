//! The report at the end of `pagemill run`: what the process tree held, gave back, and was refused.

use pagemill::published::{self, Published};
use pagemill::reclaim::tree::{TreePage, UNLIMITED};
use pagemill::stats::{Counter, Kind, Snapshot, TABLE, Unit};
use pagemill::units::Bytes;
use pagemill_sys::child::End;
use serde_json::{Map, Value, json};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write as _};
use std::time::Duration;

/// Processes that are listed by themselves.
const LISTED: usize = 5;

/// Figures of processes that have ended, added up as they end.
#[derive(Default)]
pub struct Collected {
    sum: Snapshot,
    count: usize,
    largest: Vec<Snapshot>,
}

impl Collected {
    /// Takes in the figures of processes that have ended since the last time.
    pub fn absorb_ended(&mut self, folder: &str) {
        for process in published::list(folder, true).unwrap_or_default() {
            if !process.is_alive {
                self.absorb(&process.snapshot);
            }
        }
    }

    fn absorb(&mut self, snapshot: &Snapshot) {
        self.sum.absorb_ended(snapshot);
        self.count += 1;
        self.largest.push(snapshot.clone());
        self.largest.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.get(Counter::ResidentPeak)));
        self.largest.truncate(LISTED);
    }
}

/// All that is reported.
pub struct Report {
    program: String,
    end: End,
    wall: Duration,
    limit: Option<u64>,
    peak: u64,
    net_peak: u64,
    unlisted: u64,
    /// All processes, those too that held so little that they published nothing.
    processes: usize,
    running: Vec<Published>,
    collected: Collected,
}

impl Report {
    pub fn new(
        program: &OsStr,
        end: End,
        wall: Duration,
        page: &TreePage,
        folder: &str,
        mut collected: Collected,
    ) -> Self {
        let running = published::list(folder, false).unwrap_or_default();
        for process in &running {
            collected.absorb(&process.snapshot);
        }
        let (peak, net_peak) = page.peak();
        // The page knows the tree's sum; a single process may have measured more at its end.
        let single = |counter| collected.largest.iter().map(|snapshot| snapshot.get(counter)).max().unwrap_or(0);
        let (peak, net_peak) = (peak.max(single(Counter::ResidentPeak)), net_peak.max(single(Counter::NetPeak)));
        let limit = Some(page.limit()).filter(|limit| *limit != UNLIMITED);
        Self {
            program: program.to_string_lossy().into_owned(),
            end,
            wall,
            limit,
            peak,
            net_peak: net_peak.min(peak),
            unlisted: page.unlisted(),
            processes: page.entered() as usize,
            running,
            collected,
        }
    }

    /// Writes the report to the file, or to standard error.
    ///
    /// # Errors
    ///
    /// What writing to the file says. A reader of standard error that has gone is none.
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

    /// By how much the peak was higher than it had to be.
    fn spare(&self) -> u64 {
        self.peak - self.net_peak
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let how = match self.end.signal {
            Some(signal) => format!("killed by signal {signal}"),
            None => format!("exit {}", self.end.code),
        };
        let seconds = |time: Duration| time.as_secs_f64();
        let _ = writeln!(
            text,
            "pagemill: {}: {how}, {:.2} s ({:.2} s user, {:.2} s system), {} process{}",
            self.program,
            seconds(self.wall),
            seconds(self.end.user),
            seconds(self.end.system),
            self.processes,
            if self.processes == 1 { "" } else { "es" },
        );
        let limit = self.limit.map_or("no limit".to_owned(), |limit| format!("limit {}", Bytes(limit)));
        let mut row = |name: &str, value: String, meaning: &str| {
            let _ = writeln!(text, "  {name:<18} {value:>12}  {meaning}");
        };
        row("peak", Bytes(self.peak).to_string(), &format!("allocator memory resident, whole tree ({limit})"));
        row("net peak", Bytes(self.net_peak).to_string(), "most at any time without what could be given back at once");
        row("could be given", Bytes(self.spare()).to_string(), "the difference: kept because nobody asked");
        let largest = Bytes(self.end.max_resident_bytes).to_string();
        row("largest process", largest, "its whole resident set, as the kernel counts it");
        for table_row in TABLE.iter().filter(|row| row.kind == Kind::Sum) {
            let value = self.collected.sum.get(table_row.counter);
            if value > 0 {
                row(table_row.name, render(table_row.unit, value), &sentence_part(table_row.meaning));
            }
        }
        if self.unlisted > 0 {
            row("unlisted", self.unlisted.to_string(), "processes that found no place in the tree's page");
        }
        self.list_largest(&mut text);
        text
    }

    fn list_largest(&self, text: &mut String) {
        if self.collected.count < 2 {
            return;
        }
        let _ = writeln!(text, "  largest processes:");
        for snapshot in &self.collected.largest {
            let is_running = self.running.iter().any(|process| process.who == snapshot.who);
            let _ = writeln!(
                text,
                "    {:>8} {:<15} {:>12}{}",
                snapshot.who.pid,
                snapshot.name(),
                Bytes(snapshot.get(Counter::ResidentPeak)).to_string(),
                if is_running { "  still running" } else { "" },
            );
        }
    }

    fn json(&self) -> Value {
        let counters = |snapshot: &Snapshot| -> Map<String, Value> {
            let rows = TABLE.iter().filter(|row| row.kind != Kind::Gauge);
            rows.map(|row| (row.name.to_owned(), json!(snapshot.get(row.counter)))).collect()
        };
        let largest = self.collected.largest.iter().map(|snapshot| {
            let is_running = self.running.iter().any(|process| process.who == snapshot.who);
            json!({"pid": snapshot.who.pid, "name": snapshot.name(), "running": is_running, "counters": counters(snapshot)})
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
            "giveable_at_peak_bytes": self.spare(),
            "net_peak_bytes": self.net_peak,
            "max_resident_bytes": self.end.max_resident_bytes,
            "counters": counters(&self.collected.sum),
            "largest": largest.collect::<Vec<_>>(),
        })
    }
}

/// A counter's meaning as a part of a line: no capital at its start, no full stop at its end.
fn sentence_part(meaning: &str) -> String {
    let mut letters = meaning.trim_end_matches('.').chars();
    letters.next().map_or(String::new(), |first| first.to_lowercase().chain(letters).collect())
}

fn render(unit: Unit, value: u64) -> String {
    match unit {
        Unit::Bytes => Bytes(value).to_string(),
        Unit::Count => value.to_string(),
    }
}
