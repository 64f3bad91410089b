//! Truncation, holes and zeros in files with segments in the spill store.

use super::Spill;
use super::extents::Extent;
use super::segments::{Frozen, PageSet, Segment, Segments};
use crate::error::Result;
use crate::file_data::FileData;
use pagemill_core::sync::Relaxed;
use std::ops::Range;

impl Spill {
    /// Sets the length of a file. The caller holds the lock `writing`, or is the file's only user.
    ///
    /// # Errors
    ///
    /// Those of [`pagemill_cache::Mapping::truncate`], and of the store. After an error of the store the length is unchanged,
    /// but bytes behind `size_bytes` in the same segment may read zero.
    pub fn truncate(&self, data: &FileData, segments: &Segments, size_bytes: u64) -> Result<()> {
        if size_bytes >= data.mapping.size_bytes() {
            return Ok(data.mapping.truncate(size_bytes)?);
        }
        let frozen = Frozen::begin(segments);
        let (last, first_behind) = (self.index_of(size_bytes), size_bytes.div_ceil(self.segment_bytes));
        if last < first_behind {
            let inside = size_bytes - self.range_of(last).start;
            self.clear_in_segment(data, segments, last, inside..self.segment_bytes, Clear::Punch, || Ok(()))?;
        }
        // Waits for moves that began before: a restore behind the new end would make the file longer again.
        segments.indices(first_behind..u64::MAX).into_iter().for_each(|index| drop(self.lock(segments, index)));
        data.mapping.truncate(size_bytes)?;
        // Counted before the segments are removed, because an eviction that waits in `take_turn` then continues.
        self.count_release();
        let copies = self.take_copies(segments, first_behind);
        drop(frozen);
        copies.into_iter().for_each(|(copy, pages)| self.extents.free_discharged(copy, pages));
        Ok(())
    }

    /// Removes the segments from `first` on. Returns their copies, which are discharged, and which the caller frees: no
    /// eviction waits for the store.
    fn take_copies(&self, segments: &Segments, first: u64) -> Vec<(Extent, PageSet)> {
        let indices = segments.indices(first..u64::MAX);
        indices.into_iter().filter_map(|index| self.take_segment(segments, index)).collect()
    }

    /// Frees the memory of a range, which reads zero then. The caller has the lock `writing`.
    ///
    /// # Errors
    ///
    /// Those of [`pagemill_cache::Mapping::punch_hole`], and of the store, after a part was freed.
    pub fn punch_hole(&self, data: &FileData, segments: &Segments, offset: u64, len_bytes: u64) -> Result<()> {
        self.clear_in_segments(data, segments, offset..offset.saturating_add(len_bytes), Clear::Punch, |range| {
            data.mapping.punch_hole(range.start, range.end - range.start)?;
            self.count_release();
            Ok(())
        })
    }

    /// Zeroes a range. Holes stay holes. The caller has the lock `writing`.
    ///
    /// # Errors
    ///
    /// Those of [`pagemill_cache::Mapping::zero_range`], and of the store, after a part was zeroed.
    pub fn zero_range(&self, data: &FileData, segments: &Segments, offset: u64, len_bytes: u64) -> Result<()> {
        self.clear_in_segments(data, segments, offset..offset.saturating_add(len_bytes), Clear::Zero, |range| {
            Ok(data.mapping.zero_range(range.start, range.end - range.start)?)
        })
    }

    /// Punches or zeroes a range of the file in all segments that it touches.
    fn clear_in_segments(
        &self,
        data: &FileData,
        segments: &Segments,
        range: Range<u64>,
        how: Clear,
        clear_in_memory: impl Fn(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        for index in segments.indices(self.index_of(range.start)..range.end.div_ceil(self.segment_bytes)) {
            let whole = self.range_of(index);
            let part = range.start.max(whole.start)..range.end.min(whole.end);
            let inside = part.start - whole.start..part.end - whole.start;
            self.clear_in_segment(data, segments, index, inside, how, || clear_in_memory(part.clone()))?;
        }
        Ok(())
    }

    /// Punches or zeroes a range of a segment. If the segment is resident, drops its copy and calls `clear_in_memory`. If
    /// it is spilled, [`Clear::Punch`] discards the whole pages of the range and zeroes its partial pages in the copy;
    /// [`Clear::Zero`] zeroes all of the range in the copy.
    fn clear_in_segment(
        &self,
        data: &FileData,
        segments: &Segments,
        index: u64,
        range: Range<u64>,
        how: Clear,
        clear_in_memory: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _locked = self.lock(segments, index);
        let Some(old) = segments.get(index) else { return Ok(()) };
        if old.is_resident {
            self.drop_copy(segments, index, &old);
            clear_in_memory()?;
            if self.pages_in_memory(data, index).is_some_and(PageSet::is_empty) {
                segments.remove(index);
            }
            return Ok(());
        }
        let (first, end) = (range.start.div_ceil(self.page_bytes), range.end / self.page_bytes);
        let removed = match how {
            Clear::Punch => old.pages.both(PageSet::of(first.min(end)..end)),
            Clear::Zero => PageSet::default(),
        };
        let zeroed = old.pages.without(removed).both(self.pages_touched(range.clone()));
        for run in zeroed.runs() {
            let start = range.start.max(run.start * self.page_bytes);
            let end = range.end.min(run.end * self.page_bytes);
            self.change_copy(&old, start..end, |bytes| bytes.fill(0))?;
        }
        let copy = old.copy.expect("a spilled segment has a copy");
        let pages = old.pages.without(removed);
        self.spilled_pages.fetch_sub(removed.count(), Relaxed);
        if pages.is_empty() {
            segments.remove(index);
            self.extents.free(copy, removed);
        } else {
            segments.set(index, Segment { pages, ..old });
            self.extents.discard(copy, removed);
        }
        Ok(())
    }

    /// Frees the pages, segments and copies of a file that has no users.
    pub fn free(&self, data: &FileData, segments: &Segments) {
        if self.cache.check_process().is_err() {
            return;
        }
        // Evictions wait from here on, until the memory is free.
        segments.set_frozen(true);
        let _ = data.mapping.truncate(0);
        self.count_release();
        let copies = self.take_copies(segments, 0);
        copies.into_iter().for_each(|(copy, pages)| self.extents.free_discharged(copy, pages));
    }
}

/// What happens to the pages of a range.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Clear {
    /// They become holes.
    Punch,
    /// They become zeros.
    Zero,
}
