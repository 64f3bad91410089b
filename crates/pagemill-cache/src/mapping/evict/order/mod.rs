//! Eviction order: decides which clean folio of a cache is evicted next.
//!
//! ```text
//!                        folio is read                  folio returns soon after its eviction
//!                           |                                             |
//!                           v          after 1/50 of the cache            v
//!      new part          probation ------------------> small -- used --> main <--.
//!      (1 to 50 % of all)   uses do not count            |                 |     | used: subtract one use
//!                                                        | not used        |-----'
//!                                                        v                 v not used
//!                                                     evicted           evicted
//!                                                        `--> ghosts <-----'
//! ```
//!
//! The algorithm is S3-FIFO with four changes, chosen on traces (`pagemill bench traces`, docs/decisions.md):
//!
//! 1. Uses in *probation* do not count, because a page is mostly read in several calls soon after it was brought in,
//!    and then no more.
//! 2. The share of the new part (probation and small) adapts; it is not fixed at a tenth. If a folio returns right
//!    after its eviction from a part, that part is too small.
//! 3. A returning folio enters *main* only while the clock hand in main does not pass too many used folios for each
//!    returning one (`CLOCK_HAND_RATIO`). Otherwise a loop of reads larger than the cache would evict all of its own
//!    pages.
//! 4. A folio that was evicted from main and returns starts in probation.
//!
//! A hit does not change the order: uses are recorded in the folio's word. Entering a folio, and one step of the
//! eviction scan, change a few words under one lock, the last in the lock order, and allocate nothing. A folio that was
//! removed from its file stays linked until the scan reaches it. If a folio is dirty or in use when the scan reaches
//! it, the scan moves the folio to a *deferred* queue. Deferred folios are scanned again once an eighth of the cache
//! was evicted, or when no other folio is left. Sizes are in pages, so a huge folio counts all of its pages.
//!
//! Links and ghosts lie in tables outside of the global allocator: 8 bytes for each page that was ever in use, and 5
//! bytes for each page of the limit. The tables are reserved for the limit and committed as needed. The next cache with
//! the same pool uses the order again.
//!
//! Sources: J. Yang and others, "FIFO queues are all you need for cache eviction", SOSP 2023 (S3-FIFO); N. Megiddo and
//! D. Modha, "ARC", FAST 2003 (ghosts of two parts set their shares); T. Johnson and D. Shasha, "2Q", VLDB 1994 (uses
//! close together count as one).

mod ghosts;
mod queues;
#[cfg(test)]
mod tests;

use ghosts::Ghosts;
use pagemill_core::error::Result;
use pagemill_core::sync::{Acquire, AtomicUsize, Guarded, Lock, Relaxed, Release};
use queues::{Links, Queue, Queues};

/// Initial share of the new part (probation and small queue) in the cache, in units of 2^-32.
const INITIAL_SHARE: u64 = FULL_SHARE / 10;
/// Minimum share of the new part (probation and small queue) in the cache, in units of 2^-32.
const MIN_SHARE: u64 = FULL_SHARE / 100;
/// Maximum share of the new part (probation and small queue) in the cache, in units of 2^-32.
const MAX_SHARE: u64 = FULL_SHARE / 2;
/// The share of a part that is as large as the whole cache, in units of 2^-32.
const FULL_SHARE: u64 = 1 << 32;

/// The queue `Probation` has at most `1 / PROBATION_DIVISOR` of the cache's pages, and at most half of the new part.
const PROBATION_DIVISOR: u64 = 50;

/// For each [`CachePart`]: a folio that is read again soon after its eviction from the part shows that the part is too
/// small. Soon means that at most the cache's pages divided by this number were evicted from the part since.
const NEAR_DIVISOR: [u64; 2] = [12, 5];

/// A folio that is read again soon after its eviction (see [`NEAR_DIVISOR`]) changes the target size of the new part by
/// this number of pages, for each page of the folio.
const SHARE_STEP_PAGES: u64 = 2;

/// Number of used pages that the clock hand in the main queue may pass for each page that is read again after its
/// eviction.
const CLOCK_HAND_RATIO: u64 = 3;

