//! `pagemill meminfo` and `trace` of a program with caches: each cache is shown by its name, and all sums are correct.

mod common;

use common::holder::Holder;
use common::{PAGEMILL, Place, STUCK_AFTER, finish, walk};
use pagemill::Pagemill;
use pagemill::mapping::{Cache, Settings, Usage};
use pagemill::store::MemoryStore;
use pagemill::units::{BLOCK_BYTES, PageSize};
use serde_json::Value;
use std::io::Write;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

const PARTS: [&str; 6] = ["huge", "small", "locked", "free", "frames", "index"];

/// The program of these tests is this test binary, started with this variable set.
const BE_PROGRAM: &str = "CACHES_TEST_PROGRAM";

/// Prints its process id and the usage of its caches, as it reads them itself: the parts of each, the charge, and the
/// dirty bytes.
fn say(caches: &[&Cache]) {
    let parts = |Usage { huge, small, locked, free, frames, index, charged, dirty, .. }: Usage| {
        [huge, small, locked, free, frames, index, charged, dirty].map(|bytes| bytes.to_string()).join(" ")
    };
    let usage: Vec<String> = caches.iter().map(|cache| parts(cache.usage())).collect();
    // Bypasses the test harness, which captures the output of tests.
    let line = format!("\n{} {}\n", std::process::id(), usage.join(" "));
    std::io::stdout().write_all(line.as_bytes()).unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    if std::env::var_os(BE_PROGRAM).is_none() {
        return;
    }
    let caches = Pagemill::of_process().unwrap().caches;
    caches.collapse_by_hand();
    let tiles = caches.make(Settings::new("tiles", 64 * MIB)).unwrap();
    let page = PageSize::new(64 << 10).unwrap();
    let rows = caches.make(Settings { page, ..Settings::new("rows of \u{1b} tables", 32 * MIB) }).unwrap();
    let (large, little) = (tiles.create().unwrap(), tiles.create().unwrap());
    let table = rows.open(Arc::new(MemoryStore::new(Vec::new(), page.bytes()))).unwrap();
    large.write_at(&vec![1; 2 * BLOCK_BYTES], 0).unwrap();
    little.write_at(&vec![2; page.bytes()], 0).unwrap();
    table.write_at(&vec![3; 16 * page.bytes()], 0).unwrap();
    let pin = table.pin(0).unwrap();
    say(&[&tiles, &rows]);
    drop((large, pin));
    say(&[&tiles, &rows]);
    drop((little, tiles));
    say(&[&rows]);
}

fn as_program(mut command: Command) -> Command {
    command.args(["--exact", "program", "--ignored", "--nocapture", "--test-threads=1"]).env(BE_PROGRAM, "1");
    command
}

fn start(place: &Place) -> Holder {
    Holder::start(as_program(place.command(std::env::current_exe().unwrap())))
}

fn look(place: &Place, holder: &Holder, command: &str, options: &[&str]) -> String {
    let mut look = place.command(PAGEMILL);
    look.arg(command).arg(holder.pid().to_string()).args(options);
    let end = finish(look, STUCK_AFTER);
    end.assert_success();
    let left: Vec<_> =
        walk(&place.path("runtime")).into_iter().filter(|path| path.to_string_lossy().contains(".caches-")).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
    end.out
}

fn meminfo(place: &Place, holder: &Holder) -> Value {
    serde_json::from_str(&look(place, holder, "meminfo", &["--json", "--all"])).unwrap()
}

/// Waits until the program answers, since a busy machine may delay it.
fn answered(place: &Place, holder: &Holder) -> Value {
    let begun = Instant::now();
    loop {
        let info = meminfo(place, holder);
        if !info["caches"].is_null() || begun.elapsed() > STUCK_AFTER {
            return info;
        }
    }
}

fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// Checks that the rows add up to the published sums of the process, by node and in all.
fn assert_adds_up(info: &Value) {
    let rows = info["caches"].as_array().unwrap();
    let sum = |names: &[&str]| -> u64 { rows.iter().flat_map(|row| names.iter().map(|name| number(row, name))).sum() };
    assert_eq!(sum(&["huge", "small", "locked", "free"]), number(info, "cache"), "{info}");
    assert_eq!(sum(&["huge", "small", "locked"]), number(info, "cache_huge") + number(info, "cache_small"), "{info}");
    assert_eq!((sum(&["frames"]), sum(&["index"])), (number(info, "cache_frames"), number(info, "cache_index")));
    assert!(sum(&["free"]) >= number(info, "cache_free"), "whole blocks only");
    let nodes: Vec<&Value> = info["cache_nodes"].as_object().unwrap().values().collect();
    let spare = rows.last().unwrap();
    assert_eq!(spare["holder"], "spare_nodes");
    for name in PARTS {
        let of_nodes: u64 = nodes.iter().map(|node| number(node, name)).sum();
        assert_eq!(of_nodes + number(spare, name), sum(&[name]), "{name}");
    }
}

