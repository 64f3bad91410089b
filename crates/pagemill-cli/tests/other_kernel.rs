//! Tests on another kernel: Debian's kernel in an emulator, with control groups of version 2 and two NUMA nodes.
//!
//! The kernel that runs the tests may have neither. All cases run in a single boot. `tests/c/init.c` is the first
//! process in the emulator.

mod common;
#[path = "other_kernel/initramfs.rs"]
mod initramfs;
#[path = "other_kernel/machine.rs"]
mod machine;
#[path = "other_kernel/slabs.rs"]
mod slabs;

use common::{PAGEMILL, TestFolder};
use initramfs::Initramfs;
use machine::Case;
use serde_json::Value;
use std::path::Path;

/// The cases, one in a line: name, `memory.max`, `memory.high`, and command. In total, `phases` and `squeeze` allocate
/// more memory than their limits. Their arguments are amounts of work instead of times, because the speed of the
/// emulator is unknown.
const CASES: &str = "\
doctor max max /bin/pagemill doctor --json
phases-2 128M max /bin/pagemill run --json --output /tmp/report.json -- /bin/phases 2 72 0 3
phases-4 128M max /bin/pagemill run --json --output /tmp/report.json -- /bin/phases 4 72 0 3
phases-high 128M 96M /bin/pagemill run --json --output /tmp/report.json -- /bin/phases 2 72 0 3
squeeze-max 128M max PAGEMILL_IDLE=off /bin/pagemill run --json --output /tmp/report.json -- /bin/squeeze 80
squeeze-high 128M 100M PAGEMILL_IDLE=off /bin/pagemill run --json --output /tmp/report.json -- /bin/squeeze 80
squeeze-blind 128M max PAGEMILL_WATCH=off PAGEMILL_IDLE=off /bin/pagemill run -- /bin/squeeze 80
ram 160M max /bin/ram /bin/pagemill
nodes max max /bin/pagemill run --after 0 -- /bin/nodes /bin/pagemill
slabs max max PAGEMILL_TEST_IN_MACHINE=1 /bin/slabs --exact slabs_are_on_real_nodes --nocapture
";

/// On Debian's kernel, programs must survive the limits `memory.max` and `memory.high`. Memory must come from the node
/// of the thread that allocates it.
#[test]
fn debians_kernel_is_supported() {
    let Some(kernel) = machine::kernel() else { return };
    let place = TestFolder::new();
    let Some(initramfs) = initramfs(&place) else { return };
    let cases = machine::boot(&place, &kernel, &initramfs);
    for (name, case) in &cases {
        println!("{name}: {}\n{}{}", case.end, case.text("output"), case.text("report"));
    }
    assert_eq!(cases.len(), CASES.lines().count());
    assert_doctor_report(&cases["doctor"]);
    for name in ["phases-2", "phases-4", "phases-high"] {
        assert_survived(&cases[name], &["given_for_group", "given_for_new"]);
    }
    for name in ["squeeze-max", "squeeze-high"] {
        assert_survived(&cases[name], &["given_for_group"]);
    }
    assert_killed(&cases["squeeze-blind"]);
    assert_volatile_files_were_purged(&cases["ram"]);
    assert_memory_is_on_own_node(&cases["nodes"]);
    let slabs = &cases["slabs"];
    assert!(slabs.end == "exit 0" && slabs.text("output").contains("1 passed"), "{slabs:?}");
}

/// The program of the case `slabs`, which runs inside the emulator.
#[test]
fn slabs_are_on_real_nodes() {
    if std::env::var_os("PAGEMILL_TEST_IN_MACHINE").is_none() {
        println!("skipped here: a case of `debians_kernel_is_supported`");
        return;
    }
    slabs::move_between_nodes().unwrap();
}

