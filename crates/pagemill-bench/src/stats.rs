//! The statistics on which each verdict is based: medians, spreads and confidence intervals.
//!
//! The speed of a machine can drift by a quarter within minutes. So times of different rounds are never compared: the
//! samples of one round are measured one after the other, ratios are formed within a round, and the interval is
//! computed from these ratios.

/// Number of bootstrap resamples. More resamples would change only the third digit of an interval.
const RESAMPLES: usize = 2000;

/// The direction in which a metric improves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Larger is better: rates, and bytes returned.
    Higher,
    /// Smaller is better: times, and bytes in use.
    Lower,
}

/// A median with its 95 % confidence interval from `low` to `high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    pub value: f64,
    pub low: f64,
    pub high: f64,
    /// The number of samples; `usize::MAX` if the value is exact and not sampled.
    pub samples: usize,
}

impl Estimate {
    /// An estimate of a value that is exact, so that its interval has zero width.
    pub fn exact(value: f64, samples: usize) -> Self {
        Self { value, low: value, high: value, samples }
    }
}

/// Returns the median of the values; none if there are no values. For an even number of values, the median is the mean
/// of the two middle ones.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        len if len % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// Converts bytes to MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Returns (max - min) / median; zero for fewer than two values or a median of zero.
pub fn spread(values: &[f64]) -> f64 {
    let largest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let smallest = values.iter().copied().fold(f64::INFINITY, f64::min);
    match median(values) {
        Some(middle) if middle != 0.0 => (largest - smallest) / middle,
        _ => 0.0,
    }
}

/// Returns how many times better `subject` was than `baseline`, for each round in which both were measured.
pub fn ratios(subject: &[Option<f64>], baseline: &[Option<f64>], better: Better) -> Vec<f64> {
    let rounds = subject.iter().zip(baseline);
    rounds
        .filter_map(|(&subject, &baseline)| {
            let ratio = match better {
                Better::Higher => subject? / baseline?,
                Better::Lower => baseline? / subject?,
            };
            ratio.is_finite().then_some(ratio)
        })
        .collect()
}

/// For each round, returns the geometric mean of the ratios of all cases. The number of rounds is that of the case with
/// the fewest ratios.
pub fn geometric_means(cases: &[Vec<f64>]) -> Vec<f64> {
    let rounds = cases.iter().map(Vec::len).min().unwrap_or(0);
    (0..rounds)
        .map(|round| {
            let logs: f64 = cases.iter().map(|case| case[round].ln()).sum();
            (logs / cases.len() as f64).exp()
        })
        .collect()
}

/// Returns the median of the values and its 95 % confidence interval, by bootstrap with a fixed seed; none if there are
/// no values.
pub fn estimate_median(values: &[f64]) -> Option<Estimate> {
    let value = median(values)?;
    let mut random = fastrand::Rng::with_seed(0x7061_6765_6d69_6c6c);
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| {
            let resample: Vec<f64> = (0..values.len()).map(|_| values[random.usize(..values.len())]).collect();
            median(&resample)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    let tail = RESAMPLES / 40;
    Some(Estimate { value, low: medians[tail], high: medians[RESAMPLES - 1 - tail], samples: values.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The median of an odd number of values must be the middle one; of an even number, the mean of the two middle
    /// ones. An empty list must have no median.
    #[test]
    fn median_is_the_middle_value() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    /// The spread must be (max - min) / median. For a single value or a median of zero it must be zero; nothing may be
    /// divided by zero.
    #[test]
    fn spread_is_range_over_median() {
        assert!((spread(&[90.0, 100.0, 120.0]) - 0.3).abs() < 1e-12);
        assert_eq!(spread(&[7.0]), 0.0);
        assert_eq!(spread(&[0.0, 0.0]), 0.0);
    }

    /// A ratio above 1 must mean better, whether larger or smaller values are better. A round without a value for one
    /// subject must give no ratio.
    #[test]
    fn ratios_are_formed_within_a_round() {
        let subject = [Some(10.0), None, Some(30.0)];
        let baseline = [Some(5.0), Some(1.0), Some(10.0)];

        assert_eq!(ratios(&subject, &baseline, Better::Higher), [2.0, 3.0]);
        assert_eq!(ratios(&subject, &baseline, Better::Lower)[0], 0.5);
    }

    /// The interval of noisy samples must contain their median and lie within their range. The interval of equal
    /// samples must have zero width.
    #[test]
    fn confidence_interval_contains_the_median() {
        let noisy = estimate_median(&[1.0, 1.1, 0.9, 1.2, 1.05]).expect("values were given");
        let still = estimate_median(&[2.0; 5]).expect("values were given");

        assert!(noisy.low <= noisy.value && noisy.value <= noisy.high);
        assert!(noisy.low >= 0.9 && noisy.high <= 1.2);
        assert_eq!((still.low, still.value, still.high), (2.0, 2.0, 2.0));
        assert_eq!(estimate_median(&[]), None);
    }

    /// Two cases have the ratios 2 and 8 in the first round, and 1 and 1 in the second. The geometric means of the
    /// rounds must be 4 and 1.
    #[test]
    fn geometric_mean_is_taken_per_round() {
        let means = geometric_means(&[vec![2.0, 1.0], vec![8.0, 1.0]]);

        assert!((means[0] - 4.0).abs() < 1e-9 && (means[1] - 1.0).abs() < 1e-9);
    }
}
