//! The kernel's tables of a ring: registered files and registered memory.
#![allow(unsafe_code)] // registers memory that it owns

use super::Ring;
use super::regions::RegionId;
use crate::buffer::Buffer;
use crate::errno::{self, EBUSY, EINVAL, EOPNOTSUPP};
use crate::file::{DROPPED_STORES, FileHandle, FileStore, IoMode};
use pagemill_core::stats::{self, Counter};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

/// Number of entries of a ring's table of registered memory. With regions of 64 MiB, the entries cover 64 GiB.
pub(super) const MEMORY_TABLE_LEN: u16 = 1024;

/// Number of entries of a ring's table of registered files. Each file uses two entries, one for each of its
/// descriptors.
const FILE_TABLE_LEN: u32 = 256;

/// Id of a file that is attached to a ring ([`Ring::attach`]).
///
/// Example: [`Ring`](super::Ring).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub(super) u32);

impl FileId {
    /// Returns the index of the file's descriptor for this I/O mode in the kernel's table; `None` if the table is too
    /// short for that index.
    pub(super) fn table_index(self, mode: IoMode) -> Option<u32> {
        let table_index = 2 * self.0 + u32::from(mode == IoMode::Buffered);
        (table_index < FILE_TABLE_LEN).then_some(table_index)
    }
}

impl<B: Buffer> Ring<B> {
    /// Attaches a file, so that transfers can refer to it by its id. The file stays open until it is detached.
    /// Attaching a file again returns the same id.
    ///
    /// # Errors
    ///
    /// `EBADF` in a fork child.
    pub fn attach(&mut self, store: &FileStore) -> io::Result<FileId> {
        self.attach_handle(store.handle())
    }

    /// As [`Ring::attach`], but takes the handle of an open file instead of a store.
    pub(crate) fn attach_handle(&mut self, handle: &Arc<FileHandle>) -> io::Result<FileId> {
        self.check_process()?;
        let is_same = |file: &Option<Arc<FileHandle>>| file.as_ref().is_some_and(|file| Arc::ptr_eq(file, handle));
        if let Some(at) = self.files.iter().position(is_same) {
            return Ok(FileId(at as u32));
        }
        let at = self.files.iter().position(Option::is_none).unwrap_or(self.files.len());
        if at == self.files.len() {
            self.files.push(None);
        }
        let id = FileId(at as u32);
        debug_assert!(self.files[at].is_none(), "a free entry has no file");
        debug_assert!(self.in_flight_requests().all(|(_, request)| request.file != id), "no request uses a free entry");
        self.files[at] = Some(handle.clone());
        // The store may have been dropped before, so the next sweep must look at the file.
        self.swept_stores = None;
        self.register_file(id, [handle.descriptor(IoMode::Direct), handle.descriptor(IoMode::Buffered)]);
        Ok(id)
    }

    /// Stores the two descriptors of a file in the kernel's table; -1 clears an entry. After a failure, transfers use
    /// the file's descriptors instead of the table.
    fn register_file(&mut self, id: FileId, descriptors: [i32; 2]) {
        let Ok(tables) = self.backend.kernel_ring() else { return };
        let (Some(direct), Some(buffered)) = (id.table_index(IoMode::Direct), id.table_index(IoMode::Buffered)) else {
            return;
        };
        // After a failure the entry may still refer to another file, so the whole table is not used any more.
        self.has_file_table = (self.has_file_table || tables.make_file_table(FILE_TABLE_LEN).is_ok())
            && tables.register_file(direct, descriptors[0]).is_ok()
            && tables.register_file(buffered, descriptors[1]).is_ok();
    }

    /// Detaches a file, which closes it if its store was dropped.
    ///
    /// # Errors
    ///
    /// `EBUSY` while the file has transfers in flight.
    pub fn detach(&mut self, file: FileId) -> io::Result<()> {
        self.check_process()?;
        if self.in_flight_requests().any(|(_, request)| request.file == file) {
            return Err(errno::error(EBUSY));
        }
        if self.files.get_mut(file.0 as usize).and_then(Option::take).is_some() {
            self.register_file(file, [-1, -1]);
        }
        Ok(())
    }

    /// Detaches every file whose `FileStore` was dropped, unless the file has transfers in flight. The ring leaves such
    /// files open until this call. Returns whether all of them are detached.
    pub fn sweep(&mut self) -> bool {
        let dropped_stores = DROPPED_STORES.load(SeqCst);
        if self.swept_stores == Some(dropped_stores) {
            return true;
        }
        let mut are_all_detached = true;
        for at in 0..self.files.len() {
            if self.files[at].as_ref().is_some_and(|handle| handle.is_store_dropped.load(SeqCst)) {
                are_all_detached &= self.detach(FileId(at as u32)).is_ok();
            }
        }
        self.swept_stores = are_all_detached.then_some(dropped_stores);
        are_all_detached
    }

    /// Registers memory with the kernel, which then needs no page lookup for each transfer. For huge pages the lookup
    /// takes most of a transfer's CPU time. Registered memory is pinned, counts against `RLIMIT_MEMLOCK`, and is not
    /// inherited by fork children. Regions of some 64 MiB are best: larger ones stay pinned for longer than needed,
    /// smaller ones cost more calls.
    ///
    /// # Errors
    ///
    /// Returns the memory with the error. Transfers also work without registration. `ENOMEM` over `RLIMIT_MEMLOCK`.
    /// `EINVAL` if the memory overlaps other memory of this ring. `EBUSY` if it overlaps a range of another ring but is
    /// not equal to it. `ENOSPC` if the table is full. `EOPNOTSUPP` if threads do the transfers.
    pub fn register(&mut self, memory: Box<dyn Buffer>) -> Result<RegionId, (io::Error, Box<dyn Buffer>)> {
        let tables = match self.check_process().and_then(|()| self.backend.kernel_ring()) {
            Ok(tables) => tables,
            Err(error) => return Err((error, memory)),
        };
        let has_table =
            *self.has_memory_table.get_or_insert_with(|| tables.make_memory_table(MEMORY_TABLE_LEN).is_ok());
        let result = self.regions.add(memory, |table_index, addr, len_bytes| {
            if !has_table {
                return Err(errno::error(EOPNOTSUPP));
            }
            // SAFETY: the region keeps the memory alive while it is registered (invariant 2, trait's promise).
            unsafe { tables.register_memory(table_index, addr, len_bytes) }
        });
        stats::add(if result.is_ok() { Counter::RegionsRegistered } else { Counter::RegionsRefused }, 1);
        result
    }

    /// Excludes registered memory from later transfers. In-flight transfers still use its registration.
    pub fn retire(&mut self, id: RegionId) {
        self.regions.retire(id);
    }

    /// Unregisters memory and returns it. After that the kernel does not access the memory any more.
    ///
    /// # Errors
    ///
    /// `EBUSY` while transfers in that memory are in flight; `EINVAL` if the id is not registered.
    pub fn unregister(&mut self, id: RegionId) -> io::Result<Box<dyn Buffer>> {
        self.check_process()?;
        let (addr, len_bytes) = self.regions.range(id).ok_or_else(|| errno::error(EINVAL))?;
        let is_inside = |at: usize| (addr..addr + len_bytes).contains(&at);
        if self.in_flight_requests().any(|(_, request)| is_inside(request.buffer.addr().as_ptr() as usize)) {
            return Err(errno::error(EBUSY));
        }
        self.backend.kernel_ring()?.unregister_memory(id.0)?;
        stats::sub(Counter::RegionsRegistered, 1);
        self.regions.remove(id).ok_or_else(|| errno::error(EINVAL))
    }
}
