//! The worker: makes dense blocks huge and keeps sparse ones small, in a separate process of low priority.
//!
//! It is a process because the kernel charges a huge page to the memory group of the process that collapses it. So the
//! worker moves into the writer's group and back. The owner of that group can kill it there (`cgroup.kill`, a limit that
//! makes the OOM killer choose it), freeze it, or leave it no CPU time. It holds no more than an open file then:
//! `MADV_COLLAPSE` replaces a block or leaves it, and contents change only in the worker's own group. The controller starts
//! another worker, and avoids the group ([`crate::pagework`]).
//!
//! It receives the mount's root as standard output (it prints nothing).
//! Standard input is a socket: requests arrive there, one line of JSON per file, and answers are written to it.

use crate::file_access::{self, FileAccess, Seen};
use crate::policy::Huge;
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::cgroup::Hierarchy;
use pagemill_sys::pages::{self, Collapse};
use pagemill_sys::task;
use pagemill_sys::thread::{self, Preferred};
use rustix::fs::{self, FallocateFlags, OFlags, SeekFrom, Timespec, Timestamps};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// At least this share of a block's pages, in eighths, must contain nonzero bytes for it to be made huge.
const DENSE_EIGHTHS: u64 = 7;

/// At most this share, in eighths, makes a block sparse: its zero pages are freed.
const SPARSE_EIGHTHS: u64 = 4;

/// Number of pages sampled first. If more than half contain nonzero bytes, the block is not read whole.
const SAMPLES: u64 = 8;

/// A file to examine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerJob {
    pub inode: u64,
    /// Path from the root, as bytes: names need not be UTF-8.
    pub folder: Vec<u8>,
    pub name: Vec<u8>,
    huge: String,
    /// Folder of the charged memory group. If unknown, nothing is collapsed, because that would move the charge.
    group: Option<String>,
}

impl WorkerJob {
    pub fn new(inode: u64, folder: &Path, name: &OsStr, huge: Huge, group: Option<String>) -> Self {
        let folder = folder.as_os_str().as_bytes().to_vec();
        Self { inode, folder, name: name.as_bytes().to_vec(), huge: huge.to_string(), group }
    }
}

/// Result for a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerReply {
    pub inode: u64,
    /// Blocks that are huge: collapsed now, or huge already.
    pub huge_blocks: u64,
    /// Blocks of a file marked never huge that the kernel was asked to split. Small blocks count, too: whether one was huge is
    /// not known.
    pub split_blocks: u64,
    /// Memory of zero pages that was freed.
    pub freed_bytes: u64,
    /// The file is in use; a retry may succeed.
    pub is_busy: bool,
    /// Other processes need the CPUs; retry later.
    pub is_postponed: bool,
    pub has_no_memory: bool,
}

/// The worker's guaranteed part of one CPU while other processes need the CPUs: 1/50.
const SHARE: u32 = 50;

/// Maximum wait for a CPU share with a file open, and maximum total time with one file open; then the file is queued
/// again. A share is granted after `LATEST` in any case.
const WAITS_OPEN: Duration = Duration::from_millis(300);
const HAS_OPEN: Duration = Duration::from_secs(2);
const LATEST: Duration = Duration::from_millis(500);

/// Limits the worker's use of CPUs that other processes need.
struct Share {
    due: Instant,
    /// Latest time until which it may wait with the current file open.
    until: Instant,
}

impl Share {
    fn new(now: Instant) -> Self {
        Self { due: now, until: now }
    }

    /// Starts a file: waits, with nothing open, until a share is granted.
    fn begin_file(&mut self) {
        self.wait(LATEST, has_idle_processor);
        self.until = Instant::now() + HAS_OPEN;
    }

    /// Waits until the share is due or a CPU is idle; `false` if neither happens in time.
    fn wait(&self, at_most: Duration, is_idle: impl Fn() -> bool) -> bool {
        const PAUSE: Duration = Duration::from_millis(5);
        let until = Instant::now() + at_most;
        loop {
            let now = Instant::now();
            if now >= self.due || is_idle() {
                return true;
            }
            if now >= until {
                return false;
            }
            std::thread::sleep(PAUSE.min(self.due.min(until).saturating_duration_since(now)));
        }
    }

