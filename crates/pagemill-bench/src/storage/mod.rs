//! Experiments on files behind the page cache of this library: read past the kernel's, beside fio on the same file.

pub mod fio;
pub mod miss;
pub mod orion;
pub mod target;

use std::path::PathBuf;
use std::time::Duration;

use crate::child::{self, Outcome, Running};
use crate::error::Result;
use crate::experiment::{Book, not_measured};
use crate::report::{Bound, Series, Verdict};
use crate::stats::{self, Better};
use crate::subject;
use target::Target;

/// What is measured of every subject, fio's or ours, by these names.
pub const IOS: &str = "ios_per_second";
pub const MIB: &str = "mib_per_second";
pub const P50: &str = "p50_us";
pub const P99: &str = "p99_us";
pub const P999: &str = "p999_us";
pub const CPU: &str = "cpu_us";
/// Of a cache: reads, of which some go to the file and some do not.
pub const READS: &str = "reads_per_second";
pub const HIT_RATIO: &str = "hit_ratio";

/// Where the file is.
#[derive(Clone, Debug, clap::Args)]
pub struct PlaceOptions {
    /// A file or block device that is there already; it is only read (default: one is made, and removed)
    #[arg(long, value_name = "PATH", conflicts_with = "dir")]
    pub file: Option<PathBuf>,
    /// Where to make the file: a folder of a file system on a device (default: the temporary folder, or /var/tmp)
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Length of the file that is made, or how much is used of the one given
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(16..))]
    pub mib: Option<u64>,
}

impl PlaceOptions {
    /// Opens the file or makes one.
    fn ready(&self, mib: u64) -> Result<Target> {
        let bytes = self.mib.unwrap_or(mib) << 20;
        match &self.file {
            Some(path) => Target::existing(path, self.mib.map(|_| bytes)),
            None => Target::make(self.dir.as_deref(), bytes),
        }
    }
}

/// Runs one of the hidden subcommands on the file.
fn sample(subject: &str, target: &Target, mut line: Vec<String>, limit: Duration) -> Result<Outcome> {
    line.extend(target.arguments());
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    let mut command = child::workload(&line)?;
    subject::clear_foreign_settings(&mut command);
    let finished = Running::start(&mut command)?.finish(limit)?;
    child::outcome(subject, &finished)
}

/// Whether the user wants a subject.
/// Of each round the best of several subjects.
fn best<Case: Ord + Clone>(
    book: &Book<Case>,
    case: &Case,
    subjects: &[&'static str],
    (metric, better): (&'static str, Better),
) -> Option<Series> {
    let all: Vec<&Series> = subjects.iter().filter_map(|subject| book.get(case, subject, metric)).collect();
    let rounds = all.iter().map(|series| series.rounds.len()).max()?;
    let of_round = |round: usize| {
        let values = all.iter().filter_map(|series| series.rounds.get(round).copied().flatten());
        values.reduce(if better == Better::Higher { f64::max } else { f64::min })
    };
    Some(Series { rounds: (0..rounds).map(of_round).collect(), ..Series::default() })
}

/// A verdict on how many times better, or how many times as much, one is than the other.
fn compare(
    target: impl Into<String>,
    bound: Bound,
    own: Option<&Series>,
    (name, base): (&str, Option<&Series>),
) -> Verdict {
    let blank = not_measured(target, bound, "x", "one side was not run");
    let (Some(own), Some(base)) = (own, base) else { return blank };
    Verdict {
        // The quotient as it stands: rates are to be large, costs small.
        estimate: stats::estimate(&own.ratios(base, Better::Higher)),
        baseline: name.to_owned(),
        is_lost: !own.survived(),
        note: String::new(),
        ..blank
    }
}
