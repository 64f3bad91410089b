//! The published statistics must be accurate. For all kinds of memory, `trim` must return as many bytes as `meminfo`
//! shows as giveable, also according to the kernel. Root must be able to read the statistics of other users' processes,
//! and must not use forged statistics.
#![allow(unsafe_code)] // marks memory

mod common;

use common::holder::ObservedProgram;
use common::{PAGEMILL, TIMEOUT, TestFolder, finish, is_missing, is_root, shell};
use pagemill_cache::mapping::PageCache;
use pagemill_slab as slab;
use pagemill_testbed::Testbed;
use pagemill_volatile::vrange::{How, Mode};
use pagemill_volatile::{Behaviour, VolatileCache};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// Tolerated difference of two values, for metadata, stacks, and memory that a process touches because of a command.
const TOLERANCE_BYTES: u64 = 2 * MIB;

/// The tests run this test binary as a child with this variable set to a kind of memory. In the child, the test
/// `program` allocates memory of that kind.
const PROGRAM_VARIABLE: &str = "FIGURES_TEST_PROGRAM";

/// Number of bytes that the observed program allocates.
const HELD_BYTES: u64 = 96 * MIB;

fn print_pid_and_wait() {
    // Bypasses the test harness, which captures the output of tests.
    std::io::stdout().write_all(format!("\n{}\n", std::process::id()).as_bytes()).unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn hold_ranges(len: usize) {
    let ranges = Testbed::of_process().unwrap().ranges;
    let make = || {
        let mut range = ranges.allocate(len, Behaviour::Full).unwrap();
        // Half of each range is never touched.
        range.bytes_mut().unwrap()[..len / 2].fill(7);
        range.mark().unwrap();
        range
    };
    let held: Vec<_> = (0..2 * HELD_BYTES as usize / len).map(|_| make()).collect();
    print_pid_and_wait();
    drop(held);
    print_pid_and_wait();
}

fn hold_values() {
    let cache: VolatileCache<u64, Vec<u8>> = VolatileCache::new_in(Testbed::of_process().unwrap().ranges);
    (0..HELD_BYTES >> 16).for_each(|number| cache.insert(number, &vec![1; 64 << 10]).unwrap());
    print_pid_and_wait();
    drop(cache);
    print_pid_and_wait();
}

fn hold_marks() {
    let vranges = Testbed::of_process().unwrap().vranges;
    let mut own = vec![0u8; 2 * HELD_BYTES as usize + (2 << 20)];
    let from = own.as_ptr().align_offset(2 << 20);
    // The memory has four quarters. The first is marked but not touched. The second and third are marked and touched.
    // The last is touched but not marked.
    let (quarter, start) = (HELD_BYTES as usize / 2, own[from..].as_ptr() as usize);
    own[from + quarter..from + 4 * quarter].fill(1);
    // SAFETY: the contents of these bytes do not matter, and they are not read again.
    unsafe { vranges.vrange(start, 3 * quarter, Mode::Volatile, How::Full) }.unwrap();
    print_pid_and_wait();
    // SAFETY: as above.
    unsafe { vranges.vrange(start, 3 * quarter, Mode::Nonvolatile, How::Full) }.unwrap();
    print_pid_and_wait();
    drop(own);
}

fn hold_files() {
    let caches = Testbed::of_process().unwrap().caches;
    caches.collapse_by_hand();
    let cache = PageCache::builder("files").limit(2 * HELD_BYTES).build_in(caches).unwrap();
    let (kept, gone) = (cache.create().unwrap(), cache.create().unwrap());
    kept.write_at(&vec![1; 8 << 20], 0).unwrap();
    gone.write_at(&vec![2; HELD_BYTES as usize], 0).unwrap();
    drop(gone);
    print_pid_and_wait();
}

fn hold_objects() {
    let slabs = Testbed::of_process().unwrap().slabs;
    slabs.defrag_by_hand();
    let cache = slabs.fixed::<[u64; 64]>(slab::Settings::new("objects")).unwrap();
    let objects: Vec<_> = (0..HELD_BYTES / 512).map(|number| cache.insert([number; 64]).unwrap()).collect();
    drop(objects);
    print_pid_and_wait();
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    match std::env::var(PROGRAM_VARIABLE).as_deref() {
        Ok("values") => hold_values(),
        Ok("marks") => hold_marks(),
        Ok("files") => hold_files(),
        Ok("objects") => hold_objects(),
        Ok(len) => hold_ranges(len.parse().unwrap()),
        Err(_) => {}
    }
}

fn as_program(mut command: Command, kind: &str) -> Command {
    command.args(["--exact", "program", "--ignored", "--nocapture", "--test-threads=1"]).env(PROGRAM_VARIABLE, kind);
    command
}

fn start(place: &TestFolder, kind: &str) -> ObservedProgram {
    ObservedProgram::start(as_program(place.command(std::env::current_exe().unwrap()), kind))
}

fn pagemill(place: &TestFolder, args: &[&str]) -> common::End {
    let mut command = place.command(PAGEMILL);
    command.args(args);
    finish(command, TIMEOUT)
}

fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// Returns the output of `meminfo` that has current values. On a busy machine it may take a while until the process has
/// measured itself. Checks that the rows add up.
fn meminfo(place: &TestFolder, pid: u32) -> Value {
    let begun = Instant::now();
    loop {
        let end = pagemill(place, &["meminfo", "--json", &pid.to_string()]);
        end.assert_success();
        let info: Value = serde_json::from_str(&end.out).unwrap();
        if !info["age"].is_null() && begun.elapsed() < TIMEOUT {
            continue;
        }
        let parts: u64 = ["heap", "small", "c_library", "cache"].iter().map(|name| number(&info, name)).sum();
        let foreign = info["marked_foreign"].as_u64().unwrap_or(0);
        assert_eq!(number(&info, "resident"), parts, "{info}");
        assert_eq!(number(&info, "net"), parts - (number(&info, "giveable") - foreign), "{info}");
        return info;
    }
}

fn trim(place: &TestFolder, pid: u32) -> Value {
    let command = || {
        let mut command = place.command(PAGEMILL);
        command.args(["trim", "--json", &pid.to_string()]);
        command
    };
    let end = common::finish_answered(command);
    end.assert_success();
    serde_json::from_str(&end.out).unwrap()
}

/// Checks that at least about `least` bytes are giveable, and that `trim` returns the giveable bytes, also according to
/// the kernel. Few bytes may be giveable afterwards.
#[track_caller]
fn assert_giveable_is_returned(place: &TestFolder, pid: u32, least: u64) {
    let info = meminfo(place, pid);
    let giveable = number(&info, "giveable");
    let near = |one: u64, other: u64| one.abs_diff(other) <= giveable / 10 + TOLERANCE_BYTES;
    assert!(giveable + TOLERANCE_BYTES >= least - least / 10, "{giveable} of {least}: {info}");
    let trimmed = trim(place, pid);
    let gone = number(&trimmed, "rss_before").saturating_sub(number(&trimmed, "rss_after"));
    assert!(near(number(&trimmed, "returned"), giveable), "{giveable} were giveable: {trimmed}");
    assert!(near(gone, giveable), "{giveable} were giveable: {trimmed}");
    let after = meminfo(place, pid);
    assert!(number(&after, "giveable") <= giveable / 10 + TOLERANCE_BYTES, "{after}");
}

fn start_pieces_program(place: &TestFolder, len: u64, keep: u64) -> Option<ObservedProgram> {
    let program = place.compile("pieces.c", &[])?;
    let mut command = place.pagemill_run(&[], program);
    command.args([(HELD_BYTES / MIB).to_string(), len.to_string(), keep.to_string()]).env("PAGEMILL_IDLE", "off");
    Some(ObservedProgram::start(command))
}

#[test]
fn free_small_allocations_are_giveable() {
    for len in [64, 4096, 16 << 10] {
        let place = TestFolder::new();
        let Some(holder) = start_pieces_program(&place, len, 0) else { return };
        // The program's table of allocations remains in use.
        assert_giveable_is_returned(&place, holder.pid(), HELD_BYTES);
        holder.end();
    }
}

/// Free memory between allocations in use must be giveable, even if the allocations are in the same huge page. The huge
/// page must then be split.
#[test]
fn free_large_allocations_are_giveable() {
    for (len, keep) in [(64 << 10, 0), (64 << 10, 8), (1 << 20, 0), (8 << 20, 0)] {
        let place = TestFolder::new();
        let Some(holder) = start_pieces_program(&place, len, keep) else { return };
        let kept = HELD_BYTES.checked_div(keep).unwrap_or(0);
        assert_giveable_is_returned(&place, holder.pid(), HELD_BYTES - kept);
        holder.end();
    }
}

/// Volatile ranges of several lengths are touched in part. The touched part must be giveable, and the rest must not.
/// The same must hold after the ranges are dropped.
#[test]
fn volatile_ranges_are_giveable() {
    for kind in ["65536", "1048576", "4194304", "values"] {
        let place = TestFolder::new();
        let mut holder = start(&place, kind);
        assert_giveable_is_returned(&place, holder.pid(), HELD_BYTES);
        holder.run_next_step();
        assert!(number(&meminfo(&place, holder.pid()), "giveable") <= TOLERANCE_BYTES, "the memory was returned");
        drop(holder);
        let mut holder = start(&place, kind);
        holder.run_next_step();
        assert_giveable_is_returned(&place, holder.pid(), HELD_BYTES);
    }
}

/// Memory that Pagemill did not allocate is marked by address. Its resident part must be giveable, but must not count
/// as Pagemill's memory.
#[test]
fn marked_memory_is_giveable() {
    let place = TestFolder::new();
    let mut holder = start(&place, "marks");
    let info = meminfo(&place, holder.pid());
    assert_eq!(number(&info, "marked_foreign"), number(&info, "marked_giveable"), "{info}");
    assert_giveable_is_returned(&place, holder.pid(), HELD_BYTES);
    holder.run_next_step();
    assert!(number(&meminfo(&place, holder.pid()), "giveable") <= TOLERANCE_BYTES);
}

#[test]
fn free_blocks_of_files_are_giveable() {
    let place = TestFolder::new();
    assert_giveable_is_returned(&place, start(&place, "files").pid(), HELD_BYTES);
}

#[test]
fn empty_slabs_are_giveable() {
    let place = TestFolder::new();
    // A slab cache returns its blocks at once if it does not expect to use them again. So less may be giveable.
    assert_giveable_is_returned(&place, start(&place, "objects").pid(), HELD_BYTES / 2);
}

/// With a SIZE, `trim` must return about that many bytes. Errors must explain wrong arguments. Without a PID, and for a
/// process tree, the commands must print a line for each process.
#[test]
fn trim_accepts_sizes_and_trees() {
    let place = TestFolder::new();
    let Some(holder) = start_pieces_program(&place, 1 << 20, 0) else { return };
    let pid = holder.pid().to_string();
    let end = pagemill(&place, &["trim", "--json", "--all", "32M"]);
    end.assert_success();
    let returned = number(&serde_json::from_str(&end.out).unwrap(), "returned");
    assert!((32 * MIB..40 * MIB).contains(&returned), "{returned}");
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let run = stat.rsplit_once(") ").unwrap().1.split(' ').nth(1).unwrap();
    for args in [&["meminfo", run][..], &["vmstat", run], &["meminfo"], &["vmstat"], &["trim", "--tree", run]] {
        let end = pagemill(&place, args);
        end.assert_success();
        let is_line = |line: &str| line.split_ascii_whitespace().next() == Some(&pid) && line.contains("pieces.c.out");
        assert!(end.out.lines().any(is_line), "{args:?}: {}", end.out);
    }
    let end = pagemill(&place, &["meminfo", "--json", run]);
    let tree: Value = serde_json::from_str(&end.out).unwrap();
    assert_eq!(
        (&tree["members"][0]["pid"], &tree["resident"]),
        (&holder.pid().into(), &tree["members"][0]["resident"])
    );
    for args in [&["trace", run][..], &["trace"]] {
        let end = pagemill(&place, args);
        end.assert_success();
        assert!(end.out.contains("given_for_program") && end.out.contains(&pid), "{}", end.out);
    }
    let wrong: [(&[&str], &str); 6] = [
        (&[], "no process is given"),
        (&["x"], "x is not a process id"),
        (&["--all", "x"], "x"),
        (&["--all", "1M", "2M"], "unexpected argument 2M"),
        (&["1073741824"], "no process 1073741824"),
        (&["--tree", "1073741824"], "no process 1073741824"),
    ];
    for (words, told) in wrong {
        let end = pagemill(&place, &[&["trim"], words].concat());
        assert!(end.code() == 2 && end.err.contains(told), "{words:?}: {}", end.err);
    }
    holder.end();
}

/// Rows with the value zero must be omitted unless `--all` is given. The rows that add up to resident memory must be
/// shown even if they are zero.
#[test]
fn zero_rows_are_left_out() {
    let place = TestFolder::new();
    let holder = start(&place, "objects");
    let pid = holder.pid().to_string();
    for command in ["meminfo", "vmstat"] {
        let few = pagemill(&place, &[command, &pid]).out.lines().count();
        let all = pagemill(&place, &[command, &pid, "--all"]).out.lines().count();
        assert!(few < all, "{command}: {few} of {all}");
    }
    let (few, all) = (meminfo(&place, holder.pid()), pagemill(&place, &["meminfo", "--json", "--all", &pid]).out);
    let all: Value = serde_json::from_str(&all).unwrap();
    assert_eq!((few.get("small_free"), number(&all, "small_free"), number(&few, "small")), (None, 0, 0));
}

/// For a stopped process, `meminfo` must show the last published values and their age.
#[test]
fn old_statistics_are_shown_with_their_age() {
    let place = TestFolder::new();
    let holder = start(&place, "65536");
    meminfo(&place, holder.pid());
    holder.stop();
    let end = pagemill(&place, &["meminfo", &holder.pid().to_string()]);
    end.assert_success();
    assert!(end.out.contains("(as of ") && end.out.contains(" ago: it does not answer"), "{}", end.out);
    let listed = pagemill(&place, &["meminfo"]).out;
    assert!(listed.lines().any(|line| line.contains(&holder.pid().to_string()) && line.contains("as of ")), "{listed}");
    let end = pagemill(&place, &["trim", &holder.pid().to_string()]);
    assert!(end.code() == 2 && end.err.contains("does not answer"), "{}", end.err);
    holder.continue_process();
    meminfo(&place, holder.pid());
}

/// Root must read the statistics of other users' processes without sending requests. If a user forges the published
/// file of another user's process, root must not use the forged file.
#[test]
fn root_reads_the_processes_of_others() {
    const USER: &str = "65534";
    if !is_root() || is_missing("setpriv") {
        println!("skipped: not root, or no setpriv");
        return;
    }
    let place = TestFolder::new();
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let program = place.install(std::env::current_exe().unwrap(), "program");
    let mut command = place.command("setpriv");
    command.args(["--reuid", USER, "--regid", USER, "--clear-groups"]).arg(&program).env_remove("XDG_RUNTIME_DIR");
    let holder = ObservedProgram::start(as_program(command, "65536"));
    let pid = holder.pid().to_string();
    for command in ["meminfo", "vmstat"] {
        let end = pagemill(&place, &[command, &pid]);
        end.assert_success();
        assert!(end.out.contains("another user's"), "{}", end.out);
        assert!(pagemill(&place, &[command]).out.contains(&format!("{pid} ")), "{command}");
    }
    assert!(pagemill(&place, &["trace", &pid]).out.contains("start"));
    let refused = pagemill(&place, &["trim", &pid]);
    assert!(refused.code() == 2 && refused.err.contains(&format!("setpriv --reuid={USER}")), "{}", refused.err);
    let own = pagemill_sys::process::own_identity();
    let folders =
        [format!("/run/user/{USER}/pagemill"), format!("/dev/shm/pagemill-{USER}"), format!("/tmp/pagemill-{USER}")];
    let folder =
        folders.iter().find(|folder| shell(&format!("ls {folder}/{pid}-* >/dev/null 2>&1")).success()).unwrap();
    let forged = format!("{folder}/{}-{}", own.pid, own.start_ticks);
    let forge = format!("cp {folder}/{pid}-* {forged} && chown {USER} {forged}");
    let link = format!("rm {forged}; ln -s {folder}/{pid}-* {forged} && chown -h {USER} {forged}");
    let read: Vec<_> = [forge, link]
        .iter()
        .map(|script| {
            assert!(shell(script).success());
            let one = pagemill(&place, &["meminfo", &own.pid.to_string()]);
            (one.code(), pagemill(&place, &["meminfo"]).out.contains(&format!(" {} ", own.pid)))
        })
        .collect();
    fs::remove_file(&forged).unwrap();
    drop(holder);
    // The killed program left its file behind. Root does not remove files from other users' folders, so the test does.
    shell(&format!("rm -f {folder}/{pid}-*; rmdir {folder} 2>/dev/null"));
    assert_eq!(read, [(2, false), (2, false)]);
}
