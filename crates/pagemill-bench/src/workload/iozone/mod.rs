//! Records of 4 KiB, written to and read from one file per worker with IOzone's seven operations: by system calls,
//! through a mapping, in a page cache of this process by its calls, or through views of that page cache. The code is new;
//! only the terms are IOzone's.
//!
//! A *cell* is one operation with a number of workers. In a *pass*, all workers open and map their files, wait until
//! all others are ready, and run the operation once. A pass lasts from the first worker's start to the last worker's
//! end. Passes are repeated until the sum of their times reaches the time for a cell.

mod worker;

use std::fs;
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use pagemill_cache::mapping::Source;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::steps::run_in_threads;
use super::{Failure, WorkloadResult};
use crate::child;
use crate::files::FilePlace;
use crate::pattern::RECORD_BYTES;
use worker::{CachedFiles, run_job};

/// An operation of the benchmark IOzone, which all workers run on their files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Operation {
    InitialWrite,
    Rewrite,
    Read,
    Reread,
    ReverseRead,
    RandomRead,
    RandomWrite,
}

impl Operation {
    /// All operations, in the order in which they run. Each uses the files as the earlier operations left them.
    pub const ALL: [Self; 7] = [
        Self::InitialWrite,
        Self::Rewrite,
        Self::Read,
        Self::Reread,
        Self::ReverseRead,
        Self::RandomRead,
        Self::RandomWrite,
    ];

    pub fn metric(self) -> &'static str {
        match self {
            Self::InitialWrite => "initial_write",
            Self::Rewrite => "rewrite",
            Self::Read => "read",
            Self::Reread => "reread",
            Self::ReverseRead => "reverse_read",
            Self::RandomRead => "random_read",
            Self::RandomWrite => "random_write",
        }
    }

    fn is_writing(self) -> bool {
        matches!(self, Self::InitialWrite | Self::Rewrite | Self::RandomWrite)
    }
}

crate::workload::arguments! {
    /// Arguments of a run in which a number of workers make all operations.
    IozoneArguments:
    /// Use files in a page cache of this process; with `mapped`, through views
    #[arg(conflicts_with_all = ["folder", "device", "processes"])]
    cached: bool,
    mapped: bool,
    processes: bool,
    workers: usize,
    total_bytes: u64,
    cell_ms: u64,
    /// Milliseconds between the last write of mapped files and their first read.
    pause_ms: u64,
    // The folder of the files on a file system; none for files in a page cache.
    ..place: Option<FilePlace>,
}

crate::workload::arguments! {
    /// Arguments of a worker that runs in a process of its own.
    WorkerArguments:
    job: String,
}

/// One operation that one worker makes on the records of its file.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Job {
    path: PathBuf,
    file: u64,
    records: usize,
    operation: Operation,
    is_mapped: bool,
    /// Generation number of the records, which a write stamps on them and a read must find in them. Each writing
    /// operation has a new generation.
    generation: u64,
}

/// Start and end of a worker's operation, in nanoseconds of the monotonic clock, which all processes share.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Interval {
    start: u64,
    end: u64,
}

fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Runs all operations. The resulting JSON has the MiB/s of each operation.
pub fn run(arguments: &IozoneArguments) -> WorkloadResult {
    let location = FileLocation::new(arguments)?;
    location.check()?;
    // The first pass is not measured. The first touch of memory that the host of a virtual machine has not backed yet
    // is many times slower than later ones. Each file system needs this pass, because huge pages come from other memory
    // than small pages.
    location.remove(arguments.workers)?;
    run_pass(arguments, &location, Operation::InitialWrite, 0)?;
    let mut line = serde_json::Map::new();
    let mut generation = 0;
    for operation in Operation::ALL {
        if operation == Operation::Read && arguments.mapped {
            // In this pause Pagemill can move the files into huge pages. All file systems get the same pause.
            thread::sleep(Duration::from_millis(arguments.pause_ms));
        }
        location.check()?;
        let rate = measure_cell(arguments, &location, operation, &mut generation)?;
        location.check()?;
        line.insert(operation.metric().to_owned(), rate.into());
    }
    // The last written records are also checked, after the measurement.
    run_pass(arguments, &location, Operation::Read, generation)?;
    location.remove(arguments.workers)?;
    Ok(line.into())
}