    fn charge(&mut self, took: Duration) {
        self.due = Instant::now() + (took * SHARE).min(LATEST);
    }
}

/// Permission to examine or change one block.
///
/// Other processes that open the file or touch the block wait meanwhile. So a turn starts only while a CPU is idle or
/// the share is due, and then runs at raised priority. At the lowest priority alone it would stall, with what it
/// holds, as soon as other processes need the CPUs.
struct TimeSlice<'share> {
    share: &'share mut Share,
    began: Instant,
    _preferred: Preferred,
}

impl<'share> TimeSlice<'share> {
    fn begin(share: &'share mut Share, done: &mut WorkerReply) -> Option<Self> {
        let left = share.until.saturating_duration_since(Instant::now());
        done.is_postponed = !share.wait(WAITS_OPEN.min(left), has_idle_processor);
        (!done.is_postponed).then(|| Self { share, began: Instant::now(), _preferred: Preferred::begin() })
    }
}

impl Drop for TimeSlice<'_> {
    fn drop(&mut self) {
        self.share.charge(self.began.elapsed());
    }
}

/// Returns whether at most as many threads are runnable as there are CPUs, this one included.
fn has_idle_processor() -> bool {
    // "0.20 0.18 0.12 3/80 11206": runnable threads of all threads.
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let running = load.split(' ').nth(3).and_then(|counts| counts.split_once('/')?.0.parse::<usize>().ok());
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    running.is_none_or(|running| running <= processors)
}

/// The memory group that the worker is charged to.
struct WorkerGroup {
    home: Option<String>,
    is_away: bool,
}

impl WorkerGroup {
    /// Moves the worker into the file's group. Returns whether it is there.
    fn go(&mut self, group: Option<&String>) -> bool {
        match group {
            // Without groups nothing is charged.
            None => self.home.is_none(),
            Some(group) if self.home.as_ref() == Some(group) => self.go_home(),
            Some(group) => {
                self.is_away = std::fs::write(format!("{group}/cgroup.procs"), "0").is_ok();
                self.is_away
            }
        }
    }

    /// Returns to the worker's own group: the other group may be about to be removed, frozen or killed. Returns whether the
    /// worker is there.
    fn go_home(&mut self) -> bool {
        if let Some(home) = self.home.as_ref().filter(|_| self.is_away) {
            self.is_away = std::fs::write(format!("{home}/cgroup.procs"), "0").is_err();
        }
        !self.is_away
    }
}

/// Serves requests until standard input ends.
///
/// # Errors
///
/// Errors of reading and writing.
pub fn serve() -> io::Result<()> {
    thread::defer_process();
    // As a guest in other groups it should be the first process that the OOM killer chooses.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let root = rustix::io::dup(io::stdout())?;
    let access = FileAccess::of_root(root)?;
    let socket = File::from(rustix::io::dup(io::stdin())?);
    let mut answers = socket.try_clone()?;
    let home = Hierarchy::find("").ok().and_then(|own| Some(own.folder(0)?.as_str().to_owned()));
    let mut place = WorkerGroup { home, is_away: false };
    let mut share = Share::new(Instant::now());
    let mut lines = BufReader::new(socket);
    let mut line = String::new();
    loop {
        line.clear();
        if lines.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let job: WorkerJob =
            serde_json::from_str(&line).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        share.begin_file();
        let mut done = look_at(&access, &job, &mut place, &mut share).unwrap_or_default();
        place.go_home();
        done.inode = job.inode;
        let mut answer = serde_json::to_string(&done).map_err(io::Error::other)?;
        answer.push('\n');
        answers.write_all(answer.as_bytes())?;
    }
}

