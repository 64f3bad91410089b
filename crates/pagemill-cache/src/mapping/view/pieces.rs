//! Mapping and unmapping of folios in windows.
#![allow(unsafe_code)] // maps and copies pages

use super::entry::{self, BLOCK_ENTRIES, Entry};
use super::registry;
use super::window::{Window, Writes};
use crate::folio::Frame;
use crate::folio::word::Kind;
use crate::mapping::Pin;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Backoff;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::fault::AllSignalsBlocked;
use pagemill_sys::window::Errno;
use pagemill_sys::{mem, window};
use std::ops::Range;
use std::sync::atomic::{Ordering::Relaxed, Ordering::SeqCst, fence};

/// Maximum number of attempts to map a page that was read into memory. The page may be evicted before it is mapped.
const MAX_FILL_ATTEMPTS: usize = 64;

/// Number of refused mappings after which a fill fails. After each, other pages are unmapped; other threads may use up
/// the mappings again.
const MAX_FAILURES: u32 = 8;

/// Maximum number of small folios that are mapped together: of the group of pages, aligned to this number, in which an
/// access lies, those in memory that lie beside each other in the pool. Reads forwards and backwards take one fault for
/// each group.
const MAX_MAPPED_TOGETHER: u64 = 16;

/// Maximum number of entries that are unmapped together.
const MAX_UNMAPPED_TOGETHER: usize = 64;

/// The access for which a page is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

/// The thread that maps a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mapper {
    /// The fault handler. It may neither allocate nor wait for locks of the cache, except those of the window.
    Handler,
    /// [`Window::fill`], which the fault handler calls on a stack of its own, or a call of the program. It has pinned
    /// the folio.
    Filler,
}

/// Result of mapping a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mapped {
    /// The page is mapped, and those that were mapped by the same call: up to this page, without it.
    Yes(u64),
    /// Another thread changes the entry.
    Busy,
    /// The page is not in memory, or [`Window::fill`] is needed for another reason.
    No,
    /// The system, or the limit of mappings, refuses another mapping.
    Failed(Errno),
}

/// Which pages an unmapping includes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmap {
    /// All pages: the file loses them.
    Always,
    /// Not those of a [`Prefaulted`](super::Prefaulted), which count as pinned.
    UnlessKept,
    /// As `UnlessKept`, because the process has too many mappings.
    UnlessKeptForLimit,
}

impl Unmap {
    /// Returns the counter of the folios that are unmapped.
    fn counter(self) -> Counter {
        if self == Self::UnlessKeptForLimit { Counter::ViewUnmappedForLimit } else { Counter::ViewUnmapped }
    }
}

