//! [`Segments`]: which parts of one file are in memory, and which have a copy in the spill store.

use super::Spill;
use super::extents::Extent;
use crate::error::Result;
use pagemill_cache::Mapping;
use pagemill_core::sync::{Acquire, Guarded, Release};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Maximum number of pages of a segment: one bit of a [`PageSet`] each.
pub const MAX_PAGES: u64 = 64;

/// A set of pages of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageSet(u64);

impl PageSet {
    /// Returns the set of these pages.
    pub fn of(pages: Range<u64>) -> Self {
        debug_assert!(pages.start <= pages.end && pages.end <= MAX_PAGES, "{pages:?} are pages of one segment");
        let below = |end: u64| if end == MAX_PAGES { u64::MAX } else { (1 << end) - 1 };
        Self(below(pages.end) & !below(pages.start))
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn count(self) -> u64 {
        u64::from(self.0.count_ones())
    }

    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub fn both(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub fn contains(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }

    /// Returns the first page of the set at or after `page`.
    pub fn next_in(self, page: u64) -> Option<u64> {
        let rest = self.without(Self::of(0..page)).0;
        (rest != 0).then(|| u64::from(rest.trailing_zeros()))
    }

    /// Returns the first page that is not in the set, at or after `page`. May be [`MAX_PAGES`].
    pub fn next_outside(self, page: u64) -> u64 {
        Self(!self.0).next_in(page).unwrap_or(MAX_PAGES)
    }

    /// Returns the runs of consecutive pages in ascending order.
    pub fn runs(self) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.next_in(at)?;
            at = self.next_outside(start);
            Some(start..at)
        })
    }
}

/// The state of a segment. Changed only under the segment's lock (`Spill::lock`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    /// The space of its copy in the store.
    pub copy: Option<Extent>,
    /// Pages that the copy has.
    pub pages: PageSet,
    /// Whether the file's mapping has the segment's pages. If it has them and there is a copy, both have the same bytes. If
    /// not, pages of the mapping in the segment's range have no meaning.
    pub is_resident: bool,
    /// Whether the segment was used since its last turn in the eviction order.
    pub is_recent: bool,
    /// Number of the segment's entry in the eviction order.
    pub entry_number: u64,
}

/// The segments of a file that have data. Parts of the file without a segment are holes.
pub(crate) struct Segments {
    pub spill: Arc<Spill>,
    /// Number of the file, unique in this [`Spill`]. Selects the locks of its segments.
    pub file_number: u64,
    by_index: Guarded<BTreeMap<u64, Segment>>,
    /// Nothing moves to the store or back: the file is being truncated or has ended. Set before the lock of a segment is
    /// acquired, and read with this lock held.
    is_frozen: AtomicBool,
    /// Nothing moves to the store: views and other direct users of the mapping need the pages. Set and read as
    /// `is_frozen`.
    is_kept_in_memory: AtomicBool,
}

impl Segments {
    pub fn new(spill: Arc<Spill>, file_number: u64) -> Self {
        let (is_frozen, is_kept_in_memory) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { spill, file_number, by_index: Guarded::default(), is_frozen, is_kept_in_memory }
    }

    pub fn get(&self, index: u64) -> Option<Segment> {
        self.by_index.with(|segments| segments.get(&index).copied())
    }

    pub fn set(&self, index: u64, segment: Segment) {
        self.by_index.with(|segments| segments.insert(index, segment));
    }

    pub fn remove(&self, index: u64) {
        self.by_index.with(|segments| segments.remove(&index));
    }

    pub fn note_use(&self, index: u64) {
        self.by_index.with(|segments| {
            if let Some(segment) = segments.get_mut(&index) {
                segment.is_recent = true;
            }
        });
    }

    /// Stores the state of a segment that has a copy now, and removes its pages from the mapping. Returns the bytes of
    /// memory that became free.
    ///
    /// Both happen under the lock of the list, so that a search for data finds the segment in either place.
    pub fn evict(&self, index: u64, segment: Segment, mapping: &Mapping) -> u64 {
        debug_assert!(segment.copy.is_some() && !segment.is_resident, "the copy is complete");
        self.by_index.with(|segments| {
            segments.insert(index, segment);
            let range = self.spill.range_of(index);
            // After an error a part of the pages stays in memory, unused.
            mapping.punch_hole(range.start, range.end - range.start).unwrap_or(0)
        })
    }

    /// Returns the indices of the file's segments in this range.
    pub fn indices(&self, range: Range<u64>) -> Vec<u64> {
        self.by_index.with(|segments| segments.range(range).map(|(index, _)| *index).collect())
    }

