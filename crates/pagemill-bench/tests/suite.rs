//! `pagemill bench` without a name, `--report` and `--compare`: the outputs around the experiments.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

mod runner;

use runner::{bench, rows, value};

/// Arguments of an experiment that runs for less than a second and needs nothing but memory.
const SHORT: [&str; 6] = ["refs", "--quick", "--samples", "2", "--only", "splittable,per-4-KiB"];

fn of_kind<'a>(rows: &'a [Value], kind: &str) -> Vec<&'a Value> {
    rows.iter().filter(|row| row["kind"] == kind).collect()
}

/// An experiment with `--report` must write a page and the same rows that it prints as JSON. Compared with these rows, a
/// further run must have all of them and name no difference of the machine.
#[test]
fn experiment_writes_a_page_and_is_compared() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let inner = folder.path().join("new/folder");
    let inner_text = inner.display().to_string();
    let printed = rows(&[&SHORT[..], &["--json", "--report", &inner_text]].concat());

    let html = std::fs::read_to_string(inner.join("refs.html")).expect("the page is there");
    let saved = std::fs::read_to_string(inner.join("refs.json")).expect("the rows are there");
    let saved: Vec<Value> = saved.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(saved, printed);
    assert!(saved[0]["kind"] == "machine" && saved[0]["kernel"].is_string(), "{}", saved[0]);
    assert!(html.contains("<svg") && html.contains("splittable") && !html.contains("<script"));

    let old = inner.join("refs.json").display().to_string();
    let again = rows(&[&SHORT[..], &["--json", "--compare", &old]].concat());
    let [sums] = of_kind(&again, "comparison")[..] else { panic!("one row of sums: {again:?}") };
    assert_eq!((sums["only_old"].as_u64(), sums["only_new"].as_u64()), (Some(0), Some(0)), "{sums}");
    assert!(sums["names_machine"] == true && of_kind(&again, "machine-difference").is_empty());
    let counted = ["changed", "unchanged", "without_spread"].map(|key| sums[key].as_u64().expect("a number"));
    assert!(counted.iter().sum::<u64>() > 4, "{sums}");

    let text = bench(&[&SHORT[..4], &["--only", "per-4-KiB", "--compare", &old]].concat());
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("only in the old run: refs, ") && text.contains("splittable"), "{text}");
}

/// Files and folders that cannot be used must be refused before anything is measured.
#[test]
fn unusable_files_are_refused_before_measuring() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let bad = folder.path().join("bad.json");
    std::fs::write(&bad, "{\"experiment\":\"refs\"}\n").expect("written");
    let bad = bad.display().to_string();
    let below_a_file = format!("{bad}/folder");
    for (arguments, words) in [
        (["--compare", "/nowhere/old.json"], "--compare /nowhere/old.json: No such file"),
        (["--compare", &bad], "line 1 is no row of `--json`"),
        (["--report", &below_a_file], "Not a directory"),
    ] {
        for command in [&["hit"][..], &[]] {
            let begun = Instant::now();
            let output = bench(&[command, &arguments].concat());
            let complaint = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.code() == Some(2) && complaint.contains(words), "{arguments:?}: {complaint}");
            assert!(output.stdout.is_empty() && begun.elapsed() < Duration::from_secs(60));
        }
    }
    let unknown = bench(&["--only", "hoard"]);
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no experiment hoard; there are ebizzy,"));
    assert_eq!(bench(&["--only", "refs", "refs"]).status.code(), Some(2));
}

/// Without a name, the wanted experiments must run, and the ideas must be printed as rows. The page must have a section
/// for each. An experiment that cannot run must be listed with a remedy, and must not fail the run.
#[test]
fn suite_runs_the_wanted_experiments() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = folder.path().display().to_string();
    // A folder in memory is not usable for experiments on devices.
    let run = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagemill-bench"));
        command.args(["--only", "refs,writeback"]).args(more).env("TMPDIR", "/dev/shm").env("PATH", "/nowhere");
        command.output().expect("the bench starts")
    };
    let output = run(&["--json", "--report", &place]);
    let (text, complaint) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{complaint}");
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();

    assert_eq!(of_kind(&rows, "idea").len(), 5);
    assert!(value(&rows, "splittable", "ns").is_some_and(|ns| ns > 0.0), "{text}");
    let html = std::fs::read_to_string(folder.path().join("bench.html")).expect("the page is there");
    assert!(html.contains("<section id=\"refs\">") && html.contains("class=\"ideas\""));
    let left_out = of_kind(&rows, "left-out");
    assert!(left_out.iter().all(|row| row["remedy"].as_str().is_some_and(|remedy| !remedy.is_empty())), "{text}");
    // Without fio, writeback still measures the cache and the ring, unless no folder is on a device.
    let has_section = html.contains("<section id=\"writeback\">");
    assert_eq!(has_section, left_out.is_empty(), "{complaint}");
    assert!(html.contains("Remedy: apt-get install fio") || !has_section, "{complaint}");
}

/// An interrupt must end the suite with the signal, after the results so far were printed and written.
#[test]
fn interrupted_suite_keeps_its_results() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagemill-bench"));
    command.args(["--only", "refs,traces", "--report"]).arg(folder.path());
    let errors = folder.path().join("errors");
    command.stdout(Stdio::piped()).stderr(std::fs::File::create(&errors).expect("made"));
    let child = command.spawn().expect("the bench starts");
    // The line of the first experiment is printed when the experiment has ended.
    let begun = Instant::now();
    while !std::fs::read_to_string(&errors).expect("it is there").contains("references to huge folios") {
        assert!(begun.elapsed() < Duration::from_secs(600), "the first experiment does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
    let output = child.wait_with_output().expect("it ends");

    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.signal(), Some(2), "{text}");
    assert!(text.contains("| refs ") && text.contains("left out: traces: interrupted"), "{text}");
    assert!(Path::new(&folder.path().join("bench.html")).is_file() && folder.path().join("bench.json").is_file());
}
