//! Verdicts on the targets of large transfers. Each kind of transfer is judged at its largest queue depth.

use super::subjects::{CACHE, FIO_HUGE_FIXED, RING_SMALL, SUBJECTS};
use super::{Case, MIB_1, largest_depth};
use crate::experiment::{Study, not_measured};
use crate::report::{Bound, Series};
use crate::stats::Better;
use crate::storage::{CPU, MIB, best_subject, fio, judge_against_best};

/// Adds a verdict for each kind of transfer at its largest queue depth to the report.
pub fn add_verdicts(study: &mut Study<'_, Case>, cases: &[Case]) {
    let largest_depth = largest_depth(cases);
    for case in cases.iter().filter(|case| case.depth == largest_depth) {
        judge_against_fio(study, *case);
        if case.io_bytes == MIB_1 && !case.is_write {
            judge_against_small_pages(study, *case);
        }
    }
}

/// Compares the cache's rate with the best rate of fio, and the cache's CPU time with that of fio with registered
/// buffers in huge pages.
fn judge_against_fio(study: &mut Study<'_, Case>, case: Case) {
    let name = case.name();
    let target = format!("{name}: {CACHE}, against the best of fio");
    let peers = fio::names(&SUBJECTS);
    judge_against_best(study, (target, Bound::AtLeast(0.99)), (&case, CACHE), (&peers, MIB));
    let target = format!("{name}: processor for each, {CACHE}, of that of {FIO_HUGE_FIXED}");
    let (own, base) = ((&case, CACHE, CPU), (&case, FIO_HUGE_FIXED, CPU));
    study.judge_quotient(target, Bound::AtMost(1.0), own, base);
}

/// Compares rate and CPU time of the cache with those of a ring whose buffers are in small pages. In 2013, a transfer
/// of 1 MiB into small pages needed 256 pages, and one into huge pages a single page.
fn judge_against_small_pages(study: &mut Study<'_, Case>, case: Case) {
    let name = case.name();
    let get = |subject| study.samples.get((&case, subject, MIB));
    // Twice the rate of small pages may be more than the device can do. Then the bound is fio's best rate.
    let (_, limit) = best_subject(&study.samples, &case, &fio::names(&SUBJECTS), MIB);
    let wanted = get(RING_SMALL).map(|small| double_rates_up_to_limit(small, limit));
    let target = format!("{name}: {CACHE}, of 2x {RING_SMALL} or of the best of fio, if that is less");
    let blank = not_measured(target, Bound::AtLeast(0.99), "x", "one side was not run");
    let verdict = blank.compared(get(CACHE), (RING_SMALL, wanted.as_ref()), Better::Higher);
    study.report.add_verdict(verdict);
    let target = format!("{name}: processor for each, {CACHE}, of that of {RING_SMALL}");
    let (own, base) = ((&case, CACHE, CPU), (&case, RING_SMALL, CPU));
    study.judge_quotient(target, Bound::AtMost(0.2), own, base);
}

/// Returns twice the rates of `small`, but in each round at most the rate of `limit`.
fn double_rates_up_to_limit(small: &Series, limit: Option<&Series>) -> Series {
    let of_round = |(round, small): (usize, &Option<f64>)| {
        let limit = limit.and_then(|limit| limit.rounds.get(round).copied().flatten());
        small.map(|small| (2.0 * small).min(limit.unwrap_or(f64::INFINITY)))
    };
    Series { rounds: small.rounds.iter().enumerate().map(of_round).collect(), ..Series::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In each round, [`double_rates_up_to_limit`] must return twice the rate of small pages, or the limit if that is
    /// smaller. A round without a rate must stay without one.
    #[test]
    fn target_rate_is_limited_by_the_device() {
        let series = |rounds: &[Option<f64>]| Series { rounds: rounds.to_vec(), ..Series::default() };
        let small = series(&[Some(100.0), Some(100.0), None, Some(10.0)]);
        let limit = series(&[Some(150.0), Some(300.0), Some(1.0), None]);

        assert_eq!(double_rates_up_to_limit(&small, Some(&limit)).rounds, [Some(150.0), Some(200.0), None, Some(20.0)]);
        assert_eq!(double_rates_up_to_limit(&small, None).rounds[0], Some(200.0));
    }
}
