//! Pagemill's experiments. Each compares Pagemill with its peers and measures all of them in one run.
//!
//! Workloads are hidden subcommands of this executable. Each workload runs as a process of its own under the allocator
//! to be measured. The main process starts the workloads, waits for them, and collects their results. It measures
//! nothing itself.

mod callgrind;
mod cgroup;
mod chain;
mod child;
mod chunks;
mod compare;
mod cost;
mod ebizzy;
mod error;
mod experiment;
mod files;
mod find;
mod footprint;
mod giveable;
mod giveback;
mod histogram;
mod hit;
mod hog;
mod ideas;
mod machine;
mod native;
mod output;
mod page;
mod pattern;
mod proc;
mod refs;
mod report;
mod signs;
mod slab;
mod small;
mod startup;
mod stats;
mod storage;
mod subject;
mod suite;
mod survive;
mod traces;
mod volatile;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::{Error, Result};
use crate::experiment::CommonOptions;
use crate::output::Output;
use crate::page::{Page, Section};
use crate::report::Report;
use crate::suite::Entry;

/// Measures Pagemill against other allocators, file systems, caches and fio, in one run on this machine.
///
/// Without the name of an experiment, runs all of them in a short form, in under four minutes on 2 CPUs, and prints a
/// table that compares Pagemill with the five published results on which it is based.
///
/// Exit status: 0 on success; 1 if a wrong answer was found or, with --strict, a target was missed; 2 if nothing could
/// be measured. After an interrupt it stops all processes that it started, then ends by the same signal.
#[derive(Debug, Parser)]
#[command(name = "pagemill bench", bin_name = "pagemill bench", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(flatten)]
    suite: suite::Options,
    #[command(subcommand)]
    experiment: Option<Experiment>,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    /// Records per second of a search server's workload with 1 to 24 threads, with and without a memory hog; cost of
    /// watching memory limits
    Ebizzy(ebizzy::Options),
    /// Time of small allocations with Pagemill preloaded, compared with plain jemalloc preloaded
    Small(small::Options),
    /// Time to return 1 GiB of free memory on request, and the longest malloc meanwhile
    Giveback(CommonOptions),
    /// Startup cost of a preloaded library in a program that does nothing
    Startup(startup::Options),
    /// Memory of Redis, CPython, sqlite3, git and a cargo build under every allocator
    Footprint(footprint::Options),
    /// OOM kills while a process holds free memory that it could return: threads that write and free memory, another
    /// process that needs the memory, a request by another process of the same tree, a full machine
    Survive(survive::Options),
    /// Files read and written in records of 4 KiB by 1 to 200 threads, mapped and unmapped, compared with tmpfs and the
    /// results of 2013
    Iozone(files::iozone::Options),
    /// Memory that small, medium, sparse and large files take, and which of them get huge pages
    Waste(files::FileOptions),
    /// Create, stat, read, list and remove many small files, compared with tmpfs
    Metadata(files::FileOptions),
    /// Software page sizes of 4 KiB to 8 MiB: files read again and again, fresh and resident views, a file four times the
    /// cache compared with mappings of the kernel, small files
    Pageshift(files::pageshift::Options),
    /// Cost to mark memory volatile and to unmark it, compared with MADV_FREE and MADV_DONTNEED; cost of a purge;
    /// ebizzy with its copies in volatile ranges
    Volatile(CommonOptions),
    /// Resident pages copied out and pinned in random order: the page cache compared with memcpy, files and other
    /// caches; its metadata
    Hit(hit::Options),
    /// Cost to pin ranges of huge folios, compared with one reference count for each 4 KiB; cost to split and collapse
    /// huge folios, compared with a copy
    Refs(CommonOptions),
    /// Hit rate on generated traces: the page cache's eviction compared with LRU, CLOCK, S3-FIFO and SIEVE
    Traces(traces::Options),
    /// Random 4 KiB reads of a file six times as large as the cache, by 1 to 32 threads and by one thread with many
    /// requests in flight, compared with fio
    Miss(storage::miss::Options),
    /// Reads and writes of 64 KiB to 2 MiB at queue depths 1 to 64, with buffers in huge pages and in small pages,
    /// compared with fio and the results of 2013
    Orion(storage::orion::Options),
    /// A file four times as large as the cache, read and written in order, compared with the kernel's page cache and fio
    Stream(storage::stream::Options),
    /// Write-back of scattered dirty 4 KiB pages in a file of 1 GiB, compared with fio writing at the same offsets
    Writeback(storage::writeback::Options),
    /// Objects of one size in slabs, compared with allocators and keyed maps: time to allocate, free and read an
    /// object; effect of moves on concurrent readers; memory that remains after nine tenths of the objects were freed
    /// at random; stalls; walks of the index of a file
    Slab(slab::Options),
    /// A name that does not exist is looked for in 100,000 files: in a RAM file system in this process and through FUSE,
    /// in tmpfs and in ext4; path walks, look-ups, creations and removals compared with system calls; memory that
    /// remains after nine tenths of a million files were removed at random
    Find(find::Options),
    /// Print the settings that make each allocator return memory at once, as a Markdown table
    Settings,
    #[command(name = "__enter", hide = true)]
    Enter(workload::ExecArguments),
    #[command(flatten)]
    Workload(Workload),
}

