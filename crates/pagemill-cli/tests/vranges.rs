//! `pagemill vranges`: lists the volatile ranges of programs, with and without the preload library. It also reports
//! processes that do not answer.
#![allow(unsafe_code)] // marks memory of its own by address

mod common;

use common::holder::ObservedProgram;
use common::{End, Guard, PAGEMILL, TIMEOUT, TestFolder, finish, finish_answered, walk};
use pagemill_core::published;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::os_page_bytes;
use pagemill_sys::process::{self, Identity};
use pagemill_testbed::Testbed;
use pagemill_volatile::vrange::{How, Mode};
use pagemill_volatile::{Behaviour, VolatileBuf};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

fn vranges(place: &TestFolder, pid: u32, options: &[&str]) -> Command {
    let mut command = place.command(PAGEMILL);
    command.arg("vranges").arg(pid.to_string()).args(options);
    command
}

fn list(place: &TestFolder, pid: u32) -> Value {
    let end = finish_answered(|| vranges(place, pid, &["--json"]));
    end.assert_success();
    serde_json::from_str(&end.out).unwrap()
}

/// Returns the ranges of the list that begin at or after `addr`, and before `addr + len`.
fn ranges_in(list: &Value, addr: u64, len: u64) -> Vec<&Value> {
    let is_inside = |range: &&Value| (addr..addr + len).contains(&range["address"].as_u64().unwrap());
    list["ranges"].as_array().unwrap().iter().filter(is_inside).collect()
}

fn range_at(list: &Value, addr: u64) -> &Value {
    ranges_in(list, addr, 1).first().unwrap_or_else(|| panic!("nothing at {addr:x}: {list}"))
}

fn sum(ranges: &[&Value], of: &str) -> u64 {
    ranges.iter().map(|range| range[of].as_u64().unwrap()).sum()
}

/// Returns the request files that are left in the folder of published files.
fn request_files(place: &TestFolder) -> Vec<PathBuf> {
    walk(&place.path("runtime")).into_iter().filter(|path| path.to_string_lossy().contains(".vranges-")).collect()
}

#[track_caller]
fn assert_refused(end: &End, words: &str) {
    assert!(end.code() == 2 && end.out.is_empty() && end.err.contains(words), "{}: {}{}", end.status, end.out, end.err);
}

/// A forked child uses Pagemill only to mark memory. `vranges` must list the child's ranges, too.
#[test]
fn a_child_that_only_marks_is_listed() {
    let place = TestFolder::new();
    let Some(program) = place.compile("vranges.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], &program);
    command.arg("child");
    let holder = ObservedProgram::start(command);
    let list = list(&place, holder.pid());
    assert_eq!(range_at(&list, holder.numbers[1])["size"], os_page_bytes());
    holder.end();
}

/// A preloaded program in a process tree exceeds its limit. The list must show as many purged bytes as the program
/// learns when it unmarks its ranges, and `vmstat` must count these bytes as purged for the limit.
#[test]
fn a_preloaded_program_is_listed() {
    const LEN: u64 = 16 * MIB;
    let place = TestFolder::new();
    let Some(program) = place.compile("vranges.c", &[]) else { return };
    let holder = ObservedProgram::start(place.pagemill_run(&["--limit", "64M"], &program));
    let list = list(&place, holder.pid());
    let [old, new, foreign] = [1, 2, 3].map(|index| ranges_in(&list, holder.numbers[index], LEN));
    for range in old.iter().chain(&new).chain(&foreign) {
        assert_eq!((&range["kind"], &range["state"]), (&"marked".into(), &"volatile".into()));
        let age = range["age_seconds"].as_f64().unwrap();
        assert!(age < program_age_seconds(&holder), "{range}: older than its process");
    }
    assert_eq!(old.len(), 1, "{list}");
    assert_eq!((&old[0]["purged"], &old[0]["behaviour"]), (&"all".into(), &"full".into()));
    assert!(new.iter().all(|range| range["behaviour"] == "partial"));
    assert_eq!([sum(&old, "size"), sum(&old, "purged_bytes"), sum(&new, "size")], [LEN; 3]);
    assert_eq!([sum(&foreign, "size"), sum(&foreign, "purged_bytes")], [LEN, 0]);
    assert_eq!(list["totals"]["size"], 3 * LEN);
    assert_eq!(list["totals"]["purged_bytes"], LEN + sum(&new, "purged_bytes"));
    let mut vmstat = place.command(PAGEMILL);
    vmstat.arg("vmstat").arg(holder.pid().to_string()).args(["--json", "--all"]);
    let counters: Value = serde_json::from_str(&finish(vmstat, TIMEOUT).out).unwrap();
    assert_eq!(counters["range_bytes_purged"], list["totals"]["purged_bytes"]);
    assert_eq!(counters["purged_for_limit"], list["totals"]["purged_bytes"], "{counters}");
    assert_eq!(counters["purged_for_program"], 0, "{counters}");
    let is_new_purged = u64::from(sum(&new, "purged_bytes") > 0);
    let text = finish_answered(|| vranges(&place, holder.pid(), &[]));
    text.assert_success();
    let row = text.out.lines().find(|line| line.contains(&format!("{:012x}-", holder.numbers[1]))).unwrap();
    assert!(row.contains("16 MiB  marked  volatile  full") && row.ends_with("  all"), "{row}");
    assert!(text.out.lines().last().unwrap().contains("ranges, 48 MiB:"), "{}", text.out);
    assert_eq!(request_files(&place), Vec::<PathBuf>::new());
    assert_eq!(holder.end(), [1, is_new_purged, 0]);
    place.assert_no_files_left();
}

/// Returns the age of the program in seconds, plus a tolerance.
fn program_age_seconds(holder: &ObservedProgram) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", holder.pid())).unwrap();
    let ticks: f64 = stat[stat.rfind(')').unwrap()..].split(' ').nth(20).unwrap().parse().unwrap();
    let up: f64 = fs::read_to_string("/proc/uptime").unwrap().split(' ').next().unwrap().parse().unwrap();
    up - ticks / 100.0 + 1.0
}

