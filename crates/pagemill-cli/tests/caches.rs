//! `pagemill meminfo` and `trace` of a program with page caches. Each cache must be shown by its name, and all sums
//! must be correct.

mod common;

use common::holder::ObservedProgram;
use common::{PAGEMILL, TIMEOUT, TestFolder, finish, walk};
use pagemill_cache::{Always, Never, PageCache, Usage};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::MemoryStore;
use pagemill_testbed::Testbed;
use serde_json::Value;
use std::io::Write;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

const SUMMED_COLUMNS: [&str; 6] = ["huge", "small", "pinned", "free", "frames", "index"];

/// The tests run this test binary as a child with this variable set. In the child, the test `program` is the program
/// that the tests observe.
const PROGRAM_VARIABLE: &str = "CACHES_TEST_PROGRAM";

/// Prints the process id and, for each cache, the usage that the library reports to this program: the memory by kind,
/// the charged bytes, and the dirty bytes. Then waits for a line of input.
fn print_usage_and_wait(caches: &[&PageCache]) {
    let parts = |Usage { huge, small, pinned, free, frames, index, charged, dirty, .. }: Usage| {
        [huge, small, pinned, free, frames, index, charged, dirty].map(|bytes| bytes.to_string()).join(" ")
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
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        return;
    }
    let caches = Testbed::of_process().unwrap().caches;
    caches.collapse_by_hand();
    let tiles = PageCache::builder("tiles").limit(64 * MIB).build_in(caches).unwrap();
    let page = PageSize::new(64 << 10).unwrap();
    let rows = PageCache::builder("rows of \u{1b} tables").limit(32 * MIB).page(page).build_in(caches).unwrap();
    let (large, little) = (tiles.create().unwrap(), tiles.create().unwrap());
    let table = rows.open(Arc::new(MemoryStore::new(Vec::new(), page.bytes()))).unwrap();
    large.write_at(&vec![1; 2 * BLOCK_BYTES], 0).unwrap();
    little.write_at(&vec![2; page.bytes()], 0).unwrap();
    table.write_at(&vec![3; 16 * page.bytes()], 0).unwrap();
    let pin = table.pin(0).unwrap();
    print_usage_and_wait(&[&tiles, &rows]);
    drop((large, pin));
    table.sync().unwrap();
    print_usage_and_wait(&[&tiles, &rows]);
    drop((little, tiles));
    print_usage_and_wait(&[&rows]);
}

/// Creates a file of two blocks in each of two caches before each step. The policy of the first cache chooses huge
/// folios, that of the second small ones.
#[test]
#[ignore = "a program for other tests"]
fn growing_program() {
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        return;
    }
    let caches = Testbed::of_process().unwrap().caches;
    caches.collapse_by_hand();
    let huge = PageCache::builder("huge").limit(64 * MIB).policy(Always).build_in(caches).unwrap();
    let small = PageCache::builder("small").limit(64 * MIB).policy(Never).build_in(caches).unwrap();
    let mut files = Vec::new();
    for _ in 0..4 {
        for cache in [&huge, &small] {
            let file = cache.create().unwrap();
            file.write_at(&vec![1; 2 * BLOCK_BYTES], 0).unwrap();
            files.push(file);
        }
        print_usage_and_wait(&[&huge, &small]);
    }
}

fn as_program(mut command: Command, program: &str) -> Command {
    command.args(["--exact", program, "--ignored", "--nocapture", "--test-threads=1"]).env(PROGRAM_VARIABLE, "1");
    command
}

fn start(place: &TestFolder) -> ObservedProgram {
    ObservedProgram::start(as_program(place.command(std::env::current_exe().unwrap()), "program"))
}

fn command_output(place: &TestFolder, holder: &ObservedProgram, command: &str, options: &[&str]) -> String {
    let mut command_line = place.command(PAGEMILL);
    command_line.arg(command).arg(holder.pid().to_string()).args(options);
    let end = finish(command_line, TIMEOUT);
    end.assert_success();
    let left: Vec<_> =
        walk(&place.path("runtime")).into_iter().filter(|path| path.to_string_lossy().contains(".caches-")).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
    end.out
}

