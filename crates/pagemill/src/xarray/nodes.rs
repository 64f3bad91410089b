//! Where nodes come from: a trait, and a table in memory mapped by hand.
//!
//! Nodes are never from the global allocator; what [`crossbeam_epoch`] notes of those that wait for readers is.
//! Lock order: the lock of an array, then that of the free list.

use super::node::Node;
use crate::arena::{Table, place};
use crate::error::{Error, Result};
use crate::sync::{AtomicU32, Guarded, Relaxed};
use crate::units::BLOCK_BYTES;

/// Who has the nodes of arrays; many arrays share one.
///
/// Numbers are not 0, and 32 bits.
pub trait Nodes: Sync + 'static {
    /// The node of this number, which was taken. Costs what a table's index does: readers call it at each level.
    fn node(&self, number: u32) -> &Node;

    /// A node of which all slots and marks are zero.
    ///
    /// # Errors
    ///
    /// [`Error::NoAddresses`] when there are no more, [`Error::System`] if the kernel refuses memory.
    fn take(&self) -> Result<u32>;

    /// Takes back a node that is zero as it was, and that no reader can have.
    fn give(&self, number: u32);

    /// Takes `count` nodes and puts them before those of a list ([`Node::set_next`]), whose first and length are told.
    ///
    /// # Errors
    ///
    /// As [`Nodes::take`]: then the list has those that were taken.
    fn take_some(&self, count: u32, (head, len): (&mut u32, &mut u32)) -> Result<()> {
        for _ in 0..count {
            let number = self.take()?;
            self.node(number).set_next(*head);
            (*head, *len) = (number, *len + 1);
        }
        Ok(())
    }

    /// Takes back a list of nodes that are zero but for their links, and that no reader can have.
    fn give_all(&self, head: u32) {
        let mut head = head;
        while head != 0 {
            let next = self.node(head).take_next();
            self.give(head);
            head = next;
        }
    }

    /// Takes back a node, in whatever state, that readers may still be in: [`Node::clear`] and [`Nodes::give`] follow when all
    /// guards ([`super::pin`]) that are there now have gone. Called under the lock of an array.
    fn retire(&'static self, number: u32);

    /// Bytes of memory behind the nodes, in use and free.
    fn resident_bytes(&self) -> u64;

    /// Nodes that were taken, and have not been given back.
    fn in_use(&self) -> u32;
}

/// Nodes in a table that is opened as it grows. What is given back stays for the next.
pub struct TableNodes {
    table: Table<Node>,
    /// Nodes that may be numbered, from 1 on.
    limit: u32,
    free: Guarded<Free>,
    in_use: AtomicU32,
    /// How many were retired, modulo [`FLUSH_EVERY`].
    retired: AtomicU32,
}

struct Free {
    /// The node that was given back last; 0 none.
    head: u32,
    /// The next that was never taken.
    fresh: u32,
}

/// Most nodes: room for 2^32 indices.
const MAX_NODES: u32 = 1 << 26;

/// A table that is as large as this is worth huge pages.
const HUGE_FROM_BYTES: usize = 16 * BLOCK_BYTES;

/// After so many that were retired, those whose time has come are given back: garbage has a bound.
const FLUSH_EVERY: u32 = 32;

impl TableNodes {
    /// Reserves addresses; memory comes as nodes are taken. It stays for the life of the process.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if there are no such addresses.
    pub fn place() -> Result<&'static Self> {
        Self::with_limit(MAX_NODES)
    }

    /// The same, with room for so many.
    pub(super) fn with_limit(limit: u32) -> Result<&'static Self> {
        place(Self {
            table: Table::new(limit as usize + 1)?,
            limit,
            free: Guarded::new(Free { head: 0, fresh: 1 }),
            in_use: AtomicU32::new(0),
            retired: AtomicU32::new(0),
        })
    }

    /// Waits until nobody takes or gives a node. [`TableNodes::release_after_fork`] ends it on both sides.
    pub(crate) fn acquire_for_fork(&self) {
        self.free.acquire_when(|_| true);
    }

    pub(crate) fn release_after_fork(&self) {
        self.free.release();
    }

    fn take_fresh(&self, free: &mut Free) -> Result<u32> {
        let number = free.fresh;
        if number > self.limit {
            return Err(Error::NoAddresses { wanted_bytes: size_of::<Node>() as u64 });
        }
        let at = number as usize;
        self.table.open(1, at, at + 1)?;
        if at == HUGE_FROM_BYTES / size_of::<Node>() {
            self.table.allow_huge();
        }
        free.fresh += 1;
        Ok(number)
    }
}

impl Nodes for TableNodes {
    #[inline]
    fn node(&self, number: u32) -> &Node {
        self.table.get(number as usize)
    }