/// Returns an archive with the command and its preload library, the programs of the cases, and the list of cases.
/// Returns `None` if there is no compiler.
fn initramfs(place: &TestFolder) -> Option<Vec<u8>> {
    let mut archive = Initramfs::default();
    for folder in ["proc", "sys", "dev", "tmp", "run"] {
        archive.add_folder(folder);
    }
    archive.add_program("init", &place.compile("init.c", &[])?);
    for name in ["phases", "squeeze", "nodes", "ram"] {
        archive.add_program(format!("bin/{name}"), &place.compile(&format!("{name}.c"), &[])?);
    }
    // This test binary is the program of the case `slabs`.
    archive.add_program("bin/slabs", &std::env::current_exe().unwrap());
    archive.add_program("bin/pagemill", Path::new(PAGEMILL));
    // This is the library that cargo built. Without it, the command would extract a copy in every case.
    let library = Path::new(PAGEMILL).with_file_name("deps").join("libpagemill_malloc.so");
    if library.exists() {
        archive.add_program("bin/libpagemill_malloc.so", &library);
    }
    archive.add_file("cases", CASES.as_bytes());
    Some(archive.finish())
}

/// Checks that `doctor` reports that Pagemill works on this kernel, in a control group of version 2, and with two
/// NUMA nodes.
fn assert_doctor_report(case: &Case) {
    assert_eq!(case.end, "exit 0", "{case:?}");
    let table: Value = serde_json::from_str(case.text("output")).unwrap();
    let found = |key: &str| {
        let row = table["rows"].as_array().unwrap().iter().find(|row| row["key"] == key).unwrap();
        assert_eq!(row["state"], "available", "{row}");
        row["found"].as_str().unwrap().to_owned()
    };
    println!("kernel {}", table["kernel"]);
    assert_eq!(found("cgroup"), "v2, /doctor");
    assert_eq!(found("numa"), "nodes 0-1, mbind works");
}

/// Checks that no process was killed, that no allocation failed, and that free memory was returned for one of
/// `reasons`. In a slow emulator, `phases` reuses most of the memory that it frees before the limit is near.
fn assert_survived(case: &Case, reasons: &[&str]) {
    assert_eq!(case.end, "exit 0", "{case:?}");
    let report: Value = serde_json::from_str(case.text("report")).unwrap();
    let count = |name: &str| report["counters"][name].as_u64().unwrap();
    assert_eq!(count("limit_refused"), 0, "{report}");
    let given: u64 = reasons.iter().map(|reason| count(reason)).sum();
    assert!(given > 16 << 20, "too little was given: {report}");
    assert!(case.has_event("oom_kill 0"), "{case:?}");
}

/// Checks that the kernel killed the program at the limit, because no governor watched the limit. In other cases, the
/// same program survives.
fn assert_killed(case: &Case) {
    assert_eq!(case.end, "exit 137", "{case:?}");
    assert!(case.has_event("oom_kill 1"), "{case:?}");
}

/// Checks that volatile files, and no other file, were purged before the group's limit was reached. This kernel's tmpfs
/// does not support user attributes.
fn assert_volatile_files_were_purged(case: &Case) {
    assert_eq!(case.end, "exit 0", "{case:?}");
    assert!(case.has_event("oom_kill 0"), "{case:?}");
    let status = case.text("output").lines().find(|line| line.starts_with('{')).unwrap();
    let status: Value = serde_json::from_str(status).unwrap();
    assert!(status["counts"]["purged_bytes"].as_u64().is_some_and(|bytes| bytes > 64 << 20), "{status}");
}

/// Checks that each thread got memory of its own node, that both nodes have CPUs, and that `meminfo` shows both nodes.
fn assert_memory_is_on_own_node(case: &Case) {
    assert_eq!(case.end, "exit 0", "{case:?}");
    let mut used = Vec::new();
    for line in case.text("output").lines().filter(|line| line.starts_with("cpu ")) {
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [_, node, pages, here] = numbers[..] else { panic!("{line}") };
        assert!(here * 10 >= pages * 9, "far from home: {line}");
        used.push(node);
    }
    assert_eq!(used, [0, 1, 1, 0], "{case:?}");
    let meminfo = case.text("output").lines().find(|line| line.starts_with('{')).unwrap();
    let meminfo: Value = serde_json::from_str(meminfo).unwrap();
    for node in ["0", "1"] {
        assert!(meminfo["nodes"][node].as_u64().is_some_and(|bytes| bytes > 44 << 20), "{meminfo}");
    }
}