/// Defines the hidden subcommands of the bench from a table. Each line has the subcommand's name, its arguments, and
/// the function that runs it.
macro_rules! workloads {
    ($($name:literal $variant:ident($arguments:ty) => $run:path,)*) => {
        #[derive(Debug, Subcommand)]
        enum Workload {
            $(#[command(name = $name, hide = true)] $variant($arguments),)*
        }

        impl Workload {
            fn run(&self) -> ExitCode {
                match self {
                    $(Self::$variant(arguments) => workload::run(|| $run(arguments)),)*
                }
            }
        }
    };
}

workloads! {
    "__touch" Touch(workload::TouchArguments) => workload::touch,
    "__ebizzy" Ebizzy(workload::ebizzy::EbizzyArguments) => workload::ebizzy::run,
    "__hog" Hog(workload::hog::HogArguments) => workload::hog::run,
    "__pair" Pair(workload::pair::PairArguments) => workload::pair::run,
    "__writers" Writers(workload::writers::WritersArguments) => workload::writers::run,
    "__keeper" Keeper(workload::handover::KeeperArguments) => workload::handover::run_keeper,
    "__piece-keeper" PieceKeeper(workload::pieces::PieceKeeperArguments) => workload::pieces::run_keeper,
    "__churn" Churn(workload::churn::ChurnArguments) => workload::churn::run,
    "__returning" Returning(workload::work_after_free::ReturningArguments) => workload::work_after_free::run,
    "__newcomer" Newcomer(workload::handover::NewcomerArguments) => workload::handover::run_newcomer,
    "__asker" Asker(workload::reaction::AskerArguments) => workload::reaction::run_asker,
    "__hoarder" Hoarder(workload::reaction::HoarderArguments) => workload::reaction::run_hoarder,
    "__server" Server(workload::host::ServerArguments) => workload::host::run_server,
    "__filler" Filler(workload::host::FillerArguments) => workload::host::run_filler,
    "__idle" Idle(workload::idle::IdleArguments) => workload::idle::run,
    "__small" Small(workload::small::SmallArguments) => workload::small::run,
    "__find" Find(workload::find::FindArguments) => workload::find::run,
    "__slab" Slab(workload::slab::SlabArguments) => workload::slab::run,
    "__giveback" Giveback(workload::giveback::GivebackArguments) => workload::giveback::run,
    "__iozone" Iozone(workload::iozone::IozoneArguments) => workload::iozone::run,
    "__iozone-part" IozonePart(workload::iozone::WorkerArguments) => workload::iozone::run_worker,
    "__file-writers" FileWriters(workload::file_writers::FileWritersArguments) => workload::file_writers::run,
    "__toggle" Toggle(workload::volatile::ToggleArguments) => workload::volatile::measure_toggle,
    "__purging" Purging(workload::volatile::PurgingArguments) => workload::volatile::measure_purging,
    "__hit" Hit(workload::hit::HitArguments) => workload::hit::run,
    "__small-files" SmallFiles(workload::hit::SmallFilesArguments) => workload::hit::measure_files,
    "__refs" Refs(workload::refs::RefsArguments) => workload::refs::run,
    "__change" Change(workload::refs::SplitCollapseArguments) => workload::refs::measure_split_and_collapse,
    "__ring" Ring(workload::storage::ring::RingArguments) => workload::storage::ring::run,
    "__miss" Miss(workload::storage::miss::MissArguments) => workload::storage::miss::run,
    "__hits" Hits(workload::storage::hits::HitsArguments) => workload::storage::hits::run,
    "__stream" Stream(workload::storage::stream::StreamArguments) => workload::storage::stream::run,
    "__writeback" Writeback(workload::storage::writeback::WritebackArguments) => workload::storage::writeback::run,
    "__overwrite" Overwrite(workload::storage::overwrite::OverwriteArguments) => workload::storage::overwrite::run,
    "__waste" Waste(workload::waste::WasteArguments) => workload::waste::run,
    "__pageshift-loop" Repeated(workload::pageshift::repeated::RepeatedArguments) => workload::pageshift::repeated::run,
    "__pageshift-fresh" Fresh(workload::pageshift::fresh::FreshArguments) => workload::pageshift::fresh::run,
    "__pageshift-touch" TouchWords(workload::pageshift::touch::TouchWordsArguments) => workload::pageshift::touch::run,
    "__pageshift-device" Device(workload::pageshift::device::DeviceArguments) => workload::pageshift::device::run,
    "__pageshift-small" SmallInPages(workload::pageshift::small::SmallArguments) => workload::pageshift::small::run,
    "__metadata" Metadata(workload::metadata::MetadataArguments) => workload::metadata::run,
}

fn main() -> ExitCode {
    let Arguments { suite, experiment } = Arguments::parse();
    match &experiment {
        None => finish(child::handle_interrupts().and_then(|()| suite::run(&suite, measure_entry))),
        Some(Experiment::Settings) => {
            print!("{}", subject::settings_markdown());
            ExitCode::SUCCESS
        }
        Some(Experiment::Enter(arguments)) => workload::exec_in_cgroup(arguments),
        Some(Experiment::Workload(workload)) => workload.run(),
        Some(experiment) => finish(experiment.job().map_or(Ok(false), run_alone)),
    }
}

/// Measures, and adds rows and verdicts to the report.
type Measure<'a> = Box<dyn FnOnce(&mut Report) -> Result<()> + 'a>;

/// An experiment with its options, ready to run.
struct Job<'a> {
    name: &'static str,
    common: &'a CommonOptions,
    run: Measure<'a>,
}

