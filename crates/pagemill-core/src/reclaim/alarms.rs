//! Alarms: kernel events that wake the helper when a control group gets near its limit, meets it, or stalls on memory.
//!
//! [`super::limits::Limits`] says which alarms are needed. The helper thread sets them and owns their descriptors,
//! which live in its own descriptor table. A second thread waits for the descriptors and wakes the helper through its
//! futex, because before Linux 6.7 a thread cannot wait for a futex and for descriptors at once.

use super::limits::{alarm_bytes, margin_bytes};
use crate::stats::{self, Counter};
use pagemill_sys::cgroup::{Limit, Version};
use pagemill_sys::clock;
use pagemill_sys::events::{Events, Sign, Source};
use pagemill_sys::file::Path;
use std::io;

/// Maximum number of control groups that get alarms: the innermost ones that have a limit.
pub const MAX_GROUPS: usize = 4;

/// Maximum number of alarms: two for each group, one for stalls of the process's group, and one for stalls of the
/// machine.
const MAX_ALARMS: usize = 2 * MAX_GROUPS + 2;

/// Tasks that wait for memory for this long within two seconds raise a stall event.
const STALL_US: u32 = 150_000;

/// Time in nanoseconds after which refused alarms are set again. A refusal may be temporary, for example if descriptors
/// have run out.
const RETRY_AFTER_NS: u64 = 60_000_000_000;

/// The limits of control groups, and the stall files, for which alarms (kernel events) are to be set.
///
/// Example: [`Alarms`].
pub struct AlarmPlan {
    /// Version number of the limits for which this plan was made.
    pub state: u32,
    pub version: Option<Version>,
    /// The groups with a limit, innermost first.
    pub groups: [Option<(Path, Limit)>; MAX_GROUPS],
    /// Whether `groups` contains all groups that have a limit.
    pub is_complete: bool,
    /// The files that report stalls of the process's group and of the machine.
    pub stalls: [Option<Path>; 2],
}

/// The kinds of kernel events that wake the helper thread, because alarms for them are set.
///
/// Example: [`Alarms`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoveredEvents {
    /// A group that reaches three quarters of its limit wakes the helper, so the helper need not poll before that.
    pub has_thresholds: bool,
    /// A group that meets its limit wakes the helper.
    pub has_limits: bool,
    /// Tasks that stall on memory, in the process's group or on the machine, wake the helper.
    pub has_stalls: bool,
}

/// The alarms that are set, and the kernel event set that reports them.
///
/// ```
/// let alarms = pagemill_core::reclaim::alarms::Alarms::new()?;
/// assert!(alarms.limits_version().is_none() && !alarms.covered.has_limits); // none is set yet
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Alarms {
    events: Events,
    sources: [Option<Source>; MAX_ALARMS],
    /// Version number of the limits for which the alarms were set; `None` before the first call of `set_all`.
    limits_version: Option<u32>,
    /// Time at which a refused alarm is tried again; `None` if no alarm was refused.
    retry_ns: Option<u64>,
    /// The kinds of events for which alarms are set.
    pub covered: CoveredEvents,
}

