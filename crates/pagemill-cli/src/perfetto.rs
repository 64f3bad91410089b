//! Events of processes in the trace event format of Chrome, which Perfetto (ui.perfetto.dev) shows.
//!
//! Each process has a track for each kind of work, and for the folios and objects of each cache. Counter tracks show
//! resident memory, returned memory, and the order of new folios.
//!
//! Source: "Trace Event Format", Google, 2016 (the JSON object form).

use pagemill_core::trace::Recorded;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Largest integer that every reader of JSON reads exactly.
const MAX_EXACT_INTEGER: u64 = 1 << 53;

/// Returns the track of an event: the name of a kind of work, or of a cache.
fn track_of(event: &Recorded) -> String {
    match event.event {
        "block_huge" | "block_fallback" | "split" | "taken" => "blocks".to_owned(),
        "range_purged" => "volatile ranges".to_owned(),
        "folio_made" | "folio_split" | "folio_collapsed" => format!("folios of cache {}", number(event, "cache")),
        "slow_drop" => "drops of files".to_owned(),
        "slab_moved" | "slab_behind_failed" => format!("objects of slab cache {}", number(event, "cache")),
        "start" | "forked" => "process".to_owned(),
        _ => "reclaim".to_owned(),
    }
}

fn number(event: &Recorded, name: &str) -> u64 {
    event.numbers.iter().find(|(found, _)| *found == name).map_or(0, |(_, number)| *number)
}

fn microseconds(nanoseconds: u64) -> Value {
    json!(nanoseconds as f64 / 1000.0)
}

/// Returns a number that an event has. Addresses are hexadecimal, and so are numbers that a reader could round.
fn argument(name: &str, number: u64) -> Value {
    if name == "addr" || number > MAX_EXACT_INTEGER { json!(format!("{number:#x}")) } else { json!(number) }
}

/// Writes events of several processes as one JSON object. Each event has the id and the name of its process.
pub fn trace_json<'event>(events: impl Iterator<Item = (u32, &'event str, &'event Recorded)>) -> String {
    let (mut rows, mut names) = (Vec::new(), BTreeSet::new());
    let mut tracks: BTreeMap<(u32, String), usize> = BTreeMap::new();
    let mut returned: BTreeMap<u32, u64> = BTreeMap::new();
    for (pid, process, event) in events {
        if names.insert(pid) {
            rows.push(json!({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}));
        }
        let (track, next) = (track_of(event), tracks.len() + 1);
        let tid = *tracks.entry((pid, track.clone())).or_insert_with(|| {
            rows.push(json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": next, "args": {"name": track}}));
            next
        });
        let arguments: Map<String, Value> =
            event.numbers.iter().map(|(name, number)| ((*name).to_owned(), argument(name, *number))).collect();
        let mut row = json!({
            "name": event.event, "cat": "pagemill", "pid": pid, "tid": tid, "ts": microseconds(event.time_ns),
            "args": arguments,
        });
        // The drop of a file is recorded when it ends. All other events have no duration.
        if event.event == "slow_drop" {
            let duration_ns = number(event, "waited_us").saturating_mul(1000).min(event.time_ns);
            row["ph"] = json!("X");
            row["ts"] = microseconds(event.time_ns - duration_ns);
            row["dur"] = microseconds(duration_ns);
        } else {
            row["ph"] = json!("i");
            row["s"] = json!("t");
        }
        rows.push(row);
        let mut count = |name: String, value: u64| {
            rows.push(json!({
                "ph": "C", "name": name, "pid": pid, "tid": 0, "ts": microseconds(event.time_ns), "args": {"value": value},
            }));
        };
        let has = |name: &str| event.numbers.iter().any(|(found, _)| *found == name);
        if has("resident_bytes") {
            count("resident_bytes".to_owned(), number(event, "resident_bytes"));
        }
        if has("freed_bytes") {
            let sum = returned.entry(pid).or_default();
            *sum = sum.saturating_add(number(event, "freed_bytes"));
            count("returned_bytes".to_owned(), *sum);
        }
        if event.event == "folio_made" {
            count(format!("order of new folios of cache {}", number(event, "cache")), number(event, "order"));
        }
    }
    format!("{}\n", json!({"displayTimeUnit": "ms", "traceEvents": rows}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &'static str, time_ns: u64, numbers: &[(&'static str, u64)]) -> Recorded {
        Recorded { sequence: 1, time_ns, event: name, numbers: numbers.to_vec() }
    }

    /// Each row must have the fields that its kind requires. Two processes must have tracks of their own. A drop must
    /// begin before its event, and returned bytes must be summed up.
    #[test]
    fn rows_have_the_fields_of_their_kind() {
        let events = [
            event("folio_made", 2_000, &[("page_index", 0), ("file", 1), ("order", 9), ("cache", 3)]),
            event("given_for_limit", 3_500, &[("wanted_bytes", 5), ("freed_bytes", 7)]),
            event("given_for_age", 4_000, &[("wanted_bytes", 5), ("freed_bytes", 1)]),
            event("slow_drop", 9_000_000, &[("waited_us", 8_000), ("dirty_bytes", 1)]),
            event("range_purged", 9_000_001, &[("addr", 0x7f00_0000_0000), ("purged_bytes", u64::MAX)]),
            event("block_huge", 9_000_002, &[("block", 1), ("resident_bytes", 1 << 21)]),
        ];
        let of_first = events.iter().map(|event| (7, "one", event));
        let text = trace_json(of_first.chain([(8, "two \"2\"", &events[0])]));
        let value: Value = serde_json::from_str(&text).unwrap();
        let rows = value["traceEvents"].as_array().unwrap();
        for row in rows {
            assert!(row["name"].is_string() && row["pid"].is_u64() && row["tid"].is_u64() && row["args"].is_object());
            let needed: &[&str] = match row["ph"].as_str().unwrap() {
                "M" => &[],
                "C" => &["ts"],
                "i" => &["ts", "s", "cat"],
                "X" => &["ts", "dur", "cat"],
                other => panic!("{other}"),
            };
            assert!(needed.iter().all(|name| !row[name].is_null()), "{row}");
        }
        let named = |name: &str| rows.iter().filter(|row| row["name"] == name).collect::<Vec<_>>();
        assert_eq!(named("process_name")[1]["args"]["name"], "two \"2\"");
        let [first, second] = named("folio_made")[..] else { panic!("two folios") };
        assert!(first["tid"] != second["tid"] && first["ts"] == 2.0);
        assert_eq!(named("returned_bytes").last().unwrap()["args"]["value"], 8);
        assert_eq!((&named("slow_drop")[0]["ts"], &named("slow_drop")[0]["dur"]), (&json!(1000.0), &json!(8000.0)));
        assert_eq!(named("range_purged")[0]["args"]["addr"], "0x7f0000000000");
        assert_eq!(named("order of new folios of cache 3").len(), 2);
        assert_eq!(trace_json(std::iter::empty()), "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[]}\n");
    }
}
