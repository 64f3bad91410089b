//! Tests of volatile ranges with handles: which bytes are kept and purged, the order of purges, and what an unmark
//! reports.
#![allow(unsafe_code)] // locks pages, counts faults, forks

mod common;

use common::{EPOCH_DISTANCE, assert_in_child, exclusive_test, pagemill};
use pagemill_core::Error;
use pagemill_core::reclaim::{Shrinker, Urgency, Which};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_testbed::Testbed;
use pagemill_volatile::{Behaviour, Contents, VolatileBuf, VolatileCache};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Upper bound of every wait in these tests.
const WAIT_LIMIT: Duration = Duration::from_secs(600);
/// Duration of tests with concurrent threads.
const RACE_TIME: Duration = Duration::from_secs(2);

fn new_range(len_bytes: usize, behaviour: Behaviour, byte: u8) -> VolatileBuf {
    let mut range = pagemill().ranges.allocate(len_bytes, behaviour).unwrap();
    range.bytes_mut().unwrap().fill(byte);
    range
}

fn new_full_range(len_bytes: usize, byte: u8) -> VolatileBuf {
    new_range(len_bytes, Behaviour::Full, byte)
}

fn purge(want_bytes: usize) -> usize {
    pagemill().ranges.shrink(want_bytes as u64, Urgency::Limit) as usize
}

fn purge_all() -> usize {
    purge(usize::MAX)
}

/// Returns the number of page faults of this thread, as counted by the kernel. Makes no allocation, because an
/// allocation could fault.
fn page_faults() -> i64 {
    // SAFETY: plain data, filled by the call.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), 0);
        usage.ru_minflt + usage.ru_majflt
    }
}

fn resident_bytes(range: &VolatileBuf) -> usize {
    pagemill().account.reconcile();
    pagemill_sys::mem::resident_bytes(range.addr(), range.len_bytes().next_multiple_of(os_page_bytes())).unwrap()
}

/// Without memory pressure no range may be purged. After a mark and an unmark, all bytes must be there.
#[test]
fn nothing_is_purged_without_pressure() {
    let _exclusive = exclusive_test();
    for len in [1, os_page_bytes(), 64 * KIB, MIB, 2 * MIB, 5 * MIB + 1] {
        let range = new_full_range(len, 7);
        for _ in 0..1000 {
            range.mark().unwrap();
            assert_eq!(range.unmark().unwrap(), Contents::Kept);
        }
        assert_eq!(resident_bytes(&range), len.next_multiple_of(os_page_bytes()));
        let pin = range.pin().unwrap();
        assert!(pin.whole().unwrap().iter().all(|byte| *byte == 7) && pin.len() == len);
    }
}

/// Marking and unmarking must touch no page of a range. (Sanitizers touch pages of their own.)
#[test]
fn marking_touches_no_page() {
    let _exclusive = exclusive_test();
    let range = new_full_range(2 * MIB, 7);
    let round_trips = || {
        for _ in 0..1000 {
            range.mark().unwrap();
            range.unmark().unwrap();
        }
        page_faults()
    };
    // Code causes a fault at its first use, and the kernel sometimes samples or migrates pages. So a single round
    // without a fault is enough.
    assert!((0..100).any(|_| page_faults() == round_trips()), "each round had page faults");
    assert_eq!(range.pin().unwrap().contents(), Contents::Kept);
}

/// A purge must not change held or pinned ranges. Volatile ranges must be purged and reported as purged, and their
/// memory must return to the kernel.
#[test]
fn only_volatile_ranges_are_purged_and_reported() {
    let _exclusive = exclusive_test();
    for len in [os_page_bytes(), 100 * KIB, MIB, 2 * MIB, 4 * MIB + 5] {
        let (held, pinned, gone) = (new_full_range(len, 1), new_full_range(len, 2), new_full_range(len, 3));
        pinned.mark().unwrap();
        gone.mark().unwrap();
        let pin = pinned.pin().unwrap();
        let resident = resident_bytes(&gone);
        assert_eq!(resident, len.next_multiple_of(os_page_bytes()));

        let freed = purge_all();

        assert!(freed >= resident, "{freed} of {resident}");
        assert_eq!((resident_bytes(&gone), pin.contents()), (0, Contents::Kept));
        assert!(held.pin().unwrap().iter().all(|byte| *byte == 1) && pin.iter().all(|byte| *byte == 2));
        let gone_pin = gone.pin().unwrap();
        assert_eq!((gone_pin.contents(), gone_pin.len()), (Contents::Purged { kept_bytes: 0 }, 0));
        assert!(gone_pin.whole().is_none());
        drop(gone_pin);
        assert_eq!(gone.unmark().unwrap(), Contents::Purged { kept_bytes: 0 });
        drop(pin);
        assert!(purge_all() >= resident, "the pin has ended");
        assert_eq!(purge_all(), 0, "nothing is left");
    }
}

