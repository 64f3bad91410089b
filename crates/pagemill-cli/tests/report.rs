//! The time line in the report of `pagemill run`: as text, as JSON and as an HTML page.

mod common;

use common::{TIMEOUT, TestFolder, finish};
use serde_json::Value;
use std::fs;

const MIB: u64 = 1 << 20;

/// Python code that holds 200 MiB, then returns it, and sleeps for a while each time.
const PROGRAM: &str = "import ctypes, time\na=[bytearray(1<<20) for _ in range(200)]\ntime.sleep(1)\ndel a\n\
                       ctypes.CDLL(None).malloc_trim(0)\ntime.sleep(.5)\n";

/// The time line must have the memory that the program held, and the end of it. The sums of returned bytes must be those
/// of the counters.
#[test]
fn the_time_line_has_what_the_program_held() {
    if common::is_missing("python3") {
        return;
    }
    let place = TestFolder::new();
    let mut command = place.pagemill_run(&["--json"], "python3");
    command.args(["-c", PROGRAM]);
    let end = finish(command, TIMEOUT);
    end.assert_success();
    let report: Value = serde_json::from_str(end.err.trim()).unwrap();
    let numbers = |name: &str| -> Vec<u64> {
        report["timeline"][name].as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
    };
    let (resident, allocator) = (numbers("resident_bytes"), numbers("allocator_bytes"));
    assert!(resident.len() == allocator.len() && (10..=512).contains(&resident.len()), "{report}");
    let peak = resident.iter().max().unwrap();
    assert!((200 * MIB..300 * MIB).contains(peak), "{report}");
    assert!(*peak <= report["tree_resident_peak_bytes"].as_u64().unwrap(), "{report}");
    // The allocator's count rises when it measures.
    assert!((100 * MIB..260 * MIB).contains(allocator.iter().max().unwrap()), "{report}");
    let seconds = report["timeline"]["interval_s"].as_f64().unwrap() * resident.len() as f64;
    let wall = report["wall_s"].as_f64().unwrap();
    assert!(seconds >= wall && seconds < 2.0 * wall + 0.1, "{seconds} s of {wall} s");
    assert!(numbers("resident_bytes").last().unwrap() < &(100 * MIB), "{report}");
    let returned = report["timeline"]["returned_bytes"]["program"].as_array().unwrap();
    assert!(returned.last().unwrap().as_u64().unwrap() > 150 * MIB, "{report}");
    for (cause, bytes) in report["timeline"]["returned_bytes"].as_object().unwrap() {
        let counter = if cause == "kernel" { "taken".to_owned() } else { format!("given_for_{cause}") };
        let steps: Vec<u64> = bytes.as_array().unwrap().iter().map(|bytes| bytes.as_u64().unwrap()).collect();
        assert!(steps.is_sorted(), "{report}");
        assert_eq!(steps.last().copied(), report["counters"][&counter].as_u64(), "{cause}: {report}");
    }
}

/// The text has a plot. The HTML page has one, too, and refers to nothing outside of it.
#[test]
fn the_report_has_plots() {
    let place = TestFolder::new();
    let page = place.path("report.html");
    let page = page.to_str().unwrap();
    let end = finish(place.pagemill_run_shell(&["--report", "--html", page, "--limit", "300M"], "sleep 0.3"), TIMEOUT);
    end.assert_success();
    assert!(end.err.contains("resident memory of the tree over time") && end.err.contains("┤"), "{}", end.err);
    assert!(end.err.lines().filter(|line| line.contains('┤')).all(|line| line.chars().count() <= 80), "{}", end.err);
    let html = fs::read_to_string(page).unwrap();
    assert!(html.starts_with("<!DOCTYPE html>") && html.trim_end().ends_with("</html>"), "{html}");
    assert!(html.contains("<svg") && html.contains("pagemill run sh") && html.contains("limit 300 MiB"), "{html}");
    assert!(!html.contains("http") && !html.contains("<script"), "{html}");
    // Only the page, nothing on standard error.
    let end = finish(place.pagemill_run_shell(&["--html", page], "exit 3"), TIMEOUT);
    assert_eq!((end.code(), end.err.as_str()), (3, ""));
    assert!(fs::read_to_string(page).unwrap().contains("exit 3"));
    place.assert_no_files_left();
}

/// A file that cannot be written is reported before the program runs.
#[test]
fn an_unwritable_page_is_refused() {
    let place = TestFolder::new();
    for (options, message) in [
        (&["--html", "/nonexistent/x"][..], "the report cannot be written to /nonexistent/x"),
        (&["--html", "same", "--output", "same"], "--output and --html name the same file"),
    ] {
        let end = finish(place.pagemill_run_shell(options, "echo ran"), TIMEOUT);
        assert_eq!((end.code(), end.out.as_str()), (2, ""));
        assert!(end.err.contains(message), "{}", end.err);
    }
}
