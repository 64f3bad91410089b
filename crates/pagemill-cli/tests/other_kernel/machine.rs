//! An emulated machine: Debian's kernel under qemu, with two fake memory nodes and no disk.

use crate::common::{Guard, Place, lacks, tail};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

const QEMU: &str = "qemu-system-x86_64";

/// About ten times the usual duration: every instruction is translated, and the host may be busy.
const STUCK_AFTER: Duration = Duration::from_secs(600);

/// An Intel CPU model: on AMD's (including `max`) the kernel puts CPUs that share a cache on one fake node. String
/// instructions (`erms`) are translated byte by byte, and Linux would use them to fill pages. Takes half of the time of
/// `max`.
const PROCESSOR: &str = "Haswell-noTSX,erms=off";

/// Panics end the machine (with `-no-reboot`) instead of halting it. Mitigations of CPU bugs are not needed.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 numa=fake=2 mitigations=off";

/// Options that must be built into the kernel, since there are no modules to load. Debian's cloud kernel has no fake
/// nodes.
const BUILT_IN: &[&str] = &[
    "CONFIG_BLK_DEV_INITRD",
    "CONFIG_DEVTMPFS",
    "CONFIG_MEMCG",
    "CONFIG_NUMA_EMU",
    "CONFIG_SERIAL_8250_CONSOLE",
    "CONFIG_TMPFS",
];

/// The result of a case.
#[derive(Debug, Default)]
pub struct Case {
    /// `exit STATUS` or `signal NUMBER`; empty if it never ended.
    pub end: String,
    /// Its texts, by kind: `output`, `report`, `events`.
    pub texts: BTreeMap<String, String>,
}

impl Case {
    pub fn text(&self, what: &str) -> &str {
        self.texts.get(what).map_or("", String::as_str)
    }

    /// Whether `memory.events` of its group has this line.
    pub fn has_event(&self, line: &str) -> bool {
        self.text("events").lines().any(|event| event == line)
    }
}

/// The kernel to boot; prints the reason and returns `None` if there is none that can be booted.
pub fn kernel() -> Option<PathBuf> {
    if !cfg!(target_arch = "x86_64") {
        println!("skipped: the other kernel is one for x86-64");
        return None;
    }
    if [QEMU, "ldd"].into_iter().any(lacks) {
        return None;
    }
    let candidates = candidates();
    if candidates.is_empty() {
        println!("skipped: no kernel: PAGEMILL_TEST_KERNEL names none, .ci/run has fetched none, none lies in /boot");
    }
    candidates.into_iter().find(|kernel| match obstacle(kernel) {
        None => true,
        Some(obstacle) => {
            println!("skipped: {}: {obstacle}", kernel.display());
            false
        }
    })
}

/// Candidates for the kernel: only the one that the environment names, if any; else the one that .ci/run has fetched,
/// then the installed ones.
fn candidates() -> Vec<PathBuf> {
    if let Some(path) = std::env::var_os("PAGEMILL_TEST_KERNEL") {
        return vec![path.into()];
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    [target.join("kernel"), "/boot".into()].iter().flat_map(|folder| kernels_in(folder)).collect()
}

/// Every `vmlinuz-*`, the highest release first; numbers are compared as numbers.
fn kernels_in(folder: &Path) -> Vec<PathBuf> {
    let release = |path: &PathBuf| -> Vec<u64> {
        path.to_string_lossy().split(|byte: char| !byte.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
    };
    let is_kernel = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"vmlinuz-"));
    let mut kernels: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    kernels.retain(is_kernel);
    kernels.sort_by_key(|path| Reverse(release(path)));
    kernels
}

/// Why a kernel is not suitable, according to its file and the `config-*` beside it.
fn obstacle(kernel: &Path) -> Option<String> {
    if let Err(error) = fs::File::open(kernel) {
        return Some(error.to_string());
    }
    let release = kernel.file_name()?.to_string_lossy().replacen("vmlinuz", "config", 1);
    let config = fs::read_to_string(kernel.with_file_name(release)).ok()?;
    let is_built_in = |option: &&str| config.lines().any(|line| line.strip_prefix(*option) == Some("=y"));
    let lacking = BUILT_IN.iter().find(|option| !is_built_in(option))?;
    Some(format!("{lacking} is not built in"))
}

/// Boots, waits until the machine turns itself off, and returns the results of every case.
pub fn boot(place: &Place, kernel: &Path, initramfs: &[u8]) -> BTreeMap<String, Case> {
    fs::write(place.path("initramfs"), initramfs).unwrap();
    let status = run(place, kernel);
    let read = |name: &str| String::from_utf8_lossy(&fs::read(place.path(name)).unwrap_or_default()).into_owned();
    let (console, results) = (read("console"), read("results"));
    let is_done = results.lines().last() == Some("@done");
    assert!(
        is_done && status.is_some_and(|status| status.success()),
        "the machine did not come to its end: {}\nqemu:\n{}\nconsole:\n{}\nresults:\n{}",
        status.map_or(format!("stopped after {STUCK_AFTER:?}"), |status| status.to_string()),
        tail(&read("qemu")),
        tail(&console),
        tail(&results),
    );
    // If a case fails, this shows which processes were killed, and why.
    println!("console:\n{}", tail(&console));
    parse(&results)
}

/// How qemu ended; `None` if it had to be stopped. The kernel's console and the results go to separate files.
fn run(place: &Place, kernel: &Path) -> Option<ExitStatus> {
    let mut qemu = place.command(QEMU);
    qemu.args(["-machine", "pc", "-cpu", PROCESSOR, "-accel", "tcg", "-m", "1G", "-smp", "2"]);
    qemu.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    qemu.args(["-serial", "file:console", "-serial", "file:results"]);
    qemu.arg("-kernel").arg(kernel).args(["-initrd", "initramfs", "-append", COMMAND_LINE]);
    let said = fs::File::create(place.path("qemu")).unwrap();
    qemu.stdout(Stdio::null()).stderr(said);
    Guard::new(qemu).wait_for(STUCK_AFTER)
}

/// Parses the output of `tests/c/init.c`.
fn parse(results: &str) -> BTreeMap<String, Case> {
    let mut cases = BTreeMap::<String, Case>::new();
    let mut lines = results.lines();
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        match words[..] {
            ["@begin", name, what] => {
                let text: Vec<&str> = lines.by_ref().take_while(|line| *line != "@end").collect();
                cases.entry(name.into()).or_default().texts.insert(what.into(), text.join("\n"));
            }
            ["@case", name, end] => cases.entry(name.into()).or_default().end = end.into(),
            _ => {}
        }
    }
    cases
}
