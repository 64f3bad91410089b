//! Splitting: turns a huge folio into small ones in place. State words and index entries change; no bytes are copied.

use crate::folio::Owner;
use crate::folio::word::Kind;
use crate::mapping::{File, Mapping};
use pagemill_core::epoch;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::trace::Event;

impl Mapping {
    /// Splits the huge folio that contains the byte at `offset` into pages, so that each page can be freed separately.
    /// Returns whether there was a huge folio.
    ///
    /// Cost: some microseconds, and memory for nine index nodes. Reads continue meanwhile.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if the folio is pinned or held, or can never be split. [`Error::NoAddresses`] if there is no
    /// memory for index nodes.
    pub fn split(&self, offset: u64) -> Result<bool> {
        self.0.check(offset, 1)?;
        self.0.split_at(self.0.index_of(offset), Counter::HugeSplitForCaller)
    }
}

impl File {
    /// As [`Mapping::split`], for the folio that covers page `index`. Counts a success in `counter`.
    pub(crate) fn split_at(&self, index: u64, counter: Counter) -> Result<bool> {
        const BUSY: Error = Error::Busy { what: "the huge folio is in use" };
        let guard = epoch::pin();
        let Some(hit) = self.tree.find(index, &guard) else { return Ok(false) };
        let (number, word) = (hit.value() as u32, self.pool.word(hit.value() as u32));
        let seen = word.load();
        let order = seen.order();
        if order == 0 || !hit.is_still() {
            return Ok(false);
        }
        if seen.is_unsplittable() {
            return Err(BUSY);
        }
        let mut stock = self.tree.prepare_split(u32::from(order), 0)?;
        let frozen = self.freeze(number).map_err(|_| BUSY)?;
        // Checked again after the freeze, because the page may belong to a different folio by now.
        if !hit.is_still() || frozen.order() != order {
            self.thaw(number);
            return Ok(false);
        }
        let pages = 1_u32 << order;
        debug_assert!(order == self.pool.chunk_order, "a folio is one page or a chunk");
        debug_assert!(hit.first().is_multiple_of(u64::from(pages)) && number.is_multiple_of(pages), "aligned");
        for page in 1..pages {
            let page_number = number + page;
            self.pool.set_owner(page_number, Owner { id: self.id, index: hit.first() + u64::from(page) });
            debug_assert!(self.pool.word(page_number).load().kind() == Kind::Tail, "other pages of the folio");
            self.pool.word(page_number).assign_frozen(frozen.is_dirty());
        }
        let mut writer = self.tree.lock();
        // A concurrent removal may have taken the entry out of the index; this thread then frees the folio.
        let is_in_index = writer.get(hit.first()).is_some_and(|found| found.value == u64::from(number));
        if is_in_index {
            writer.split(hit.first(), 0, &mut stock, |index| u64::from(number) + (index - hit.first()));
        }
        if is_in_index && self.store.is_some() {
            self.cache.order.split(number, order);
        }
        drop(writer);
        if !is_in_index {
            (1..pages).for_each(|page| self.pool.word(number + page).assign(Kind::Tail, 0));
            self.thaw(number);
            return Ok(false);
        }
        self.cache.count_split();
        // The first page is thawed first. So a reader of the huge folio sees the word change before any other page can
        // be freed.
        for page_number in number..number + pages {
            if !self.pool.word(page_number).thaw_as_page(frozen.is_dirty()) {
                // If the huge folio was removed from the file meanwhile, the removal changed the word of its first page
                // only.
                self.cache.free(page_number, 0);
            }
        }
        stats::add(counter, 1);
        self.trace(Event::FolioSplit, hit.first(), order);
        Ok(true)
    }
}
