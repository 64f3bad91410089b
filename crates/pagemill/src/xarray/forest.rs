//! Nodes in memory that somebody else has, at places that can change: what page caches use.
//!
//! A node's number is its place in a window of addresses, so it is found by a shift and an addition. The window holds nodes and
//! nothing else, for as long as the process lives: who reads there without a guard ([`super::XArray::hint`]) finds a node, of whichever
//! array, or zeros where the memory went.
//!
//! ```text
//!   taken --hung--> in a tree --cut off--> limbo --32 of them--> waiting for readers --> ripe --> given back
//! ```
//!
//! What readers are done with is only noted by the collector of epochs, which runs anywhere. It goes back to its source when somebody
//! takes a node, outside of all locks, or when the source is tidied up: soon, where it has somebody for that.
//!
//! Above, by trait: [`Source`] (whose memory it is), [`Forests`] (who has one).
#![allow(unsafe_code)] // nodes at addresses that their source promises

use super::arrays::Arrays;
use super::node::Node;
use super::nodes::Nodes;
use crate::error::Result;
use crate::sync::{Acquire, AtomicU32, AtomicU64, Padded, Relaxed, Release};
use std::ops::Range;
use std::sync::atomic::Ordering::AcqRel;

/// Numbers count bytes of the window by so many.
const UNIT_BYTES: usize = align_of::<Node>();
const UNIT_SHIFT: u32 = UNIT_BYTES.trailing_zeros();

/// So many wait for readers together.
const BATCH: u64 = 32;

/// Half of a word that has two: the upper one counts.
const HALF: u32 = 32;

/// Whose memory nodes are in.
///
/// # Safety
///
/// - All of the window is memory of the process for good, or cannot be reached; what can be holds zeros or nodes, which are only
///   reached as shared references from the first time on that they are taken.
/// - What is taken lies in the window as a whole, at a multiple of its alignment, is nobody else's, and stays till it is given.
pub unsafe trait Source: Sync {
    /// Addresses that nodes may have, up to 256 GiB; the bytes before them cannot be reached.
    fn window(&self) -> Range<usize>;

    /// A node's address, its node in whatever state it was given, or zero.
    ///
    /// # Errors
    ///
    /// As [`Nodes::take`].
    fn take(&self) -> Result<usize>;

    /// Takes it back.
    fn give(&self, node: usize);

    /// Nodes have been retired: they go back by [`Forest::seal`] and [`Forest::settle`], which somebody should call before long.
    /// Outside of every lock of an array.
    fn note_retired(&self);

    /// Whether this is a fork child, and all is its parent's.
    fn is_inherited(&self) -> bool;
}

/// Who has a forest.
pub trait Forests: Sync {
    /// The forest of this process: made with the first call, and anew in a fork child.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoAddresses`], [`crate::Error::System`].
    fn forest(&'static self) -> Result<&'static Forest>;

    /// Bytes of memory behind its nodes, in use and free.
    fn node_bytes(&self) -> u64;
}

/// Nodes of many arrays. Never taken down.
///
/// # Invariants
///
/// `base` lies one unit before the window of `source`, which ends `end` units behind it.
pub struct Forest {
    base: usize,
    /// A number from here on is none of a node.
    end: usize,
    source: &'static dyn Source,
    arrays: Arrays<Self>,
    /// Apart from what readers look at.
    lists: Padded<Lists>,
}

/// Nodes that have been retired.
#[derive(Default)]
struct Lists {
    /// The list of those that nobody waits for yet: the last one, and how many.
    limbo: AtomicU64,
    /// Lists of those that no reader can be in: the last one, and a count against its reuse between two looks.
    ripe: AtomicU64,
    /// Lists that wait for readers.
    waiting: AtomicU32,
    /// Nodes that were taken, and have not been given back.
    #[cfg(test)]
    in_use: AtomicU32,
}

impl Forest {
    /// # Errors
    ///
    /// [`crate::Error::System`] if there are no addresses for what is known of arrays.
    pub fn new(source: &'static dyn Source) -> Result<Self> {
        let window = source.window();
        assert!(window.start.is_multiple_of(UNIT_BYTES), "nodes have an alignment");
        let units = window.len() >> UNIT_SHIFT;
        assert!(units <= u32::MAX as usize, "a number has 32 bits");
        let end = (units + 2).saturating_sub(size_of::<Node>() / UNIT_BYTES);
        let (base, lists) = (window.start - UNIT_BYTES, Padded(Lists::default()));
        Ok(Self { base, end, source, arrays: Arrays::new()?, lists })
    }

    /// The number of the node at an address of the window.
    pub fn number_of(&self, node: usize) -> u32 {
        ((node - self.base) >> UNIT_SHIFT) as u32
    }

    /// Lets those in limbo wait for the readers that are there now.
    pub fn seal(&'static self) {
        let list = self.lists.0.limbo.swap(0, AcqRel) as u32;
        if list == 0 {
            return;
        }
        self.lists.0.waiting.fetch_add(1, Relaxed);
        let guard = super::pin();
        guard.defer(move || {
            self.ripen(list);
            self.lists.0.waiting.fetch_sub(1, Release);
        });
        guard.flush();
    }

    /// Whether some wait for readers. Those that do no more are found by [`Forest::settle`] then.
    pub fn is_waiting(&self) -> bool {
        self.lists.0.waiting.load(Acquire) > 0
    }

