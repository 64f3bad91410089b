//! The worker: a separate process of low priority that makes dense blocks huge and frees the zero pages of sparse
//! blocks.
//!
//! The worker is a process because the kernel charges a huge page to the cgroup of the process that collapses it. So
//! the worker moves into the group that wrote the file, collapses, and moves back. While the worker is in another
//! group, the owner of that group can kill the worker (`cgroup.kill`, a limit that makes the OOM killer choose it),
//! freeze it, or deprive it of CPU time. That harms no file: `MADV_COLLAPSE` replaces a block as a whole or not at all,
//! and the worker changes contents only in its own group. The controller starts another worker, and avoids that group
//! for some time ([`crate::pagework`]).
//!
//! Standard output is a descriptor of the mount's root folder; the worker prints nothing. Standard input is a socket.
//! The socket carries one request per file as a line of JSON, and the answers back to the controller.

use crate::file_access::{self, FileAccess, FileAttributes};
use crate::messages::write_json_line;
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
use std::io::{self, BufRead, BufReader, Read};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A block is dense if at least this fraction of its pages, in eighths, contains nonzero bytes. Dense blocks are made
/// huge.
const DENSE_EIGHTHS: u64 = 7;

/// A block is sparse if at most this fraction of its pages, in eighths, contains nonzero bytes. The zero pages of a
/// sparse block are freed.
const SPARSE_EIGHTHS: u64 = 4;

/// Number of pages that are sampled in a block with few holes. If more than half of them begin with nonzero bytes, the
/// block counts as dense and is not read whole.
const SAMPLED_PAGES: u64 = 8;

/// A request: a file whose blocks the worker examines.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkerJob {
    pub inode: u64,
    /// Offset of the first block to examine.
    from: u64,
    /// Path of the folder from the root, as bytes: names need not be UTF-8.
    pub folder: Vec<u8>,
    pub name: Vec<u8>,
    huge: String,
    /// Cgroup folder of the group that is charged for the file. If the group is unknown, no block is collapsed, since a
    /// collapse would move the charge to the worker's group.
    group: Option<String>,
}

impl WorkerJob {
    pub fn new(inode: u64, from: u64, folder: &Path, name: &OsStr, huge: Huge, group: Option<String>) -> Self {
        let folder = folder.as_os_str().as_bytes().to_vec();
        Self { inode, from, folder, name: name.as_bytes().to_vec(), huge: huge.to_string(), group }
    }
}

/// The worker's answer: what it did with the blocks of one file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerReply {
    pub inode: u64,
    /// Blocks that are huge now, including those that were huge before.
    pub huge_blocks: u64,
    /// Blocks that the kernel was asked to split, because the file's mark is `never`. Blocks that were not huge count,
    /// too, since the kernel does not report whether it split a page.
    pub split_blocks: u64,
    /// Memory of zero pages that was freed.
    pub freed_bytes: u64,
    /// Another process has the file open; a retry may succeed.
    pub is_busy: bool,
    /// No such file is at the path of the job: the file or a folder above it was renamed or deleted. The rename of a
    /// folder does not change the file's change time, by which the queue would find that the file needs another visit.
    pub is_missing: bool,
    /// Offset of the first block that is left to examine, if the time for one job was over.
    pub next: Option<u64>,
    /// A block could not become huge because the kernel had no memory for a huge page.
    pub has_no_memory: bool,
}

/// While other processes need the CPUs, the worker may run for 1/50 of the time.
const CPU_SHARE_DIVISOR: u32 = 50;

/// Maximum pause after a time slice, however long the slice was. Files stay open during pauses, and a file cannot be
/// purged while the worker has it open.
const MAX_SLICE_PAUSE: Duration = Duration::from_millis(250);

/// Times since the start of a job after which it examines no further block, and after which it changes no further
/// block. At least one block is examined and changed. The controller queues the rest of the file again.
#[derive(Clone, Copy)]
struct JobLimits {
    examine: Duration,
    change: Duration,
}