/// Checks that the usage shown for each cache is what the program read itself.
fn assert_as_said(info: &Value, names: &[&str], said: &[u64]) {
    let rows = info["caches"].as_array().unwrap();
    for (name, said) in names.iter().zip(said.chunks_exact(PARTS.len() + 2)) {
        let row = rows.iter().find(|row| row["name"] == *name).unwrap_or_else(|| panic!("no {name}: {info}"));
        let shown: Vec<u64> = PARTS.iter().chain(&["charged", "dirty"]).map(|part| number(row, part)).collect();
        assert_eq!(shown, said, "{row}");
    }
    assert_eq!(rows.iter().filter(|row| row["holder"] == "cache").count(), names.len());
}

/// The caches of a program are shown by their names. After a drop, bytes move from row to row, and the sums are correct
/// each time.
#[test]
fn caches_are_shown_by_their_names() {
    const NAMES: [&str; 2] = ["tiles", "rows of ? tables"];
    let place = Place::new();
    let mut holder = start(&place);
    let info = answered(&place, &holder);
    assert_adds_up(&info);
    assert_as_said(&info, &NAMES, &holder.numbers[1..]);
    let (tiles, rows) = (&info["caches"][0], &info["caches"][1]);
    assert_eq!((number(tiles, "huge"), number(tiles, "small")), (2 * BLOCK_BYTES as u64, 64 * KIB));
    assert_eq!((number(tiles, "limit"), number(rows, "page")), (64 * MIB, 64 * KIB));
    assert_eq!((number(tiles, "dirty"), number(rows, "dirty"), number(&info, "cache_dirty")), (0, MIB, MIB));
    assert_eq!((number(rows, "locked"), number(rows, "small")), (64 * KIB, 15 * 64 * KIB));
    let text = look(&place, &holder, "meminfo", &[]);
    let line = text.lines().find(|line| line.contains("rows of ? tables")).unwrap();
    assert!(line.contains("960 KiB    64 KiB") && line.ends_with("1 MiB    32 MiB    64 KiB"), "{line}");
    assert!(text.contains("all on node 0") && !text.contains("as of the last measurement\n  cache_index"), "{text}");

    holder.next();
    let after = answered(&place, &holder);
    assert_adds_up(&after);
    assert_as_said(&after, &NAMES, &holder.numbers[1..]);
    let (tiles_after, rows_after) = (&after["caches"][0], &after["caches"][1]);
    assert_eq!(number(tiles_after, "huge"), 0);
    assert_eq!(number(tiles_after, "free"), number(tiles, "free") + number(tiles, "huge"), "free now");
    assert_eq!((number(rows_after, "locked"), number(rows_after, "small")), (0, MIB));

    holder.next();
    let last = answered(&place, &holder);
    assert_adds_up(&last);
    assert_as_said(&last, &NAMES[1..], &holder.numbers[1..]);
    let idle = &last["caches"][0];
    assert_eq!((&idle["holder"], number(idle, "free")), (&"idle".into(), 3 * BLOCK_BYTES as u64), "kept for the next");
    assert!(look(&place, &holder, "meminfo", &[]).contains("(no cache)"));
    holder.end();
    place.assert_swept();
}

/// A program that also has the preload has two Pagemills; its figures are the sum of both.
#[test]
fn caches_of_a_preloaded_program_are_shown() {
    let place = Place::new();
    let holder = Holder::start(as_program(place.pagemill_run(&[], std::env::current_exe().unwrap())));
    let info = answered(&place, &holder);
    assert_adds_up(&info);
    assert_as_said(&info, &["tiles", "rows of ? tables"], &holder.numbers[1..]);
    assert!(number(&info, "small") + number(&info, "heap") > 0, "the preload's");
    holder.end();
}

/// A program that does not answer is shown with the sums that it published, and with the reason why there is no more.
#[test]
fn a_silent_process_is_shown_with_sums() {
    let place = Place::new();
    let holder = start(&place);
    holder.stop();
    let info = meminfo(&place, &holder);
    assert!(info["caches"].is_null() && info["caches_unknown"].as_str().unwrap().contains("within 2 s"), "{info}");
    assert_eq!(number(&info, "cache_huge"), 2 * BLOCK_BYTES as u64);
    assert!(look(&place, &holder, "meminfo", &[]).contains("not known, only the sums above: it does not answer"));
    holder.go_on();
    assert_adds_up(&answered(&place, &holder));
    holder.end();
}

/// Events of folios name their file and cache: the first file of the first cache has two huge folios.
#[test]
fn the_trace_names_file_and_cache() {
    let place = Place::new();
    let holder = start(&place);
    let text = look(&place, &holder, "trace", &["--json"]);
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let made: Vec<_> = events.iter().filter(|event| event["event"] == "folio_made").collect();
    let pages = BLOCK_BYTES as u64 / PageSize::os().bytes() as u64;
    let told = |event: &Value| ["page_index", "file", "order", "cache"].map(|name| number(event, name));
    let order = u64::from(pages.trailing_zeros());
    assert_eq!(made.iter().map(|event| told(event)).collect::<Vec<_>>(), [[0, 0, order, 0], [pages, 0, order, 0]]);
    assert!(look(&place, &holder, "trace", &[]).contains("page_index 0, file 0, order"));
    holder.end();
}
