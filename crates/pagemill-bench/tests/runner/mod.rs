//! Runs the bench for tests, and reads its rows.

use std::process::{Command, Output};

/// Runs the command `pagemill-bench`.
pub fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagemill-bench"));
    command.args(arguments).output().expect("the bench starts")
}

/// Runs the command `pagemill-bench`, which must succeed, and returns the JSON rows that it prints.
pub fn rows(arguments: &[&str]) -> Vec<serde_json::Value> {
    let output = bench(arguments);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {complaint}");
    let text = String::from_utf8(output.stdout).expect("rows are UTF-8");
    text.lines().map(|line| serde_json::from_str(line).expect("a row is JSON")).collect()
}

/// Returns the value of the first row of a subject and a metric.
pub fn value(rows: &[serde_json::Value], subject: &str, metric: &str) -> Option<f64> {
    let row = rows.iter().find(|row| row["subject"] == subject && row["metric"] == metric);
    row.and_then(|row| row["value"].as_f64())
}