/// Applies the file's huge page policy.
fn look_at(
    access: &FileAccess,
    job: &WorkerJob,
    place: &mut WorkerGroup,
    share: &mut Share,
) -> io::Result<WorkerReply> {
    let folder = access.open_folder(Path::new(OsStr::from_bytes(&job.folder)))?;
    let name = OsStr::from_bytes(&job.name);
    let fd = file_access::open_file(&folder, name, OFlags::RDONLY)?;
    let seen = file_access::look(&fd)?;
    let mut done = WorkerReply::default();
    if seen.inode != job.inode || !seen.is_file() {
        return Ok(done);
    }
    let file = File::from(fd);
    let huge = job.huge.parse().unwrap_or_default();
    let (mut dense, mut sparse) = (Vec::new(), Vec::new());
    let found = {
        let Some(_slice) = TimeSlice::begin(share, &mut done) else { return Ok(done) };
        // Searching for holes makes writers wait.
        if !pages::is_alone(file.as_fd()) {
            done.is_busy = true;
            return Ok(done);
        }
        blocks(&file, &seen)?
    };
    for Block { place: block, data_bytes } in found {
        let Some(_slice) = TimeSlice::begin(share, &mut done) else { return Ok(done) };
        // A deleted file must be freed with its last user, and a process that uses the file must not be delayed.
        if file_access::look(&file)?.links == 0 {
            return Ok(done);
        }
        if !pages::is_alone(file.as_fd()) {
            done.is_busy = true;
            return Ok(done);
        }
        match huge {
            // A block that starts with a hole is not huge.
            Huge::Never if fs::seek(&file, SeekFrom::Data(block.start)) == Ok(block.start) => {
                done.split_blocks += u64::from(pages::split(file.as_fd(), block.start, BLOCK_BYTES).is_ok());
            }
            Huge::Never => {}
            Huge::Always => dense.push(block.start),
            Huge::Auto => match density(&file, &block, data_bytes)? {
                Density::Dense if block.end - block.start == BLOCK => dense.push(block.start),
                Density::Sparse => sparse.push(block),
                Density::Dense | Density::Between => {}
            },
        }
    }
    if !dense.is_empty() && place.go(job.group.as_ref()) {
        collapse(share, &file, &dense, &mut done);
    }
    drop(file);
    for block in &sparse {
        // Another group can be frozen for longer than a lease lasts.
        if !place.go_home() {
            done.is_busy = true;
            return Ok(done);
        }
        let Some(_slice) = TimeSlice::begin(share, &mut done) else { return Ok(done) };
        give_zeros_back(&folder, name, &seen, block, &mut done)?;
    }
    Ok(done)
}

/// Makes blocks huge, as long as no other process has the file open.
fn collapse(share: &mut Share, file: &File, blocks: &[u64], done: &mut WorkerReply) {
    for at in blocks {
        let Some(_slice) = TimeSlice::begin(share, done) else { return };
        // A deleted file must be freed with its last user.
        if file_access::look(file).map_or(0, |seen| seen.links) == 0 {
            return;
        }
        // A process that uses the file must not be delayed; the file is retried later.
        if !pages::is_alone(file.as_fd()) {
            done.is_busy = true;
            return;
        }
        match pages::collapse(file.as_fd(), *at, BLOCK_BYTES) {
            Collapse::Huge => done.huge_blocks += 1,
            Collapse::Busy => done.is_busy = true,
            Collapse::NoMemory => {
                done.has_no_memory = true;
                return;
            }
            Collapse::Refused => {}
        }
    }
}

/// A block of a file that has memory.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    /// Ends at the end of the file, if that comes first.
    place: Range<u64>,
    /// Bytes that are not in holes.
    data_bytes: u64,
}