/// A program has more ranges than one answer can hold. They must be listed in order, each once, even if several
/// commands run at the same time. If the reader of the output stops reading, the command must succeed.
#[test]
fn many_ranges_are_listed_to_many_commands() {
    const COUNT: u64 = 3000;
    let place = TestFolder::new();
    let Some(program) = place.compile("vranges.c", &[]) else { return };
    let mut command = place.pagemill_run(&[], &program);
    // The program starts on the libc fallback. It grows when it marks memory.
    command.arg(COUNT.to_string()).env_remove("PAGEMILL_AFTER");
    let holder = ObservedProgram::start(command);
    let page = os_page_bytes() as u64;
    let expected: Vec<u64> = (0..COUNT).map(|at| holder.numbers[1] + 2 * at * page).collect();
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let list = list(&place, holder.pid());
                let ranges = ranges_in(&list, holder.numbers[1], 2 * COUNT * page);
                let found: Vec<u64> = ranges.iter().map(|range| range["address"].as_u64().unwrap()).collect();
                assert!(found == expected, "{} of {COUNT} ranges", found.len());
                assert_eq!(sum(&ranges, "size"), COUNT * page);
            });
        }
    });
    let mut reader = place.command("sh");
    reader.args(["-c", &format!("({PAGEMILL} vranges {}; echo $? > status) | head -n 1", holder.pid())]);
    finish(reader, TIMEOUT).assert_success();
    let status = || fs::read_to_string(place.path("status")).unwrap_or_default();
    let begun = Instant::now();
    while status().is_empty() && begun.elapsed() < TIMEOUT {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(status(), "0\n");
    assert_eq!(request_files(&place), Vec::<PathBuf>::new());
    holder.end();
}

/// The next tests run this test binary as a child with this variable set. In the child, the test `program` is the
/// program that the tests observe.
const PROGRAM_VARIABLE: &str = "VRANGES_TEST_PROGRAM";

/// State, behaviour, purged part and purged bytes of the program's ranges. Five ranges have handles. The sixth has a
/// handle and is also marked by address.
const EXPECTED_RANGES: [(&str, &str, &str, u64); 6] = [
    ("held", "full", "no", 0),
    ("volatile", "full", "all", 3 * MIB),
    ("volatile", "partial", "in part", MIB),
    ("pinned", "full", "no", 0),
    ("volatile", "full", "no", 0),
    ("volatile", "full", "no", 0),
];

#[test]
#[ignore = "a program for other tests"]
fn program() {
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        return;
    }
    let pagemill = Testbed::of_process().unwrap();
    let make = |mib: u64, behaviour| -> VolatileBuf {
        let mut range = pagemill.ranges.allocate((mib * MIB) as usize, behaviour).unwrap();
        range.bytes_mut().unwrap().fill(7);
        range
    };
    let held = make(1, Behaviour::Full);
    let lost = make(3, Behaviour::Full);
    lost.mark().unwrap();
    assert!(pagemill.ranges.shrink(u64::MAX, Urgency::Request) > 0);
    let part = make(4, Behaviour::Partial { chunk_bytes: MIB as usize });
    part.mark().unwrap();
    assert!(pagemill.ranges.shrink(1, Urgency::Request) > 0);
    let pinned = make(1, Behaviour::Full);
    let pin = pinned.pin().unwrap();
    pinned.mark().unwrap();
    let calm = make(1, Behaviour::Full);
    calm.mark().unwrap();
    let marked = make(2, Behaviour::Full);
    // SAFETY: there are no references to the bytes of the held range, which is unmarked before it is dropped.
    let mark = |mode| unsafe { pagemill.vranges.vrange(marked.addr(), marked.len_bytes(), mode, How::Full) };
    mark(Mode::Volatile).unwrap();
    let ranges = [&held, &lost, &part, &pinned, &calm, &marked];
    let addrs: Vec<String> = ranges.iter().map(|range| range.addr().to_string()).collect();
    // Bypasses the test harness, which captures the output of tests.
    writeln!(std::io::stdout(), "\n{} {}", std::process::id(), addrs.join(" ")).unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
    mark(Mode::Nonvolatile).unwrap();
    drop(pin);
}

