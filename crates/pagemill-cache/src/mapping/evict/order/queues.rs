//! The queues of an eviction order. Their links lie in a table of 8 bytes a page, and change only under the order's
//! lock.
//!
//! Queues are singly linked from the oldest to the newest folio, so no folio is removed from the middle. A folio that
//! was removed from its file stays linked until the scan reaches its page, and is then skipped. If a new folio uses the
//! page before that, the link stores the new folio's target queue. When the scan reaches the page, it moves the new
//! folio to that queue.

use pagemill_core::arena::Table;
use pagemill_core::error::Result;
use pagemill_core::sync::{AtomicU64, Relaxed};
use pagemill_sys::mem;

/// End of a queue, in place of the number of the next page.
const END_OF_QUEUE: u32 = u32::MAX;

/// Position of the folio's order in a [`Link`].
const ORDER_SHIFT: u32 = 32;
/// Position of the queue in a [`Link`].
const QUEUE_SHIFT: u32 = 36;
/// Position of the target queue in a [`Link`].
const TARGET_SHIFT: u32 = 39;

/// The queues of an eviction order. Each linked folio is in one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Queue {
    /// Folios that were entered recently. Their uses do not count yet.
    Probation,
    /// Folios from `Probation` that the eviction scan has not reached yet.
    Small,
    /// Folios that had been used when the scan reached them in `Probation` or `Small`, or that were read again soon
    /// after their eviction.
    Main,
    /// Deferred folios: they were dirty, pinned, held or frozen when the scan reached them in `Probation`, `Small` or
    /// `NoReuse`.
    DeferredNew,
    /// Deferred folios: they were dirty, pinned, held or frozen when the scan reached them in `Main`.
    DeferredMain,
    /// Folios that the reader declared to use only once (noreuse).
    NoReuse,
}

/// All queues of an eviction order.
pub(super) const ALL_QUEUES: [Queue; 6] =
    [Queue::Probation, Queue::Small, Queue::Main, Queue::DeferredNew, Queue::DeferredMain, Queue::NoReuse];

/// A page's link: 32 bits next page, 4 bits order, 3 bits queue, and 3 bits target queue of a new folio in the page (0:
/// none).
#[derive(Clone, Copy)]
struct Link(u64);

impl Link {
    fn new(next: u32, order: u8, queue: Queue) -> Self {
        debug_assert!(order <= 0xF, "an order fits into its field");
        Self(u64::from(next) | u64::from(order) << ORDER_SHIFT | (queue as u64 + 1) << QUEUE_SHIFT)
    }

    fn next(self) -> u32 {
        self.0 as u32
    }

    fn with_next(self, next: u32) -> Self {
        Self(self.0 & !u64::from(u32::MAX) | u64::from(next))
    }

    fn order(self) -> u8 {
        (self.0 >> ORDER_SHIFT & 0xF) as u8
    }

    fn queue(self) -> Option<Queue> {
        queue_of(self.0 >> QUEUE_SHIFT & 7)
    }

    fn target(self) -> Option<Queue> {
        queue_of(self.0 >> TARGET_SHIFT & 7)
    }

    /// Returns the link of a new folio in this link's position of `queue`. The new folio's target queue is `target`.
    fn renewed(self, order: u8, queue: Queue, target: Queue) -> Self {
        Self(Self::new(self.next(), order, queue).0 | (target as u64 + 1) << TARGET_SHIFT)
    }
}

/// Converts the value of a link's 3-bit field to a queue; `None` for 0.
fn queue_of(bits: u64) -> Option<Queue> {
    ALL_QUEUES.get((bits as usize).wrapping_sub(1)).copied()
}

/// The oldest and the newest folio of a queue, and the queue's number of pages.
#[derive(Clone, Copy)]
struct QueueEnds {
    oldest: u32,
    newest: u32,
    pages: u64,
}

/// A folio that was taken off a queue.
pub(super) struct PoppedFolio {
    pub number: u32,
    pub order: u8,
    /// Target queue of the page's new folio. `None` if the page still has the folio that was linked.
    pub target: Option<Queue>,
}

/// The links of all pages of a cache: for each page its queue, and the next page of the queue.
pub(super) struct Links(Table<AtomicU64>);

impl Links {
    /// Creates a table of the links of up to `most_pages` pages. Reserves addresses, and commits no memory.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if the address space is exhausted.
    pub fn new(most_pages: usize) -> Result<Self> {
        Table::new(most_pages).map(Self)
    }

    /// Commits the links of pages from `next` to `end`. The links before `next` must be committed.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if the system cannot commit the memory.
    pub fn open(&self, next: usize, end: usize) -> Result<()> {
        self.0.open(0, next, end)
    }

    /// Returns the resident bytes of the links of the first `pages` pages.
    pub fn resident_bytes(&self, pages: usize) -> u64 {
        self.0.resident_bytes(0, pages)
    }

    /// Prefetches into the CPU cache the link of page `number`.
    pub fn prefetch_link(&self, number: u32) {
        mem::prefetch(std::ptr::from_ref(self.0.get(number as usize)) as usize);
    }

    fn get(&self, number: u32) -> Link {
        Link(self.0.get(number as usize).load(Relaxed))
    }

    fn set(&self, number: u32, link: Link) {
        self.0.get(number as usize).store(link.0, Relaxed);
    }

    /// Returns the target queue of a page's new folio, or else the queue in which the page is linked.
    pub fn queue(&self, number: u32) -> Option<Queue> {
        let link = self.get(number);
        link.target().or(link.queue())
    }
}

/// All queues of an eviction order, which are changed under the order's lock.
pub(super) struct Queues {
    ends: [QueueEnds; ALL_QUEUES.len()],
    /// Number of pages in all queues.
    total_pages: u64,
}

