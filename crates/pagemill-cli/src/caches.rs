//! The memory of a process's page caches, by cache name and by NUMA node, as the process reports it.

use crate::columns::{self, Heading};
use crate::requests::{Interrupt, unanswered_reason};
use pagemill_cache::mapping::{Holder, SharedMemory, Usage};
use pagemill_core::listing::Unanswered;
use pagemill_core::stats::{Counter, Snapshot};
use pagemill_core::units::Bytes;
use pagemill_sys::file::Path;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

pub enum CachesReport {
    /// One row for each page cache of the process, and a few rows for memory that belongs to no cache. There are no
    /// rows if the process has no page cache.
    Rows(Vec<(Holder, Usage)>),
    /// The process has page caches but sent no report. The text is the reason.
    None(String),
}

/// Requests a report about the page caches from each Pagemill instance in the process: the preload library and the
/// crate each have one. Returns `None` if a signal interrupts the wait.
pub fn request_caches(found: &[(Path, Snapshot)], interrupt: &Interrupt) -> Option<CachesReport> {
    let mut rows = Vec::new();
    // An instance without caches gets no request: a request would wake its helper thread for nothing.
    let has_caches = |snapshot: &Snapshot| snapshot.get(Counter::Caches) > 0 || snapshot.get(Counter::Cache) > 0;
    for (path, snapshot) in found.iter().filter(|(_, snapshot)| has_caches(snapshot)) {
        // Without a helper thread the request would get no answer.
        let answer = if snapshot.get(Counter::Helpers) == 0 {
            Err(Unanswered::Late)
        } else {
            pagemill_cache::mapping::ask_for_caches(path, snapshot.identity, || interrupt.has_signal())
        };
        match answer {
            Ok(part) => rows.extend(part),
            Err(Unanswered::Stopped) => return None,
            Err(error) => return Some(CachesReport::None(format!("{error}{}", unanswered_reason(&error, snapshot)))),
        }
    }
    Some(CachesReport::Rows(rows))
}

/// A column of the table: its title, and the function that returns its value for a cache.
type CacheColumn = (&'static str, fn(&Usage) -> u64);

/// The columns whose values add up to the memory of a cache.
const SUMMED_COLUMNS: [CacheColumn; 6] = [
    ("huge", |usage| usage.huge),
    ("small", |usage| usage.small),
    ("pinned", |usage| usage.pinned),
    ("free", |usage| usage.free),
    ("frames", |usage| usage.frames),
    ("index", |usage| usage.index),
];

/// Returns the word for the place of a cache's shared memory.
fn shared_word(shared: SharedMemory) -> &'static str {
    match shared {
        SharedMemory::Memfd => "memfd",
        SharedMemory::Tmpfs => "tmpfs",
    }
}

/// Returns the notes about a cache: memory of another kind than ordinary, and locked ranges.
fn memory_note(usage: &Usage) -> String {
    let locked = match usage.locked_ranges {
        0 => String::new(),
        bytes => format!("  {} locked in memory", Bytes(bytes)),
    };
    let memory = match usage.shared {
        _ if usage.is_hugetlb => "  hugetlb".to_owned(),
        Some(shared) => format!("  shared ({})", shared_word(shared)),
        None => String::new(),
    };
    memory + &locked
}

/// The sums of the [`SUMMED_COLUMNS`] over several caches. The values come from another process and may be impossible,
/// so additions saturate.
type ColumnSums = [u64; SUMMED_COLUMNS.len()];

fn add_usage(sums: &mut ColumnSums, usage: &Usage) {
    for (sum, (_, of)) in sums.iter_mut().zip(SUMMED_COLUMNS) {
        *sum = sum.saturating_add(of(usage));
    }
}

fn column_sums(rows: &[(Holder, Usage)]) -> ColumnSums {
    let mut sums = ColumnSums::default();
    rows.iter().for_each(|(_, usage)| add_usage(&mut sums, usage));
    sums
}

/// Returns the column sums for each NUMA node. Unused index nodes of xarrays belong to no NUMA node and are not
/// counted.
fn sums_by_node(rows: &[(Holder, Usage)]) -> BTreeMap<usize, ColumnSums> {
    let mut nodes: BTreeMap<usize, ColumnSums> = BTreeMap::new();
    for (_, usage) in rows.iter().filter(|(holder, _)| *holder != Holder::SpareNodes) {
        add_usage(nodes.entry(usage.node).or_default(), usage);
    }
    nodes
}

