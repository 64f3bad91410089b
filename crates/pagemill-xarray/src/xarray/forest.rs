//! A forest: nodes in memory that another component owns and that can be moved. Page caches use it.
//!
//! A node's number is its offset in a window of addresses, so a shift and an addition yield the node's address. As long
//! as the process lives, the window contains only nodes. A read without a guard ([`super::XArray::hint`]) therefore
//! finds a node, of any array, or zeros where memory was returned.
//!
//! ```text
//! allocated --linked--> in a tree --unlinked--> retired --32 of them--> in a grace period --> ripe --> returned
//! ```
//!
//! The grace period of a batch ends in the epoch collector, which may run in any thread. The collector only adds the
//! batch to the list `ripe`, whose nodes no reader can access. These nodes are returned to their source when a thread
//! allocates a node, outside of all locks, or by [`Forest::free_retired`], which the source should call soon.
//!
//! Traits for the modules above: [`Source`] (owner of the memory), [`Forests`] (owner of a forest).
#![allow(unsafe_code)] // reaches nodes at addresses that their source keeps valid

use super::arrays::Arrays;
use super::node::Node;
use super::nodes::Nodes;
use super::relocate::relocate;
use pagemill_core::epoch;
use pagemill_core::error::Result;
use pagemill_core::sync::{Acquire, AtomicU32, AtomicU64, Padded, Relaxed, Release};
use std::ops::Range;
use std::sync::atomic::Ordering::AcqRel;

/// Unit of node numbers in bytes. A node's number is its offset in the window, in these units.
const UNIT_BYTES: usize = align_of::<Node>();
/// Log2 of [`UNIT_BYTES`].
const UNIT_SHIFT: u32 = UNIT_BYTES.trailing_zeros();

/// Number of retired nodes in a batch. A batch has one grace period.
const BATCH_LEN: u64 = 32;

/// Number of bits in each half of `BatchLists::retired` and `BatchLists::ripe`. The lower half is a node number. The
/// upper half is the count of retired nodes in `retired`, and a counter against the ABA problem in `ripe`.
const HALF_BITS: u32 = 32;

/// The owner of the memory from which a forest allocates its nodes.
///
/// # Safety
///
/// - The window stays memory of the process forever, or is inaccessible. Accessible memory contains zeros or nodes.
///   From its first use on, a node is accessed only by shared references.
/// - A node that `take` returned lies entirely inside the window, is aligned, has no other user, and stays valid until
///   `give`.
///
/// Example: [`XArray`](super::XArray).
pub unsafe trait Source: Sync {
    /// Returns the range of the addresses that nodes may have, up to 256 GiB. The 64 bytes before the range must be
    /// inaccessible.
    fn window(&self) -> Range<usize>;

    /// Allocates a node and returns its address. The node has the contents that it had at its last `give`, or zeros.
    ///
    /// # Errors
    ///
    /// [`NoAddresses`](pagemill_core::Error::NoAddresses), [`System`](pagemill_core::Error::System).
    fn take(&self) -> Result<usize>;

    /// Frees the node at address `node`.
    fn give(&self, node: usize);

    /// Called after nodes have been retired. The calling thread holds no lock of an array. The source should soon call
    /// [`Forest::seal`] and [`Forest::free_retired`], which return the nodes.
    fn note_retired(&self);

    /// Returns whether this process is a fork child and all nodes belong to its parent.
    fn is_inherited(&self) -> bool;
}