const JOB_LIMITS: JobLimits = JobLimits { examine: Duration::from_secs(1), change: Duration::from_secs(2) };

/// Limits the CPU time of the worker while other processes need the CPUs: after each time slice the worker pauses for a
/// multiple of the slice.
struct CpuShare {
    /// Time from which the worker may run even without an idle CPU.
    due: Instant,
}

impl CpuShare {
    fn new(now: Instant) -> Self {
        Self { due: now }
    }

    /// Waits until the worker may run: at `self.due`, or earlier if `is_idle` returns true.
    fn wait(&self, is_idle: impl Fn() -> bool) {
        const POLL_INTERVAL: Duration = Duration::from_millis(5);
        loop {
            let left = self.due.saturating_duration_since(Instant::now());
            if left.is_zero() || is_idle() {
                return;
            }
            std::thread::sleep(POLL_INTERVAL.min(left));
        }
    }

    fn charge(&mut self, took: Duration) {
        self.due = Instant::now() + (took * CPU_SHARE_DIVISOR).min(MAX_SLICE_PAUSE);
    }
}

/// Permission to examine or change one block.
///
/// During a time slice, processes that open the file or touch the block may have to wait for the worker. So a slice
/// starts only if a CPU is idle or the worker's pause is over, and the worker has real-time priority during the slice.
/// At the lowest priority the worker would hold the file's lock without running as soon as other processes need the
/// CPUs.
struct TimeSlice<'share> {
    share: &'share mut CpuShare,
    began: Instant,
    _preferred: Preferred,
}

impl<'share> TimeSlice<'share> {
    /// Waits until the worker may run.
    fn begin(share: &'share mut CpuShare) -> Self {
        share.wait(has_idle_processor);
        Self { share, began: Instant::now(), _preferred: Preferred::begin() }
    }
}

impl Drop for TimeSlice<'_> {
    fn drop(&mut self) {
        self.share.charge(self.began.elapsed());
    }
}

/// Returns whether the number of runnable threads, including this one, is at most the number of CPUs.
fn has_idle_processor() -> bool {
    // The format is "0.20 0.18 0.12 3/80 11206". The fourth word has the numbers of runnable threads and of all
    // threads.
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let running = load.split(' ').nth(3).and_then(|counts| counts.split_once('/')?.0.parse::<usize>().ok());
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    running.is_none_or(|running| running <= processors)
}

/// The worker's own cgroup, and whether the worker is in another group now.
struct WorkerGroup {
    home: Option<String>,
    is_away: bool,
    may_ask_for_group: bool,
}

impl WorkerGroup {
    /// Moves the worker into `group`, the one that is charged for the file. Returns whether the worker is in that
    /// group.
    fn move_to(&mut self, group: Option<&String>) -> bool {
        match group {
            // On a machine without groups no charge can move.
            None => self.home.is_none(),
            Some(group) if self.home.as_ref() == Some(group) => self.return_home(),
            Some(group) => {
                self.is_away = std::fs::write(format!("{group}/cgroup.procs"), "0").is_ok();
                self.is_away
            }
        }
    }

    /// Returns whether `group`, in which the worker is now, is charged for all pages of a block. Always true without
    /// permission to read page charges, since the mount then has only users of the controller's group.
    fn is_charged(&self, group: Option<&String>, file: &File, block: u64) -> bool {
        let Some(group) = group.filter(|_| self.may_ask_for_group) else { return !self.may_ask_for_group };
        let Ok(folder) = std::fs::metadata(group) else { return false };
        pages::is_charged_to(file.as_fd(), block, BLOCK_BYTES, folder.ino()).unwrap_or(false)
    }

