//! Eviction of clean folios of files with a store, in the eviction [`order`](crate::mapping::evict::order).

pub mod order;

use crate::folio::Pool;
use crate::folio::word::{Kind, State};
use crate::mapping::File;
use crate::mapping::cache::{Inner, PageCache};
use crate::mapping::evict::order::{Candidate, FolioState, Folios, GhostKey, MAX_BATCH};
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Backoff, Relaxed};
use pagemill_sys::clock::fine_ns;
use pagemill_sys::mem;
use pagemill_xarray::{Forest, Writer};
use std::sync::atomic::Ordering::SeqCst;

/// After scans that found nothing to evict, the next scan is delayed by this number of times their duration. So useless
/// scans take a small part of a CPU, and a small cache is scanned again soon. A writeback ends the delay.
const EVICT_RETRY_FACTOR: u64 = 10;

/// Maximum delay of an eviction scan in nanoseconds.
const MAX_EVICT_RETRY_NS: u64 = 100_000_000;

/// A batch of an eviction has at most `1 / BATCH_DIVISOR` of the cache, unless the caller needs more.
const BATCH_DIVISOR: u64 = 256;

/// Maximum number of scans in one call of [`Inner::evict_some`]. A scan that found nothing is repeated while other
/// threads evict or readahead is in flight.
const MAX_SCANS: usize = 64;

impl Folios for Pool {
    fn look(&self, number: u32) -> FolioState {
        let state = self.word(number).load();
        // A pin may be that of a view, which an eviction ends.
        let may_be_unpinned = state.pins() == 0 || self.view_count.load(Relaxed) > 0;
        match state.kind() {
            Kind::Live if may_be_unpinned && !state.is_dirty() => FolioState::Idle { order: state.order() },
            Kind::Live | Kind::Busy | Kind::Frozen => FolioState::Kept,
            Kind::Free | Kind::Tail | Kind::Gone => FolioState::Gone,
        }
    }

    fn prefetch_state(&self, number: u32) {
        mem::prefetch(std::ptr::from_ref(self.frame(number)) as usize);
    }

    fn is_awaited(&self, number: u32) -> bool {
        self.word(number).load().is_prefetched()
    }

    fn forget_use(&self, number: u32) -> bool {
        self.word(number).forget_use()
    }

    fn forget_uses(&self, number: u32) -> bool {
        self.word(number).forget_uses()
    }
}

/// The folio of a candidate, frozen for its eviction.
#[derive(Clone, Copy)]
struct FrozenFolio {
    /// Index of the folio's first page, if the folio still belongs to the file.
    index: u64,
    /// State of the folio before it was frozen.
    state: State,
    is_removed: bool,
}

impl Inner {
    /// Evicts clean folios until `want_bytes` are freed. Evicts a batch of small folios even if one is enough, because
    /// the next calls then find free pages. Returns whether `want_bytes` were freed.
    pub(crate) fn evict_some(&self, want_bytes: u64) -> bool {
        let began_ns = fine_ns();
        if self.stored_files.load(Relaxed) == 0 || began_ns < self.evict_after_ns.load(Relaxed) {
            return false;
        }
        let cleaned_bytes = self.balance.cleaned_bytes.load(SeqCst);
        let (mut backoff, mut was_quiet) = (None, false);
        for _ in 0..MAX_SCANS {
            let freed = self.evict_scan(want_bytes.max(self.batch_bytes()));
            if freed > 0 {
                return freed >= want_bytes;
            }
            // Other threads may be evicting the last candidates, or the remaining folios are in-flight readahead. So
            // scan again, until one scan has found nothing while neither was the case.
            let is_quiet = self.evicting_threads.load(SeqCst) == 0 && self.ahead_bytes.load(SeqCst) == 0;
            if is_quiet && was_quiet {
                break;
            }
            was_quiet = is_quiet;
            backoff.get_or_insert_with(Backoff::new).pause();
        }
        if self.ahead_bytes.load(SeqCst) == 0 {
            let now_ns = fine_ns();
            let delay_ns = (EVICT_RETRY_FACTOR * (now_ns - began_ns)).min(MAX_EVICT_RETRY_NS);
            self.evict_after_ns.store(now_ns + delay_ns, SeqCst);
            // Folios that became clean during the scan must not wait. Their writeback may have reset the delay before
            // the delay was set above.
            if self.balance.cleaned_bytes.load(SeqCst) != cleaned_bytes {
                self.evict_after_ns.store(0, SeqCst);
            }
        }
        false
    }

    /// As [`Inner::evict_some`], but scans once, also during the delay after a useless scan: folios may have been
    /// unpinned since then. For a call that fails otherwise.
    pub(crate) fn evict_at_last(&self, want_bytes: u64) -> bool {
        self.stored_files.load(Relaxed) > 0 && self.evict_scan(want_bytes) >= want_bytes
    }

