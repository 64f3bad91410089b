//! Tests of invalid input and failures. Each must have an error of its own and change nothing. Later calls may succeed.
//!
//! The tests run one after the other, because some read the counters of the process, and some fork.
#![allow(unsafe_code)] // frees invalid pointers on purpose, forks, locks memory

use pagemill_core::Error;
use pagemill_core::arena::{Context, Layout, nodes::Nodes};
use pagemill_core::reclaim::{Reason, Shrinker, Urgency, tree::UNLIMITED};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, PageSize, os_page_bytes};
use pagemill_sys::{file, mem};
use pagemill_testbed::Testbed;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn exclusive_test() -> MutexGuard<'static, ()> {
    static RUNNING_TEST: Mutex<()> = Mutex::new(());
    RUNNING_TEST.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn in_small_pages() -> &'static Testbed {
    Testbed::new(Layout { use_huge: false, ..Layout::for_test() }, UNLIMITED).unwrap()
}

fn with_limit(limit: usize) -> &'static Testbed {
    Testbed::new(Layout::for_test(), limit as u64).unwrap()
}

fn allocate(pagemill: &Testbed, size: usize) -> usize {
    pagemill.heap.allocate(size, 1).unwrap().addr.as_ptr() as usize
}

/// Allocates memory and fills it with a byte.
fn filled(pagemill: &Testbed, size: usize, byte: u8) -> usize {
    let addr = allocate(pagemill, size);
    fill(addr, size, byte);
    addr
}

fn fill(addr: usize, size: usize, byte: u8) {
    // SAFETY: callers pass live allocations of their own.
    unsafe { std::ptr::write_bytes(addr as *mut u8, byte, size) };
}

/// Returns the offset of the first byte in the range that is not `byte`; `None` if there is no such byte.
fn first_other(addr: usize, size: usize, byte: u8) -> Option<usize> {
    // SAFETY: callers pass live allocations that no thread writes meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(addr as *const u8, size) };
    let expected = [byte; 4096];
    let chunk = bytes.chunks(expected.len()).position(|chunk| *chunk != expected[..chunk.len()])?;
    bytes[chunk * expected.len()..].iter().position(|found| *found != byte).map(|at| chunk * expected.len() + at)
}

fn free(pagemill: &Testbed, addr: usize) {
    // SAFETY: callers pass live allocations that they do not use again.
    unsafe { pagemill.heap.free(addr) }.unwrap();
}

fn resize(pagemill: &Testbed, addr: usize, size: usize) -> usize {
    // SAFETY: callers pass live allocations and use only the address returned.
    unsafe { pagemill.heap.resize(addr, size) }.unwrap().as_ptr() as usize
}

fn purge(pagemill: &Testbed) -> u64 {
    pagemill.heap.shrink(u64::MAX, Urgency::Limit)
}

/// Measures overcommitted memory, so that it is charged. Returns the number of charged bytes.
fn charge_of(pagemill: &Testbed) -> u64 {
    pagemill.account.reconcile();
    pagemill.account.resident()
}

/// Returns the resident bytes of a range, as the kernel reports them.
fn resident(addr: usize, len: usize) -> u64 {
    let (page, mut pages) = (os_page_bytes(), vec![0u8; len / os_page_bytes()]);
    mem::resident(addr, len, &mut pages).unwrap();
    (pages.iter().filter(|page| **page & 1 == 1).count() * page) as u64
}

/// Alignments that are not a power of two, or are larger than the address space, must be refused without a charge.
#[test]
fn bad_alignments_are_refused() {
    let _exclusive = exclusive_test();
    let pagemill = Testbed::for_test();
    for align in [0, 3, 48, 4097, usize::MAX, (1 << 62) + 1] {
        let error = pagemill.heap.allocate(100 * KIB, align).unwrap_err();
        assert!(matches!(error, Error::BadAlignment { align_bytes } if align_bytes == align), "{align}: {error}");
        assert_eq!(error.errno(), libc::EINVAL);
        assert!(pagemill.heap.allocate_zeroed(100 * KIB, align).is_err());
    }
    for align in [1 << 63, 1 << 62, 1 << 44] {
        let error = pagemill.heap.allocate(1, align).unwrap_err();
        assert!(matches!(error, Error::NoAddresses { .. } | Error::BadAlignment { .. }), "{align}: {error}");
    }
    assert_eq!((pagemill.account.resident(), pagemill.heap.free_bytes()), (0, 0));
    let addr = pagemill.heap.allocate(1, 1 << 30).unwrap().addr.as_ptr() as usize;
    assert_eq!(addr % (1 << 30), 0);
}

