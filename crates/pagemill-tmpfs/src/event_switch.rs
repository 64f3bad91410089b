//! Decides which events the kernel reports to the controller. Each event costs the process that closes or renames a
//! file about a microsecond. While any event of the file system is reported, the kernel also spends 10 to 15 ns more in
//! each call that reads or writes a file.
//!
//! Events are off in two kinds of *quiet times*, both only while the file system is far from its limits:
//!
//! - While processes close many small files in a row, close events cost more than they save, so they are off. Every
//!   quarter of a second, they are turned on for 10 ms to measure the rate of closes.
//! - While nothing changes (no event, constant usage), all events are off. They are turned on as soon as the usage
//!   changes.
//!
//! After the quiet times, a full scan finds the files that were closed in them (the *missed* files).

use pagemill_sys::fanotify::Reported;
use std::time::{Duration, Instant};

/// Close events are turned off only if at least this many files are closed per second.
const MIN_CLOSES_PER_SECOND: u128 = 10_000;

/// Close events are turned off only if the closed files have less memory than this on average.
const SMALL_FILE_BYTES: u64 = 64 << 10;

/// How long one measurement of the rate of closes takes.
const MEASURE_PERIOD: Duration = Duration::from_millis(10);

/// How long close events stay off before the next measurement.
const QUIET_PERIOD: Duration = Duration::from_millis(250);

/// All events are turned off if nothing has changed for this long, and for `STILL_SCAN_FACTOR` times as long as a scan
/// takes.
const STILL_PERIOD: Duration = Duration::from_millis(100);

/// Each end of a quiet time requires a scan. So the quiet time begins only after this many times the duration of a
/// scan, which limits the CPU time of these scans to the inverse fraction.
const STILL_SCAN_FACTOR: u32 = 20;

/// The scan for missed files starts this long after the end of the last quiet time.
const SCAN_DELAY: Duration = Duration::from_secs(1);

/// The scan for missed files starts at the latest this long after the end of the first quiet time.
const MAX_SCAN_DELAY: Duration = Duration::from_secs(5);

/// What the control loop knows about the file system when it asks for a change.
#[derive(Clone, Copy)]
pub struct Conditions {
    pub now: Instant,
    /// Files whose closes are not reported cannot reach a limit.
    pub has_room: bool,
    /// Duration of the last full scan.
    pub scan_duration: Duration,
}

/// Number of recent closes, memory of the closed files, and which events the kernel reports now.
#[derive(Debug)]
pub struct EventSwitch {
    reported: Reported,
    /// When `reported` last changed or the counts `events` and `held_bytes` were reset.
    since: Instant,
    events: u64,
    held_bytes: u64,
    /// When the usage last changed or an event was read.
    active_at: Instant,
    /// Bytes and inodes in use.
    usage: (u64, u64),
    /// End of the first and of the last quiet time since the last scan.
    missed_between: Option<(Instant, Instant)>,
}

impl EventSwitch {
    pub fn new(now: Instant) -> Self {
        let (events, held_bytes) = (0, 0);
        Self {
            reported: Reported::All,
            since: now,
            events,
            held_bytes,
            active_at: now,
            usage: (0, 0),
            missed_between: None,
        }
    }

    /// Adds reported closes and renames, and the memory of the closed files.
    pub fn count(&mut self, events: u64, held_bytes: u64, now: Instant) {
        self.events += events;
        self.held_bytes += held_bytes;
        if events > 0 {
            self.active_at = now;
        }
    }

    /// Records the bytes and inodes in use.
    pub fn record_usage(&mut self, used_bytes: u64, inodes: u64, now: Instant) {
        if self.usage != (used_bytes, inodes) {
            (self.usage, self.active_at) = ((used_bytes, inodes), now);
        }
    }

    /// Returns the events that the kernel must report from now on; `None` if they do not change.
    pub fn next_change(&mut self, conditions: Conditions) -> Option<Reported> {
        let Conditions { now, has_room, scan_duration } = conditions;
        let took = now.saturating_duration_since(self.since);
        match self.reported {
            Reported::All if has_room && self.is_still(now, scan_duration) => Some(self.change(Reported::Nothing, now)),
            Reported::All if took < MEASURE_PERIOD => None,
            Reported::All => {
                let is_many = u128::from(self.events) * 1_000_000_000 >= MIN_CLOSES_PER_SECOND * took.as_nanos();
                if is_many && has_room && self.held_bytes < self.events * SMALL_FILE_BYTES {
                    return Some(self.change(Reported::Renames, now));
                }
                (self.since, self.events, self.held_bytes) = (now, 0, 0);
                None
            }
            Reported::Renames => (!has_room || took >= QUIET_PERIOD).then(|| self.change(Reported::All, now)),
            Reported::Nothing => (!has_room || self.active_at > self.since).then(|| self.change(Reported::All, now)),
        }
    }

    /// Returns whether nothing has changed for so long that events are not needed.
    fn is_still(&self, now: Instant, scan_duration: Duration) -> bool {
        let still = now.saturating_duration_since(self.active_at);
        still >= STILL_PERIOD && still >= scan_duration * STILL_SCAN_FACTOR
    }

    fn change(&mut self, reported: Reported, now: Instant) -> Reported {
        debug_assert!((self.reported == Reported::All) != (reported == Reported::All), "a quiet time begins or ends");
        (self.since, self.events, self.held_bytes) = (now, 0, 0);
        self.reported = reported;
        if reported == Reported::All {
            self.missed_between = Some((self.missed_between.map_or(now, |(first, _)| first), now));
        }
        reported
    }