fn as_program(command: &mut Command) {
    command.args(["--exact", "program", "--ignored", "--nocapture", "--test-threads=1"]).env(PROGRAM_VARIABLE, "1");
}

fn assert_handles(place: &TestFolder, holder: &ObservedProgram) {
    let list = list(place, holder.pid());
    for (addr, (state, behaviour, purged, purged_bytes)) in holder.numbers[1..].iter().zip(EXPECTED_RANGES) {
        let is_marked = addr == holder.numbers.last().unwrap();
        let at = ranges_in(&list, *addr, 1);
        // The last handle is held, and its memory is also marked by address.
        let range = at.iter().find(|range| !is_marked || range["kind"] == "marked").unwrap();
        assert_eq!(
            [&range["state"], &range["behaviour"], &range["purged"]],
            [&Value::from(state), &Value::from(behaviour), &Value::from(purged)],
            "{range}"
        );
        assert_eq!(range["purged_bytes"], purged_bytes, "{range}");
        assert_eq!(range["kind"], if is_marked { "marked" } else { "handle" });
        assert_eq!(range["age_seconds"].is_null(), state == "held");
    }
    assert_eq!(list["ranges"].as_array().unwrap().len(), 7);
    assert_eq!(range_at(&list, holder.numbers[1])["size"], MIB);
}

/// A program uses only the crate, without the preload library. It must publish statistics, its ranges must be listed,
/// and it must leave no file behind.
#[test]
fn a_program_with_handles_is_listed() {
    let place = TestFolder::new();
    let mut command = place.command(std::env::current_exe().unwrap());
    as_program(&mut command);
    let holder = ObservedProgram::start(command);
    assert_handles(&place, &holder);
    let mut meminfo = place.command(PAGEMILL);
    meminfo.arg("meminfo").arg(holder.pid().to_string());
    finish(meminfo, TIMEOUT).assert_success();
    holder.end();
    place.assert_no_files_left();
}

/// A program that uses the crate and has the preload library contains two Pagemill instances. The ranges of both must
/// be listed, whether the published files are in the folder of a process tree or in the user's folder.
#[test]
fn a_preloaded_program_with_handles_is_listed() {
    let place = TestFolder::new();
    let mut ask = place.pagemill_run(&[], "sh");
    ask.args(["-c", "echo $LD_PRELOAD"]);
    let library = finish(ask, TIMEOUT).out;
    let mut by_hand = place.command(std::env::current_exe().unwrap());
    by_hand.env("LD_PRELOAD", library.trim());
    for mut command in [place.pagemill_run(&[], std::env::current_exe().unwrap()), by_hand] {
        as_program(&mut command);
        let holder = ObservedProgram::start(command);
        let figures = walk(&place.path("runtime")).into_iter().filter(|path| path.is_file() && !path.ends_with("tree"));
        assert_eq!(figures.count(), 2, "one file of each instance");
        assert_handles(&place, &holder);
        holder.end();
        place.assert_no_files_left();
    }
}

/// A stopped process does not answer. The command must report that in time and leave no file behind, even after Ctrl-C.
/// The process must answer again once it continues.
#[test]
fn a_stopped_process_does_not_answer() {
    let place = TestFolder::new();
    let mut command = place.command(std::env::current_exe().unwrap());
    as_program(&mut command);
    let holder = ObservedProgram::start(command);
    holder.stop();
    let end = finish(vranges(&place, holder.pid(), &[]), TIMEOUT);
    assert_refused(&end, "does not answer within 2 s");
    assert_eq!(request_files(&place), Vec::<PathBuf>::new());
    let mut asking = Guard::new(vranges(&place, holder.pid(), &[]));
    while request_files(&place).is_empty() {
        assert!(!asking.has_ended(), "the command ended before it was interrupted");
        thread::sleep(Duration::from_millis(1));
    }
    asking.signal("INT");
    assert_eq!(asking.wait(TIMEOUT).signal(), Some(libc::SIGINT));
    assert_eq!(request_files(&place), Vec::<PathBuf>::new());
    holder.continue_process();
    assert_handles(&place, &holder);
    holder.end();
}