/// An allocation of size 0 must have an address of its own. Sizes beyond the address space must be refused. An
/// allocation that cannot grow to such a size must stay unchanged.
#[test]
fn impossible_sizes_are_errors() {
    let _exclusive = exclusive_test();
    let pagemill = Testbed::for_test();
    let (first, second) = (allocate(pagemill, 0), allocate(pagemill, 0));
    assert_ne!(first, second);
    assert!(pagemill.heap.usable_bytes(first).unwrap() > 0);
    let kept = filled(pagemill, 300 * KIB, 5);
    let before = charge_of(pagemill);
    for size in [usize::MAX, usize::MAX - 4095, isize::MAX as usize, 1 << 62, 1 << 45, (16 << 40) + 1] {
        for error in [
            pagemill.heap.allocate(size, 1).map(drop).unwrap_err(),
            pagemill.heap.allocate(size, 1 << 20).map(drop).unwrap_err(),
            pagemill.heap.allocate_zeroed(size, 1).map(drop).unwrap_err(),
            // SAFETY: the allocation is live. It stays valid, because the resize is refused.
            unsafe { pagemill.heap.resize(kept, size) }.map(drop).unwrap_err(),
        ] {
            assert!(matches!(error, Error::NoAddresses { .. }), "{size}: {error}");
            assert_eq!(error.errno(), libc::ENOMEM);
        }
    }
    assert_eq!(first_other(kept, 300 * KIB, 5), None);
    assert_eq!(charge_of(pagemill), before);
}

/// A second free of a slot must return an error with the slot's address and size, before and after a purge. Other slots
/// must stay unchanged.
#[test]
fn a_double_free_is_reported() {
    let _exclusive = exclusive_test();
    for pagemill in [Testbed::for_test(), in_small_pages()] {
        for size in [64 * KIB, 400 * KIB, 3 * MIB] {
            let (freed, kept) = (filled(pagemill, size, 1), filled(pagemill, size, 2));
            let len = pagemill.heap.usable_bytes(freed).unwrap();
            free(pagemill, freed);
            for _ in 0..2 {
                let before = (charge_of(pagemill), pagemill.heap.free_bytes());
                let is_named = |error: Error| matches!(error, Error::FreedBefore { addr, len_bytes } if (addr, len_bytes) == (freed, len));
                // SAFETY: the address is invalid on purpose; the heap rejects it.
                unsafe {
                    assert!(is_named(pagemill.heap.free(freed).unwrap_err()));
                    assert!(is_named(pagemill.heap.resize(freed, 5 * MIB).unwrap_err()));
                    assert!(is_named(pagemill.heap.resize(freed, 1).unwrap_err()));
                }
                assert!(is_named(pagemill.heap.usable_bytes(freed).unwrap_err()));
                assert_eq!((charge_of(pagemill), pagemill.heap.free_bytes()), before);
                purge(pagemill);
            }
            assert_eq!(first_other(kept, size, 2), None);
            let again = allocate(pagemill, size);
            assert_eq!(again, freed, "the slot is in its list once");
            assert_ne!(allocate(pagemill, size), freed, "the slot is in its list once");
        }
    }
}

/// The heap must refuse to free addresses inside of an allocation, between slots, and outside of the heap.
#[test]
fn foreign_and_interior_frees_are_reported() {
    let _exclusive = exclusive_test();
    let pagemill = Testbed::for_test();
    let (small, big) = (filled(pagemill, 80 * KIB, 1), filled(pagemill, 5 * MIB, 2));
    let extent = pagemill.arena.extent(BLOCK_BYTES, 1).unwrap();
    // SAFETY: the pages are in a new extent, which only this test uses.
    unsafe { pagemill.arena.commit(extent, BLOCK_BYTES) }.unwrap();
    let on_stack = 0u64;
    let other = Testbed::for_test();
    let others = filled(other, 80 * KIB, 3);
    let before = (charge_of(pagemill), pagemill.heap.free_bytes());
    for addr in [
        0,
        1,
        usize::MAX,
        &raw const on_stack as usize,
        extent,
        others,
        small + 1,
        small + 16 * KIB,
        small + 64 * KIB,
        small + 80 * KIB, // the next slot of the span, which was never allocated
        big + 64 * KIB,
        big + BLOCK_BYTES,
        big + 6 * MIB,
        pagemill.heap.base() + (63 << 30),
    ] {
        // SAFETY: the address is invalid on purpose; the heap rejects it.
        let errors = unsafe { [pagemill.heap.free(addr).err(), pagemill.heap.resize(addr, 70 * KIB).err()] };
        for error in errors.into_iter().chain([pagemill.heap.usable_bytes(addr).err()]) {
            let error = error.unwrap_or_else(|| panic!("{addr:#x} was taken for an allocation"));
            assert!(matches!(error, Error::NotAllocated { addr: named } if named == addr), "{error}");
            assert_eq!(error.errno(), libc::EINVAL);
        }
    }
    assert_eq!((charge_of(pagemill), pagemill.heap.free_bytes()), before);
    assert_eq!((first_other(small, 80 * KIB, 1), first_other(big, 5 * MIB, 2)), (None, None));
    free(pagemill, small);
    free(pagemill, big);
}

