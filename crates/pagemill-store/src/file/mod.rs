//! A file or a block device as a store.
//!
//! ```text
//!   FileStore   implements `Store`                         (here)
//!     FileHandle      two descriptors of the file: direct (O_DIRECT), and buffered (the kernel's page cache)
//!     progress    cuts a transfer into pieces: one system call each, direct or buffered
//!     open        opening: kind of file, alignment, locks
//!     claims      one writing store per file in a process
//! ```
//!
//! **Unaligned bytes** (the end of a file, or memory at an odd address) go through the kernel's page cache, with a
//! second descriptor. The alternative would pad the last block with zeros and call `ftruncate` afterwards. That could
//! cut off bytes that another thread appends meanwhile, show the zeros to other readers, and leave them in the file
//! after a crash. The kernel keeps both descriptors coherent: a direct transfer first writes back the cached pages of
//! its range, and a direct write then drops them. Two transfers of one block could race, but the contract of [`Store`]
//! forbids them.
//!
//! Uses `sys::disk`. Locks: that of claims, for a few instructions.

pub(super) mod claims;
mod open;
mod progress;

pub use open::FileOptions;
pub(super) use progress::{IoMode, Piece, TransferProgress, TransferStep};

use super::errno::{self, EBADF, EFBIG, EINVAL};
use super::transfer::{Direction, Transfer};
use super::{Store, engine};
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_sys::disk::{Alignment, Disk, FileKind};
use pagemill_sys::process;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

/// Number of stores that were dropped in this process. A ring looks for files to close only after it has changed.
pub(super) static DROPPED_STORES: AtomicU64 = AtomicU64::new(0);

/// An open file, shared by its store and the rings that use it.
pub(crate) struct FileHandle {
    /// Descriptor through the kernel's page cache.
    pub(super) buffered: Disk,
    /// Descriptor for direct I/O (`O_DIRECT`), where the file system supports it.
    pub(super) direct: Option<Disk>,
    /// Alignment of direct transfers; 1 without a direct descriptor.
    pub(super) alignment: Alignment,
    pub(super) block_bytes: usize,
    pub(super) kind: FileKind,
    pub(super) is_writable: bool,
    /// Whether `RLIMIT_FSIZE` was set when the file was opened. If so, writes check the limit first, because exceeding
    /// it raises a fatal signal.
    pub(super) is_limited: bool,
    /// Whether the length of the file was changed since the last sync.
    pub(super) is_resized: AtomicBool,
    /// Whether the store of the file was dropped. The ring of the engine then closes the file after its last transfer,
    /// other rings at their next [`Ring::sweep`](super::Ring::sweep).
    pub(super) is_store_dropped: AtomicBool,
}

impl FileHandle {
    /// Returns the number of the descriptor that transfers use in this I/O mode.
    pub fn descriptor(&self, mode: IoMode) -> i32 {
        self.disk_for(mode).number()
    }

    /// Returns the descriptor for this I/O mode. If the file has no direct descriptor, returns the buffered one.
    fn disk_for(&self, mode: IoMode) -> &Disk {
        match (mode, &self.direct) {
            (IoMode::Direct, Some(direct)) => direct,
            _ => &self.buffered,
        }
    }

    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Returns an error if a write of these bytes cannot succeed. Called before any byte is written.
    pub fn check_write(&self, offset: u64, len_bytes: usize) -> io::Result<()> {
        if !self.is_writable {
            return Err(errno::error(EBADF));
        }
        self.check_size(offset.saturating_add(len_bytes as u64))
    }

    /// Returns an error for a file length above the process's limit (`RLIMIT_FSIZE`) or the largest file offset.
    fn check_size(&self, size_bytes: u64) -> io::Result<()> {
        let is_over = self.is_limited && size_bytes > process::file_size_limit();
        if is_over || size_bytes > i64::MAX as u64 { Err(errno::error(EFBIG)) } else { Ok(()) }
    }

    /// Reads bytes from `offset` on. Bytes past the end of the file read zero.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let (addr, len) = (to.as_ptr() as usize, to.len());
        let done = self.transfer_in_pieces(Direction::Read, offset, addr, len, |disk, from, piece| {
            disk.read_at(&mut to[from..from + piece.len_bytes], offset + from as u64)
        })?;
        to[done..].fill(0);
        stats::add(Counter::StoreRead, len as u64);
        Ok(())
    }

    /// Writes bytes at `offset`.
    pub fn write(&self, offset: u64, from: &[u8]) -> io::Result<()> {
        self.check_write(offset, from.len())?;
        let (addr, len) = (from.as_ptr() as usize, from.len());
        self.transfer_in_pieces(Direction::Write, offset, addr, len, |disk, at, piece| {
            disk.write_at(&from[at..at + piece.len_bytes], offset + at as u64)
        })?;
        stats::add(Counter::StoreWritten, len as u64);
        stats::add(Counter::StoreWrites, 1);
        Ok(())
    }

    /// Transfers `len_bytes` from `addr` on, piece by piece: each piece is one system call. `act` transfers one piece
    /// and returns the number of bytes that it transferred. Returns the sum of these numbers, which is less than
    /// `len_bytes` if a read reaches the end of the file.
    fn transfer_in_pieces(
        &self,
        direction: Direction,
        offset: u64,
        addr: usize,
        len_bytes: usize,
        mut act: impl FnMut(&Disk, usize, Piece) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut progress = TransferProgress::default();
        while progress.done_bytes < len_bytes {
            let piece = progress.next_piece(self, addr, offset, len_bytes);
            let result = act(self.disk_for(piece.mode), progress.done_bytes, piece);
            if progress.record(self, direction, piece, result)? == TransferStep::End {
                break;
            }
        }
        Ok(progress.done_bytes)
    }
}

