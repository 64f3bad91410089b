//! Software page sizes from 4 KiB to 8 MiB: files read by calls, files mapped by views, files on a device, small files.
//! At the end, a recommendation of page sizes that follows from the measured rows.
//!
//! Each part of the experiment has its own samples, rows and targets, and adds them to one report.

mod device;
mod page;
mod recommend;
mod repeated;
mod resident;
mod small;

use crate::error::{Error, Result};
use crate::experiment::{CommonOptions, Named};
use crate::report::Report;
use crate::storage::{PlaceOptions, Subject};
use page::Page;
use recommend::Finding;

/// A part of the experiment, and a name that `--only` accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Loop,
    Views,
    Touch,
    Random,
    Order,
    Small,
    Hits,
}

/// Text that `--help` prints below the options.
const HELP_PARTS: &str = "\
Parts and subjects (--only; P is a page size, such as 64K):
  loop    100 MiB of a file read again and again into memory from malloc:
          cache-P, mount, run, run-P, kernel
  views   fresh views of 100 MiB: view-P, view-auto, mmap
  touch   random reads of 8 bytes of resident memory: view-P, view-auto,
          anonymous-huge, mmap
  random  random reads of 4 KiB of a file four times the cache, 1 and 8 threads:
          view-P, view-auto, pin-P, mmap, mmap-random, fio-mmap
  order   the same file read in order: view-P, view-auto, mmap, mmap-sequential
  small   memory of many small files: cache-P
  hits    copies of resident pages: anonymous-pool, shared-pool

Examples:
  pagemill bench pageshift --quick
  pagemill bench pageshift --only views,touch --page-sizes 4K,64K,2M
  pagemill bench pageshift --only view-64K,mmap-random --file /dev/sdb --cache-mib 1024

Methods and metrics: docs/benchmarks-cache.md.";

#[derive(Clone, Debug, clap::Args)]
#[command(after_help = HELP_PARTS)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    #[command(flatten)]
    pub place: PlaceOptions,
    /// Software page sizes, separated by commas, 4K to 8M (default 4K,16K,64K,256K,1M,2M,8M, with --quick 4K,64K,2M)
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = page::parse)]
    page_sizes: Vec<&'static Page>,
    /// MiB of memory for the pages of the file on a device (default a quarter of the file: 256, with --quick 32)
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(8..=1024))]
    cache_mib: Option<u64>,
    /// Number of small files (default 10000, with --quick 2000)
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    files: Option<u64>,
}

/// The options, and the page sizes that they choose.
struct Plan<'a> {
    options: &'a Options,
    common: &'a CommonOptions,
    pages: Vec<&'static Page>,
}

impl Part {
    const ALL: [Self; 7] = [Self::Loop, Self::Views, Self::Touch, Self::Random, Self::Order, Self::Small, Self::Hits];

    fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::Views => "views",
            Self::Touch => "touch",
            Self::Random => "random",
            Self::Order => "order",
            Self::Small => "small",
            Self::Hits => "hits",
        }
    }

    /// Returns the names of the part's subjects.
    fn subjects(self, pages: &[&'static Page]) -> Vec<&'static str> {
        fn names<Work>(subjects: &[Subject<Work>]) -> Vec<&'static str> {
            subjects.iter().map(Named::name).collect()
        }
        match self {
            Self::Loop => names(&repeated::subjects(pages)),
            Self::Views => names(&resident::view_subjects(pages)),
            Self::Touch => names(&resident::touch_subjects(pages)),
            Self::Random => names(&device::random_subjects(pages)),
            Self::Order => names(&device::order_subjects(pages)),
            Self::Small => names(&small::subjects(pages)),
            Self::Hits => small::POOLS.iter().map(|pool| pool.name).collect(),
        }
    }
}