/// Allocations use up a heap that has 128 MiB of addresses. Further allocations must fail. After a free, the freed
/// memory must be allocated again.
#[test]
fn exhausted_address_space_recovers() {
    let _exclusive = exclusive_test();
    let layout = Layout { small_bytes: 64 * MIB, heap_bytes: 128 * MIB, ..Layout::for_test() };
    let pagemill = Testbed::new(layout, UNLIMITED).unwrap();
    let fill_up = || {
        let mut all = Vec::new();
        loop {
            match pagemill.heap.allocate(3 * MIB, 1) {
                Ok(allocation) => all.push(allocation.addr.as_ptr() as usize),
                Err(error) => {
                    assert!(matches!(error, Error::NoAddresses { wanted_bytes } if wanted_bytes >= 3 << 20), "{error}");
                    return all;
                }
            }
        }
    };
    let first = fill_up();
    assert_eq!(first.len(), 32);
    assert!(pagemill.heap.allocate(64 * KIB, 1).is_err());
    first.iter().for_each(|addr| free(pagemill, *addr));
    let mut second = fill_up();
    second.sort_unstable();
    assert_eq!(second, first);
    let mut extents = 0;
    while pagemill.arena.extent(2 * BLOCK_BYTES, 1).is_ok() {
        extents += 1;
    }
    assert_eq!(extents, 16);
    let error = pagemill.arena.extent(usize::MAX - BLOCK_BYTES, 1).unwrap_err();
    assert!(matches!(error, Error::NoAddresses { .. }), "{error}");
}

/// Without huge pages, the heap must use small pages, charge those that a measurement finds resident, and count them.
#[test]
fn small_pages_are_used_and_counted() {
    let _exclusive = exclusive_test();
    let (huge, small) = (stats::get(Counter::BlocksHuge), stats::get(Counter::BlocksSmall));
    let pagemill = in_small_pages();
    let addr = filled(pagemill, 500 * KIB, 9);
    assert_eq!(stats::get(Counter::BlocksHuge), huge);
    assert!(stats::get(Counter::BlocksSmall) > small, "the block is not counted");
    let charged = charge_of(pagemill);
    assert_eq!(charged, resident(pagemill.heap.base(), BLOCK_BYTES));
    assert!(charged >= 500 << 10);
    free(pagemill, addr);
    assert_eq!(purge(pagemill), charged);
    assert_eq!(charge_of(pagemill), 0);
}

/// A slot that was never touched is purged. When the slot is allocated again, it must be made resident and charged.
#[test]
fn an_untouched_slot_is_charged_later() {
    let _exclusive = exclusive_test();
    for (name, pagemill) in [("huge", Testbed::for_test()), ("small", in_small_pages())] {
        let addr = allocate(pagemill, 256 * KIB);
        free(pagemill, addr);
        purge(pagemill);
        assert_eq!((charge_of(pagemill), pagemill.heap.free_bytes()), (0, 0), "{name}: nothing is there");
        let again = filled(pagemill, 256 * KIB, 1);
        assert_eq!(again, addr);
        assert!(charge_of(pagemill) >= 256 << 10, "{name}: written, but not charged");
    }
}

/// If the kernel refuses huge pages to this process, the heap must use small pages and count that as a fallback.
#[test]
fn refused_huge_pages_fall_back_to_small_ones() {
    let _exclusive = exclusive_test();
    // SAFETY: changes a setting of this process, which is reverted below.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    let fallbacks = stats::get(Counter::BlocksFallback);
    let pagemill = Testbed::for_test();
    let addr = filled(pagemill, 500 * KIB, 9);
    let extent = pagemill.arena.extent(BLOCK_BYTES, 1).unwrap();
    // SAFETY: the pages are in a new extent, which only this test uses.
    unsafe { pagemill.arena.commit(extent, 64 * KIB) }.unwrap();
    fill(extent, 64 * KIB, 8);
    // SAFETY: as above.
    unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 0, 0, 0, 0) };
    assert_eq!(stats::get(Counter::BlocksFallback), fallbacks + 2);
    let charged = charge_of(pagemill);
    assert!((564 << 10..=580 << 10).contains(&charged), "{charged} bytes are charged");
    assert_eq!((first_other(addr, 500 * KIB, 9), first_other(extent, 64 * KIB, 8)), (None, None));
    free(pagemill, addr);
    purge(pagemill);
    // SAFETY: the pages are committed and are not used again.
    unsafe { pagemill.arena.decommit(extent, 64 * KIB) };
    assert_eq!(charge_of(pagemill), 0);
}

