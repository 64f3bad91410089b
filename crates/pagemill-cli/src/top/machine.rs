//! The memory of the machine and of this command's control group, and stalls on memory (PSI).

use pagemill_sys::cgroup::{self, Hierarchy};
use std::fs;

/// Shares of the last ten seconds in which threads stalled because memory was short, in percent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stalls {
    /// At least one thread stalled.
    pub some_percent: f64,
    /// All threads stalled.
    pub full_percent: f64,
}

/// The control group with the smallest memory limit among those above this command.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupUsage {
    pub name: String,
    pub limit_bytes: u64,
    pub used_bytes: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct MachineSample {
    pub total_bytes: u64,
    /// Memory that programs could still allocate without swapping.
    pub available_bytes: u64,
    /// `None` if the kernel has no PSI.
    pub stalls: Option<Stalls>,
    /// `None` if no group above this command has a limit below the machine's memory.
    pub group: Option<GroupUsage>,
}

impl MachineSample {
    /// Takes some 50 us, and some 100 us for the groups.
    pub fn read() -> Self {
        let (total_bytes, available_bytes) =
            cgroup::machine("").map_or((0, 0), |machine| (machine.total_bytes, machine.available_bytes));
        let stalls = fs::read_to_string("/proc/pressure/memory").ok().and_then(|text| parse_stalls(&text));
        let group = Hierarchy::find("").ok().and_then(|groups| tightest_group(&groups));
        let group = group.filter(|group| total_bytes == 0 || group.limit_bytes < total_bytes);
        Self { total_bytes, available_bytes, stalls, group }
    }
}

/// Returns the group with the smallest limit; `None` if no group has a limit.
pub fn tightest_group(groups: &Hierarchy) -> Option<GroupUsage> {
    let folders = (0..).map_while(|level| groups.folder(level));
    let limited = folders.filter_map(|folder| {
        let limit_bytes = groups.limit(&folder).hard_bytes;
        let used_bytes = groups.usage_bytes(&folder).ok()?;
        (limit_bytes != u64::MAX).then(|| GroupUsage { name: groups.name(&folder).to_owned(), limit_bytes, used_bytes })
    });
    limited.min_by_key(|group| group.limit_bytes)
}

/// Parses `/proc/pressure/memory`. Returns `None` if a row is missing.
fn parse_stalls(text: &str) -> Option<Stalls> {
    let percent = |row: &str| -> Option<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(row))?;
        line.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
    };
    Some(Stalls { some_percent: percent("some")?, full_percent: percent("full")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_are_parsed() {
        let text = "some avg10=1.50 avg60=0.10 avg300=0.00 total=9\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=3\n";
        assert_eq!(parse_stalls(text), Some(Stalls { some_percent: 1.5, full_percent: 0.25 }));
        assert_eq!((parse_stalls("some avg10=x"), parse_stalls("")), (None, None));
    }
}