/// A range that was purged must be usable like a new range: after it is written, marked and unmarked, it must have its
/// bytes.
#[test]
fn a_purged_range_can_be_reused() {
    let _exclusive = exclusive_test();
    let mut range = new_full_range(3 * MIB, 1);
    for byte in 2..6 {
        range.mark().unwrap();
        purge_all();
        assert_eq!(range.unmark().unwrap(), Contents::Purged { kept_bytes: 0 });
        assert!(range.bytes_mut().unwrap().iter().all(|byte| *byte == 0));
        range.bytes_mut().unwrap().fill(byte);
        range.mark().unwrap();
        assert_eq!(range.pin().unwrap().whole().unwrap()[3 * MIB - 1], byte);
        assert_eq!(range.unmark().unwrap(), Contents::Kept);
    }
}

/// Ranges must be purged in the order in which they were marked, not in the order of their allocation. A range that is
/// refreshed must count as marked at the time of the refresh.
#[test]
fn the_least_recently_marked_range_is_purged_first() {
    let _exclusive = exclusive_test();
    purge_all();
    let ranges: Vec<VolatileBuf> = (0..4).map(|byte| new_full_range(2 * MIB, byte)).collect();
    for index in [2, 0, 3, 1] {
        ranges[index].mark().unwrap();
        sleep(EPOCH_DISTANCE);
    }
    ranges[0].refresh().unwrap();
    let mut order = Vec::new();
    for _ in 0..4 {
        assert_eq!(purge(1), 2 * MIB);
        let is_gone = |index: &usize| ranges[*index].pin().unwrap().contents() != Contents::Kept;
        order.extend((0..4).filter(is_gone).filter(|index| !order.contains(index)).collect::<Vec<_>>());
    }
    assert_eq!(order, [2, 3, 1, 0]);
}

/// Partial ranges must lose chunks from their ends, one chunk of each range in turn. The bytes in front of the purged
/// chunks must stay.
#[test]
fn partial_ranges_lose_chunks_in_turn() {
    let _exclusive = exclusive_test();
    purge_all();
    let behaviour = Behaviour::Partial { chunk_bytes: 64 * KIB };
    let ranges =
        [new_range(250 * KIB, behaviour, 1), new_range(3 * MIB, behaviour, 2), new_range(256 * KIB, behaviour, 3)];
    for range in &ranges {
        range.mark().unwrap();
    }
    let kept = || ranges.each_ref().map(|range| range.pin().unwrap().len() / KIB);
    // The last chunk of the range of 250 KiB has 58 KiB.
    for expected in [[192, 3008, 192], [128, 2944, 128]] {
        sleep(EPOCH_DISTANCE);
        assert_eq!(purge(3 * 50 * KIB).div_ceil(64 * KIB), 3);
        assert_eq!(kept(), expected);
    }
    for (range, byte) in ranges.iter().zip(1..) {
        assert!(range.pin().unwrap().iter().all(|kept| *kept == byte));
    }
    assert_eq!(ranges[0].unmark().unwrap(), Contents::Purged { kept_bytes: 128 * KIB });
    purge_all();
    assert_eq!(kept(), [250, 0, 0], "a nonvolatile range has its whole length, partly zero");
}

/// A purge of a chunk of 2 MiB must free a whole huge page.
#[test]
fn a_chunk_of_a_block_is_purged_as_a_huge_page() {
    let _exclusive = exclusive_test();
    purge_all();
    let range = new_range(7 * MIB, Behaviour::Partial { chunk_bytes: BLOCK_BYTES }, 9);
    range.mark().unwrap();
    for kept in [6, 4, 2, 0] {
        assert!(purge(1) >= MIB);
        assert_eq!(range.pin().unwrap().len(), kept * MIB);
        assert_eq!(resident_bytes(&range), kept * MIB);
    }
}