/// A software page of an extent must be populated at a commit; one of a slot only when `resize` copies into all of it.
#[test]
fn software_pages_are_populated_completely() {
    let _exclusive = exclusive_test();
    for bytes in [64 * KIB, 2 * MIB] {
        let (populated, page) = (stats::get(Counter::PagesPopulated), PageSize::new(bytes).unwrap());
        let pagemill = Testbed::new(Layout { use_huge: false, page, ..Layout::for_test() }, UNLIMITED).unwrap();
        let addr = allocate(pagemill, 200 * KIB);
        assert_eq!(charge_of(pagemill), 0, "nothing was touched");
        fill(addr, 200 * KIB, 3);
        // SAFETY: the old address is not used again.
        let addr = unsafe { pagemill.heap.resize(addr, 600 * KIB) }.unwrap().as_ptr() as usize;
        assert_eq!(stats::get(Counter::PagesPopulated) > populated, bytes < 200 * KIB);
        assert_eq!(first_other(addr, 200 * KIB, 3), None);
        free(pagemill, addr);
        purge(pagemill);
        assert_eq!(charge_of(pagemill), 0);
        let extent = pagemill.arena.extent(2 * BLOCK_BYTES, 1).unwrap();
        // SAFETY: the pages are in a new extent, which only this test uses.
        unsafe { pagemill.arena.commit(extent + bytes / 2, os_page_bytes()) }.unwrap();
        assert_eq!((pagemill.account.resident(), resident(extent, 2 * BLOCK_BYTES)), (bytes as u64, bytes as u64));
        // SAFETY: the pages are committed and are not used again.
        let freed = unsafe { pagemill.arena.decommit(extent + bytes / 2, os_page_bytes()) };
        assert_eq!((freed, pagemill.account.resident()), (bytes as u64, 0));
    }
}

fn run_on_cpu(cpu: usize) -> bool {
    // SAFETY: plain data; affects this thread only.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) == 0
    }
}

/// The heap has three logical NUMA nodes. Slots of two nodes must lie in separate spans and return to their own node.
/// They must serve other nodes if needed.
#[test]
fn slots_return_to_their_node() {
    let _exclusive = exclusive_test();
    std::thread::spawn(|| {
        let layout = Layout { nodes: Nodes::logical(3), ..Layout::for_test() };
        let pagemill = Testbed::new(layout, UNLIMITED).unwrap();
        if !(run_on_cpu(1) && run_on_cpu(0)) {
            println!("skipped: one CPU only");
            return;
        }
        let first = filled(pagemill, 256 * KIB, 1);
        run_on_cpu(1);
        let second = filled(pagemill, 256 * KIB, 2);
        assert_ne!(first / BLOCK_BYTES, second / BLOCK_BYTES, "nodes share a block");
        free(pagemill, first);
        run_on_cpu(0);
        free(pagemill, second);
        assert_eq!(allocate(pagemill, 256 * KIB), first, "freed elsewhere, still of node 0");
        let fresh = stats::get(Counter::SlotsFresh);
        assert_eq!(allocate(pagemill, 256 * KIB), second, "node 0 has none, node 1 helps");
        assert_eq!(stats::get(Counter::SlotsFresh), fresh);
    })
    .join()
    .unwrap();
}

/// An allocation over the limit must fail with the amounts in the error, and must charge nothing. After all allocations
/// are freed, a larger allocation within the limit must succeed.
#[test]
fn a_failed_allocation_reports_the_amounts() {
    let _exclusive = exclusive_test();
    let (pagemill, fallbacks) = (with_limit(16 * MIB), stats::get(Counter::BlocksFallback));
    free(pagemill, allocate(pagemill, MIB));
    if stats::get(Counter::BlocksFallback) > fallbacks {
        return println!("skipped: no huge pages to be had, small ones are charged when they are measured");
    }
    let mut all = Vec::new();
    let error = loop {
        match pagemill.heap.allocate(MIB, 1) {
            Ok(allocation) => all.push(allocation.addr.as_ptr() as usize),
            Err(error) => break error,
        }
    };
    assert_eq!(all.len(), 16);
    let Error::NoMemory { wanted_bytes, used_bytes, limit_bytes } = error else { panic!("{error}") };
    assert_eq!((wanted_bytes, used_bytes, limit_bytes), (2 << 20, 16 << 20, 16 << 20));
    assert_eq!(error.errno(), libc::ENOMEM);
    assert_eq!(pagemill.account.resident(), 16 << 20);
    assert!(pagemill.heap.allocate(8 * MIB, 1).is_err(), "not even overcommitted");
    all.drain(..).for_each(|addr| free(pagemill, addr));
    let big = filled(pagemill, 8 * MIB, 1);
    assert_eq!(first_other(big, 8 * MIB, 1), None);
    assert!(charge_of(pagemill) <= 16 << 20);
}