impl Window {
    /// Maps the folio of the page with the byte at `offset` of the file, if it is in memory. All signals are blocked,
    /// because a handler of the program could access the page, and would then wait for the entry.
    pub fn try_map(&self, offset: u64, access: Access, mapper: Mapper) -> Mapped {
        let page = self.file.index_of(offset);
        let at = self.at(page);
        let Some(seen) = self.entries.claim(at) else { return Mapped::Busy };
        // Orders the claim before the look-up and the load of the file's length (`unmap`).
        fence(SeqCst);
        if self.is_own(page) {
            self.entries.release(at, seen, seen);
            return Mapped::Yes(page + 1);
        }
        let is_inside = offset < self.end_of_file();
        let number = seen.number().map_or_else(|| if is_inside { self.pin(page, mapper) } else { Err(None) }, Ok);
        let (Ok(number) | Err(Some(number))) = number else {
            self.entries.release(at, seen, Entry::EMPTY);
            return Mapped::No;
        };
        let frame = self.file.pool.frame(number);
        let state = frame.word.load();
        let is_right = is_inside && state.kind() == Kind::Live && self.file.has_page_in(frame, page, state.order());
        let copies = access == Access::Write && self.writes == Writes::Private;
        let mut together = Together::new(page, number);
        let mapped = if !is_right {
            Mapped::No
        } else if copies {
            let first = page >> state.order() << state.order();
            self.copy_page(page, self.file.pool.addr(number) + self.file.offset_of(page - first) as usize)
        } else if self.is_ready(frame, access) {
            let is_writable = || self.writes == Writes::Shared && frame.word.load().is_dirty();
            if state.order() > 0 {
                // Another thread may make the folio dirty and map it through another entry. Of the two mappings, the
                // later one must be writable.
                self.kept.with(|_| self.map_piece(&together, offset, state.order(), is_writable()))
            } else {
                let is_writable = is_writable();
                if seen == Entry::EMPTY {
                    self.claim_neighbours(&mut together, is_writable, mapper);
                }
                self.map_piece(&together, offset, 0, is_writable)
            }
        } else {
            Mapped::No
        };
        let is_mapped = matches!(mapped, Mapped::Yes(_));
        // The entry keeps the pin of a folio that must be freed by its last unpin, because that needs a lock, and of
        // one that may be mapped. An entry whose page was copied is no piece.
        let is_empty = !is_right && seen == Entry::EMPTY && frame.word.unpin_unless_freed();
        let is_joined = is_mapped && (copies || together.page < page);
        self.entries.release(at, seen, if is_empty { Entry::EMPTY } else { Entry::of(number, is_joined) });
        for (neighbour, number) in together.others(page) {
            let is_joined = is_mapped && together.page < neighbour;
            self.entries.release(self.at(neighbour), Entry::EMPTY, Entry::of(number, is_joined));
        }
        if seen != Entry::EMPTY && is_mapped {
            self.entries.separate(at + 1);
        }
        if mapper == Mapper::Filler && is_mapped {
            self.note_uses(together.others(page));
        }
        mapped
    }

    /// Returns the end of the last OS page of the file.
    fn end_of_file(&self) -> u64 {
        self.file.size_bytes().next_multiple_of(mem::os_page_bytes() as u64)
    }

    /// Returns whether a pinned folio can be mapped for an access. Makes it dirty first where that needs no lock: in a
    /// file without a store, at each access. A folio of a writable view is mapped writable if it is dirty. It stays
    /// dirty until it is unmapped, because its entry has a pin.
    fn is_ready(&self, frame: &Frame, access: Access) -> bool {
        if self.writes != Writes::Shared || frame.word.load().is_dirty() {
            return true;
        }
        if self.file.dirty.is_none() {
            frame.word.set_dirty();
            return true;
        }
        access == Access::Read
    }

    /// Pins the folio of a page. Returns `Err(None)` if it is not in memory, and `Err` with its number if the pinned
    /// folio is that of another page by now.
    fn pin(&self, page: u64, mapper: Mapper) -> std::result::Result<u32, Option<u32>> {
        let Some((found, frame)) = self.file.hint(page) else { return Err(None) };
        // The first use of a page that was read ahead may start further readahead, which allocates.
        let is_refused = mapper == Mapper::Handler && self.file.store.is_some() && frame.word.load().is_prefetched();
        if is_refused || frame.word.pin().is_err() {
            return Err(None);
        }
        if !self.file.has_page_in(frame, page, frame.word.load().order()) {
            return Err(Some(found.value as u32));
        }
        if self.file.store.is_some() && mapper == Mapper::Handler {
            let _ = frame.word.note_use();
        }
        Ok(found.value as u32)
    }

    /// Claims the entries beside a page, and pins their folios, as long as they are small folios in memory that lie
    /// beside each other in the pool, up to the ends of the page's group ([`MAX_MAPPED_TOGETHER`]).
    fn claim_neighbours(&self, together: &mut Together, is_writable: bool, mapper: Mapper) {
        let max = MAX_MAPPED_TOGETHER.min((BLOCK_BYTES / self.file.page_bytes()).max(1) as u64);
        let begin = together.page / max * max;
        let end_of_file = self.file.size_bytes().div_ceil(self.file.page_bytes() as u64);
        let (begin, end) = (begin.max(self.first_page), (begin + max).min(self.pages().end).min(end_of_file));
        while together.end() < end
            && self.claim_neighbour(together.end(), together.number + together.count, is_writable, mapper)
        {
            together.count += 1;
        }
        while together.page > begin
            && together.number > 0
            && self.claim_neighbour(together.page - 1, together.number - 1, is_writable, mapper)
        {
            (together.page, together.number, together.count) =
                (together.page - 1, together.number - 1, together.count + 1);
        }
    }

