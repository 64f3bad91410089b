//! Making room: clean folios of files with a store are dropped, those first that were not used since the hand came by.

use super::File;
use super::cache::Inner;
use crate::folio::word::Kind;
use crate::stats::{self, Counter};
use crate::sync::{Relaxed, coarse_ns};

/// After nothing was found, and until something is written back.
const FUTILE_NS: u64 = 100_000_000;

/// Rounds of the hand before it gives up: a folio counts three uses.
const ROUNDS: u32 = 4;

impl Inner {
    /// Drops clean folios until `want_bytes` have come free. Returns whether they have. Walks pages: a second chance for what
    /// was used.
    pub(super) fn evict_some(&self, want_bytes: u64) -> bool {
        if self.stored_files.load(Relaxed) == 0 || coarse_ns() < self.evict_after_ns.load(Relaxed) {
            return false;
        }
        let end = self.pool.pages();
        let (mut freed, mut seen) = (0, 0_u64);
        while freed < want_bytes && seen < u64::from(ROUNDS) * u64::from(end) {
            let number = self.hand.fetch_add(1, Relaxed) % end;
            let state = self.pool.word(number).load();
            seen += 1;
            if state.kind() == Kind::Live
                && state.pins() == 0
                && !state.is_dirty()
                && !self.pool.word(number).forget_use()
            {
                freed += self.evict(number);
            }
        }
        if freed == 0 {
            self.evict_after_ns.store(coarse_ns() + FUTILE_NS, Relaxed);
        }
        stats::add(Counter::CacheEvicted, freed);
        freed >= want_bytes
    }

    /// Drops one folio if its bytes can be had again; returns how many came free.
    fn evict(&self, number: u32) -> u64 {
        let owner = self.pool.owner(number);
        let Some(file) = self.file(owner.id).filter(|file| file.store.is_some()) else { return 0 };
        file.evict_at(owner.index, number)
    }
}

impl File {
    fn evict_at(&self, index: u64, number: u32) -> u64 {
        let word = self.pool().word(number);
        let Ok(state) = word.freeze() else { return 0 };
        // Still: nobody makes it dirty or frees it, whosever it is by now.
        let is_ours = |value| value == u64::from(number) && !state.is_dirty();
        let mut writer = self.tree.lock();
        self.note_left();
        let is_out = writer.get(index).is_some_and(|found| is_ours(found.value)) && writer.erase(index).is_some();
        drop(writer);
        if !is_out {
            // Whosever it is by now.
            self.thaw(number);
            return 0;
        }
        self.cache.give(number, state.order());
        self.cache.folio_bytes(state.order())
    }
}
