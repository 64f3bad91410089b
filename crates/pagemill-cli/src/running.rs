//! Failures and fallbacks that the governors of running processes publish: a part of `doctor`.

use pagemill::published;
use pagemill::stats::{Counter, Snapshot};
use pagemill_sys::probe::Availability;

/// One aspect of the governor, over all running processes.
pub struct Layer {
    pub key: &'static str,
    pub name: &'static str,
    pub state: Availability,
    pub found: String,
    /// The fallback.
    pub lost: &'static str,
}

/// A failure: its counter and its meaning.
struct Mishap {
    counter: Counter,
    name: &'static str,
    what: &'static str,
    lost: &'static str,
}

const MISHAPS: &[Mishap] = &[
    Mishap {
        counter: Counter::AlarmsRefused,
        name: "alarms set",
        what: "alarms could not be set",
        lost: "limits are polled every 1 to 64 ms; stalls of other processes are not noticed",
    },
    Mishap {
        counter: Counter::HelperLate,
        name: "helpers in time",
        what: "times a helper woke over 20 ms late",
        lost: "growth of other processes is handled late; every charge of the process itself still reclaims first",
    },
    Mishap {
        counter: Counter::LimitsUnread,
        name: "limits read",
        what: "reads of a group's or the machine's memory failed",
        lost: "that limit had no effect meanwhile; --limit, other groups and memory offered to the kernel did",
    },
    Mishap {
        counter: Counter::OwnersFailed,
        name: "owners of memory",
        what: "owners failed and are not called any more",
        lost: "their memory is not returned; other owners are called instead",
    },
    Mishap {
        counter: Counter::OwnersBlocked,
        name: "owners that answer",
        what: "times an owner that did not return was skipped",
        lost: "its memory could not be returned then; other owners were called instead",
    },
    Mishap {
        counter: Counter::PurgeFailed,
        name: "purges done",
        what: "purges refused by the kernel (locked memory)",
        lost: "locked memory stays resident",
    },
    Mishap {
        counter: Counter::RingsRefused,
        name: "rings for files",
        what: "rings were refused by the kernel",
        lost: "threads that read and write: more CPU per I/O",
    },
    Mishap {
        counter: Counter::RegionsRefused,
        name: "memory known to rings",
        what: "pieces of memory could not be registered (memlock)",
        lost: "each direct transfer looks up its pages: more CPU per large read",
    },
    Mishap {
        counter: Counter::HugetlbRefused,
        name: "reserved pages for caches",
        what: "caches requested more reserved huge pages than were free",
        lost: "ordinary memory, which is charged and may come in small pages",
    },
];

/// Returns the layers, summed over this user's running processes; empty if none publishes figures.
pub fn layers() -> Vec<Layer> {
    layers_of(&published::running())
}

fn layers_of(running: &[Snapshot]) -> Vec<Layer> {
    if running.is_empty() {
        return Vec::new();
    }
    let sum = |counter| running.iter().fold(0u64, |sum, process| sum.saturating_add(process.get(counter)));
    // At most one helper per process, even if a file is damaged.
    let processes_with = |counter| running.iter().filter(|process| process.get(counter) > 0).count();
    let helpers = processes_with(Counter::Helpers);
    let preferred = processes_with(Counter::HelpersPreferred);
    let (warned, told) = (processes_with(Counter::HelpersWarned), processes_with(Counter::HelpersToldOfStalls));
    let processes = match running.len() {
        1 => "1 process".to_owned(),
        count => format!("{count} processes"),
    };
    let mut layers = vec![
        Layer {
            key: "running_processes",
            name: "processes on Pagemill",
            state: Availability::Available,
            found: format!("{processes}, {helpers} with a helper"),
            lost: "nothing",
        },
        Layer {
            key: "running_preferred",
            name: "helpers go first",
            state: if preferred < helpers { Availability::Limited } else { Availability::Available },
            found: format!("{preferred} of {helpers} by real-time priority"),
            lost: "on a busy machine they run late; every charge of the process itself still reclaims first",
        },
        Layer {
            key: "running_warned",
            name: "helpers are woken",
            state: Availability::Available,
            found: format!("{warned} near a group's limit, {told} by stalls"),
            lost: "nothing",
        },
    ];
    layers.extend(MISHAPS.iter().map(|mishap| {
        let times = sum(mishap.counter);
        Layer {
            key: mishap.counter.name(),
            name: mishap.name,
            state: if times > 0 { Availability::Limited } else { Availability::Available },
            found: if times > 0 { format!("{times} {}", mishap.what) } else { "all".to_owned() },
            lost: mishap.lost,
        }
    }));
    layers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without running processes there are no layers; for a process without figures every layer is available.
    #[test]
    fn mishaps_are_told_only_where_they_happened() {
        assert!(layers_of(&[]).is_empty());
        let layers = layers_of(&[Snapshot::default()]);
        assert_eq!(layers.len(), 3 + MISHAPS.len());
        assert!(layers.iter().all(|layer| layer.state == Availability::Available));
        assert_eq!(layers[0].found, "1 process, 0 with a helper");
        assert_eq!(layers_of(&[Snapshot::default(), Snapshot::default()])[0].found, "2 processes, 0 with a helper");
    }
}
