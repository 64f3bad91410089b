//! `pagemill meminfo [PID]`: shows how much memory processes have allocated from Pagemill, and how much of it could be
//! returned at once. Also shows the memory by NUMA node and by cache.

use crate::caches::{self, CachesReport};
use crate::fail;
use crate::requests::Interrupt;
use crate::statistics::{
    self, Process, ProcessColumn, StatisticsError, Target, giveable_bytes, needed_bytes, resident_bytes,
};
use pagemill_core::stats::{Counter, Snapshot};
use pagemill_core::units::Bytes;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::ops::Range;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
#[command(after_help = "\
The process measures its memory when this command requests it. If the process does not answer, its last published \
values are shown with their age. Root sees the processes of all users. `pagemill trim` returns the giveable memory.\n\n\
Each page cache of the process has a row. The columns HUGE to INDEX add up to the cache's memory. PINNED: folios that \
are pinned or held. FREE: unused pages. #: the number of the cache in `pagemill trace`. (no cache): memory that stays \
after a cache ended. If the process does not answer within 2 seconds, only the sums over all caches are shown.")]
pub struct Meminfo {
    /// A process on Pagemill, or a `pagemill run`, which stands for all processes of its tree. Default: all processes,
    /// one line for each.
    pid: Option<u32>,
    /// Repeat every second, until the process ends or Ctrl-C.
    #[arg(long, requires = "pid")]
    watch: bool,
    /// Print one JSON object per process instead of a table (for a tree one object with its members; with --watch one
    /// every second).
    #[arg(long)]
    json: bool,
    /// Also show rows whose value is zero.
    #[arg(long)]
    all: bool,
}

/// Counters whose values add up to the resident memory, each with its meaning.
pub const RESIDENT_PARTS: &[(Counter, &str)] = &[
    (Counter::Heap, "slots, 64 KiB and up, live or free"),
    (Counter::Small, "the small allocator's extents"),
    (Counter::CLibrary, "allocated by the C library while the program was small"),
    (Counter::Cache, "pages of caches and slabs, in use or free"),
];

/// Counters of memory that could be returned at once. Each meaning names the row of [`RESIDENT_PARTS`] to which the
/// memory belongs.
pub const GIVEABLE_COUNTERS: &[(Counter, &str)] = &[
    (Counter::HeapFree, "giveable, of heap: free slots"),
    (Counter::RangesGiveable, "giveable, of heap: volatile ranges, also freed ones"),
    (Counter::SmallFree, "giveable, of small: free pages"),
    (Counter::SmallStale, "giveable, of small: freed parts of huge pages"),
    (Counter::CacheFree, "giveable, of cache: free blocks"),
    (Counter::SlabFree, "giveable, of cache: free blocks of slab caches"),
    (Counter::SlabKept, "giveable, of cache: empty slabs that slab caches keep"),
    (Counter::MarkedGiveable, "giveable: memory marked volatile by address"),
    (Counter::MarkedForeign, "of that: not from Pagemill, so no part of resident"),
];

/// Counters that `meminfo` shows below the others. Each meaning says whether the memory is included in one of the
/// [`RESIDENT_PARTS`].
pub const OTHER_COUNTERS: &[(Counter, &str)] = &[
    (Counter::CacheHuge, "of cache: huge folios"),
    (Counter::CacheSmall, "of cache: small folios"),
    (Counter::CacheDirty, "of cache: dirty, not yet in the store"),
    (Counter::CacheWriteback, "of that: being written back"),
    (Counter::CacheLocked, "of cache: ranges of files that are locked in memory"),
    (Counter::CacheFrames, "metadata of the pages of caches"),
    (Counter::CacheIndex, "nodes of the indices of caches"),
    (Counter::CacheHugetlb, "reserved huge pages of caches: not included above, not resident"),
    (Counter::Untouched, "allocated, not known to be touched; not resident"),
    (Counter::Metadata, "metadata, not included above"),
    (Counter::ResidentPeak, "the peak of resident"),
];

