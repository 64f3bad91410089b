//! Decides whether to receive close events from the kernel. Each event costs the closing process about a microsecond.
//!
//! For many small files in a row the events cost more than they are worth. While such closes arrive and there is room,
//! close events are off, and a full scan follows at the end. Every quarter of a second they are turned on briefly to
//! see whether the closes continue.

use std::time::{Duration, Instant};

/// Close events are turned off from this rate on, if the files hold less than this on average.
const MANY_PER_SECOND: u128 = 10_000;
const SMALL_BYTES: u64 = 64 << 10;

/// How long a rate is measured, and how long events then stay off.
const WINDOW: Duration = Duration::from_millis(10);
const QUIET_LASTS: Duration = Duration::from_millis(250);

/// The scan for missed files starts this long after the last quiet time, and at the latest this long after the first.
const OVER_AFTER: Duration = Duration::from_secs(1);
const LATEST: Duration = Duration::from_secs(5);

/// Change of the kernel's close events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Tell,
    DoNotTell,
}

/// Recent closes, and whether the kernel reports them.
#[derive(Debug)]
pub struct Closes {
    is_told: bool,
    /// Start of the current state and of the counts below.
    since: Instant,
    events: u64,
    held_bytes: u64,
    /// First and last time at which closes may have been missed.
    missed: Option<(Instant, Instant)>,
}

impl Closes {
    pub fn new(now: Instant) -> Self {
        Self { is_told: true, since: now, events: 0, held_bytes: 0, missed: None }
    }

    pub fn is_told(&self) -> bool {
        self.is_told
    }

    /// Adds closes that were reported, and the memory of their files.
    pub fn count(&mut self, events: u64, held_bytes: u64) {
        self.events += events;
        self.held_bytes += held_bytes;
    }

    /// Returns the change to make now. `has_room`: files that arrive unseen will reach no limit.
    pub fn decide(&mut self, now: Instant, has_room: bool) -> Option<Change> {
        let took = now.saturating_duration_since(self.since);
        if !self.is_told {
            return (!has_room || took >= QUIET_LASTS).then(|| self.change(Change::Tell, now));
        }
        if took < WINDOW {
            return None;
        }
        let is_many = u128::from(self.events) * 1_000_000_000 >= MANY_PER_SECOND * took.as_nanos();
        if is_many && has_room && self.held_bytes < self.events * SMALL_BYTES {
            return Some(self.change(Change::DoNotTell, now));
        }
        (self.since, self.events, self.held_bytes) = (now, 0, 0);
        None
    }

    fn change(&mut self, change: Change, now: Instant) -> Change {
        (self.since, self.events, self.held_bytes) = (now, 0, 0);
        self.is_told = change == Change::Tell;
        if self.is_told {
            self.missed = Some((self.missed.map_or(now, |(first, _)| first), now));
        }
        change
    }

    /// Returns whether the scan for missed files is due, once per quiet time. Without room it is due at once.
    pub fn is_look_due(&mut self, now: Instant, has_room: bool) -> bool {
        let is_over =
            |(first, last): (Instant, Instant)| now >= last + OVER_AFTER || now >= first + LATEST || !has_room;
        let is_due = self.is_told && self.missed.is_some_and(is_over);
        if is_due {
            self.missed = None;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// During many closes of small files events are on only briefly; a scan follows at the end.
    #[test]
    fn many_small_files_are_not_told_of() {
        let mut now = Instant::now();
        let mut closes = Closes::new(now);
        for _ in 0..3 {
            closes.count(100, 100 * 4096);
            assert_eq!(closes.decide(now + 5 * MS, true), None, "too soon to tell");
            now += WINDOW;
            assert_eq!(closes.decide(now, true), Some(Change::DoNotTell));
            assert!(!closes.is_told() && closes.decide(now + 100 * MS, true).is_none());
            now += QUIET_LASTS;
            assert!(!closes.is_look_due(now, true));
            assert_eq!(closes.decide(now, true), Some(Change::Tell));
        }
        now += OVER_AFTER;
        assert_eq!(closes.decide(now, true), None, "nothing came any more");
        assert!(closes.is_look_due(now, true) && !closes.is_look_due(now, true), "once");
    }

    /// Few files, and large ones, are reported; when room is short, a quiet time ends at once.
    #[test]
    fn what_matters_is_told() {
        let mut now = Instant::now();
        let mut closes = Closes::new(now);
        for (events, held_bytes, has_room) in [(99, 99 * 4096, true), (200, 200 * SMALL_BYTES, true), (200, 0, false)] {
            closes.count(events, held_bytes);
            now += WINDOW;
            assert_eq!(closes.decide(now, has_room), None);
        }
        closes.count(1000, 0);
        now += WINDOW;
        assert_eq!(closes.decide(now, true), Some(Change::DoNotTell));
        assert_eq!(closes.decide(now + MS, false), Some(Change::Tell));
        assert!(closes.is_look_due(now + MS, false));
    }
}