    fn take(&self) -> Result<u32> {
        let number = self.free.with(|free| match free.head {
            0 => self.take_fresh(free),
            head => {
                free.head = self.node(head).take_next();
                Ok(head)
            }
        })?;
        self.in_use.fetch_add(1, Relaxed);
        Ok(number)
    }

    fn give(&self, number: u32) {
        self.in_use.fetch_sub(1, Relaxed);
        self.free.with(|free| {
            self.node(number).set_next(free.head);
            free.head = number;
        });
    }

    /// The first of the free list, as they are linked there.
    fn take_some(&self, count: u32, (head, len): (&mut u32, &mut u32)) -> Result<()> {
        self.free.with(|free| {
            let mut taken = 0;
            while taken < count && free.head != 0 {
                let number = free.head;
                free.head = self.node(number).next();
                self.node(number).set_next(*head);
                (*head, taken) = (number, taken + 1);
            }
            let mut result = Ok(());
            while taken < count && result.is_ok() {
                result = self.take_fresh(free).map(|number| {
                    self.node(number).set_next(*head);
                    (*head, taken) = (number, taken + 1);
                });
            }
            *len += taken;
            self.in_use.fetch_add(taken, Relaxed);
            result
        })
    }

    fn give_all(&self, head: u32) {
        if head == 0 {
            return;
        }
        let (mut last, mut count) = (head, 1);
        while self.node(last).next() != 0 {
            (last, count) = (self.node(last).next(), count + 1);
        }
        self.in_use.fetch_sub(count, Relaxed);
        self.free.with(|free| {
            self.node(last).set_next(free.head);
            free.head = head;
        });
    }

    fn retire(&'static self, number: u32) {
        let guard = super::pin();
        guard.defer(move || {
            self.node(number).clear();
            self.give(number);
        });
        if self.retired.fetch_add(1, Relaxed) % FLUSH_EVERY == FLUSH_EVERY - 1 {
            guard.flush();
        }
    }

    fn resident_bytes(&self) -> u64 {
        let fresh = self.free.with(|free| free.fresh);
        self.table.resident_bytes(0, fresh as usize)
    }

    fn in_use(&self) -> u32 {
        self.in_use.load(Relaxed)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    /// Numbers come anew, then from the free list; beyond the limit there are none.
    #[test]
    fn nodes_are_used_again() {
        let nodes = TableNodes::with_limit(2).unwrap();
        let (one, two) = (nodes.take().unwrap(), nodes.take().unwrap());
        assert_eq!((one, two, nodes.in_use()), (1, 2, 2));
        assert!(matches!(nodes.take(), Err(Error::NoAddresses { .. })));
        nodes.give(one);
        nodes.give(two);
        assert_eq!((nodes.take().unwrap(), nodes.take().unwrap(), nodes.in_use()), (two, one, 2));
        assert!(nodes.node(one).slots.iter().all(|slot| slot.peek().is_empty()), "a free node's link is gone");
    }

    /// Lists are taken from what is free and then anew, join the one that is there, and go back as one; what a list lacks at the limit
    /// it is told.
    #[test]
    fn nodes_come_and_go_as_lists() {
        let nodes = TableNodes::with_limit(5).unwrap();
        let (mut head, mut len) = (0, 0);
        nodes.give(nodes.take().unwrap());
        nodes.take_some(2, (&mut head, &mut len)).unwrap();
        nodes.take_some(0, (&mut head, &mut len)).unwrap();
        nodes.take_some(1, (&mut head, &mut len)).unwrap();
        assert_eq!((head, len, nodes.in_use()), (3, 3, 3));
        assert_eq!([3, 2, 1].map(|number| nodes.node(number).next()), [2, 1, 0]);
        assert!(matches!(nodes.take_some(3, (&mut head, &mut len)), Err(Error::NoAddresses { .. })));
        assert_eq!((head, len, nodes.in_use()), (5, 5, 5));
        nodes.give_all(head);
        nodes.give_all(0);
        assert_eq!(nodes.in_use(), 0);
        let mut all: Vec<u32> = (0..5).map(|_| nodes.take().unwrap()).collect();
        all.sort_unstable();
        assert_eq!(all, [1, 2, 3, 4, 5], "each once");
        assert!(all.iter().all(|number| nodes.node(*number).slots.iter().all(|slot| slot.peek().is_empty())));
    }

    /// What is retired comes back when nobody is at it; memory is behind what was used only.
    #[test]
    fn retired_nodes_come_back() {
        let nodes = TableNodes::place().unwrap();
        for _ in 0..1000 {
            let number = nodes.take().unwrap();
            nodes.node(number).set_used(1);
            nodes.retire(number);
        }
        super::super::model_tests::await_none_in_use(nodes);
        let number = nodes.take().unwrap();
        assert_eq!(nodes.node(number).used(), 0);
        assert!((1..=4 * BLOCK_BYTES as u64).contains(&nodes.resident_bytes()));
    }
}