    /// Claims the entry of a page, if it is empty, and pins the page's folio, if it is the small folio `number` of the
    /// pool, and can be mapped with the same access as its neighbour. Returns whether both was done.
    fn claim_neighbour(&self, page: u64, number: u32, is_writable: bool, mapper: Mapper) -> bool {
        // Checked here, and again after the pin.
        let is_right = |frame: &Frame| {
            let state = frame.word.load();
            state.kind() == Kind::Live
                && state.order() == 0
                && self.file.has_page_in(frame, page, 0)
                && !(mapper == Mapper::Handler && self.file.store.is_some() && state.is_prefetched())
                && (!is_writable || state.is_dirty() || self.file.dirty.is_none())
        };
        let frame = self.file.pool.frame_if_any(u64::from(number));
        let Some(frame) = frame.filter(|frame| is_right(frame)) else { return false };
        let at = self.at(page);
        if self.is_own(page) || !self.entries.claim_empty(at) {
            return false;
        }
        fence(SeqCst);
        let is_in_index = || self.file.hint(page).is_some_and(|(found, _)| found.value == u64::from(number));
        if !is_in_index() || frame.word.pin().is_err() {
            self.entries.release(at, Entry::EMPTY, Entry::EMPTY);
            return false;
        }
        if !is_right(frame) || is_writable && !self.is_ready(frame, Access::Write) {
            // The folio was removed or written back meanwhile.
            let is_empty = frame.word.unpin_unless_freed();
            let now = if is_empty { Entry::EMPTY } else { Entry::of(number, false) };
            self.entries.release(at, Entry::EMPTY, now);
            return false;
        }
        true
    }

    /// Maps pinned folios of 2^`order` pages, as far as they lie in the window and before the end of the file's last OS
    /// page.
    fn map_piece(&self, together: &Together, offset: u64, order: u8, is_writable: bool) -> Mapped {
        if entry::pieces() >= entry::max_pieces() {
            return Mapped::Failed(Errno::NOMEM);
        }
        let first = together.page >> order << order;
        let pages = first.max(self.first_page)..(first + (1 << order)).max(together.end()).min(self.pages().end);
        let end_of_file = self.end_of_file();
        self.with_shared_pages(self.file.index_of(offset), pages, |pages| {
            let bytes = self.bytes_of(pages);
            let bytes = bytes.start..bytes.end.min(end_of_file);
            let Some(source) = self.file.pool.view_source(together.number, is_writable) else { return Mapped::No };
            if !bytes.contains(&offset) {
                return Mapped::No;
            }
            let source = source + (bytes.start - self.file.offset_of(first)) as usize;
            let (to, len_bytes) = (self.addr_of(bytes.start), (bytes.end - bytes.start) as usize);
            #[cfg(shuttle)]
            pagemill_core::sync::modelled::scheduling_point();
            // SAFETY: the addresses lie in the window, whose pages are accessed only through mappings. The source is a
            // mapping of the pool's memory.
            match unsafe { window::map_again(source, len_bytes, to) } {
                Ok(()) => Mapped::Yes(self.file.index_of(bytes.end - 1) + 1),
                Err(error) => {
                    Self::reserve_if_unmapped(&(to..to + len_bytes));
                    Mapped::Failed(error)
                }
            }
        })
    }

    /// Records uses of folios that were mapped together with that of an access.
    fn note_uses(&self, folios: impl Iterator<Item = (u64, u32)>) {
        folios.for_each(|(page, number)| {
            self.file.note_use(self.file.pool.frame(number), self.file.offset_of(page), 1);
        });
    }