fn holder_name(holder: Holder, usage: &Usage) -> String {
    match holder {
        Holder::Cache => usage.name.to_string(),
        Holder::IdlePool => "(no cache)".to_owned(),
        Holder::SpareNodes => "(spare nodes)".to_owned(),
    }
}

impl CachesReport {
    /// Returns the value of a counter according to this report, or `None` if the report does not have it. The report is
    /// more current than the process's published statistics, which are from the last measurement.
    pub fn current_value(&self, counter: Counter) -> Option<u64> {
        let Self::Rows(rows) = self else { return None };
        let [.., frames, index] = column_sums(rows);
        match counter {
            Counter::CacheFrames if !rows.is_empty() => Some(frames),
            Counter::CacheIndex if !rows.is_empty() => Some(index),
            _ => None,
        }
    }

    /// Returns the table that `meminfo` prints below the table of the process. It is empty if the process has no cache.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let rows = match self {
            Self::Rows(rows) => rows,
            Self::None(why) => {
                let _ = writeln!(text, "  single caches: not known, only the sums above: {why}");
                return text;
            }
        };
        if rows.is_empty() {
            return text;
        }
        let mut headings = vec![
            Heading::left_aligned("CACHE", "all on node 0".len(), 2),
            Heading::right_aligned("#", 3, 2),
            Heading::right_aligned("NODE", 4, 1),
        ];
        let titles: Vec<String> = SUMMED_COLUMNS.iter().map(|(name, _)| name.to_uppercase()).collect();
        let titles = titles.iter().map(String::as_str).chain(["CHARGED", "DIRTY", "LIMIT", "PAGE"]);
        headings.extend(titles.map(|title| Heading::right_aligned(title, 9, 1)));
        headings.push(Heading::left_aligned("", 0, 0));
        let amount = |bytes: u64| Bytes(bytes).to_string();
        let row = |name: String, number: String, node: String, sums: &ColumnSums| -> Vec<String> {
            [name, number, node].into_iter().chain(sums.iter().map(|bytes| amount(*bytes))).collect()
        };
        let mut lines = Vec::new();
        for (holder, usage) in rows {
            let mut sums = ColumnSums::default();
            add_usage(&mut sums, usage);
            let (number, node) = match holder {
                Holder::SpareNodes => (String::new(), String::new()),
                _ => (usage.number.to_string(), usage.node.to_string()),
            };
            let mut line = row(holder_name(*holder, usage).to_string(), number, node, &sums);
            if matches!(holder, Holder::Cache) {
                line.extend([usage.charged, usage.dirty, usage.limit, usage.page_bytes as u64].map(amount));
                let partial = if usage.is_partial { "  in part" } else { "" };
                line.push(format!("{}{partial}", memory_note(usage)));
            }
            lines.push(line);
        }
        for (node, sums) in sums_by_node(rows) {
            lines.push(row(format!("all on node {node}"), String::new(), String::new(), &sums));
        }
        lines.push(row("all".to_owned(), String::new(), String::new(), &column_sums(rows)));
        text += &columns::aligned_table(&headings, lines);
        if rows.iter().any(|(_, usage)| usage.is_partial) {
            text.push_str("  in part: not everything was examined in time; more may be locked and in the index\n");
        }
        text
    }

    /// Adds the rows of the caches to a JSON object.
    pub fn add_rows_to_json(&self, object: &mut Map<String, Value>) {
        let rows = match self {
            Self::Rows(rows) => rows,
            Self::None(why) => {
                object.insert("caches".into(), Value::Null);
                object.insert("caches_unknown".into(), json!(why));
                return;
            }
        };
        let parts_of = |sums: &ColumnSums| -> Map<String, Value> {
            SUMMED_COLUMNS.iter().zip(sums).map(|((name, _), bytes)| ((*name).to_owned(), json!(bytes))).collect()
        };
        let caches = rows.iter().map(|(holder, usage)| {
            let mut sums = ColumnSums::default();
            add_usage(&mut sums, usage);
            let mut row = parts_of(&sums);
            let holder_word = match holder {
                Holder::Cache => "cache",
                Holder::IdlePool => "idle",
                Holder::SpareNodes => "spare_nodes",
            };
            row.insert("holder".into(), json!(holder_word));
            if *holder != Holder::SpareNodes {
                row.insert("number".into(), json!(usage.number));
                row.insert("node".into(), json!(usage.node));
                row.insert("page".into(), json!(usage.page_bytes));
            }
            if *holder == Holder::Cache {
                row.insert("name".into(), json!(&*usage.name));
                row.insert("charged".into(), json!(usage.charged));
                row.insert("dirty".into(), json!(usage.dirty));
                row.insert("limit".into(), json!(usage.limit));
                row.insert("hugetlb".into(), json!(usage.is_hugetlb));
                row.insert("locked_ranges".into(), json!(usage.locked_ranges));
                row.insert("shared".into(), json!(usage.shared.map(shared_word)));
                row.insert("in_part".into(), json!(usage.is_partial));
            }
            Value::Object(row)
        });
        object.insert("caches".into(), caches.collect());
        let nodes =
            sums_by_node(rows).into_iter().map(|(node, sums)| (node.to_string(), Value::Object(parts_of(&sums))));
        object.insert("cache_nodes".into(), Value::Object(nodes.collect()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache_usage(name: &str, node: usize, bytes: u64) -> Usage {
        let parts = Usage { huge: bytes, small: bytes, pinned: bytes, free: bytes, ..Usage::default() };
        Usage { name: name.into(), node, frames: bytes, index: bytes, charged: bytes, limit: bytes, ..parts }
    }

    /// The page caches are on two NUMA nodes. The table must have a row for each cache, for each node, and for the
    /// sum. Unused index nodes must count for no NUMA node.
    #[test]
    fn rows_add_up_by_node_and_in_total() {
        const KIB: u64 = 1 << 10;
        let rows = vec![
            (Holder::Cache, Usage { shared: Some(SharedMemory::Tmpfs), ..cache_usage("tiles", 0, KIB) }),
            (Holder::Cache, Usage { is_partial: true, is_hugetlb: true, ..cache_usage("rows", 1, 2 * KIB) }),
            (Holder::IdlePool, cache_usage("", 1, 4 * KIB)),
            (Holder::SpareNodes, Usage { index: 8 * KIB, ..Usage::default() }),
        ];
        let answer = CachesReport::Rows(rows);
        let text = answer.text();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_ascii_whitespace().collect()).collect();
        let numbers = |line: &[&str], last: &str| {
            let kib = line.iter().filter(|word| **word == "KiB").count();
            assert!(kib >= 5 && line.join(" ").contains(last), "{line:?}");
        };
        assert!(lines[1].starts_with(&["tiles", "0", "0", "1", "KiB"]) && !lines[1].contains(&"part"));
        assert!(lines[1].ends_with(&["shared", "(tmpfs)"]));
        assert!(lines[2].ends_with(&["hugetlb", "in", "part"]));
        numbers(&lines[5], "all on node 0 1 KiB");
        numbers(&lines[6], "all on node 1 6 KiB");
        numbers(&lines[7], "all 7 KiB 7 KiB 7 KiB 7 KiB 7 KiB 15 KiB");
        assert!(lines[8].starts_with(&["in", "part:"]));
        assert_eq!(
            (answer.current_value(Counter::CacheFrames), answer.current_value(Counter::CacheIndex)),
            (Some(7 * KIB), Some(15 * KIB))
        );
        let mut object = Map::new();
        answer.add_rows_to_json(&mut object);
        assert_eq!((&object["caches"][1]["name"], &object["caches"][3]["index"]), (&json!("rows"), &json!(8 * KIB)));
        assert_eq!(object["cache_nodes"]["1"]["free"], 6 * KIB);
        assert_eq!([0, 1].map(|at| object["caches"][at]["shared"].clone()), [json!("tmpfs"), Value::Null]);
    }

    /// Sums that exceed 64 bits must saturate. The text must be empty for a process without page caches. For a process
    /// that did not answer, the text must have the reason.
    #[test]
    fn impossible_values_do_not_overflow() {
        let absurd = CachesReport::Rows(vec![(Holder::Cache, cache_usage("x", usize::MAX, u64::MAX)); 3]);
        assert!(absurd.text().contains("15.9 EiB"));
        assert_eq!(CachesReport::Rows(Vec::new()).text(), "");
        let mut object = Map::new();
        let none = CachesReport::None("it has ended".to_owned());
        none.add_rows_to_json(&mut object);
        assert!(none.text().contains("it has ended") && object["caches"].is_null());
        assert_eq!(none.current_value(Counter::CacheIndex), None);
    }
}