    /// Gives back all that no reader can be in.
    pub fn settle(&self) {
        while self.settle_one() {}
    }

    /// The same of one list; says whether there was one.
    fn settle_one(&self) -> bool {
        let Some(mut number) = self.take_ripe() else { return false };
        while number != 0 {
            let next = self.node(number).next();
            self.give(number);
            number = next;
        }
        true
    }

    fn ripen(&self, list: u32) {
        let ripe = &self.lists.0.ripe;
        let mut seen = ripe.load(Relaxed);
        loop {
            self.node(list).set_next_list(seen as u32);
            match ripe.compare_exchange_weak(seen, counted(seen, list), AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    fn take_ripe(&self) -> Option<u32> {
        let ripe = &self.lists.0.ripe;
        let mut seen = ripe.load(Acquire);
        loop {
            let list = seen as u32;
            if list == 0 {
                return None;
            }
            // Another may have taken it meanwhile: then the count has moved on.
            let next = self.node(list).next_list();
            match ripe.compare_exchange_weak(seen, counted(seen, next), AcqRel, Acquire) {
                Ok(_) => return Some(list),
                Err(now) => seen = now,
            }
        }
    }

    /// Bytes of what is known of arrays that are resident.
    pub fn metadata_bytes(&self) -> u64 {
        self.arrays.resident_bytes()
    }

    #[cfg(test)]
    pub fn in_use(&self) -> u32 {
        self.lists.0.in_use.load(Relaxed)
    }
}

/// A word with that number, whose count has moved on.
fn counted(seen: u64, number: u32) -> u64 {
    (seen >> HALF).wrapping_add(1) << HALF | u64::from(number)
}

impl Nodes for Forest {
    #[inline]
    fn node(&self, number: u32) -> &Node {
        let units = number as usize;
        assert!(units < self.end);
        // SAFETY: inside the window, or in the unit before it, which cannot be reached, at a multiple of the alignment. What is
        // there are atomic words, of nodes or zero (contract of `Source`), for any of which zero bits are a value.
        unsafe { &*((self.base + (units << UNIT_SHIFT)) as *const Node) }
    }

    fn take(&self) -> Result<u32> {
        self.settle_one();
        let node = self.source.take()?;
        #[cfg(test)]
        self.lists.0.in_use.fetch_add(1, Relaxed);
        Ok(self.number_of(node))
    }

    fn give(&self, number: u32) {
        #[cfg(test)]
        self.lists.0.in_use.fetch_sub(1, Relaxed);
        self.source.give(std::ptr::from_ref(self.node(number)) as usize);
    }

    fn retire(&'static self, number: u32) {
        let limbo = &self.lists.0.limbo;
        let mut seen = limbo.load(Relaxed);
        loop {
            self.node(number).set_next(seen as u32);
            match limbo.compare_exchange_weak(seen, counted(seen, number), AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// The collector allocates, which may be answered by making room: not under the lock of an array.
    fn collect(&'static self) {
        if self.lists.0.limbo.load(Relaxed) >> HALF >= BATCH {
            self.seal();
        }
        self.source.note_retired();
    }

    fn arrays(&self) -> &Arrays<Self> {
        &self.arrays
    }

    fn are_inherited(&self) -> bool {
        self.source.is_inherited()
    }
}

#[cfg(all(test, shuttle))]
mod shuttle_tests {
    use super::super::shuttle_tests::run_in_many_orders;
    use super::super::test_forest;
    use super::*;
    use std::sync::Arc;

    const LISTS: usize = 3;

    /// Threads take ripe lists and put them back: a list is one thread's at a time, and none is lost.
    #[test]
    fn ripe_lists_are_taken_by_one() {
        run_in_many_orders(|| {
            thread_local! {
                static FOREST: &'static Forest = test_forest::forest_of(LISTS);
            }
            let forest = FOREST.with(|forest| *forest);
            let lists: Arc<[u32; LISTS]> = Arc::new(std::array::from_fn(|_| forest.take().unwrap()));
            let holders: Arc<[AtomicU32; LISTS]> = Arc::new(std::array::from_fn(|_| AtomicU32::new(0)));
            lists.iter().for_each(|list| forest.ripen(*list));
            let threads = [(); 3].map(|()| {
                let (lists, holders) = (lists.clone(), holders.clone());
                shuttle::thread::spawn(move || {
                    let hold = |list: u32, change: fn(&AtomicU32) -> u32| {
                        change(&holders[lists.iter().position(|known| *known == list).unwrap()])
                    };
                    for _ in 0..3 {
                        let taken: Vec<u32> = (0..2).filter_map(|_| forest.take_ripe()).collect();
                        for list in &taken {
                            assert_eq!(hold(*list, |held| held.fetch_add(1, Relaxed)), 0, "two have it");
                        }
                        for list in taken {
                            hold(list, |held| held.fetch_sub(1, Relaxed));
                            forest.ripen(list);
                        }
                    }
                })
            });
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let mut left: Vec<u32> = std::iter::from_fn(|| forest.take_ripe()).collect();
            left.iter().for_each(|list| forest.give(*list));
            left.sort_unstable();
            let mut all = lists.to_vec();
            all.sort_unstable();
            assert_eq!(left, all, "each is there once");
        });
    }
}
