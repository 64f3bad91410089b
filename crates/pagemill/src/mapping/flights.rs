//! Who brings pages of a stored file in: one at a time, so that the store is asked once, and nothing stale enters the index.
//!
//! Whoever puts a folio of a file with a store into the index has a *flight* over its pages. He began it before he looked
//! whether one is there, and before he asked the store. So no page comes, is changed, written back and dropped while
//! somebody still reads what the store had of it before.
//!
//! Who finds another's flight waits until it has ended, for as long as the store takes. A *loose* one ends when its owner looks after
//! it, which may be never, or the waiting thread's own: it is overtaken. What it brings counts for nothing then.

use super::File;
use super::cache::Inner;
use crate::sync::{Guarded, Patience};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Lists, by file and huge folio: flights that could be over the same pages are in one list.
const SHARDS: usize = 16;

/// 2^64 over the golden ratio: multiples of any number are spread by it.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// All flights of a cache.
#[derive(Default)]
pub(super) struct Flights {
    shards: [Guarded<Vec<Entry>>; SHARDS],
    tickets: AtomicU64,
}

struct Entry {
    ticket: u64,
    /// [`File::serial`]: ids are used again.
    file: u64,
    first: u64,
    last: u64,
    is_loose: bool,
}

/// One flight. It has to be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "others wait for its end"]
pub(super) struct Ticket {
    shard: usize,
    number: u64,
}

/// Who sees to a flight's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// This thread, at once.
    Firm,
    /// Its owner, when he looks after it.
    Loose,
    /// The same, and he has waited for long.
    LooseAtLast,
}

/// Another's flight is over these pages.
#[derive(Debug)]
pub(super) struct Underway;

/// A flight that this thread sees to its end.
pub(super) struct Flight<'cache> {
    cache: &'cache Inner,
    ticket: Ticket,
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.cache.flights.end(self.ticket);
    }
}

impl Flights {
    /// Begins a flight over the pages of a file, which lie in one range of a huge folio (`range` says which). Loose ones that
    /// are in the way are overtaken, or not.
    fn begin(&self, file: u64, range: u64, pages: (u64, u64), kind: Kind) -> Result<Ticket, Underway> {
        let (first, last) = pages;
        // By the upper bits: ranges begin at multiples of their length.
        let shard = ((range + file).wrapping_mul(GOLDEN) >> (u64::BITS - SHARDS.ilog2())) as usize;
        self.shards[shard].with(|entries| {
            let is_over = |entry: &Entry| entry.file == file && entry.first <= last && entry.last >= first;
            if entries.iter().any(|entry| is_over(entry) && (kind == Kind::Loose || !entry.is_loose)) {
                return Err(Underway);
            }
            entries.retain(|entry| !is_over(entry));
            let number = self.tickets.fetch_add(1, Relaxed);
            entries.push(Entry { ticket: number, file, first, last, is_loose: kind != Kind::Firm });
            Ok(Ticket { shard, number })
        })
    }

    pub fn end(&self, ticket: Ticket) {
        self.shards[ticket.shard].with(|entries| {
            if let Some(at) = entries.iter().position(|entry| entry.ticket == ticket.number) {
                entries.swap_remove(at);
            }
        });
    }

    /// Whether nobody has overtaken it.
    pub fn is_on(&self, ticket: Ticket) -> bool {
        self.shards[ticket.shard].with(|entries| entries.iter().any(|entry| entry.ticket == ticket.number))
    }
}

impl File {
    /// Begins a loose flight over pages of one range.
    ///
    /// # Errors
    ///
    /// Another's is over some of them.
    pub(super) fn fly_loosely(&self, first: u64, last: u64, overtakes: bool) -> Result<Ticket, Underway> {
        let kind = if overtakes { Kind::LooseAtLast } else { Kind::Loose };
        self.cache.flights.begin(self.serial, self.span_of(first).start, (first, last), kind)
    }

    /// Begins a flight over pages of one range, unless another's is over some of them.
    pub(super) fn try_fly(&self, first: u64, last: u64) -> Option<Flight<'_>> {
        let range = self.span_of(first).start;
        let ticket = self.cache.flights.begin(self.serial, range, (first, last), Kind::Firm).ok()?;
        Some(Flight { cache: &self.cache, ticket })
    }

    /// Begins a flight over pages of one range, after another's that is over some of them. They may be there by then.
    pub(super) fn fly(&self, first: u64, last: u64) -> Flight<'_> {
        let mut patience = None;
        loop {
            if let Some(flight) = self.try_fly(first, last) {
                return flight;
            }
            patience.get_or_insert_with(Patience::new).pause();
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Flights over different huge folios of one file are in different lists mostly, and those over one in one.
    #[test]
    fn ranges_are_spread_over_the_lists() {
        for pages in [1u64, 16, 512] {
            let flights = Flights::default();
            for range in 0..64 {
                let first = range * pages;
                for page in [first, first + pages - 1].into_iter().take(pages.min(2) as usize) {
                    let _ = flights.begin(7, first, (page, page), Kind::Firm).unwrap();
                }
            }
            let longest = flights.shards.iter().map(|shard| shard.with(|entries| entries.len())).max();
            assert!(longest <= Some(16), "{longest:?} of {} in one, of {pages} pages", 64 * pages.min(2));
        }
    }

    /// Flights over the same pages exclude each other, in one file; a loose one is overtaken, and learns of it.
    #[test]
    fn one_at_a_time_is_over_a_page() {
        let flights = Flights::default();
        let begin = |file, first, last, kind| flights.begin(file, 0, (first, last), kind);
        let firm = begin(1, 4, 7, Kind::Firm).unwrap();
        for (first, last) in [(4, 4), (7, 9), (0, 4), (0, 100)] {
            for kind in [Kind::Firm, Kind::Loose, Kind::LooseAtLast] {
                assert!(begin(1, first, last, kind).is_err());
            }
        }
        let (before, behind, other) =
            (begin(1, 3, 3, Kind::Firm), begin(1, 8, 8, Kind::Loose), begin(2, 4, 7, Kind::Firm));
        let (before, behind, other) = (before.unwrap(), behind.unwrap(), other.unwrap());
        assert!(begin(1, 8, 8, Kind::Loose).is_err(), "loose ones wait for each other");
        let last = begin(1, 8, 8, Kind::LooseAtLast).expect("not for ever");
        let taker = begin(1, 8, 8, Kind::Firm).unwrap();
        assert!(!flights.is_on(behind) && !flights.is_on(last) && flights.is_on(taker) && flights.is_on(firm));
        [firm, before, behind, other, taker].into_iter().for_each(|ticket| flights.end(ticket));
        assert!(flights.shards.iter().all(|shard| shard.with(|entries| entries.is_empty())));
    }
}