/// With a limit of zero every request must fail, and no request may end the process.
#[test]
fn a_limit_of_zero_refuses_everything() {
    let _exclusive = exclusive_test();
    let pagemill = with_limit(0);
    for size in [1, MIB, 10 * MIB, 1 << 30] {
        let error = pagemill.heap.allocate(size, 1).unwrap_err();
        assert!(matches!(error, Error::NoMemory { limit_bytes: 0, .. }), "{error}");
        assert!(pagemill.heap.allocate_zeroed(size, 1).is_err());
    }
    assert_eq!(pagemill.account.resident(), 0);
}

/// A slot of 32 MiB was used and freed, and other allocations fill the limit. A calloc of 32 MiB may fail, or be
/// granted untouched. The slot must not be lost: once the others are freed, an allocation must return it.
#[test]
fn a_calloc_at_the_limit_loses_no_slot() {
    let _exclusive = exclusive_test();
    let pagemill = with_limit(8 * MIB);
    let slot = allocate(pagemill, 32 * MIB);
    free(pagemill, slot);
    let hog: Vec<usize> = (0..8).map(|_| filled(pagemill, MIB, 1)).collect();
    match pagemill.heap.allocate_zeroed(32 * MIB, 1) {
        Ok(addr) => {
            assert_eq!(addr.as_ptr() as usize, slot);
            free(pagemill, slot);
        }
        Err(error) => assert!(matches!(error, Error::NoMemory { .. }), "{error}"),
    }
    hog.into_iter().for_each(|addr| free(pagemill, addr));
    assert_eq!(allocate(pagemill, 32 * MIB), slot, "the slot is lost");
}

/// Two allocations were overcommitted and touched later, so the limit is exceeded. A resize of one to a smaller size
/// must succeed, or fail without the loss of a byte.
#[test]
fn a_refused_shrink_loses_no_byte() {
    let _exclusive = exclusive_test();
    let pagemill = with_limit(8 * MIB);
    let addrs = [allocate(pagemill, 8 * MIB), allocate(pagemill, 8 * MIB)];
    addrs.iter().for_each(|addr| fill(*addr, 8 * MIB, 1));
    assert_eq!(charge_of(pagemill), 16 << 20, "over the limit");
    // SAFETY: the allocation is live. Its old address is used again only if the call returns it.
    let kept = match unsafe { pagemill.heap.resize(addrs[0], MIB) } {
        Ok(_) => MIB,
        Err(_) => 8 * MIB,
    };
    assert_eq!(first_other(addrs[0], kept, 1), None, "refused, but bytes are lost");
}

/// The kernel cannot discard locked memory, so the heap must not treat such memory as zero afterwards.
#[test]
fn locked_memory_is_not_treated_as_zero() {
    let _exclusive = exclusive_test();
    for (pagemill, size) in [(in_small_pages(), 256 * KIB), (in_small_pages(), 3 * MIB), (Testbed::for_test(), MIB)] {
        let addr = filled(pagemill, size, 7);
        // SAFETY: the bytes are a live allocation of this test.
        if unsafe { libc::mlock(addr as *const _, size) } != 0 {
            println!("skipped: may not lock memory");
            return;
        }
        free(pagemill, addr);
        let failed = stats::get(Counter::PurgeFailed);
        purge(pagemill);
        assert!(stats::get(Counter::PurgeFailed) > failed, "the refusal is not counted");
        let again = pagemill.heap.allocate_zeroed(size, 1).unwrap().as_ptr() as usize;
        assert_eq!(again, addr);
        let other = first_other(again, size, 0);
        // SAFETY: as above.
        unsafe { libc::munlock(addr as *const _, size) };
        assert_eq!(other, None, "size {size}: calloc handed out old bytes");
    }
}

/// An allocation is shrunk to one block, and grown again by moving its pages. Bytes that are written afterwards must be
/// charged.
#[test]
fn a_moved_allocation_is_charged() {
    let _exclusive = exclusive_test();
    let pagemill = in_small_pages();
    let addr = filled(pagemill, 16 * MIB, 1);
    let addr = resize(pagemill, addr, MIB);
    assert!(charge_of(pagemill) <= 2 << 20, "the rest was given back");
    let addr = resize(pagemill, addr, 32 * MIB);
    assert_eq!(first_other(addr, MIB, 1), None);
    fill(addr, 32 * MIB, 2);
    assert_eq!(charge_of(pagemill), 32 << 20);
}

/// An allocation is moved, freed and purged. A calloc must then return its slot with all bytes zero.
#[test]
fn a_moved_allocation_is_purged_completely() {
    let _exclusive = exclusive_test();
    let pagemill = in_small_pages();
    let addr = allocate(pagemill, 256 * MIB);
    let addr = resize(pagemill, addr, MIB);
    let addr = resize(pagemill, addr, 512 * MIB);
    for at in (0..512 * MIB).step_by(BLOCK_BYTES) {
        fill(addr + at, 8, 6);
    }
    free(pagemill, addr);
    purge(pagemill);
    let again = pagemill.heap.allocate_zeroed(512 * MIB, 1).unwrap().as_ptr() as usize;
    assert_eq!(again, addr);
    for at in (0..512 * MIB).step_by(BLOCK_BYTES) {
        assert_eq!(first_other(again + at, 8, 0), None, "calloc handed out old bytes at {:#x}", at);
    }
    assert_eq!(resident(addr, 512 * MIB) / os_page_bytes() as u64 % 256, 0);
}

