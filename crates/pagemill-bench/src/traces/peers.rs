//! Eviction policies as their papers describe them, on pages of one size.
//!
//! - LRU: evicts the least recently used page.
//! - CLOCK: a ring of pages with reference bits. The clock hand clears set bits and evicts the first page whose bit is
//!   clear.
//!   F. Corbato, 1968.
//! - S3-FIFO: a small queue for a tenth of the pages, a main queue, and a ghost queue. The ghost queue has as many
//!   entries as the main queue has room for. J. Yang and others, SOSP 2023, algorithm 1.
//! - SIEVE: one queue. The hand moves from the oldest to the newest page, clears set bits, and evicts the first page
//!   whose bit is clear. Other pages keep their position. Y. Zhang and others, NSDI 2024, algorithm 1.

use std::collections::VecDeque;

/// A cache of page numbers with an eviction policy.
pub trait Policy {
    /// Requests a page, and inserts the page if it is not in the cache. Returns whether the request was a hit.
    fn access(&mut self, page: u32) -> bool;
}

/// Stands for no page, or for no ghost of a page.
const ABSENT: u32 = u32::MAX;

/// A doubly linked list of pages that can remove any page in constant time.
struct List {
    newer: Vec<u32>,
    older: Vec<u32>,
    newest: u32,
    oldest: u32,
    len: usize,
}

impl List {
    fn new(pages: usize) -> Self {
        Self { newer: vec![ABSENT; pages], older: vec![ABSENT; pages], newest: ABSENT, oldest: ABSENT, len: 0 }
    }

    fn push(&mut self, page: u32) {
        (self.newer[page as usize], self.older[page as usize]) = (ABSENT, self.newest);
        match self.newest {
            ABSENT => self.oldest = page,
            newest => self.newer[newest as usize] = page,
        }
        self.newest = page;
        self.len += 1;
    }

