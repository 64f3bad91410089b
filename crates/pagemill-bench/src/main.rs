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
mod cost;
mod ebizzy;
mod error;
mod experiment;
mod files;
mod footprint;
mod giveable;
mod giveback;
mod histogram;
mod hit;
mod hog;
mod native;
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
mod survive;
mod traces;
mod volatile;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::{Error, Result};
use crate::experiment::CommonOptions;
use crate::report::Report;

/// Measures Pagemill against glibc, jemalloc, mimalloc and tcmalloc, in one run on this machine.
///
/// Exit status: 0 on success; 1 if a wrong answer was found or, with --strict, a target was missed; 2 if nothing could
/// be measured. After an interrupt it stops all processes that it started, then ends by the same signal.
#[derive(Debug, Parser)]
#[command(name = "pagemill bench", bin_name = "pagemill bench", version)]
struct Arguments {
    #[command(subcommand)]
    experiment: Experiment,
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
    /// at random; stalls; walks of objects that can be moved
    Slab(slab::Options),
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
    match Arguments::parse().experiment {
        Experiment::Ebizzy(options) => experiment("ebizzy", &options.common, ebizzy::run, &options),
        Experiment::Small(options) => experiment("small", &options.common, small::run, &options),
        Experiment::Giveback(common) => experiment("giveback", &common, giveback::run, &common),
        Experiment::Startup(options) => experiment("startup", &options.common, startup::run, &options),
        Experiment::Footprint(options) => experiment("footprint", &options.common, footprint::run, &options),
        Experiment::Survive(options) => experiment("survive", &options.common, survive::run, &options),
        Experiment::Iozone(options) => experiment("iozone", &options.files.common, files::iozone::run, &options),
        Experiment::Waste(options) => experiment("waste", &options.common, files::waste::run, &options),
        Experiment::Metadata(options) => experiment("metadata", &options.common, files::metadata::run, &options),
        Experiment::Pageshift(options) => experiment("pageshift", &options.common, files::pageshift::run, &options),
        Experiment::Volatile(common) => experiment("volatile", &common, volatile::run, &common),
        Experiment::Hit(options) => experiment("hit", &options.common, hit::run, &options),
        Experiment::Refs(common) => experiment("refs", &common, refs::run, &common),
        Experiment::Traces(options) => experiment("traces", &options.common, traces::run, &options),
        Experiment::Miss(options) => experiment("miss", &options.common, storage::miss::run, &options),
        Experiment::Orion(options) => experiment("orion", &options.common, storage::orion::run, &options),
        Experiment::Stream(options) => experiment("stream", &options.common, storage::stream::run, &options),
        Experiment::Writeback(options) => experiment("writeback", &options.common, storage::writeback::run, &options),
        Experiment::Slab(options) => experiment("slab", &options.common, slab::run, &options),
        Experiment::Settings => {
            print!("{}", subject::settings_markdown());
            ExitCode::SUCCESS
        }
        Experiment::Enter(arguments) => workload::exec_in_cgroup(&arguments),
        Experiment::Workload(workload) => workload.run(),
    }
}

/// Exit status of the bench if nothing could be measured.
const EXIT_NOTHING_MEASURED: u8 = 2;

/// Runs the experiment with this name and prints its report, or its error. Returns the exit status.
fn experiment<Options>(
    name: &'static str,
    common: &CommonOptions,
    run: fn(&Options, &mut Report) -> Result<()>,
    options: &Options,
) -> ExitCode {
    let mut report = Report::new(name, common.json);
    let outcome = child::handle_interrupts().and_then(|()| run(options, &mut report));
    match outcome {
        Ok(()) => {
            report.print();
            if !report.has_results() {
                eprintln!("pagemill-bench: cannot run: nothing was measured");
                return ExitCode::from(EXIT_NOTHING_MEASURED);
            }
            ExitCode::from(u8::from(common.strict && report.has_missed_target()))
        }
        Err(error) => {
            eprintln!("pagemill-bench: {error}");
            if let Error::Interrupted { signal } = error {
                child::end_by_signal(signal);
            }
            ExitCode::from(error.exit_code())
        }
    }
}