/// Calls in a wrong order, such as an unmark without a mark, must lead to errors and change nothing.
#[test]
fn calls_in_a_wrong_order_fail() {
    let _exclusive = exclusive_test();
    let ranges = pagemill().ranges;
    assert!(matches!(ranges.allocate(0, Behaviour::Full), Err(Error::BadLength { len_bytes: 0 })));
    for chunk_bytes in [0, 1, os_page_bytes() + 1] {
        let result = ranges.allocate(MIB, Behaviour::Partial { chunk_bytes });
        assert!(matches!(result, Err(Error::BadChunk { .. })), "chunks of {chunk_bytes}");
    }
    assert!(ranges.allocate(usize::MAX / 2, Behaviour::Full).is_err());
    let mut range = new_full_range(MIB, 5);
    let text_and_errno = |error: Error| (error.to_string(), error.errno());
    assert_eq!(text_and_errno(range.unmark().unwrap_err()), ("the range is not volatile".to_owned(), libc::EINVAL));
    assert!(range.refresh().is_err());
    range.mark().unwrap();
    assert_eq!(text_and_errno(range.mark().unwrap_err()).0, "the range is volatile already");
    assert!(range.bytes_mut().unwrap_err().to_string().contains("unmark it"));
    assert_eq!(range.unmark().unwrap(), Contents::Kept);
    assert_eq!(range.bytes_mut().unwrap()[0], 5);
}

/// Dropped ranges must leak nothing. Their addresses must be reused, even if a pin was leaked by `forget`.
#[test]
fn addresses_of_dropped_ranges_are_reused() {
    let _exclusive = exclusive_test();
    purge_all();
    let addrs_of_dropped = |len| -> Vec<usize> { (0..100).map(|_| new_full_range(len, 1).addr()).collect() };
    for len in [os_page_bytes(), 2 * MIB] {
        let addrs = addrs_of_dropped(len);
        assert!(addrs.iter().all(|addr| *addr == addrs[0]), "all ranges get the same address");
    }
    let range = new_full_range(MIB, 1);
    range.mark().unwrap();
    std::mem::forget(range.pin().unwrap());
    let addr = range.addr();
    drop(range);
    assert_eq!(new_full_range(MIB, 1).addr(), addr);
    // A purge must also return the memory that dropped small ranges left behind. Some of it is in resident blocks.
    purge_all();
    drop((0..80).map(|_| new_full_range(256 * KIB, 1)).collect::<Vec<_>>());
    assert!(purge_all() >= 15 * MIB);
}

/// Two threads use ranges while a third thread purges continually. The bytes of a range must be complete or be reported
/// as purged, and an unmark must not wait for a whole purge.
#[test]
fn purges_race_with_users_of_ranges() {
    let _exclusive = exclusive_test();
    let is_over = AtomicBool::new(false);
    let purged = AtomicUsize::new(0);
    let user = |byte: u8, lens: &[usize]| {
        let mut ranges: Vec<VolatileBuf> = lens.iter().map(|len| new_full_range(*len, byte)).collect();
        ranges.iter().for_each(|range| range.mark().unwrap());
        let begun = Instant::now();
        // Runs until some ranges were purged.
        while begun.elapsed() < RACE_TIME || (purged.load(Relaxed) <= 10 && begun.elapsed() < WAIT_LIMIT) {
            for range in &mut ranges {
                let kept = range.pin().unwrap();
                assert!(kept.iter().step_by(509).all(|found| *found == byte));
                drop(kept);
                if let Contents::Purged { kept_bytes } = range.unmark().unwrap() {
                    purged.fetch_add(1, Relaxed);
                    let bytes = range.bytes_mut().unwrap();
                    assert!(bytes[..kept_bytes].iter().step_by(509).all(|found| *found == byte));
                    bytes.fill(byte);
                }
                range.mark().unwrap();
            }
            ranges.remove(0);
            ranges.push(new_full_range(lens[0], byte));
            ranges.last().unwrap().mark().unwrap();
        }
    };
    scope(|scope| {
        let users = [
            scope.spawn(|| user(1, &[4 * KIB, 64 * KIB, 2 * MIB, 64 * MIB])),
            scope.spawn(|| user(2, &[4 * KIB, 100 * KIB, 3 * MIB])),
        ];
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                purge(4 * MIB);
                std::thread::yield_now();
            }
        });
        let results = users.map(|user| user.join());
        is_over.store(true, Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    assert!(purged.load(Relaxed) > 10, "nothing was purged");
}