/// A program may use all bytes of a slot, even beyond the requested size. The test writes such bytes, frees the slot
/// and purges it. The bytes must then be gone.
#[test]
fn the_tail_of_a_slot_is_purged_with_it() {
    let _exclusive = exclusive_test();
    let pagemill = in_small_pages();
    let addr = allocate(pagemill, 1025 * MIB);
    let usable = pagemill.heap.usable_bytes(addr).unwrap();
    fill(addr + usable - 8, 8, 6);
    free(pagemill, addr);
    purge(pagemill);
    let again = pagemill.heap.allocate_zeroed(usable, 1).unwrap().as_ptr() as usize;
    assert_eq!(again, addr);
    assert_eq!(first_other(again + usable - 8, 8, 0), None, "calloc handed out old bytes");
}

/// Two slots share a huge page. A purge of one splits the huge page. When the other slot is free, a purge must return
/// the whole block, including bytes that were never allocated.
#[test]
fn a_split_block_is_purged_completely() {
    let _exclusive = exclusive_test();
    let pagemill = Testbed::for_test();
    let (first, second) = (filled(pagemill, 512 * KIB, 1), filled(pagemill, 512 * KIB, 2));
    free(pagemill, first);
    assert!(purge(pagemill) >= 512 << 10, "split");
    assert_eq!(first_other(second, 512 * KIB, 2), None);
    assert_eq!(charge_of(pagemill), 512 << 10, "what was never handed out is given back, too");
    free(pagemill, second);
    purge(pagemill);
    assert_eq!((charge_of(pagemill), pagemill.heap.free_bytes()), (0, 0));
}

/// A slot lies partly in a huge page and partly in a split one. A purge must purge both parts. The slots have 384 KiB,
/// so the sixth lies across the first two blocks.
#[test]
fn a_slot_across_blocks_is_purged_completely() {
    let _exclusive = exclusive_test();
    let pagemill = Testbed::for_test();
    let slots: Vec<usize> = (0..16).map(|_| filled(pagemill, 384 * KIB, 1)).collect();
    // The second block is split: two of its slots are free, and the others are live.
    slots[7..9].iter().for_each(|addr| free(pagemill, *addr));
    assert!(purge(pagemill) > 0, "split");
    slots[..7].iter().chain(&slots[10..]).for_each(|addr| free(pagemill, *addr));
    purge(pagemill);
    assert_eq!((charge_of(pagemill), pagemill.heap.free_bytes()), (384 << 10, 0), "one slot is live");
    free(pagemill, slots[9]);
    purge(pagemill);
    assert_eq!((charge_of(pagemill), pagemill.heap.free_bytes()), (0, 0));
}

/// A block was a huge page and was overcommitted later, so that one touch may make all of it resident. A purge must
/// then return the whole block.
#[test]
fn a_block_populated_by_a_touch_is_purged_completely() {
    let _exclusive = exclusive_test();
    let layout = Layout { huge_from_bytes: 4 << 20, ..Layout::for_test() };
    let pagemill = Testbed::new(layout, UNLIMITED).unwrap();
    let big = filled(pagemill, 8 * MIB, 1);
    charge_of(pagemill);
    let first = filled(pagemill, 112 * KIB, 1); // in a huge page, since much is resident
    free(pagemill, first);
    free(pagemill, big);
    purge(pagemill);
    assert_eq!(charge_of(pagemill), 0);
    let again = filled(pagemill, 112 * KIB, 1); // overcommitted, since little is resident
    free(pagemill, again);
    purge(pagemill);
    assert_eq!((charge_of(pagemill), pagemill.heap.free_bytes()), (0, 0));
}

/// Half of each block is purged, and other blocks use up the room below the limit. So the purged halves can be reused
/// only if memory is returned first. A purged slot must be charged again before it is reused.
#[test]
fn a_purged_part_is_admitted_again() {
    let _exclusive = exclusive_test();
    let pagemill = with_limit(8 * MIB);
    let slots: Vec<usize> = (0..16).map(|_| filled(pagemill, 512 * KIB, 1)).collect();
    slots.iter().step_by(2).for_each(|addr| free(pagemill, *addr));
    purge(pagemill);
    assert_eq!(charge_of(pagemill), 4 << 20);
    for _ in 0..4 {
        filled(pagemill, MIB, 2);
    }
    assert_eq!(charge_of(pagemill), 8 << 20, "at the limit");
    let mut more = 0;
    while more < 8
        && pagemill.heap.allocate(512 * KIB, 1).is_ok_and(|found| {
            fill(found.addr.as_ptr() as usize, 512 * KIB, 3);
            true
        })
    {
        more += 1;
    }
    let over = charge_of(pagemill).saturating_sub(8 << 20);
    assert!(more == 0 && over == 0, "{more} more allocations, {over} bytes over the limit");
}