/// Number of steps of an eviction scan for which the order's lock is held at a time.
const STEPS_PER_LOCK: u32 = 64;

/// Deferred folios (dirty or in use when the scan reached them) are scanned again once `1 / DEFERRED_DIVISOR` of the
/// cache's pages were chosen for eviction.
const DEFERRED_DIVISOR: u64 = 8;

/// Number of pages whose links in the queues are committed at a time: a mebibyte of links.
const OPEN_STEP_PAGES: usize = 1 << 17;

/// An eviction scan ends after this many steps for each page in the queues. Each folio can have two uses, and can move
/// between queues.
const SCAN_LIMIT_FACTOR: u64 = 5;

/// The part of the cache from which a folio was evicted.
///
/// Example: [`Folios`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CachePart {
    /// Probation and the small queue.
    New = 0,
    /// The main queue.
    Main = 1,
}

/// Whether a folio can be evicted, read from its word.
///
/// Example: [`Folios`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolioState {
    /// The folio may be evicted.
    Idle { order: u8 },
    /// The folio is dirty or in use.
    Kept,
    /// The page does not begin a folio of a file any more.
    Gone,
}

/// Access to the states and uses of folios, by the number of their first page. Called under the order's lock;
/// implementations must not take locks.
///
/// ```
/// use pagemill_cache::mapping::order::{FolioState, Folios, GhostKey, Order};
///
/// /// Single pages that are never used again.
/// struct Idle;
///
/// impl Folios for Idle {
///     fn look(&self, _number: u32) -> FolioState {
///         FolioState::Idle { order: 0 }
///     }
///     fn forget_use(&self, _number: u32) -> bool {
///         false
///     }
///     fn forget_uses(&self, _number: u32) -> bool {
///         false
///     }
/// }
///
/// let order = Order::new(64)?;
/// order.begin(64);
/// order.reach(64)?;
/// let key = GhostKey::of(1, 0, 0); // file 1, index 0, order 0
/// order.enter(&Idle, 5, 0, order.recall(key));
/// assert_eq!(order.pages().iter().sum::<u64>(), 1);
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub trait Folios {
    /// Returns whether the folio that begins at page `number` can be evicted.
    fn look(&self, number: u32) -> FolioState;

    /// Prefetches into the CPU cache the state of the folio that begins at page `number`. The default does nothing.
    fn prefetch_state(&self, _number: u32) {}

    /// Returns whether the folio that begins at page `number` was read early (*prefetched*) and not used yet. The
    /// default is false, for caches without readahead.
    fn is_awaited(&self, _number: u32) -> bool {
        false
    }

    /// Subtracts one from the use count of the folio that begins at page `number`. Returns whether the count was above
    /// 0.
    fn forget_use(&self, number: u32) -> bool;

    /// Sets the use count of the folio that begins at page `number` to 0. Returns whether the count was above 0.
    fn forget_uses(&self, number: u32) -> bool;
}

/// Hash that identifies a folio after its eviction: file, index and order.
///
/// Example: [`Folios`].
#[derive(Clone, Copy, Debug)]
pub struct GhostKey(u64);

impl GhostKey {
    /// Returns the key of the folio of 2^`order` pages that begins at page `index` of the file with the id `file`.
    pub fn of(file: u32, index: u64, order: u8) -> Self {
        // The last step of splitmix64: every bit of the input affects every bit of the hash.
        let mut bits = (u64::from(file) << 40 ^ index ^ u64::from(order) << 32).wrapping_add(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self(bits ^ bits >> 31)
    }

    /// Returns the index of the set in which the key's ghost is stored, if the table has `sets` sets.
    fn set_of(self, sets: u64) -> u64 {
        ((self.0 >> 32) * sets) >> 32
    }

    fn ghost_bits(self) -> u32 {
        self.0 as u32 >> 17
    }
}

/// Result of looking up the ghost of a folio that is read again. Contains the part from which the folio was evicted,
/// and about how many pages were evicted from that part since. `None` means that there is no ghost, or an expired one.
///
/// Example: [`Folios`].
#[derive(Clone, Copy, Debug)]
pub struct Recall(Option<(CachePart, u64)>);

impl Recall {
    /// Returns whether the folio has a ghost, because it was evicted recently.
    pub fn is_known(self) -> bool {
        self.0.is_some()
    }
}

/// A folio to evict, which the scan has taken out of its queue. The caller must then call [`Order::dropped`] or
/// [`Order::put_back`].
///
/// Example: [`Folios`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Number of the folio's first page.
    pub number: u32,
    pub order: u8,
    pub part: CachePart,
}

