//! Histogram of durations with buckets that grow exponentially. It counts millions of durations in fixed memory and
//! makes no allocation.

use std::time::Duration;

/// Number of buckets per power of two. The upper end of a bucket exceeds any duration in it by at most one eighth.
const BUCKETS_PER_DOUBLING: usize = 8;
const BUCKETS: usize = 64 * BUCKETS_PER_DOUBLING;

/// The number of durations in each bucket, and the longest duration.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    longest_ns: u64,
}

impl Histogram {
    pub const fn new() -> Self {
        Self { counts: [0; BUCKETS], longest_ns: 0 }
    }

    pub fn add(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket_index(ns)] += 1;
        self.longest_ns = self.longest_ns.max(ns);
    }

    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the upper end of the bucket with the percentile, in milliseconds. `share` is the percentile as a
    /// fraction, such as 0.99.
    pub fn percentile_ms(&self, share: f64) -> f64 {
        let rank = (share * self.count() as f64).ceil() as u64;
        let mut below = 0;
        for (index, count) in self.counts.iter().enumerate() {
            below += count;
            if below >= rank.max(1) {
                return bucket_end_ns(index).min(self.longest_ns) as f64 / 1e6;
            }
        }
        0.0
    }

    /// Returns the exact longest duration in milliseconds.
    pub fn longest_ms(&self) -> f64 {
        self.longest_ns as f64 / 1e6
    }
}

fn bucket_index(ns: u64) -> usize {
    let doubling = ns.max(1).ilog2() as usize;
    // The position within the power of two, from the three bits below the highest one. Durations below 8 ns have fewer
    // bits.
    let eighth = if doubling >= 3 { (ns >> (doubling - 3)) as usize & 7 } else { (ns << (3 - doubling)) as usize & 7 };
    doubling * BUCKETS_PER_DOUBLING + eighth
}

/// Returns the longest duration that the bucket counts, in nanoseconds.
fn bucket_end_ns(bucket: usize) -> u64 {
    let (doubling, eighth) = ((bucket / BUCKETS_PER_DOUBLING) as u32, (bucket % BUCKETS_PER_DOUBLING) as u128);
    let end = ((9 + eighth) << doubling).div_ceil(8) - 1;
    u64::try_from(end).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each duration must lie in a bucket whose end is at least the duration, and at most one eighth more. Longer
    /// durations must lie in the same or a later bucket.
    #[test]
    fn durations_lie_in_their_buckets() {
        let mut last = 0;
        for ns in (0..64).flat_map(|bit| [1 << bit, (1 << bit) + (1_u64 << bit) / 3]).chain([u64::MAX]) {
            let (index, end) = (bucket_index(ns), bucket_end_ns(bucket_index(ns)));
            assert!(end >= ns && end - ns <= ns / 8 + 1, "{ns}: {end}");
            assert!(index >= last, "{ns}");
            last = index;
        }
    }

    /// With a thousand short durations and two long ones, the 99th percentile must be short and the 99.9th long. The
    /// longest duration must be exact.
    #[test]
    fn percentiles_show_rare_long_durations() {
        let mut times = Histogram::new();
        (0..1000).for_each(|_| times.add(Duration::from_micros(1)));
        [6, 9].into_iter().for_each(|ms| times.add(Duration::from_millis(ms)));

        assert!(times.percentile_ms(0.99) < 0.0012);
        assert!((6.0..6.8).contains(&times.percentile_ms(0.999)));
        assert_eq!((times.longest_ms(), times.percentile_ms(1.0), times.count()), (9.0, 9.0, 1002));
        assert_eq!(Histogram::new().percentile_ms(0.5), 0.0);
    }
}
