//! Tests of `vrange`, which marks memory by its address, on all kinds of memory: what is marked, purged and rejected,
//! and what never changes.
#![allow(unsafe_code)] // maps memory of every kind and marks it

#[path = "common/area.rs"]
mod area;
mod common;

use area::{Area, marked, purge, vrange};
use common::{EPOCH_DISTANCE, assert_in_child, exclusive_test, pagemill};
use pagemill_core::Error;
use pagemill_core::arena::Context;
use pagemill_core::reclaim::{Reason, Shrinker, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_volatile::Behaviour;
use pagemill_volatile::vrange::{How, Mode};
use proptest::prelude::*;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Returns the number of volatile bytes purged so far, and the numbers by reason.
fn purged_bytes() -> (u64, [u64; 6]) {
    let of_reason = |reason: Reason| stats::get(reason.purge_counter().unwrap());
    (stats::get(Counter::RangeBytesPurged), PURGE_REASONS.map(of_reason))
}

/// The reasons for which contents are purged.
const PURGE_REASONS: [Reason; 6] =
    [Reason::Program, Reason::Limit, Reason::Group, Reason::Machine, Reason::Sibling, Reason::Stall];

/// Purges a range with a handle and memory marked by address for each reason. Only the counter of that reason and the
/// sum must grow, by the bytes that were purged. No contents may be purged when memory is returned by age.
#[test]
fn purges_are_counted_by_reason() {
    let _exclusive = exclusive_test();
    let area = Area::plain(64, 1);
    for (at, reason) in PURGE_REASONS.into_iter().enumerate() {
        let mut range = pagemill().ranges.allocate(BLOCK_BYTES / 2, Behaviour::Full).unwrap();
        range.bytes_mut().unwrap().fill(1);
        range.mark().unwrap();
        area.fill(1);
        area.mark(0, area.pages());
        let (before, mut expected) = (purged_bytes(), purged_bytes());
        pagemill().account.give_aged(u64::MAX, Duration::ZERO);
        assert_eq!(purged_bytes(), before, "contents never return by age");
        pagemill().account.give_back(u64::MAX, Context::Outside, Urgency::Limit, reason);
        let bytes = (BLOCK_BYTES / 2 + area.len) as u64;
        expected.0 += bytes;
        expected.1[at] += bytes;
        assert_eq!(purged_bytes(), expected, "{reason:?}");
        assert_eq!(area.unmark(0, area.pages()), marked(area.pages(), true));
    }
    assert_eq!([Reason::Age, Reason::New].map(Reason::purge_counter), [None; 2]);
}

/// Without memory pressure, no marked memory may change. Under pressure, marked memory must be purged, and the unmark
/// must report the purge. Other memory must not change.
#[test]
fn only_marked_memory_is_purged() {
    let _exclusive = exclusive_test();
    let (area, other) = (Area::plain(64, 1), Area::plain(64, 2));
    assert_eq!((area.mark(0, 64), area.unmark(0, 64)), (marked(64, false), marked(64, false)));
    assert!(area.is_filled_with(1));
    area.mark(16, 16);
    assert_eq!(purge(usize::MAX), 16 * os_page_bytes());
    assert_eq!(purge(usize::MAX), 0, "it is gone already");
    let expected = |page| if (16..32).contains(&page) { 0 } else { 1 };
    assert!((0..64).all(|page| area.read(page) == expected(page)) && other.is_filled_with(2));
    assert_eq!(area.unmark(0, 20), marked(4, true), "a part of it");
    assert_eq!(area.unmark(0, 64), marked(12, true), "the rest");
    assert_eq!(area.unmark(0, 64), marked(0, false), "never marked is no error");
}

/// Marked ranges may overlap, and must be split and merged. Marking a range twice must have the effect of marking it
/// once. Purges from before the second mark must still be reported.
#[test]
fn marks_overlap_and_split() {
    let _exclusive = exclusive_test();
    let area = Area::plain(32, 1);
    assert_eq!(
        (area.mark(0, 16), area.mark(0, 16), area.mark(8, 16)),
        (marked(16, false), marked(16, false), marked(16, false))
    );
    assert_eq!(pagemill().vranges.list().len(), 2, "the outer part stays as it was");
    assert_eq!(area.unmark(4, 2), marked(2, false));
    assert_eq!(pagemill().vranges.list().len(), 3);
    assert_eq!(purge(usize::MAX), 22 * os_page_bytes());
    assert!((4..6).all(|page| area.read(page) == 1) && area.read(3) == 0 && area.read(24) == 1);
    assert_eq!(area.mark(0, 32), marked(32, true), "what was purged is said when it is marked again");
    assert_eq!(area.unmark(0, 32), marked(32, true));
    assert_eq!((area.mark(0, 32), area.unmark(0, 32)), (marked(32, false), marked(32, false)));
}

/// Ranges must be purged in the order in which they were marked. Partial ranges must lose chunks from their ends, one
/// chunk of each range in turn.
#[test]
fn ranges_are_purged_in_the_order_of_marking() {
    let _exclusive = exclusive_test();
    let areas: Vec<Area> = (0..3).map(|_| Area::plain(16, 1)).collect();
    for index in [1, 2, 0] {
        areas[index].mark(0, 16);
        std::thread::sleep(EPOCH_DISTANCE);
    }
    for expected in [1, 2, 0] {
        assert_eq!(purge(1), 16 * os_page_bytes());
        assert!(areas[expected].unmark(0, 16).purged);
    }
    let chunk = BLOCK_BYTES / 32 / os_page_bytes();
    let areas = [Area::huge(1, 1), Area::huge(1, 2)];
    for area in &areas {
        area.vrange(0, area.pages(), Mode::Volatile, How::Partial).unwrap();
    }
    for round in 1..4 {
        std::thread::sleep(EPOCH_DISTANCE);
        purge(1);
        purge(1);
        for (area, byte) in areas.iter().zip(1..) {
            let kept = area.pages() - round * chunk;
            assert!(
                (0..area.pages()).all(|page| area.read(page) == if page < kept { byte } else { 0 }),
                "round {round}"
            );
        }
    }
    for area in &areas {
        let tail = area.pages() - 3 * chunk;
        assert_eq!(area.unmark(0, tail), marked(tail, false), "what is left was not purged");
        assert!(area.unmark(0, area.pages()).purged);
    }
}

/// A large range is purged in steps. After the last step, it must be a single range that is completely purged.
#[test]
fn large_ranges_are_purged_completely() {
    let _exclusive = exclusive_test();
    let area = Area::huge(40, 5);
    area.mark(0, area.pages());
    assert_eq!(purge(1), area.len);
    assert!(area.is_filled_with(0));
    assert_eq!(pagemill().vranges.list().len(), 1);
    assert_eq!(area.unmark(0, area.pages()), marked(area.pages(), true));
}

/// Calls with an invalid range must report the cause and change nothing.
#[test]
fn invalid_ranges_are_rejected() {
    let _exclusive = exclusive_test();
    let page = os_page_bytes();
    let area = Area::plain(16, 1);
    let bad = |addr, len| matches!(vrange(addr, len, Mode::Volatile, How::Full), Err(Error::BadRange { .. }));
    assert!(bad(area.addr + 1, page) && bad(area.addr, page - 1) && bad(usize::MAX - page + 1, 2 * page));
    assert_eq!(vrange(area.addr, 0, Mode::Volatile, How::Full).unwrap(), marked(0, false));
    // SAFETY: unmaps a page in the middle of the range, which nothing uses.
    unsafe { libc::munmap(area.page_ptr(8).cast(), page) };
    for mode in [Mode::Volatile, Mode::Nonvolatile] {
        let error = area.vrange(0, 16, mode, How::Full).unwrap_err();
        assert!(matches!(error, Error::NotMapped { .. }) && error.errno() == libc::ENOMEM, "{error}");
    }
    assert!(pagemill().vranges.list().is_empty(), "nothing was marked");
    assert!(vrange(0usize.wrapping_sub(2 * page), page, Mode::Volatile, How::Full).is_err());
}

/// Shared memory, file mappings, reserved huge pages and the stack can be marked but must never be purged, because
/// Pagemill purges only ordinary memory that is private to the process.
#[test]
fn shared_and_file_memory_is_never_purged() {
    let _exclusive = exclusive_test();
    let (page, private) = (os_page_bytes(), libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let file = tempfile::tempfile().unwrap();
    file.set_len(16 * page as u64).unwrap();
    let kinds = [
        ("shared", Area::map(16 * page, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)),
        ("file, shared", Area::map(16 * page, libc::MAP_SHARED, file.as_raw_fd())),
        ("file, private", Area::map(16 * page, libc::MAP_PRIVATE, file.as_raw_fd())),
        ("hugetlb", Area::map(BLOCK_BYTES, private | libc::MAP_HUGETLB, -1)),
        ("growing down", Area::map(16 * page, private | libc::MAP_GROWSDOWN, -1)),
    ];
    for (name, area) in kinds {
        let Some(area) = area else {
            println!("skipped: no {name} memory here");
            continue;
        };
        area.fill(7);
        let is_growing = name == "growing down";
        area.mark(0, area.pages());
        purge(usize::MAX);
        let unmarked = area.unmark(0, area.pages());
        // Anonymous memory that may grow must be treated as plain memory. Only the stack of the first thread is known
        // to be a stack.
        assert_eq!((unmarked.purged, area.is_filled_with(7)), (is_growing, !is_growing), "{name}");
    }
    // The stack of the first thread, which the kernel names in `maps`.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
    let start = usize::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
    vrange(start, page, Mode::Volatile, How::Full).unwrap();
    assert_eq!(purge(usize::MAX), 0);
    assert!(!vrange(start, page, Mode::Nonvolatile, How::Full).unwrap().purged);
}

/// Locked pages must never be purged, because the kernel refuses to discard them.
#[test]
fn locked_memory_is_never_purged() {
    let _exclusive = exclusive_test();
    let area = Area::plain(16, 7);
    // SAFETY: locks pages of a mapping of this test.
    if unsafe { libc::mlock(area.addr as *const _, area.len) } != 0 {
        return println!("skipped: nothing can be locked: {}", std::io::Error::last_os_error());
    }
    area.mark(0, 16);
    assert_eq!(purge(usize::MAX), 0);
    assert!(!area.unmark(0, 16).purged && area.is_filled_with(7));
}

/// A part of a range cannot be purged: its pages are locked or, before a limit is reached, they are only a part of a
/// huge page. The rest may be purged. Unmarking must report any purge.
#[test]
fn purges_of_partly_locked_memory_are_reported() {
    let _exclusive = exclusive_test();
    let lost = |area: &Area| (0..area.pages()).any(|page| area.read(page) == 0);
    for locked in [0..4, 30..34, 60..64, 1..63] {
        for urgency in [Urgency::Request, Urgency::Limit] {
            let area = Area::plain(64, 7);
            // SAFETY: locks pages of a mapping of this test.
            if unsafe { libc::mlock(area.page_ptr(locked.start).cast(), locked.len() * os_page_bytes()) } != 0 {
                return println!("skipped: nothing can be locked: {}", std::io::Error::last_os_error());
            }
            area.mark(0, 64);
            pagemill().vranges.shrink(u64::MAX, urgency);
            assert!(locked.clone().all(|page| area.read(page) == 7));
            let is_lost = lost(&area);
            assert_eq!(area.unmark(0, 64).purged, is_lost, "locked: {locked:?}");
        }
    }
    // Slots may share huge pages. The mark then ends inside a huge page.
    let fallbacks = stats::get(Counter::BlocksFallback);
    let slots: Vec<usize> = (0..6)
        .map(|_| pagemill().heap.allocate(BLOCK_BYTES / 2, os_page_bytes()).unwrap().addr.as_ptr() as usize)
        .collect();
    let first = *slots.iter().min().unwrap();
    let is_row = slots.iter().max() == Some(&(first + 5 * BLOCK_BYTES / 2));
    if is_row && stats::get(Counter::BlocksFallback) == fallbacks {
        let area = Area { addr: first, len: 3 * BLOCK_BYTES };
        for urgency in [Urgency::Request, Urgency::Limit] {
            area.fill(7);
            let marked_pages = area.pages() / 2;
            area.mark(0, marked_pages);
            pagemill().vranges.shrink(u64::MAX, urgency);
            assert!((marked_pages..area.pages()).all(|page| area.read(page) == 7));
            let is_lost = lost(&area);
            assert_eq!(area.unmark(0, area.pages()).purged, is_lost);
            assert_eq!(is_lost, urgency == Urgency::Limit);
        }
        std::mem::forget(area);
    }
    for slot in slots {
        // SAFETY: the slot was allocated above and is no longer marked.
        unsafe { pagemill().heap.free(slot).unwrap() };
    }
}

/// A fork child must not purge memory that its parent marked, but may unmark that memory. Memory that the child itself
/// marks must be purged.
#[test]
fn a_fork_child_keeps_inherited_marks() {
    let _exclusive = exclusive_test();
    let (inherited, own) = (Area::plain(16, 3), Area::plain(16, 4));
    inherited.mark(0, 16);
    assert_in_child(|| {
        own.mark(0, 16);
        let freed = purge(usize::MAX);
        freed == own.len && inherited.is_filled_with(3) && own.unmark(0, 16).purged && !inherited.unmark(0, 16).purged
    });
    assert!(own.is_filled_with(4) && inherited.is_filled_with(3));
    assert_eq!(purge(usize::MAX), inherited.len);
}

/// The kernel has merged some marked pages with others (KSM), and a pipe refers to other marked pages. The program must
/// find all of these pages purged, and the reader of the pipe must still get the old bytes.
#[test]
fn other_users_of_purged_pages_keep_their_bytes() {
    let _exclusive = exclusive_test();
    let area = Area::plain(4, 9);
    // SAFETY: the call is a hint and changes no contents.
    unsafe { libc::madvise(area.addr as *mut _, area.len, libc::MADV_MERGEABLE) };
    let mut ends = [0; 2];
    // SAFETY: the first call writes two descriptors. The second moves pages of this test into the pipe, from which they
    // are read below.
    unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        let piece = libc::iovec { iov_base: area.addr as *mut _, iov_len: os_page_bytes() };
        assert_eq!(libc::vmsplice(ends[1], &raw const piece, 1, 0), os_page_bytes() as isize);
    }
    area.mark(0, 4);
    assert_eq!(purge(usize::MAX), 4 * os_page_bytes());
    let mut read = vec![0u8; os_page_bytes()];
    // SAFETY: the read fills `read`, which is long enough. The other calls close descriptors of this test.
    unsafe {
        assert_eq!(libc::read(ends[0], read.as_mut_ptr().cast(), read.len()), read.len() as isize);
        libc::close(ends[0]);
        libc::close(ends[1]);
    }
    assert_eq!((read[0], area.read(0)), (9, 0));
    assert!(area.unmark(0, 4).purged);
}

/// A range is protected or unmapped while it is volatile. It must not be purged, and no call may fail because of it.
#[test]
fn protected_and_unmapped_ranges_are_not_purged() {
    let _exclusive = exclusive_test();
    let (protected, unmapped) = (Area::plain(16, 3), Area::plain(16, 4));
    // The test runs in a child with one thread. In this process, another thread could map memory at the address that
    // was unmapped.
    assert_in_child(|| {
        protected.mark(0, 16);
        unmapped.mark(0, 16);
        // SAFETY: mappings of this test. The second is unmapped without unmarking, which the contract forbids before
        // a purge. No purge finds a mapping there, because no other thread exists.
        unsafe {
            libc::mprotect(protected.addr as *mut _, protected.len, libc::PROT_READ);
            libc::munmap(unmapped.addr as *mut _, unmapped.len);
        }
        let has_gone = purge(usize::MAX) > 0 || protected.unmark(0, 16).purged;
        pagemill().vranges.forget(unmapped.addr..unmapped.addr + unmapped.len);
        !has_gone && protected.is_filled_with(3) && purge(usize::MAX) == 0 && pagemill().vranges.list().is_empty()
    });
}

/// When heap slots are marked volatile and purged, their memory must be discharged.
#[test]
fn purged_heap_slots_are_discharged() {
    let _exclusive = exclusive_test();
    for len in [2 * BLOCK_BYTES, BLOCK_BYTES / 4] {
        let addr = pagemill().heap.allocate(len, BLOCK_BYTES.min(len)).unwrap().addr;
        // SAFETY: the slot is live and of that length, and belongs to this test.
        unsafe { addr.as_ptr().write_bytes(6, len) };
        pagemill().account.reconcile();
        let before = pagemill().account.resident();
        vrange(addr.as_ptr() as usize, len, Mode::Volatile, How::Full).unwrap();
        let freed = purge(usize::MAX);
        assert_eq!((freed, before - pagemill().account.resident()), (len, len as u64));
        assert!(vrange(addr.as_ptr() as usize, len, Mode::Nonvolatile, How::Full).unwrap().purged);
        // SAFETY: as above, and the slot is no longer marked.
        unsafe {
            assert_eq!(addr.as_ptr().read_volatile(), 0);
            pagemill().heap.free(addr.as_ptr() as usize).unwrap();
        }
    }
}

/// One thread marks and unmarks memory while another thread purges it. All bytes of the memory must be there, or be
/// reported as purged.
#[test]
fn purges_race_with_marks() {
    let _exclusive = exclusive_test();
    let is_over = AtomicBool::new(false);
    let mut purged = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                purge(usize::MAX);
            }
        });
        let areas = [Area::plain(1, 1), Area::plain(64, 1), Area::huge(20, 1)];
        let begun = Instant::now();
        // Runs for at least two seconds, and longer until something was purged.
        while begun.elapsed() < Duration::from_secs(2) || (purged == 0 && begun.elapsed() < Duration::from_secs(600)) {
            for area in &areas {
                let half = area.pages().div_ceil(2);
                area.mark(0, area.pages());
                area.mark(0, half);
                let first = area.unmark(0, half);
                assert!(first.purged || (0..half).all(|page| area.read(page) == 1));
                let second = area.unmark(0, area.pages());
                assert!(second.purged || (half..area.pages()).all(|page| area.read(page) == 1));
                purged += usize::from(first.purged) + usize::from(second.purged);
                area.fill(1);
            }
        }
        is_over.store(true, Relaxed);
    });
    assert!(purged > 0, "nothing was purged");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// Random calls must agree with a model of each page. The model says whether the page is marked, may be purged, or
    /// must keep its bytes.
    #[test]
    fn calls_agree_with_a_model(steps in prop::collection::vec((0usize..64, 1usize..32, 0u8..6), 1..60)) {
        let _exclusive = exclusive_test();
        let area = Area::plain(64, 1);
        // For each page: whether it is marked, and whether it was purged since then.
        let mut model = [(false, false); 64];
        for (page, pages, act) in steps {
            let pages = pages.min(64 - page);
            let part = page..page + pages;
            match act {
                0 | 1 => {
                    let how = if act == 0 { How::Full } else { How::Partial };
                    let result = area.vrange(page, pages, Mode::Volatile, how).unwrap();
                    let purged = model[part.clone()].iter().any(|(is_marked, purged)| *is_marked && *purged);
                    prop_assert_eq!(result, marked(pages, purged));
                    model[part].iter_mut().for_each(|page| *page = (true, purged));
                }
                2 => {
                    let result = area.unmark(page, pages);
                    let were: Vec<_> = model[part.clone()].iter().filter(|(is_marked, _)| *is_marked).collect();
                    prop_assert_eq!(result.bytes as usize, were.len() * os_page_bytes());
                    prop_assert_eq!(result.purged, were.iter().any(|(_, purged)| *purged));
                    for at in part {
                        prop_assert!(model[at].1 || area.read(at) == 1);
                        model[at] = (false, false);
                        area.write(at, 1);
                    }
                }
                3 => drop(purge(usize::MAX)),
                4 => drop(purge(pages * os_page_bytes())),
                _ => (0..64).filter(|at| !model[*at].0).for_each(|at| assert_eq!(area.read(at), 1)),
            }
            // Purged pages must read as zeros. A purge of everything purges all marked pages.
            for (at, page) in model.iter_mut().enumerate() {
                let is_gone = area.read(at) == 0;
                prop_assert!(!is_gone || page.0, "page {} was not marked", at);
                prop_assert!(act != 3 || is_gone || !page.0 || page.1, "page {} stayed", at);
                page.1 |= is_gone;
            }
        }
    }
}
