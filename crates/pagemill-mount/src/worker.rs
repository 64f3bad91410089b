//! Huge pages where they pay, small ones where they do not: a process of its own, of low priority.
//!
//! A process, because a huge page is charged to the memory group of who collapses: the worker moves into the group of who
//! wrote the file, and home again. It gets its root by standard output (nothing is printed there), and files to look at, a line
//! of JSON each, by standard input, which is a socket, and answers there.

use crate::door::{self, Door, Seen};
use crate::policy::Huge;
use pagemill::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::cgroup::Hierarchy;
use pagemill_sys::pages::{self, Collapse};
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

/// Of a block's pages so many must hold something other than zeros for it to be made huge, in eighths.
const DENSE_EIGHTHS: u64 = 7;

/// Of so few it is sparse: its zero pages are given back, in eighths.
const SPARSE_EIGHTHS: u64 = 4;

/// Pages that are looked at first; a block in which more than half of them hold something is not read whole.
const SAMPLES: u64 = 8;

/// A file to look at.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    pub inode: u64,
    /// From the root, as bytes: names need not be UTF-8.
    pub folder: Vec<u8>,
    pub name: Vec<u8>,
    huge: String,
    /// It has waited long enough for an idle processor.
    insists: bool,
    /// Folder of the memory group it is charged to. Where that is not known nothing is collapsed: that would move the charge.
    group: Option<String>,
}

impl Job {
    pub fn new(inode: u64, folder: &Path, name: &OsStr, huge: Huge, group: Option<String>) -> Self {
        let folder = folder.as_os_str().as_bytes().to_vec();
        Self { inode, folder, name: name.as_bytes().to_vec(), huge: huge.to_string(), insists: false, group }
    }

    /// The same, to be done though others need the processors.
    #[must_use]
    pub fn insisting(self, insists: bool) -> Self {
        Self { insists, ..self }
    }
}

/// What was done with a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Done {
    pub inode: u64,
    /// Blocks that are huge now.
    pub huge_blocks: u64,
    /// Blocks that were looked at to be split.
    pub split_blocks: u64,
    /// Memory of zero pages that was given back.
    pub freed_bytes: u64,
    /// Somebody uses it: later, perhaps.
    pub is_busy: bool,
    /// Others need the processors: later.
    pub is_postponed: bool,
    pub has_no_memory: bool,
}

/// A moment in which a block is looked at or changed.
///
/// Whoever opens the file or touches the block meanwhile waits. So this begins only while a processor is idle, and then goes
/// before others: with the least priority alone it would stand still, with what it holds, as soon as somebody needs the
/// processors.
struct Turn {
    _preferred: Preferred,
}

impl Turn {
    fn begin(job: &Job, done: &mut Done) -> Option<Self> {
        done.is_postponed = !job.insists && !has_idle_processor();
        (!done.is_postponed).then(|| Self { _preferred: Preferred::begin() })
    }
}

/// Whether threads that run or could are no more than processors, this one among them.
fn has_idle_processor() -> bool {
    // "0.20 0.18 0.12 3/80 11206": of all there are, how many.
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let running = load.split(' ').nth(3).and_then(|counts| counts.split_once('/')?.0.parse::<usize>().ok());
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    running.is_none_or(|running| running <= processors)
}

/// Where the worker is charged.
struct Place {
    home: Option<String>,
    is_away: bool,
}

impl Place {
    /// Goes where the file is charged. Returns whether it is there.
    fn go(&mut self, group: Option<&String>) -> bool {
        match group {
            // Without groups nothing is charged.
            None => self.home.is_none(),
            Some(group) if self.home.as_ref() == Some(group) => true,
            Some(group) => {
                self.is_away = std::fs::write(format!("{group}/cgroup.procs"), "0").is_ok();
                self.is_away
            }
        }
    }

    /// Goes home: whose group it is may want to remove it, or stop all that is in it.
    fn go_home(&mut self) {
        if let Some(home) = self.home.as_ref().filter(|_| self.is_away) {
            self.is_away = std::fs::write(format!("{home}/cgroup.procs"), "0").is_err();
        }
    }
}

/// Serves until standard input ends.
///
/// # Errors
///
/// What reading and writing say.
pub fn serve() -> io::Result<()> {
    thread::defer_process();
    // Where it goes it is a guest: let it be killed first.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let root = rustix::io::dup(io::stdout())?;
    let door = Door::of_root(root)?;
    let socket = File::from(rustix::io::dup(io::stdin())?);
    let mut answers = socket.try_clone()?;
    let home = Hierarchy::find("").ok().and_then(|own| Some(own.folder(0)?.as_str().to_owned()));
    let mut place = Place { home, is_away: false };
    let mut lines = BufReader::new(socket);
    let mut line = String::new();
    loop {
        line.clear();
        if lines.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let job: Job =
            serde_json::from_str(&line).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let mut done = look_at(&door, &job, &mut place).unwrap_or_default();
        place.go_home();
        done.inode = job.inode;
        let mut answer = serde_json::to_string(&done).map_err(io::Error::other)?;
        answer.push('\n');
        answers.write_all(answer.as_bytes())?;
    }
}

