//! The emulated machine: Debian's kernel in qemu, with two fake NUMA nodes and no disk.

use crate::common::{Guard, TestFolder, is_missing, tail};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

const QEMU: &str = "qemu-system-x86_64";

/// Maximum duration of a run of the emulator. A usual run takes about a tenth of this time. qemu translates every
/// instruction, and the host may be busy.
const TIMEOUT: Duration = Duration::from_secs(600);

/// The emulated CPU, a model of Intel. On AMD's models (and `max`), the kernel puts CPUs that share a cache on the same
/// fake node. String instructions (`erms`) are off: Linux would fill pages with them, and qemu translates them byte by
/// byte. A run takes half the time of a run with `max`.
const CPU_MODEL: &str = "Haswell-noTSX,erms=off";

/// The kernel's command line. After a panic, the kernel reboots, and with `-no-reboot` a reboot ends qemu. Mitigations
/// of CPU bugs are off to save time.
const KERNEL_COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 numa=fake=2 mitigations=off";

/// Configuration options that must be built into the kernel, because the emulator loads no modules. Debian's cloud
/// kernel has no fake nodes.
const REQUIRED_OPTIONS: &[&str] = &[
    "CONFIG_BLK_DEV_INITRD",
    "CONFIG_DEVTMPFS",
    "CONFIG_MEMCG",
    "CONFIG_NUMA_EMU",
    "CONFIG_SERIAL_8250_CONSOLE",
    "CONFIG_TMPFS",
];

/// The result of one case in the emulator.
#[derive(Debug, Default)]
pub struct Case {
    /// How the case ended: `exit STATUS` or `signal NUMBER`; empty if it did not end.
    pub end: String,
    /// The texts that the case printed, by kind: `output`, `report`, `events`.
    pub texts: BTreeMap<String, String>,
}

impl Case {
    pub fn text(&self, what: &str) -> &str {
        self.texts.get(what).map_or("", String::as_str)
    }

    /// Returns whether `memory.events` of the case's control group has this line.
    pub fn has_event(&self, line: &str) -> bool {
        self.text("events").lines().any(|event| event == line)
    }
}

/// Returns the path of the kernel to boot. If no kernel is suitable, prints the reasons and returns `None`.
pub fn kernel() -> Option<PathBuf> {
    if !cfg!(target_arch = "x86_64") {
        println!("skipped: the other kernel is one for x86-64");
        return None;
    }
    if [QEMU, "ldd"].into_iter().any(is_missing) {
        return None;
    }
    let candidates = candidate_kernels();
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

/// Returns the paths of the kernels to try, in order. If the environment names a kernel, returns only that kernel.
/// Otherwise returns the kernel that .ci/run downloaded, and then the installed kernels.
fn candidate_kernels() -> Vec<PathBuf> {
    if let Some(path) = std::env::var_os("PAGEMILL_TEST_KERNEL") {
        return vec![path.into()];
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    [target.join("kernel"), "/boot".into()].iter().flat_map(|folder| kernels_in(folder)).collect()
}

/// Returns every `vmlinuz-*` in a folder, the highest release first. The parts of a release are compared as numbers.
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

/// Returns why a kernel is not suitable; `None` if it is suitable. Examines the kernel's file and the file `config-*`
/// in the same folder.
fn obstacle(kernel: &Path) -> Option<String> {
    if let Err(error) = fs::File::open(kernel) {
        return Some(error.to_string());
    }
    let release = kernel.file_name()?.to_string_lossy().replacen("vmlinuz", "config", 1);
    let config = fs::read_to_string(kernel.with_file_name(release)).ok()?;
    let is_built_in = |option: &&str| config.lines().any(|line| line.strip_prefix(*option) == Some("=y"));
    let lacking = REQUIRED_OPTIONS.iter().find(|option| !is_built_in(option))?;
    Some(format!("{lacking} is not built in"))
}

/// Boots the kernel in the emulator, waits until it powers off, and returns the results of all cases by name.
pub fn boot(place: &TestFolder, kernel: &Path, initramfs: &[u8]) -> BTreeMap<String, Case> {
    fs::write(place.path("initramfs"), initramfs).unwrap();
    let status = run_qemu(place, kernel);
    let read = |name: &str| String::from_utf8_lossy(&fs::read(place.path(name)).unwrap_or_default()).into_owned();
    let (console, results) = (read("console"), read("results"));
    let is_done = results.lines().last() == Some("@done");
    assert!(
        is_done && status.is_some_and(|status| status.success()),
        "the machine did not come to its end: {}\nqemu:\n{}\nconsole:\n{}\nresults:\n{}",
        status.map_or(format!("stopped after {TIMEOUT:?}"), |status| status.to_string()),
        tail(&read("qemu")),
        tail(&console),
        tail(&results),
    );
    // If a case fails, the console shows which processes were killed and why.
    println!("console:\n{}", tail(&console));
    parse_results(&results)
}

/// Runs qemu. Returns its exit status; `None` if qemu had to be killed. The kernel's console and the results are
/// written to separate files.
fn run_qemu(place: &TestFolder, kernel: &Path) -> Option<ExitStatus> {
    let mut qemu = place.command(QEMU);
    qemu.args(["-machine", "pc", "-cpu", CPU_MODEL, "-accel", "tcg", "-m", "1G", "-smp", "2"]);
    qemu.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    qemu.args(["-serial", "file:console", "-serial", "file:results"]);
    qemu.arg("-kernel").arg(kernel).args(["-initrd", "initramfs", "-append", KERNEL_COMMAND_LINE]);
    let messages = fs::File::create(place.path("qemu")).unwrap();
    qemu.stdout(Stdio::null()).stderr(messages);
    Guard::new(qemu).wait_for(TIMEOUT)
}

/// Parses the results that the program `tests/c/init.c` printed.
fn parse_results(results: &str) -> BTreeMap<String, Case> {
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
