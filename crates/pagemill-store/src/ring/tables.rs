//! Tables of a ring in the kernel: registered files and registered memory.
#![allow(unsafe_code)] // registers memory that it owns

use super::Ring;
use super::regions::RegionId;
use crate::buffer::Buffer;
use crate::errno::{self, EBUSY, EINVAL, EOPNOTSUPP};
use crate::file::{FileStore, Handle, TransferWay};
use pagemill_core::stats::{self, Counter};
use std::io;
use std::sync::Arc;

/// Entries of the memory table: 64 GiB in pieces of 64 MiB.
pub(super) const REGIONS: u16 = 1024;

/// Entries of the file table, two for each file.
const FILES: u32 = 256;

/// A file attached to a ring ([`Ring::attach`]).
///
/// Example: [`Ring`](super::Ring).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub(super) u32);

impl FileId {
    /// Returns its entry in the kernel's table, if the table is large enough.
    pub(super) fn place(self, way: TransferWay) -> Option<u32> {
        let place = 2 * self.0 + u32::from(way == TransferWay::Buffered);
        (place < FILES).then_some(place)
    }
}

impl<B: Buffer> Ring<B> {
    /// Attaches a file, so that transfers can name it. The file stays open until it is detached. Attaching a file again
    /// returns the same id.
    ///
    /// # Errors
    ///
    /// `EBADF` in a fork child.
    pub fn attach(&mut self, store: &FileStore) -> io::Result<FileId> {
        self.attach_handle(store.handle())
    }

    pub(crate) fn attach_handle(&mut self, handle: &Arc<Handle>) -> io::Result<FileId> {
        self.check()?;
        let is_it = |file: &Option<Arc<Handle>>| file.as_ref().is_some_and(|file| Arc::ptr_eq(file, handle));
        if let Some(at) = self.files.iter().position(is_it) {
            return Ok(FileId(at as u32));
        }
        let at = self.files.iter().position(Option::is_none).unwrap_or(self.files.len());
        if at == self.files.len() {
            self.files.push(None);
        }
        let id = FileId(at as u32);
        self.files[at] = Some(handle.clone());
        self.register_file(id, [handle.descriptor(TransferWay::Direct), handle.descriptor(TransferWay::Buffered)]);
        Ok(id)
    }

    /// Best effort: a file that is not in the kernel's table is used by its descriptor.
    fn register_file(&mut self, id: FileId, descriptors: [i32; 2]) {
        let Ok(tables) = self.backend.tables() else { return };
        let (Some(direct), Some(buffered)) = (id.place(TransferWay::Direct), id.place(TransferWay::Buffered)) else {
            return;
        };
        self.has_file_table = self.has_file_table || tables.make_file_table(FILES).is_ok();
        // After a failure the entry may still name another file, so the table is not used any more.
        self.has_file_table = self.has_file_table
            && tables.register_file(direct, descriptors[0]).is_ok()
            && tables.register_file(buffered, descriptors[1]).is_ok();
    }

    /// Detaches a file.
    ///
    /// # Errors
    ///
    /// `EBUSY` while transfers of it are in flight.
    pub fn detach(&mut self, file: FileId) -> io::Result<()> {
        self.check()?;
        if self.requests().any(|(_, request)| request.file == file) {
            return Err(errno::error(EBUSY));
        }
        if self.files.get_mut(file.0 as usize).and_then(Option::take).is_some() {
            self.register_file(file, [-1, -1]);
        }
        Ok(())
    }

    /// Detaches every file whose `FileStore` was dropped, unless transfers of it are in flight. Until this is called,
    /// the ring keeps such files open.
    pub fn sweep(&mut self) {
        for at in 0..self.files.len() {
            if self.files[at].as_ref().is_some_and(|handle| Arc::strong_count(handle) == 1) {
                let _ = self.detach(FileId(at as u32));
            }
        }
    }

    /// Registers memory of transfers with the kernel, which then needs no page lookup for each. For huge pages the
    /// lookup takes most of a transfer's CPU time. The memory is pinned, counts against `RLIMIT_MEMLOCK`, and is not in
    /// fork children. Pieces of some 64 MiB are best: larger ones stay pinned longer than needed, smaller ones cost
    /// more calls.
    ///
    /// # Errors
    ///
    /// Returns the memory with the error; transfers work without registration, too. `ENOMEM` over the limit. `EINVAL`
    /// if it overlaps other memory of this ring. `EBUSY` if it overlaps a range of another ring but is not equal to it.
    /// `ENOSPC` if the table is full. `EOPNOTSUPP` if threads do the transfers.
    pub fn register(&mut self, memory: Box<dyn Buffer>) -> Result<RegionId, (io::Error, Box<dyn Buffer>)> {
        if let Err(error) = self.check() {
            return Err((error, memory));
        }
        let tables = match self.backend.tables() {
            Ok(tables) => tables,
            Err(error) => return Err((error, memory)),
        };
        let has_table = *self.has_memory_table.get_or_insert_with(|| tables.make_memory_table(REGIONS).is_ok());
        let result = self.regions.add(memory, |place, addr, len_bytes| {
            if !has_table {
                return Err(errno::error(EOPNOTSUPP));
            }
            // SAFETY: the region keeps the memory from here on (invariant 2, trait's promise).
            unsafe { tables.register_memory(place, addr, len_bytes) }
        });
        stats::add(if result.is_ok() { Counter::RegionsRegistered } else { Counter::RegionsRefused }, 1);
        result
    }

    /// Retires registered memory: transfers that begin later do not use its registration. In-flight ones still do.
    pub fn retire(&mut self, id: RegionId) {
        self.regions.retire(id);
    }

    /// Unregisters memory and returns it. The kernel does not use it any more when this returns.
    ///
    /// # Errors
    ///
    /// `EBUSY` while transfers are in flight there, `EINVAL` if the id is not registered.
    pub fn unregister(&mut self, id: RegionId) -> io::Result<Box<dyn Buffer>> {
        self.check()?;
        let (addr, len_bytes) = self.regions.range(id).ok_or_else(|| errno::error(EINVAL))?;
        let is_inside = |at: usize| (addr..addr + len_bytes).contains(&at);
        if self.requests().any(|(_, request)| is_inside(request.buffer.addr().as_ptr() as usize)) {
            return Err(errno::error(EBUSY));
        }
        self.backend.tables()?.unregister_memory(id.0)?;
        stats::sub(Counter::RegionsRegistered, 1);
        self.regions.remove(id).ok_or_else(|| errno::error(EINVAL))
    }
}
