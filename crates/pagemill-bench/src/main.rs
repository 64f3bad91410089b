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
    /// Small allocations under the preloaded Pagemill, compared with preloaded jemalloc alone
    Small(small::Options),
    /// Time to return 1 GiB of free memory on request, and the longest malloc meanwhile
    Giveback(giveback::Options),
    /// Startup cost of a preloaded library in a program that does nothing
    Startup(startup::Options),
    /// Memory of Redis, CPython, sqlite3, git and a cargo build under every allocator
    Footprint(footprint::Options),
    /// OOM kills while another process has free memory that it could return: writers, a handover, a sibling's request,
    /// a full machine
    Survive(survive::Options),
    /// Files read and written in records of 4 KiB by 1 to 200 threads, mapped and unmapped, compared with tmpfs and the
    /// results of 2013
    Iozone(files::iozone::Options),
    /// Memory that small, medium, sparse and large files take, and which of them get huge pages
    Waste(files::FileOptions),
    /// Create, stat, read, list and remove many small files, compared with tmpfs
    Metadata(files::FileOptions),
    /// Cost to mark memory volatile and take it back, compared with MADV_FREE and MADV_DONTNEED; cost of a purge;
    /// ebizzy with its copies in volatile ranges
    Volatile(volatile::Options),
    /// Resident pages copied out and pinned in random order: the page cache compared with memcpy, files and other
    /// caches; its metadata
    Hit(hit::Options),
    /// Cost to pin ranges of huge folios, compared with one reference count for each 4 KiB; cost to split and collapse
    /// them, compared with a copy
    Refs(refs::Options),
    /// Hit rate on generated traces: the page cache's eviction compared with LRU, CLOCK, S3-FIFO and SIEVE
    Traces(traces::Options),
    /// Random 4 KiB reads of a file six times as large as the cache, by 1 to 32 threads and by one thread with many
    /// requests in flight, compared with fio
    Miss(storage::miss::Options),
    /// Reads and writes of 64 KiB to 2 MiB at queue depths 1 to 64, into huge pages and small ones, compared with fio
    /// and the results of 2013
    Orion(storage::orion::Options),
    /// Write-back of scattered dirty 4 KiB pages in a file of 1 GiB, compared with fio writing at the same offsets
    Writeback(storage::writeback::Options),
    /// Objects of one size in slabs, compared with allocators and keyed maps: allocate and free, read, move
    /// concurrently with readers; memory left after nine tenths are freed at random, stalls, walks of relocatable
    /// objects
    Slab(slab::Options),
    /// Print the settings that make each allocator return memory at once, as a Markdown table
    Settings,
    #[command(name = "__touch", hide = true)]
    Touch(workload::Touch),
    #[command(name = "__enter", hide = true)]
    Enter(workload::Enter),
    #[command(name = "__ebizzy", hide = true)]
    EbizzyWork(workload::ebizzy::Ebizzy),
    #[command(name = "__hog", hide = true)]
    HogWork(workload::hog::Hog),
    #[command(name = "__pair", hide = true)]
    PairWork(workload::pair::Pair),
    #[command(name = "__writers", hide = true)]
    WritersWork(workload::writers::Writers),
    #[command(name = "__keeper", hide = true)]
    KeeperWork(workload::handover::Keeper),
    #[command(name = "__piece-keeper", hide = true)]
    PieceKeeperWork(workload::pieces::PieceKeeper),
    #[command(name = "__churn", hide = true)]
    ChurnWork(workload::churn::Churn),
    #[command(name = "__returning", hide = true)]
    ReturningWork(workload::returning::Returning),
    #[command(name = "__newcomer", hide = true)]
    NewcomerWork(workload::handover::Newcomer),
    #[command(name = "__asker", hide = true)]
    AskerWork(workload::reaction::Asker),
    #[command(name = "__hoarder", hide = true)]
    HoarderWork(workload::reaction::Hoarder),
    #[command(name = "__server", hide = true)]
    ServerWork(workload::host::Server),
    #[command(name = "__filler", hide = true)]
    FillerWork(workload::host::Filler),
    #[command(name = "__idle", hide = true)]
    IdleWork(workload::idle::Idle),
    #[command(name = "__small", hide = true)]
    SmallWork(workload::small::Small),
    #[command(name = "__slab", hide = true)]
    SlabWork(workload::slab::Slab),
    #[command(name = "__giveback", hide = true)]
    GivebackWork(workload::giveback::Giveback),
    #[command(name = "__iozone", hide = true)]
    IozoneWork(workload::iozone::Iozone),
    #[command(name = "__iozone-part", hide = true)]
    IozonePart(workload::iozone::WorkerArguments),
    #[command(name = "__file-writers", hide = true)]
    FileWritersWork(workload::file_writers::FileWriters),
    #[command(name = "__toggle", hide = true)]
    ToggleWork(workload::volatile::Toggle),
    #[command(name = "__purging", hide = true)]
    PurgingWork(workload::volatile::Purging),
    #[command(name = "__hit", hide = true)]
    HitWork(workload::hit::Hit),
    #[command(name = "__small-files", hide = true)]
    SmallFilesWork(workload::hit::SmallFiles),
    #[command(name = "__refs", hide = true)]
    RefsWork(workload::refs::Refs),
    #[command(name = "__change", hide = true)]
    ChangeWork(workload::refs::Change),
    #[command(name = "__ring", hide = true)]
    RingWork(workload::storage::ring::Ring),
    #[command(name = "__miss", hide = true)]
    MissWork(workload::storage::miss::Miss),
    #[command(name = "__hits", hide = true)]
    HitsWork(workload::storage::hits::Hits),
    #[command(name = "__writeback", hide = true)]
    WritebackWork(workload::storage::writeback::Writeback),
    #[command(name = "__overwrite", hide = true)]
    OverwriteWork(workload::storage::overwrite::Overwrite),
    #[command(name = "__waste", hide = true)]
    WasteWork(workload::waste::Waste),
    #[command(name = "__metadata", hide = true)]
    MetadataWork(workload::metadata::Metadata),
}