const PROCESS_COLUMNS: [ProcessColumn; 3] =
    [("RESIDENT", resident_bytes), ("GIVEABLE", |sum| giveable_bytes(sum).0), ("NET", needed_bytes)];

/// The contents of one table or JSON object: the memory of a process, or the sums over a process tree.
struct View<'a> {
    title: String,
    sum: Snapshot,
    nodes: BTreeMap<u32, NodeMemory>,
    answer: Option<CachesReport>,
    members: Option<&'a [Process]>,
}

impl Meminfo {
    pub fn main(&self) -> ExitCode {
        let Ok(interrupt) = Interrupt::watch() else { return fail(1, "signals cannot be handled") };
        let mut first = None;
        loop {
            let shown = match self.pid {
                Some(pid) => self.text_of_pid(pid, &interrupt),
                None => statistics::read_all(&interrupt).map(|all| (0, self.text_of_all(&all))),
            };
            let (start, text) = match shown {
                Ok(shown) => shown,
                Err(StatisticsError::Interrupted) => return interrupt.end(),
                Err(StatisticsError::Missing(_)) if first.is_some() => return ExitCode::SUCCESS,
                Err(StatisticsError::Missing(why)) => return fail(2, &why),
            };
            // The start time of the process is checked each time, because its id may have been reused.
            if *first.get_or_insert(start) != start {
                return ExitCode::SUCCESS;
            }
            let mut out = std::io::stdout().lock();
            match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
                // The reader (head, less) may close the pipe early.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
                Err(error) => return fail(1, &format!("the figures cannot be written: {error}")),
                Ok(()) if !self.watch => return ExitCode::SUCCESS,
                Ok(()) => {}
            }
            if !wait_a_second(&interrupt) {
                return interrupt.end();
            }
        }
    }

    /// Returns the text to print for a process id, and the start time of the process in clock ticks.
    fn text_of_pid(&self, pid: u32, interrupt: &Interrupt) -> Result<(u64, String), StatisticsError> {
        match statistics::read_target(pid, interrupt)? {
            Target::One(process) => {
                let answer = if process.published.is_own() {
                    caches::request_caches(&process.published.found, interrupt).ok_or(StatisticsError::Interrupted)?
                } else {
                    CachesReport::None("another user's process".to_owned())
                };
                let shown = View {
                    title: process.title(),
                    sum: process.sum.clone(),
                    nodes: read_node_memory(&process),
                    answer: Some(answer),
                    members: None,
                };
                Ok((process.published.identity.start_ticks, self.text(&shown, pid, process.age())))
            }
            Target::Tree(members) => {
                let shown = View {
                    title: format!(
                        "{pid} pagemill run: {} on Pagemill\n",
                        statistics::process_count_text(members.len())
                    ),
                    sum: statistics::sum_of(&members),
                    nodes: BTreeMap::new(),
                    answer: None,
                    members: Some(&members),
                };
                let start = pagemill_sys::process::identity(pid).map_or(0, |identity| identity.start_ticks);
                Ok((start, self.text(&shown, pid, None)))
            }
        }
    }

    fn text(&self, shown: &View<'_>, pid: u32, age: Option<String>) -> String {
        if !self.json {
            return self.table_text(shown);
        }
        let mut rows = self.rows_of(&shown.sum, shown.answer.as_ref());
        rows.insert("pid".into(), json!(pid));
        rows.insert("age".into(), json!(age));
        match shown.members {
            Some(members) => {
                rows.insert("name".into(), json!("run"));
                rows.insert("members".into(), members.iter().map(|member| self.json_of(member)).collect());
            }
            None => {
                let on = |of: fn(&NodeMemory) -> u64| -> Value {
                    shown.nodes.iter().map(|(number, node)| (number.to_string(), json!(of(node)))).collect()
                };
                rows.insert("nodes".into(), on(|node| node.arena));
                rows.insert("process_nodes".into(), on(|node| node.process));
            }
        }
        if let Some(answer) = &shown.answer {
            answer.add_rows_to_json(&mut rows);
        }
        format!("{}\n", Value::Object(rows))
    }

    fn text_of_all(&self, processes: &[Process]) -> String {
        match (self.json, processes.is_empty()) {
            (true, _) => processes.iter().map(|process| format!("{}\n", self.json_of(process))).collect(),
            (false, true) => "no process of yours is on Pagemill\n".to_owned(),
            (false, false) => statistics::process_table(processes, &PROCESS_COLUMNS),
        }
    }

    /// Returns the JSON object of one process in a list of processes.
    fn json_of(&self, process: &Process) -> Value {
        let mut rows = self.rows_of(&process.sum, None);
        rows.insert("pid".into(), json!(process.pid()));
        rows.insert("user".into(), json!(process.published.user));
        rows.insert("age".into(), json!(process.age()));
        Value::Object(rows)
    }

    /// Returns the counters of `sum` as rows of a JSON object. Rows of [`RESIDENT_PARTS`] are included even if their
    /// value is zero.
    fn rows_of(&self, sum: &Snapshot, answer: Option<&CachesReport>) -> Map<String, Value> {
        let mut rows = Map::new();
        rows.insert("name".into(), json!(sum.name()));
        rows.insert("resident".into(), json!(resident_bytes(sum)));
        rows.extend(RESIDENT_PARTS.iter().map(|(counter, _)| (counter.name().to_owned(), json!(sum.get(*counter)))));
        rows.insert("giveable".into(), json!(giveable_bytes(sum).0));
        rows.insert("net".into(), json!(needed_bytes(sum)));
        for (counter, _) in GIVEABLE_COUNTERS.iter().chain(OTHER_COUNTERS) {
            let bytes = current_value(sum, answer, *counter);
            if bytes > 0 || self.all {
                rows.insert(counter.name().into(), json!(bytes));
            }
        }
        rows
    }

    fn table_text(&self, shown: &View<'_>) -> String {
        let sum = &shown.sum;
        let mut text = shown.title.clone();
        let mut row = |name: &str, bytes: u64, meaning: &str| {
            let _ = writeln!(text, "  {name:<15} {:>12}  {meaning}", Bytes(bytes).to_string());
        };
        let of = |counter: Counter| current_value(sum, shown.answer.as_ref(), counter);
        let is_shown = |(counter, _): &&(Counter, &str)| self.all || of(*counter) > 0;
        row("resident", resident_bytes(sum), "on Pagemill: the sum of heap, small, c_library and cache");
        RESIDENT_PARTS
            .iter()
            .filter(is_shown)
            .for_each(|(counter, meaning)| row(counter.name(), of(*counter), meaning));
        row(
            "giveable",
            giveable_bytes(sum).0,
            "could be returned at once: the sum of the giveable rows (pagemill trim)",
        );
        GIVEABLE_COUNTERS
            .iter()
            .filter(is_shown)
            .for_each(|(counter, meaning)| row(counter.name(), of(*counter), meaning));
        row("net", needed_bytes(sum), "resident without its giveable part: what the program needs");
        OTHER_COUNTERS
            .iter()
            .filter(is_shown)
            .for_each(|(counter, meaning)| row(counter.name(), of(*counter), meaning));
        for (number, node) in &shown.nodes {
            row(&format!("node {number}"), node.arena, "of heap and small on this node, as the kernel counts it");
        }
        for (number, node) in &shown.nodes {
            row(&format!("all on {number}"), node.process, "the whole process on this node, Pagemill or not");
        }
        if let Some(members) = shown.members {
            text += &statistics::process_table(members, &PROCESS_COLUMNS);
        }
        text + &shown.answer.as_ref().map_or_else(String::new, CachesReport::text)
    }
}

