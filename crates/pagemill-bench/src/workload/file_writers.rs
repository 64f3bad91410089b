//! Writes volatile files at full speed, besides files that must be kept. Counts failed writes, and files that vanished
//! although they had to exist.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Failure, WorkloadResult};
use crate::files::FilePlace;
use crate::pattern::{self, Records};

const WRITE_BYTES: usize = 1 << 20;
const KEPT_FILES: u64 = 16;
/// Time limit for writing before the measurement. After this time, the measurement starts even if less was written
/// than requested.
pub const FILL_TIME_LIMIT: Duration = Duration::from_secs(60);
/// Name of the folder of volatile files. The bench marks the folder as volatile before the writers start.
pub const VOLATILE_FOLDER: &str = "volatile";
/// Name of the folder of files that must be kept.
pub const KEPT_FOLDER: &str = "kept";

crate::workload::arguments! {
    FileWritersArguments:
    writers: u64,
    /// Length of each volatile file in MiB
    file_mib: u64,
    /// Total length in MiB of the files that must be kept
    kept_mib: u64,
    /// Number of volatile files that must still exist at the end: those that were closed last
    newest: usize,
    /// MiB to write before the measurement starts
    fill_mib: u64,
    run_ms: u64,
    ..place: FilePlace,
}

/// Counters of the files that were started, closed, and not written due to an error. All writer threads share them.
#[derive(Default)]
struct Counters {
    /// Index of the next file to write, from 0.
    next: AtomicU64,
    /// Number of closes that have begun. A writer takes the sequence number of a close from this counter just before
    /// the close. If it took the number after the close, a delay in between could make its file seem newer than it is.
    closing: AtomicU64,
    closed: AtomicU64,
    failed: AtomicU64,
    /// Start of the measurement, and the number of files closed before it.
    start: OnceLock<(Instant, u64)>,
}

impl Counters {
    /// Returns whether the time of the measurement is over. Starts the measurement when `fill_mib` MiB have been
    /// written, or when [`FILL_TIME_LIMIT`] has passed.
    fn is_over(&self, arguments: &FileWritersArguments, begun: Instant) -> bool {
        let closed = self.closed.load(Ordering::Relaxed);
        if closed * arguments.file_mib >= arguments.fill_mib || begun.elapsed() >= FILL_TIME_LIMIT {
            let (start, _) = self.start.get_or_init(|| (Instant::now(), closed));
            return start.elapsed() >= Duration::from_millis(arguments.run_ms);
        }
        false
    }
}

/// The results of one writer: the files that it closed, and its first error.
#[derive(Default)]
struct WriterRecord {
    /// For each closed file, the sequence number of its close and the index of the file.
    closed: Vec<(u64, u64)>,
    complaint: Option<String>,
}

/// Runs all writers until the time of the measurement is over, then checks all files.
pub fn run(arguments: &FileWritersArguments) -> WorkloadResult {
    let (volatile, kept) = (arguments.place.folder.join(VOLATILE_FOLDER), arguments.place.folder.join(KEPT_FOLDER));
    arguments.place.check()?;
    let kept_bytes = (arguments.kept_mib << 20) / KEPT_FILES;
    for file in 0..KEPT_FILES {
        write(&path(&kept, file), file, kept_bytes).map_err(|cause| format!("a file to be kept: {cause}"))?;
    }
    let (begun, counters) = (Instant::now(), Counters::default());
    let records: Vec<WriterRecord> = thread::scope(|scope| {
        let start = |_| scope.spawn(|| run_writer(arguments, &volatile, begun, &counters));
        let writers: Vec<_> = (0..arguments.writers).map(start).collect();
        writers.into_iter().map(|writer| writer.join().unwrap_or_default()).collect()
    });
    let end = Instant::now();
    arguments.place.check()?;
    let count = counters.closed.into_inner();
    let (start, filled) = counters.start.into_inner().unwrap_or((begun, 0));
    let gib = ((count - filled) * arguments.file_mib) as f64 / 1024.0;
    let lost_kept = (0..KEPT_FILES).filter(|&file| !is_intact(&path(&kept, file), file, kept_bytes)).count();
    let mut closed: Vec<(u64, u64)> = records.iter().flat_map(|record| record.closed.iter().copied()).collect();
    closed.sort_unstable_by(|left, right| right.cmp(left));
    let file_bytes = arguments.file_mib << 20;
    let newest = closed.iter().take(arguments.newest);
    let lost_newest = newest.filter(|(_, file)| !is_intact(&path(&volatile, *file), *file, file_bytes)).count();
    Ok(serde_json::json!({
        "gib_per_second": gib / (end - start).as_secs_f64(),
        "files": count,
        "failed_writes": counters.failed.into_inner(),
        "lost_kept": lost_kept,
        "lost_newest": lost_newest,
        "torn": count_torn_files(&volatile, file_bytes)?,
        "complaint": records.into_iter().find_map(|record| record.complaint),
    }))
}