/// The helper thread makes blocks resident ahead of need. Such a block must belong to the span that needs it. An
/// adjacent free big slot must not be changed.
#[test]
fn prefaulted_blocks_belong_to_their_span() {
    let _exclusive = exclusive_test();
    let pagemill = Testbed::for_test();
    let carve = |count| {
        for _ in 0..count {
            allocate(pagemill, 384 * KIB);
        }
    };
    carve(1); // a span of three blocks
    let big = filled(pagemill, 2 * MIB, 1);
    free(pagemill, big);
    pagemill.heap.shrink(u64::MAX, Urgency::Request);
    assert_eq!(resident(big, BLOCK_BYTES), 0);
    assert!(pagemill.helper.claim());
    carve(15); // the last block of the span, too
    while pagemill.arena.prefault() {}
    assert_eq!((pagemill.heap.free_bytes(), resident(big, BLOCK_BYTES)), (0, 0), "free bytes, resident bytes");
}

/// Runs `act` in a fork child. Returns whether `act` panicked there; the message goes to standard error.
fn in_child(pagemill: &Testbed, act: impl FnOnce()) -> bool {
    // SAFETY: `after_fork` follows on both sides, with nothing else before it.
    unsafe { pagemill.instance.before_fork() };
    // SAFETY: the child runs `act` and ends without returning to the test.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        // SAFETY: called after `before_fork`.
        unsafe { pagemill.instance.after_fork() };
        // SAFETY: the process is a new child, and this is its only thread.
        unsafe { pagemill.instance.begin_child() };
        let result = catch_unwind(AssertUnwindSafe(act));
        if let Err(panic) = &result {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic");
            file::write_stderr(format!("in the child: {text}\n").as_bytes());
        }
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(result.is_err())) };
    }
    // SAFETY: called after `before_fork`.
    unsafe { pagemill.instance.after_fork() };
    let mut status = 0;
    // SAFETY: waits for a child of this test, and writes `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status != 0
}

const FORKED_SIZES: [usize; 6] = [64 * KIB, 300 * KIB, 384 * KIB, MIB, 3 * MIB, 40 * MIB];

/// A fork child uses, frees and purges inherited memory. The bytes of the parent must stay unchanged.
#[test]
fn a_fork_child_leaves_the_parent_alone() {
    let _exclusive = exclusive_test();
    for pagemill in [Testbed::for_test(), in_small_pages()] {
        let live: Vec<(usize, usize)> = FORKED_SIZES.map(|size| (filled(pagemill, size, 11), size)).into();
        let idle = filled(pagemill, 300 * KIB, 12);
        free(pagemill, idle);
        let before = charge_of(pagemill);
        let has_failed = in_child(pagemill, || {
            for (addr, size) in &live {
                assert_eq!(first_other(*addr, *size, 11), None);
                fill(*addr, size / 2, 13);
            }
            live.iter().skip(1).step_by(2).for_each(|(addr, _)| free(pagemill, *addr));
            purge(pagemill);
            for (addr, size) in live.iter().step_by(2) {
                assert_eq!(first_other(*addr, size / 2, 13), None, "a live slot changed");
                assert_eq!(first_other(*addr + size / 2, size - size / 2, 11), None, "a live slot changed");
            }
            for (_, size) in &live {
                let addr = pagemill.heap.allocate_zeroed(*size, 1).unwrap().as_ptr() as usize;
                assert_eq!(first_other(addr, *size, 0), None, "calloc handed out old bytes");
                fill(addr, *size, 14);
                let addr = resize(pagemill, addr, size * 2);
                assert_eq!(first_other(addr, *size, 14), None, "lost by realloc");
                free(pagemill, addr);
            }
        });
        assert!(!has_failed);
        for (addr, size) in &live {
            assert_eq!(first_other(*addr, *size, 11), None, "the parent's bytes changed");
        }
        assert_eq!(charge_of(pagemill), before);
        live.iter().for_each(|(addr, _)| free(pagemill, *addr));
        purge(pagemill);
        assert_eq!((charge_of(pagemill), pagemill.heap.free_bytes()), (0, 0));
    }
}