impl Queues {
    pub const fn new() -> Self {
        let empty = QueueEnds { oldest: END_OF_QUEUE, newest: END_OF_QUEUE, pages: 0 };
        Self { ends: [empty; ALL_QUEUES.len()], total_pages: 0 }
    }

    pub fn pages(&self, queue: Queue) -> u64 {
        self.ends[queue as usize].pages
    }

    /// Returns the number of pages in all queues.
    pub fn total(&self) -> u64 {
        self.total_pages
    }

    pub fn is_empty(&self, queue: Queue) -> bool {
        self.ends[queue as usize].oldest == END_OF_QUEUE
    }

    /// Returns the first page of the folio that [`Queues::pop`] would remove.
    pub fn oldest(&self, queue: Queue) -> Option<u32> {
        let oldest = self.ends[queue as usize].oldest;
        (oldest != END_OF_QUEUE).then_some(oldest)
    }

    /// Returns whether at least two folios are linked in the queue.
    pub fn has_several(&self, queue: Queue) -> bool {
        let ends = self.ends[queue as usize];
        ends.oldest != ends.newest
    }

    /// Appends a folio to a queue. If the page of the folio is still linked in a queue, only stores `queue` as the
    /// target queue in the link.
    pub fn push(&mut self, links: &Links, number: u32, order: u8, queue: Queue) {
        let old = links.get(number);
        if let Some(linked_queue) = old.queue() {
            let ends = &mut self.ends[linked_queue as usize];
            ends.pages = ends.pages - (1 << old.order()) + (1 << order);
            self.total_pages = self.total_pages - (1 << old.order()) + (1 << order);
            return links.set(number, old.renewed(order, linked_queue, queue));
        }
        let ends = &mut self.ends[queue as usize];
        debug_assert!((ends.oldest == END_OF_QUEUE) == (ends.newest == END_OF_QUEUE), "a queue has both ends or none");
        debug_assert!(ends.oldest != END_OF_QUEUE || ends.pages == 0, "an empty queue has no pages");
        links.set(number, Link::new(END_OF_QUEUE, order, queue));
        if ends.oldest == END_OF_QUEUE {
            ends.oldest = number;
        } else {
            links.set(ends.newest, links.get(ends.newest).with_next(number));
        }
        ends.newest = number;
        ends.pages += 1 << order;
        self.total_pages += 1 << order;
    }

    /// Removes the oldest folio from a queue.
    pub fn pop(&mut self, links: &Links, queue: Queue) -> Option<PoppedFolio> {
        let ends = &mut self.ends[queue as usize];
        let number = ends.oldest;
        if number == END_OF_QUEUE {
            return None;
        }
        let link = links.get(number);
        debug_assert_eq!(link.queue(), Some(queue));
        ends.oldest = link.next();
        if ends.oldest == END_OF_QUEUE {
            ends.newest = END_OF_QUEUE;
        }
        ends.pages -= 1 << link.order();
        self.total_pages -= 1 << link.order();
        debug_assert!(ends.oldest != END_OF_QUEUE || ends.pages == 0, "an empty queue has no pages");
        links.set(number, Link(0));
        Some(PoppedFolio { number, order: link.order(), target: link.target() })
    }

    /// Replaces a linked huge folio by its first page, at the same position. Returns the queue of the folio; `None` if
    /// the folio is in no queue.
    pub fn shrink_to_page(&mut self, links: &Links, number: u32) -> Option<Queue> {
        let old = links.get(number);
        let queue = old.queue()?;
        debug_assert!(self.ends[queue as usize].pages >= 1 << old.order(), "the queue counts the folio");
        self.ends[queue as usize].pages -= (1 << old.order()) - 1;
        self.total_pages -= (1 << old.order()) - 1;
        let small = Link::new(old.next(), 0, queue);
        links.set(number, old.target().map_or(small, |target| small.renewed(0, queue, target)));
        Some(queue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Random operations on the queues and on a model of `VecDeque`s must have the same results. A page must have only
    /// one position, and folios must leave a queue in the order in which they entered it.
    #[test]
    fn queues_are_first_in_first_out() {
        const PAGES: u32 = 50;
        let links = Links::new(PAGES as usize).unwrap();
        links.open(0, PAGES as usize).unwrap();
        let (mut queues, mut model) = (Queues::new(), ALL_QUEUES.map(|_| VecDeque::<(u32, u8, Option<Queue>)>::new()));
        let mut seed = 1_u64;
        let mut below = |bound: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % bound
        };
        for _ in 0..100_000 {
            let queue = ALL_QUEUES[below(ALL_QUEUES.len() as u64) as usize];
            if below(2) == 0 {
                let (number, order) = (below(u64::from(PAGES)) as u32, below(3) as u8 * 3);
                queues.push(&links, number, order, queue);
                match model.iter_mut().flatten().find(|(page, ..)| *page == number) {
                    Some(entry) => (entry.1, entry.2) = (order, Some(queue)),
                    None => model[queue as usize].push_back((number, order, None)),
                }
            } else {
                let popped = queues.pop(&links, queue).map(|popped| (popped.number, popped.order, popped.target));
                assert_eq!(popped, model[queue as usize].pop_front());
            }
            for queue in ALL_QUEUES {
                let pages = model[queue as usize].iter().map(|(_, order, _)| 1 << order).sum::<u64>();
                assert_eq!((queues.pages(queue), queues.is_empty(queue)), (pages, pages == 0));
            }
            assert_eq!(queues.total(), ALL_QUEUES.iter().map(|queue| queues.pages(*queue)).sum::<u64>());
        }
    }
}