/// The owner of a forest.
///
/// Example: [`XArray`](super::XArray).
pub trait Forests: Sync {
    /// Returns the forest of this process. The first call creates the forest, also in a fork child.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::NoAddresses`], [`pagemill_core::Error::System`].
    fn forest(&'static self) -> Result<&'static Forest>;

    /// Returns the bytes of memory for the forest's nodes, used and free.
    fn node_bytes(&self) -> u64;
}

/// The nodes of many arrays, in memory of a [`Source`]. A forest is never dropped.
///
/// # Invariants
///
/// `base` is `UNIT_BYTES` before the window of `source`. The window ends `end` units of `UNIT_BYTES` after `base`.
///
/// Example: [`XArray`](super::XArray).
pub struct Forest {
    base: usize,
    /// The lowest number that is too large to be the number of a node.
    end: usize,
    source: &'static dyn Source,
    arrays: Arrays<Self>,
    /// The lists of retired nodes. They have a cache line of their own, apart from fields that readers use.
    lists: Padded<BatchLists>,
}

/// The lists of retired nodes, and of batches of retired nodes.
#[derive(Default)]
struct BatchLists {
    /// List of the retired nodes whose grace period has not begun: the number of the node that was retired last, and
    /// the number of nodes in the list.
    retired: AtomicU64,
    /// List of the batches that no reader can access any more: the first node of the batch that was added last, and a
    /// counter against the ABA problem.
    ripe: AtomicU64,
    /// Number of batches that are in their grace period.
    waiting: AtomicU32,
    /// Number of nodes that were allocated from the source and not yet freed.
    #[cfg(any(test, feature = "test-util"))]
    in_use: AtomicU32,
}

impl Forest {
    /// Creates a forest without nodes.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::System`] if there is no address space for the table of arrays.
    pub fn new(source: &'static dyn Source) -> Result<Self> {
        let window = source.window();
        assert!(window.start.is_multiple_of(UNIT_BYTES), "nodes have an alignment");
        let units = window.len() >> UNIT_SHIFT;
        assert!(units <= u32::MAX as usize, "a number has 32 bits");
        let end = (units + 2).saturating_sub(size_of::<Node>() / UNIT_BYTES);
        let (base, lists) = (window.start - UNIT_BYTES, Padded(BatchLists::default()));
        Ok(Self { base, end, source, arrays: Arrays::new()?, lists })
    }

    /// Returns the number of the node at address `node`, which lies in the window.
    fn number_of(&self, node: usize) -> u32 {
        ((node - self.base) >> UNIT_SHIFT) as u32
    }

    /// Moves the node at address `old` to address `new` and returns true. The memory at `old` then belongs to the
    /// caller. Returns false, and changes nothing, if the node is in no tree, or if another thread holds the lock of
    /// its array. Never waits. Cost: a copy of the node, and a store to each node below.
    ///
    /// # Safety
    /// `old` and `new` are addresses of nodes of this forest's source, and `new` belongs to the caller. After a move,
    /// the caller does not reuse `old` before all current guards are dropped.
    pub unsafe fn relocate(&'static self, old: usize, new: usize) -> bool {
        relocate(self, self.number_of(old), self.number_of(new))
    }

    /// Begins the grace period of the retired nodes that have none yet. They become one batch.
    pub fn seal(&'static self) {
        let list = self.lists.0.retired.swap(0, AcqRel) as u32;
        if list == 0 {
            return;
        }
        self.lists.0.waiting.fetch_add(1, Relaxed);
        let guard = super::pin();
        epoch::defer(&guard, move || {
            self.add_ripe(list);
            self.lists.0.waiting.fetch_sub(1, Release);
        });
        epoch::flush(&guard);
    }

    /// Returns whether any batch is in its grace period. After the grace period, [`Forest::free_retired`] returns the
    /// nodes of the batch.
    pub fn is_waiting(&self) -> bool {
        self.lists.0.waiting.load(Acquire) > 0
    }

    /// Frees all retired nodes that no reader can access any more.
    pub fn free_retired(&self) {
        while self.free_retired_batch() {}
    }

    /// Frees the nodes of one batch that no reader can access any more. Returns false if there is no such batch.
    fn free_retired_batch(&self) -> bool {
        let Some(mut number) = self.take_ripe() else { return false };
        while number != 0 {
            let next = self.node(number).next();
            self.give(number);
            number = next;
        }
        true
    }