/// A fork child frees inherited memory, purges, and allocates again. No bytes may be charged to the child at first and
/// after the purge. Then all bytes that it wrote must be charged.
#[test]
fn a_fork_child_counts_for_itself() {
    let _exclusive = exclusive_test();
    for (name, pagemill) in [("huge", Testbed::for_test()), ("small", in_small_pages())] {
        let live = FORKED_SIZES.map(|size| filled(pagemill, size, 11));
        let has_failed = in_child(pagemill, || {
            assert_eq!(pagemill.account.resident(), 0, "{name}: nothing is charged at first");
            live.iter().for_each(|addr| free(pagemill, *addr));
            purge(pagemill);
            let (charged, free_bytes) = (charge_of(pagemill), pagemill.heap.free_bytes());
            let untouched = stats::get(Counter::Untouched);
            assert!(untouched < 1 << 40, "{name}: {untouched:#x} bytes are said to be overcommitted and untouched");
            assert_eq!((charged, free_bytes), (0, 0), "{name}: charged and free bytes after giving all back");
            let again = FORKED_SIZES.map(|size| filled(pagemill, size, 12));
            let written: usize = FORKED_SIZES.iter().sum();
            let charged = charge_of(pagemill);
            assert!(charged >= written as u64, "{name}: {written} bytes written, {charged} charged");
            again.iter().for_each(|addr| free(pagemill, *addr));
        });
        assert!(!has_failed, "{name}");
    }
}

/// While a fork child lives, the kernel moves only pages that the child does not share. The parent has 16 MiB in small
/// pages and has rewritten the first page, so only that page is not shared. A realloc must keep every byte.
#[test]
fn realloc_beside_a_fork_child_keeps_every_byte() {
    let _exclusive = exclusive_test();
    for (name, pagemill) in [("huge", Testbed::for_test()), ("small", in_small_pages())] {
        let addr = filled(pagemill, 16 * MIB, 1);
        // SAFETY: `after_fork` follows on both sides, with nothing else before it.
        unsafe { pagemill.instance.before_fork() };
        // SAFETY: the child only waits for its end.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            loop {
                // SAFETY: the call has no arguments.
                unsafe { libc::pause() };
            }
        }
        // SAFETY: called after `before_fork`.
        unsafe { pagemill.instance.after_fork() };
        fill(addr, 3 * os_page_bytes(), 2);
        let addr = resize(pagemill, addr, 64 * MIB);
        let lost = (first_other(addr, 3 * os_page_bytes(), 2), first_other(addr + 3 * os_page_bytes(), MIB, 1));
        // SAFETY: signals and awaits a child of this test.
        unsafe {
            libc::kill(pid, libc::SIGKILL);
            libc::waitpid(pid, std::ptr::null_mut(), 0);
        }
        assert_eq!(lost, (None, None), "{name}: bytes were lost");
        free(pagemill, addr);
        purge(pagemill);
        assert_eq!(charge_of(pagemill), 0);
    }
}

/// When overcommitted memory is touched, it can exceed the limit. Once a measurement has charged it, the next request
/// must be refused.
#[test]
fn touched_overcommitted_memory_is_charged() {
    let _exclusive = exclusive_test();
    let pagemill = with_limit(16 * MIB);
    let big = allocate(pagemill, 1 << 30);
    assert_eq!(charge_of(pagemill), 0);
    fill(big, 24 * MIB, 1);
    assert!(charge_of(pagemill) >= 24 << 20);
    assert!(matches!(pagemill.heap.allocate(MIB, 1), Err(Error::NoMemory { .. })));
    let freed = pagemill.account.give_back(u64::MAX, Context::Outside, Urgency::Limit, Reason::Program);
    assert_eq!(freed, 0, "nothing is free");
    free(pagemill, big);
    filled(pagemill, MIB, 1);
}

/// A fork child shares most pages of a slot, so only the first pages move to another slot. The heap must not treat the
/// pages that did not move as zero.
#[test]
fn partly_moved_pages_are_not_treated_as_zero() {
    let _exclusive = exclusive_test();
    let pagemill = in_small_pages();
    let donor = filled(pagemill, 4 * MIB, 1);
    // SAFETY: `after_fork` follows on both sides, with nothing else before it.
    unsafe { pagemill.instance.before_fork() };
    // SAFETY: the child only waits for its end.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        loop {
            // SAFETY: the call has no arguments.
            unsafe { libc::pause() };
        }
    }
    // SAFETY: called after `before_fork`.
    unsafe { pagemill.instance.after_fork() };
    fill(donor, 3 * os_page_bytes(), 2);
    free(pagemill, donor);
    let found = pagemill.heap.allocate(5 * MIB, 1).unwrap();
    let addr = found.addr.as_ptr() as usize;
    let other = first_other(addr, 5 * MIB, 0);
    // SAFETY: signals and awaits a child of this test.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    assert!(!found.is_zero || other.is_none(), "called zero, with old bytes at {other:?}");
    free(pagemill, addr);
    purge(pagemill);
    assert_eq!((charge_of(pagemill), pagemill.heap.free_bytes()), (0, 0));
}