    /// Moves the worker back to its own group, since another group can be removed, frozen or killed. Returns whether
    /// the worker is in its own group.
    fn return_home(&mut self) -> bool {
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
    // While the worker is in another group, the OOM killer should choose the worker before that group's
    // processes.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let root = rustix::io::dup(io::stdout())?;
    let access = FileAccess::of_root(root)?;
    let socket = File::from(rustix::io::dup(io::stdin())?);
    let answers = socket.try_clone()?;
    let home = Hierarchy::find("").ok().and_then(|own| Some(own.folder(0)?.as_str().to_owned()));
    let mut worker_group = WorkerGroup { home, is_away: false, may_ask_for_group: pages::may_ask_for_group() };
    let mut share = CpuShare::new(Instant::now());
    let mut lines = BufReader::new(socket);
    let mut line = String::new();
    loop {
        line.clear();
        if lines.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let job: WorkerJob =
            serde_json::from_str(&line).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        // Waits before the file is opened.
        share.wait(has_idle_processor);
        let reply = examine_file(&access, &job, JOB_LIMITS, &mut worker_group, &mut share);
        let is_missing = reply.as_ref().is_err_and(is_missing);
        let mut reply = reply.unwrap_or(WorkerReply { is_missing, ..WorkerReply::default() });
        worker_group.return_home();
        reply.inode = job.inode;
        match write_json_line(&answers, &reply) {
            // The controller has ended.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            result => result?,
        }
    }
}

/// Returns whether an error of [`examine_file`] says that no such file is at the path of the job: a folder above it can
/// have been replaced by a file, a symbolic link or a mount.
fn is_missing(error: &io::Error) -> bool {
    let kinds = [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::XDEV];
    Errno::from_io_error(error).is_some_and(|errno| kinds.contains(&errno))
}

/// Examines the blocks of a file and applies its huge page policy, until the time for one job is over.
///
/// # Errors
///
/// `ENOENT` if another file is at the path of the job. Errors of opening and reading.
fn examine_file(
    access: &FileAccess,
    job: &WorkerJob,
    limits: JobLimits,
    worker_group: &mut WorkerGroup,
    share: &mut CpuShare,
) -> io::Result<WorkerReply> {
    let folder = access.open_folder(Path::new(OsStr::from_bytes(&job.folder)))?;
    let name = OsStr::from_bytes(&job.name);
    let fd = file_access::open_file(&folder, name, OFlags::RDONLY)?;
    let seen = file_access::attributes(&fd)?;
    let mut reply = WorkerReply::default();
    if seen.inode != job.inode || !seen.is_file() {
        return Err(Errno::NOENT.into());
    }
    let file = File::from(fd);
    let huge = job.huge.parse().unwrap_or_default();
    let found = {
        let _slice = TimeSlice::begin(share);
        // The search for holes makes writers wait, so it runs only if no other process has the file open.
        if !pages::is_alone(file.as_fd()) {
            reply.is_busy = true;
            return Ok(reply);
        }
        blocks(&file, &seen, job.from)?
    };
    let began = Instant::now();
    let is_over = |limit: Duration| began.elapsed() >= limit;
    let (mut dense, mut sparse) = (Vec::new(), Vec::new());
    for (index, Block { range: block, data_bytes }) in found.into_iter().enumerate() {
        if index > 0 && is_over(limits.examine) {
            reply.next = Some(block.start);
            break;
        }
        let _slice = TimeSlice::begin(share);
        if is_in_use(&file, &mut reply)? {
            return Ok(reply);
        }
        match huge {
            // A block that starts with a hole is not huge, and needs no split.
            Huge::Never if fs::seek(&file, SeekFrom::Data(block.start)) == Ok(block.start) => {
                reply.split_blocks += u64::from(pages::split(file.as_fd(), block.start, BLOCK_BYTES).is_ok());
            }
            Huge::Never => {}
            Huge::Always => dense.push(block.start),
            Huge::Auto => match classify_block(&file, &block, data_bytes)? {
                Density::Dense if block.end - block.start == BLOCK => dense.push(block.start),
                Density::Sparse => sparse.push(block),
                Density::Dense | Density::Between => {}
            },
        }
    }
    if !dense.is_empty() && worker_group.move_to(job.group.as_ref()) {
        for (index, at) in dense.into_iter().enumerate() {
            if index > 0 && is_over(limits.change) {
                reply.next = Some(at);
                break;
            }
            let _slice = TimeSlice::begin(share);
            if is_in_use(&file, &mut reply)? {
                break;
            }
            // The collapse of a block that is charged to another group would move the charge to the worker's group.
            let is_charged = worker_group.is_charged(job.group.as_ref(), &file, at);
            if is_charged && !collapse_block(&file, at, &mut reply) {
                break;
            }
        }
    }
    drop(file);
    for (index, block) in sparse.into_iter().enumerate() {
        if index > 0 && is_over(limits.change) {
            reply.next = Some(reply.next.map_or(block.start, |next| next.min(block.start)));
            break;
        }
        // The worker's own group is required: another group can be frozen for longer than a lease lasts.
        if !worker_group.return_home() {
            reply.is_busy = true;
            return Ok(reply);
        }
        let _slice = TimeSlice::begin(share);
        free_zero_pages(&folder, name, &seen, &block, &mut reply)?;
    }
    Ok(reply)
}

/// Returns whether the worker must leave the file alone: it was deleted, so the worker's descriptor keeps its memory,
/// or another process has it open and must not be delayed. In the second case the reply asks for a retry.
fn is_in_use(file: &File, reply: &mut WorkerReply) -> io::Result<bool> {
    if file_access::attributes(file)?.links == 0 {
        return Ok(true);
    }
    let is_open = !pages::is_alone(file.as_fd());
    reply.is_busy |= is_open;
    Ok(is_open)
}

/// Collapses a block into a huge page. Returns `false` if no other block can become huge now.
fn collapse_block(file: &File, at: u64, reply: &mut WorkerReply) -> bool {
    match pages::collapse(file.as_fd(), at, BLOCK_BYTES) {
        Collapse::Huge => reply.huge_blocks += 1,
        Collapse::Busy => reply.is_busy = true,
        Collapse::NoMemory => reply.has_no_memory = true,
        Collapse::Refused => {}
    }
    !reply.has_no_memory
}

/// A block of a file, with at least some memory.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    /// The block's offsets in the file. The last block ends at the end of the file.
    range: Range<u64>,
    /// Bytes of the block that are not in holes.
    data_bytes: u64,
}