fn meminfo(place: &TestFolder, holder: &ObservedProgram) -> Value {
    serde_json::from_str(&command_output(place, holder, "meminfo", &["--json", "--all"])).unwrap()
}

/// Runs `meminfo` until the program answers its request. A busy machine may delay the answer.
fn meminfo_until_answered(place: &TestFolder, holder: &ObservedProgram) -> Value {
    let begun = Instant::now();
    loop {
        let info = meminfo(place, holder);
        if !info["caches"].is_null() || begun.elapsed() > TIMEOUT {
            return info;
        }
    }
}

fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// Checks that the rows of the caches add up to the published counters of the process, by NUMA node and in total.
fn assert_cache_rows_add_up(info: &Value) {
    let rows = info["caches"].as_array().unwrap();
    let sum = |names: &[&str]| -> u64 { rows.iter().flat_map(|row| names.iter().map(|name| number(row, name))).sum() };
    assert_eq!(sum(&["huge", "small", "pinned", "free"]), number(info, "cache"), "{info}");
    assert_eq!(sum(&["huge", "small", "pinned"]), number(info, "cache_huge") + number(info, "cache_small"), "{info}");
    assert_eq!((sum(&["frames"]), sum(&["index"])), (number(info, "cache_frames"), number(info, "cache_index")));
    assert!(sum(&["free"]) >= number(info, "cache_free"), "the counter has whole blocks only");
    let nodes: Vec<&Value> = info["cache_nodes"].as_object().unwrap().values().collect();
    let spare = rows.last().unwrap();
    assert_eq!(spare["holder"], "spare_nodes");
    for name in SUMMED_COLUMNS {
        let of_nodes: u64 = nodes.iter().map(|node| number(node, name)).sum();
        assert_eq!(of_nodes + number(spare, name), sum(&[name]), "{name}");
    }
}

/// Checks that `meminfo` shows the usage that the program printed for each cache.
fn assert_shows_printed_usage(info: &Value, names: &[&str], printed: &[u64]) {
    let rows = info["caches"].as_array().unwrap();
    for (name, printed) in names.iter().zip(printed.chunks_exact(SUMMED_COLUMNS.len() + 2)) {
        let row = rows.iter().find(|row| row["name"] == *name).unwrap_or_else(|| panic!("no {name}: {info}"));
        let shown: Vec<u64> =
            SUMMED_COLUMNS.iter().chain(&["charged", "dirty"]).map(|part| number(row, part)).collect();
        assert_eq!(shown, printed, "{row}");
    }
    assert_eq!(rows.iter().filter(|row| row["holder"] == "cache").count(), names.len());
}

/// The caches of a program must be shown by name. After a file or a cache is dropped, its bytes must move to other
/// rows, and the sums must stay correct.
#[test]
fn caches_are_shown_by_name() {
    const NAMES: [&str; 2] = ["tiles", "rows of ? tables"];
    let place = TestFolder::new();
    let mut holder = start(&place);
    let info = meminfo_until_answered(&place, &holder);
    assert_cache_rows_add_up(&info);
    assert_shows_printed_usage(&info, &NAMES, &holder.numbers[1..]);
    let (tiles, rows) = (&info["caches"][0], &info["caches"][1]);
    assert_eq!((number(tiles, "huge"), number(tiles, "small")), (2 * BLOCK_BYTES as u64, 64 * KIB));
    assert_eq!((number(tiles, "limit"), number(rows, "page")), (64 * MIB, 64 * KIB));
    assert_eq!((number(tiles, "dirty"), number(rows, "dirty"), number(&info, "cache_dirty")), (0, MIB, MIB));
    assert_eq!((number(rows, "pinned"), number(rows, "small")), (64 * KIB, 15 * 64 * KIB));
    let text = command_output(&place, &holder, "meminfo", &[]);
    let line = text.lines().find(|line| line.contains("rows of ? tables")).unwrap();
    assert!(line.contains("960 KiB    64 KiB") && line.ends_with("1 MiB    32 MiB    64 KiB"), "{line}");
    assert!(text.contains("all on node 0") && !text.contains("as of the last measurement\n  cache_index"), "{text}");

    holder.run_next_step();
    let after = meminfo_until_answered(&place, &holder);
    assert_cache_rows_add_up(&after);
    assert_shows_printed_usage(&after, &NAMES, &holder.numbers[1..]);
    let (tiles_after, rows_after) = (&after["caches"][0], &after["caches"][1]);
    assert_eq!(number(tiles_after, "huge"), 0);
    assert_eq!(number(tiles_after, "free"), number(tiles, "free") + number(tiles, "huge"), "the folios are free now");
    assert_eq!((number(rows_after, "pinned"), number(rows_after, "small")), (0, MIB));

    holder.run_next_step();
    let last = meminfo_until_answered(&place, &holder);
    assert_cache_rows_add_up(&last);
    assert_shows_printed_usage(&last, &NAMES[1..], &holder.numbers[1..]);
    let idle = &last["caches"][0];
    assert_eq!(
        (&idle["holder"], number(idle, "free")),
        (&"idle".into(), 3 * BLOCK_BYTES as u64),
        "the memory is kept for another cache"
    );
    assert!(command_output(&place, &holder, "meminfo", &[]).contains("(no cache)"));
    holder.end();
    place.assert_no_files_left();
}