fn read_node_memory(process: &Process) -> BTreeMap<u32, NodeMemory> {
    let numa_maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", process.pid())).unwrap_or_default();
    let arenas: Vec<Range<u64>> = process.published.found.iter().map(|(_, found)| found.arena.clone()).collect();
    parse_numa_maps(&numa_maps, &arenas)
}

/// Returns the value of a counter in bytes: from the report of the caches if the report has the counter, otherwise the
/// published value.
fn current_value(sum: &Snapshot, answer: Option<&CachesReport>, counter: Counter) -> u64 {
    answer.and_then(|answer| answer.current_value(counter)).unwrap_or_else(|| sum.get(counter))
}

/// Waits a second. Returns `false` if a signal arrives.
fn wait_a_second(interrupt: &Interrupt) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) && !interrupt.has_signal() {
        thread::sleep(Duration::from_millis(20));
    }
    !interrupt.has_signal()
}

/// Resident bytes of a process on one NUMA node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NodeMemory {
    /// Resident bytes in Pagemill's arenas, in use or free.
    arena: u64,
    /// Resident bytes of the whole process, including memory outside Pagemill's arenas.
    process: u64,
}

/// Parses `/proc/PID/numa_maps`. Returns the resident bytes for each NUMA node. The map is empty if the kernel does
/// not provide that file.
fn parse_numa_maps(numa_maps: &str, arenas: &[Range<u64>]) -> BTreeMap<u32, NodeMemory> {
    let mut nodes: BTreeMap<u32, NodeMemory> = BTreeMap::new();
    for line in numa_maps.lines() {
        let value = |name: &str| line.split(' ').find_map(|word| word.strip_prefix(name)?.parse::<u64>().ok());
        let page_bytes = value("kernelpagesize_kB=").unwrap_or(4).saturating_mul(1024);
        let start = line.split(' ').next().and_then(|word| u64::from_str_radix(word, 16).ok());
        let is_ours = start.is_some_and(|start| arenas.iter().any(|arena| arena.contains(&start)));
        for word in line.split(' ') {
            let Some((node, pages)) = word.strip_prefix('N').and_then(|rest| rest.split_once('=')) else { continue };
            if let (Ok(node), Ok(pages)) = (node.parse::<u32>(), pages.parse::<u64>()) {
                let (bytes, node) = (pages.saturating_mul(page_bytes), nodes.entry(node).or_default());
                node.process = node.process.saturating_add(bytes);
                node.arena = node.arena.saturating_add(if is_ours { bytes } else { 0 });
            }
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_core::stats::TABLE;

    /// The entries of `numa_maps` have pages of several sizes. They must be added up for each node. Malformed entries
    /// must be ignored.
    #[test]
    fn nodes_are_summed_over_mappings() {
        let text = "7f00 default anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4\n\
                    7f01 bind:1 huge anon=1 N1=1 kernelpagesize_kB=2048\nNx=1 N=2 N3=x\n";
        let node = |arena, process| NodeMemory { arena, process };
        let expected = BTreeMap::from([(0, node(0, 8192)), (1, node(2 << 20, 4096 + (2 << 20)))]);
        assert_eq!(parse_numa_maps(text, &[0x7f01..0x7f02, 1..2]), expected);
        assert!(parse_numa_maps("", std::slice::from_ref(&(0..u64::MAX))).is_empty());
    }

    /// Any user can publish impossible counter values. They must cause no overflow and no underflow.
    #[test]
    fn impossible_values_do_not_overflow() {
        let mut sum = Snapshot::default();
        TABLE.iter().for_each(|row| sum.set(row.counter, u64::MAX));
        let meminfo = Meminfo { pid: None, watch: false, json: false, all: false };
        let shown = View { title: String::new(), sum, nodes: BTreeMap::new(), answer: None, members: None };
        assert!(meminfo.table_text(&shown).contains("resident"));
        assert_eq!(meminfo.rows_of(&shown.sum, None)["resident"], u64::MAX);
        let rows = meminfo.rows_of(&Snapshot::default(), None);
        assert_eq!((&rows["net"], rows.get("heap_free")), (&json!(0), None), "zero values are left out");
    }
}