/// Returns the blocks of a file, from the offset `from`, that have memory. Searches for each hole only once, since the
/// kernel walks page by page while writers wait.
fn blocks(file: &File, seen: &FileAttributes, from: u64) -> io::Result<Vec<Block>> {
    let (mut found, mut at): (Vec<Block>, u64) = (Vec::new(), from);
    while at < seen.len_bytes {
        let start = match fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = fs::seek(file, SeekFrom::Hole(start))?.clamp(start + 1, seen.len_bytes.max(start + 1));
        at = end;
        for first in (start - start % BLOCK..end).step_by(BLOCK_BYTES) {
            let range = first..(first + BLOCK).min(seen.len_bytes);
            let data_bytes = end.min(range.end).saturating_sub(start.max(first));
            match found.last_mut() {
                Some(last) if last.range.start == first => last.data_bytes += data_bytes,
                _ => found.push(Block { range, data_bytes }),
            }
        }
    }
    Ok(found)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Density {
    /// Nearly all pages contain nonzero bytes: the block should be huge.
    Dense,
    /// Few pages contain nonzero bytes: the block should have small pages, and its zero pages are freed.
    Sparse,
    /// The block is neither dense nor sparse, and is left as it is.
    Between,
}

/// Classifies a block by the fraction of its pages that contain nonzero bytes. `data` is the number of bytes of the
/// block that are not in holes.
fn classify_block(file: &File, block: &Range<u64>, data: u64) -> io::Result<Density> {
    let page = os_page_bytes() as u64;
    let count = (block.end - block.start).div_ceil(page);
    if data * 8 >= (block.end - block.start) * DENSE_EIGHTHS && count_nonzero_samples(file, block)? * 2 > SAMPLED_PAGES
    {
        return Ok(Density::Dense);
    }
    let filled = count - zero_pages(file, block)?.iter().map(|run| (run.end - run.start).div_ceil(page)).sum::<u64>();
    Ok(match filled * 8 {
        eighths if eighths >= count * DENSE_EIGHTHS => Density::Dense,
        // If all allocated pages are nonzero, no memory can be freed.
        eighths if eighths <= count * SPARSE_EIGHTHS && data > filled * page => Density::Sparse,
        _ => Density::Between,
    })
}

/// Returns how many of `SAMPLED_PAGES` pages, spread over the block, begin with nonzero bytes.
fn count_nonzero_samples(file: &File, block: &Range<u64>) -> io::Result<u64> {
    let (mut filled, page) = (0, os_page_bytes() as u64);
    for index in 0..SAMPLED_PAGES {
        let at = block.start + (block.end - block.start) / SAMPLED_PAGES * index;
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
        // The inner loop has no branch for each byte: the worker spends most of its time here.
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

/// Frees the zero pages of a block by punching holes; holes also read as zeros. Takes a lease on the file first, and
/// checks before each hole that no process waits for the end of the lease. So no process writes to the file meanwhile,
/// and a process that opens the file waits only briefly.
///
/// If the worker is stopped for more than `lease-break-time` (45 seconds by default) between the check and the hole,
/// the kernel breaks the lease. Data that another process then writes is lost. A frozen group could stop the worker for
/// so long, so the worker must be in its own group.
fn free_zero_pages(
    folder: &OwnedFd,
    name: &OsStr,
    seen: &FileAttributes,
    block: &Range<u64>,
    reply: &mut WorkerReply,
) -> io::Result<()> {
    let fd = match file_access::open_file(folder, name, OFlags::RDWR) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            reply.is_busy = true;
            return Ok(());
        }
        result => result?,
    };
    if pages::take_lease(fd.as_fd()).is_err() {
        reply.is_busy = true;
        return Ok(());
    }
    let file = File::from(fd);
    let before = file_access::attributes(&file)?;
    if before.inode != seen.inode || before.links == 0 || before.len_bytes < block.end {
        reply.is_missing |= before.inode != seen.inode;
        return Ok(());
    }
    let modified = fs::fstat(&file)?;
    let page = os_page_bytes() as u64;
    for run in zero_pages(&file, block)? {
        if !pages::has_lease(file.as_fd()) {
            reply.is_busy = true;
            break;
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // The range ends at a page boundary even if the file ends earlier; otherwise the last page would not be freed.
        fs::fallocate(&file, flags, run.start, run.end.next_multiple_of(page) - run.start)?;
    }
    reply.freed_bytes += before.held_bytes.saturating_sub(file_access::attributes(&file)?.held_bytes);
    // The contents have not changed, so the modification time is restored.
    let last_modification = Timespec { tv_sec: modified.st_mtime as _, tv_nsec: modified.st_mtime_nsec as _ };
    let last_access = Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT };
    let _ = fs::futimens(&file, &Timestamps { last_access, last_modification });
    Ok(())
}

/// The controller's view of a worker: the process, its socket, and the jobs that the worker has not answered.
pub struct Worker {
    /// `None` only during drop.
    process: Option<Child>,
    socket: UnixStream,
    received: Vec<u8>,
    waiting: VecDeque<(u64, Instant)>,
}

/// Maximum number of files sent to the worker and not answered.
const MAX_UNANSWERED: usize = 8;

/// A worker that does not answer a job for this long is replaced by a new one: it may be in a frozen group.
const STUCK_TIMEOUT: Duration = Duration::from_secs(20);

impl Worker {
    /// Starts a worker process. `program` is the command line that runs [`serve`].
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

    /// Kills the process, and waits for its exit for at most `timeout`.
    pub fn end(mut self, timeout: Duration) {
        let Some(process) = &mut self.process else { return };
        let _ = process.kill();
        let begun = Instant::now();
        while matches!(process.try_wait(), Ok(None)) && begun.elapsed() < timeout {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().map_or(0, Child::id)
    }

    pub fn can_accept_job(&self) -> bool {
        self.waiting.len() < MAX_UNANSWERED
    }

    /// Returns the inode of the file that the worker is examining.
    pub fn current_inode(&self) -> Option<u64> {
        self.waiting.front().map(|(inode, _)| *inode)
    }

    /// Returns the time at which the worker counts as stuck if it has not answered the current job; `None` without a
    /// job.
    pub fn stuck_at(&self) -> Option<Instant> {
        self.waiting.front().map(|(_, since)| *since + STUCK_TIMEOUT)
    }

    /// Sends a file to the worker.
    ///
    /// # Errors
    ///
    /// Errors of writing: the worker has ended.
    pub fn send_job(&mut self, job: &WorkerJob) -> io::Result<()> {
        // A few short lines always fit into a socket's buffer.
        write_json_line(&self.socket, job)?;
        self.waiting.push_back((job.inode, Instant::now()));
        debug_assert!(self.waiting.len() <= MAX_UNANSWERED, "the worker can accept a job");
        Ok(())
    }

    /// Appends the answers since the last call to `done`, also if the call fails.
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` if the worker has ended.
    pub fn take_replies(&mut self, done: &mut Vec<WorkerReply>) -> io::Result<()> {
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
            // The worker starts the next file only now, so the timeout of that file starts now.
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
        // A killed process in a frozen group does not end at once, so another thread waits for it.
        let Some(mut process) = self.process.take() else { return };
        let _ = process.kill();
        let _ = task::spawn(c"reaper", move || drop(process.wait()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const PAGE: usize = 4096;

    /// The worker has run for a short or a long time. While no CPU is idle, the worker must wait 50 times as long as it
    /// ran, but at most `MAX_SLICE_PAUSE`. With an idle CPU it must not wait.
    #[test]
    fn cpu_time_is_limited_under_load_and_guaranteed() {
        let mut share = CpuShare::new(Instant::now());
        let begun = Instant::now();
        share.wait(|| panic!("no CPU time was used yet"));
        share.charge(Duration::from_millis(2));
        share.wait(|| false);
        assert!(begun.elapsed() >= Duration::from_millis(100));
        let is_asked = Cell::new(false);
        share.charge(Duration::from_secs(600));
        share.wait(|| is_asked.replace(true));
        assert!(is_asked.get(), "a CPU is idle");
        let begun = Instant::now();
        share.charge(Duration::from_secs(600));
        share.wait(|| false);
        assert!(begun.elapsed() >= MAX_SLICE_PAUSE, "the pause is limited after a long slice");
    }

    /// Blocks take longer than the time of one job. Each job must examine at least one block, and the jobs together
    /// must examine each block once.
    #[test]
    fn a_file_is_examined_in_parts() {
        const COUNT: u64 = 5;
        let fill = |file: &File| {
            for at in 0..COUNT {
                file.write_all_at(&vec![0; BLOCK_BYTES], at * BLOCK).unwrap();
                file.write_all_at(&[7], at * BLOCK).unwrap();
            }
        };
        let Some((folder, file, seen)) = file(fill) else { return println!("skipped: no /dev/shm") };
        drop(file);
        let access = FileAccess::of_root(File::open(folder.path()).unwrap().into()).unwrap();
        let mut worker_group = WorkerGroup { home: None, is_away: false, may_ask_for_group: false };
        let mut share = CpuShare::new(Instant::now());
        let (mut from, mut freed_bytes, mut jobs) = (Some(0), 0, 0);
        while let Some(at) = from {
            let job = WorkerJob::new(seen.inode, at, Path::new(""), OsStr::new("file"), Huge::Auto, None);
            let limits = JobLimits { examine: Duration::ZERO, change: Duration::ZERO };
            let reply = examine_file(&access, &job, limits, &mut worker_group, &mut share).unwrap();
            assert!(!reply.is_busy && reply.next.is_none_or(|next| next > at));
            (from, freed_bytes, jobs) = (reply.next, freed_bytes + reply.freed_bytes, jobs + 1);
        }
        let is_small = seen.held_bytes == COUNT * BLOCK;
        let expected = if is_small { COUNT * (BLOCK - PAGE as u64) } else { freed_bytes };
        assert_eq!((jobs, freed_bytes), (COUNT, expected));
    }

    fn file(write: impl Fn(&File)) -> Option<(tempfile::TempDir, File, FileAttributes)> {
        let folder = tempfile::tempdir_in("/dev/shm").ok()?;
        let path = folder.path().join("file");
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        write(&file);
        let seen = file_access::attributes(&file).unwrap();
        Some((folder, file, seen))
    }

    /// A full block must be dense. A block with few nonzero pages must be sparse if it has zero pages in memory, and
    /// neither dense nor sparse if it has holes instead.
    #[test]
    fn blocks_are_classified_by_density() {
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
        let found = blocks(&file, &seen, 0).unwrap();
        let ranges: Vec<_> = found.iter().map(|block| block.range.clone()).collect();
        assert_eq!(ranges, [block(0), block(1), block(2), 4 * BLOCK..4 * BLOCK + 10]);
        // The machine may use huge pages for all of /dev/shm.
        let is_small = found[2].data_bytes == PAGE as u64;
        let densities = found.iter().map(|block| classify_block(&file, &block.range, block.data_bytes).unwrap());
        let one = if is_small { Density::Between } else { Density::Sparse };
        assert_eq!(densities.take(3).collect::<Vec<_>>(), [Density::Dense, Density::Sparse, one]);
        assert_eq!((found[0].data_bytes, found[1].data_bytes), (BLOCK, BLOCK));
        assert_eq!(zero_pages(&file, &block(1)).unwrap().len(), 2);
    }

    /// The zero pages of a file are freed. Contents, length and modification time must be unchanged. A file that is
    /// open elsewhere must be skipped.
    #[test]
    fn zero_pages_are_freed() {
        let fill = |file: &File| {
            file.write_all_at(&vec![0; BLOCK_BYTES + 10], 0).unwrap();
            file.write_all_at(&[7], 3 * PAGE as u64 + 1).unwrap();
        };
        let Some((folder, file, seen)) = file(fill) else { return println!("skipped: no /dev/shm") };
        let at: OwnedFd = File::open(folder.path()).unwrap().into();
        let (name, zeros) = (OsStr::new("file"), blocks(&file, &seen, 0).unwrap());
        let mut reply = WorkerReply::default();
        free_zero_pages(&at, name, &seen, &zeros[0].range, &mut reply).unwrap();
        assert!(reply.is_busy && reply.freed_bytes == 0);
        let modified = file.metadata().unwrap().modified().unwrap();
        drop(file);
        let mut reply = WorkerReply::default();
        for block in &zeros {
            free_zero_pages(&at, name, &seen, &block.range, &mut reply).unwrap();
        }
        assert_eq!((reply.is_busy, reply.freed_bytes), (false, seen.held_bytes - PAGE as u64));
        assert_eq!(folder.path().join("file").metadata().unwrap().modified().unwrap(), modified);
        let bytes = std::fs::read(folder.path().join("file")).unwrap();
        assert_eq!((bytes.len(), bytes[3 * PAGE + 1]), (BLOCK_BYTES + 10, 7));
        assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 1);
    }
}
