//! A transient scope of systemd with a memory limit.
//!
//! `systemd-run --scope` requests the scope, enters it and executes the program, so the process and its streams stay
//! the same. Before the program of the user is started, a trial shows whether scopes work: a scope is created for a
//! program that only waits.

use pagemill_sys::cgroup::Hierarchy;
use pagemill_sys::process;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

/// Returns whether systemd manages this machine, by the same check as `sd_booted`.
pub fn is_systemd_running() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// A systemd scope for a process that is not started yet. The scope ends with its last process.
pub struct Scope {
    launcher: Vec<OsString>,
}

impl Scope {
    /// Prepares a scope with this memory limit. First creates a trial scope, to check that systemd applies the limit.
    ///
    /// # Errors
    ///
    /// A message with the error that systemd reports, and how to fix it.
    pub fn new(name: &str, limit_bytes: u64) -> Result<Self, String> {
        check_trial_scope(&launcher(&format!("{name}-trial"), limit_bytes), limit_bytes)?;
        Ok(Self { launcher: launcher(name, limit_bytes) })
    }

    pub fn launcher(&self) -> &[OsString] {
        &self.launcher
    }
}

fn manager_option() -> &'static str {
    if process::user_id() == 0 { "--system" } else { "--user" }
}

fn launcher(name: &str, limit_bytes: u64) -> Vec<OsString> {
    let (unit, limit) = (format!("--unit={name}"), format!("--property=MemoryMax={limit_bytes}"));
    let words =
        ["systemd-run", manager_option(), "--scope", "--quiet", "--collect", "--no-ask-password", &unit, &limit, "--"];
    words.map(OsString::from).to_vec()
}

fn check_trial_scope(launcher: &[OsString], limit_bytes: u64) -> Result<(), String> {
    let mut command = Command::new(&launcher[0]);
    command.args(&launcher[1..]).args(["sh", "-c", "echo inside; read -r line"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("systemd-run cannot be started: {error}"))?;
    let mut line = String::new();
    if let Some(output) = child.stdout.take() {
        let _ = BufReader::new(output).read_line(&mut line);
    }
    let found = Hierarchy::find_of("", &child.id().to_string());
    let limit = found.ok().and_then(|groups| Some(groups.limit(&groups.folder(0)?).hard_bytes));
    drop(child.stdin.take());
    let mut error_output = String::new();
    if let Some(mut errors) = child.stderr.take() {
        let _ = errors.read_to_string(&mut error_output);
    }
    let _ = child.wait();
    let manager = manager_option();
    if line.trim() != "inside" {
        return Err(format!(
            "systemd refuses a scope (`systemd-run {manager} --scope true` prints: {})",
            error_output.trim().replace('\n', "; ")
        ));
    }
    if limit.is_none_or(|limit| limit > limit_bytes) {
        return Err(format!(
            "systemd creates a scope, but has no memory controller to limit it ({manager}); \
             a user's manager needs control groups of version 2 and Delegate=memory in user@.service"
        ));
    }
    Ok(())
}
