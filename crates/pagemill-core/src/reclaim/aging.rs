//! How much free memory was not reused for an age, computed without time stamps: the minimum of an amount over that
//! age.
//!
//! An owner that reuses the most recently freed memory first leaves its oldest free memory untouched. So the minimum of
//! its free bytes over an age is an amount that was free for that whole age. The amount is recorded at uneven intervals
//! (the governor's jitter), so that records do not always meet the same phase of a program that frees and reuses
//! periodically.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Number of parts of equal length into which an age is divided. Each part has a minimum of its own.
const PARTS_PER_AGE: u64 = 4;
/// Number of parts whose minimum is stored: the parts of one age, and the current part.
const STORED_PARTS: usize = PARTS_PER_AGE as usize + 1;

/// Keeps the minimum of an amount over an age, which is the time up to now of a given length. One thread updates the
/// value; other threads may read it.
///
/// ```
/// use pagemill_core::reclaim::aging::LeastOver;
/// use std::time::Duration;
///
/// let (free, second) = (LeastOver::default(), 1_000_000_000);
/// for (now, amount) in [(0, 80), (4, 30), (8, 50), (12, 60)] {
///     free.least(amount, now * second, Duration::from_secs(10));
/// }
/// assert_eq!(free.least(70, 13 * second, Duration::from_secs(10)), 30); // free for ten seconds
/// ```
#[derive(Default)]
pub struct LeastOver {
    /// The minimum for ages below [`MIN_LONG_AGE`].
    short: SingleAgeMinimum,
    /// The minimum for ages from [`MIN_LONG_AGE`] on.
    long: SingleAgeMinimum,
}

/// Ages below this one are used only to offset new memory ([`super::Account::offset_new_memory`]).
const MIN_LONG_AGE: Duration = Duration::from_secs(1);

impl LeastOver {
    /// Records `amount` at the time `now_ns`. Returns the minimum of the amounts within the last `age`, or 0 if the
    /// records do not reach back that far. For an age of 0, returns `amount` itself.
    ///
    /// Time without records counts as time without change, since recording stops only while the process uses no CPU.
    /// For ages below a second, time without records discards all earlier records instead.
    pub fn least(&self, amount: u64, now_ns: u64, age: Duration) -> u64 {
        if age.is_zero() {
            amount
        } else if age < MIN_LONG_AGE {
            self.short.least(amount, now_ns, age, Gap::DiscardsRecords)
        } else {
            self.long.least(amount, now_ns, age, Gap::IsUnchanged)
        }
    }

    /// Subtracts `amount`, bytes that were returned on request, from all minima. The time for which the remaining bytes
    /// have been free does not change.
    pub fn take(&self, amount: u64) {
        self.short.take(amount);
        self.long.take(amount);
    }

    /// Discards all recorded amounts.
    pub fn forget(&self) {
        self.short.forget();
        self.long.forget();
    }
}

/// How [`LeastOver::least`] treats a time without records.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gap {
    /// The amount counts as unchanged.
    IsUnchanged,
    DiscardsRecords,
}

/// The minimum of an amount over one age. A record for a different age discards the earlier records.
#[derive(Default)]
struct SingleAgeMinimum {
    /// For each of the latest parts of the age, the least amount that was recorded in it. The index is the part's
    /// number modulo [`STORED_PARTS`].
    least: [AtomicU64; STORED_PARTS],
    /// Number plus one of the part of the age to which the latest record belongs; 0 before the first record.
    current_part: AtomicU64,
    /// Number of consecutive parts of the age that have a minimum, up to and including the current part.
    parts_seen: AtomicU64,
    /// Length, in nanoseconds, of a part of the age at the last record.
    part_ns: AtomicU64,
}

