//! `run --huge-advised` and `--no-huge`, and what `doctor` reports in a process with `--huge-advised`.

mod common;

use common::{PAGEMILL, TIMEOUT, TestFolder, finish};
use serde_json::Value;

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