impl Experiment {
    /// Returns the experiment as a job; none for the other commands.
    fn job(&self) -> Option<Job<'_>> {
        Some(match self {
            Self::Ebizzy(options) => job("ebizzy", &options.common, ebizzy::run, options),
            Self::Small(options) => job("small", &options.common, small::run, options),
            Self::Giveback(common) => job("giveback", common, giveback::run, common),
            Self::Startup(options) => job("startup", &options.common, startup::run, options),
            Self::Footprint(options) => job("footprint", &options.common, footprint::run, options),
            Self::Survive(options) => job("survive", &options.common, survive::run, options),
            Self::Iozone(options) => job("iozone", &options.files.common, files::iozone::run, options),
            Self::Waste(options) => job("waste", &options.common, files::waste::run, options),
            Self::Metadata(options) => job("metadata", &options.common, files::metadata::run, options),
            Self::Pageshift(options) => job("pageshift", &options.common, files::pageshift::run, options),
            Self::Volatile(common) => job("volatile", common, volatile::run, common),
            Self::Hit(options) => job("hit", &options.common, hit::run, options),
            Self::Refs(common) => job("refs", common, refs::run, common),
            Self::Traces(options) => job("traces", &options.common, traces::run, options),
            Self::Miss(options) => job("miss", &options.common, storage::miss::run, options),
            Self::Orion(options) => job("orion", &options.common, storage::orion::run, options),
            Self::Stream(options) => job("stream", &options.common, storage::stream::run, options),
            Self::Writeback(options) => job("writeback", &options.common, storage::writeback::run, options),
            Self::Slab(options) => job("slab", &options.common, slab::run, options),
            Self::Find(options) => job("find", &options.common, find::run, options),
            Self::Settings | Self::Enter(_) | Self::Workload(_) => return None,
        })
    }
}