/// Maximum number of candidates in a [`Batch`].
pub const MAX_BATCH: usize = 16;

/// Candidates that a scan has found together. Lies on the stack, because evictions allocate nothing.
///
/// Example: [`Folios`].
pub struct Batch {
    candidates: [Candidate; MAX_BATCH],
    count: usize,
}

impl Batch {
    fn new() -> Self {
        Self { candidates: [Candidate { number: 0, order: 0, part: CachePart::New }; MAX_BATCH], count: 0 }
    }

    fn push(&mut self, candidate: Candidate) {
        self.candidates[self.count] = candidate;
        self.count += 1;
    }
}

impl std::ops::Deref for Batch {
    type Target = [Candidate];

    fn deref(&self) -> &[Candidate] {
        &self.candidates[..self.count]
    }
}

/// The eviction order of one cache.
///
/// Example: [`Folios`].
pub struct Order {
    links: Links,
    /// Number of pages whose links in the queues are committed. Changed under the lock `opening`.
    opened_pages: AtomicUsize,
    /// Lock that a thread holds while it commits links of the queues.
    opening: Lock,
    /// Maximum number of pages of the cache.
    most_pages: usize,
    ghosts: Ghosts,
    state: Guarded<QueueState>,
}

/// The part of an eviction order's state that its lock protects.
struct QueueState {
    queues: Queues,
    /// Target share of the new part (probation and small queue) in the cache, in units of 2^-32.
    share: u64,
    /// Used pages that the clock hand passed in the main queue, beyond the number that returning folios allow
    /// ([`CLOCK_HAND_RATIO`]).
    passed_excess: u64,
    /// Pages chosen for eviction since deferred folios were last scanned.
    chosen_pages: u64,
    /// Deferred pages of each part that the current scan still has to visit.
    rescan_pages: [u64; 2],
}

/// Result of one step of an eviction scan.
enum ScanStep {
    Found(Candidate),
    /// The step found no candidate; the scan continues.
    Next,
    /// No folio is left to scan.
    Nothing,
}

impl Order {
    /// Creates the eviction order of a cache of up to `most_pages`. Reserves addresses, and commits no memory.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if the address space is exhausted.
    pub fn new(most_pages: usize) -> Result<Self> {
        Ok(Self {
            links: Links::new(most_pages)?,
            opened_pages: AtomicUsize::new(0),
            opening: Lock::new(),
            most_pages,
            ghosts: Ghosts::new(most_pages as u64)?,
            state: Guarded::new(QueueState::new()),
        })
    }

    /// Resets the eviction order for a cache of up to `pages` pages. All folios of the previous cache must have been
    /// freed.
    ///
    /// Cost: one step for each folio that is still linked in a queue.
    pub fn begin(&self, pages: u64) {
        self.ghosts.open(pages);
        self.state.with(|state| {
            for queue in queues::ALL_QUEUES {
                while state.queues.pop(&self.links, queue).is_some() {}
            }
            debug_assert!(state.queues.total() == 0, "all folios were popped");
            *state = QueueState::new();
        });
    }

    /// Commits the memory for the links of all pages below `end`. Most calls only check that this was done, because
    /// links are committed for some hundred thousand pages at a time.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if the system cannot commit the memory.
    pub fn reach(&self, end: usize) -> Result<()> {
        debug_assert!(end <= self.most_pages, "the page is in the pool");
        if end <= self.opened_pages.load(Acquire) {
            return Ok(());
        }
        let _exclusive = self.opening.lock();
        let next = self.opened_pages.load(Relaxed);
        let end = end.next_multiple_of(OPEN_STEP_PAGES).min(self.most_pages);
        if next < end {
            self.links.open(next, end)?;
            self.opened_pages.store(end, Release);
        }
        Ok(())
    }