impl SingleAgeMinimum {
    fn least(&self, amount: u64, now_ns: u64, age: Duration, gap: Gap) -> u64 {
        let part_ns = (age.as_nanos() as u64 / PARTS_PER_AGE).max(1);
        let part = now_ns / part_ns + 1;
        let is_other_age = self.part_ns.swap(part_ns, Relaxed) != part_ns;
        if is_other_age || gap == Gap::DiscardsRecords && part > self.current_part.load(Relaxed).saturating_add(1) {
            self.forget();
        }
        let before = self.current_part.swap(part, Relaxed);
        let missed = if before == 0 { 0 } else { part.saturating_sub(before).min(STORED_PARTS as u64) };
        if before == 0 {
            self.minimum_of(part).store(amount, Relaxed);
            self.parts_seen.store(1, Relaxed);
        }
        let last = self.minimum_of(before.max(1)).load(Relaxed);
        for number in part + 1 - missed..=part {
            self.minimum_of(number).store(if number == part { amount } else { amount.min(last) }, Relaxed);
            self.parts_seen.store((self.parts_seen.load(Relaxed) + 1).min(STORED_PARTS as u64), Relaxed);
        }
        self.minimum_of(part).fetch_min(amount, Relaxed);
        if self.parts_seen.load(Relaxed) < STORED_PARTS as u64 {
            return 0;
        }
        self.least.iter().map(|least| least.load(Relaxed)).min().unwrap_or(0)
    }

    fn take(&self, amount: u64) {
        self.least.iter().for_each(|least| {
            let _ = least.fetch_update(Relaxed, Relaxed, |least| Some(least.saturating_sub(amount)));
        });
    }

    fn forget(&self) {
        self.current_part.store(0, Relaxed);
        self.parts_seen.store(0, Relaxed);
    }

    /// Returns the stored minimum of the part of the age that has this number.
    fn minimum_of(&self, part: u64) -> &AtomicU64 {
        &self.least[(part % STORED_PARTS as u64) as usize]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AGE: Duration = Duration::from_secs(4);
    const SECOND_NS: u64 = 1_000_000_000;

    /// `least` must return 0 until the records cover an age, and then the minimum of the amounts within the last age.
    #[test]
    fn the_result_is_the_minimum_over_the_age() {
        let least = LeastOver::default();
        let records = [(0, 50), (1, 50), (2, 30), (3, 60)];
        assert!(records.iter().all(|(second, amount)| least.least(*amount, second * SECOND_NS, AGE) == 0));
        assert_eq!(least.least(60, 4 * SECOND_NS, AGE), 30);
        assert_eq!(least.least(10, 5 * SECOND_NS, AGE), 10);
        assert_eq!(least.least(60, 9 * SECOND_NS, AGE), 10, "no record since second 5 counts as unchanged");
        assert_eq!(least.least(60, 13 * SECOND_NS, AGE), 60);
        least.take(25);
        assert_eq!(least.least(35, 13 * SECOND_NS, AGE), 35);
        least.forget();
        assert_eq!(least.least(35, 14 * SECOND_NS, AGE), 0);
    }

    /// Amounts are recorded for a short age and for a long one. The records of one age must not count for the other. A
    /// long pause must discard the records of the short age.
    #[test]
    fn records_of_two_ages_are_independent() {
        const MS_NS: u64 = 1_000_000;
        let (least, cold) = (LeastOver::default(), Duration::from_millis(67));
        assert_eq!(least.least(100, 0, AGE), 0);
        assert_eq!(least.least(100, MS_NS, cold), 0);
        assert_eq!(least.least(100, 2 * MS_NS, AGE), 0, "recorded for 2 ms only");
        assert_eq!(least.least(100, 2 * MS_NS, Duration::ZERO), 100);
        assert_eq!(least.least(100, 500 * MS_NS, cold), 0, "the pause discarded the records");
        assert!((1..=3).all(|step| least.least(100, (500 + 17 * step) * MS_NS, cold) == 0));
        assert_eq!(least.least(100, 568 * MS_NS, cold), 100);
        assert_eq!(least.least(100, SECOND_NS, Duration::from_secs(2)), 0, "another age discards the records");
    }

    proptest! {
        /// `least` must never return more than an amount that was recorded within the age.
        #[test]
        fn the_result_never_exceeds_a_recorded_amount(records in prop::collection::vec((0u64..3000, 0u64..100), 1..80)) {
            let least = LeastOver::default();
            let (mut now_ns, mut seen) = (0, Vec::new());
            for (pause_ms, amount) in records {
                now_ns += pause_ms * 1_000_000;
                seen.push((now_ns, amount));
                let old = least.least(amount, now_ns, AGE);
                let within = seen.iter().filter(|(at, _)| now_ns - at <= AGE.as_nanos() as u64);
                let most = within.map(|(_, amount)| *amount).min().unwrap();
                prop_assert!(old <= most, "{old} of {seen:?}");
            }
        }
    }
}
