//! `run --huge-advised` and `--no-huge`, what `doctor` reports in a process with `--huge-advised`, and `huge` of mounts.

mod common;

use common::{PAGEMILL, TIMEOUT, TestFolder, finish, is_missing, is_root};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Since Linux 6.18, the program must get huge pages in the memory for which it requests them (`MADV_HUGEPAGE`), and
/// `doctor` must report nothing missing. On older kernels the option must be refused.
#[test]
fn the_huge_advised_option_takes_effect_or_is_refused() {
    let place = TestFolder::new();
    let mut command = place.pagemill_run(&["--huge-advised"], PAGEMILL);
    command.args(["doctor", "--json"]);
    let end = finish(command, TIMEOUT);
    if pagemill_sys::process::kernel_release() < (6, 18) {
        return assert!(end.code() == 2 && end.err.contains("Linux 6.18"), "{}", end.err);
    }
    let report: Value = serde_json::from_str(&end.out).unwrap();
    let text = report.to_string();
    assert!(text.contains("PR_THP_DISABLE_EXCEPT_ADVISED") && !text.contains("PR_SET_THP_DISABLE is set"), "{text}");
}

/// With `--no-huge` the kernel must not make huge pages in the arena on its own, as it does where the machine's setting
/// is `always`: every mapping of 1 TiB or more must have the flag `nh` (`MADV_NOHUGEPAGE`).
#[test]
fn the_option_no_huge_forbids_huge_pages_in_the_arena() {
    let place = TestFolder::new();
    let mut command = place.pagemill_run(&["--no-huge"], "cat");
    command.arg("/proc/self/smaps");
    let end = finish(command, TIMEOUT);
    end.assert_success();
    let (mut len_kib, mut count) = (0, 0);
    for line in end.out.lines() {
        if let Some(size) = line.strip_prefix("Size:") {
            len_kib = size.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && len_kib >= 1 << 30
        {
            assert!(flags.split_whitespace().any(|flag| flag == "nh"), "{len_kib} KiB: {flags}");
            count += 1;
        }
    }
    assert!(count > 0, "no mapping of the arena: {}", end.out);
}

/// A tmpfs that is unmounted on drop.
struct Tmpfs(PathBuf);

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// `huge` must show and change the option of a mounted tmpfs, for root only. It must refuse folders that are no mount
/// points, file systems of other types, and settings of a process, and change nothing then.
#[test]
fn the_option_of_a_mount_is_switched() {
    if !is_root() || is_missing("setpriv") {
        return;
    }
    let place = TestFolder::new();
    let ram = Tmpfs(place.path("ram"));
    std::fs::create_dir(&ram.0).unwrap();
    let status = Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m", "none"]).arg(&ram.0).status().unwrap();
    if !status.success() {
        return println!("skipped: no tmpfs can be mounted");
    }
    let pagemill = |target: &Path, options: &[&str]| {
        let mut command = place.command(PAGEMILL);
        command.arg("huge").arg(target).args(options);
        finish(command, TIMEOUT)
    };
    let setting = || {
        let end = pagemill(&ram.0, &["--json"]);
        end.assert_success();
        serde_json::from_str::<Value>(&end.out).unwrap()["huge"].as_str().unwrap().to_owned()
    };
    assert_eq!(setting(), "never");
    for when in ["within_size", "advise", "always"] {
        let end = pagemill(&ram.0, &[when]);
        if end.err.contains("no huge pages for tmpfs") {
            return println!("skipped: {}", end.err);
        }
        assert!(end.out.contains(&format!("huge pages: {when}, before: ")), "{}{}", end.out, end.err);
        assert_eq!(setting(), when);
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = mounts.lines().find(|line| line.contains(ram.0.to_str().unwrap())).unwrap();
        assert!(line.contains(&format!("huge={when}")) && line.contains("size=8192k"), "{line}");
    }
    let mut command = place.command("setpriv");
    let other_user = ["--reuid=65534", "--regid=65534", "--clear-groups", PAGEMILL, "huge"];
    command.args(other_user).arg(&ram.0).arg("never");
    let cases = [
        (finish(command, TIMEOUT), "only root can change it"),
        (pagemill(&ram.0, &["auto"]), "auto is a setting of a process"),
        (pagemill(&place.path("."), &["never"]), "is no mount point"),
        (pagemill(Path::new("/proc"), &["never"]), "is no tmpfs but proc"),
        (pagemill(&place.path("missing"), &[]), "missing"),
    ];
    for (end, words) in cases {
        assert!(end.code() == 2 && end.err.contains(words), "{words}: {}", end.err);
    }
    assert_eq!(setting(), "always");
    assert!(pagemill(&ram.0, &["never"]).out.contains("huge pages: never, before: always"));
}
