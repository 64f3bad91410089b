//! Slabs: what it costs to take an object and to give it back, and to read it; what its users notice of its being moved; what is left of
//! fragmented memory, who waits while it is packed, and how fast it is walked.
//!
//! The parts have books, rows and targets of their own; each adds them to the one report.

mod fragments;
mod keepers;
mod moves;
mod reads;
mod speed;
mod stalls;
mod walks;

use clap::ValueEnum;

use crate::error::{Error, Result};
use crate::experiment::Common;
use crate::report::Report;
use crate::subject::{self, Ready, Role, SUBJECTS};

/// Names of the caches, as reported.
pub const FIXED: &str = "fixed";
pub const BY_OWNER: &str = "by-owner";
pub const BY_HANDLE: &str = "by-handle";

/// A part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Objects taken and given back
    Speed,
    /// Values read by handle
    Reads,
    /// A reader and a writer while objects are moved
    Moves,
    /// Two million objects, a random nine tenths freed, all memory given back that can be
    Fragments,
    /// A thread that takes and frees objects meanwhile
    Stalls,
    /// A tree of names and the index of a file walked while objects move, and after
    Walks,
}

/// What `--help` says below the options.
const MORE_HELP: &str = "\
Subjects (--only) of the parts (--parts):
  speed      fixed, by-owner, by-handle: Pagemill's caches
             slotmap, sharded-slab, glibc, jemalloc, mimalloc, tcmalloc
  reads      handle-read, pointer-read: measured together
  moves      by-handle, by-owner
  fragments  by-owner, by-handle, fixed, glibc, jemalloc, mimalloc, tcmalloc, mesh
  stalls     the same
  walks      still, moving, fragmented, packed: trees and files, while nothing moves,
             while objects move, after most went, after the rest was packed

Examples:
  pagemill bench slab --quick --parts reads
  pagemill bench slab --parts speed --sizes 192 --only fixed,tcmalloc
  pagemill bench slab --parts fragments --only by-owner,glibc

All of speed takes some eight minutes, reads and moves two. What is measured, how,
and figures: docs/benchmarks-slab.md.";

/// Options of the experiment.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = MORE_HELP)]
pub struct Options {
    #[command(flatten)]
    pub common: Common,
    /// Only these parts, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "PART")]
    pub parts: Vec<Part>,
    /// Bytes of the objects of speed, separated by commas (default 64,192,576,1024,4096)
    #[arg(long, value_delimiter = ',', value_name = "BYTES", value_parser = speed::size)]
    pub sizes: Vec<usize>,
    /// Count the instructions of speed, too, through valgrind
    #[arg(long)]
    pub callgrind: bool,
    /// How many objects fragments and stalls begin with (default 2,000,000, with --quick 500,000)
    #[arg(long, value_parser = clap::value_parser!(u32).range(1000..))]
    pub objects: Option<u32>,
}

impl Part {
    /// As `--parts` has it.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// What `--only` may name of it.
    fn subjects(self) -> Vec<&'static str> {
        match self {
            Self::Speed => speed::names().collect(),
            Self::Reads => reads::SUBJECTS.to_vec(),
            Self::Moves => moves::KINDS.to_vec(),
            Self::Fragments | Self::Stalls => keepers::names().collect(),
            Self::Walks => walks::NAMES.to_vec(),
        }
    }
}

impl Options {
    /// Whether a part is run: it was named, or none was, and it has a subject that is wanted.
    fn has(&self, part: Part) -> bool {
        let is_named = self.parts.is_empty() || self.parts.contains(&part);
        is_named && part.subjects().into_iter().any(|name| self.common.is_wanted(name))
    }

    /// Refuses what would measure nothing: a part, a subject, an option.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] with the subjects or parts that there are.
    fn check(&self) -> Result<()> {
        self.common.check_only(&known())?;
        let list = |part: &Part| format!("{} has {}", part.name(), part.subjects().join(", "));
        if let Some(part) = self.parts.iter().find(|part| !self.has(**part)) {
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
        match options.into_iter().find(|(_, is_given, of)| *is_given && !of.iter().any(|part| self.has(*part))) {
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

/// Runs it and gives the report.
///
/// # Errors
///
/// [`Error::WrongAnswer`] where an object was not what was put there; [`Error::CannotRun`] for an unknown subject, and where a part or
/// an option would measure nothing.
pub fn run(options: &Options) -> Result<Report> {
    options.check()?;
    let mut report = Report::new("slab", options.common.json);
    if options.has(Part::Speed) {
        speed::run_part(options, &mut report)?;
    }
    if options.has(Part::Reads) {
        reads::run_part(options, &mut report)?;
    }
    if options.has(Part::Moves) {
        moves::run_part(options, &mut report)?;
    }
    if options.has(Part::Fragments) {
        fragments::run_part(options, &mut report)?;
    }
    if options.has(Part::Stalls) {
        stalls::run_part(options, &mut report)?;
    }
    if options.has(Part::Walks) {
        walks::run_part(options, &mut report)?;
    }
    Ok(report)
}

/// Subjects of all parts.
fn known() -> Vec<&'static str> {
    let mut all: Vec<_> = Part::value_variants().iter().flat_map(|part| part.subjects()).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Allocators as they come.
fn allocator_names() -> impl Iterator<Item = &'static str> {
    SUBJECTS.iter().filter(|subject| subject.role == Role::Default).map(|subject| subject.name)
}

/// The default allocators that are wanted and there, and a sentence for each that is wanted and is not.
fn allocators(common: &Common) -> Result<(Vec<Ready>, Vec<String>)> {
    let is_default = |subject: &subject::Subject| subject.role == Role::Default;
    let only: Vec<String> = allocator_names().filter(|name| common.is_wanted(name)).map(str::to_owned).collect();
    if only.is_empty() { Ok(Default::default()) } else { subject::select(&only, is_default) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The help names every part with its subjects, and every size.
    #[test]
    fn help_names_all() {
        let parts: Vec<&str> = MORE_HELP.split("\n  ").collect();
        for part in Part::value_variants().iter().filter(|part| **part != Part::Stalls) {
            let lines: Vec<&&str> = parts.iter().skip_while(|line| !line.starts_with(&part.name())).take(2).collect();
            let missing = |name: &&str| !lines.iter().any(|line| line.contains(name));
            assert_eq!(part.subjects().into_iter().find(missing), None, "{}: {lines:?}", part.name());
        }
        assert_eq!(Part::Stalls.subjects(), Part::Fragments.subjects());
    }
}