/// The kernel refuses to discard locked pages. Lost bytes of a range must be reported, and bytes that are reported as
/// kept must be unchanged.
#[test]
fn locked_pages_are_kept_and_reported() {
    let _exclusive = exclusive_test();
    for (len, locked) in [(8 * MIB, 5 * MIB..6 * MIB), (8 * MIB, 0..8 * MIB), (MIB, 0..MIB), (MIB, MIB / 2..MIB)] {
        let range = new_full_range(len, 7);
        // SAFETY: locks pages of the range, which stays mapped.
        if unsafe { libc::mlock((range.addr() + locked.start) as *const _, locked.len()) } != 0 {
            return println!("skipped: nothing can be locked: {}", std::io::Error::last_os_error());
        }
        range.mark().unwrap();
        purge_all();
        let pin = range.pin().unwrap();
        assert!(pin.iter().all(|byte| *byte == 7), "kept {} of {len}", pin.len());
        assert_eq!(pin.contents() == Contents::Kept, locked.len() == len);
        drop(pin);
        // SAFETY: unlocks the same pages.
        unsafe { libc::munlock((range.addr() + locked.start) as *const _, locked.len()) };
    }
}

/// A range may reuse memory that the heap has offered to the kernel (`MADV_FREE`). The kernel must not take that memory
/// from the range, even if no byte of the range was written.
#[test]
fn ranges_reuse_memory_that_was_offered_to_the_kernel() {
    let _exclusive = exclusive_test();
    let heap = pagemill().heap;
    let slots: Vec<_> = (0..4).map(|_| heap.allocate(4 * MIB, BLOCK_BYTES).unwrap().addr).collect();
    for slot in &slots {
        // SAFETY: the slot is live and of that length, belongs to this test, and is freed once.
        unsafe {
            slot.as_ptr().write_bytes(9, 4 * MIB);
            heap.free(slot.as_ptr() as usize).unwrap();
        }
    }
    heap.offer(u64::MAX, Which::All);
    let range = pagemill().ranges.allocate(4 * MIB, Behaviour::Full).unwrap();
    assert!(
        slots.iter().any(|slot| slot.as_ptr() as usize == range.addr()),
        "the range uses none of the slots, so the test checks nothing"
    );
    let before = range.pin().unwrap().to_vec();
    pagemill_sys::mem::reclaim(range.addr(), range.len_bytes());
    assert!(range.pin().unwrap().iter().eq(before.iter()));
}

/// A fork child must not purge its parent's ranges, because purging shared pages would free no memory.
#[test]
fn a_fork_child_keeps_inherited_ranges() {
    let _exclusive = exclusive_test();
    purge_all();
    let (gone, range) = (new_full_range(4 * MIB, 4), new_full_range(4 * MIB, 5));
    gone.mark().unwrap();
    sleep(EPOCH_DISTANCE);
    range.mark().unwrap();
    // This purge fills the parent's purge queue before the fork.
    assert_eq!(purge(1), 4 * MIB);
    assert_in_child(|| {
        let freed = purge_all();
        freed == 0 && range.unmark().is_ok_and(|contents| contents == Contents::Kept)
    });
    assert_eq!(purge_all(), 4 * MIB);
}

/// The helper thread sleeps when the first range is created. It must wake up and measure the bytes that ranges could
/// return.
#[test]
fn the_helper_thread_wakes_for_the_first_range() {
    let own = Testbed::for_test();
    assert!(own.helper.claim());
    std::thread::spawn(|| own.helper.run(|| own.instance.prefault()));
    sleep(Duration::from_millis(200));
    let mut range = own.ranges.allocate(4 * MIB, Behaviour::Full).unwrap();
    range.bytes_mut().unwrap().fill(1);
    range.mark().unwrap();
    let until = Instant::now() + WAIT_LIMIT;
    while own.ranges.giveable_bytes() == 0 {
        assert!(Instant::now() < until, "no thread measured the ranges");
        sleep(Duration::from_millis(10));
    }
}

