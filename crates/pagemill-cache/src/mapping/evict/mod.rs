//! Eviction of clean folios of files with a store, in the eviction [`order`](crate::mapping::evict::order).

pub mod order;

use crate::folio::Pool;
use crate::folio::word::Kind;
use crate::mapping::File;
use crate::mapping::cache::Inner;
use crate::mapping::evict::order::{CachePart, Candidate, FolioState, Folios, GhostKey};
use pagemill_core::error::Result;
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Backoff, Relaxed, coarse_ns};
use std::sync::atomic::Ordering::SeqCst;

/// Delay before the next eviction scan after a scan that found nothing to evict. A writeback ends the delay.
const EVICT_RETRY_NS: u64 = 100_000_000;

/// Maximum number of scans in one call of [`Inner::evict_some`]. A scan that found nothing is repeated while other
/// threads evict or readahead is in flight.
const MAX_SCANS: usize = 64;

impl Folios for Pool {
    fn look(&self, number: u32) -> FolioState {
        let state = self.word(number).load();
        match state.kind() {
            Kind::Live if state.pins() == 0 && !state.is_dirty() => FolioState::Idle { order: state.order() },
            Kind::Live | Kind::Busy | Kind::Frozen => FolioState::Kept,
            Kind::Free | Kind::Tail | Kind::Gone => FolioState::Gone,
        }
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

impl Inner {
    /// Evicts clean folios until `want_bytes` are freed. Returns whether that many were freed.
    pub(crate) fn evict_some(&self, want_bytes: u64) -> bool {
        if self.stored_files.load(Relaxed) == 0 || coarse_ns() < self.evict_after_ns.load(Relaxed) {
            return false;
        }
        let cleaned_bytes = self.balance.cleaned_bytes.load(SeqCst);
        let (mut backoff, mut was_quiet) = (None, false);
        for _ in 0..MAX_SCANS {
            let freed = self.evict_scan(want_bytes);
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
            self.evict_after_ns.store(coarse_ns() + EVICT_RETRY_NS, SeqCst);
            // Folios that became clean during the scan must not wait. Their writeback may have reset the delay before
            // the delay was set above.
            if self.balance.cleaned_bytes.load(SeqCst) != cleaned_bytes {
                self.evict_after_ns.store(0, SeqCst);
            }
        }
        false
    }

    /// As [`Inner::evict_some`], for background work: scans once, and does not delay later scans.
    pub(crate) fn evict_in_background(&self, want_bytes: u64) -> bool {
        let may_scan = self.stored_files.load(Relaxed) > 0 && coarse_ns() >= self.evict_after_ns.load(Relaxed);
        may_scan && self.evict_scan(want_bytes) >= want_bytes
    }

    /// Evicts the candidates of one eviction scan until `want_bytes` are freed. Returns the bytes freed.
    fn evict_scan(&self, want_bytes: u64) -> u64 {
        let (mut scan, mut freed) = (self.order.scan(), 0);
        while freed < want_bytes {
            self.evicting_threads.fetch_add(1, SeqCst);
            let candidate = scan.next(self.pool);
            freed += candidate.as_ref().map_or(0, |candidate| self.evict(candidate));
            let evicting = self.evicting_threads.fetch_sub(1, SeqCst);
            debug_assert!(evicting > 0, "this thread is counted");
            if candidate.is_none() {
                break;
            }
        }
        freed
    }

    /// Evicts the candidate of an eviction scan if its folio is clean and not in use. Returns the bytes freed.
    fn evict(&self, candidate: &Candidate) -> u64 {
        let owner = self.pool.owner(candidate.number);
        // The page may belong to a file without a store by now, whose folios are not in the order.
        let Some(file) = self.file(owner.id).filter(|file| file.store.is_some()) else { return 0 };
        let Some(order) = file.evict_at(owner.index, candidate.number) else {
            self.order.put_back(candidate);
            return 0;
        };
        if !file.is_once() {
            self.order.dropped(candidate, GhostKey::of(owner.id, owner.index, order));
        }
        let bytes = self.folio_bytes(order);
        stats::add(Counter::CacheEvicted, bytes);
        let counter = match candidate.part {
            CachePart::New => Counter::CacheEvictedNew,
            CachePart::Main => Counter::CacheEvictedMain,
        };
        stats::add(counter, bytes);
        bytes
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

    /// Evicts the folio at page `index` if it begins at page number `number`, is clean and not in use. Returns the
    /// order of the evicted folio.
    pub(crate) fn evict_at(&self, index: u64, number: u32) -> Option<u8> {
        let state = self.pool().word(number).freeze().ok()?;
        // While frozen, the folio cannot become dirty or be freed, even if it belongs to another file by now.
        let is_ours = |value| value == u64::from(number) && !state.is_dirty();
        let mut writer = self.tree.lock();
        self.note_removal();
        let is_removed = writer.get(index).is_some_and(|found| is_ours(found.value)) && writer.erase(index).is_some();
        drop(writer);
        if !is_removed {
            // The folio is dirty, or belongs to another file by now.
            self.thaw(number);
            return None;
        }
        if state.is_readahead() {
            stats::add(Counter::ReadAheadUnused, self.cache.folio_bytes(state.order()));
        }
        debug_assert!(self.pool().word(number).load().kind() == Kind::Frozen, "this thread owns the folio");
        self.cache.free(number, state.order());
        Some(state.order())
    }
}
