//! Hit ratios on generated traces: the page cache's eviction policy, compared with LRU, CLOCK, S3-FIFO and SIEVE.
//!
//! In this experiment pages are only numbers, and nothing is timed. So the results are the same on every machine.
//! Pagemill's policy is the same module that the page cache uses.

mod generate;
mod own;
mod peers;

use crate::error::{Error, Result};
use crate::experiment::{CommonOptions, Metric, Progress, SampleTable, Study, check_names, not_measured};
use crate::report::{Bound, Report, Verdict};
use crate::stats;
use crate::subject::PAGEMILL;
use generate::{KINDS, TraceKind};
use peers::{Clock, Lru, Policy, S3Fifo, Sieve};

const S3_FIFO: &str = "s3-fifo";
const PEERS: [&str; 4] = ["lru", "clock", S3_FIFO, "sieve"];
const HIT_PERCENT: &str = "hit_percent";

/// Number of distinct pages in a trace, which is its footprint (quick, full).
const DISTINCT_PAGES: (usize, usize) = (20_000, 100_000);
/// Number of requests in a trace, divided by the number of its distinct pages.
const REQUESTS_PER_PAGE: usize = 20;
/// Sizes of the cache, in percent of the number of distinct pages in the trace.
const CACHE_PERCENTS: [usize; 3] = [1, 10, 25];
/// The number of requests divided by this is the number of warm-up requests. They come first and are not counted.
const WARM_DIVISOR: usize = 5;
/// The seed of the trace in the first round. Later rounds add the index of the round.
const FIRST_SEED: u64 = 0x7061_6765_6d69_6c6c;

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    /// Number of distinct pages in a trace (default 100000, with --quick 20000); each trace has 20 times as many
    /// requests
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1000..10_000_000))]
    pub pages: Option<u32>,
    /// Run only these traces, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "TRACE")]
    pub traces: Vec<String>,
}

/// Index of the trace in [`KINDS`], and size of the cache in percent of the number of distinct pages.
type Case = (usize, usize);

/// Computes the hit ratios of all eviction policies on the generated traces. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`Error::CannotRun`] for an unknown subject or trace.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let subjects: Vec<&str> = [PAGEMILL].into_iter().chain(PEERS).collect();
    common.check_only(&subjects)?;
    check_names("trace", &options.traces, &KINDS.map(|(name, _)| name))?;
    let mut study = Study::new(report, |(trace, percent): &Case| format!("{}, {percent} %", KINDS[*trace].0));
    measure_cases(options, &subjects, &mut study.samples)?;
    for percent in CACHE_PERCENTS {
        let table = format!("hit ratio, %, half the spread: a cache of {percent} % of the footprint");
        study.report.transpose_table(table.clone());
        for (trace, (name, _)) in KINDS.iter().enumerate() {
            study.rows(&(trace, percent), &subjects, &table, &[(Metric::higher(HIT_PERCENT, "%"), *name)]);
        }
    }
    add_verdicts(study.report, &study.samples);
    Ok(())
}