impl Plan<'_> {
    /// Returns whether the subject of a part is to be run: `--only` names it or the part, or `--only` is absent.
    fn is_wanted(&self, part: Part, subject: &str) -> bool {
        self.common.is_wanted(part.name()) || self.common.is_wanted(subject)
    }

    /// Returns those of a part's subjects that are to be run.
    fn wanted<Work>(&self, part: Part, subjects: Vec<Subject<Work>>) -> Vec<Subject<Work>> {
        subjects.into_iter().filter(|subject| self.is_wanted(part, subject.name)).collect()
    }

    fn runs(&self, part: Part) -> bool {
        part.subjects(&self.pages).iter().any(|subject| self.is_wanted(part, subject))
    }

    /// Checks `--only`, and that each other option is for a part that is run.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] with the list of known names, or with the names of the parts that use the option.
    fn check(&self) -> Result<()> {
        let parts = Part::ALL.map(Part::name);
        let subjects = Part::ALL.iter().flat_map(|part| part.subjects(&self.pages));
        let mut known = parts.to_vec();
        for subject in subjects {
            if !known.contains(&subject) {
                known.push(subject);
            }
        }
        self.common.check_only(&known)?;
        let place = &self.options.place;
        let is_placed = place.file.is_some() || place.dir.is_some() || place.mib.is_some();
        let options: [(&str, bool, &[Part]); 4] = [
            ("--file, --dir and --mib are", is_placed, &[Part::Random, Part::Order]),
            ("--cache-mib is", self.options.cache_mib.is_some(), &[Part::Random, Part::Order]),
            ("--files is", self.options.files.is_some(), &[Part::Small]),
            ("--page-sizes is", !self.options.page_sizes.is_empty(), &Part::ALL[..6]),
        ];
        match options.into_iter().find(|(_, is_given, of)| *is_given && !of.iter().any(|part| self.runs(*part))) {
            Some((option, _, of)) => {
                let of: Vec<&str> = of.iter().map(|part| part.name()).collect();
                Err(Error::CannotRun(format!("{option} for {}, which --only leaves out", of.join(" and "))))
            }
            None => Ok(()),
        }
    }
}

/// Compares page sizes. Adds rows, verdicts and a recommendation to the report.
///
/// # Errors
///
/// [`Error::WrongAnswer`] if a file had wrong contents; [`Error::CannotRun`] for options without effect, without a file
/// for the parts that need one, or if the cache could hold the whole file.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let plan = Plan { options, common, pages: page::chosen(&options.page_sizes, common.quick) };
    plan.check()?;
    let mut findings: Vec<Finding> = Vec::new();
    if plan.runs(Part::Loop) {
        repeated::run(&plan, report)?;
    }
    if plan.runs(Part::Views) {
        findings.extend(resident::run_views(&plan, report)?);
    }
    if plan.runs(Part::Touch) {
        findings.extend(resident::run_touch(&plan, report)?);
    }
    if plan.runs(Part::Random) || plan.runs(Part::Order) {
        findings.extend(device::run(&plan, report)?);
    }
    if plan.runs(Part::Small) {
        findings.extend(small::run(&plan, report)?);
    }
    if plan.runs(Part::Hits) {
        small::run_hits(&plan, report)?;
    }
    if let Some(sentence) = recommend::sentence(&findings) {
        report.set_conclusion(sentence);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn plan_of<T>(line: &[&str], then: impl FnOnce(&Plan<'_>) -> T) -> T {
        let options = Line::try_parse_from([&["x"], line].concat()).expect("known options").options;
        let pages = page::chosen(&options.page_sizes, options.common.quick);
        then(&Plan { options: &options, common: &options.common, pages })
    }

    /// `--only` must accept names of parts and of subjects. A part must run if `--only` names it or one of its subjects.
    #[test]
    fn parts_follow_only() {
        let runs = |line: &[&str]| {
            plan_of(line, |plan| Part::ALL.into_iter().filter(|part| plan.runs(*part)).collect::<Vec<_>>())
        };
        assert_eq!(runs(&[]), Part::ALL);
        assert_eq!(runs(&["--only", "hits,touch"]), [Part::Touch, Part::Hits]);
        assert_eq!(runs(&["--only", "pin-64K"]), [Part::Random]);
        assert_eq!(runs(&["--only", "cache-16K"]), [Part::Loop, Part::Small]);
        let wanted = plan_of(&["--only", "views,view-2M"], |plan| {
            plan.wanted(Part::Random, device::random_subjects(&plan.pages))
                .iter()
                .map(|one| one.name)
                .collect::<Vec<_>>()
        });
        assert_eq!(wanted, ["view-2M"]);
    }

    /// Unknown names, page sizes that are not measured, and options without effect must be refused.
    #[test]
    fn options_without_effect_are_refused() {
        for (line, words) in [
            (&["--only", "hoard"][..], "no subject hoard; there are loop,"),
            (&["--only", "view-64K", "--page-sizes", "4K"], "no subject view-64K"),
            (&["--only", "views", "--file", "x"], "random and order, which --only leaves out"),
            (&["--only", "hits", "--page-sizes", "4K"], "--page-sizes is for loop and"),
            (&["--only", "loop", "--files", "7"], "--files is for small"),
        ] {
            let refused = plan_of(line, |plan| plan.check()).expect_err("it is refused").to_string();
            assert!(refused.contains(words), "{line:?}: {refused}");
        }
        for line in [["--page-sizes", "3K"], ["--page-sizes", "16M"], ["--cache-mib", "4096"], ["--files", "0"]] {
            assert!(Line::try_parse_from([&["x"][..], &line].concat()).is_err(), "{line:?}");
        }
    }
}
