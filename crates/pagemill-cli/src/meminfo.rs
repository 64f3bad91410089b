//! `pagemill meminfo PID`: what a process holds on Pagemill, what of it could be given at once, on which nodes, in
//! which caches.

use crate::asking::Interrupt;
use crate::caches::{self, Answer};
use crate::fail;
use pagemill::published;
use pagemill::stats::{Counter, Snapshot};
use pagemill::units::Bytes;
use pagemill_sys::file::Path;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::ops::Range;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
#[command(
    after_help = "Caches of files in memory are shown one by one: the process says what they hold, within 2 seconds. HUGE to INDEX add \
up. LOCKED: pinned or held. FREE: pages without a use. #: which cache it is in `pagemill trace`. (no cache): kept from one that \
has ended. A process that does not answer is shown with its sums only."
)]
pub struct Meminfo {
    /// A running process on Pagemill.
    pid: u32,
    /// Every second anew, until the process ends or Ctrl-C.
    #[arg(long)]
    watch: bool,
    /// One JSON object (with --watch one a second) instead of a table.
    #[arg(long)]
    json: bool,
}

/// Rows that add up to what is resident.
const PARTS: &[(Counter, &str)] = &[
    (Counter::Heap, "slots, 64 KiB and up, live or free"),
    (Counter::Small, "the small allocator's extents"),
    (Counter::CLibrary, "handed out by the C library while the program was small"),
    (Counter::Cache, "pages of caches and slabs, in use or free"),
];

/// Rows that are parts of those above, or lie beside them.
const ASIDE: &[(Counter, &str)] = &[
    (Counter::HeapFree, "of the heap: free slots, given back on request"),
    (Counter::SmallFree, "of small: free, given back on request; as of the last measurement"),
    (Counter::CacheHuge, "of cache: huge folios"),
    (Counter::CacheSmall, "of cache: small folios"),
    (Counter::CacheFree, "of cache: free blocks, given back on request"),
    (Counter::CacheDirty, "of cache: written to, and not in the store behind it yet"),
    (Counter::CacheWriteback, "of that: being written back"),
    (Counter::SlabFree, "of cache: free blocks of slab caches, given back on request"),
    (Counter::CacheFrames, "metadata of the pages of caches; as of the last measurement"),
    (Counter::CacheIndex, "nodes of the indices of caches; as of the last measurement"),
    (Counter::CacheHugetlb, "reserved huge pages of caches: beside the above, not resident"),
    (Counter::Untouched, "lent and not known to be touched; not resident"),
    (Counter::Metadata, "bookkeeping, beside the above; as of the last measurement"),
    (Counter::ResidentPeak, "the most that was resident"),
];

/// The figures of all Pagemills of a process, and where its arenas lie.
struct Figures {
    sum: Snapshot,
    arenas: Vec<Range<u64>>,
    /// Each by itself.
    found: Vec<(Path, Snapshot)>,
}

impl Figures {
    fn of(pid: u32) -> Option<Self> {
        let found = published::find_all(pid);
        let mut sum = found.first()?.1.clone();
        found.iter().skip(1).for_each(|(_, other)| sum.add(other));
        Some(Self { sum, arenas: found.iter().map(|(_, snapshot)| snapshot.arena.clone()).collect(), found })
    }
}

impl Meminfo {
    pub fn main(&self) -> ExitCode {
        let Some(mut figures) = Figures::of(self.pid) else { return fail(2, &published::missing(self.pid)) };
        let Ok(interrupt) = Interrupt::watch() else { return fail(1, "signals cannot be watched for") };
        loop {
            let Some(answer) = caches::ask(&figures.found, &interrupt) else { return interrupt.end() };
            match self.write(&figures, &answer) {
                // A reader that stops reading (head, less) ends it.
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
                Err(error) => return fail(1, &format!("the figures cannot be written: {error}")),
                Ok(()) if !self.watch => return ExitCode::SUCCESS,
                Ok(()) => {}
            }
            if !pause(&interrupt) {
                return interrupt.end();
            }
            // Looked up anew: another process may have got its number.
            match Figures::of(self.pid).filter(|now| now.sum.who == figures.sum.who) {
                Some(now) => figures = now,
                None => return ExitCode::SUCCESS,
            }
        }
    }

