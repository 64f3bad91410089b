//! Reads and writes of files with segments in the spill store.

use super::extents::Extent;
use super::segments::{PageSet, Segment, Segments};
use super::{Room, Spill, is_late, store_failed};
use crate::error::{Error, Result};
use crate::file_data::FileData;
use crate::fs::volatile::Purge;
use pagemill_core::sync::{Relaxed, coarse_ns};
use std::ops::Range;
use std::sync::Arc;

impl Spill {
    /// Reads bytes at `offset` into `to`. Returns the number of bytes read: fewer than `to` has at the end of the file,
    /// or before a segment that cannot be read.
    ///
    /// # Errors
    ///
    /// Those of the store and of the mapping, if nothing was read.
    pub fn read(&self, data: &Arc<FileData>, segments: &Segments, to: &mut [u8], offset: u64) -> Result<usize> {
        self.cache.check_process()?;
        let mut done = 0;
        while done < to.len() {
            let at = offset.saturating_add(done as u64);
            let end = to.len().min(done + (self.range_of(self.index_of(at)).end - at) as usize);
            match self.read_in_segment(data, segments, &mut to[done..end], at) {
                Ok(0) => break,
                Ok(more) => done += more,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn read_in_segment(&self, data: &Arc<FileData>, segments: &Segments, to: &mut [u8], offset: u64) -> Result<usize> {
        let (index, mut may_restore, begun_ns) = (self.index_of(offset), true, coarse_ns());
        loop {
            let (mut attempt, locked) = (self.begin_attempt(), self.lock(segments, index));
            let spilled = match segments.get(index) {
                Some(segment) if !segment.is_resident => segment,
                found => {
                    if found.is_some_and(|segment| !segment.is_recent) {
                        segments.note_use(index);
                    }
                    return Ok(data.mapping.read_at(to, offset)?);
                }
            };
            if !may_restore || segments.is_frozen() {
                return self.read_copy(data, index, &spilled, to, offset);
            }
            match self.restore(data, index, &spilled, &mut attempt) {
                Ok(()) => return Ok(data.mapping.read_at(to, offset)?),
                Err(Error::NoSpace { .. }) => {
                    drop(locked);
                    let room = self.make_room(self.bytes_of(spilled.pages), None, &mut attempt);
                    may_restore = room == Room::Freed && !is_late(begun_ns);
                }
                Err(error @ Error::Memory(pagemill_core::Error::Store { .. })) => return Err(error),
                Err(_) => may_restore = false,
            }
        }
    }

    /// Reads bytes of a spilled segment from the store. The caller holds the segment's lock.
    fn read_copy(&self, data: &FileData, index: u64, segment: &Segment, to: &mut [u8], offset: u64) -> Result<usize> {
        let copy = segment.copy.expect("a spilled segment has a copy");
        let len = data.mapping.size_bytes().saturating_sub(offset).min(to.len() as u64) as usize;
        let inside = offset - self.range_of(index).start;
        self.extents.with_buffer(|buffer| {
            let (start, end) = (inside as usize, inside as usize + len);
            buffer[start..end].fill(0);
            let touched = self.pages_touched(inside..end as u64);
            let wanted = segment.pages.both(touched);
            self.extents.read(copy, wanted, buffer).map_err(store_failed("a read of the spill store"))?;
            to[..len].copy_from_slice(&buffer[start..end]);
            Ok(len)
        })
    }

    /// Returns the pages of a segment that a range of it touches.
    pub(super) fn pages_touched(&self, range: Range<u64>) -> PageSet {
        PageSet::of(range.start / self.page_bytes..range.end.div_ceil(self.page_bytes))
    }

    /// Writes bytes at `offset` through `write`, which writes into the mapping. Returns the number of bytes written,
    /// which may be fewer than `from` has. The caller holds the lock `writing`.
    ///
    /// If memory is used up, tries in this order, and repeats the write after each success:
    /// 1. `purge` of a volatile file in memory, which returns whether one was purged;
    /// 2. eviction of clean pages of files with a store of their own, and of segments;
    /// 3. for a spilled segment, an overwrite of its copy in the spill store, which ends the write;
    /// 4. writeback of dirty pages of files with a store of their own;
    /// 5. if the spill store is full, `purge` of any volatile file, or a wait for another thread's move.
    ///
    /// # Errors
    ///
    /// Those of `write`, and of the store, if nothing was written.
    pub fn write(
        &self,
        data: &Arc<FileData>,
        segments: &Segments,
        from: &[u8],
        offset: u64,
        write: impl Fn(&[u8], u64) -> Result<usize>,
        purge: impl Fn(Purge) -> bool,
    ) -> Result<usize> {
        debug_assert!(offset.checked_add(from.len() as u64).is_some(), "the caller checked the range");
        let mut done = 0;
        while done < from.len() {
            let at = offset + done as u64;
            let end = from.len().min(done + (self.range_of(self.index_of(at)).end - at) as usize);
            match self.write_in_segment(data, segments, &from[done..end], at, &write, &purge) {
                Ok(more) => done += more,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Writes at least one byte into a segment.
    fn write_in_segment(
        &self,
        data: &Arc<FileData>,
        segments: &Segments,
        from: &[u8],
        offset: u64,
        write: &impl Fn(&[u8], u64) -> Result<usize>,
        purge: &impl Fn(Purge) -> bool,
    ) -> Result<usize> {
        let (index, begun_ns) = (self.index_of(offset), coarse_ns());
        loop {
            let (mut attempt, locked) = (self.begin_attempt(), self.lock(segments, index));
            let before = segments.get(index);
            let spilled = before.filter(|segment| !segment.is_resident);
            let restored = spilled.map_or(Ok(()), |spilled| self.restore(data, index, &spilled, &mut attempt));
            let written = restored.and_then(|()| {
                self.begin_change(data, segments, index);
                write(from, offset)
            });
            if written.is_err() && before.is_none() {
                segments.remove(index);
            }
            drop(locked);
            let Err(error @ Error::NoSpace { .. }) = written else { return written };
            let wanted = spilled.map_or(from.len() as u64, |spilled| self.bytes_of(spilled.pages));
            let own = Some((segments.file_number, index));
            let is_late = is_late(begun_ns);
            let has_purged = !is_late && purge(Purge::Memory);
            let room = if has_purged { Room::Freed } else { self.make_room(wanted, own, &mut attempt) };
            if room == Room::Freed && !is_late {
                continue;
            }
            if let Some(done) = self.overwrite_in_store(data, segments, index, from, offset) {
                return done;
            }
            let may_continue = !is_late && self.clean_some(wanted, &attempt)
                || room != Room::Freed && self.make_space(room, &attempt, begun_ns, purge);
            if !may_continue {
                return Err(error);
            }
        }
    }

    /// Prepares a change of a resident segment, or of one without data. The caller holds the segment's lock.
    fn begin_change(&self, data: &Arc<FileData>, segments: &Segments, index: u64) {
        let Some(old) = segments.get(index) else {
            let (entry_number, pages) = (self.push_entry(data, index), PageSet::default());
            segments.set(index, Segment { copy: None, pages, is_resident: true, is_recent: true, entry_number });
            return;
        };
        // A dropped copy changes the segment, which notes the use, too.
        let is_noted = self.drop_copy(segments, index, &Segment { is_recent: true, ..old }) || old.is_recent;
        if !is_noted {
            segments.note_use(index);
        }
    }

    /// Overwrites bytes of a spilled segment in the store. Stops at the first page that the copy lacks, and at the end
    /// of the file. Returns `None` if that is before the first byte, or if the segment is resident.
    fn overwrite_in_store(
        &self,
        data: &FileData,
        segments: &Segments,
        index: u64,
        from: &[u8],
        offset: u64,
    ) -> Option<Result<usize>> {
        let _locked = self.lock(segments, index);
        let segment = segments.get(index).filter(|segment| !segment.is_resident)?;
        let start = offset - self.range_of(index).start;
        let pages_end = segment.pages.next_outside(start / self.page_bytes) * self.page_bytes;
        let in_file = data.mapping.size_bytes().saturating_sub(offset);
        let len = in_file.min(pages_end.saturating_sub(start)).min(from.len() as u64);
        let write =
            || self.change_copy(&segment, start..start + len, |bytes| bytes.copy_from_slice(&from[..len as usize]));
        (len > 0).then(|| write().map(|()| len as usize))
    }

    /// Changes bytes of a spilled segment in the store. The copy has all pages of the range. The caller holds the
    /// segment's lock.
    pub(super) fn change_copy(
        &self,
        segment: &Segment,
        range: Range<u64>,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let copy = segment.copy.expect("a spilled segment has a copy");
        let pages = self.pages_touched(range.clone());
        debug_assert!(segment.pages.contains(pages), "only pages of the copy are changed");
        self.extents.with_buffer(|buffer| {
            self.extents.read(copy, pages, buffer).map_err(store_failed("a read of the spill store"))?;
            change(&mut buffer[range.start as usize..range.end as usize]);
            self.extents.write(copy, pages, buffer).map_err(store_failed("a write to the spill store"))
        })
    }

    /// Brings all segments of a file into memory and removes them from the spill store. The file is not evicted any
    /// more until it is removed. May write back dirty pages of files with a store of their own, and wait for these
    /// stores. The caller holds the lock `writing`.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], errors of the store. The file's segments then move as before.
    pub fn keep_in_memory(&self, data: &Arc<FileData>, segments: &Segments) -> Result<()> {
        if segments.is_kept_in_memory() {
            return Ok(());
        }
        let (used, limit) = (data.allocated_bytes(self.page_bytes), self.cache.limit_bytes());
        if used > limit {
            return Err(Error::NoSpace { what: "bytes", used, limit });
        }
        segments.set_kept_in_memory(true);
        let mut keeping = Keeping { segments, is_done: false };
        let indices = segments.indices(0..u64::MAX);
        let restored = indices.iter().try_for_each(|index| {
            let begun_ns = coarse_ns();
            loop {
                let (mut attempt, locked) = (self.begin_attempt(), self.lock(segments, *index));
                let Some(spilled) = segments.get(*index).filter(|segment| !segment.is_resident) else {
                    return Ok(());
                };
                match self.restore(data, *index, &spilled, &mut attempt) {
                    Ok(()) => return Ok(()),
                    Err(error @ Error::NoSpace { .. }) => {
                        drop(locked);
                        let room = self.make_room(self.bytes_of(spilled.pages), None, &mut attempt);
                        let is_late = is_late(begun_ns);
                        if is_late || room != Room::Freed && !self.clean_some(self.bytes_of(spilled.pages), &attempt) {
                            return Err(error);
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
        });
        restored?;
        keeping.is_done = true;
        let copies = indices.into_iter().filter_map(|index| self.take_segment(segments, index));
        copies.for_each(|(copy, pages)| self.extents.free_discharged(copy, pages));
        Ok(())
    }

    /// Removes a segment. Returns its copy, which is discharged, and which the caller frees. The mapping does not
    /// change.
    pub(super) fn take_segment(&self, segments: &Segments, index: u64) -> Option<(Extent, PageSet)> {
        let _locked = self.lock(segments, index);
        let segment = segments.get(index)?;
        segments.remove(index);
        if !segment.is_resident {
            self.spilled_pages.fetch_sub(segment.pages.count(), Relaxed);
        } else if segment.copy.is_some() {
            self.unchanged_copies.fetch_sub(1, Relaxed);
        }
        segment.copy.map(|copy| {
            self.extents.discharge(segment.pages.count());
            (copy, segment.pages)
        })
    }
}

/// A file that is being brought into memory. After an error, or a panic of a store, its segments move as before.
struct Keeping<'file> {
    segments: &'file Segments,
    is_done: bool,
}

impl Drop for Keeping<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.segments.set_kept_in_memory(false);
        }
    }
}
