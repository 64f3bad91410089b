//! What the governors of the running processes had to do without, as far as they publish it: a part of `doctor`.

use pagemill::published;
use pagemill::stats::{Counter, Snapshot};
use pagemill_sys::probe::State;

/// A layer of the governor, over all running processes.
pub struct Layer {
    pub key: &'static str,
    pub name: &'static str,
    pub state: State,
    pub found: String,
    /// What takes its place.
    pub lost: &'static str,
}

/// Something that should not happen: its counter, and what it means.
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
        lost: "limits are looked at every 1 to 64 ms instead of being woken; stalls of others are not heard",
    },
    Mishap {
        counter: Counter::HelperLate,
        name: "helpers in time",
        what: "times a helper woke over 20 ms late",
        lost: "what others take of a limit is answered late; every charge of the process itself still gives first",
    },
    Mishap {
        counter: Counter::LimitsUnread,
        name: "limits read",
        what: "looks at a group or at the machine's memory told nothing",
        lost: "that limit did not bind meanwhile; --limit, other groups and what was offered to the kernel did",
    },
    Mishap {
        counter: Counter::OwnersFailed,
        name: "owners of memory",
        what: "owners failed and are not asked any more",
        lost: "what they hold is not given back; the others are asked in their place",
    },
    Mishap {
        counter: Counter::OwnersBlocked,
        name: "owners that answer",
        what: "times an owner was passed over that did not come back",
        lost: "what it holds could not be given just then; the others were asked in its place",
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
        lost: "each direct transfer looks its pages up: more CPU per large read",
    },
    Mishap {
        counter: Counter::HugetlbRefused,
        name: "reserved pages for caches",
        what: "caches wanted more reserved huge pages than were free",
        lost: "ordinary memory, which is charged and may come in small pages",
    },
];

/// The layers, summed over this user's running processes; nothing where none publishes figures.
pub fn layers() -> Vec<Layer> {
    layers_of(&published::running())
}

fn layers_of(running: &[Snapshot]) -> Vec<Layer> {
    if running.is_empty() {
        return Vec::new();
    }
    let sum = |counter| running.iter().fold(0u64, |sum, process| sum.saturating_add(process.get(counter)));
    // One helper a process at most, whatever a damaged file says.
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
            state: State::Available,
            found: format!("{processes}, {helpers} with a helper"),
            lost: "nothing",
        },
        Layer {
            key: "running_preferred",
            name: "helpers go first",
            state: if preferred < helpers { State::Limited } else { State::Available },
            found: format!("{preferred} of {helpers} by real-time priority"),
            lost: "on a busy machine they come late; every charge of the process itself still gives first",
        },
        Layer {
            key: "running_warned",
            name: "helpers are woken",
            state: State::Available,
            found: format!("{warned} near a group's limit, {told} by stalls"),
            lost: "nothing",
        },
    ];
    layers.extend(MISHAPS.iter().map(|mishap| {
        let times = sum(mishap.counter);
        Layer {
            key: mishap.counter.name(),
            name: mishap.name,
            state: if times > 0 { State::Limited } else { State::Available },
            found: if times > 0 { format!("{times} {}", mishap.what) } else { "all".to_owned() },
            lost: mishap.lost,
        }
    }));
    layers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nobody running: nothing to say. One process without figures: all is well.
    #[test]
    fn mishaps_are_told_only_where_they_happened() {
        assert!(layers_of(&[]).is_empty());
        let layers = layers_of(&[Snapshot::default()]);
        assert_eq!(layers.len(), 3 + MISHAPS.len());
        assert!(layers.iter().all(|layer| layer.state == State::Available));
        assert_eq!(layers[0].found, "1 process, 0 with a helper");
        assert_eq!(layers_of(&[Snapshot::default(), Snapshot::default()])[0].found, "2 processes, 0 with a helper");
    }
}
