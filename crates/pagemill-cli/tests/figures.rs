//! Figures are accurate when they are read: `trim` returns as much as `meminfo` shows as giveable, also by the kernel's
//! count, for all kinds of memory. Also tests which users may read the figures.
#![allow(unsafe_code)] // marks memory

mod common;

use common::holder::Holder;
use common::{PAGEMILL, Place, STUCK_AFTER, finish, is_root, lacks, shell};
use pagemill::Pagemill;
use pagemill::mapping;
use pagemill::slab;
use pagemill::volatile::vrange::{How, Mode};
use pagemill::volatile::{Behaviour, VolatileCache};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// Tolerance for metadata, stacks, and memory that a command itself makes a process touch.
const SLACK: u64 = 2 * MIB;

/// The program of these tests is this test binary, started with this variable set to the kind of memory that it holds.
const BE_PROGRAM: &str = "FIGURES_TEST_PROGRAM";

/// The amount that it holds.
const HELD: u64 = 96 * MIB;

fn say() {
    // Bypasses the test harness, which captures the output of tests.
    std::io::stdout().write_all(format!("\n{}\n", std::process::id()).as_bytes()).unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn hold_ranges(len: usize) {
    let ranges = Pagemill::of_process().unwrap().ranges;
    let make = || {
        let mut range = ranges.allocate(len, Behaviour::Full).unwrap();
        // Half of each range is never touched.
        range.bytes_mut().unwrap()[..len / 2].fill(7);
        range.mark().unwrap();
        range
    };
    let held: Vec<_> = (0..2 * HELD as usize / len).map(|_| make()).collect();
    say();
    drop(held);
    say();
}

fn hold_values() {
    let cache: VolatileCache<u64, Vec<u8>> = VolatileCache::new(Pagemill::of_process().unwrap().ranges);
    (0..HELD >> 16).for_each(|number| cache.insert(number, &vec![1; 64 << 10]).unwrap());
    say();
    drop(cache);
    say();
}

fn hold_marks() {
    let vranges = Pagemill::of_process().unwrap().vranges;
    let mut own = vec![0u8; 2 * HELD as usize + (2 << 20)];
    let from = own.as_ptr().align_offset(2 << 20);
    // A quarter is marked and not touched, and a quarter is touched and not marked.
    let (quarter, start) = (HELD as usize / 2, own[from..].as_ptr() as usize);
    own[from + quarter..from + 4 * quarter].fill(1);
    // SAFETY: the contents of these bytes do not matter, and they are not read again.
    unsafe { vranges.vrange(start, 3 * quarter, Mode::Volatile, How::Full) }.unwrap();
    say();
    // SAFETY: as above.
    unsafe { vranges.vrange(start, 3 * quarter, Mode::Nonvolatile, How::Full) }.unwrap();
    say();
    drop(own);
}

fn hold_files() {
    let caches = Pagemill::of_process().unwrap().caches;
    caches.collapse_by_hand();
    let cache = caches.make(mapping::Settings::new("files", 2 * HELD)).unwrap();
    let (kept, gone) = (cache.create().unwrap(), cache.create().unwrap());
    kept.write_at(&vec![1; 8 << 20], 0).unwrap();
    gone.write_at(&vec![2; HELD as usize], 0).unwrap();
    drop(gone);
    say();
}

fn hold_objects() {
    let slabs = Pagemill::of_process().unwrap().slabs;
    slabs.defrag_by_hand();
    let cache = slabs.fixed::<[u64; 64]>(slab::Settings::new("objects")).unwrap();
    let objects: Vec<_> = (0..HELD / 512).map(|number| cache.insert([number; 64]).unwrap()).collect();
    drop(objects);
    say();
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    match std::env::var(BE_PROGRAM).as_deref() {
        Ok("values") => hold_values(),
        Ok("marks") => hold_marks(),
        Ok("files") => hold_files(),
        Ok("objects") => hold_objects(),
        Ok(len) => hold_ranges(len.parse().unwrap()),
        Err(_) => {}
    }
}

fn program_of(mut command: Command, kind: &str) -> Command {
    command.args(["--exact", "program", "--ignored", "--nocapture", "--test-threads=1"]).env(BE_PROGRAM, kind);
    command
}

fn start(place: &Place, kind: &str) -> Holder {
    Holder::start(program_of(place.command(std::env::current_exe().unwrap()), kind))
}

fn pagemill(place: &Place, args: &[&str]) -> common::End {
    let mut command = place.command(PAGEMILL);
    command.args(args);
    finish(command, STUCK_AFTER)
}

fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

/// The output of `meminfo` once the process has measured itself; a busy machine may delay that. Checks that its rows
/// add up.
fn meminfo(place: &Place, pid: u32) -> Value {
    let begun = Instant::now();
    loop {
        let end = pagemill(place, &["meminfo", "--json", &pid.to_string()]);
        end.assert_success();
        let info: Value = serde_json::from_str(&end.out).unwrap();
        if !info["age"].is_null() && begun.elapsed() < STUCK_AFTER {
            continue;
        }
        let parts: u64 = ["heap", "small", "c_library", "cache"].iter().map(|name| number(&info, name)).sum();
        let foreign = info["marked_foreign"].as_u64().unwrap_or(0);
        assert_eq!(number(&info, "resident"), parts, "{info}");
        assert_eq!(number(&info, "net"), parts - (number(&info, "giveable") - foreign), "{info}");
        return info;
    }
}

fn trim(place: &Place, pid: u32) -> Value {
    let command = || {
        let mut command = place.command(PAGEMILL);
        command.args(["trim", "--json", &pid.to_string()]);
        command
    };
    let end = common::finish_answered(command);
    end.assert_success();
    serde_json::from_str(&end.out).unwrap()
}

/// Checks that at least `least` bytes are giveable, that a trim returns them, as the kernel sees it, and that little is
/// giveable afterwards.
#[track_caller]
fn assert_true(place: &Place, pid: u32, least: u64) {
    let info = meminfo(place, pid);
    let giveable = number(&info, "giveable");
    let near = |one: u64, other: u64| one.abs_diff(other) <= giveable / 10 + SLACK;
    assert!(giveable + SLACK >= least - least / 10, "{giveable} of {least}: {info}");
    let trimmed = trim(place, pid);
    let gone = number(&trimmed, "rss_before").saturating_sub(number(&trimmed, "rss_after"));
    assert!(near(number(&trimmed, "returned"), giveable), "{giveable} were giveable: {trimmed}");
    assert!(near(gone, giveable), "{giveable} were giveable: {trimmed}");
    let after = meminfo(place, pid);
    assert!(number(&after, "giveable") <= giveable / 10 + SLACK, "{after}");
}

fn pieces(place: &Place, len: u64, keep: u64) -> Option<Holder> {
    let program = place.compile("pieces.c", &[])?;
    let mut command = place.pagemill_run(&[], program);
    command.args([(HELD / MIB).to_string(), len.to_string(), keep.to_string()]).env("PAGEMILL_IDLE", "off");
    Some(Holder::start(command))
}

#[test]
fn free_small_pieces_are_giveable() {
    for len in [64, 4096, 16 << 10] {
        let place = Place::new();
        let Some(holder) = pieces(&place, len, 0) else { return };
        // The table of pieces stays.
        assert_true(&place, holder.pid(), HELD);
        holder.end();
    }
}

/// Also pieces between others in use, in huge pages: those pages are split.
#[test]
fn free_large_pieces_are_giveable() {
    for (len, keep) in [(64 << 10, 0), (64 << 10, 8), (1 << 20, 0), (8 << 20, 0)] {
        let place = Place::new();
        let Some(holder) = pieces(&place, len, keep) else { return };
        let kept = HELD.checked_div(keep).unwrap_or(0);
        assert_true(&place, holder.pid(), HELD - kept);
        holder.end();
    }
}

/// For ranges of all lengths, the touched part is giveable and the rest is not; the same holds after they are dropped.
#[test]
fn volatile_ranges_are_giveable() {
    for kind in ["65536", "1048576", "4194304", "values"] {
        let place = Place::new();
        let mut holder = start(&place, kind);
        assert_true(&place, holder.pid(), HELD);
        holder.next();
        assert!(number(&meminfo(&place, holder.pid()), "giveable") <= SLACK, "it has gone");
        drop(holder);
        let mut holder = start(&place, kind);
        holder.next();
        assert_true(&place, holder.pid(), HELD);
    }
}

/// For memory marked by address, the resident part is giveable; it does not count as Pagemill's memory.
#[test]
fn marked_memory_is_giveable() {
    let place = Place::new();
    let mut holder = start(&place, "marks");
    let info = meminfo(&place, holder.pid());
    assert_eq!(number(&info, "marked_foreign"), number(&info, "marked_giveable"), "{info}");
    assert_true(&place, holder.pid(), HELD);
    holder.next();
    assert!(number(&meminfo(&place, holder.pid()), "giveable") <= SLACK);
}

#[test]
fn free_blocks_of_files_are_giveable() {
    let place = Place::new();
    assert_true(&place, start(&place, "files").pid(), HELD);
}

#[test]
fn empty_slabs_are_giveable() {
    let place = Place::new();
    // Blocks that were not expected to be filled again were returned at once.
    assert_true(&place, start(&place, "objects").pid(), HELD / 2);
}

/// With a SIZE, about that much is returned. Wrong arguments are explained. Without a PID, and for a tree, there is a
/// line for each process.
#[test]
fn trim_takes_sizes_and_trees() {
    let place = Place::new();
    let Some(holder) = pieces(&place, 1 << 20, 0) else { return };
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
        (&[], "which process?"),
        (&["x"], "x is no process id"),
        (&["--all", "x"], "x"),
        (&["--all", "1M", "2M"], "too many"),
        (&["1073741824"], "no process 1073741824"),
        (&["--tree", "1073741824"], "no process 1073741824"),
    ];
    for (words, told) in wrong {
        let end = pagemill(&place, &[&["trim"], words].concat());
        assert!(end.code() == 2 && end.err.contains(told), "{words:?}: {}", end.err);
    }
    holder.end();
}