impl Alarms {
    /// Creates an empty set of alarms.
    ///
    /// # Errors
    ///
    /// The error of creating the kernel's event set.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            events: Events::new()?,
            sources: [const { None }; MAX_ALARMS],
            limits_version: None,
            retry_ns: None,
            covered: CoveredEvents::default(),
        })
    }

    /// Returns the descriptor that becomes readable when an alarm fires.
    pub fn descriptor(&self) -> i32 {
        self.events.number()
    }

    /// Returns the version number of the limits for which the alarms are set; `None` if the alarms must be set again.
    pub fn limits_version(&self) -> Option<u32> {
        self.limits_version.filter(|_| self.retry_ns.is_none_or(|retry| clock::fine_ns() < retry))
    }

    /// Removes all alarms and sets the alarms of the plan. May take some tens of milliseconds: closing an alarm waits
    /// for the kernel's readers (RCU).
    ///
    /// Cgroup version 1 supports thresholds. Two are set for each group: one where its limit gets near, and one well
    /// before its margin begins. Version 2 reports when a group meets its limit or stalls. Stalls of the machine are
    /// reported with both versions.
    pub fn set_all(&mut self, plan: &AlarmPlan) {
        self.sources = [const { None }; MAX_ALARMS];
        (self.limits_version, self.retry_ns) = (Some(plan.state), None);
        let (mut has_limits, mut has_stalls) = (plan.is_complete, false);
        for (folder, limit) in plan.groups.iter().flatten() {
            let folder = folder.as_str();
            has_limits &= match plan.version {
                Some(Version::V1) => {
                    let ahead = limit.soft_bytes - 2 * margin_bytes(*limit);
                    self.set_alarm(|events| events.add_threshold(folder, alarm_bytes(*limit)))
                        && self.set_alarm(|events| events.add_threshold(folder, ahead))
                }
                _ => self.set_alarm(|events| events.add_group_events(folder)),
            };
        }
        for (file, sign) in plan.stalls.iter().zip([Sign::GroupStall, Sign::MachineStall]) {
            if let Some(file) = file {
                has_stalls |= self.set_alarm(|events| events.add_stalls(file.as_c_str(), STALL_US, sign));
            }
        }
        has_limits &= plan.groups[0].is_some();
        let has_thresholds = has_limits && plan.version == Some(Version::V1);
        self.covered = CoveredEvents { has_thresholds, has_limits, has_stalls };
        self.publish();
    }

    /// Returns those bits of `reported`, a mask of kernel events, whose event really happened. The kernel also wakes
    /// waiters for other reasons.
    pub fn genuine_events(&mut self, reported: u64) -> u64 {
        self.sources.iter_mut().flatten().fold(reported, |genuine, source| {
            let sign = source.sign() as u64;
            if reported & sign != 0 && !source.is_genuine() { genuine & !sign } else { genuine }
        })
    }

    /// Sets one alarm. Returns whether that succeeded. A failure is counted, and schedules a retry.
    fn set_alarm(&mut self, make: impl FnOnce(&Events) -> io::Result<Source>) -> bool {
        let place = self.sources.iter_mut().find(|place| place.is_none());
        let is_set = place.is_some_and(|place| {
            *place = make(&self.events).ok();
            place.is_some()
        });
        if !is_set {
            stats::add(Counter::AlarmsRefused, 1);
            self.retry_ns = Some(clock::fine_ns() + RETRY_AFTER_NS);
        }
        is_set
    }

    /// Publishes in the counters which kinds of events wake the helper.
    fn publish(&self) {
        let CoveredEvents { has_thresholds, has_limits, has_stalls } = self.covered;
        stats::set(Counter::HelpersWarned, u64::from(has_thresholds || has_limits));
        stats::set(Counter::HelpersToldOfStalls, u64::from(has_stalls));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn plan_for(state: u32, folder: &str, version: Version) -> AlarmPlan {
        let limit = Limit { soft_bytes: 1 << 30, hard_bytes: 1 << 30 };
        let path = Path::format(format_args!("{folder}")).unwrap();
        let mut groups = [const { None }; MAX_GROUPS];
        groups[0] = Some((path, limit));
        AlarmPlan { state, version: Some(version), groups, is_complete: true, stalls: [const { None }; 2] }
    }

    /// Sets an alarm that the kernel refuses. The refusal must be counted, no event may be covered, and the alarm must
    /// be set again after a minute.
    #[test]
    fn a_refused_alarm_is_counted_and_retried() {
        let mut alarms = Alarms::new().unwrap();
        let before = stats::get(Counter::AlarmsRefused);
        assert_eq!(alarms.limits_version(), None);
        alarms.set_all(&plan_for(1, "/nowhere", Version::V1));
        assert!(stats::get(Counter::AlarmsRefused) > before);
        assert_eq!((alarms.covered, alarms.limits_version()), (CoveredEvents::default(), Some(1)));
        alarms.retry_ns = Some(0);
        assert_eq!(alarms.limits_version(), None, "a minute has passed");
        let nothing = AlarmPlan { groups: [const { None }; MAX_GROUPS], ..plan_for(2, "", Version::V2) };
        alarms.set_all(&nothing);
        assert_eq!((alarms.covered, alarms.limits_version()), (CoveredEvents::default(), Some(2)));
    }

    /// Sets alarms for this process's own group, if the group's files can be written. The alarms must cover the events
    /// that the group's cgroup version supports. With a plan that lacks a group, no limits may be covered.
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
        alarms.set_all(&plan_for(7, own.as_str(), groups.version));
        let is_v1 = groups.version == Version::V1;
        assert_eq!((alarms.covered.has_limits, alarms.covered.has_thresholds), (true, is_v1));
        let partial = AlarmPlan { is_complete: false, ..plan_for(8, own.as_str(), groups.version) };
        alarms.set_all(&partial);
        assert_eq!(alarms.covered, CoveredEvents::default(), "a limit without an alarm");
    }
}
