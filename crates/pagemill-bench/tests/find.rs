//! Runs the experiment `find` in its smallest form.

mod runner;

use runner::{bench, rows, value};

const SHORT: [&str; 7] = ["find", "--quick", "--json", "--samples", "1", "--files", "1000"];

/// A RAM file system is searched, walked, changed and emptied. Each part must report its metrics. The memory after most
/// files were removed must be below that of all files, and the published results must be there.
#[test]
fn ram_file_system_is_searched_and_emptied() {
    let rows = rows(&[&SHORT[..], &["--only", "ramfs,ramfs-immovable,removed,fresh"]].concat());

    for subject in ["ramfs", "ramfs-immovable"] {
        for metric in ["cold_ms", "dropped_ms", "warm_ms", "short_ns", "negative_ns", "pairs_per_second"] {
            assert!(value(&rows, subject, metric).is_some_and(|value| value > 0.0), "{subject} {metric}: {rows:?}");
        }
    }
    for subject in ["removed", "fresh"] {
        for metric in ["left_mib", "counted_mib", "bytes_per_file", "search_ms"] {
            assert!(value(&rows, subject, metric).is_some_and(|value| value > 0.0), "{subject} {metric}: {rows:?}");
        }
    }
    let counted = ["removed", "fresh"].map(|subject| value(&rows, subject, "counted_mib").expect("it ran"));
    assert!(counted[0] < 3.0 * counted[1], "a tenth of the files takes {counted:?} MiB");
    assert_eq!(value(&rows, "original-2019: movable, also dentries", "dropped_ms"), Some(6886.0));
}

/// The program `find` must search mounted file systems, of which those are left out that cannot be mounted here, with a
/// reason.
#[test]
fn mounted_file_systems_are_searched() {
    let output = bench(&[&SHORT[..], &["--only", "tmpfs,ext4,fuse"]].concat());
    let text = String::from_utf8_lossy(&output.stderr);
    let printed = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<serde_json::Value> =
        printed.lines().map(|line| serde_json::from_str(line).expect("a row is JSON")).collect();

    for subject in ["tmpfs", "ext4", "fuse"] {
        if text.contains(&format!("gap: {subject}")) {
            println!("skipped: {subject}: {text}");
            continue;
        }
        for metric in ["cold_ms", "dropped_ms", "warm_ms"] {
            assert!(value(&rows, subject, metric).is_some_and(|value| value > 0.0), "{subject} {metric}: {text}");
        }
    }
}

/// Unknown subjects and numbers of files must be refused before anything runs.
#[test]
fn bad_options_are_refused() {
    for (more, words) in [
        (&["--only", "hoard"][..], "no subject hoard; there are ramfs,"),
        (&["--files", "10"], "10 is not in 1000..=1000000"),
    ] {
        let output = bench(&[&["find"], more].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && text.contains(words), "{more:?}: {text}");
        assert!(output.stdout.is_empty(), "{more:?}");
    }
}