    /// Returns whether the scan for missed files is due. Returns true once after a series of quiet times. If `has_room`
    /// is false, the scan is due at once. While many small files are closed, it is not due.
    pub fn is_scan_due(&mut self, now: Instant, has_room: bool) -> bool {
        let is_over =
            |(first, last): (Instant, Instant)| now >= last + SCAN_DELAY || now >= first + MAX_SCAN_DELAY || !has_room;
        debug_assert!(self.missed_between.is_none_or(|(first, last)| first <= last));
        let is_due = self.reported != Reported::Renames && self.missed_between.is_some_and(is_over);
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

    fn conditions(now: Instant, has_room: bool) -> Conditions {
        Conditions { now, has_room, scan_duration: MS }
    }

    /// Many small files are closed. Close events must be off except during measurements. After the last close, one scan
    /// must be due.
    #[test]
    fn close_events_are_off_while_many_small_files_are_closed() {
        let mut now = Instant::now();
        let mut switch = EventSwitch::new(now);
        for _ in 0..3 {
            switch.count(100, 100 * 4096, now);
            assert_eq!(switch.next_change(conditions(now + 5 * MS, true)), None, "the measurement is not over");
            now += MEASURE_PERIOD;
            assert_eq!(switch.next_change(conditions(now, true)), Some(Reported::Renames));
            assert!(switch.next_change(conditions(now + 100 * MS, true)).is_none());
            now += QUIET_PERIOD;
            assert!(!switch.is_scan_due(now, true));
            assert_eq!(switch.next_change(conditions(now, true)), Some(Reported::All));
        }
        now += SCAN_DELAY;
        switch.record_usage(1, 1, now);
        assert_eq!(switch.next_change(conditions(now, true)), None, "no closes were reported");
        assert!(switch.is_scan_due(now, true) && !switch.is_scan_due(now, true), "one scan is enough");
    }

    /// Few closes, closes of large files, and closes near a limit must stay reported. When the file system gets near a
    /// limit, a quiet time must end at once and a scan must be due.
    #[test]
    fn few_or_large_files_stay_reported() {
        let mut now = Instant::now();
        let mut switch = EventSwitch::new(now);
        for (events, held_bytes, has_room) in
            [(99, 99 * 4096, true), (200, 200 * SMALL_FILE_BYTES, true), (200, 0, false)]
        {
            switch.count(events, held_bytes, now);
            now += MEASURE_PERIOD;
            assert_eq!(switch.next_change(conditions(now, has_room)), None);
        }
        switch.count(1000, 0, now);
        now += MEASURE_PERIOD;
        assert_eq!(switch.next_change(conditions(now, true)), Some(Reported::Renames));
        assert_eq!(switch.next_change(conditions(now + MS, false)), Some(Reported::All));
        assert!(switch.is_scan_due(now + MS, false));
    }

    /// Nothing changes for a while. All events must be off until the usage changes or a limit gets near, and a scan
    /// must be due after that. An event or a change of the usage must start the period again.
    #[test]
    fn all_events_are_off_while_nothing_changes() {
        let mut now = Instant::now();
        let mut switch = EventSwitch::new(now);
        switch.record_usage(4096, 1, now);
        for has_room_at_the_end in [true, false] {
            now += STILL_PERIOD - MS;
            switch.record_usage(4096, 1, now);
            assert_eq!(switch.next_change(conditions(now, true)), None, "the period is not over");
            switch.count(1, 0, now);
            now += 2 * MS;
            assert_eq!(switch.next_change(conditions(now, true)), None, "an event was read");
            now += STILL_PERIOD;
            assert_eq!(switch.next_change(conditions(now, false)), None, "a limit is near");
            assert_eq!(switch.next_change(conditions(now, true)), Some(Reported::Nothing));
            now += 1000 * MS;
            assert_eq!(switch.next_change(conditions(now, true)), None);
            assert!(!switch.is_scan_due(now, true), "nothing has changed");
            if has_room_at_the_end {
                switch.record_usage(8192, 1, now);
                assert_eq!(switch.next_change(conditions(now, true)), Some(Reported::All));
                assert!(!switch.is_scan_due(now, true));
                now += SCAN_DELAY;
                assert_eq!(switch.next_change(conditions(now, true)), Some(Reported::Nothing));
                assert!(switch.is_scan_due(now, true), "also if the next quiet time has begun");
                now += MS;
                switch.record_usage(4096, 1, now);
                assert_eq!(switch.next_change(conditions(now, true)), Some(Reported::All));
                assert!(switch.is_scan_due(now + SCAN_DELAY, true));
            } else {
                assert_eq!(switch.next_change(conditions(now, false)), Some(Reported::All));
                assert!(switch.is_scan_due(now, false));
            }
        }
    }

    /// A scan takes long. The scans after quiet times must take at most one part in `STILL_SCAN_FACTOR` of the time.
    #[test]
    fn quiet_times_are_rare_if_scans_take_long() {
        let (begun, scan_duration) = (Instant::now(), 100 * MS);
        let mut switch = EventSwitch::new(begun);
        let at = |now| Conditions { now, has_room: true, scan_duration };
        assert_eq!(switch.next_change(at(begun + 19 * scan_duration)), None);
        assert_eq!(switch.next_change(at(begun + 20 * scan_duration)), Some(Reported::Nothing));
    }
}