/// The error message must say whether a process does not exist or publishes no statistics. A process without ranges
/// must get no request.
#[test]
fn errors_say_why_there_is_no_list() {
    let place = TestFolder::new();
    assert_refused(&finish(vranges(&place, 1 << 30, &[]), TIMEOUT), "there is no process 1073741824");
    let mut plain = place.command("cat");
    plain.stdin(Stdio::piped());
    let mut plain = Guard::new(plain);
    assert_refused(&finish(vranges(&place, plain.id(), &[]), TIMEOUT), "publishes no figures");
    drop(plain.child().stdin.take());
    plain.wait(TIMEOUT);
    let mut command = place.pagemill_run(&[], "sh");
    command.args(["-c", "echo $$; read word; echo 0"]);
    let holder = ObservedProgram::start(command);
    holder.stop();
    let end = finish(vranges(&place, holder.pid(), &[]), TIMEOUT);
    end.assert_success();
    assert!(end.out.contains("no volatile ranges"), "{}", end.out);
    assert_eq!(list(&place, holder.pid())["ranges"], Value::Array(Vec::new()));
    holder.continue_process();
    holder.end();
    let mut help = place.command(PAGEMILL);
    help.args(["vranges", "--help"]);
    let end = finish(help, TIMEOUT);
    end.assert_success();
    assert!(end.out.contains("PURGED"), "{}", end.out);
}

/// Writes a forged published file. According to that file, the process has volatile ranges.
fn forge_figures(place: &TestFolder, identity: Identity) -> PathBuf {
    let mut page = vec![0u8; stats::Figures::LEN];
    page[..8].copy_from_slice(b"pagemill");
    page[8..12].copy_from_slice(&stats::VERSION.to_le_bytes());
    page[12..16].copy_from_slice(&identity.pid.to_le_bytes());
    page[16..24].copy_from_slice(&identity.start_ticks.to_le_bytes());
    let counter = 64 + 8 * Counter::MarkedBytes as usize;
    page[counter..counter + 8].copy_from_slice(&1u64.to_le_bytes());
    let folder = place.path("runtime/pagemill");
    if !folder.exists() {
        std::os::unix::fs::DirBuilderExt::mode(&mut fs::DirBuilder::new(), 0o700).create(&folder).unwrap();
    }
    let path = published::file_of(folder.to_str().unwrap(), identity).unwrap();
    fs::write(path.as_str(), page).unwrap();
    path.as_str().into()
}

/// The command must not trust the contents of lists, because another process may have written them. The test writes
/// invalid lists itself.
#[test]
fn invalid_lists_are_refused() {
    let place = TestFolder::new();
    let mut sleeper = place.command("cat");
    sleeper.stdin(Stdio::piped());
    let sleeper = Guard::new(sleeper);
    let identity = process::identity(sleeper.id()).unwrap();
    let figures = forge_figures(&place, identity);
    let head = |number: u32, errno: u32, records: u64| {
        let mut bytes = b"pm-vrng1".to_vec();
        bytes.extend(number.to_le_bytes().into_iter().chain(errno.to_le_bytes()));
        bytes.extend(records.to_le_bytes().into_iter().chain(0u64.to_le_bytes()));
        bytes
    };
    let answers = [
        (vec![0xFF; 100], "not a valid list"),
        (head(1, 0, 1), "not a valid list"),
        (head(1, 0, u64::MAX), "not a valid list"),
        (head(2, 0, 0), "not a valid list"),
        ([head(1, 0, 1), vec![0xFF; 32]].concat(), "not a valid list"),
        (head(1, libc::ENOSPC as u32, 0), "could not write its list"),
        (Vec::new(), "no helper thread"),
    ];
    for (answer, words) in answers {
        let end = thread::scope(|scope| {
            let asking = scope.spawn(|| finish(vranges(&place, sleeper.id(), &[]), TIMEOUT));
            while request_files(&place).is_empty() && !asking.is_finished() {
                thread::sleep(Duration::from_millis(1));
            }
            if let Some(path) = request_files(&place).first() {
                // The file is opened without `create`, since the command may have removed it.
                let file = fs::OpenOptions::new().write(true).open(path);
                let _ = file.and_then(|mut file| file.write_all(&answer));
            }
            asking.join().unwrap()
        });
        assert_refused(&end, words);
        assert_eq!(request_files(&place), Vec::<PathBuf>::new());
        // With a new published file, the numbers of the requests start again.
        forge_figures(&place, identity);
    }
    fs::write(&figures, b"short").unwrap();
    assert_refused(&finish(vranges(&place, sleeper.id(), &[]), TIMEOUT), "publishes no figures");
}