/// A file or a block device, with direct I/O where its file system supports it.
///
/// Other processes may change the file, but not other stores of this process. Bytes that another process cuts off read
/// zero, and [`Store::size_bytes`] queries the file each time. If another file gets the same name, the store continues
/// to use the file that it opened. One store at a time writes to a file: within this process (by device and inode), and
/// among processes that respect advisory locks (`flock`). Any number of stores may read a file; a read concurrent with
/// a write returns old or new blocks.
///
/// The memory of a transfer may lie anywhere. If the address, the offset and the length are multiples of
/// [`FileStore::alignment`], the kernel copies no bytes.
///
/// ```
/// use pagemill::store::{FileStore, Store};
///
/// let path = std::env::temp_dir().join(format!("pagemill-doc-file-{}", std::process::id()));
/// let store = FileStore::create(&path)?;
/// let block = vec![7; store.block_bytes()];
/// store.set_size(block.len() as u64)?;
/// store.write(0, &block)?;
/// store.sync()?;
/// assert_eq!(std::fs::read(&path)?, block);
/// std::fs::remove_file(&path).unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FileStore {
    handle: Arc<FileHandle>,
    /// The right to write to the file; `None` for a read-only store. Must be the last field: fields are dropped in
    /// order, so another store can claim the file only after this store has dropped its handle.
    claim: Option<claims::FileClaim>,
}

impl FileStore {
    /// Opens an existing file or device for reading and writing.
    ///
    /// # Errors
    ///
    /// See [`FileOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        FileOptions::new().open(path)
    }

    /// Opens an existing file or device for reading.
    ///
    /// # Errors
    ///
    /// See [`FileOptions::open`].
    pub fn open_read_only(path: impl AsRef<Path>) -> Result<Self> {
        FileOptions::new().read_only().open(path)
    }

    /// Opens a file for reading and writing, and creates it if it is missing.
    ///
    /// # Errors
    ///
    /// See [`FileOptions::open`].
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        FileOptions::new().create().open(path)
    }

    /// Returns whether transfers bypass the kernel's page cache (`O_DIRECT`).
    pub fn is_direct(&self) -> bool {
        self.handle.is_direct()
    }

    /// Returns whether the store is a block device, whose length is fixed.
    pub fn is_device(&self) -> bool {
        self.handle.kind == FileKind::Device
    }

    /// Returns the alignment of direct transfers: that of memory addresses, and that of offsets and lengths. Of a
    /// transfer that is not aligned, the kernel copies bytes. Both fields are 1 for a buffered file, because the kernel
    /// then copies the bytes of every transfer.
    pub fn alignment(&self) -> Alignment {
        self.handle.alignment
    }

    pub(crate) fn handle(&self) -> &Arc<FileHandle> {
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
    /// `EINVAL` for a device whose length is not `size_bytes`, because a device has a fixed length. Otherwise the
    /// errors of [`Store::set_size`].
    fn set_size(&self, size_bytes: u64) -> io::Result<()> {
        let handle = &*self.handle;
        if handle.kind == FileKind::Device {
            let is_same = handle.buffered.size_bytes()? == size_bytes;
            return if is_same { Ok(()) } else { Err(errno::error(EINVAL)) };
        }
        handle.check_write(0, 0)?;
        if handle.buffered.size_bytes()? == size_bytes {
            return Ok(());
        }
        handle.check_size(size_bytes)?;
        // Set before the size changes, so that a later sync includes it.
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

    fn discard(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        self.handle.check_write(0, 0)?;
        self.handle.buffered.punch_hole(offset, len_bytes)
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
        // A ring may keep the file open, but does not write to it any more.
        if self.claim.as_ref().is_some_and(claims::FileClaim::is_ours) {
            self.handle.buffered.unlock();
        }
        self.handle.is_store_dropped.store(true, SeqCst);
        DROPPED_STORES.fetch_add(1, SeqCst);
        if Arc::strong_count(&self.handle) > 1 {
            engine::close_dropped_files();
        }
    }
}

impl std::fmt::Debug for FileStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let FileHandle { block_bytes, is_writable, kind, .. } = &*self.handle;
        f.debug_struct("FileStore")
            .field("kind", kind)
            .field("is_direct", &self.is_direct())
            .field("is_writable", is_writable)
            .field("block_bytes", block_bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(shuttle)))]
impl FileHandle {
    /// Returns a file handle for the read end of a pipe, and the write end. A read does not end until the test writes to
    /// the pipe.
    pub fn of_pipe() -> (Arc<Self>, io::PipeWriter) {
        let (reader, writer) = io::pipe().unwrap();
        (Arc::new(Self::of_descriptor(Disk::from_descriptor(reader.into()))), writer)
    }

    pub fn of_descriptor(buffered: Disk) -> Self {
        Self {
            buffered,
            direct: None,
            alignment: Alignment { memory: 1, offset: 1 },
            block_bytes: 1,
            kind: FileKind::Regular,
            is_writable: true,
            is_limited: false,
            is_resized: AtomicBool::new(false),
            is_store_dropped: AtomicBool::new(false),
        }
    }
}