fn path(folder: &Path, file: u64) -> PathBuf {
    folder.join(file.to_string())
}

/// Runs one writer, which writes one file after the other. A failure is counted, and the writer continues with the next
/// file a millisecond later.
fn run_writer(arguments: &FileWritersArguments, folder: &Path, begun: Instant, counters: &Counters) -> WriterRecord {
    let mut record = WriterRecord::default();
    while !counters.is_over(arguments, begun) {
        let file = counters.next.fetch_add(1, Ordering::Relaxed);
        let path = path(folder, file);
        let written = write(&path, file, arguments.file_mib << 20).map(|open| {
            record.closed.push((counters.closing.fetch_add(1, Ordering::Relaxed), file));
            drop(open);
        });
        match written {
            Ok(()) => drop(counters.closed.fetch_add(1, Ordering::Relaxed)),
            Err(cause) => {
                counters.failed.fetch_add(1, Ordering::Relaxed);
                record.complaint.get_or_insert_with(|| format!("writing file {file}: {cause}"));
                // The removal fails if the file was not created.
                let _ = fs::remove_file(&path);
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    record
}

fn write(path: &Path, file: u64, len_bytes: u64) -> io::Result<File> {
    let mut records = Records::filled(WRITE_BYTES);
    let mut output = File::create_new(path)?;
    for offset in (0..len_bytes).step_by(WRITE_BYTES) {
        output.write_all(records.stamped_at(file, offset))?;
    }
    Ok(output)
}

/// Returns whether the file exists and has exactly the bytes that its writer wrote.
fn is_intact(path: &Path, file: u64, len_bytes: u64) -> bool {
    matches!(check(path, file, len_bytes), Ok(true))
}

/// Returns whether the file has the given length and every byte that its writer wrote.
fn check(path: &Path, file: u64, len_bytes: u64) -> io::Result<bool> {
    let mut input = File::open(path)?;
    let mut piece = vec![0; WRITE_BYTES];
    for offset in (0..len_bytes).step_by(WRITE_BYTES) {
        match input.read_exact(&mut piece) {
            Ok(()) if pattern::is_intact(&piece, file, offset) => {}
            Ok(()) => return Ok(false),
            Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            Err(cause) => return Err(cause),
        }
    }
    Ok(input.read(&mut piece)? == 0)
}

/// Returns the number of files in the folder that have a wrong length or wrong bytes. Pagemill may remove a volatile
/// file, but only as a whole.
fn count_torn_files(folder: &Path, len_bytes: u64) -> Result<usize, Failure> {
    let failed = |cause: io::Error| Failure::Other(format!("looking at what is left: {cause}"));
    let mut torn = 0;
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let Some(file) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match check(&entry.path(), file, len_bytes) {
            Ok(is_whole) => torn += usize::from(!is_whole),
            // The file vanished after the folder was listed.
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => return Err(failed(cause)),
        }
    }
    Ok(torn)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of four complete files, one is shortened, one is renamed so that its contents do not fit its name, and one is
    /// lengthened. Only the unchanged file must count as intact, and the three changed files must count as torn.
    #[test]
    fn torn_and_missing_files_are_distinguished() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let len = 2 * WRITE_BYTES as u64;
        (0..4).for_each(|file| drop(write(&path(folder.path(), file), file, len).expect("it is written")));
        assert!((0..4).all(|file| is_intact(&path(folder.path(), file), file, len)));
        assert_eq!(count_torn_files(folder.path(), len).expect("a look"), 0);

        File::options().write(true).open(path(folder.path(), 0)).and_then(|file| file.set_len(4096)).expect("cut");
        fs::rename(path(folder.path(), 1), path(folder.path(), 5)).expect("another name, another file");
        File::options().write(true).open(path(folder.path(), 2)).and_then(|file| file.set_len(len + 1)).expect("grown");

        let there: Vec<u64> = (0..6).filter(|&file| is_intact(&path(folder.path(), file), file, len)).collect();
        assert_eq!(there, [3]);
        assert_eq!(count_torn_files(folder.path(), len).expect("a look"), 3);
    }
}