/// A program that uses the crate and also has the preload library contains two Pagemill instances. The shown statistics
/// must be the sum of the statistics of both instances.
#[test]
fn caches_of_a_preloaded_program_are_shown() {
    let place = TestFolder::new();
    let holder =
        ObservedProgram::start(as_program(place.pagemill_run(&[], std::env::current_exe().unwrap()), "program"));
    let info = meminfo_until_answered(&place, &holder);
    assert_cache_rows_add_up(&info);
    assert_shows_printed_usage(&info, &["tiles", "rows of ? tables"], &holder.numbers[1..]);
    assert!(number(&info, "small") + number(&info, "heap") > 0, "the memory of the preload library");
    holder.end();
}

/// A stopped process does not answer. `meminfo` must then show the published sums of its caches, and the reason why it
/// does not show single caches.
#[test]
fn a_stopped_process_is_shown_with_published_sums() {
    let place = TestFolder::new();
    let holder = start(&place);
    holder.stop();
    let info = meminfo(&place, &holder);
    assert!(info["caches"].is_null() && info["caches_unknown"].as_str().unwrap().contains("within 2 s"), "{info}");
    assert_eq!(number(&info, "cache_huge"), 2 * BLOCK_BYTES as u64);
    assert!(
        command_output(&place, &holder, "meminfo", &[]).contains("not known, only the sums above: it does not answer")
    );
    holder.continue_process();
    assert_cache_rows_add_up(&meminfo_until_answered(&place, &holder));
    holder.end();
}

/// `drop-caches pages` must evict the clean pages of a file with a store, return their memory, and keep the pages of
/// files in memory only. `slabs` must drop no pages.
#[test]
fn clean_pages_are_dropped_on_request() {
    let place = TestFolder::new();
    let mut holder = start(&place);
    holder.run_next_step();
    let dropped = |which: &str| -> Value {
        serde_json::from_str(&command_output(&place, &holder, "drop-caches", &[which, "--json"])).unwrap()
    };
    let held = || {
        let info = meminfo_until_answered(&place, &holder);
        [0, 1].map(|cache| ["huge", "small", "pinned"].map(|kind| number(&info["caches"][cache], kind)))
    };
    let before = held();
    assert_eq!(before[1].iter().sum::<u64>(), MIB);
    assert_eq!(number(&dropped("slabs"), "pages"), 0);
    assert_eq!(held(), before);
    let pages = dropped("pages");
    assert!(number(&pages, "pages") >= BLOCK_BYTES as u64 && number(&pages, "slabs") == 0, "{pages}");
    assert_eq!(held(), [before[0], [0; 3]]);
    assert!(command_output(&place, &holder, "drop-caches", &[]).contains(" of pages and "));
    let mut command = place.command(PAGEMILL);
    command.args(["drop-caches", "1073741824"]);
    let none = finish(command, TIMEOUT);
    assert!(none.code() == 2 && none.err.contains("there is no process"), "{}", none.err);
    holder.end();
}

