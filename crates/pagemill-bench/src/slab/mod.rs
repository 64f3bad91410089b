//! Slabs: cost to allocate, free and read an object; effect of moves on concurrent readers and writers; memory left
//! after fragmentation; stalls during compaction; speed of walks of an index.
//!
//! Each part of the experiment has its own samples, rows and targets, and adds them to one report.

mod fragments;
mod moves;
mod reads;
mod speed;
mod stalls;
mod storage_subjects;
mod walks;

use clap::ValueEnum;

use crate::child;
use crate::error::{Error, Result};
use crate::experiment::CommonOptions;
use crate::report::Report;
use crate::subject::{self, AvailableSubject, Role, SUBJECTS};

/// Name in the report of the slab cache whose objects keep their address.
pub const FIXED: &str = "fixed";
/// Name in the report of the slab cache whose objects are moved by a function of their owner.
pub const BY_OWNER: &str = "by-owner";
/// Name in the report of the slab cache that moves its objects behind handles.
pub const BY_HANDLE: &str = "by-handle";

/// A part of the experiment on slab caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Allocate and free objects
    Speed,
    /// Read values by handle
    Reads,
    /// Read and write objects while they are moved concurrently
    Moves,
    /// Allocate two million objects, free nine tenths of them at random, then return all free memory
    Fragments,
    /// Latency of a thread that allocates and frees objects while free memory is returned as in the part fragments
    Stalls,
    /// Walk the index of a file while its nodes are moved
    Walks,
}

/// Text that `--help` prints below the options.
const HELP_EXAMPLES_AND_SUBJECTS: &str = "\
Subjects (--only) of the parts (--parts):
  speed      fixed, by-owner, by-handle: Pagemill's caches
             slotmap, sharded-slab, glibc, jemalloc, mimalloc, tcmalloc
  reads      handle-read, pointer-read: measured together
  moves      by-handle, by-owner
  fragments  by-owner, by-handle, fixed, glibc, jemalloc, mimalloc, tcmalloc, mesh
  stalls     the same
  walks      still, moving: the index of a file, without and during moves

Examples:
  pagemill bench slab --quick --parts reads
  pagemill bench slab --parts speed --sizes 192 --only fixed,tcmalloc
  pagemill bench slab --parts fragments --only by-owner,glibc

The part speed takes about eight minutes, reads and moves two. Methods and metrics:
docs/benchmarks-slab.md.";

#[derive(Clone, Debug, clap::Args)]
#[command(after_help = HELP_EXAMPLES_AND_SUBJECTS)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    /// Run only these parts, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "PART")]
    pub parts: Vec<Part>,
    /// Object sizes of the part speed in bytes, separated by commas (default 64,192,576,1024,4096)
    #[arg(long, value_delimiter = ',', value_name = "BYTES", value_parser = speed::parse_size)]
    pub sizes: Vec<usize>,
    /// Also count the instructions of the part speed with valgrind
    #[arg(long)]
    pub callgrind: bool,
    /// Initial number of objects of the parts fragments and stalls (default 2,000,000, with --quick 500,000)
    #[arg(long, value_parser = clap::value_parser!(u32).range(1000..))]
    pub objects: Option<u32>,
}

impl Part {
    /// Returns the part's name as an argument of `--parts`.
    fn name(self) -> String {
        child::word(&self)
    }

    /// Returns the part's subjects, as arguments of `--only`.
    fn subjects(self) -> Vec<&'static str> {
        match self {
            Self::Speed => speed::names().collect(),
            Self::Reads => reads::SUBJECTS.to_vec(),
            Self::Moves => moves::MOVING_CACHES.to_vec(),
            Self::Fragments | Self::Stalls => storage_subjects::names().collect(),
            Self::Walks => walks::NAMES.to_vec(),
        }
    }
}

impl Options {
    /// Returns whether to run a part of the experiment. `--parts` must name the part or be absent, and `--only` must
    /// name a subject of the part or be absent.
    fn runs_part(&self, part: Part) -> bool {
        let is_named = self.parts.is_empty() || self.parts.contains(&part);
        is_named && part.subjects().into_iter().any(|name| self.common.is_wanted(name))
    }