/// Zero rows are omitted unless requested; rows that add up stay.
#[test]
fn zero_rows_are_left_out() {
    let place = Place::new();
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

/// A stopped process is shown with its last figures and their age.
#[test]
fn old_figures_say_how_old_they_are() {
    let place = Place::new();
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
    holder.go_on();
    meminfo(&place, holder.pid());
}

/// Root reads the figures of other users' processes without making them do anything. Figures that a user forged for
/// another's process are not used.
#[test]
fn root_reads_the_processes_of_others() {
    const USER: &str = "65534";
    if !is_root() || lacks("setpriv") {
        println!("skipped: not root, or no setpriv");
        return;
    }
    let place = Place::new();
    let open = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    let (root, program) = (place.path("."), place.path("program"));
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    [&root, &program].into_iter().for_each(|path| open(path));
    let mut command = place.command("setpriv");
    command.args(["--reuid", USER, "--regid", USER, "--clear-groups"]).arg(&program).env_remove("XDG_RUNTIME_DIR");
    let holder = Holder::start(program_of(command, "65536"));
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
    // The program was killed, and root does not sweep the folders of other users.
    shell(&format!("rm -f {folder}/{pid}-*; rmdir {folder} 2>/dev/null"));
    assert_eq!(read, [(2, false), (2, false)]);
}
