//! The largest recent value of a quantity.

use std::time::{Duration, Instant};

/// A value counts as recent for at least this long, and for at most twice as long.
const PEAK_PERIOD: Duration = Duration::from_secs(10);

/// The largest value that was recorded in the current and the previous period.
#[derive(Clone, Debug)]
pub struct RecentPeak {
    current: u64,
    previous: u64,
    /// When the current period began.
    began: Instant,
}

impl RecentPeak {
    pub fn new(now: Instant) -> Self {
        Self { current: 0, previous: 0, began: now }
    }

    /// Records a value, and returns the largest recent value, which is at least this one.
    pub fn record(&mut self, value: u64, now: Instant) -> u64 {
        if now >= self.began + PEAK_PERIOD {
            (self.previous, self.current, self.began) = (self.current, 0, now);
        }
        self.current = self.current.max(value);
        self.current.max(self.previous)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peak must count as recent for `PEAK_PERIOD` after it was last recorded, and no longer after twice that time.
    #[test]
    fn a_peak_is_remembered_for_a_while() {
        let begun = Instant::now();
        let mut peak = RecentPeak::new(begun);
        let mut at = |seconds, value| peak.record(value, begun + Duration::from_secs(seconds));
        assert_eq!((at(0, 5), at(9, 9), at(10, 1)), (5, 9, 9));
        assert_eq!((at(19, 2), at(20, 1), at(30, 1)), (9, 2, 1));
    }
}