/// Does what its policy wants with a file.
fn look_at(door: &Door, job: &Job, place: &mut Place) -> io::Result<Done> {
    let folder = door.open_folder(Path::new(OsStr::from_bytes(&job.folder)))?;
    let name = OsStr::from_bytes(&job.name);
    let fd = door::open_file(&folder, name, OFlags::RDONLY)?;
    let seen = door::look(&fd)?;
    let mut done = Done::default();
    if seen.inode != job.inode || !seen.is_file() {
        return Ok(done);
    }
    let file = File::from(fd);
    let huge = job.huge.parse().unwrap_or_default();
    let (mut dense, mut sparse) = (Vec::new(), Vec::new());
    let found = {
        let Some(_turn) = Turn::begin(job, &mut done) else { return Ok(done) };
        // To look where its holes are keeps writers waiting.
        if !pages::is_alone(file.as_fd()) {
            done.is_busy = true;
            return Ok(done);
        }
        blocks(&file, &seen)?
    };
    for Block { place: block, data_bytes } in found {
        let Some(_turn) = Turn::begin(job, &mut done) else { return Ok(done) };
        // A file that was deleted goes when the last lets go of it; and whoever uses it is not to be held up.
        if door::look(&file)?.links == 0 {
            return Ok(done);
        }
        if !pages::is_alone(file.as_fd()) {
            done.is_busy = true;
            return Ok(done);
        }
        match huge {
            // One whose first page is a hole is not huge.
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
        collapse(job, &file, &dense, &mut done);
    }
    drop(file);
    for block in &sparse {
        place.go_home();
        let Some(_turn) = Turn::begin(job, &mut done) else { return Ok(done) };
        give_zeros_back(&folder, name, &seen, block, &mut done)?;
    }
    Ok(done)
}

/// Makes blocks huge, for as long as nobody else has the file open.
fn collapse(job: &Job, file: &File, blocks: &[u64], done: &mut Done) {
    for at in blocks {
        let Some(_turn) = Turn::begin(job, done) else { return };
        // A file that was deleted goes when the last lets go of it.
        if door::look(file).map_or(0, |seen| seen.links) == 0 {
            return;
        }
        // Whoever uses it is not to be held up, and finds out soon enough.
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

/// A block of a file that holds memory.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    /// Up to the end of the file.
    place: Range<u64>,
    /// What is no hole.
    data_bytes: u64,
}

/// The blocks of a file that hold any memory. Each hole is looked for once: the kernel goes from one to the next page by page,
/// while writers wait.
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
    /// To be huge.
    Dense,
    /// To be small, without the zeros that it holds.
    Sparse,
    /// To be left as it is.
    Between,
}

/// How much of a block is more than zeros.
fn density(file: &File, block: &Range<u64>, data: u64) -> io::Result<Density> {
    let page = os_page_bytes() as u64;
    let count = (block.end - block.start).div_ceil(page);
    if data * 8 >= (block.end - block.start) * DENSE_EIGHTHS && sample(file, block)? * 2 > SAMPLES {
        return Ok(Density::Dense);
    }
    let filled = count - zero_pages(file, block)?.iter().map(|run| (run.end - run.start).div_ceil(page)).sum::<u64>();
    Ok(match filled * 8 {
        eighths if eighths >= count * DENSE_EIGHTHS => Density::Dense,
        // Where all that it holds is filled there is nothing to win.
        eighths if eighths <= count * SPARSE_EIGHTHS && data > filled * page => Density::Sparse,
        _ => Density::Between,
    })
}

/// How many of a few pages, spread over the block, begin with anything but zeros.
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

/// The runs of pages of a block that are zeros.
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
        // Without a branch for each byte: this is most of what the worker does.
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

/// Punches holes where a block has zeros, which reads the same. Under a lease, which is asked for again before each hole: nobody
/// writes meanwhile, and nobody waits for long. (Who keeps this process from running for the whole of `lease-break-time`
/// between that question and the hole, 45 seconds by default, gets zeros for what was written meanwhile: hence at home.)
fn give_zeros_back(folder: &OwnedFd, name: &OsStr, seen: &Seen, block: &Range<u64>, done: &mut Done) -> io::Result<()> {
    let fd = match door::open_file(folder, name, OFlags::RDWR) {
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
    let before = door::look(&file)?;
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
        // Up to a whole page, also where the file ends before: else the last one stays.
        fs::fallocate(&file, flags, run.start, run.end.next_multiple_of(page) - run.start)?;
    }
    done.freed_bytes += before.held_bytes.saturating_sub(door::look(&file)?.held_bytes);
    // What it holds has not changed, whatever the kernel thinks.
    let last_modification = Timespec { tv_sec: modified.st_mtime as _, tv_nsec: modified.st_mtime_nsec as _ };
    let last_access = Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT };
    let _ = fs::futimens(&file, &Timestamps { last_access, last_modification });
    Ok(())
}