    fn remove(&mut self, page: u32) {
        let (newer, older) = (self.newer[page as usize], self.older[page as usize]);
        match newer {
            ABSENT => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        match older {
            ABSENT => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
        self.len -= 1;
    }
}

pub struct Lru {
    list: List,
    is_cached: Vec<bool>,
    size: usize,
}

impl Lru {
    pub fn new(pages: usize, size: usize) -> Self {
        Self { list: List::new(pages), is_cached: vec![false; pages], size }
    }
}

impl Policy for Lru {
    fn access(&mut self, page: u32) -> bool {
        let is_hit = std::mem::replace(&mut self.is_cached[page as usize], true);
        if is_hit {
            self.list.remove(page);
        } else if self.list.len == self.size {
            let oldest = self.list.oldest;
            self.list.remove(oldest);
            self.is_cached[oldest as usize] = false;
        }
        self.list.push(page);
        is_hit
    }
}

pub struct Clock {
    ring: Vec<u32>,
    hand: usize,
    is_cached: Vec<bool>,
    is_used: Vec<bool>,
    size: usize,
}

impl Clock {
    pub fn new(pages: usize, size: usize) -> Self {
        Self { ring: Vec::new(), hand: 0, is_cached: vec![false; pages], is_used: vec![false; pages], size }
    }
}

impl Policy for Clock {
    fn access(&mut self, page: u32) -> bool {
        if self.is_cached[page as usize] {
            self.is_used[page as usize] = true;
            return true;
        }
        (self.is_cached[page as usize], self.is_used[page as usize]) = (true, false);
        if self.ring.len() < self.size {
            self.ring.push(page);
            return false;
        }
        while std::mem::take(&mut self.is_used[self.ring[self.hand] as usize]) {
            self.hand = (self.hand + 1) % self.size;
        }
        let dropped = std::mem::replace(&mut self.ring[self.hand], page);
        self.is_cached[dropped as usize] = false;
        self.hand = (self.hand + 1) % self.size;
        false
    }
}

pub struct Sieve {
    list: List,
    hand: u32,
    is_cached: Vec<bool>,
    is_visited: Vec<bool>,
    size: usize,
}

impl Sieve {
    pub fn new(pages: usize, size: usize) -> Self {
        Self {
            list: List::new(pages),
            hand: ABSENT,
            is_cached: vec![false; pages],
            is_visited: vec![false; pages],
            size,
        }
    }

    fn evict(&mut self) {
        let or_oldest = |at: u32, oldest: u32| if at == ABSENT { oldest } else { at };
        let mut at = or_oldest(self.hand, self.list.oldest);
        while std::mem::take(&mut self.is_visited[at as usize]) {
            at = or_oldest(self.list.newer[at as usize], self.list.oldest);
        }
        self.hand = self.list.newer[at as usize];
        self.list.remove(at);
        self.is_cached[at as usize] = false;
    }
}

impl Policy for Sieve {
    fn access(&mut self, page: u32) -> bool {
        if self.is_cached[page as usize] {
            self.is_visited[page as usize] = true;
            return true;
        }
        if self.list.len == self.size {
            self.evict();
        }
        self.list.push(page);
        (self.is_cached[page as usize], self.is_visited[page as usize]) = (true, false);
        false
    }
}

#[derive(Clone, Copy, PartialEq)]
enum QueueOfPage {
    Out,
    Small,
    Main,
}

pub struct S3Fifo {
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    /// Each entry is a page and the number of the entry. An entry is stale if `ghost_of` has no number or a later
    /// number for its page.
    ghosts: VecDeque<(u32, u32)>,
    ghost_of: Vec<u32>,
    next_ghost: u32,
    queue_of: Vec<QueueOfPage>,
    uses: Vec<u8>,
    size: usize,
    small_size: usize,
}

impl S3Fifo {
    pub fn new(pages: usize, size: usize) -> Self {
        Self {
            small: VecDeque::new(),
            main: VecDeque::new(),
            ghosts: VecDeque::new(),
            ghost_of: vec![ABSENT; pages],
            next_ghost: 0,
            queue_of: vec![QueueOfPage::Out; pages],
            uses: vec![0; pages],
            size,
            small_size: (size / 10).max(1),
        }
    }

    fn main_size(&self) -> usize {
        self.size - self.small_size
    }

    fn evict(&mut self) {
        if self.small.len() >= self.small_size || self.main.is_empty() { self.evict_small() } else { self.evict_main() }
    }

    fn evict_small(&mut self) {
        while let Some(page) = self.small.pop_front() {
            if self.uses[page as usize] <= 1 {
                self.queue_of[page as usize] = QueueOfPage::Out;
                self.add_ghost(page);
                return;
            }
            (self.queue_of[page as usize], self.uses[page as usize]) = (QueueOfPage::Main, 0);
            self.main.push_back(page);
            if self.main.len() > self.main_size() {
                return self.evict_main();
            }
        }
    }

    fn evict_main(&mut self) {
        while let Some(page) = self.main.pop_front() {
            if self.uses[page as usize] == 0 {
                self.queue_of[page as usize] = QueueOfPage::Out;
                return;
            }
            self.uses[page as usize] -= 1;
            self.main.push_back(page);
        }
    }

    fn add_ghost(&mut self, page: u32) {
        self.ghost_of[page as usize] = self.next_ghost;
        self.ghosts.push_back((page, self.next_ghost));
        self.next_ghost += 1;
        while self.ghosts.len() > self.main_size() {
            let Some((page, ghost)) = self.ghosts.pop_front() else { return };
            if self.ghost_of[page as usize] == ghost {
                self.ghost_of[page as usize] = ABSENT;
            }
        }
    }
}

impl Policy for S3Fifo {
    fn access(&mut self, page: u32) -> bool {
        let at = page as usize;
        if self.queue_of[at] != QueueOfPage::Out {
            self.uses[at] = (self.uses[at] + 1).min(3);
            return true;
        }
        while self.small.len() + self.main.len() >= self.size {
            self.evict();
        }
        self.uses[at] = 0;
        if std::mem::replace(&mut self.ghost_of[at], ABSENT) == ABSENT {
            self.queue_of[at] = QueueOfPage::Small;
            self.small.push_back(page);
        } else {
            self.queue_of[at] = QueueOfPage::Main;
            self.main.push_back(page);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(policy: &mut dyn Policy, trace: &[u32]) -> String {
        trace.iter().map(|page| if policy.access(*page) { '+' } else { '-' }).collect()
    }

    /// Each policy runs a short trace with room for three pages. The pattern of hits (`+`) and misses (`-`) must equal
    /// the pattern computed by hand, which shows which pages were evicted.
    #[test]
    fn each_policy_evicts_the_expected_page() {
        // LRU: page 0 was used again, so 3 evicts 1. Then 1 evicts 2.
        assert_eq!(hits(&mut Lru::new(9, 3), &[0, 1, 2, 0, 3, 0, 1, 2]), "---+-+--");
        // CLOCK: the reference bit of page 0 is set, so 0 stays and 3 evicts 1. The hand is then at 2.
        assert_eq!(hits(&mut Clock::new(9, 3), &[0, 1, 2, 0, 3, 0, 2, 1, 0]), "---+-++-+");
        // SIEVE: the reference bit of page 0 is set, so 0 stays and 3 evicts 1. The hand has then passed 0, so 4 evicts
        // 2, although 0 is older.
        assert_eq!(hits(&mut Sieve::new(9, 3), &[0, 1, 2, 0, 3, 4, 0, 3, 2]), "---+--++-");
    }

    /// The caches have room for ten pages. A page with two hits must move to the main queue and survive a scan. A page
    /// that is requested again soon after its eviction must be found as a ghost and enter the main queue.
    #[test]
    fn s3_fifo_keeps_reused_pages_during_scan() {
        let mut cache = S3Fifo::new(100, 10);
        assert_eq!(hits(&mut cache, &[0, 0, 0]), "-++");
        let scan: Vec<u32> = (10..40).collect();
        assert!(!hits(&mut cache, &scan).contains('+'));
        assert_eq!(hits(&mut cache, &[0]), "+");
        assert_eq!(hits(&mut cache, &[25]), "-", "a ghost");
        assert!(!hits(&mut cache, &[41, 42, 43, 44, 45, 46, 47, 48, 49, 50]).contains('+'));
        assert_eq!(hits(&mut cache, &[25]), "+");
    }
}