    /// Returns the resident bytes of the order's links and ghosts, for a cache whose page numbers are below `pages`.
    pub fn resident_bytes(&self, pages: usize) -> u64 {
        self.links.resident_bytes(pages.min(self.opened_pages.load(Relaxed))) + self.ghosts.resident_bytes()
    }

    /// Looks up the ghost of a folio. Takes no lock.
    pub fn recall(&self, key: GhostKey) -> Recall {
        Recall(self.ghosts.recall(key))
    }

    /// Adds a folio of a file with a store to a queue. `recall` is the result of looking up its ghost. The caller must
    /// have called [`Order::reach`] for the folio's pages.
    pub fn enter(&self, folios: &impl Folios, number: u32, order: u8, recall: Recall) {
        self.state.with(|state| {
            let queue = state.choose_queue(recall, 1 << order);
            state.queues.push(&self.links, number, order, queue);
            state.shrink_probation(&self.links, folios);
        });
    }

    /// As [`Order::enter`], for a folio that the program uses only once (noreuse). The folio is evicted before all
    /// others, but not before its first use.
    pub fn enter_noreuse(&self, number: u32, order: u8) {
        self.state.with(|state| state.queues.push(&self.links, number, order, Queue::NoReuse));
    }

    /// Replaces a huge folio, which was split, by its pages. The first page gets the folio's position in its queue; the
    /// other pages are appended to the same queue.
    pub fn split(&self, number: u32, order: u8) {
        self.state.with(|state| {
            let queue = state.queues.shrink_to_page(&self.links, number).unwrap_or(Queue::Small);
            for page in number + 1..number + (1 << order) {
                state.queues.push(&self.links, page, 0, queue);
            }
        });
    }

    /// Adds a huge folio that replaces `pages`: to the main queue if more than half of the pages were there, otherwise
    /// to the small queue.
    pub fn join(&self, pages: impl Iterator<Item = u32>, number: u32, order: u8) {
        self.state.with(|state| {
            let is_main = |page: &u32| matches!(self.links.queue(*page), Some(Queue::Main | Queue::DeferredMain));
            let is_mostly_main = pages.filter(is_main).count() > 1 << order >> 1;
            let queue = if is_mostly_main { Queue::Main } else { Queue::Small };
            state.queues.push(&self.links, number, order, queue);
        });
    }

    /// Starts a scan for folios to evict. The scan ends after a bounded number of steps.
    pub fn scan(&self) -> EvictScan<'_> {
        EvictScan { order: self, steps_left: None, is_last_round: false }
    }

    /// Prefetches into the CPU cache the ghost entries that [`Order::dropped`] and [`Order::recall`] access for a key.
    pub fn prefetch_ghosts(&self, key: GhostKey) {
        self.ghosts.prefetch_set(key);
    }

    /// Records that the candidate was evicted, and stores its ghost.
    pub fn dropped(&self, candidate: &Candidate, key: GhostKey) {
        self.ghosts.note(key, candidate.part, 1 << candidate.order);
    }

    /// Defers a candidate that could not be evicted because another thread uses it.
    pub fn put_back(&self, candidate: &Candidate) {
        let queue = if candidate.part == CachePart::New { Queue::DeferredNew } else { Queue::DeferredMain };
        self.state.with(|state| {
            // Locked folios are chosen and put back each time. They must not cause the next scan of deferred folios, in
            // which they would be chosen again.
            state.chosen_pages = state.chosen_pages.saturating_sub(1 << candidate.order);
            // The page may have been entered again meanwhile.
            if self.links.queue(candidate.number).is_none() {
                state.queues.push(&self.links, candidate.number, candidate.order, queue);
            }
        });
    }

    /// Returns the number of pages in the new part, and the number in the main part.
    pub fn pages(&self) -> [u64; 2] {
        self.state.with(|state| [state.new_pages(), state.queues.total() - state.new_pages()])
    }
}