    fn write(&self, figures: &Figures, answer: &Answer) -> std::io::Result<()> {
        let numa_maps = std::fs::read_to_string(format!("/proc/{}/numa_maps", self.pid)).unwrap_or_default();
        let nodes = nodes(&numa_maps, &figures.arenas);
        let text = if self.json {
            format!("{}\n", json_of(&figures.sum, &nodes, answer))
        } else {
            text_of(&figures.sum, &nodes, answer)
        };
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

/// Waits a second; false if somebody interrupts.
fn pause(interrupt: &Interrupt) -> bool {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) && !interrupt.has_come() {
        thread::sleep(Duration::from_millis(20));
    }
    !interrupt.has_come()
}

/// The sum of the parts: the counter `resident` may be a moment older than they are.
fn resident(snapshot: &Snapshot) -> u64 {
    PARTS.iter().fold(0u64, |sum, (counter, _)| sum.saturating_add(snapshot.get(*counter)))
}

fn giveable(snapshot: &Snapshot) -> u64 {
    snapshot.giveable_bytes().min(resident(snapshot))
}

/// Resident bytes of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Node {
    /// In the arena: what Pagemill handed out or keeps.
    arena: u64,
    /// In the whole process.
    process: u64,
}

/// Resident bytes by node, from `numa_maps`; empty where the kernel does not tell.
fn nodes(numa_maps: &str, arenas: &[Range<u64>]) -> BTreeMap<u32, Node> {
    let mut nodes: BTreeMap<u32, Node> = BTreeMap::new();
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

/// A figure and what it is; that of now where the process was asked.
fn figure(snapshot: &Snapshot, answer: &Answer, counter: Counter, meaning: &'static str) -> (u64, &'static str) {
    match answer.now(counter) {
        Some(bytes) => (bytes, meaning.split(';').next().unwrap_or(meaning)),
        None => (snapshot.get(counter), meaning),
    }
}

fn text_of(snapshot: &Snapshot, nodes: &BTreeMap<u32, Node>, answer: &Answer) -> String {
    let mut text = format!("{} {}\n", snapshot.who.pid, snapshot.name());
    let mut row = |name: &str, bytes: u64, meaning: &str| {
        let _ = writeln!(text, "  {name:<14} {:>12}  {meaning}", Bytes(bytes).to_string());
    };
    row("resident", resident(snapshot), "on Pagemill: the sum of the next four");
    PARTS.iter().for_each(|(counter, meaning)| row(counter.name(), snapshot.get(*counter), meaning));
    row("giveable", giveable(snapshot), "of it could be given back at once");
    row("net", resident(snapshot) - giveable(snapshot), "resident less giveable: what the program needs");
    for (counter, meaning) in ASIDE {
        let (bytes, meaning) = figure(snapshot, answer, *counter, meaning);
        row(counter.name(), bytes, meaning);
    }
    for (number, node) in nodes {
        row(&format!("node {number}"), node.arena, "of heap and small on this node, as the kernel counts it");
    }
    for (number, node) in nodes {
        row(&format!("all on {number}"), node.process, "the whole process on this node, Pagemill or not");
    }
    text + &answer.text()
}

fn json_of(snapshot: &Snapshot, nodes: &BTreeMap<u32, Node>, answer: &Answer) -> Value {
    let mut rows = Map::new();
    rows.insert("pid".into(), json!(snapshot.who.pid));
    rows.insert("name".into(), json!(snapshot.name()));
    rows.insert("resident".into(), json!(resident(snapshot)));
    for (counter, meaning) in PARTS.iter().chain(ASIDE) {
        rows.insert(counter.name().into(), json!(figure(snapshot, answer, *counter, meaning).0));
    }
    rows.insert("giveable".into(), json!(giveable(snapshot)));
    rows.insert("net".into(), json!(resident(snapshot) - giveable(snapshot)));
    rows.insert("nodes".into(), nodes.iter().map(|(number, node)| (number.to_string(), json!(node.arena))).collect());
    let of_process = nodes.iter().map(|(number, node)| (number.to_string(), json!(node.process))).collect();
    rows.insert("process_nodes".into(), of_process);
    answer.json_into(&mut rows);
    Value::Object(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of all sizes count, and nonsense does not.
    #[test]
    fn nodes_are_summed_over_mappings() {
        let text = "7f00 default anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=4\n\
                    7f01 bind:1 huge anon=1 N1=1 kernelpagesize_kB=2048\nNx=1 N=2 N3=x\n";
        let node = |arena, process| Node { arena, process };
        let expected = BTreeMap::from([(0, node(0, 8192)), (1, node(2 << 20, 4096 + (2 << 20)))]);
        assert_eq!(nodes(text, &[0x7f01..0x7f02, 1..2]), expected);
        assert!(nodes("", std::slice::from_ref(&(0..u64::MAX))).is_empty());
    }

    /// A page full of ones, which anybody could have written: no overflow, no underflow.
    #[test]
    fn absurd_figures_are_survived() {
        let (snapshot, answer) = (Snapshot::default(), Answer::Rows(Vec::new()));
        assert!(text_of(&snapshot, &BTreeMap::new(), &answer).contains("resident"));
        assert_eq!(json_of(&snapshot, &BTreeMap::new(), &answer)["net"], 0);
    }
}