    /// Reads a page into memory and maps its folio for an access, and small folios beside it that are in memory.
    /// Returns the page behind those that are mapped, and a pin of the page's folio, unless the page belongs to the
    /// view.
    ///
    /// # Errors
    ///
    /// As [`crate::mapping::Mapping::pin`]. For a write also as [`crate::mapping::Mapping::write_at`].
    /// [`Error::PastEnd`] behind the end of the file. [`Error::System`] if the process or its views may have no more
    /// mappings.
    pub fn fill(&self, page: u64, access: Access) -> Result<(u64, Option<Pin<'_>>)> {
        let file = &self.file;
        let offset = file.offset_of(page).max(self.offset);
        let (mut backoff, mut is_throttled, mut failures) = (Backoff::new(), false, 0);
        for _ in 0..MAX_FILL_ATTEMPTS {
            if self.is_own(page) {
                return Ok((page + 1, None));
            }
            let size_bytes = file.size_bytes();
            if offset >= size_bytes {
                return Err(Error::PastEnd { offset, size_bytes });
            }
            // The pin keeps the page in memory until it is mapped, and counts as its use.
            let pin = file.pin_for_view(offset, self.writes == Writes::Shared)?;
            if access == Access::Write && self.writes == Writes::Shared && file.dirty.is_some() && !pin.is_dirty() {
                let must_wait = !is_throttled && file.must_wait(pin.folio_bytes());
                if must_wait || !pin.try_set_dirty() {
                    drop(pin);
                    if must_wait {
                        file.throttle()?;
                        is_throttled = true;
                    }
                    backoff.pause();
                    continue;
                }
            }
            let blocked = AllSignalsBlocked::begin();
            let mapped = self.try_map(offset, access, Mapper::Filler);
            drop(blocked);
            match mapped {
                Mapped::Yes(_) if self.is_own(page) => return Ok((page + 1, None)),
                // The pinned folio was removed from the file, and another one may be mapped.
                Mapped::Yes(_) if !pin.is_in_file() => {}
                Mapped::Yes(end) => return Ok((end, Some(pin))),
                // The entry may have a folio that was removed from the file.
                Mapped::No => self.unmap(page..page + 1, Unmap::Always),
                Mapped::Failed(error) => {
                    drop(pin);
                    if access == Access::Write && self.copy_with_neighbours(page) {
                        return Ok((page + 1, None));
                    }
                    failures += 1;
                    if failures > MAX_FAILURES {
                        return Err(Error::System { doing: "mapping pages of views", cause: error.into() });
                    }
                    registry::unmap_some(entry::max_pieces() / 8);
                    continue;
                }
                Mapped::Busy => {}
            }
            drop(pin);
            backoff.pause();
        }
        Err(Error::Busy { what: "the page cannot be mapped" })
    }

    /// Unmaps pages, and ends the pins of their entries. Waits for threads that are changing one of the entries.
    pub fn unmap(&self, pages: Range<u64>, how: Unmap) {
        let _blocked = AllSignalsBlocked::begin();
        // Orders the removal of a folio, or the change of the file's length, before the loads of entries (`try_map`).
        fence(SeqCst);
        let (mut page, end) = (pages.start.max(self.first_page), pages.end.min(self.pages().end));
        while page < end {
            if self.entries.is_block_empty(self.at(page)) {
                // Continues with the next block.
                page = self.first_page + (self.at(page) / BLOCK_ENTRIES * BLOCK_ENTRIES + BLOCK_ENTRIES) as u64;
                continue;
            }
            page = self.unmap_run(page..end, how);
        }
    }

    /// Unmaps `count` pieces or more, from the page on where the last call ended, or all pages.
    pub fn unmap_next(&self, count: usize) {
        let target = entry::pieces().saturating_sub(count);
        let len = self.entries.count().next_multiple_of(BLOCK_ENTRIES) as u64;
        for _ in 0..len / BLOCK_ENTRIES as u64 {
            if entry::pieces() <= target {
                return;
            }
            let at = self.hand.fetch_add(BLOCK_ENTRIES as u64, Relaxed) % len;
            self.unmap(self.first_page + at..self.first_page + at + BLOCK_ENTRIES as u64, Unmap::UnlessKeptForLimit);
        }
    }