    /// As [`Inner::evict_some`], for background work: scans once, and does not delay later scans.
    pub(crate) fn evict_in_background(&self, want_bytes: u64) -> bool {
        let may_scan = self.stored_files.load(Relaxed) > 0 && fine_ns() >= self.evict_after_ns.load(Relaxed);
        may_scan && self.evict_scan(want_bytes) >= want_bytes
    }

    /// Returns the bytes that an eviction frees at least: a batch of pages, or a small part of a small cache.
    fn batch_bytes(&self) -> u64 {
        (self.folio_bytes(0) * MAX_BATCH as u64).min(self.limit_bytes / BATCH_DIVISOR)
    }

    /// Evicts the candidates of one eviction scan until `want_bytes` are freed. Returns the bytes freed.
    fn evict_scan(&self, want_bytes: u64) -> u64 {
        let (mut scan, mut freed) = (self.order.scan(), 0);
        while freed < want_bytes {
            let want_pages = (want_bytes - freed).div_ceil(self.folio_bytes(0));
            self.evicting_threads.fetch_add(1, SeqCst);
            let batch = scan.next_batch(self.pool, want_pages);
            freed += self.evict_batch(&batch);
            let evicting = self.evicting_threads.fetch_sub(1, SeqCst);
            debug_assert!(evicting > 0, "this thread is counted");
            if batch.is_empty() {
                break;
            }
        }
        freed
    }

    /// Evicts those candidates of an eviction scan whose folios are clean and not in use. Returns the bytes freed.
    fn evict_batch(&self, batch: &[Candidate]) -> u64 {
        let owner_id = |candidate: &Candidate| self.pool.frame(candidate.number).owner().id;
        let (mut rest, mut freed) = (batch, 0);
        while let Some(first) = rest.first() {
            let id = owner_id(first);
            let count = 1 + rest[1..].iter().take_while(|candidate| owner_id(candidate) == id).count();
            let (of_file, others) = rest.split_at(count);
            // A page may belong to a file without a store by now, whose folios are not in the order.
            if let Some(file) = self.file(id).filter(|file| file.store.is_some()) {
                freed += file.evict_candidates(of_file);
            }
            rest = others;
        }
        freed
    }
}

impl PageCache {
    /// Evicts clean folios of files with a store, so that `bytes` more fit under the limit. Writes nothing back.
    /// Returns whether they fit now. Returns false if they fitted before the call, and in a fork child.
    #[doc(hidden)] // for the spill store of pagemill-ramfs
    pub fn evict_clean(&self, bytes: u64) -> bool {
        let cache = &self.0;
        let missing = || cache.charged_bytes.load(Relaxed).saturating_add(bytes).saturating_sub(cache.limit_bytes);
        let evict = |missing| cache.evict_some(missing) || cache.evict_at_last(missing);
        let before = missing();
        // `evict_some` and `evict_at_last` may each free a part and return false.
        cache.check().is_ok() && before > 0 && (evict(before) || missing() == 0)
    }

    /// Writes back dirty folios of files with a store, some `bytes` of one file at a time, until folios of the cache
    /// became clean. Returns whether some did. Returns false if a store failed, without its error, and in a fork child.
    /// Waits for a store without progress up to the timeout of writeback.
    #[doc(hidden)] // for the spill store of pagemill-ramfs
    pub fn clean_some(&self, bytes: u64) -> bool {
        self.0.check().is_ok() && self.0.clean_some(bytes).unwrap_or(false)
    }
}

impl File {
    /// Commits the memory that a folio needs to enter the eviction order, because entering must not fail.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if the system cannot commit the memory.
    pub(crate) fn reach_order(&self, number: u32, order: u8) -> Result<()> {
        if self.store.is_none() {
            return Ok(());
        }
        self.cache.order.reach(number as usize + (1 << order))
    }

    /// Adds a folio to the eviction order of the cache. Called under the lock of the index, so that no thread can
    /// remove the folio before it is entered. Does nothing for files without a store.
    pub(crate) fn enter_order(&self, index: u64, number: u32, order: u8) {
        if self.store.is_none() {
            return;
        }
        debug_assert!(index.is_multiple_of(1 << order) && number.is_multiple_of(1 << order), "folios are aligned");
        if self.is_once() {
            return self.cache.order.enter_noreuse(number, order);
        }
        let recall = self.cache.order.recall(GhostKey::of(self.id, index, order));
        self.cache.order.enter(self.pool, number, order, recall);
        if recall.is_known() {
            stats::add(Counter::CacheRecalled, self.cache.folio_bytes(order));
        }
    }

