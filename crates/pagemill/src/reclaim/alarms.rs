//! What the kernel wakes the helper for: thresholds and limits of control groups, and stalls.
//!
//! Set by [`super::limits::Limits`], owned by the helper: the descriptors lie in
//! its own table. A second thread, which only sleeps, passes the signs on, since
//! nobody can wait for a futex and for descriptors at once before Linux 6.7.

use crate::stats::{self, Counter};
use pagemill_sys::events::{Events, Source};
use std::io;

/// Alarms that can be set: two for each of the nearest limits, stalls of the group and of the machine.
const MAX_ALARMS: usize = 12;

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
            covered: Covered::default(),
        })
    }

    /// The descriptor to wait for.
    pub fn number(&self) -> i32 {
        self.events.number()
    }

    /// Clears all alarms unless they are set for this state of the limits. Returns whether they are to be set now.
    pub fn begin(&mut self, state: u32) -> bool {
        if self.set_for == Some(state) {
            return false;
        }
        self.sources = [const { None }; MAX_ALARMS];
        self.covered = Covered::default();
        self.set_for = Some(state);
        true
    }

    /// Sets one. Returns whether that was done; it is counted if not.
    pub fn set(&mut self, make: impl FnOnce(&Events) -> io::Result<Source>) -> bool {
        let place = self.sources.iter_mut().find(|place| place.is_none());
        let is_set = place.is_some_and(|place| {
            *place = make(&self.events).ok();
            place.is_some()
        });
        if !is_set {
            stats::add(Counter::AlarmsRefused, 1);
        }
        is_set
    }

    /// Publishes what is covered.
    pub fn publish(&self) {
        let Covered { has_thresholds, has_limits, has_stalls } = self.covered;
        stats::set(Counter::HelpersWarned, u64::from(has_thresholds || has_limits));
        stats::set(Counter::HelpersToldOfStalls, u64::from(has_stalls));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Set once for each state; a refusal is counted and covers nothing.
    #[test]
    fn alarms_are_set_once_for_each_state() {
        let mut alarms = Alarms::new().unwrap();
        assert!(alarms.begin(1) && !alarms.begin(1) && alarms.begin(2));
        let before = stats::get(Counter::AlarmsRefused);
        assert!(!alarms.set(|events| events.add_threshold("/nowhere", 1)));
        assert!(stats::get(Counter::AlarmsRefused) > before);
        assert_eq!(alarms.covered, Covered::default());
    }
}
