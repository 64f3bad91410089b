//! What the kernel wakes the helper for: thresholds and limits of control groups, and stalls.
//!
//! Planned by [`super::limits::Limits`], set and owned by the helper: the descriptors
//! lie in its own table. A second thread, which only sleeps, passes the signs on, since
//! nobody can wait for a futex and for descriptors at once before Linux 6.7.

use super::limits::{alarm_bytes, margin_bytes};
use crate::stats::{self, Counter};
use pagemill_sys::cgroup::{Limit, Version};
use pagemill_sys::clock;
use pagemill_sys::events::{Events, Sign, Source};
use pagemill_sys::file::Path;
use std::io;

/// Alarms are set for so many limits, innermost first.
pub const MAX_GROUPS: usize = 4;

/// Two for each group, stalls of the group and of the machine.
const MAX_ALARMS: usize = 2 * MAX_GROUPS + 2;

/// Waiting for memory so long within two seconds counts as a stall.
const STALL_US: u32 = 150_000;

/// What was refused is tried again so much later: descriptors may have been short.
const RETRY_NS: u64 = 60_000_000_000;

/// What alarms are to be set for.
pub struct Plan {
    /// Which state of the limits it is for.
    pub state: u32,
    pub version: Option<Version>,
    /// The groups with a limit, innermost first.
    pub groups: [Option<(Path, Limit)>; MAX_GROUPS],
    /// There are no more groups with a limit than these.
    pub is_complete: bool,
    /// Where stalls of the group and of the machine are told.
    pub stalls: [Option<Path>; 2],
}

/// What is covered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Covered {
    /// Passing three quarters of any group's limit wakes the helper: far from it nobody has to look.
    pub has_thresholds: bool,
    /// Meeting a limit wakes the helper.
    pub has_limits: bool,
    /// Waiting for memory wakes the helper.
    pub has_stalls: bool,
}

/// The alarms that are set.
pub struct Alarms {
    events: Events,
    sources: [Option<Source>; MAX_ALARMS],
    /// Which state of the limits they are for; `None` before the first.
    set_for: Option<u32>,
    /// Something was refused: when to try again.
    retry_ns: Option<u64>,
    pub covered: Covered,
}

