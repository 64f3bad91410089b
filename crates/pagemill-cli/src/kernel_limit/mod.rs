//! `pagemill run --limit-kernel`: a limit that the kernel enforces on a program and its children.
//!
//! Where systemd runs, the program runs in a transient scope with the limit. Elsewhere, or if no scope can be created,
//! the program runs in a control group with the limit, inside the group of this process. The allocator in the program
//! handles the limit like that of any control group: it returns memory before the limit is reached, and refuses
//! allocations beyond it. If other memory exceeds the limit, the kernel kills.

mod group;
mod guard;
mod scope;

pub use group::remove_dead_groups;
pub use guard::main as guard;

use group::Group;
use pagemill_sys::process::{self, Identity};
use scope::Scope;
use std::ffi::OsString;
use std::fs::File;

/// Prefix of the names of control groups and scopes. The rest of a name is the process id of `run` and its start time
/// in clock ticks.
const NAME_PREFIX: &str = "pagemill-run-";

/// A memory limit for a process that is not started yet.
pub enum KernelLimit {
    Scope(Scope),
    Group(Group),
}

/// The kernel's statistics of a limit. A value is `None` if the kernel does not provide it.
pub struct LimitStatistics {
    /// Peak usage of the control group, including file pages and kernel memory.
    pub peak_bytes: Option<u64>,
    /// Number of processes that were killed because the limit was reached.
    pub kills: Option<u64>,
}

impl KernelLimit {
    /// Creates a systemd scope or a control group with this limit.
    ///
    /// # Errors
    ///
    /// A message that says what is missing and how to provide it.
    pub fn new(limit_bytes: u64) -> Result<Self, String> {
        remove_dead_groups();
        let name = limit_name(process::own_identity());
        let mut missing = Vec::new();
        if scope::is_systemd_running() {
            match Scope::new(&name, limit_bytes) {
                Ok(scope) => return Ok(Self::Scope(scope)),
                Err(message) => missing.push(message),
            }
        }
        match Group::new("", &name, limit_bytes) {
            Ok(group) => Ok(Self::Group(group)),
            Err(message) => {
                missing.push(message);
                Err(format!("--limit-kernel is not available: {}", missing.join("; ")))
            }
        }
    }

    /// Returns the words of the command line that precede the program and its arguments. They are empty unless systemd
    /// starts the program.
    pub fn launcher(&self) -> &[OsString] {
        match self {
            Self::Scope(scope) => scope.launcher(),
            Self::Group(_) => &[],
        }
    }

    /// Opens the file through which a process enters the limit's control group. Returns `None` for a scope, because the
    /// launcher of a scope enters it.
    ///
    /// # Errors
    ///
    /// A message for the user if the file cannot be opened.
    pub fn open_procs_file(&self) -> Result<Option<File>, String> {
        match self {
            Self::Scope(_) => Ok(None),
            Self::Group(group) => group.open_procs_file().map(Some),
        }
    }

    pub fn statistics(&self) -> LimitStatistics {
        match self {
            // Systemd removes the scope as soon as it is empty. Its statistics are then gone.
            Self::Scope(_) => LimitStatistics { peak_bytes: None, kills: None },
            Self::Group(group) => group.statistics(),
        }
    }
}

/// Returns whether this process is already inside the limit of another `run`.
pub fn is_inside_limit() -> bool {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    groups.lines().any(|line| line.split('/').any(|name| owner_of(name).is_some()))
}

fn limit_name(run: Identity) -> String {
    format!("{NAME_PREFIX}{}-{}", run.pid, run.start_ticks)
}

/// Returns the identity of the `run` that created a group or scope with this name; `None` if the name is not of this
/// form.
fn owner_of(name: &str) -> Option<Identity> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let (pid, start_ticks) = name.strip_prefix(NAME_PREFIX)?.split_once('-')?;
    Some(Identity { pid: pid.parse().ok()?, start_ticks: start_ticks.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_identifies_its_run() {
        let run = Identity { pid: 12, start_ticks: 345 };
        let name = limit_name(run);
        assert_eq!((name.as_str(), owner_of(&name)), ("pagemill-run-12-345", Some(run)));
        assert_eq!(owner_of("pagemill-run-12-345.scope"), Some(run));
        for other in ["pagemill-run-12", "pagemill-run-a-1", "pagemill-test-1-2", "run-1-2", ""] {
            assert_eq!(owner_of(other), None, "{other}");
        }
    }
}
