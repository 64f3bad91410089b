//! A process with a heap, for tests.
#![allow(unsafe_code)] // the only heap of an arena

use crate::Heap;
use pagemill_core::arena::{Arena, Layout, place};
use pagemill_core::error::Result;
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::reclaim::{Account, tree::UNLIMITED};

/// An account, an arena and a heap, which the tests of this crate use.
///
/// Example: the tests of this crate.
pub struct TestProcess {
    pub account: &'static Account,
    pub arena: &'static Arena,
    pub heap: &'static Heap,
}

impl TestProcess {
    pub fn new(layout: Layout, limit_bytes: u64) -> Result<&'static Self> {
        let account = Account::make(limit_bytes)?;
        let arena: &'static Arena = place(Arena::new(layout, account)?)?;
        let helper: &'static Helper = place(Helper::new(account))?;
        // SAFETY: the arena was created above and gets no other heap.
        let heap: &'static Heap = place(unsafe { Heap::new(arena, account, helper) }?)?;
        account.register(heap);
        account.set_helper(helper);
        place(Self { account, arena, heap })
    }

    pub fn for_test() -> &'static Self {
        Self::new(Layout::for_test(), UNLIMITED).expect("address space for a test")
    }
}
