//! Histogram of durations that counts millions of them in fixed memory. Adding a duration makes no allocation.

use std::time::Duration;

/// The longest duration, in nanoseconds, that the buckets can hold; longer durations are counted as this one.
const MAX_NS: u64 = 1 << 40;
/// Number of significant decimal digits to which a percentile is exact.
const SIGNIFICANT_DIGITS: u8 = 3;

/// The number of durations in each bucket, and the longest duration.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: hdrhistogram::Histogram<u64>,
    longest_ns: u64,
}

impl Histogram {
    pub fn new() -> Self {
        let counts = hdrhistogram::Histogram::new_with_bounds(1, MAX_NS, SIGNIFICANT_DIGITS);
        Self { counts: counts.expect("the bounds and digits are in range"), longest_ns: 0 }
    }

    pub fn add(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts.saturating_record(ns);
        self.longest_ns = self.longest_ns.max(ns);
    }

    /// Adds all durations of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.counts.add(&other.counts).expect("all histograms have the same bounds");
        self.longest_ns = self.longest_ns.max(other.longest_ns);
    }

    pub fn clear(&mut self) {
        self.counts.reset();
        self.longest_ns = 0;
    }

    pub fn count(&self) -> u64 {
        self.counts.len()
    }

    /// Returns a percentile in milliseconds, or 0 if there are no durations. `share` is the percentile as a fraction,
    /// such as 0.99.
    pub fn percentile_ms(&self, share: f64) -> f64 {
        self.percentile_of_longest_ms(self.count(), share)
    }

    /// Returns a percentile of the `count` longest durations, in milliseconds. `share` is the percentile as a fraction.
    pub fn percentile_of_longest_ms(&self, count: u64, share: f64) -> f64 {
        let all = self.count().max(1) as f64;
        let rank = self.count().saturating_sub(count) as f64 + share * count as f64;
        self.counts.value_at_quantile(rank / all).min(self.longest_ns) as f64 / 1e6
    }

    /// Returns the longest duration in milliseconds. Unlike a percentile, it is exact.
    pub fn longest_ms(&self) -> f64 {
        self.longest_ns as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With a thousand short durations and two long ones, the 99th percentile must be a short one and the 99.9th
    /// percentile a long one. The longest duration must be exact. The 50th percentile of only the two longest durations
    /// must be the shorter one.
    #[test]
    fn percentiles_show_rare_long_durations() {
        let (mut times, mut others) = (Histogram::new(), Histogram::new());
        (0..1000).for_each(|_| times.add(Duration::from_micros(1)));
        [6, 9].into_iter().for_each(|ms| others.add(Duration::from_millis(ms)));
        times.merge(&others);

        assert!(times.percentile_ms(0.99) < 0.0012);
        assert!((6.0..6.1).contains(&times.percentile_ms(0.999)));
        assert!((6.0..6.1).contains(&times.percentile_of_longest_ms(2, 0.5)));
        assert_eq!((times.longest_ms(), times.percentile_ms(1.0), times.count()), (9.0, 9.0, 1002));
        times.clear();
        assert_eq!((times.percentile_ms(0.5), times.count()), (0.0, 0));
    }
}