/// Repeats one operation on all files until the repetitions have taken `cell_ms`. Returns the MiB/s of the operation.
fn measure_cell(
    arguments: &IozoneArguments,
    location: &FileLocation,
    operation: Operation,
    generation: &mut u64,
) -> Result<f64, Failure> {
    let (mut passes, mut passes_ns) = (0_u64, 0_u64);
    while passes == 0 || passes_ns < arguments.cell_ms * 1_000_000 {
        if operation == Operation::InitialWrite {
            location.remove(arguments.workers)?;
        }
        if operation.is_writing() {
            *generation += 1;
        }
        passes_ns += run_pass(arguments, location, operation, *generation)?;
        passes += 1;
    }
    let bytes = passes * (records_per_file(arguments) * arguments.workers * RECORD_BYTES) as u64;
    Ok(bytes as f64 / f64::from(1 << 20) / (passes_ns as f64 / 1e9))
}

/// Returns the number of records in each file, which is equal for all workers.
fn records_per_file(arguments: &IozoneArguments) -> usize {
    (arguments.total_bytes as usize / RECORD_BYTES / arguments.workers).max(1)
}

/// The place where the files are stored: a mounted file system, or a cache of this process.
enum FileLocation {
    Mount(FilePlace),
    Cache(CachedFiles),
}

impl FileLocation {
    fn new(arguments: &IozoneArguments) -> Result<Self, Failure> {
        match (&arguments.place, arguments.cached) {
            (_, true) => {
                let source = if arguments.mapped { Source::Shared } else { Source::Ordinary };
                CachedFiles::new(arguments.workers, arguments.total_bytes, source).map(Self::Cache)
            }
            (Some(place), false) => Ok(Self::Mount(place.clone())),
            (None, false) => Err("files need a place, or a cache".into()),
        }
    }

    /// Fails if the folder of the files is no longer on the file system that was measured so far.
    fn check(&self) -> Result<(), Failure> {
        match self {
            Self::Mount(place) => Ok(place.check()?),
            Self::Cache(_) => Ok(()),
        }
    }

    /// Returns the path of a file. For files in the cache, the path is only used in messages.
    fn path(&self, index: usize) -> PathBuf {
        let name = format!("file-{index}");
        match self {
            Self::Mount(place) => place.folder.join(name),
            Self::Cache(_) => name.into(),
        }
    }

    fn cached_files(&self) -> Option<&CachedFiles> {
        match self {
            Self::Mount(_) => None,
            Self::Cache(cached_files) => Some(cached_files),
        }
    }

    fn remove(&self, workers: usize) -> Result<(), Failure> {
        if let Self::Cache(cached_files) = self {
            cached_files.clear();
            return Ok(());
        }
        for path in (0..workers).map(|index| self.path(index)) {
            if let Err(cause) = fs::remove_file(&path)
                && cause.kind() != io::ErrorKind::NotFound
            {
                return Err(format!("removing {}: {cause}", path.display()).into());
            }
        }
        Ok(())
    }
}

/// Lets all workers run an operation once. Returns the nanoseconds from the first worker's start to the last worker's
/// end.
fn run_pass(
    arguments: &IozoneArguments,
    location: &FileLocation,
    operation: Operation,
    generation: u64,
) -> Result<u64, Failure> {
    let job = |index| Job {
        path: location.path(index),
        file: index as u64,
        records: records_per_file(arguments),
        operation,
        is_mapped: arguments.mapped,
        generation,
    };
    let jobs: Vec<Job> = (0..arguments.workers).map(job).collect();
    let intervals =
        if arguments.processes { run_as_processes(&jobs)? } else { run_as_threads(&jobs, location.cached_files())? };
    let first = intervals.iter().map(|interval| interval.start).min().unwrap_or(0);
    let last = intervals.iter().map(|interval| interval.end).max().unwrap_or(0);
    Ok(last - first)
}