fn measure_cases(options: &Options, subjects: &[&'static str], samples: &mut SampleTable<Case>) -> Result<()> {
    let common = &options.common;
    let pages = options.pages.map_or(common.quick_or_full(DISTINCT_PAGES), |pages| pages as usize);
    let subjects: Vec<_> = subjects.iter().filter(|subject| common.is_wanted(subject)).collect();
    let is_wanted = |name: &str| options.traces.is_empty() || options.traces.iter().any(|wanted| wanted == name);
    let kinds: Vec<_> = KINDS.iter().enumerate().filter(|(_, (name, _))| is_wanted(name)).collect();
    let progress = Progress::new(common.rounds() * kinds.len() * CACHE_PERCENTS.len());
    for round in 0..common.rounds() as u64 {
        for (trace, (name, kind)) in &kinds {
            for percent in CACHE_PERCENTS {
                progress.step(name);
                crate::child::check_interrupt()?;
                let size = pages * percent / 100;
                let requests = generate::trace(*kind, pages, size, REQUESTS_PER_PAGE * pages, FIRST_SEED + round);
                for subject in &subjects {
                    let mut policy = make_policy(subject, pages, size)?;
                    samples.add_value(&(*trace, percent), subject, HIT_PERCENT, hit_percent(&mut *policy, &requests));
                }
            }
        }
    }
    Ok(())
}

fn make_policy(subject: &str, pages: usize, size: usize) -> Result<Box<dyn Policy>> {
    Ok(match subject {
        "lru" => Box::new(Lru::new(pages, size)),
        "clock" => Box::new(Clock::new(pages, size)),
        S3_FIFO => Box::new(S3Fifo::new(pages, size)),
        "sieve" => Box::new(Sieve::new(pages, size)),
        _ => Box::new(own::PagemillPolicy::new(pages, size).map_err(|error| Error::CannotRun(error.to_string()))?),
    })
}

fn hit_percent(policy: &mut dyn Policy, requests: &[u32]) -> f64 {
    let (warm, counted) = requests.split_at(requests.len() / WARM_DIVISOR);
    for page in warm {
        policy.access(*page);
    }
    let hits = counted.iter().filter(|page| policy.access(**page)).count();
    100.0 * hits as f64 / counted.len() as f64
}

/// For each round, returns the hit ratio of one policy in one case, in percent.
fn hit_percents(samples: &SampleTable<Case>, case: &Case, subject: &'static str) -> Option<Vec<f64>> {
    samples.get((case, subject, HIT_PERCENT)).map(|series| series.values())
}

/// For each round, returns by how many percentage points the hit ratio of Pagemill's policy exceeds that of the best
/// peer.
fn lead_over_best_peer(samples: &SampleTable<Case>, case: &Case) -> Option<Vec<f64>> {
    let peers: Option<Vec<_>> = PEERS.iter().map(|peer| hit_percents(samples, case, peer)).collect();
    let (own, peers) = (hit_percents(samples, case, PAGEMILL)?, peers?);
    let best = |round: usize| peers.iter().map(|hit_percents| hit_percents[round]).fold(0.0, f64::max);
    Some(own.iter().enumerate().map(|(round, own)| own - best(round)).collect())
}

fn add_verdicts(report: &mut Report, samples: &SampleTable<Case>) {
    let points = |target: String, bound, values: Option<Vec<f64>>, note: String| {
        let blank = not_measured(target, bound, "points", "not all were run");
        let Some(values) = values else { return blank };
        Verdict { estimate: stats::estimate_median(&values), baseline: "best-of-four".to_owned(), note, ..blank }
    };
    for (trace, (name, kind)) in KINDS.iter().enumerate() {
        if samples.cases().iter().all(|(with, _)| *with != trace) {
            continue;
        }
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let by_size = CACHE_PERCENTS.map(|percent| (percent, lead_over_best_peer(samples, &(trace, percent))));
        let worst = by_size.into_iter().min_by(|(_, one), (_, other)| {
            let of = |values: &Option<Vec<f64>>| values.as_deref().map_or(f64::MIN, mean);
            of(one).total_cmp(&of(other))
        });
        let Some((percent, values)) = worst else { continue };
        let target = format!("{name}: {PAGEMILL}, ahead of the best of four");
        let what = if *kind == TraceKind::Loop { "of the loop's footprint" } else { "of the footprint" };
        let note = if values.is_some() { format!("worst: {percent} % {what}") } else { "not all were run".to_owned() };
        report.add_verdict(points(target, Bound::AtLeast(-1.0), values, note));
    }
    let target = format!("mean of all: {PAGEMILL}, ahead of {S3_FIFO}");
    let mean = Verdict {
        baseline: S3_FIFO.to_owned(),
        ..points(target, Bound::AtLeast(0.0), lead_over_s3_fifo(samples), String::new())
    };
    report.add_verdict(mean);
}

/// For each round, returns by how many percentage points the mean hit ratio of Pagemill's policy over all cases exceeds
/// that of S3-FIFO.
fn lead_over_s3_fifo(samples: &SampleTable<Case>) -> Option<Vec<f64>> {
    let cases = samples.cases();
    let both = |case: &&Case| Some((hit_percents(samples, case, PAGEMILL)?, hit_percents(samples, case, S3_FIFO)?));
    let all: Vec<_> = cases.iter().map(both).collect::<Option<_>>()?;
    let rounds = all.iter().map(|(own, _)| own.len()).min()?;
    let ahead = |round: usize| all.iter().map(|(own, peer)| own[round] - peer[round]).sum::<f64>() / all.len() as f64;
    Some((0..rounds).map(ahead).collect())
}
