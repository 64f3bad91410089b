//! `run --huge-advised`, and what `doctor` reports in a process with that setting.

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