fn run_as_threads(jobs: &[Job], cached_files: Option<&CachedFiles>) -> Result<Vec<Interval>, Failure> {
    let barrier = Barrier::new(jobs.len());
    let wait = || {
        barrier.wait();
    };
    run_in_threads(jobs.len(), |index| run_job(&jobs[index], cached_files, wait))
}

/// Runs each worker as a process. All workers wait for the end of a pipe, and start when the pipe is closed.
fn run_as_processes(jobs: &[Job]) -> Result<Vec<Interval>, Failure> {
    let failed = |cause: io::Error| Failure::Other(format!("a process of its own for each worker: {cause}"));
    let (reader, writer): (PipeReader, PipeWriter) = io::pipe().map_err(failed)?;
    let executable = child::own_executable()?;
    let start = |job| -> io::Result<(Child, BufReader<_>)> {
        let mut command = Command::new(&executable);
        command.args(["__iozone-part", "--job", &serde_json::to_string(job)?]);
        let mut child = command.stdin(reader.try_clone()?).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok((child, BufReader::new(stdout)))
    };
    let mut workers = jobs.iter().map(start).collect::<io::Result<Vec<_>>>().map_err(failed)?;
    for (_, stdout) in &mut workers {
        stdout.read_line(&mut String::new()).map_err(failed)?;
    }
    drop(writer);
    let end = |(mut child, mut stdout): (Child, BufReader<_>)| {
        let mut text = String::new();
        stdout.read_to_string(&mut text).map_err(failed)?;
        match child.wait().map_err(failed)?.code() {
            Some(0) => serde_json::from_str(&text).map_err(Failure::from),
            Some(child::WRONG_ANSWER) => Err(Failure::WrongAnswer("a worker read a wrong record".to_owned())),
            code => Err(format!("a worker ended with status {}", code.unwrap_or(-1)).into()),
        }
    };
    workers.into_iter().map(end).collect()
}

/// Runs one worker process: prints that it is ready, waits for the end of the pipe, does its work, and prints its
/// times.
pub fn run_worker(arguments: &WorkerArguments) -> WorkloadResult {
    let job: Job = serde_json::from_str(&arguments.job)?;
    let interval = run_job(&job, None, || {
        println!("ready");
        // The end of file starts the work. An error also starts it.
        let _ = io::stdin().read_to_end(&mut Vec::new());
    })?;
    Ok(serde_json::json!(interval))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(path: PathBuf, operation: Operation, is_mapped: bool, generation: u64) -> Job {
        Job { path, file: 3, records: 10, operation, is_mapped, generation }
    }

    /// All seven operations run by system calls, through a mapping, in a page cache, and through views of a page cache.
    /// Each operation must find the records that earlier operations wrote. A read that expects a wrong generation number
    /// must report a wrong answer.
    #[test]
    fn operations_find_what_was_written() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let [cached_files, viewed_files] =
            [Source::Ordinary, Source::Shared].map(|source| CachedFiles::new(4, 1 << 20, source).expect("a cache"));
        let places = [None, Some(&cached_files), Some(&viewed_files)];
        for (is_mapped, cached_files) in [(false, places[0]), (true, places[0]), (false, places[1]), (true, places[2])]
        {
            let path = folder.path().join(is_mapped.to_string());
            let mut generation = 0;
            for operation in Operation::ALL {
                generation += u64::from(operation.is_writing());
                let interval = run_job(&job(path.clone(), operation, is_mapped, generation), cached_files, || ());
                let interval = interval.expect("it is right");
                assert!(interval.end >= interval.start);
            }
            let stale = run_job(&job(path, Operation::Read, is_mapped, generation - 1), cached_files, || ());
            assert!(matches!(stale, Err(Failure::WrongAnswer(_))));
        }
    }

    /// One of two workers cannot open its file. The other worker must not wait forever, and the pass must fail.
    #[test]
    fn missing_file_fails_without_blocking_workers() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (there, missing) = (folder.path().join("there"), folder.path().join("missing"));
        run_job(&job(there.clone(), Operation::InitialWrite, false, 1), None, || ()).expect("it is written");

        let jobs = [there, missing].map(|path| job(path, Operation::Read, false, 1));

        assert!(matches!(run_as_threads(&jobs, None), Err(Failure::Other(_))));
    }
}