fn job<'a, Options>(
    name: &'static str,
    common: &'a CommonOptions,
    run: fn(&Options, &mut Report) -> Result<()>,
    options: &'a Options,
) -> Job<'a> {
    Job { name, common, run: Box::new(move |report| run(options, report)) }
}

/// Runs one experiment, prints its report, and writes its page. Returns whether the bench must fail because a target
/// was missed.
fn run_alone(job: Job<'_>) -> Result<bool> {
    child::handle_interrupts()?;
    let output = Output::prepare(&job.common.output)?;
    experiment::set_progress_title(job.name);
    let mut report = Report::new(job.name, output.is_json());
    report.set_first_line(output.first_line());
    (job.run)(&mut report)?;
    output.print_machine();
    report.print();
    if !report.has_results() {
        return Err(Error::CannotRun("nothing was measured".to_owned()));
    }
    output.finish(Page {
        name: job.name,
        title: format!("pagemill bench {}", job.name),
        machine: &output.machine,
        sections: vec![Section { report: &report, seconds: None }],
        ideas: &[],
        left_out: &[],
        comparison: None,
    })?;
    Ok(job.common.strict && report.has_missed_target())
}

/// Runs an experiment of the suite with its options there.
fn measure_entry(entry: &Entry, report: &mut Report) -> Result<()> {
    let words = ["pagemill bench", entry.name].into_iter().chain(entry.options.iter().copied());
    let arguments = Arguments::try_parse_from(words).map_err(|error| Error::CannotRun(error.to_string()))?;
    let job = arguments.experiment.as_ref().and_then(Experiment::job);
    job.map_or(Ok(()), |job| (job.run)(report))
}

/// Returns the exit status of a run. Prints its error. After an interrupt, ends by the same signal.
fn finish(outcome: Result<bool>) -> ExitCode {
    match outcome {
        Ok(is_missed) => ExitCode::from(u8::from(is_missed)),
        Err(error) => {
            eprintln!("pagemill-bench: {error}");
            if let Error::Interrupted { signal } = error {
                child::end_by_signal(signal);
            }
            ExitCode::from(error.exit_code())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// The suite must have each experiment once, with options that the experiment accepts.
    #[test]
    fn suite_has_every_experiment() {
        let command = Arguments::command();
        let other = |name: &str| name == "settings" || name.starts_with("__");
        let names = command.get_subcommands().map(clap::Command::get_name).filter(|name| !other(name));
        let mut names: Vec<&str> = names.collect();
        let mut of_suite: Vec<&str> = suite::ENTRIES.iter().map(|entry| entry.name).collect();
        names.sort_unstable();
        of_suite.sort_unstable();
        assert_eq!(of_suite, names);
        for entry in suite::ENTRIES {
            let words = ["pagemill bench", entry.name].into_iter().chain(entry.options.iter().copied());
            let arguments = Arguments::try_parse_from(words).unwrap_or_else(|error| panic!("{}: {error}", entry.name));
            let job = arguments.experiment.as_ref().and_then(Experiment::job).expect("it is an experiment");
            assert_eq!(job.name, entry.name);
        }
    }
}