fn main() -> ExitCode {
    match Arguments::parse().experiment {
        Experiment::Ebizzy(options) => experiment(&options.common, || ebizzy::run(&options)),
        Experiment::Small(options) => experiment(&options.common, || small::run(&options)),
        Experiment::Giveback(options) => experiment(&options.common, || giveback::run(&options)),
        Experiment::Startup(options) => experiment(&options.common, || startup::run(&options)),
        Experiment::Footprint(options) => experiment(&options.common, || footprint::run(&options)),
        Experiment::Survive(options) => experiment(&options.common, || survive::run(&options)),
        Experiment::Iozone(options) => experiment(&options.files.common, || files::iozone::run(&options)),
        Experiment::Waste(options) => experiment(&options.common, || files::waste::run(&options)),
        Experiment::Metadata(options) => experiment(&options.common, || files::metadata::run(&options)),
        Experiment::Volatile(options) => experiment(&options.common, || volatile::run(&options)),
        Experiment::Hit(options) => experiment(&options.common, || hit::run(&options)),
        Experiment::Refs(options) => experiment(&options.common, || refs::run(&options)),
        Experiment::Traces(options) => experiment(&options.common, || traces::run(&options)),
        Experiment::Miss(options) => experiment(&options.common, || storage::miss::run(&options)),
        Experiment::Orion(options) => experiment(&options.common, || storage::orion::run(&options)),
        Experiment::Writeback(options) => experiment(&options.common, || storage::writeback::run(&options)),
        Experiment::Slab(options) => experiment(&options.common, || slab::run(&options)),
        Experiment::Settings => {
            print!("{}", subject::settings_markdown());
            ExitCode::SUCCESS
        }
        Experiment::Touch(arguments) => workload::run(|| workload::touch(&arguments)),
        Experiment::Enter(arguments) => workload::enter(&arguments),
        Experiment::EbizzyWork(arguments) => workload::run(|| workload::ebizzy::run(&arguments)),
        Experiment::HogWork(arguments) => workload::run(|| workload::hog::run(&arguments)),
        Experiment::PairWork(arguments) => workload::run(|| workload::pair::run(&arguments)),
        Experiment::WritersWork(arguments) => workload::run(|| workload::writers::run(&arguments)),
        Experiment::KeeperWork(arguments) => workload::run(|| workload::handover::run_keeper(&arguments)),
        Experiment::PieceKeeperWork(arguments) => workload::run(|| workload::pieces::run_keeper(&arguments)),
        Experiment::ChurnWork(arguments) => workload::run(|| workload::churn::run(&arguments)),
        Experiment::ReturningWork(arguments) => workload::run(|| workload::returning::run(&arguments)),
        Experiment::NewcomerWork(arguments) => workload::run(|| workload::handover::run_newcomer(&arguments)),
        Experiment::AskerWork(arguments) => workload::run(|| workload::reaction::run_asker(&arguments)),
        Experiment::HoarderWork(arguments) => workload::run(|| workload::reaction::run_hoarder(&arguments)),
        Experiment::ServerWork(arguments) => workload::run(|| workload::host::run_server(&arguments)),
        Experiment::FillerWork(arguments) => workload::run(|| workload::host::run_filler(&arguments)),
        Experiment::IdleWork(arguments) => workload::run(|| workload::idle::run(&arguments)),
        Experiment::SmallWork(arguments) => workload::run(|| workload::small::run(&arguments)),
        Experiment::SlabWork(arguments) => workload::run(|| workload::slab::run(&arguments)),
        Experiment::GivebackWork(arguments) => workload::run(|| workload::giveback::run(&arguments)),
        Experiment::IozoneWork(arguments) => workload::run(|| workload::iozone::run(&arguments)),
        Experiment::IozonePart(arguments) => workload::run(|| workload::iozone::run_worker(&arguments)),
        Experiment::FileWritersWork(arguments) => workload::run(|| workload::file_writers::run(&arguments)),
        Experiment::ToggleWork(arguments) => workload::run(|| workload::volatile::measure_toggle(&arguments)),
        Experiment::PurgingWork(arguments) => workload::run(|| workload::volatile::measure_purging(&arguments)),
        Experiment::HitWork(arguments) => workload::run(|| workload::hit::run(&arguments)),
        Experiment::SmallFilesWork(arguments) => workload::run(|| workload::hit::measure_files(&arguments)),
        Experiment::RefsWork(arguments) => workload::run(|| workload::refs::run(&arguments)),
        Experiment::ChangeWork(arguments) => workload::run(|| workload::refs::measure_change(&arguments)),
        Experiment::RingWork(arguments) => workload::run(|| workload::storage::ring::run(&arguments)),
        Experiment::MissWork(arguments) => workload::run(|| workload::storage::miss::run(&arguments)),
        Experiment::HitsWork(arguments) => workload::run(|| workload::storage::hits::run(&arguments)),
        Experiment::WritebackWork(arguments) => workload::run(|| workload::storage::writeback::run(&arguments)),
        Experiment::OverwriteWork(arguments) => workload::run(|| workload::storage::overwrite::run(&arguments)),
        Experiment::WasteWork(arguments) => workload::run(|| workload::waste::run(&arguments)),
        Experiment::MetadataWork(arguments) => workload::run(|| workload::metadata::run(&arguments)),
    }
}

/// The exit status if nothing could be measured.
const EXIT_NOTHING_MEASURED: u8 = 2;

/// Runs an experiment and prints its report, or its error. Returns the exit status.
fn experiment(common: &CommonOptions, run: impl FnOnce() -> Result<Report>) -> ExitCode {
    let outcome = child::handle_interrupts().and_then(|()| run());
    match outcome {
        Ok(report) => {
            report.print();
            if !report.has_results() {
                eprintln!("pagemill-bench: cannot run: nothing was measured");
                return ExitCode::from(EXIT_NOTHING_MEASURED);
            }
            ExitCode::from(u8::from(common.strict && report.fell_short()))
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