/// An allocation would exceed the memory limit while ranges are volatile. Ranges must be purged, and the allocation
/// must succeed. The limit must be counted as the reason.
#[test]
fn volatile_ranges_are_purged_over_a_limit() {
    let _exclusive = exclusive_test();
    let purged = || [Counter::RangeBytesPurged, Counter::PurgedForLimit].map(stats::get);
    let before = purged();
    let limited = Testbed::new(pagemill_core::arena::Layout::for_test(), 64 << 20).unwrap();
    let mut ranges = Vec::new();
    for byte in 0..64 {
        let mut range = limited.ranges.allocate(4 * MIB, Behaviour::Full).unwrap();
        range.bytes_mut().unwrap().fill(byte);
        range.mark().unwrap();
        ranges.push(range);
    }
    let kept = ranges.iter().filter(|range| range.pin().unwrap().contents() == Contents::Kept).count();
    assert!((8..=16).contains(&kept), "{kept} of 16 that fit");
    let bytes = ((64 - kept) * 4 * MIB) as u64;
    assert_eq!(purged(), before.map(|before| before + bytes));
    // Nonvolatile ranges may not be purged for an allocation, so the allocation must fail.
    ranges.clear();
    let error = loop {
        match limited.ranges.allocate(4 * MIB, Behaviour::Full) {
            Ok(range) => ranges.push(range),
            Err(error) => break error,
        }
        ranges.last_mut().unwrap().bytes_mut().unwrap().fill(1);
        assert!(ranges.len() <= 16, "the limit was not reached");
    };
    assert!(matches!(error, Error::NoMemory { .. }), "{error}");
}

/// Many threads look up a value in a volatile cache at the same time. The value must be created once, and once again
/// after a purge.
#[test]
fn a_volatile_cache_creates_each_value_once() {
    let _exclusive = exclusive_test();
    let cache: VolatileCache<u32, Vec<u8>> = VolatileCache::new_in(pagemill().ranges);
    let made = AtomicUsize::new(0);
    let look_up = |key: u32| {
        let value = cache.get_or_try_insert(key, || {
            made.fetch_add(1, Relaxed);
            sleep(Duration::from_millis(20));
            Ok::<_, ()>(vec![key as u8; 10_000])
        });
        assert_eq!(value.unwrap(), vec![key as u8; 10_000]);
    };
    for round in 1..4 {
        scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..3).for_each(look_up));
            }
        });
        assert_eq!((made.load(Relaxed), cache.len()), (3 * round, 3));
        purge_all();
        assert_eq!(cache.get(&0), None);
    }
    assert!(format!("{cache:?}").contains(&format!("{:?}", cache.counts())));
}

/// If the creation of a value fails or panics, the volatile cache must store no value, and the next lookup must create
/// the value. Values may be empty.
#[test]
fn a_failed_creation_is_retried() {
    let _exclusive = exclusive_test();
    let cache: VolatileCache<String, String> = VolatileCache::new_in(pagemill().ranges);
    assert_eq!(cache.get_or_try_insert("a".into(), || Err("none")), Err("none"));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        cache.get_or_try_insert("a".into(), || -> Result<String, ()> { panic!("as it should here") })
    }));
    assert!(panicked.is_err());
    assert_eq!(cache.get_or_try_insert("a".into(), || Ok::<_, ()>("made".into())), Ok("made".to_owned()));
    assert_eq!((cache.get("a"), cache.read("a", <[u8]>::len)), (Some("made".to_owned()), Some(4)));
    cache.insert("a".into(), &String::new()).unwrap();
    assert_eq!(cache.get("a"), Some(String::new()));
    assert!(cache.remove("a").is_some() && cache.remove("a").is_none() && cache.is_empty());
}

/// A volatile cache must drop the keys of purged values.
#[test]
fn keys_of_purged_values_are_dropped() {
    let _exclusive = exclusive_test();
    let cache: VolatileCache<u32, [u8; 100]> = VolatileCache::new_in(pagemill().ranges);
    for round in 0..20 {
        for key in 0..2000 {
            cache.insert(round * 2000 + key, &[1; 100]).unwrap();
        }
        purge_all();
    }
    assert!(cache.len() < 10_000, "{} of 40,000 keys", cache.len());
}