/// Returns the blocks of a file that have memory. Searches for each hole once: the kernel walks page by page while
/// writers wait.
fn blocks(file: &File, seen: &Seen) -> io::Result<Vec<Block>> {
    let (mut found, mut at): (Vec<Block>, u64) = (Vec::new(), 0);
    while at < seen.len_bytes {
        let start = match fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = fs::seek(file, SeekFrom::Hole(start))?.clamp(start + 1, seen.len_bytes.max(start + 1));
        at = end;
        for first in (start - start % BLOCK..end).step_by(BLOCK_BYTES) {
            let place = first..(first + BLOCK).min(seen.len_bytes);
            let data_bytes = end.min(place.end).saturating_sub(start.max(first));
            match found.last_mut() {
                Some(last) if last.place.start == first => last.data_bytes += data_bytes,
                _ => found.push(Block { place, data_bytes }),
            }
        }
    }
    Ok(found)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Density {
    /// Should be huge.
    Dense,
    /// Should be small, without its zero pages.
    Sparse,
    /// Neither dense nor sparse: left unchanged.
    Between,
}

/// Classifies a block by its share of nonzero pages.
fn density(file: &File, block: &Range<u64>, data: u64) -> io::Result<Density> {
    let page = os_page_bytes() as u64;
    let count = (block.end - block.start).div_ceil(page);
    if data * 8 >= (block.end - block.start) * DENSE_EIGHTHS && sample(file, block)? * 2 > SAMPLES {
        return Ok(Density::Dense);
    }
    let filled = count - zero_pages(file, block)?.iter().map(|run| (run.end - run.start).div_ceil(page)).sum::<u64>();
    Ok(match filled * 8 {
        eighths if eighths >= count * DENSE_EIGHTHS => Density::Dense,
        // If all allocated pages are nonzero, nothing can be freed.
        eighths if eighths <= count * SPARSE_EIGHTHS && data > filled * page => Density::Sparse,
        _ => Density::Between,
    })
}

/// Returns how many of a few pages, spread over the block, begin with nonzero bytes.
fn sample(file: &File, block: &Range<u64>) -> io::Result<u64> {
    let (mut filled, page) = (0, os_page_bytes() as u64);
    for index in 0..SAMPLES {
        let at = block.start + (block.end - block.start) / SAMPLES * index;
        let mut bytes = [0; 256];
        let len = file.read_at(&mut bytes, at - at % page)?;
        filled += u64::from(bytes[..len].iter().any(|byte| *byte != 0));
    }
    Ok(filled)
}

/// Returns the runs of zero pages in a block.
fn zero_pages(file: &File, block: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let page = os_page_bytes();
    let mut bytes = vec![0u8; (block.end - block.start) as usize];
    let mut len = 0;
    while len < bytes.len() {
        match file.read_at(&mut bytes[len..], block.start + len as u64)? {
            0 => break,
            count => len += count,
        }
    }
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (index, page_bytes) in bytes[..len].chunks(page).enumerate() {
        // No branch for each byte: the worker spends most of its time here.
        if page_bytes.chunks(64).any(|part| part.iter().fold(0, |sum, byte| sum | byte) != 0) {
            continue;
        }
        let start = block.start + (index * page) as u64;
        let end = start + page_bytes.len() as u64;
        match runs.last_mut() {
            Some(run) if run.end == start => run.end = end,
            _ => runs.push(start..end),
        }
    }
    Ok(runs)
}

/// Punches holes where a block has zero pages, which reads the same. Holds a lease, checked before each hole, so that
/// nothing is written meanwhile and no opener waits for long.
///
/// If this process does not run for the whole of `lease-break-time` (45 seconds by default) between the check and the
/// hole, data written meanwhile is lost. That is why it runs in the worker's own group.
fn give_zeros_back(
    folder: &OwnedFd,
    name: &OsStr,
    seen: &Seen,
    block: &Range<u64>,
    done: &mut WorkerReply,
) -> io::Result<()> {
    let fd = match file_access::open_file(folder, name, OFlags::RDWR) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            done.is_busy = true;
            return Ok(());
        }
        result => result?,
    };
    if pages::take_lease(fd.as_fd()).is_err() {
        done.is_busy = true;
        return Ok(());
    }
    let file = File::from(fd);
    let before = file_access::look(&file)?;
    if before.inode != seen.inode || before.links == 0 || before.len_bytes < block.end {
        return Ok(());
    }
    let modified = fs::fstat(&file)?;
    let page = os_page_bytes() as u64;
    for run in zero_pages(&file, block)? {
        if !pages::has_lease(file.as_fd()) {
            done.is_busy = true;
            break;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // Ends at a whole page even if the file ends before; otherwise the last page would stay.
        fs::fallocate(&file, flags, run.start, run.end.next_multiple_of(page) - run.start)?;
    }
    done.freed_bytes += before.held_bytes.saturating_sub(file_access::look(&file)?.held_bytes);
    // The contents have not changed, so the modification time is restored.
    let last_modification = Timespec { tv_sec: modified.st_mtime as _, tv_nsec: modified.st_mtime_nsec as _ };
    let last_access = Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT };
    let _ = fs::futimens(&file, &Timestamps { last_access, last_modification });
    Ok(())
}

