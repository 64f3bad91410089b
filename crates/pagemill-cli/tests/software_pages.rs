//! `run --page-size`: what becomes resident at a page fault, by the kernel's own figures.
//!
//! Two tests need pages of 64 KiB, which the administrator has to offer. They change that setting for less than a
//! second and restore it, and skip where they may not.

mod common;

use common::{TIMEOUT, TestFolder, finish};
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const SETTING: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled";
const FAULTS_OF_SIZE: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/stats/anon_fault_alloc";

/// Memory that the program allocates in each run.
const TOTAL_MIB: usize = 32;
const TOTAL_OS_PAGES: u64 = (TOTAL_MIB as u64) << 8;

/// What the program `pages.c` prints.
#[derive(Debug)]
struct Figures {
    resident_allocated_kib: u64,
    faults_written: u64,
    resident_written_kib: u64,
    huge_kib: u64,
}

/// Runs `pages.c` below `pagemill run OPTIONS`.
fn run_pages(place: &TestFolder, program: &Path, options: &[&str], slot_kib: usize, stride_kib: usize) -> Figures {
    let mut command = place.pagemill_run(options, program);
    command.args([TOTAL_MIB, slot_kib, stride_kib].map(|number| number.to_string()));
    let end = finish(command, TIMEOUT);
    end.assert_success();
    let numbers: Vec<i64> = end.out.split_whitespace().map(|number| number.parse().unwrap()).collect();
    let numbers: Vec<_> = numbers.into_iter().map(|number| number.max(0) as u64).collect();
    let [_, resident_allocated_kib, faults_written, resident_written_kib, huge_kib] = numbers[..] else {
        panic!("five numbers: {}", end.out)
    };
    Figures { resident_allocated_kib, faults_written, resident_written_kib, huge_kib }
}

/// Makes the kernel offer pages of 64 KiB until it is dropped.
///
/// A shell changes the setting and restores it when its standard input ends: also if the test is killed. The lock keeps
/// other runs of this file out.
struct OfferedPages {
    shell: Child,
    _lock: File,
}

impl OfferedPages {
    /// Returns `None`, after a message, where the setting cannot be changed.
    fn begin() -> Option<Self> {
        // The shell ignores the signals that end a test run.
        const SCRIPT: &str = r#"trap "" INT TERM HUP
            old=$(sed "s/.*\[\(.*\)\].*/\1/" "$0") && [ -n "$old" ] || exit 1
            echo madvise >"$0" || exit 1
            echo offered
            read -r line
            echo "$old" >"$0""#;
        let Ok(lock) = File::open(SETTING) else {
            println!("skipped: this kernel has no pages of 64 KiB");
            return None;
        };
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, SETTING]).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut shell = command.spawn().unwrap();
        let mut first = [0; 1];
        if shell.stdout.take().unwrap().read(&mut first).unwrap() == 0 {
            shell.wait().unwrap();
            println!("skipped: this test may not change {SETTING}");
            return None;
        }
        Some(Self { shell, _lock: lock })
    }
}

impl Drop for OfferedPages {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// Returns how often a page fault has provided a page of 64 KiB, on this machine.
fn faults_of_size() -> u64 {
    fs::read_to_string(FAULTS_OF_SIZE).unwrap().trim().parse().unwrap()
}

/// Memory that the program has allocated but not touched must not be resident, whatever the software page is.
#[test]
fn untouched_memory_is_not_resident() {
    let place = TestFolder::new();
    let Some(program) = place.compile("pages.c", &[]) else { return };
    for options in [&[][..], &["--no-huge"], &["--no-huge", "--page-size", "64K"], &["--no-huge", "--page-size", "8M"]]
    {
        for slot_kib in [64, 80, 1024, 5120] {
            let figures = run_pages(&place, &program, options, slot_kib, 64);
            let allocated_kib = figures.resident_allocated_kib;
            assert!(allocated_kib < 4096, "{options:?}, {slot_kib} KiB: {figures:?}");
            assert!(!options.contains(&"--no-huge") || figures.huge_kib == 0, "{options:?}, {slot_kib}: {figures:?}");
        }
    }
}

/// Where the kernel offers pages of 64 KiB, a fault must provide a whole software page of that size, in slots of all
/// kinds. `--no-huge` must still prevent huge pages, and the kernel must count pages of 64 KiB.
#[test]
fn one_fault_provides_a_software_page() {
    let place = TestFolder::new();
    let Some(program) = place.compile("pages.c", &[]) else { return };
    let Some(_offered) = OfferedPages::begin() else { return };
    let before = faults_of_size();
    for slot_kib in [64, 80, 1024, 5120] {
        let figures = run_pages(&place, &program, &["--no-huge", "--page-size", "64K"], slot_kib, 4);
        // One fault for each 64 KiB, and 16 for the one 64 KiB in a block that has an OS page without the advice.
        assert!(figures.faults_written < TOTAL_OS_PAGES / 8, "{slot_kib} KiB: {figures:?}");
        assert_eq!(figures.huge_kib, 0, "{slot_kib} KiB: {figures:?}");
    }
    let counted = faults_of_size() - before;
    assert!(counted >= TOTAL_OS_PAGES / 16, "{counted} pages of 64 KiB");
}

/// Where the only size that the kernel offers is larger than the software page, or no software page is requested, a
/// fault must provide one OS page: a sparse program must not get more memory than it touches.
#[test]
fn a_larger_offered_size_is_not_used() {
    let place = TestFolder::new();
    let Some(program) = place.compile("pages.c", &[]) else { return };
    let Some(_offered) = OfferedPages::begin() else { return };
    for options in [&["--no-huge", "--page-size", "16K"][..], &["--no-huge"]] {
        for slot_kib in [64, 5120] {
            let figures = run_pages(&place, &program, options, slot_kib, 64);
            let most_kib = (TOTAL_MIB as u64) << 10 >> 3;
            assert!(figures.resident_written_kib < most_kib, "{options:?}, {slot_kib} KiB: {figures:?}");
        }
    }
}
