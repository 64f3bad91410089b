//! Decides whether the kernel reports closes of files. Each reported close costs the closing process about a
//! microsecond.
//!
//! When processes close many small files in a row, the events cost more than they save. Close events are then off while
//! the closes continue and the file system is far from its limits: a *quiet time*. Every quarter of a second, the
//! events are turned on for 10 ms to measure the rate of closes. After the quiet times, a full scan finds the files
//! that were closed in them (the *missed* files).

use std::time::{Duration, Instant};

/// Close events are turned off only if at least this many files are closed per second.
const MIN_CLOSES_PER_SECOND: u128 = 10_000;

/// Close events are turned off only if the closed files have less memory than this on average.
const SMALL_FILE_BYTES: u64 = 64 << 10;

/// How long one measurement of the rate of closes takes.
const MEASURE_PERIOD: Duration = Duration::from_millis(10);

/// How long close events stay off before the next measurement.
const QUIET_PERIOD: Duration = Duration::from_millis(250);

/// The scan for missed files starts this long after the end of the last quiet time.
const SCAN_DELAY: Duration = Duration::from_secs(1);

/// The scan for missed files starts at the latest this long after the end of the first quiet time.
const MAX_SCAN_DELAY: Duration = Duration::from_secs(5);

/// Whether to turn the kernel's close events on (`Enable`) or off (`Disable`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseEventsChange {
    Enable,
    Disable,
}

/// Number of recent closes, memory of the closed files, and whether the kernel reports closes now.
#[derive(Debug)]
pub struct Closes {
    is_enabled: bool,
    /// When `is_enabled` last changed or the counts `events` and `held_bytes` were reset.
    since: Instant,
    events: u64,
    held_bytes: u64,
    /// End of the first and of the last quiet time since the last scan.
    missed_between: Option<(Instant, Instant)>,
}

impl Closes {
    pub fn new(now: Instant) -> Self {
        Self { is_enabled: true, since: now, events: 0, held_bytes: 0, missed_between: None }
    }

    pub fn is_enabled(&self) -> bool {
        self.is_enabled
    }

    /// Adds reported closes, and the memory of the closed files.
    pub fn count(&mut self, events: u64, held_bytes: u64) {
        self.events += events;
        self.held_bytes += held_bytes;
    }

    /// Returns the change to make now, if any. `has_room` states that files whose closes are not reported cannot reach
    /// a limit.
    pub fn next_change(&mut self, now: Instant, has_room: bool) -> Option<CloseEventsChange> {
        let took = now.saturating_duration_since(self.since);
        if !self.is_enabled {
            return (!has_room || took >= QUIET_PERIOD).then(|| self.change(CloseEventsChange::Enable, now));
        }
        if took < MEASURE_PERIOD {
            return None;
        }
        let is_many = u128::from(self.events) * 1_000_000_000 >= MIN_CLOSES_PER_SECOND * took.as_nanos();
        if is_many && has_room && self.held_bytes < self.events * SMALL_FILE_BYTES {
            return Some(self.change(CloseEventsChange::Disable, now));
        }
        (self.since, self.events, self.held_bytes) = (now, 0, 0);
        None
    }

    fn change(&mut self, change: CloseEventsChange, now: Instant) -> CloseEventsChange {
        debug_assert!(self.is_enabled == (change == CloseEventsChange::Disable), "the change has an effect");
        (self.since, self.events, self.held_bytes) = (now, 0, 0);
        self.is_enabled = change == CloseEventsChange::Enable;
        if self.is_enabled {
            self.missed_between = Some((self.missed_between.map_or(now, |(first, _)| first), now));
        }
        change
    }

    /// Returns whether the scan for missed files is due. Returns true once after a series of quiet times. If `has_room`
    /// is false, the scan is due as soon as events are on.
    pub fn is_scan_due(&mut self, now: Instant, has_room: bool) -> bool {
        let is_over =
            |(first, last): (Instant, Instant)| now >= last + SCAN_DELAY || now >= first + MAX_SCAN_DELAY || !has_room;
        debug_assert!(self.missed_between.is_none_or(|(first, last)| first <= last));
        let is_due = self.is_enabled && self.missed_between.is_some_and(is_over);
        if is_due {
            self.missed_between = None;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Many small files are closed. Close events must be off except during measurements. After the last close, one scan
    /// must be due.
    #[test]
    fn close_events_are_off_while_many_small_files_are_closed() {
        let mut now = Instant::now();
        let mut closes = Closes::new(now);
        for _ in 0..3 {
            closes.count(100, 100 * 4096);
            assert_eq!(closes.next_change(now + 5 * MS, true), None, "the measurement is not over");
            now += MEASURE_PERIOD;
            assert_eq!(closes.next_change(now, true), Some(CloseEventsChange::Disable));
            assert!(!closes.is_enabled() && closes.next_change(now + 100 * MS, true).is_none());
            now += QUIET_PERIOD;
            assert!(!closes.is_scan_due(now, true));
            assert_eq!(closes.next_change(now, true), Some(CloseEventsChange::Enable));
        }
        now += SCAN_DELAY;
        assert_eq!(closes.next_change(now, true), None, "no closes were reported");
        assert!(closes.is_scan_due(now, true) && !closes.is_scan_due(now, true), "one scan is enough");
    }

    /// Few closes, closes of large files, and closes near a limit must stay reported. When the file system gets near a
    /// limit, a quiet time must end at once and a scan must be due.
    #[test]
    fn few_or_large_files_stay_reported() {
        let mut now = Instant::now();
        let mut closes = Closes::new(now);
        for (events, held_bytes, has_room) in
            [(99, 99 * 4096, true), (200, 200 * SMALL_FILE_BYTES, true), (200, 0, false)]
        {
            closes.count(events, held_bytes);
            now += MEASURE_PERIOD;
            assert_eq!(closes.next_change(now, has_room), None);
        }
        closes.count(1000, 0);
        now += MEASURE_PERIOD;
        assert_eq!(closes.next_change(now, true), Some(CloseEventsChange::Disable));
        assert_eq!(closes.next_change(now + MS, false), Some(CloseEventsChange::Enable));
        assert!(closes.is_scan_due(now + MS, false));
    }
}
