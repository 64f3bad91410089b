//! What a ring knows beforehand: files by number, memory by its pages.
#![allow(unsafe_code)] // registers memory that it owns

use super::Ring;
use super::regions::RegionId;
use crate::stats::{self, Counter};
use crate::store::buffer::Buffer;
use crate::store::errno::{self, EBUSY, EINVAL, EOPNOTSUPP};
use crate::store::file::{FileStore, Handle, Way};
use std::io;
use std::sync::Arc;

/// Places for memory in a ring's table: 64 GiB in pieces of 64 MiB.
pub(super) const REGIONS: u16 = 1024;

/// Places for files in a ring's table, two for each.
const FILES: u32 = 256;

/// A file that a ring knows ([`Ring::attach`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(pub(super) u32);

impl FileId {
    /// Where the kernel's table has it, if there is room for it.
    pub(super) fn place(self, way: Way) -> Option<u32> {
        let place = 2 * self.0 + u32::from(way == Way::Buffered);
        (place < FILES).then_some(place)
    }
}

impl<B: Buffer> Ring<B> {
    /// Lets transfers name a file. It stays open until it is detached. Attached twice it has one id.
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
        self.register_file(id, [handle.descriptor(Way::Direct), handle.descriptor(Way::Buffered)]);
        Ok(id)
    }

    /// Best effort: what is not in the kernel's table goes by its descriptor.
    fn register_file(&mut self, id: FileId, descriptors: [i32; 2]) {
        let Ok(tables) = self.backend.tables() else { return };
        let (Some(direct), Some(buffered)) = (id.place(Way::Direct), id.place(Way::Buffered)) else { return };
        self.has_file_table = self.has_file_table || tables.make_file_table(FILES).is_ok();
        // Of one that failed the place may still be another's: none is used then.
        self.has_file_table = self.has_file_table
            && tables.register_file(direct, descriptors[0]).is_ok()
            && tables.register_file(buffered, descriptors[1]).is_ok();
    }

    /// Forgets a file.
    ///
    /// # Errors
    ///
    /// `EBUSY` while transfers of it are in flight.
    pub fn detach(&mut self, file: FileId) -> io::Result<()> {
        self.check()?;
        if self.flights().any(|(_, flight)| flight.file == file) {
            return Err(errno::error(EBUSY));
        }
        if self.files.get_mut(file.0 as usize).and_then(Option::take).is_some() {
            self.register_file(file, [-1, -1]);
        }
        Ok(())
    }

    /// Forgets all files whose stores are gone and that no transfer is of. Otherwise these stay open.
    pub fn sweep(&mut self) {
        for at in 0..self.files.len() {
            if self.files[at].as_ref().is_some_and(|handle| Arc::strong_count(handle) == 1) {
                let _ = self.detach(FileId(at as u32));
            }
        }
    }

    /// Tells the kernel of memory that transfers will use: each finds its pages at once then, which for huge pages is most of
    /// its CPU time. The memory is pinned, counts against `RLIMIT_MEMLOCK`, and is not in fork children. Some 64 MiB at a
    /// time: more is kept longer than anybody wants, less costs a call more often.
    ///
    /// # Errors
    ///
    /// The memory comes back with it. `ENOMEM` over the limit, `EINVAL` for what overlaps other memory of this ring, `EBUSY` for
    /// what overlaps a differently cut piece of another's, `ENOSPC` without a free place, `EOPNOTSUPP` where threads do the
    /// transfers. These go on without it.
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

    /// No transfer that begins from here on uses registered memory as such. Those under way do.
    pub(crate) fn retire(&mut self, id: RegionId) {
        self.regions.retire(id);
    }

    /// Takes memory back: the kernel does not know it any more when this returns.
    ///
    /// # Errors
    ///
    /// `EBUSY` while transfers are in flight there, `EINVAL` for what is not registered.
    pub fn unregister(&mut self, id: RegionId) -> io::Result<Box<dyn Buffer>> {
        self.check()?;
        let (addr, len_bytes) = self.regions.range(id).ok_or_else(|| errno::error(EINVAL))?;
        let is_inside = |at: usize| (addr..addr + len_bytes).contains(&at);
        if self.flights().any(|(_, flight)| is_inside(flight.buffer.addr().as_ptr() as usize)) {
            return Err(errno::error(EBUSY));
        }
        self.backend.tables()?.unregister_memory(id.0)?;
        stats::sub(Counter::RegionsRegistered, 1);
        self.regions.remove(id).ok_or_else(|| errno::error(EINVAL))
    }
}
