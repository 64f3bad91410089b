//! Experiments on files behind Pagemill's page cache: transfers with O_DIRECT, compared with fio on the same file.

pub mod device;
pub mod fio;
pub mod miss;
pub mod orion;
pub mod stream;
pub mod target;
pub mod writeback;

use std::path::PathBuf;
use std::time::Duration;

use crate::child::{self, Outcome};
use crate::error::Result;
use crate::experiment::{Named, SampleTable, Study, not_measured};
use crate::report::{Bound, Series, Verdict};
use crate::stats::Better;
use target::Target;

/// Metric: transfers per second.
pub const IOS: &str = "ios_per_second";
/// Metric: MiB transferred per second.
pub const MIB: &str = "mib_per_second";
/// Metric: median of the duration of a transfer.
pub const P50: &str = "p50_us";
/// Metric: 99th percentile of the duration of a transfer.
pub const P99: &str = "p99_us";
/// Metric: 99.9th percentile of the duration of a transfer.
pub const P999: &str = "p999_us";
/// Metric: CPU time per transfer.
pub const CPU: &str = "cpu_us";
/// Metric: CPU time per MiB.
pub const CPU_PER_MIB: &str = "cpu_us_per_mib";
/// Metric of a cache: all reads per second, including hits.
pub const READS: &str = "reads_per_second";
/// Metric of a cache: the fraction of hits among all reads.
pub const HIT_RATIO: &str = "hit_ratio";

/// A subject of an experiment on files, and what it does.
#[derive(Clone, Copy, Debug)]
pub struct Subject<Work> {
    pub name: &'static str,
    pub work: Work,
}

impl<Work> Named for Subject<Work> {
    fn name(&self) -> &'static str {
        self.name
    }
}

/// Command-line options that choose the file of an experiment.
#[derive(Clone, Debug, clap::Args)]
pub struct PlaceOptions {
    /// A file or block device that exists already; the experiment does not write to it unless an option says so
    /// (default: a temporary file)
    #[arg(long, value_name = "PATH", conflicts_with = "dir")]
    pub file: Option<PathBuf>,
    /// The folder for the temporary file, on a file system on a device (default: the temporary folder, or /var/tmp)
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Length in MiB of the temporary file, or of the part of --file that is used
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(16..))]
    pub mib: Option<u64>,
}

impl PlaceOptions {
    /// Opens the file that the user named, or makes a temporary file. Uses `mib` MiB unless the user set another
    /// length.
    pub fn open_or_make(&self, mib: u64) -> Result<Target> {
        let bytes = self.mib.unwrap_or(mib) << 20;
        match &self.file {
            Some(path) => Target::existing(path, self.mib.map(|_| bytes)),
            None => Target::make(self.dir.as_deref(), bytes),
        }
    }
}

/// Runs a hidden subcommand of the bench, with the file `target` as further arguments.
fn sample(subject: &str, target: &Target, mut line: Vec<String>, limit: Duration) -> Result<Outcome> {
    line.extend(target.arguments());
    child::run_plain(subject, line, limit)
}

/// Returns the subject with the best median of a rate, and its series. A comparison with the best subject of each round
/// would depend on chance: of several nearly equal subjects, it would use the luckiest in each round.
fn best_subject<'a, Case: Ord + Clone>(
    samples: &'a SampleTable<Case>,
    case: &Case,
    subjects: &[&'static str],
    rate: &'static str,
) -> (&'static str, Option<&'a Series>) {
    let all = subjects.iter().filter_map(|subject| Some((*subject, samples.get((case, subject, rate))?)));
    let medians = all.filter_map(|(subject, series)| Some((series.median()?, subject, series)));
    let best = medians.max_by(|(one, ..), (other, ..)| one.total_cmp(other));
    best.map_or(("none of them", None), |(_, subject, series)| (subject, Some(series)))
}

/// Adds a verdict on the rate of the subject `own` compared with the rate of the best of `subjects`. The note of the
/// verdict names the best subject.
pub fn judge_against_best<Case: Ord + Clone>(
    study: &mut Study<'_, Case>,
    (target, bound): (String, Bound),
    (case, own): (&Case, &'static str),
    (subjects, rate): (&[&'static str], &'static str),
) {
    let base = best_subject(&study.samples, case, subjects, rate);
    let blank = not_measured(target, bound, "x", "one side was not run");
    let verdict = blank.compared(study.samples.get((case, own, rate)), base, Better::Higher);
    study.report.add_verdict(match verdict.estimate {
        Some(_) => Verdict { note: base.0.to_owned(), ..verdict },
        None => verdict,
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Report;

    /// The baseline must be the peer with the best median, although another peer has the best single round. If no peer
    /// was run, there must be no estimate.
    #[test]
    fn best_peer_has_the_best_median() {
        let mut report = Report::new("it", false);
        let mut study = Study::new(&mut report, |()| String::new());
        let all = [("own", [95.0, 96.0, 94.0]), ("steady", [100.0, 99.0, 101.0]), ("lucky", [50.0, 200.0, 60.0])];
        for (subject, rates) in all {
            rates.iter().for_each(|rate| study.samples.add_value(&(), subject, IOS, *rate));
        }
        for peers in [&["steady", "lucky", "absent"][..], &["absent"]] {
            let target = ("it".to_owned(), Bound::AtLeast(0.9));
            judge_against_best(&mut study, target, (&(), "own"), (peers, IOS));
        }

        let [measured, missing] = report.verdicts() else { panic!("two targets were judged") };
        assert_eq!((measured.baseline.as_str(), measured.note.as_str()), ("steady", "steady"));
        assert!(measured.estimate.is_some_and(|estimate| (0.93..0.98).contains(&estimate.value)));
        assert!(missing.estimate.is_none());
    }
}
