//! Nobody is killed, and nobody waits long, while memory could be given back: by a group's limit, by a sibling's
//! request, by a machine that runs full.
//!
//! Being killed is a result, of every allocator. Pagemill is told nothing of any limit; it has to see it.

mod files;
mod handover;
mod host;
mod reaction;
mod writers;

use crate::cgroup::Cgroup;
use crate::child;
use crate::error::{Error, Result};
use crate::experiment::Common;
use crate::report::Report;
use crate::subject;

/// The limit around all processes of a group.
const LIMIT_MIB: u64 = 256;

/// Options of the experiment.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub common: Common,
    /// How long each sample of the writers lasts (default 60, with --quick 1)
    #[arg(long)]
    pub seconds: Option<u64>,
    /// Only the writers in a group that does not hold what they freed
    #[arg(long)]
    pub writers: bool,
    /// Only the handover: one process frees much, then another in its group needs it
    #[arg(long)]
    pub handover: bool,
    /// Only the time from a sibling's request until the bytes are there
    #[arg(long)]
    pub reaction: bool,
    /// Only a machine that another process fills at 1 GiB/s. Uses nearly all memory; never part of the others
    #[arg(long)]
    pub host: bool,
    /// Only files that may vanish, on a `pagemill mount`, written at full speed in a group that does not hold them.
    /// Takes root; never part of the others
    #[arg(long)]
    pub files: bool,
    /// Of --files only the cases whose name contains this
    #[arg(long, value_name = "TEXT", requires = "files")]
    pub case: Option<String>,
}

impl Options {
    /// Whether a part is to be run: it was named, or none was.
    fn wants(&self, is_named: bool) -> bool {
        is_named || !(self.writers || self.handover || self.reaction || self.host || self.files)
    }

    /// Whether anything is to be run under allocators.
    fn wants_allocators(&self) -> bool {
        !self.files || self.writers || self.handover || self.reaction || self.host
    }
}

/// Runs it and gives the report.
///
/// # Errors
///
/// [`Error::CannotRun`] where no control group can be made for the parts that need one.
pub fn run(options: &Options) -> Result<Report> {
    let common = &options.common;
    let (is_writing, is_handing_over) = (options.wants(options.writers), options.wants(options.handover));
    if is_writing || is_handing_over || options.files {
        Cgroup::with_limit(LIMIT_MIB << 20).map_err(|why| Error::CannotRun(format!("survive needs a limit: {why}")))?;
    }
    let mut report = Report::new("survive", common.json);
    if options.files {
        files::run(options, &mut report)?;
    }
    if !options.wants_allocators() {
        return Ok(report);
    }
    let (ready, gaps) = subject::select(&common.only, |_| true)?;
    gaps.into_iter().for_each(|gap| report.gap(gap));
    if options.host {
        host::check_machine()?;
    }
    child::warm(2 * LIMIT_MIB)?;
    if is_writing {
        writers::run(options, &ready, &mut report)?;
    }
    if is_handing_over {
        handover::run(common, &ready, &mut report)?;
    }
    if options.wants(options.reaction) {
        reaction::run(common, &ready, &mut report)?;
    }
    if options.host {
        host::run(common, &ready, &mut report)?;
    }
    Ok(report)
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

    /// Without a name all run that leave the machine usable; with names only those.
    #[test]
    fn parts_are_chosen_by_name() {
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
    }
}