/// The worker, as the controller has it.
pub struct Worker {
    /// `None` only while this is dropped.
    process: Option<Child>,
    socket: UnixStream,
    received: Vec<u8>,
    waiting: VecDeque<(u64, Instant)>,
}

/// Most files that the worker has at a time.
const MAX_WAITING: usize = 8;

/// A worker that says nothing for so long is started anew: it may have been moved into a group that was frozen.
const PATIENCE: Duration = Duration::from_secs(20);

impl Worker {
    /// Starts one: `program` and its arguments end in [`serve`].
    ///
    /// # Errors
    ///
    /// What starting says.
    pub fn start(program: &[OsString], door: &Door) -> io::Result<Self> {
        let (name, arguments) = program.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        let root = door.open_folder(Path::new(""))?;
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

    /// It has had a file for too long.
    pub fn is_stuck(&self) -> bool {
        self.waiting.front().is_some_and(|(_, since)| since.elapsed() > PATIENCE)
    }

    /// Hands a file over.
    ///
    /// # Errors
    ///
    /// What writing says: it has ended.
    pub fn give(&mut self, job: &Job) -> io::Result<()> {
        let mut line = serde_json::to_string(job).map_err(io::Error::other)?;
        line.push('\n');
        // A few short lines always fit into a socket.
        self.socket.write_all(line.as_bytes())?;
        self.waiting.push_back((job.inode, Instant::now()));
        Ok(())
    }

    /// What it has done since the last look.
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` if it has ended.
    pub fn take(&mut self) -> io::Result<Vec<Done>> {
        let mut bytes = [0; 4096];
        loop {
            match self.socket.read(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let mut done = Vec::new();
        while let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.received.drain(..=end).collect();
            done.push(serde_json::from_slice(&line).map_err(io::Error::other)?);
            self.waiting.pop_front();
        }
        Ok(done)
    }
}

impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // In a group that is frozen it does not die at once: nobody waits for that here.
        let Some(mut process) = self.process.take() else { return };
        let _ = process.kill();
        let _ = std::thread::Builder::new().name("reaper".into()).spawn(move || process.wait());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    fn file(write: impl Fn(&File)) -> Option<(tempfile::TempDir, File, Seen)> {
        let folder = tempfile::tempdir_in("/dev/shm").ok()?;
        let path = folder.path().join("file");
        let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        write(&file);
        let seen = door::look(&file).unwrap();
        Some((folder, file, seen))
    }

    /// Full blocks are dense, those with little in much memory sparse, those with holes instead of zeros neither.
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
        // A machine may have been set to huge pages for all of /dev/shm.
        let is_small = found[2].data_bytes == PAGE as u64;
        let densities = found.iter().map(|block| density(&file, &block.place, block.data_bytes).unwrap());
        let one = if is_small { Density::Between } else { Density::Sparse };
        assert_eq!(densities.take(3).collect::<Vec<_>>(), [Density::Dense, Density::Sparse, one]);
        assert_eq!((found[0].data_bytes, found[1].data_bytes), (BLOCK, BLOCK));
        assert_eq!(zero_pages(&file, &block(1)).unwrap().len(), 2);
    }

    /// Zeros go, everything else stays, length and all; a file that is open elsewhere is left alone.
    #[test]
    fn zeros_are_given_back() {
        let fill = |file: &File| {
            file.write_all_at(&vec![0; BLOCK_BYTES + 10], 0).unwrap();
            file.write_all_at(&[7], 3 * PAGE as u64 + 1).unwrap();
        };
        let Some((folder, file, seen)) = file(fill) else { return println!("skipped: no /dev/shm") };
        let at: OwnedFd = File::open(folder.path()).unwrap().into();
        let (name, zeros) = (OsStr::new("file"), blocks(&file, &seen).unwrap());
        let mut done = Done::default();
        give_zeros_back(&at, name, &seen, &zeros[0].place, &mut done).unwrap();
        assert!(done.is_busy && done.freed_bytes == 0);
        let modified = file.metadata().unwrap().modified().unwrap();
        drop(file);
        let mut done = Done::default();
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
