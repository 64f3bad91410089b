//! A file or a block device as a store.
//!
//! ```text
//!   FileStore   the contract, blocking                     here
//!     Handle      two open files of it: past the kernel's page cache (O_DIRECT), and through it
//!     progress    which of them the next piece of a transfer goes through; what a short one means
//!     open        how it is opened, what it is, how it is aligned
//!     claims      who writes to it: one store of one process
//! ```
//!
//! **Tails.** What is not aligned (the end of a file, memory of a caller at an odd address) goes through the kernel's page cache, by
//! a second open file. The other way, a whole block padded with zeros and `ftruncate` behind it, would cut off what
//! another thread appended in between, let others see the padding, and leave it there after a crash. The kernel keeps both ways coherent:
//! a direct transfer first writes back what the cache has of its range, and a direct write then drops it. They
//! race only where two transfers of one block do, which the contract of [`Store`] rules out.
//!
//! Below: `sys::disk`. Locks: that of claims, for some instructions.

pub(super) mod claims;
mod open;
mod progress;

pub use open::FileOptions;
pub(super) use progress::{Piece, Progress, Step, Way};

use super::errno::{self, EBADF, EFBIG, EINVAL};
use super::transfer::{Direction, Transfer};
use super::{Store, engine};
use crate::error::Result;
use crate::stats::{self, Counter};
use pagemill_sys::disk::{Alignment, Disk, Kind};
use pagemill_sys::process;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// An open file, shared by its store and the rings that do transfers with it.
pub(crate) struct Handle {
    /// Through the kernel's page cache.
    pub(super) buffered: Disk,
    /// Past it, where the file system allows.
    pub(super) direct: Option<Disk>,
    pub(super) alignment: Alignment,
    pub(super) block_bytes: usize,
    pub(super) kind: Kind,
    pub(super) is_writable: bool,
    /// `RLIMIT_FSIZE` was set when it was opened, so it is looked at before writes: going over it is a deadly signal.
    pub(super) is_limited: bool,
    /// Its length was set since the last sync.
    pub(super) is_resized: AtomicBool,
}

impl Handle {
    pub fn descriptor(&self, way: Way) -> i32 {
        self.disk(way).number()
    }

    fn disk(&self, way: Way) -> &Disk {
        match (way, &self.direct) {
            (Way::Direct, Some(direct)) => direct,
            _ => &self.buffered,
        }
    }

    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Refuses writes that cannot be done, before anything of them is.
    pub fn check_write(&self, offset: u64, len_bytes: usize) -> io::Result<()> {
        if !self.is_writable {
            return Err(errno::error(EBADF));
        }
        self.check_size(offset.saturating_add(len_bytes as u64))
    }

    fn check_size(&self, size_bytes: u64) -> io::Result<()> {
        let is_over = self.is_limited && size_bytes > process::file_size_limit();
        if is_over || size_bytes > i64::MAX as u64 { Err(errno::error(EFBIG)) } else { Ok(()) }
    }

    pub fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let (addr, len) = (to.as_ptr() as usize, to.len());
        let done = self.in_pieces(Direction::Read, offset, addr, len, |disk, from, piece| {
            disk.read_at(&mut to[from..from + piece.len_bytes], offset + from as u64)
        })?;
        to[done..].fill(0);
        stats::add(Counter::StoreRead, len as u64);
        Ok(())
    }

    pub fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.check_write(offset, from.len())?;
        let (addr, len) = (from.as_ptr() as usize, from.len());
        self.in_pieces(Direction::Write, offset, addr, len, |disk, at, piece| {
            disk.write_at(&from[at..at + piece.len_bytes], offset + at as u64)
        })?;
        stats::add(Counter::StoreWritten, len as u64);
        stats::add(Counter::StoreWrites, 1);
        Ok(())
    }

    /// Does a transfer of `len_bytes` from `addr` on piece by piece: `act` does one, and returns how much of it was done.
    /// Returns how much there was, which for reads is less where the file ends.
    fn in_pieces(
        &self,
        direction: Direction,
        offset: u64,
        addr: usize,
        len_bytes: usize,
        mut act: impl FnMut(&Disk, usize, Piece) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut progress = Progress::default();
        while progress.done_bytes < len_bytes {
            let piece = progress.next(self, addr, offset, len_bytes);
            let result = act(self.disk(piece.way), progress.done_bytes, piece);
            if progress.take(self, direction, piece, result)? == Step::End {
                break;
            }
        }
        Ok(progress.done_bytes)
    }
}

