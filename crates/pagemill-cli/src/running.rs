//! The rows of `pagemill doctor` about running processes. They show failures and fallbacks that the governors of the
//! processes have counted and published.

use pagemill_core::published;
use pagemill_core::stats::{Counter, Snapshot};
use pagemill_sys::probe::Availability;

/// A row of the table: the failures of one kind, summed over all running processes.
pub struct GovernorRow {
    pub key: &'static str,
    pub name: &'static str,
    pub state: Availability,
    pub found: String,
    /// What does not work if the state is not `Available`.
    pub lost: &'static str,
}

/// A kind of failure: the counter that counts it, the name of its row, its meaning and its effect.
struct Failure {
    counter: Counter,
    name: &'static str,
    what: &'static str,
    lost: &'static str,
}

const FAILURES: &[Failure] = &[
    Failure {
        counter: Counter::AlarmsRefused,
        name: "alarms set",
        what: "alarms could not be set",
        lost: "limits are polled every 1 to 64 ms instead; stalls of other processes are not noticed",
    },
    Failure {
        counter: Counter::HelperLate,
        name: "helpers in time",
        what: "times a helper woke over 20 ms late",
        lost: "growth of other processes is handled late; a charge of the process itself still reclaims first",
    },
    Failure {
        counter: Counter::LimitsUnread,
        name: "limits read",
        what: "reads of a group's or the machine's memory failed",
        lost: "that limit had no effect during the failures; --limit and the limits of other groups had",
    },
    Failure {
        counter: Counter::OwnersFailed,
        name: "owners of memory",
        what: "owners of memory failed and are not called any more",
        lost: "their memory is not returned; other owners are called instead",
    },
    Failure {
        counter: Counter::OwnersBlocked,
        name: "owners that answer",
        what: "times an owner of memory was skipped, because it did not return from a call",
        lost: "its memory could not be returned then; other owners were called instead",
    },
    Failure {
        counter: Counter::PurgeFailed,
        name: "purges done",
        what: "purges refused by the kernel (locked memory)",
        lost: "locked memory stays resident",
    },
    Failure {
        counter: Counter::RingsRefused,
        name: "rings for files",
        what: "rings were refused by the kernel",
        lost: "threads read and write instead: more CPU time per I/O",
    },
    Failure {
        counter: Counter::RegionsRefused,
        name: "memory known to rings",
        what: "pieces of memory could not be registered (memlock)",
        lost: "each direct transfer looks up its pages: more CPU time per large read",
    },
    Failure {
        counter: Counter::HugetlbRefused,
        name: "reserved pages for caches",
        what: "caches requested more reserved huge pages than were free",
        lost: "ordinary memory is used instead, which is charged and may be in small pages",
    },
];

/// Returns a row for each kind of failure, summed over this user's running processes. Empty if no process publishes
/// statistics.
pub fn governor_rows() -> Vec<GovernorRow> {
    failure_rows(&published::running())
}

fn failure_rows(running: &[Snapshot]) -> Vec<GovernorRow> {
    if running.is_empty() {
        return Vec::new();
    }
    let sum = |counter| running.iter().fold(0u64, |sum, process| sum.saturating_add(process.get(counter)));
    // Each process counts at most once, even if the values in its published file are damaged.
    let processes_with = |counter| running.iter().filter(|process| process.get(counter) > 0).count();
    let helpers = processes_with(Counter::Helpers);
    let preferred = processes_with(Counter::HelpersPreferred);
    let (warned, woken_by_stalls) =
        (processes_with(Counter::HelpersWarned), processes_with(Counter::HelpersToldOfStalls));
    let processes = match running.len() {
        1 => "1 process".to_owned(),
        count => format!("{count} processes"),
    };
    let mut rows = vec![
        GovernorRow {
            key: "running_processes",
            name: "processes on Pagemill",
            state: Availability::Available,
            found: format!("{processes}, {helpers} with a helper"),
            lost: "nothing",
        },
        GovernorRow {
            key: "running_preferred",
            name: "helpers have priority",
            state: if preferred < helpers { Availability::Limited } else { Availability::Available },
            found: format!("{preferred} of {helpers} have real-time priority"),
            lost: "on a busy machine helpers run late; a charge of the process itself still reclaims first",
        },
        GovernorRow {
            key: "running_warned",
            name: "helpers are woken",
            state: Availability::Available,
            found: format!("{warned} when a group's limit is near, {woken_by_stalls} at stalls"),
            lost: "nothing",
        },
    ];
    rows.extend(FAILURES.iter().map(|failure| {
        let times = sum(failure.counter);
        GovernorRow {
            key: failure.counter.name(),
            name: failure.name,
            state: if times > 0 { Availability::Limited } else { Availability::Available },
            found: if times > 0 { format!("{times} {}", failure.what) } else { "all".to_owned() },
            lost: failure.lost,
        }
    }));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without running processes, there must be no rows. If the processes have counted no failures, the state of every
    /// row must be `Available`.
    #[test]
    fn only_counted_failures_are_reported() {
        assert!(failure_rows(&[]).is_empty());
        let rows = failure_rows(&[Snapshot::default()]);
        assert_eq!(rows.len(), 3 + FAILURES.len());
        assert!(rows.iter().all(|row| row.state == Availability::Available));
        assert_eq!(rows[0].found, "1 process, 0 with a helper");
        assert_eq!(failure_rows(&[Snapshot::default(), Snapshot::default()])[0].found, "2 processes, 0 with a helper");
    }
}
