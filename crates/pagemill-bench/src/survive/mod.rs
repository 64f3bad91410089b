//! Tests whether free memory is returned so early that no process is killed: under the limit of a cgroup, at a
//! sibling's request, and on a full machine.
//!
//! No process may be killed, or wait long for memory. A kill is a result, under every allocator. In most parts Pagemill
//! gets no option with the limit, so it must detect the limit itself.

mod files;
mod handover;
mod host;
mod pieces;
mod reaction;
mod writers;

use std::time::Duration;

use crate::cgroup::Cgroup;
use crate::child::{self, Outcome, RunningGroup};
use crate::error::{Error, Result};
use crate::experiment::{CommonOptions, Named};
use crate::report::Report;
use crate::subject::{self, AvailableSubject};

/// The memory limit, in MiB, of the cgroup that contains all processes of a sample.
const LIMIT_MIB: u64 = 256;

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: CommonOptions,
    /// Seconds that each sample of the writers lasts (default 60, with --quick 1)
    #[arg(long)]
    pub seconds: Option<u64>,
    /// Run only threads that write and free memory (writers), in a cgroup that is too small for live and freed memory
    /// together
    #[arg(long)]
    pub writers: bool,
    /// Run only the handover: one process frees much memory, then another in its cgroup needs it; with allocations of
    /// all sizes, and of one size
    #[arg(long)]
    pub handover: bool,
    /// With --handover and allocations of one size: samples of each case (default as --samples, with --quick 1)
    #[arg(long, value_name = "COUNT", requires = "handover", value_parser = clap::value_parser!(u16).range(1..))]
    pub trials: Option<u16>,
    /// With --handover: only allocations of these sizes, such as 512,4K,1M
    #[arg(long, value_name = "SIZES", requires = "handover", value_delimiter = ',', value_parser = pagemill_core::units::parse_bytes)]
    pub sizes: Vec<u64>,
    /// With --handover and allocations of one size: only these variants (default all, with --quick the first)
    #[arg(long, value_name = "VARIANTS", requires = "handover", value_delimiter = ',')]
    pub variants: Vec<pieces::Variant>,
    /// Measure only the time from a request to another process of the same tree until that process has returned the
    /// memory
    #[arg(long)]
    pub reaction: bool,
    /// Run only on a machine that another process fills at 1 GiB/s. Uses nearly all memory; runs only if this option is
    /// given
    #[arg(long)]
    pub host: bool,
    /// Run only volatile files on a `pagemill mount`, written at full speed in a cgroup that is too small for them.
    /// Needs root; runs only if this option is given
    #[arg(long)]
    pub files: bool,
    /// With --files: only cases whose name contains this text
    #[arg(long, value_name = "TEXT", requires = "files")]
    pub case: Option<String>,
}

impl Options {
    /// Returns whether to run a part of the experiment. `is_named` says whether the option of the part is given.
    /// Without an option for any part, the result is true.
    fn wants(&self, is_named: bool) -> bool {
        is_named || !(self.writers || self.handover || self.reaction || self.host || self.files)
    }

    /// Returns whether to run any part of the experiment that compares allocators.
    fn wants_allocators(&self) -> bool {
        !self.files || self.writers || self.handover || self.reaction || self.host
    }
}

/// Runs the wanted parts of the experiment, which count processes killed for lack of memory. Adds rows and verdicts to the report.
///
/// # Errors
///
/// [`Error::CannotRun`] if no cgroup can be made for the parts that need one.
pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let common = &options.common;
    let (is_writing, is_handing_over) = (options.wants(options.writers), options.wants(options.handover));
    if is_writing || is_handing_over || options.files {
        Cgroup::with_limit(LIMIT_MIB << 20).map_err(|why| Error::CannotRun(format!("survive needs a limit: {why}")))?;
    }
    if options.files {
        files::run(options, report)?;
    }
    if !options.wants_allocators() {
        return Ok(());
    }
    let ready = report.with_gaps(subject::select_available(&common.only, |_| true)?);
    if options.host {
        host::check_machine()?;
    }
    child::touch_beforehand(2 * LIMIT_MIB)?;
    if is_writing {
        writers::run(options, &ready, report)?;
    }
    if is_handing_over {
        if options.sizes.is_empty() && options.variants.is_empty() {
            handover::run(common, &ready, report)?;
        }
        pieces::run(options, &ready, report)?;
    }
    if options.wants(options.reaction) {
        reaction::run(common, &ready, report)?;
    }
    if options.host {
        host::run(common, &ready, report)?;
    }
    Ok(())
}

/// Makes the cgroup of a sample.
///
/// # Errors
///
/// [`Error::Gap`] if it could not be made.
fn make_group(subject: &AvailableSubject, limit_mib: u64) -> Result<Cgroup> {
    Cgroup::with_limit(limit_mib << 20).map_err(|why| Error::Gap(format!("survive: {}: {why}", subject.name())))
}

/// Returns the words of a command line that runs a hidden subcommand of the bench under the subject.
///
/// # Errors
///
/// [`Error::Gap`] if the subject cannot run.
fn workload_line(subject: &AvailableSubject, run_options: &[&str], workload: &str) -> Result<Vec<String>> {
    let mut line = subject.launcher("survive", run_options)?;
    line.extend([child::own_executable()?.display().to_string(), workload.to_owned()]);
    Ok(line)
}

/// Starts a command in the cgroup, without any environment variable of the caller that affects allocators.
fn start_in_group(group: &Cgroup, line: &[String]) -> Result<RunningGroup> {
    RunningGroup::start(&mut child::command_in_group(Some(group), line)?)
}

/// Runs a process that needs freed memory (a newcomer) from start to end.
fn run_newcomer(group: &Cgroup, mib: u64, threads: u64) -> Result<Outcome> {
    let own = child::own_executable()?.display().to_string();
    let line = child::command_words(&[&own, "__newcomer"], &[("--mib", mib), ("--threads", threads)]);
    let finished = start_in_group(group, &line)?.finish(Duration::from_secs(60))?;
    child::classify("the newcomer's glibc", &finished)
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

    /// Without options, exactly the three parts that do not use all memory and need no root must run. With options,
    /// only the named parts must run. An option of a part that is not named must be refused.
    #[test]
    fn options_choose_parts() {
        let wanted = |line: &[&str]| {
            let options = Line::try_parse_from([&["x"], line].concat()).expect("known options").options;
            let wants = |is_named| options.wants(is_named);
            [wants(options.writers), wants(options.handover), wants(options.reaction), options.host, options.files]
        };

        assert_eq!(wanted(&[]), [true, true, true, false, false]);
        assert_eq!(wanted(&["--host"]), [false, false, false, true, false]);
        assert_eq!(wanted(&["--handover", "--reaction"]), [false, true, true, false, false]);
        assert_eq!(wanted(&["--files", "--case", "64 MiB"]), [false, false, false, false, true]);
        assert!(Line::try_parse_from(["x", "--case", "4 MiB"]).is_err());
        assert!(Line::try_parse_from(["x", "--sizes", "4K"]).is_err());
    }
}