/// The controller's side of a worker.
pub struct Worker {
    /// `None` only during drop.
    process: Option<Child>,
    socket: UnixStream,
    received: Vec<u8>,
    waiting: VecDeque<(u64, Instant)>,
}

/// Maximum number of files given to the worker at a time.
const MAX_WAITING: usize = 8;

/// A worker without an answer for this long is restarted: it may have moved into a frozen group.
const TIMEOUT: Duration = Duration::from_secs(20);

impl Worker {
    /// Starts a worker: `program` and its arguments run [`serve`].
    ///
    /// # Errors
    ///
    /// Errors of starting the process.
    pub fn start(program: &[OsString], access: &FileAccess) -> io::Result<Self> {
        let (name, arguments) = program.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        let root = access.open_folder(Path::new(""))?;
        let mut command = Command::new(name);
        command.args(arguments).stdin(OwnedFd::from(theirs)).stdout(root);
        Ok(Self { process: Some(command.spawn()?), socket, received: Vec::new(), waiting: VecDeque::new() })
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    pub fn is_free(&self) -> bool {
        self.waiting.len() < MAX_WAITING
    }

    /// Returns the file that the worker has in hand.
    pub fn current(&self) -> Option<u64> {
        self.waiting.front().map(|(inode, _)| *inode)
    }

    /// Returns when the worker will have had its file for too long.
    pub fn stuck_at(&self) -> Option<Instant> {
        self.waiting.front().map(|(_, since)| *since + TIMEOUT)
    }

    /// Sends a file to the worker.
    ///
    /// # Errors
    ///
    /// Errors of writing: the worker has ended.
    pub fn give(&mut self, job: &WorkerJob) -> io::Result<()> {
        let mut line = serde_json::to_string(job).map_err(io::Error::other)?;
        line.push('\n');
        // A few short lines always fit into a socket's buffer.
        self.socket.write_all(line.as_bytes())?;
        self.waiting.push_back((job.inode, Instant::now()));
        Ok(())
    }

    /// Appends the results since the last call to `done`, also if it fails.
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` if the worker has ended.
    pub fn take(&mut self, done: &mut Vec<WorkerReply>) -> io::Result<()> {
        let mut bytes = [0; 4096];
        let end = loop {
            match self.socket.read(&mut bytes) {
                Ok(0) => break Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        while let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.received.drain(..=end).collect();
            done.push(serde_json::from_slice(&line).map_err(io::Error::other)?);
            self.waiting.pop_front();
            // The worker starts the next file only now.
            if let Some((_, since)) = self.waiting.front_mut() {
                *since = Instant::now();
            }
        }
        end
    }
}

impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A process in a frozen group does not die at once, so another thread waits for it.
        let Some(mut process) = self.process.take() else { return };
        let _ = process.kill();
        let _ = task::spawn(c"reaper", move || drop(process.wait()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    /// Under load the worker gets a fiftieth of the time and no more; an idle CPU is free to use.
    #[test]
    fn a_share_is_guaranteed() {
        let mut share = Share::new(Instant::now());
        assert!(share.wait(Duration::ZERO, || false), "nothing was taken yet");
        let begun = Instant::now();
        share.charge(Duration::from_millis(2));
        assert!(!share.wait(Duration::from_millis(10), || false), "that was taken");
        assert!(share.wait(Duration::ZERO, || true), "no process needs it");
        assert!(share.wait(Duration::from_secs(600), || false) && begun.elapsed() >= Duration::from_millis(100));
        let begun = Instant::now();
        share.charge(Duration::from_secs(600));
        assert!(
            share.wait(Duration::from_secs(600), || false) && begun.elapsed() >= LATEST,
            "once it was taken away for long"
        );
    }

    fn file(write: impl Fn(&File)) -> Option<(tempfile::TempDir, File, Seen)> {
        let folder = tempfile::tempdir_in("/dev/shm").ok()?;
        let path = folder.path().join("file");
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        write(&file);
        let seen = file_access::look(&file).unwrap();
        Some((folder, file, seen))
    }

    /// Full blocks are dense. Blocks with few nonzero pages in much memory are sparse; those with holes instead of
    /// zeros are neither.
    #[test]
    fn blocks_are_told_apart() {
        let block = |index: u64| index * BLOCK..(index + 1) * BLOCK;
        let fill = |file: &File| {
            file.set_len(4 * BLOCK + 10).unwrap();
            file.write_all_at(&vec![1; BLOCK_BYTES], 0).unwrap();
            file.write_all_at(&vec![0; BLOCK_BYTES], BLOCK).unwrap();
            file.write_all_at(&[1], BLOCK + 5 * PAGE as u64).unwrap();
            file.write_all_at(&[1], 2 * BLOCK).unwrap();
            file.write_all_at(&[1], 4 * BLOCK + 9).unwrap();
        };
        let Some((_folder, file, seen)) = file(fill) else { return println!("skipped: no /dev/shm") };
        let found = blocks(&file, &seen).unwrap();
        let places: Vec<_> = found.iter().map(|block| block.place.clone()).collect();
        assert_eq!(places, [block(0), block(1), block(2), 4 * BLOCK..4 * BLOCK + 10]);
        // The machine may use huge pages for all of /dev/shm.
        let is_small = found[2].data_bytes == PAGE as u64;
        let densities = found.iter().map(|block| density(&file, &block.place, block.data_bytes).unwrap());
        let one = if is_small { Density::Between } else { Density::Sparse };
        assert_eq!(densities.take(3).collect::<Vec<_>>(), [Density::Dense, Density::Sparse, one]);
        assert_eq!((found[0].data_bytes, found[1].data_bytes), (BLOCK, BLOCK));
        assert_eq!(zero_pages(&file, &block(1)).unwrap().len(), 2);
    }

    /// Zero pages are freed; contents, length and modification time stay. A file open elsewhere is skipped.
    #[test]
    fn zeros_are_given_back() {
        let fill = |file: &File| {
            file.write_all_at(&vec![0; BLOCK_BYTES + 10], 0).unwrap();
            file.write_all_at(&[7], 3 * PAGE as u64 + 1).unwrap();
        };
        let Some((folder, file, seen)) = file(fill) else { return println!("skipped: no /dev/shm") };
        let at: OwnedFd = File::open(folder.path()).unwrap().into();
        let (name, zeros) = (OsStr::new("file"), blocks(&file, &seen).unwrap());
        let mut done = WorkerReply::default();
        give_zeros_back(&at, name, &seen, &zeros[0].place, &mut done).unwrap();
        assert!(done.is_busy && done.freed_bytes == 0);
        let modified = file.metadata().unwrap().modified().unwrap();
        drop(file);
        let mut done = WorkerReply::default();
        for block in &zeros {
            give_zeros_back(&at, name, &seen, &block.place, &mut done).unwrap();
        }
        assert_eq!((done.is_busy, done.freed_bytes), (false, seen.held_bytes - PAGE as u64));
        assert_eq!(folder.path().join("file").metadata().unwrap().modified().unwrap(), modified);
        let bytes = std::fs::read(folder.path().join("file")).unwrap();
        assert_eq!((bytes.len(), bytes[3 * PAGE + 1]), (BLOCK_BYTES + 10, 7));
        assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 1);
    }
}