    /// Returns whether the segment with this index is resident and has the entry with this number in the eviction order.
    pub fn has_entry(&self, index: u64, number: u64) -> bool {
        self.get(index).is_some_and(|segment| segment.is_resident && segment.entry_number == number)
    }

    pub fn is_frozen(&self) -> bool {
        self.is_frozen.load(Acquire)
    }

    pub fn set_frozen(&self, is_frozen: bool) {
        self.is_frozen.store(is_frozen, Release);
    }

    pub fn is_kept_in_memory(&self) -> bool {
        self.is_kept_in_memory.load(Acquire)
    }

    pub fn set_kept_in_memory(&self, is_kept_in_memory: bool) {
        self.is_kept_in_memory.store(is_kept_in_memory, Release);
    }

    /// As [`Mapping::seek_data_in`], with the pages that are in the store only.
    pub fn seek_data_in(&self, mapping: &Mapping, range: Range<u64>) -> Result<Option<u64>> {
        self.spill.cache.check_process()?;
        self.by_index.with(|segments| {
            let resident = mapping.seek_data_in(range.clone())?;
            // The file may have become shorter since.
            let end = mapping.size_bytes().min(range.end);
            if range.start >= end {
                return Ok(None);
            }
            let last = self.spill.index_of(resident.unwrap_or(end));
            let spilled = segments.range(self.spill.index_of(range.start)..=last).find_map(|(index, segment)| {
                let start = self.spill.range_of(*index).start;
                let pages = if segment.is_resident { PageSet::default() } else { segment.pages };
                let page = pages.next_in(range.start.saturating_sub(start) / self.spill.page_bytes)?;
                Some((start + page * self.spill.page_bytes).max(range.start))
            });
            Ok(spilled.into_iter().chain(resident).min().filter(|at| *at < end))
        })
    }

    /// As [`Mapping::seek_hole_in`], with the pages that are in the store only.
    pub fn seek_hole_in(&self, mapping: &Mapping, range: Range<u64>) -> Result<u64> {
        self.spill.cache.check_process()?;
        self.by_index.with(|segments| {
            let start = range.start;
            let mut at = mapping.seek_hole_in(range.clone())?;
            // The file may have become shorter since.
            let end = mapping.size_bytes().min(range.end).max(start);
            while at < end {
                let whole = self.spill.range_of(self.spill.index_of(at));
                let segment = segments.get(&self.spill.index_of(at)).filter(|segment| !segment.is_resident);
                let page = (at - whole.start) / self.spill.page_bytes;
                let hole_page = segment.map_or(page, |segment| segment.pages.next_outside(page));
                if hole_page == page {
                    return Ok(at);
                }
                let hole = (whole.start + hole_page * self.spill.page_bytes).min(whole.end);
                if hole >= end {
                    break;
                }
                at = match mapping.seek_hole_in(hole..end) {
                    Ok(at) => at,
                    // The file became shorter: its end is a hole.
                    Err(pagemill_core::Error::PastEnd { size_bytes, .. }) => return Ok(size_bytes.clamp(start, end)),
                    Err(error) => return Err(error.into()),
                };
            }
            Ok(end)
        })
    }
}

impl std::fmt::Debug for Segments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Segments").field("file_number", &self.file_number).finish_non_exhaustive()
    }
}

/// Freezes a file's segments until it is dropped.
pub(crate) struct Frozen<'segments>(&'segments Segments);

impl<'segments> Frozen<'segments> {
    pub fn begin(segments: &'segments Segments) -> Self {
        segments.set_frozen(true);
        Self(segments)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.set_frozen(false);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Sets of single pages, of all pages, and with runs at both ends must report their runs and gaps.
    #[test]
    fn page_sets_list_their_runs() {
        let set = PageSet::of(0..3).with(PageSet::of(5..6)).with(PageSet::of(62..64));
        assert_eq!(set.runs().collect::<Vec<_>>(), [0..3, 5..6, 62..64]);
        assert_eq!((set.count(), set.next_in(3), set.next_in(6), set.next_outside(62)), (6, Some(5), Some(62), 64));
        assert_eq!(set.without(PageSet::of(1..64)).runs().next(), Some(0..1));
        let all = PageSet::of(0..64);
        assert_eq!((all.count(), all.runs().next(), all.next_outside(0)), (64, Some(0..64), 64));
        assert!(all.contains(set) && !set.contains(all) && PageSet::of(7..7).is_empty());
        assert_eq!(PageSet::default().next_in(0), None);
    }
}
