//! Runs the experiment `pageshift` in its smallest form.

mod runner;

use runner::{bench, rows, value};

const SHORT: [&str; 5] = ["pageshift", "--quick", "--json", "--samples", "1"];

/// Views of resident files must be mapped, touched and counted for every page size. Page metadata and waste must follow
/// from the page size. The report must end with a recommendation.
#[test]
fn page_sizes_are_compared_in_memory() {
    let parts = ["--page-sizes", "64K,2M", "--files", "50", "--only", "loop,views,touch,small,hits"];
    let arguments = [&SHORT[..], &parts].concat();
    let rows = rows(&arguments);

    // The file has 1600 or 50 pages. A fault maps one page, or several small ones. Another thread can make a fault try
    // again, so there may be more.
    for (subject, faults) in [("view-64K", 50.0..1700.0), ("view-2M", 50.0..60.0), ("view-auto", 50.0..60.0)] {
        let found = value(&rows, subject, "handler_faults").expect("it ran");
        assert!(faults.contains(&found), "{subject}: {found}");
    }
    for (subject, metric) in [
        ("kernel", "again_us"),
        ("cache-64K", "again_us"),
        ("cache-2M", "first_us"),
        ("mmap", "touch_ms"),
        ("mmap", "touch_ns"),
        ("view-2M", "touch_ns"),
        ("anonymous-huge", "touch_ns"),
        ("anonymous-pool", "copy_ns"),
        ("shared-pool", "copy_ns"),
    ] {
        assert!(value(&rows, subject, metric).is_some_and(|value| value > 0.0), "{subject} {metric}: {rows:?}");
    }
    let ratios = ["cache-64K", "cache-2M"].map(|subject| value(&rows, subject, "folio_ratio").expect("it ran"));
    assert!((4.0..64.0).contains(&ratios[0]) && ratios[1] > 31.0 * ratios[0], "{ratios:?}");

    let output = bench(&[&SHORT[..], &["--page-sizes", "64K,2M", "--files", "50", "--only", "small"]].concat());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.ends_with("recommendation: use pages of 64K for small files\n"), "{text}");
}

/// A file larger than its cache must be read at random and in order, through views, by pins, and by mappings of the
/// kernel in a control group. Skipped if the bench exits with 2, as it does without a file system on a device.
#[test]
fn file_larger_than_its_cache_is_read() {
    let parts = ["--page-sizes", "64K", "--mib", "32", "--cache-mib", "8", "--only", "random,order"];
    let arguments = [&SHORT[..], &parts].concat();
    let output = bench(&arguments);
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(2) {
        println!("skipped: {text}");
        return;
    }
    assert!(output.status.success(), "{text}");
    let rows: Vec<serde_json::Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).expect("a row is JSON"))
        .collect();

    for subject in ["view-64K", "view-auto"] {
        for metric in ["reads_per_second", "mib_per_second", "cpu_us_per_mib"] {
            assert!(value(&rows, subject, metric).is_some_and(|value| value > 0.0), "{subject} {metric}: {rows:?}");
        }
    }
    assert!(value(&rows, "pin-64K", "reads_per_second").is_some_and(|rate| rate > 0.0), "{rows:?}");
    if text.contains("control group") && text.contains("gap: ") {
        println!("skipped: mappings of the kernel");
    } else {
        assert!(value(&rows, "mmap-sequential", "mib_per_second").is_some_and(|rate| rate > 0.0), "{rows:?}");
        let peak = value(&rows, "mmap-random", "peak_mib").expect("it ran");
        assert!(peak <= 8.0, "the control group had {peak} MiB");
    }
}

/// Options that name nothing to measure must be refused before anything runs.
#[test]
fn bad_options_are_refused() {
    for (more, words) in [
        (&["--only", "hoard"][..], "no subject hoard; there are loop,"),
        (&["--page-sizes", "3K"], "3K is not a page size: expected a power of two from 4 KiB to 8 MiB"),
        (&["--only", "views", "--file", "Cargo.toml"], "which --only leaves out"),
        (&["--only", "random", "--dir", "/dev/shm"], "in memory"),
        (&["--only", "order", "--mib", "32", "--cache-mib", "32"], "holds the whole file"),
    ] {
        let output = bench(&[&["pageshift"], more].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains(words), "{more:?}: {text}");
        assert!(output.stdout.is_empty(), "{more:?}");
    }
}