impl Alarms {
    /// # Errors
    ///
    /// What making a set of events says.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            events: Events::new()?,
            sources: [const { None }; MAX_ALARMS],
            set_for: None,
            retry_ns: None,
            covered: Covered::default(),
        })
    }

    /// The descriptor to wait for.
    pub fn number(&self) -> i32 {
        self.events.number()
    }

    /// The state of the limits that needs no new plan; `None`: any does.
    pub fn set_for(&self) -> Option<u32> {
        self.set_for.filter(|_| self.retry_ns.is_none_or(|retry| clock::fine_ns() < retry))
    }

    /// Clears all alarms and sets those of the plan. May take some tens of milliseconds: the kernel waits for readers.
    ///
    /// Version 1 warns at thresholds, set where a limit gets near and well before its margin begins; version 2 when a limit is
    /// met, and when the group stalls. The machine's stalls come to both.
    pub fn set_all(&mut self, plan: &Plan) {
        self.sources = [const { None }; MAX_ALARMS];
        (self.set_for, self.retry_ns) = (Some(plan.state), None);
        let (mut has_limits, mut has_stalls) = (plan.is_complete, false);
        for (folder, limit) in plan.groups.iter().flatten() {
            let folder = folder.as_str();
            has_limits &= match plan.version {
                Some(Version::V1) => {
                    let ahead = limit.soft_bytes - 2 * margin_bytes(*limit);
                    self.set(|events| events.add_threshold(folder, alarm_bytes(*limit)))
                        && self.set(|events| events.add_threshold(folder, ahead))
                }
                _ => self.set(|events| events.add_group_events(folder)),
            };
        }
        for (file, sign) in plan.stalls.iter().zip([Sign::GroupStall, Sign::MachineStall]) {
            if let Some(file) = file {
                has_stalls |= self.set(|events| events.add_stalls(file.as_c_str(), STALL_US, sign));
            }
        }
        has_limits &= plan.groups[0].is_some();
        let has_thresholds = has_limits && plan.version == Some(Version::V1);
        self.covered = Covered { has_thresholds, has_limits, has_stalls };
        self.publish();
    }

    /// Of the signs that have come, as a sum of bits, those that are of something.
    pub fn confirm(&mut self, signs: u64) -> u64 {
        let mut untrue = 0;
        for source in self.sources.iter_mut().flatten() {
            let sign = source.sign() as u64;
            if signs & sign != 0 && !source.is_true() {
                untrue |= sign;
            }
        }
        signs & !untrue
    }

    /// Sets one. Returns whether that was done; it is counted if not.
    fn set(&mut self, make: impl FnOnce(&Events) -> io::Result<Source>) -> bool {
        let place = self.sources.iter_mut().find(|place| place.is_none());
        let is_set = place.is_some_and(|place| {
            *place = make(&self.events).ok();
            place.is_some()
        });
        if !is_set {
            stats::add(Counter::AlarmsRefused, 1);
            self.retry_ns = Some(clock::fine_ns() + RETRY_NS);
        }
        is_set
    }

    /// Publishes what is covered.
    fn publish(&self) {
        let Covered { has_thresholds, has_limits, has_stalls } = self.covered;
        stats::set(Counter::HelpersWarned, u64::from(has_thresholds || has_limits));
        stats::set(Counter::HelpersToldOfStalls, u64::from(has_stalls));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn plan(state: u32, folder: &str, version: Version) -> Plan {
        let limit = Limit { soft_bytes: 1 << 30, hard_bytes: 1 << 30 };
        let path = Path::format(format_args!("{folder}")).unwrap();
        let mut groups = [const { None }; MAX_GROUPS];
        groups[0] = Some((path, limit));
        Plan { state, version: Some(version), groups, is_complete: true, stalls: [const { None }; 2] }
    }

    /// A refusal is counted, covers nothing, and is tried again after a while; a state that is covered is not.
    #[test]
    fn refusals_are_counted_and_tried_again() {
        let mut alarms = Alarms::new().unwrap();
        let before = stats::get(Counter::AlarmsRefused);
        assert_eq!(alarms.set_for(), None);
        alarms.set_all(&plan(1, "/nowhere", Version::V1));
        assert!(stats::get(Counter::AlarmsRefused) > before);
        assert_eq!((alarms.covered, alarms.set_for()), (Covered::default(), Some(1)));
        alarms.retry_ns = Some(0);
        assert_eq!(alarms.set_for(), None, "a minute has passed");
        let nothing = Plan { groups: [const { None }; MAX_GROUPS], ..plan(2, "", Version::V2) };
        alarms.set_all(&nothing);
        assert_eq!((alarms.covered, alarms.set_for()), (Covered::default(), Some(2)));
    }

    /// The group of this process, where it has one: its alarms can be set, and cover what its version can.
    #[test]
    fn alarms_of_a_real_group_are_set() {
        let groups = match pagemill_sys::cgroup::Hierarchy::find("") {
            Ok(groups) => groups,
            Err(error) => return println!("skipped: no control group: {error}"),
        };
        let own = groups.folder(0).unwrap();
        if std::fs::OpenOptions::new().write(true).open(format!("{}/cgroup.procs", own.as_str())).is_err() {
            return println!("skipped: the group cannot be written");
        }
        let mut alarms = Alarms::new().unwrap();
        alarms.set_all(&plan(7, own.as_str(), groups.version));
        let is_v1 = groups.version == Version::V1;
        assert_eq!((alarms.covered.has_limits, alarms.covered.has_thresholds), (true, is_v1));
        let partial = Plan { is_complete: false, ..plan(8, own.as_str(), groups.version) };
        alarms.set_all(&partial);
        assert_eq!(alarms.covered, Covered::default(), "a limit without an alarm");
    }
}