/// A scan for folios to evict.
///
/// Example: [`Folios`].
pub struct EvictScan<'order> {
    order: &'order Order,
    /// Number of steps until the scan ends without a candidate. Without this limit a scan might not end if folios are
    /// used as fast as the scan clears their uses, or if they cannot be evicted.
    steps_left: Option<u64>,
    /// Whether the scan has started to scan deferred folios again, because no other folios were left.
    is_last_round: bool,
}

impl EvictScan<'_> {
    /// Returns the next candidate for eviction, or `None` if the scan finds none.
    pub fn next(&mut self, folios: &impl Folios) -> Option<Candidate> {
        self.next_batch(folios, 1).first().copied()
    }

    /// Returns the next candidates for eviction: as many as have `want_pages` pages in total, at most [`MAX_BATCH`].
    /// Returns fewer only if the scan finds no more. Takes the order's lock once for every 64 steps.
    pub fn next_batch(&mut self, folios: &impl Folios, want_pages: u64) -> Batch {
        let (mut batch, mut pages, mut is_complete) = (Batch::new(), 0, false);
        while !is_complete {
            let links = &self.order.links;
            is_complete = self.order.state.with(|state| {
                // Not within a batch: the caller puts folios that it cannot evict back between batches, and only then
                // they do not count as chosen any more.
                if batch.is_empty() {
                    state.rescan_if_due();
                }
                let left =
                    self.steps_left.get_or_insert(SCAN_LIMIT_FACTOR * state.queues.total() + u64::from(STEPS_PER_LOCK));
                for _ in 0..STEPS_PER_LOCK {
                    if *left == 0 {
                        return true;
                    }
                    *left -= 1;
                    match state.step(links, folios) {
                        ScanStep::Next => {}
                        ScanStep::Nothing if !self.is_last_round => {
                            self.is_last_round = true;
                            state.rescan_deferred();
                        }
                        ScanStep::Nothing => return true,
                        ScanStep::Found(candidate) => {
                            batch.push(candidate);
                            pages += 1 << candidate.order;
                            if pages >= want_pages || batch.len() == MAX_BATCH {
                                return true;
                            }
                        }
                    }
                }
                false
            });
        }
        batch
    }
}

impl QueueState {
    const fn new() -> Self {
        Self { queues: Queues::new(), share: INITIAL_SHARE, passed_excess: 0, chosen_pages: 0, rescan_pages: [0; 2] }
    }

    fn new_pages(&self) -> u64 {
        [Queue::Probation, Queue::Small, Queue::DeferredNew, Queue::NoReuse]
            .map(|queue| self.queues.pages(queue))
            .iter()
            .sum()
    }

    /// Returns the target size of the new part (probation and small queue), in pages.
    fn target(&self) -> u64 {
        (u128::from(self.queues.total()) * u128::from(self.share) / u128::from(FULL_SHARE)) as u64
    }

    /// Chooses the queue for a new folio of `pages` pages. If the folio has a ghost, adjusts the share of the new part.
    fn choose_queue(&mut self, recall: Recall, pages: u64) -> Queue {
        let Some((part, age)) = recall.0 else { return Queue::Probation };
        let total = self.queues.total().max(1);
        if age <= total / NEAR_DIVISOR[part as usize] {
            let step = SHARE_STEP_PAGES * pages * FULL_SHARE / total;
            let share = match part {
                CachePart::New => self.share.saturating_add(step),
                CachePart::Main => self.share.saturating_sub(step),
            };
            self.share = share.clamp(MIN_SHARE, MAX_SHARE);
        }
        debug_assert!((MIN_SHARE..=MAX_SHARE).contains(&self.share));
        if part == CachePart::Main || age > total {
            return Queue::Probation;
        }
        let may_pass = CLOCK_HAND_RATIO * pages;
        let may_enter_main = self.passed_excess <= may_pass;
        self.passed_excess = self.passed_excess.saturating_sub(may_pass);
        if may_enter_main { Queue::Main } else { Queue::Probation }
    }

