//! Data of regular files: mappings of the page cache, made when a file gets its first byte.

use super::volatile::Purge;
use super::{Inner, STALE};
use crate::active::Active;
use crate::error::{Error, Result};
use crate::file_data::{Allocate, FileData};
use crate::inode::{Inode, InodeHandle};
use crate::quota::Domain;
use crate::spill::{Attempt, Spill};
use crate::watch::EventKind;
use pagemill_cache::Mapping;
use pagemill_core::sync::coarse_ns;
use pagemill_slab::{Handle, enter};
use pagemill_store::Store;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Time after which a read sets the time of the last access anew, as with `relatime` in Linux.
const ACCESS_TIME_NS: i64 = 24 * 3600 * 1_000_000_000;

impl Inner {
    /// Returns the data of a regular file, if it has some.
    pub fn data_of(&self, inode: &Inode) -> Option<Arc<FileData>> {
        let has_data = inode.is_regular() && inode.data != 0;
        has_data.then(|| self.files.get(Handle::from_bits(inode.data), &enter()).cloned()).flatten()
    }

    /// Returns the data of a file in use. Creates them if the file has none. The caller has the lock `writing`.
    pub fn data_for_write<'a>(&self, active: &'a Active) -> Result<&'a Arc<FileData>> {
        match active.data.get() {
            Some(data) => Ok(data),
            None => self.attach(active, self.cache.create()?, false),
        }
    }

    /// Gives a file its data.
    fn attach<'a>(&self, active: &'a Active, mapping: Mapping, has_store: bool) -> Result<&'a Arc<FileData>> {
        let domain = self.domains.get(self.inode(active.inode)?.quota);
        let segments = self.spill.as_ref().filter(|_| !has_store).map(Spill::new_segments);
        let data = Arc::new(FileData { mapping, domain, charged: AtomicU64::new(0), has_store, segments });
        let handle = self.files.insert(data.clone())?;
        let updated = self.update_inode(active.inode, |old| Inode { data: handle.to_bits(), ..*old });
        updated.inspect_err(|_| _ = self.files.remove(handle))?;
        Ok(active.data.get_or_init(|| data))
    }

    /// Gives an empty file a store, from which its pages are read and to which they are written back.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the file has data, an error in a fork child, and those of the store.
    pub fn attach_store(&self, active: &Active, store: Arc<dyn Store>) -> Result<()> {
        self.cache.check_process()?;
        let _writing = active.writing.lock();
        if active.data.get().is_some() {
            return Err(Error::Busy { what: "a file with data gets no store" });
        }
        self.attach(active, self.cache.open(store)?, true).map(|_| ())
    }

    pub fn size_of(&self, active: &Active) -> u64 {
        active.data.get().map_or(0, |data| data.mapping.size_bytes())
    }

    /// Writes bytes into a file at `offset`, or at its end with `None`. Returns the number of bytes written.
    pub fn write(&self, active: &Active, from: &[u8], offset: Option<u64>, keeps_set_id: bool) -> Result<usize> {
        if from.is_empty() {
            return Ok(0);
        }
        self.cache.check_process()?;
        let _writing = active.writing.lock();
        let offset = offset.unwrap_or_else(|| self.size_of(active));
        if offset.checked_add(from.len() as u64).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Error::Invalid { what: "an offset beyond the largest one" });
        }
        self.note_modified(active.inode, keeps_set_id)?;
        let data = self.data_for_write(active)?;
        let written = self.write_bytes(data, from, offset, |which| self.purge_one(which))?;
        self.watches.notify(EventKind::Modified, active.ino, b"");
        Ok(written)
    }

    /// Writes bytes at `offset`. If the file system is full, calls `purge` for files in memory, which returns whether
    /// one was purged, then moves data to the spill store; if that is full, calls `purge` for files anywhere, or waits
    /// while other threads move segments. Returns the number of bytes written, which may be fewer than `from` has. The
    /// caller has the lock `writing`.
    fn write_bytes(
        &self,
        data: &Arc<FileData>,
        from: &[u8],
        offset: u64,
        purge: impl Fn(Purge) -> bool,
    ) -> Result<usize> {
        let write = |from: &[u8], offset| match &data.domain {
            None => Ok(data.mapping.write_at(from, offset)?),
            Some(domain) => self.write_charged(data, domain, from, offset),
        };
        if let Some(segments) = data.movable_segments() {
            return segments.spill.write(data, segments, from, offset, write, purge);
        }
        let mut begun_ns = None;
        loop {
            let attempt = self.spill.as_ref().map(|spill| (spill, spill.begin_attempt()));
            let written = write(from, offset);
            if !matches!(written, Err(Error::NoSpace { .. })) {
                return written;
            }
            let begun_ns = *begun_ns.get_or_insert_with(coarse_ns);
            let move_data = |(spill, mut attempt): (&Arc<Spill>, Attempt)| {
                let room = spill.make_room(from.len() as u64, None, &mut attempt);
                spill.make_space(room, &attempt, begun_ns, &purge)
            };
            let has_room = purge(Purge::Memory) || attempt.is_some_and(move_data);
            if !has_room {
                return written;
            }
        }
    }

    /// Writes into a file with a quota: charges the missing pages first, and writes as much as the quota has room for.
    fn write_charged(&self, data: &FileData, domain: &Domain, from: &[u8], offset: u64) -> Result<usize> {
        let page = self.page_bytes();
        let start = offset / page * page;
        let end = offset.saturating_add(from.len() as u64);
        let missing = |end: u64| {
            let end = end.next_multiple_of(page);
            end - start - data.allocated_in(start, end, page)
        };
        let mut end = end;
        while let Err(error) = domain.charge_bytes(missing(end)) {
            // Writes only what fits. Another thread may use up the room meanwhile, so the bound falls in each round.
            let fitting = (start + domain.room_bytes() / page * page).min((end - 1) / page * page);
            if fitting <= offset {
                return Err(error);
            }
            end = fitting;
        }
        let charged = missing(end);
        // A huge folio covers more than the bytes written.
        let huge = self.cache.huge_bytes() as u64;
        let around = (offset / huge * huge, end.next_multiple_of(huge));
        let before = data.allocated_in(around.0, around.1, page);
        let written = data.mapping.write_at(&from[..(end - offset) as usize], offset);
        let grown = data.allocated_in(around.0, around.1, page).saturating_sub(before);
        data.charged.fetch_add(grown, Relaxed);
        if grown > charged {
            domain.charge_excess(grown - charged);
        } else {
            domain.discharge_bytes(charged - grown);
        }
        Ok(written?)
    }

    /// Reads bytes at `offset` into `to`. Returns the number of bytes read, as [`FileData::read`].
    pub fn read(&self, active: &Active, to: &mut [u8], offset: u64) -> Result<usize> {
        let Some(data) = active.data.get() else { return Ok(0) };
        let read = data.read(to, offset)?;
        self.note_accessed(active.inode);
        Ok(read)
    }

    /// Sets the length of a file.
    pub fn truncate(&self, active: &Active, size_bytes: u64, keeps_set_id: bool) -> Result<()> {
        self.cache.check_process()?;
        let _writing = active.writing.lock();
        if size_bytes > i64::MAX as u64 {
            return Err(Error::Invalid { what: "a length beyond the largest offset" });
        }
        if size_bytes != 0 || active.data.get().is_some() {
            let data = self.data_for_write(active)?;
            let done = data.truncate(size_bytes);
            data.reconcile(self.page_bytes());
            done?;
        }
        self.note_modified(active.inode, keeps_set_id)?;
        self.watches.notify(EventKind::Modified, active.ino, b"");
        Ok(())
    }

    /// Allocates, zeroes or frees a range of a file.
    pub fn allocate(
        &self,
        active: &Active,
        how: Allocate,
        offset: u64,
        len_bytes: u64,
        keeps_set_id: bool,
    ) -> Result<()> {
        if len_bytes == 0 {
            return Err(Error::Invalid { what: "a range of 0 bytes" });
        }
        let most_bytes = i64::MAX as u64;
        let end = offset.checked_add(len_bytes).filter(|end| *end <= most_bytes);
        let end = end.ok_or(Error::FileTooLarge { size_bytes: offset.saturating_add(len_bytes), most_bytes })?;
        self.cache.check_process()?;
        let _writing = active.writing.lock();
        let size = self.size_of(active);
        let keeps_size = matches!(how, Allocate::KeepSize | Allocate::ZeroKeepSize);
        if keeps_size && end > size {
            return Err(Error::Unsupported { what: "memory behind the end of a file" });
        }
        let data = self.data_for_write(active)?;
        match how {
            Allocate::Punch => {
                let done = data.punch_hole(offset, len_bytes);
                data.reconcile(self.page_bytes());
                done?;
            }
            Allocate::Zero | Allocate::ZeroKeepSize => {
                data.zero_range(offset, len_bytes.min(size.saturating_sub(offset)))?;
                self.fill_holes(data, offset, end)?;
            }
            Allocate::Extend | Allocate::KeepSize => self.fill_holes(data, offset, end)?,
        }
        self.note_modified(active.inode, keeps_set_id)?;
        self.watches.notify(EventKind::Modified, active.ino, b"");
        Ok(())
    }

    /// Gives all pages of a range memory, and extends the file to the end of the range. After an error, pages that had
    /// no memory have none again, and the length is as before. The caller has the lock `writing`.
    fn fill_holes(&self, data: &Arc<FileData>, start: u64, end: u64) -> Result<()> {
        let (old_size, page) = (data.mapping.size_bytes(), self.page_bytes());
        let mut filled = Vec::new();
        if end > old_size {
            data.truncate(end)?;
        }
        let fill = |filled: &mut Vec<(u64, u64)>| {
            let mut at = start / page * page;
            while at < end {
                let hole = data.seek_hole_in(at..end)?;
                if hole >= end {
                    break;
                }
                let hole_end = data.seek_data_in(hole..end)?.unwrap_or(end);
                self.fill_hole(data, hole, hole_end, filled)?;
                at = hole_end;
            }
            Ok(())
        };
        let done = fill(&mut filled);
        if done.is_err() {
            for (at, len_bytes) in filled {
                let _ = data.punch_hole(at, len_bytes);
            }
            if end > old_size {
                let _ = data.truncate(old_size);
            }
            data.reconcile(page);
        }
        done
    }

    fn fill_hole(&self, data: &Arc<FileData>, start: u64, end: u64, filled: &mut Vec<(u64, u64)>) -> Result<()> {
        static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
        let mut at = start;
        while at < end {
            let zeros = &ZEROS[..ZEROS.len().min((end - at) as usize)];
            let written = self.write_bytes(data, zeros, at, |_| false)?;
            filled.push((at, written as u64));
            at += written as u64;
        }
        Ok(())
    }

    /// Frees the data of a file that was freed. Its memory is free at once, although readers may still have a
    /// reference.
    pub(super) fn free_data(&self, inode: &Inode) {
        let Some(data) = self.data_of(inode) else { return };
        let _ = self.files.remove(Handle::from_bits(inode.data));
        match &data.segments {
            Some(segments) => segments.spill.free(&data, segments),
            None if !data.has_store => _ = data.mapping.truncate(0),
            None => {}
        }
        if let Some(domain) = &data.domain {
            domain.discharge_bytes(data.charged.swap(0, Relaxed));
        }
    }

    /// Sets the times of a change of data, and clears the set-user-ID and set-group-ID bits after a change by an
    /// unprivileged caller.
    fn note_modified(&self, handle: InodeHandle, keeps_set_id: bool) -> Result<()> {
        let now_ns = self.clock.now_ns();
        let mode = |inode: &Inode| if keeps_set_id { inode.mode } else { inode.mode_without_set_id() };
        let guard = enter();
        let inode = self.inodes.get(handle, &guard).ok_or(STALE)?;
        if inode.modified_ns == now_ns && inode.changed_ns == now_ns && inode.mode == mode(inode) {
            return Ok(());
        }
        drop(guard);
        self.update_inode(handle, |old| Inode { modified_ns: now_ns, changed_ns: now_ns, mode: mode(old), ..*old })
    }

    /// Sets the time of the last access if it is older than the last change, or than a day. Without memory, the time
    /// stays as it is.
    pub(super) fn note_accessed(&self, handle: InodeHandle) {
        let now_ns = self.clock.now_ns();
        let guard = enter();
        let Some(inode) = self.inodes.get(handle, &guard) else { return };
        let is_due = inode.accessed_ns <= inode.modified_ns
            || inode.accessed_ns <= inode.changed_ns
            || now_ns.saturating_sub(inode.accessed_ns) >= ACCESS_TIME_NS;
        if is_due && inode.accessed_ns != now_ns {
            drop(guard);
            let _ = self.update_inode(handle, |old| Inode { accessed_ns: now_ns, ..*old });
        }
    }
}