    /// Adds a batch to the list `ripe` of batches that no reader can access any more. `list` is the number of its first
    /// node.
    fn add_ripe(&self, list: u32) {
        let ripe = &self.lists.0.ripe;
        let mut seen = ripe.load(Relaxed);
        loop {
            self.node(list).set_next_batch(seen as u32);
            match ripe.compare_exchange_weak(seen, with_next_counter(seen, list), AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Removes the latest batch from the list `ripe` of batches that no reader can access any more. Returns the number
    /// of its first node.
    fn take_ripe(&self) -> Option<u32> {
        let ripe = &self.lists.0.ripe;
        let mut seen = ripe.load(Acquire);
        loop {
            let list = seen as u32;
            if list == 0 {
                return None;
            }
            // If another thread has removed the batch, the counter has changed.
            let next = self.node(list).next_batch();
            match ripe.compare_exchange_weak(seen, with_next_counter(seen, next), AcqRel, Acquire) {
                Ok(_) => return Some(list),
                Err(now) => seen = now,
            }
        }
    }

    /// Returns the resident bytes of the table of arrays.
    pub fn metadata_bytes(&self) -> u64 {
        self.arrays.resident_bytes()
    }

    #[cfg(any(test, feature = "test-util"))]
    pub fn in_use(&self) -> u32 {
        self.lists.0.in_use.load(Relaxed)
    }
}

/// Returns a word for `BatchLists::ripe` with the node number `number` and the counter of the word `seen`, plus one.
fn with_next_counter(seen: u64, number: u32) -> u64 {
    (seen >> HALF_BITS).wrapping_add(1) << HALF_BITS | u64::from(number)
}

impl Nodes for Forest {
    #[inline]
    fn node(&self, number: u32) -> &Node {
        let units = number as usize;
        assert!(units < self.end);
        // SAFETY: the address is aligned and lies inside the window, or in the inaccessible unit before it. The window
        // contains only nodes or zeros (contract of `Source`), and a node consists of atomic words, for which zero bits
        // are valid.
        unsafe { &*((self.base + (units << UNIT_SHIFT)) as *const Node) }
    }

    fn take(&self) -> Result<u32> {
        self.free_retired_batch();
        let node = self.source.take()?;
        #[cfg(any(test, feature = "test-util"))]
        self.lists.0.in_use.fetch_add(1, Relaxed);
        Ok(self.number_of(node))
    }

    fn give(&self, number: u32) {
        #[cfg(any(test, feature = "test-util"))]
        self.lists.0.in_use.fetch_sub(1, Relaxed);
        self.source.give(std::ptr::from_ref(self.node(number)) as usize);
    }

    fn retire(&'static self, number: u32) {
        let retired = &self.lists.0.retired;
        let mut seen = retired.load(Relaxed);
        loop {
            self.node(number).set_next(seen as u32);
            match retired.compare_exchange_weak(seen, with_next_counter(seen, number), AcqRel, Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Begins the grace period of the retired nodes if they fill a batch, and notifies the source. The epoch collector
    /// allocates, which may trigger reclaim. So `collect` must not run under the lock of an array.
    fn collect(&'static self) {
        if self.lists.0.retired.load(Relaxed) >> HALF_BITS >= BATCH_LEN {
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
    use super::super::shuttle_tests::run_in_many_schedules;
    use super::super::test_forest;
    use super::*;
    use std::sync::Arc;

    const LISTS: usize = 3;

    /// Threads remove batches from the list `ripe` and put them back. Each batch must belong to one thread at a time,
    /// and no batch may be lost.
    #[test]
    fn a_ripe_batch_belongs_to_one_thread() {
        run_in_many_schedules(|| {
            thread_local! {
                static FOREST: &'static Forest = test_forest::forest_of(LISTS);
            }
            let forest = FOREST.with(|forest| *forest);
            let lists: Arc<[u32; LISTS]> = Arc::new(std::array::from_fn(|_| forest.take().unwrap()));
            let holders: Arc<[AtomicU32; LISTS]> = Arc::new(std::array::from_fn(|_| AtomicU32::new(0)));
            lists.iter().for_each(|list| forest.add_ripe(*list));
            let threads = [(); 3].map(|()| {
                let (lists, holders) = (lists.clone(), holders.clone());
                shuttle::thread::spawn(move || {
                    let hold = |list: u32, change: fn(&AtomicU32) -> u32| {
                        change(&holders[lists.iter().position(|known| *known == list).unwrap()])
                    };
                    for _ in 0..3 {
                        let taken: Vec<u32> = (0..2).filter_map(|_| forest.take_ripe()).collect();
                        for list in &taken {
                            assert_eq!(hold(*list, |held| held.fetch_add(1, Relaxed)), 0, "two threads have the batch");
                        }
                        for list in taken {
                            hold(list, |held| held.fetch_sub(1, Relaxed));
                            forest.add_ripe(list);
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
            assert_eq!(left, all, "each batch is in the list once");
        });
    }
}