    /// Moves the oldest folios from probation to the small queue until probation has its target size; at most two
    /// folios in each call.
    fn shrink_probation(&mut self, links: &Links, folios: &impl Folios) {
        let width = (self.queues.total() / PROBATION_DIVISOR).min(self.target() / 2);
        for _ in 0..2 {
            // The newest folio stays, because the thread that entered it reads it next.
            if self.queues.pages(Queue::Probation) <= width || !self.queues.has_several(Queue::Probation) {
                return;
            }
            if let Some(popped) = self.queues.pop(links, Queue::Probation) {
                if popped.target.is_none() {
                    folios.forget_uses(popped.number);
                }
                self.queues.push(links, popped.number, popped.order, popped.target.unwrap_or(Queue::Small));
            }
        }
    }

    /// Schedules a scan of the folios that are deferred now.
    fn rescan_deferred(&mut self) {
        self.chosen_pages = 0;
        self.rescan_pages = [self.queues.pages(Queue::DeferredNew), self.queues.pages(Queue::DeferredMain)];
    }

    /// Schedules a scan of the deferred folios if `1 / DEFERRED_DIVISOR` of the pages in the queues were chosen, and
    /// not put back, since the last such scan was scheduled.
    fn rescan_if_due(&mut self) {
        if self.chosen_pages > 0 && self.chosen_pages >= self.queues.total() / DEFERRED_DIVISOR {
            self.rescan_deferred();
        }
    }

    /// Returns the queue of a part to scan next, or `None` if the part has nothing to scan.
    fn next_queue(&self, part: CachePart) -> Option<Queue> {
        let (deferred, queues) = match part {
            CachePart::New => (Queue::DeferredNew, &[Queue::Small, Queue::Probation][..]),
            CachePart::Main => (Queue::DeferredMain, &[Queue::Main][..]),
        };
        if self.rescan_pages[part as usize] > 0 && !self.queues.is_empty(deferred) {
            return Some(deferred);
        }
        queues.iter().copied().find(|queue| !self.queues.is_empty(*queue))
    }

    /// Scans one folio: returns it as a candidate for eviction, or moves it to another queue.
    fn step(&mut self, links: &Links, folios: &impl Folios) -> ScanStep {
        debug_assert!(self.new_pages() <= self.queues.total());
        let is_new_large = self.new_pages() >= self.target().max(1);
        let parts = if is_new_large { [CachePart::New, CachePart::Main] } else { [CachePart::Main, CachePart::New] };
        let noreuse = (!self.queues.is_empty(Queue::NoReuse)).then_some((CachePart::New, Queue::NoReuse));
        let found = noreuse.or_else(|| parts.into_iter().find_map(|part| Some((part, self.next_queue(part)?))));
        let Some((part, queue)) = found else { return ScanStep::Nothing };
        let Some(popped) = self.queues.pop(links, queue) else { return ScanStep::Nothing };
        let number = popped.number;
        if let Some(next) = self.queues.oldest(queue) {
            links.prefetch_link(next);
            folios.prefetch_state(next);
        }
        let deferred = [Queue::DeferredNew, Queue::DeferredMain][part as usize];
        if queue == deferred {
            let rescan_pages = &mut self.rescan_pages[part as usize];
            *rescan_pages = rescan_pages.saturating_sub(1 << popped.order);
        }
        if let Some(queue) = popped.target {
            self.queues.push(links, number, popped.order, queue);
            return ScanStep::Next;
        }
        let order = match folios.look(number) {
            FolioState::Gone => return ScanStep::Next,
            FolioState::Kept => {
                self.queues.push(links, number, popped.order, deferred);
                return ScanStep::Next;
            }
            FolioState::Idle { order } => order,
        };
        let is_used = match part {
            // A noreuse folio is evicted regardless of its uses, but not before its first use.
            CachePart::New if queue == Queue::NoReuse && folios.is_awaited(number) => {
                self.queues.push(links, number, order, Queue::Small);
                return ScanStep::Next;
            }
            CachePart::New => folios.forget_uses(number) && queue != Queue::NoReuse,
            CachePart::Main => folios.forget_use(number),
        };
        if is_used {
            self.queues.push(links, number, order, Queue::Main);
            if part == CachePart::Main {
                self.passed_excess = (self.passed_excess + (1 << order)).min(self.queues.total() / 2);
            }
            return ScanStep::Next;
        }
        self.chosen_pages += 1 << order;
        ScanStep::Found(Candidate { number, order, part })
    }
}