#[derive(Clone, Debug)]
enum Step {
    Make(usize, bool),
    Drop(usize),
    Mark(usize),
    Unmark(usize),
    Write(usize, u8),
    Pin(usize),
    Purge(usize),
}

fn random_step() -> impl Strategy<Value = Step> {
    let index = 0usize..8;
    prop_oneof![
        (prop_oneof![1usize..20_000, 100_000usize..3_000_000], any::<bool>())
            .prop_map(|(len, full)| Step::Make(len, full)),
        index.clone().prop_map(Step::Drop),
        index.clone().prop_map(Step::Mark),
        index.clone().prop_map(Step::Unmark),
        (index.clone(), any::<u8>()).prop_map(|(index, byte)| Step::Write(index, byte)),
        index.prop_map(Step::Pin),
        (1usize..4_000_000).prop_map(Step::Purge),
    ]
}

/// The expected state of a range: its byte, whether it is volatile, and the maximum number of bytes that are kept.
struct Model {
    range: VolatileBuf,
    byte: u8,
    is_volatile: bool,
    kept_bytes: usize,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// After any sequence of calls, the contents of ranges must match the reports of unmarks, and held ranges must be
    /// unchanged.
    #[test]
    fn contents_match_the_reports_for_any_calls(steps in prop::collection::vec(random_step(), 1..60)) {
        let _exclusive = exclusive_test();
        let mut models: Vec<Model> = Vec::new();
        for step in steps {
            let at = |index: usize, models: &[Model]| (!models.is_empty()).then(|| index % models.len());
            match step {
                Step::Make(len, is_full) => {
                    let chunk = Behaviour::Partial { chunk_bytes: 64 * KIB };
                    let range = new_range(len, if is_full { Behaviour::Full } else { chunk }, 1);
                    models.push(Model { range, byte: 1, is_volatile: false, kept_bytes: len });
                }
                Step::Drop(index) => drop(at(index, &models).map(|index| models.remove(index))),
                Step::Mark(index) => if let Some(model) = at(index, &models).map(|index| &mut models[index]) {
                    prop_assert_eq!(model.range.mark().is_ok(), !model.is_volatile);
                    // The range is written again, so all its bytes are known.
                    if !model.is_volatile && model.kept_bytes < model.range.len_bytes() {
                        model.range.unmark().unwrap();
                        model.range.bytes_mut().unwrap().fill(model.byte);
                        model.range.mark().unwrap();
                        model.kept_bytes = model.range.len_bytes();
                    }
                    model.is_volatile = true;
                },
                Step::Unmark(index) => if let Some(model) = at(index, &models).map(|index| &mut models[index]) {
                    match model.range.unmark() {
                        Ok(Contents::Kept) => prop_assert!(model.is_volatile),
                        Ok(Contents::Purged { kept_bytes }) => {
                            prop_assert!(model.is_volatile && kept_bytes < model.range.len_bytes());
                            model.kept_bytes = kept_bytes;
                        }
                        Err(_) => prop_assert!(!model.is_volatile),
                    }
                    model.is_volatile = false;
                },
                Step::Write(index, byte) => if let Some(model) = at(index, &models).map(|index| &mut models[index]) {
                    let bytes = model.range.bytes_mut();
                    prop_assert_eq!(bytes.is_ok(), !model.is_volatile);
                    if let Ok(bytes) = bytes {
                        bytes.fill(byte);
                        (model.byte, model.kept_bytes) = (byte, bytes.len());
                    }
                },
                Step::Pin(index) => if let Some(model) = at(index, &models).map(|index| &models[index]) {
                    let pin = model.range.pin().unwrap();
                    let known = pin.len().min(model.kept_bytes);
                    prop_assert!(pin[..known].iter().all(|byte| *byte == model.byte));
                    prop_assert!(model.is_volatile || pin.len() == model.range.len_bytes());
                },
                Step::Purge(want) => drop(purge(want)),
            }
            for model in models.iter().filter(|model| !model.is_volatile) {
                let pin = model.range.pin().unwrap();
                prop_assert!(pin[..model.kept_bytes].iter().step_by(101).all(|byte| *byte == model.byte));
            }
        }
    }
}
