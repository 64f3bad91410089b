//! The least value of an amount over an age: how much free memory was not reused, where no piece has a time stamp.
//!
//! An owner that reuses the most recently freed memory first leaves its oldest free memory untouched. The least amount
//! that was free at any look within an age is then as old as that age. Looks come at uneven intervals (the governor's
//! jitter), so that a program which frees and reuses periodically is sampled at all its phases.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// An age is divided into this many parts. The least amount of each is kept, and that of the current part.
const PARTS: u64 = 4;
const KEPT: usize = PARTS as usize + 1;

/// The least value of an amount over an age. One thread updates it; others may read.
///
/// ```
/// use pagemill::reclaim::aging::LeastOver;
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
    short: LeastOverOne,
    long: LeastOverOne,
}

/// Ages below this are used only to make up for new memory.
const LONG_FROM: Duration = Duration::from_secs(1);

impl LeastOver {
    /// Records the amount at `now_ns`. Returns the least amount of the last `age`, or 0 if the records do not reach
    /// back that far. For an age of 0 returns the amount.
    ///
    /// A gap in the records counts as unchanged, since looks stop only while the process uses no CPU. For ages below a
    /// second a gap starts the records anew.
    pub fn least(&self, amount: u64, now_ns: u64, age: Duration) -> u64 {
        if age.is_zero() {
            amount
        } else if age < LONG_FROM {
            self.short.least(amount, now_ns, age, Gap::BeginsAnew)
        } else {
            self.long.least(amount, now_ns, age, Gap::Counts)
        }
    }

    /// Subtracts memory that was returned on request: the rest was free over the same time.
    pub fn take(&self, amount: u64) {
        self.short.take(amount);
        self.long.take(amount);
    }

    /// Forgets all records.
    pub fn forget(&self) {
        self.short.forget();
        self.long.forget();
    }
}

/// Meaning of a gap in the records.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Gap {
    /// As if the amount had not changed.
    Counts,
    BeginsAnew,
}

/// For one age; another one begins anew.
#[derive(Default)]
struct LeastOverOne {
    /// By number of the part, modulo [`KEPT`].
    least: [AtomicU64; KEPT],
    /// Number of the current part plus one; 0 before the first look.
    part: AtomicU64,
    /// Parts that were seen without a gap, including the current one.
    seen: AtomicU64,
    /// Length of a part at the last look.
    part_ns: AtomicU64,
}

impl LeastOverOne {
    fn least(&self, amount: u64, now_ns: u64, age: Duration, gap: Gap) -> u64 {
        let part_ns = (age.as_nanos() as u64 / PARTS).max(1);
        let part = now_ns / part_ns + 1;
        let is_other_age = self.part_ns.swap(part_ns, Relaxed) != part_ns;
        if is_other_age || gap == Gap::BeginsAnew && part > self.part.load(Relaxed).saturating_add(1) {
            self.forget();
        }
        let before = self.part.swap(part, Relaxed);
        let missed = if before == 0 { 0 } else { part.saturating_sub(before).min(KEPT as u64) };
        if before == 0 {
            self.place(part).store(amount, Relaxed);
            self.seen.store(1, Relaxed);
        }
        let last = self.place(before.max(1)).load(Relaxed);
        for number in part + 1 - missed..=part {
            self.place(number).store(if number == part { amount } else { amount.min(last) }, Relaxed);
            self.seen.store((self.seen.load(Relaxed) + 1).min(KEPT as u64), Relaxed);
        }
        self.place(part).fetch_min(amount, Relaxed);
        if self.seen.load(Relaxed) < KEPT as u64 {
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
        self.part.store(0, Relaxed);
        self.seen.store(0, Relaxed);
    }

    fn place(&self, part: u64) -> &AtomicU64 {
        &self.least[(part % KEPT as u64) as usize]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AGE: Duration = Duration::from_secs(4);
    const SECOND: u64 = 1_000_000_000;

    /// Nothing is old before an age has passed. After that the least amount is old, and a decrease counts at once.
    #[test]
    fn the_least_amount_of_an_age_is_old() {
        let least = LeastOver::default();
        let looks = [(0, 50), (1, 50), (2, 30), (3, 60)];
        assert!(looks.iter().all(|(second, amount)| least.least(*amount, second * SECOND, AGE) == 0));
        assert_eq!(least.least(60, 4 * SECOND, AGE), 30);
        assert_eq!(least.least(10, 5 * SECOND, AGE), 10);
        assert_eq!(least.least(60, 9 * SECOND, AGE), 10, "standing still since 5");
        assert_eq!(least.least(60, 13 * SECOND, AGE), 60);
        least.take(25);
        assert_eq!(least.least(35, 13 * SECOND, AGE), 35);
        least.forget();
        assert_eq!(least.least(35, 14 * SECOND, AGE), 0);
    }

    /// Looks for a short age between those for a long one do not make memory old; a gap makes none cold.
    #[test]
    fn ages_are_kept_apart() {
        const MS: u64 = 1_000_000;
        let (least, cold) = (LeastOver::default(), Duration::from_millis(67));
        assert_eq!(least.least(100, 0, AGE), 0);
        assert_eq!(least.least(100, MS, cold), 0);
        assert_eq!(least.least(100, 2 * MS, AGE), 0, "seen for 2 ms");
        assert_eq!(least.least(100, 2 * MS, Duration::ZERO), 100);
        assert_eq!(least.least(100, 500 * MS, cold), 0, "not looked at in between");
        assert!((1..=3).all(|look| least.least(100, (500 + 17 * look) * MS, cold) == 0));
        assert_eq!(least.least(100, 568 * MS, cold), 100);
        assert_eq!(least.least(100, SECOND, Duration::from_secs(2)), 0, "another age begins anew");
    }

    proptest! {
        /// The result never exceeds any amount that was seen within the age.
        #[test]
        fn never_more_than_was_seen(looks in prop::collection::vec((0u64..3000, 0u64..100), 1..80)) {
            let least = LeastOver::default();
            let (mut now_ns, mut seen) = (0, Vec::new());
            for (pause_ms, amount) in looks {
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
