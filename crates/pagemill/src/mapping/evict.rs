//! Making room: clean folios of files with a store are dropped, in the [`order`](super::order) of their use.

use super::File;
use super::cache::Inner;
use super::order::{Candidate, Folios, Key, Look, Part};
use crate::error::Result;
use crate::folio::Pool;
use crate::folio::word::Kind;
use crate::stats::{self, Counter};
use crate::sync::{Patience, Relaxed, coarse_ns};
use std::sync::atomic::Ordering::SeqCst;

/// After nothing was found, and until something is written back.
const FUTILE_NS: u64 = 100_000_000;

/// Looks in vain before it gives up beside others.
const HUNTS: usize = 64;

impl Folios for Pool {
    fn look(&self, number: u32) -> Look {
        let state = self.word(number).load();
        match state.kind() {
            Kind::Live if state.pins() == 0 && !state.is_dirty() => Look::Idle { order: state.order() },
            Kind::Live | Kind::Busy | Kind::Still => Look::Kept,
            Kind::Free | Kind::Tail | Kind::Gone => Look::Gone,
        }
    }

    fn is_awaited(&self, number: u32) -> bool {
        self.word(number).load().is_fetched()
    }

    fn forget_use(&self, number: u32) -> bool {
        self.word(number).forget_use()
    }

    fn forget_uses(&self, number: u32) -> bool {
        self.word(number).forget_uses()
    }
}

impl Inner {
    /// Drops clean folios until `want_bytes` have come free. Returns whether they have.
    pub(super) fn evict_some(&self, want_bytes: u64) -> bool {
        if self.stored_files.load(Relaxed) == 0 || coarse_ns() < self.evict_after_ns.load(Relaxed) {
            return false;
        }
        let cleaned_bytes = self.balance.cleaned_bytes.load(SeqCst);
        let (mut patience, mut was_quiet) = (None, false);
        for _ in 0..HUNTS {
            let freed = self.hunt(want_bytes);
            if freed > 0 {
                return freed >= want_bytes;
            }
            // Others may have the last ones in hand, or they are on their way in, ahead of who wants them: once more, and a last time when
            // nobody has.
            let is_quiet = self.in_hand.load(SeqCst) == 0 && self.ahead_bytes.load(SeqCst) == 0;
            if is_quiet && was_quiet {
                break;
            }
            was_quiet = is_quiet;
            patience.get_or_insert_with(Patience::new).pause();
        }
        if self.ahead_bytes.load(SeqCst) == 0 {
            self.evict_after_ns.store(coarse_ns() + FUTILE_NS, SeqCst);
            // What has become clean since it was looked at is there, whoever said so before this did.
            if self.balance.cleaned_bytes.load(SeqCst) != cleaned_bytes {
                self.evict_after_ns.store(0, SeqCst);
            }
        }
        false
    }

    /// As [`Inner::evict_some`], for what nobody waits for: one look, and others look as before.
    pub(super) fn evict_idly(&self, want_bytes: u64) -> bool {
        let may_look = self.stored_files.load(Relaxed) > 0 && coarse_ns() >= self.evict_after_ns.load(Relaxed);
        may_look && self.hunt(want_bytes) >= want_bytes
    }

    fn hunt(&self, want_bytes: u64) -> u64 {
        let (mut hunt, mut freed) = (self.order.hunt(), 0);
        while freed < want_bytes {
            self.in_hand.fetch_add(1, SeqCst);
            let candidate = hunt.next(self.pool);
            freed += candidate.as_ref().map_or(0, |candidate| self.evict(candidate));
            self.in_hand.fetch_sub(1, SeqCst);
            if candidate.is_none() {
                break;
            }
        }
        freed
    }

    /// Drops one folio if its bytes can be had again; returns how many came free.
    fn evict(&self, candidate: &Candidate) -> u64 {
        let owner = self.pool.owner(candidate.number);
        // Of a file in memory, by now: it is in no order.
        let Some(file) = self.file(owner.id).filter(|file| file.store.is_some()) else { return 0 };
        let Some(order) = file.evict_at(owner.index, candidate.number) else {
            self.order.put_back(candidate);
            return 0;
        };
        if !file.is_once() {
            self.order.dropped(candidate, Key::of(owner.id, owner.index, order));
        }
        let bytes = self.folio_bytes(order);
        stats::add(Counter::CacheEvicted, bytes);
        let counter = match candidate.part {
            Part::New => Counter::CacheEvictedNew,
            Part::Main => Counter::CacheEvictedMain,
        };
        stats::add(counter, bytes);
        bytes
    }
}

impl File {
    /// Before a folio of a file with a store comes in: what may fail of it.
    ///
    /// # Errors
    ///
    /// [`crate::Error::System`] if it cannot enter the order: the system does not promise the memory.
    pub(super) fn reach_order(&self, number: u32, order: u8) -> Result<()> {
        if self.store.is_none() {
            return Ok(());
        }
        self.cache.order.reach(number as usize + (1 << order))
    }

    /// A folio came in. Under the lock of the index: before it can leave again. Of files in memory none does this.
    pub(super) fn enter_order(&self, index: u64, number: u32, order: u8) {
        if self.store.is_none() {
            return;
        }
        if self.is_once() {
            return self.cache.order.enter_once(number, order);
        }
        let recall = self.cache.order.recall(Key::of(self.id, index, order));
        self.cache.order.enter(self.pool, number, order, recall);
        if recall.is_known() {
            stats::add(Counter::CacheRecalled, self.cache.folio_bytes(order));
        }
    }

    /// Takes a folio out if it is clean and nobody's; returns its order if it did.
    pub(super) fn evict_at(&self, index: u64, number: u32) -> Option<u8> {
        let state = self.pool().word(number).freeze().ok()?;
        // Still: nobody makes it dirty or frees it, whosever it is by now.
        let is_ours = |value| value == u64::from(number) && !state.is_dirty();
        let mut writer = self.tree.lock();
        self.note_left();
        let is_out = writer.get(index).is_some_and(|found| is_ours(found.value)) && writer.erase(index).is_some();
        drop(writer);
        if !is_out {
            // Whosever it is by now.
            self.thaw(number);
            return None;
        }
        if state.is_ahead() {
            stats::add(Counter::ReadAheadUnused, self.cache.folio_bytes(state.order()));
        }
        self.cache.give(number, state.order());
        Some(state.order())
    }
}