/// `huge PID` must change the folios that a running program gets from then on: none huge after `never`, all huge after
/// `always`, and those that the policies choose after `auto`. Folios in use must stay. After `never`, the kernel must
/// not make huge pages in the arena on its own (flag `nh`).
#[test]
fn huge_pages_of_a_running_program_are_switched() {
    let place = TestFolder::new();
    let command = as_program(place.command(std::env::current_exe().unwrap()), "growing_program");
    let mut holder = ObservedProgram::start(command);
    let switch = |holder: &ObservedProgram, when: &str| -> Value {
        serde_json::from_str(&command_output(&place, holder, "huge", &[when, "--json"])).unwrap()
    };
    let settings = |answer: &Value| [&answer["before"], &answer["huge"]].map(|name| name.as_str().unwrap().to_owned());
    // The usage of each cache has eight numbers; the first two are its huge and small bytes in use.
    let held = |holder: &ObservedProgram| [1, 9].map(|at| [holder.numbers[at], holder.numbers[at + 1]]);
    let block = BLOCK_BYTES as u64;
    assert_eq!(held(&holder), [[2 * block, 0], [0, 2 * block]]);
    assert!(command_output(&place, &holder, "huge", &[]).ends_with(": huge pages: auto\n"));
    assert!(!arena_has_flag(holder.pid(), "nh"));

    assert_eq!(settings(&switch(&holder, "never")), ["auto", "never"]);
    assert!(arena_has_flag(holder.pid(), "nh"));
    holder.run_next_step();
    assert_eq!(held(&holder), [[2 * block, 2 * block], [0, 4 * block]]);

    assert_eq!(settings(&switch(&holder, "always")), ["never", "always"]);
    holder.run_next_step();
    assert_eq!(held(&holder), [[4 * block, 2 * block], [2 * block, 4 * block]]);

    assert_eq!(settings(&switch(&holder, "auto")), ["always", "auto"]);
    holder.run_next_step();
    assert_eq!(held(&holder), [[6 * block, 2 * block], [2 * block, 6 * block]]);
    assert!(command_output(&place, &holder, "huge", &[]).ends_with(": huge pages: auto\n"));
    let mut command = place.command(PAGEMILL);
    command.arg("huge").arg(holder.pid().to_string()).arg("within_size");
    let refused = finish(command, TIMEOUT);
    assert!(refused.code() == 2 && refused.err.contains("a process has auto, always and never"), "{}", refused.err);
    holder.end();
}

/// Returns whether a mapping of the process of at least 1 TiB has this flag.
fn arena_has_flag(pid: u32, flag: &str) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut is_large = false;
    text.lines().any(|line| {
        if let Some(size) = line.strip_prefix("Size:") {
            is_large = size.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >= 1 << 30;
        }
        let flags = line.strip_prefix("VmFlags:").unwrap_or_default();
        is_large && flags.split_whitespace().any(|word| word == flag)
    })
}

/// The trace of a program has events of folios. Each such event must have the numbers of its file and its cache. The
/// events of the first file must show two huge folios.
#[test]
fn the_trace_has_file_and_cache_numbers() {
    let place = TestFolder::new();
    let holder = start(&place);
    let text = command_output(&place, &holder, "trace", &["--json"]);
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let made: Vec<_> = events.iter().filter(|event| event["event"] == "folio_made").collect();
    let pages = BLOCK_BYTES as u64 / PageSize::os().bytes() as u64;
    let numbers_of = |event: &Value| ["page_index", "file", "order", "cache"].map(|name| number(event, name));
    let order = u64::from(pages.trailing_zeros());
    assert_eq!(
        made.iter().map(|event| numbers_of(event)).collect::<Vec<_>>(),
        [[0, 0, order, 0], [pages, 0, order, 0]]
    );
    assert!(command_output(&place, &holder, "trace", &[]).contains("page_index 0, file 0, order"));
    let file = place.path("trace.json");
    assert_eq!(command_output(&place, &holder, "trace", &["--perfetto", file.to_str().unwrap()]), "");
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let rows = trace["traceEvents"].as_array().unwrap();
    let orders = rows.iter().filter(|row| row["ph"] == "C" && row["name"] == "order of new folios of cache 0");
    assert_eq!(orders.map(|row| number(&row["args"], "value")).collect::<Vec<_>>(), [order; 2]);
    assert_eq!(rows.iter().filter(|row| row["name"] == "folio_made" && row["ph"] == "i").count(), 2);
    holder.end();
}
