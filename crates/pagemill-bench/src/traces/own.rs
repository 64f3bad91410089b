//! Runs Pagemill's own eviction policy on a trace. The policy is the module that the page cache uses; the pages are
//! only numbers.

use std::cell::Cell;

use pagemill_cache::mapping::order::{FolioState, Folios, GhostKey, Order};

use super::peers::Policy;

/// Maximum of the use count in the state word of a folio.
const MAX_USES: u8 = 2;

/// For each frame of the cache, the number of uses that the eviction scan has not subtracted yet.
struct Frames(Vec<Cell<u8>>);

impl Folios for Frames {
    fn look(&self, _number: u32) -> FolioState {
        FolioState::Idle { order: 0 }
    }

    fn forget_use(&self, number: u32) -> bool {
        let uses = &self.0[number as usize];
        uses.replace(uses.get().saturating_sub(1)) > 0
    }

    fn forget_uses(&self, number: u32) -> bool {
        self.0[number as usize].replace(0) > 0
    }
}

/// Stands for no frame or no page.
const ABSENT: u32 = u32::MAX;

/// A cache of page numbers with Pagemill's eviction policy.
pub struct PagemillPolicy {
    order: Order,
    frames: Frames,
    page_of: Vec<u32>,
    frame_of: Vec<u32>,
    size: usize,
}

impl PagemillPolicy {
    /// Makes an empty cache of `size` frames, for page numbers below `pages`.
    ///
    /// # Errors
    ///
    /// If there is no address space for the tables of the policy.
    pub fn new(pages: usize, size: usize) -> pagemill_core::Result<Self> {
        let order = Order::new(size)?;
        order.begin(size as u64);
        order.reach(size)?;
        let frames = Frames(vec![Cell::new(0); size]);
        Ok(Self { order, frames, page_of: Vec::new(), frame_of: vec![ABSENT; pages], size })
    }

    /// Returns an unused frame; if there is none, evicts a page and returns its frame. Returns `None` if no page can be
    /// evicted.
    fn take_frame(&mut self) -> Option<u32> {
        if self.page_of.len() < self.size {
            self.page_of.push(ABSENT);
            return Some(self.page_of.len() as u32 - 1);
        }
        let candidate = self.order.scan().next(&self.frames)?;
        let page = self.page_of[candidate.number as usize];
        self.frame_of[page as usize] = ABSENT;
        self.order.dropped(&candidate, GhostKey::of(0, page.into(), 0));
        Some(candidate.number)
    }
}

impl Policy for PagemillPolicy {
    fn access(&mut self, page: u32) -> bool {
        let frame = self.frame_of[page as usize];
        if frame != ABSENT {
            let uses = &self.frames.0[frame as usize];
            uses.set((uses.get() + 1).min(MAX_USES));
            return true;
        }
        if let Some(frame) = self.take_frame() {
            let recall = self.order.recall(GhostKey::of(0, page.into(), 0));
            self.frames.0[frame as usize].set(0);
            (self.page_of[frame as usize], self.frame_of[page as usize]) = (page, frame);
            self.order.enter(&self.frames, frame, 0, recall);
        }
        false
    }
}