    /// Evicts those folios of candidates that belong to this file, are clean and not in use. Defers the others. Returns
    /// the bytes freed.
    ///
    /// Cost: acquires the lock of the index once, and that of the pool once. First prefetches into the CPU cache what
    /// the removals of all candidates change.
    fn evict_candidates(&self, candidates: &[Candidate]) -> u64 {
        debug_assert!(candidates.len() <= MAX_BATCH);
        let mut folios = [None; MAX_BATCH];
        for (folio, candidate) in folios.iter_mut().zip(candidates) {
            let index = self.pool.frame(candidate.number).owner().index;
            self.tree.prefetch_entry(index);
            self.cache.order.prefetch_ghosts(GhostKey::of(self.id, index, candidate.order));
            let frozen = self.freeze_to_evict(candidate.number, index, candidate.order);
            *folio = frozen.map(|state| FrozenFolio { index, state, is_removed: false });
        }
        if folios.iter().flatten().any(|folio| !folio.state.is_dirty()) {
            let mut writer = self.tree.lock();
            self.note_removal();
            for (folio, candidate) in folios.iter_mut().zip(candidates) {
                if let Some(folio) = folio {
                    folio.is_removed = remove_frozen(&mut writer, folio.index, candidate.number, folio.state);
                }
            }
        }
        let mut part_bytes = [0; 2];
        for (folio, candidate) in folios.iter_mut().zip(candidates) {
            if let Some(FrozenFolio { index, state, is_removed: true }) = *folio {
                self.note_unused_readahead(state);
                if !self.is_once() {
                    self.cache.order.dropped(candidate, GhostKey::of(self.id, index, state.order()));
                }
                part_bytes[candidate.part as usize] += self.cache.folio_bytes(state.order());
                continue;
            }
            if folio.take().is_some() {
                self.thaw(candidate.number);
            }
            self.cache.order.put_back(candidate);
        }
        let bytes = part_bytes.iter().sum();
        if bytes == 0 {
            return 0;
        }
        let evicted = folios.iter().zip(candidates);
        let evicted = evicted.filter_map(|(folio, candidate)| Some((candidate.number, folio.as_ref()?.state.order())));
        self.cache.free_several(evicted);
        let [new_bytes, main_bytes] = part_bytes;
        for (counter, bytes) in [(Counter::CacheEvictedNew, new_bytes), (Counter::CacheEvictedMain, main_bytes)] {
            if bytes > 0 {
                stats::add(counter, bytes);
            }
        }
        stats::add(Counter::CacheEvicted, bytes);
        bytes
    }

    /// Counts an evicted folio in `ReadAheadUnused` if readahead fetched it and it was not used.
    fn note_unused_readahead(&self, state: State) {
        if state.is_readahead() {
            stats::add(Counter::ReadAheadUnused, self.cache.folio_bytes(state.order()));
        }
    }

    /// Freezes a folio of 2^`order` pages at page `index` that is to be evicted, unless it is in use, or its
    /// pages are locked.
    fn freeze_to_evict(&self, number: u32, index: u64, order: u8) -> Option<State> {
        let pages = index..index.saturating_add(1 << order);
        if self.is_locked_in_memory(pages.clone()) {
            return None;
        }
        let state = self.freeze(number).ok()?;
        // The pages may have been locked before the folio was frozen, which was then found in memory.
        if self.is_locked_in_memory(pages) {
            self.thaw(number);
            return None;
        }
        Some(state)
    }

    /// Evicts the folio of 2^`order` pages at page `index` if it begins at page number `number`, is clean, not in
    /// use and not locked. Returns the order of the evicted folio.
    pub(crate) fn evict_at(&self, index: u64, number: u32, order: u8) -> Option<u8> {
        let state = self.freeze_to_evict(number, index, order)?;
        self.evict_frozen(index, number, state)
    }

    /// As [`File::evict_at`], also for locked pages.
    pub(crate) fn evict_locked_at(&self, index: u64, number: u32) -> Option<u8> {
        let state = self.freeze(number).ok()?;
        self.evict_frozen(index, number, state)
    }

    fn evict_frozen(&self, index: u64, number: u32, state: State) -> Option<u8> {
        let mut writer = self.tree.lock();
        self.note_removal();
        let is_removed = remove_frozen(&mut writer, index, number, state);
        drop(writer);
        if !is_removed {
            self.thaw(number);
            return None;
        }
        self.note_unused_readahead(state);
        debug_assert!(self.pool.word(number).load().kind() == Kind::Frozen, "this thread owns the folio");
        self.cache.free(number, state.order());
        Some(state.order())
    }
}

/// Removes a folio that the caller has frozen from the index, if the folio is clean. Does nothing if page `index` of
/// the file has another folio, because the frozen one belongs to another file by now.
fn remove_frozen(writer: &mut Writer<'_, Forest>, index: u64, number: u32, state: State) -> bool {
    // While frozen, the folio cannot become dirty or be freed.
    !state.is_dirty() && writer.erase_value(index, u64::from(number)).is_some()
}