/// A file, or a block device, past the kernel's page cache where its file system allows.
///
/// It may be changed by others meanwhile, though not through another store of a process that knows of this one: what is cut off
/// under it reads zero, and [`Store::size_bytes`] asks each time. A file that is replaced (another gets its name) stays the
/// one that was opened. One store at a time writes to a file: of this process (by device and inode), and of those that heed
/// advisory locks (`flock`). Reading stores are not counted; one beside a writer reads old or new blocks.
///
/// Its memory may lie anywhere; what is aligned as [`FileStore::alignment`] says, with offset and length, is not copied on its way.
pub struct FileStore {
    handle: Arc<Handle>,
    /// Ends last.
    claim: Option<claims::Claim>,
}

impl FileStore {
    /// Opens an existing file or device to read and write it.
    ///
    /// # Errors
    ///
    /// As [`FileOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        FileOptions::new().open(path)
    }

    /// Opens an existing file or device to read it.
    ///
    /// # Errors
    ///
    /// As [`FileOptions::open`].
    pub fn open_read_only(path: impl AsRef<Path>) -> Result<Self> {
        FileOptions::new().read_only().open(path)
    }

    /// Opens a file to read and write it, and makes it if it is missing.
    ///
    /// # Errors
    ///
    /// As [`FileOptions::open`].
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        FileOptions::new().create().open(path)
    }

    /// Whether it is read and written past the kernel's page cache.
    pub fn is_direct(&self) -> bool {
        self.handle.is_direct()
    }

    /// Whether it is a block device, whose length is fixed.
    pub fn is_device(&self) -> bool {
        self.handle.kind == Kind::Device
    }

    /// What addresses and offsets (and lengths) are multiples of where nothing is copied on the way; ones where all is.
    pub fn alignment(&self) -> Alignment {
        if self.is_direct() { self.handle.alignment } else { Alignment { memory: 1, offset: 1 } }
    }

    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }
}

impl Store for FileStore {
    fn size_bytes(&self) -> io::Result<u64> {
        self.handle.buffered.size_bytes()
    }

    fn block_bytes(&self) -> usize {
        self.handle.block_bytes
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.handle.read(offset, to)
    }

    fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.handle.write(offset, from)
    }

    /// # Errors
    ///
    /// `EINVAL` for a device, unless it is its length already; else as the trait says.
    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        let handle = &*self.handle;
        if handle.kind == Kind::Device {
            let is_same = handle.buffered.size_bytes()? == size_bytes;
            return if is_same { Ok(()) } else { Err(errno::error(EINVAL)) };
        }
        handle.check_write(0, 0)?;
        if handle.buffered.size_bytes()? == size_bytes {
            return Ok(());
        }
        handle.check_size(size_bytes)?;
        // Before, so that a sync that begins behind it takes it along.
        handle.is_resized.store(true, SeqCst);
        handle.buffered.set_size(size_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let handle = &*self.handle;
        if !handle.is_resized.swap(false, SeqCst) {
            return handle.buffered.sync_data();
        }
        let synced = handle.buffered.sync_all();
        if synced.is_err() {
            handle.is_resized.store(true, SeqCst);
        }
        synced
    }

    fn is_writable(&self) -> bool {
        self.handle.is_writable
    }

    fn start(&self, batch: Vec<Transfer>) {
        engine::start(&self.handle, batch);
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn as_file(&self) -> Option<&FileStore> {
        Some(self)
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        // A ring may have the file open for longer, which does not write any more.
        if self.claim.as_ref().is_some_and(claims::Claim::is_ours) {
            self.handle.buffered.unlock();
        }
    }
}

impl std::fmt::Debug for FileStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Handle { block_bytes, is_writable, kind, .. } = &*self.handle;
        f.debug_struct("FileStore")
            .field("kind", kind)
            .field("is_direct", &self.is_direct())
            .field("is_writable", is_writable)
            .field("block_bytes", block_bytes)
            .finish_non_exhaustive()
    }
}
