//! Makes random calls on the heap. Each four bytes of the input are decoded as one operation. The results are checked
//! as in `crates/pagemill/tests/model.rs`.
//!
//! Run it by `cargo +nightly fuzz run heap_calls`. All inputs use the same heaps, because a reservation of addresses is
//! never returned. At the end of each input, all its allocations are freed and purged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemill_core::Error;
use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_testbed::Testbed;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// Maximum number of live allocations during one input.
const MAX_LIVE_ALLOCATIONS: usize = 32;

/// Maximum sum of the sizes of all live allocations.
const MAX_LIVE_BYTES: usize = 128 << 20;

/// Allocations up to this size are written and compared as a whole. Of a larger allocation, only [`END_BYTES`] at its
/// start and at its end are written and compared.
const FILLED_BYTES: usize = 256 << 10;

/// Number of bytes at the start, and at the end, of a larger allocation that are written and compared.
const END_BYTES: usize = 4096;

fn heaps() -> &'static [&'static Testbed; 3] {
    static HEAPS: OnceLock<[&'static Testbed; 3]> = OnceLock::new();
    HEAPS.get_or_init(|| {
        let small = Layout { use_huge: false, ..Layout::for_test() };
        let make = |layout, limit| Testbed::new(layout, limit).expect("address space");
        [make(Layout::for_test(), UNLIMITED), make(small, UNLIMITED), make(Layout::for_test(), 24 << 20)]
    })
}

struct LiveAllocation {
    size: usize,
    byte: u8,
}

struct HeapModel {
    pagemill: &'static Testbed,
    is_limited: bool,
    live: BTreeMap<usize, LiveAllocation>,
    next_byte: u8,
}

/// An operation of the input: its kind, a number that selects an allocation or a shift, and a number from which sizes
/// are derived.
struct Operation {
    kind: u8,
    pick: u8,
    amount: u16,
}

impl Operation {
    /// Returns the size of an allocation. It is often near a power of two, where the size classes change.
    fn size(&self) -> usize {
        let power = 1usize << (self.pick % 26);
        match self.amount % 4 {
            0 => power,
            1 => power.saturating_sub(1 + usize::from(self.amount >> 2)),
            2 => power + 1 + usize::from(self.amount >> 2),
            _ => usize::from(self.amount) << (self.pick % 11),
        }
    }

    fn align(&self) -> usize {
        if self.amount & 0x8000 == 0 { 1 } else { 1 << (self.amount >> 8 & 0x1F) }
    }
}

impl HeapModel {
    fn run(&mut self, operation: &Operation) {
        match operation.kind % 10 {
            0..3 => self.allocate(operation, false),
            3 => self.allocate(operation, true),
            4..6 => self.free(operation),
            6 => self.resize(operation),
            7 => self.purge(operation),
            8 => self.pagemill.account.reconcile(),
            _ => self.free_invalid_address(operation),
        }
    }

    fn allocate(&mut self, operation: &Operation, is_zeroed: bool) {
        let (size, align) = (operation.size(), operation.align());
        let live_bytes: usize = self.live.values().map(|live| live.size).sum();
        if self.live.len() >= MAX_LIVE_ALLOCATIONS || live_bytes + size > MAX_LIVE_BYTES {
            return;
        }
        let heap = self.pagemill.heap;
        let found = if is_zeroed {
            heap.allocate_zeroed(size, align).map(|addr| (addr, true))
        } else {
            heap.allocate(size, align).map(|found| (found.addr, found.is_zero))
        };
        match found {
            Ok((addr, is_zero)) => {
                let addr = addr.as_ptr() as usize;
                assert_eq!(addr % align, 0);
                if is_zero {
                    check(addr, size, size, 0);
                }
                self.record_allocation(addr, size);
            }
            Err(error) => self.check_refusal(&error),
        }
    }

    fn record_allocation(&mut self, addr: usize, size: usize) {
        self.next_byte = self.next_byte % 255 + 1;
        write(addr, size, self.next_byte);
        assert!(self.live.insert(addr, LiveAllocation { size, byte: self.next_byte }).is_none(), "handed out twice");
    }

    fn pick(&self, operation: &Operation) -> Option<usize> {
        self.live.keys().nth(usize::from(operation.pick) % self.live.len().max(1)).copied()
    }

    fn free(&mut self, operation: &Operation) {
        let Some(addr) = self.pick(operation) else { return };
        self.live.remove(&addr);
        // SAFETY: the allocation was live and is not used again.
        unsafe { self.pagemill.heap.free(addr) }.unwrap();
        // SAFETY: invalid on purpose; the heap rejects the address.
        assert!(matches!(unsafe { self.pagemill.heap.free(addr) }, Err(Error::FreedBefore { .. })));
    }

    fn resize(&mut self, operation: &Operation) {
        let Some(addr) = self.pick(operation) else { return };
        let size = operation.size();
        // SAFETY: the allocation is live. Its old address is used again only if `resize` returns it.
        match unsafe { self.pagemill.heap.resize(addr, size) } {
            Ok(new) => {
                let new = new.as_ptr() as usize;
                let old = self.live.remove(&addr).unwrap();
                check(new, size.min(old.size), old.size, old.byte);
                self.record_allocation(new, size);
            }
            Err(error) => self.check_refusal(&error),
        }
    }

    fn purge(&self, operation: &Operation) {
        let urgency = if operation.pick.is_multiple_of(2) { Urgency::Request } else { Urgency::Limit };
        let want = if operation.amount == u16::MAX { u64::MAX } else { u64::from(operation.amount) << 12 };
        self.pagemill.heap.shrink(want, urgency);
    }

    /// Checks that the heap rejects an address that is not the start of a live allocation.
    fn free_invalid_address(&self, operation: &Operation) {
        let base = self.pick(operation).unwrap_or(self.pagemill.heap.base());
        let addr = base.wrapping_add(usize::from(operation.amount) << (operation.pick % 12));
        if !self.live.contains_key(&addr) {
            // SAFETY: invalid on purpose; the heap rejects the address.
            assert!(unsafe { self.pagemill.heap.free(addr) }.is_err());
            assert!(self.pagemill.heap.usable_bytes(addr).is_err());
        }
    }

    fn check_refusal(&self, error: &Error) {
        assert!(self.is_limited && matches!(error, Error::NoMemory { .. }), "{error}");
    }

    fn check(&self) {
        let mut end = 0;
        for (&addr, live) in &self.live {
            assert!(addr >= end, "overlap at {addr:#x}");
            let usable = self.pagemill.heap.usable_bytes(addr).unwrap();
            assert!(usable >= live.size);
            end = addr + usable;
            check(addr, live.size, live.size, live.byte);
        }
    }

    fn free_all(&mut self) {
        while let Some((addr, _)) = self.live.pop_first() {
            // SAFETY: the allocation was live and is not used again.
            unsafe { self.pagemill.heap.free(addr) }.unwrap();
        }
        self.pagemill.heap.shrink(u64::MAX, Urgency::Limit);
        self.pagemill.account.reconcile();
        assert_eq!((self.pagemill.account.resident(), self.pagemill.heap.free_bytes()), (0, 0));
    }
}

/// Returns the offset and the length of each part of an allocation of `size` bytes that is written and compared.
fn written_parts(size: usize) -> [(usize, usize); 2] {
    if size <= FILLED_BYTES { [(0, size), (0, 0)] } else { [(0, END_BYTES), (size - END_BYTES, END_BYTES)] }
}

fn write(addr: usize, size: usize, byte: u8) {
    for (offset, len) in written_parts(size) {
        // SAFETY: inside a live allocation of this input.
        unsafe { std::ptr::write_bytes((addr + offset) as *mut u8, byte, len) };
    }
}

/// Checks that the first `len` bytes of an allocation have the value `byte`. Only the parts that were written when the
/// allocation had `size` bytes are checked.
fn check(addr: usize, len: usize, size: usize, byte: u8) {
    for (offset, part) in written_parts(size) {
        let part = part.min(len.saturating_sub(offset));
        // SAFETY: inside a live allocation of this input.
        let bytes = unsafe { std::slice::from_raw_parts((addr + offset) as *const u8, part) };
        assert!(bytes.iter().all(|found| *found == byte), "{addr:#x} + {offset:#x} changed");
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((first, rest)) = input.split_first() else { return };
    let heap = usize::from(first % 3);
    let pagemill = heaps()[heap];
    let mut machine = HeapModel { pagemill, is_limited: heap == 2, live: BTreeMap::new(), next_byte: 0 };
    for bytes in rest.chunks_exact(4) {
        let operation = Operation { kind: bytes[0], pick: bytes[1], amount: u16::from_le_bytes([bytes[2], bytes[3]]) };
        machine.run(&operation);
        machine.check();
    }
    machine.free_all();
});