    /// Unmaps the first page of `pages`, and those behind it that can be unmapped by the same call. Returns the page
    /// behind them.
    fn unmap_run(&self, pages: Range<u64>, how: Unmap) -> u64 {
        let first = self.at(pages.start);
        let Some(seen) = self.entries.claim_used(first) else { return pages.start + 1 };
        let Some(number) = seen.number() else { return pages.start + 1 };
        let (mut run, mut count) = ([Entry::EMPTY; MAX_UNMAPPED_TOGETHER], 1);
        run[0] = seen;
        let is_unmapped = self.kept.with(|kept| {
            let is_kept = |pages: Range<u64>| how != Unmap::Always && has_common_page(kept, &pages);
            let order = self.file.pool.word(number).load().order();
            let begin = pages.start >> order << order;
            let mut end = begin + (1 << order);
            // The mapping is that of the whole folio, so one kept page keeps all.
            if is_kept(begin..end) {
                return false;
            }
            // Only the first claim waits for another thread, so no two threads wait for each other.
            while order == 0 && count < run.len() && end < pages.end {
                let Some(next) = self.entries.claim(self.at(end)) else { break };
                let is_small = next.number().is_some_and(|number| self.file.pool.word(number).load().order() == 0);
                if !is_small || is_kept(end..end + 1) {
                    self.entries.release(self.at(end), next, next);
                    break;
                }
                (run[count], count, end) = (next, count + 1, end + 1);
            }
            self.unmap_shared_pages(begin.max(self.first_page)..end.min(self.pages().end));
            true
        });
        if !is_unmapped {
            self.entries.release(first, seen, seen);
            return pages.start + 1;
        }
        stats::add(how.counter(), count as u64);
        for (more, seen) in run[..count].iter().enumerate() {
            self.entries.release(first + more, *seen, Entry::EMPTY);
        }
        self.entries.separate(first + count);
        let numbers = run[..count].iter().filter_map(|seen| seen.number());
        numbers.for_each(|number| self.file.cache.unpin(number));
        pages.start + count as u64
    }

    /// Unmaps all pages. Called once, when no other thread uses the window.
    pub fn unmap_all(&self) {
        let _blocked = AllSignalsBlocked::begin();
        let all = self.addr..self.addr + self.len_bytes;
        Self::reserve_again(&all, || all.clone());
        self.forget_own_pages();
        for at in (0..self.entries.count()).step_by(BLOCK_ENTRIES).filter(|at| !self.entries.is_block_empty(*at)) {
            for at in at..(at + BLOCK_ENTRIES).min(self.entries.count()) {
                let Some(seen) = self.entries.claim_used(at) else { continue };
                self.entries.release(at, seen, Entry::EMPTY);
                seen.number().into_iter().for_each(|number| self.file.cache.unpin(number));
            }
        }
    }
}

/// Returns whether one of the ranges has a page of `pages`.
fn has_common_page(ranges: &[Range<u64>], pages: &Range<u64>) -> bool {
    ranges.iter().any(|range| range.start < pages.end && range.end > pages.start)
}

/// Small folios that are mapped together: their pages follow each other in the file and in the pool.
struct Together {
    /// The first page.
    page: u64,
    /// Number of the first folio in the pool.
    number: u32,
    count: u32,
}

impl Together {
    fn new(page: u64, number: u32) -> Self {
        Self { page, number, count: 1 }
    }

    /// Returns the page behind the last folio.
    fn end(&self) -> u64 {
        self.page + u64::from(self.count)
    }

    /// Returns the page and the number of each folio, except that of `page`.
    fn others(&self, page: u64) -> impl Iterator<Item = (u64, u32)> {
        (self.page..self.end()).zip(self.number..).filter(move |(other, _)| *other != page)
    }
}
