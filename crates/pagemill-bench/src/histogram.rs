//! Histogram of times with buckets that grow exponentially: counts a million times in fixed memory, without allocation.

use std::time::Duration;

/// Buckets per doubling. The upper end of a bucket is at most an eighth above the times in it.
const PER_DOUBLING: usize = 8;
const BUCKETS: usize = 64 * PER_DOUBLING;

/// Number of times per bucket, and the longest time.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    longest_ns: u64,
}

impl Histogram {
    /// Makes an empty histogram.
    pub const fn new() -> Self {
        Self { counts: [0; BUCKETS], longest_ns: 0 }
    }

    /// Counts one time.
    pub fn add(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(ns)] += 1;
        self.longest_ns = self.longest_ns.max(ns);
    }

    /// The number of times counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The percentile in milliseconds: the upper end of the bucket in which it lies.
    pub fn percentile_ms(&self, share: f64) -> f64 {
        let rank = (share * self.count() as f64).ceil() as u64;
        let mut below = 0;
        for (index, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank.max(1) {
                return end_ns(index).min(self.longest_ns) as f64 / 1e6;
            }
        }
        0.0
    }

    /// The longest time, exact.
    pub fn longest_ms(&self) -> f64 {
        self.longest_ns as f64 / 1e6
    }
}

fn bucket(ns: u64) -> usize {
    let doubling = ns.max(1).ilog2() as usize;
    // The three bits below the highest one; times below 8 ns have fewer.
    let eighth = if doubling >= 3 { (ns >> (doubling - 3)) as usize & 7 } else { (ns << (3 - doubling)) as usize & 7 };
    doubling * PER_DOUBLING + eighth
}

/// The largest time that a bucket counts.
fn end_ns(bucket: usize) -> u64 {
    let (doubling, eighth) = ((bucket / PER_DOUBLING) as u32, (bucket % PER_DOUBLING) as u128);
    let end = ((9 + eighth) << doubling).div_ceil(8) - 1;
    u64::try_from(end).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every time lies in a bucket that ends no more than an eighth above it. Buckets ascend.
    #[test]
    fn buckets_hold_their_times() {
        let mut last = 0;
        for ns in (0..64).flat_map(|bit| [1 << bit, (1 << bit) + (1_u64 << bit) / 3]).chain([u64::MAX]) {
            let (index, end) = (bucket(ns), end_ns(bucket(ns)));
            assert!(end >= ns && end - ns <= ns / 8 + 1, "{ns}: {end}");
            assert!(index >= last, "{ns}");
            last = index;
        }
    }

    /// A thousand short times and two long ones: the 99.9th percentile is long, the 99th is not, the longest is exact.
    #[test]
    fn percentiles_find_the_tail() {
        let mut times = Histogram::new();
        (0..1000).for_each(|_| times.add(Duration::from_micros(1)));
        [6, 9].into_iter().for_each(|ms| times.add(Duration::from_millis(ms)));

        assert!(times.percentile_ms(0.99) < 0.0012);
        assert!((6.0..6.8).contains(&times.percentile_ms(0.999)));
        assert_eq!((times.longest_ms(), times.percentile_ms(1.0), times.count()), (9.0, 9.0, 1002));
        assert_eq!(Histogram::new().percentile_ms(0.5), 0.0);
    }
}