    /// Checks that with the given options there is something to measure for each part of `--parts`, each subject of
    /// `--only` and each other option.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] with the list of known subjects or parts, if one of them has nothing to measure.
    fn check(&self) -> Result<()> {
        self.common.check_only(&all_subjects())?;
        let list = |part: &Part| format!("{} has {}", part.name(), part.subjects().join(", "));
        if let Some(part) = self.parts.iter().find(|part| !self.runs_part(**part)) {
            let only = self.common.only.join(", ");
            return Err(Error::CannotRun(format!("the part {0} has no subject {only}; {1}", part.name(), list(part))));
        }
        let is_run = |name: &String| self.parts.iter().any(|part| part.subjects().contains(&name.as_str()));
        if let Some(name) = self.common.only.iter().find(|name| !self.parts.is_empty() && !is_run(name)) {
            let lists: Vec<String> = self.parts.iter().map(list).collect();
            return Err(Error::CannotRun(format!("none of the parts has a subject {name}; {}", lists.join("; "))));
        }
        let options: [(&str, bool, &[Part]); 3] = [
            ("--sizes", !self.sizes.is_empty(), &[Part::Speed]),
            ("--callgrind", self.callgrind, &[Part::Speed]),
            ("--objects", self.objects.is_some(), &[Part::Fragments, Part::Stalls]),
        ];
        match options.into_iter().find(|(_, is_given, of)| *is_given && !of.iter().any(|part| self.runs_part(*part))) {
            Some((option, _, of)) => {
                let of: Vec<String> = of.iter().map(|part| part.name()).collect();
                Err(Error::CannotRun(format!(
                    "{option} is for {}, which --parts or --only leaves out",
                    of.join(" and ")
                )))
            }
            None => Ok(()),
        }
    }
}

/// Runs the wanted parts of the experiment on slab caches. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if an object had wrong contents; [`Error::CannotRun`] for an unknown subject, or if a part or
/// an option has nothing to measure.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    options.check()?;
    for part in Part::value_variants().iter().filter(|part| options.runs_part(**part)) {
        match part {
            Part::Speed => speed::run_part(options, report)?,
            Part::Reads => reads::run_part(options, report)?,
            Part::Moves => moves::run_part(options, report)?,
            Part::Fragments => fragments::run_part(options, report)?,
            Part::Stalls => stalls::run_part(options, report)?,
            Part::Walks => walks::run_part(options, report)?,
        }
    }
    Ok(())
}

fn all_subjects() -> Vec<&'static str> {
    let mut all: Vec<_> = Part::value_variants().iter().flat_map(|part| part.subjects()).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn allocator_names() -> impl Iterator<Item = &'static str> {
    SUBJECTS.iter().filter(|subject| subject.role == Role::Default).map(|subject| subject.name)
}

/// Returns the wanted allocators with default settings that are available on this machine. For each other wanted
/// allocator, also returns a sentence for the report that says what is missing.
fn allocators(common: &CommonOptions) -> Result<(Vec<AvailableSubject>, Vec<String>)> {
    let is_default = |subject: &subject::Subject| subject.role == Role::Default;
    let only: Vec<String> = allocator_names().filter(|name| common.is_wanted(name)).map(str::to_owned).collect();
    if only.is_empty() { Ok(Default::default()) } else { subject::select_available(&only, is_default) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text below the options of `--help` must name all parts and, for each part, all its subjects.
    #[test]
    fn help_lists_all_parts_and_subjects() {
        let parts: Vec<&str> = HELP_EXAMPLES_AND_SUBJECTS.split("\n  ").collect();
        for part in Part::value_variants().iter().filter(|part| **part != Part::Stalls) {
            let lines: Vec<&&str> = parts.iter().skip_while(|line| !line.starts_with(&part.name())).take(2).collect();
            let missing = |name: &&str| !lines.iter().any(|line| line.contains(name));
            assert_eq!(part.subjects().into_iter().find(missing), None, "{}: {lines:?}", part.name());
        }
        assert_eq!(Part::Stalls.subjects(), Part::Fragments.subjects());
    }
}
