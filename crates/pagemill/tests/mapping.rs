//! Tests of files in a page cache: their bytes equal those of a vector, invalid input fails, limits hold, and memory is
//! returned.

mod common;

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Builder, Mapping, PageCache};
use pagemill_core::Error;
use pagemill_core::arena::{Context, Layout};
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Reason, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_testbed::Testbed;
use proptest::prelude::*;
use proptest::sample::Index;
use source::source;
use std::io::{IoSlice, IoSliceMut};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn settings(page_bytes: usize, limit_bytes: usize) -> Builder {
    PageCache::builder("test").source(source()).limit(limit_bytes as u64).page(PageSize::new(page_bytes).unwrap())
}

/// Returns a Pagemill instance without background threads, so that its counters depend only on the test.
fn pagemill_without_threads() -> &'static Testbed {
    let pagemill = Testbed::for_test();
    pagemill.caches.collapse_by_hand();
    pagemill
}

fn cache(page_bytes: usize, limit_bytes: usize) -> PageCache {
    settings(page_bytes, limit_bytes).build_in(pagemill_without_threads().caches).unwrap()
}

fn read(file: &Mapping, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; len];
    let count = file.read_at(&mut bytes, offset as u64).unwrap();
    bytes.truncate(count);
    bytes
}

/// An operation on a file and on a vector of bytes. Both must give the same result.
#[derive(Clone, Debug)]
enum Step {
    Write { at: Offset, len: Length, byte: u8 },
    Read { at: Offset, len: Length },
    Truncate(Offset),
    Punch { at: Offset, len: Length },
    Zero { at: Offset, len: Length },
    Split(Offset),
    Collapse(Offset),
    SplitSparse,
    Hold { at: Offset, byte: u8 },
    Pin { at: Offset, byte: u8 },
}

/// An offset in a file, mostly near the border of a page or a block.
#[derive(Clone, Debug)]
struct Offset(Index, i8);

/// The length of a range that a step reads or changes.
#[derive(Clone, Debug)]
struct Length(Index, u8);

/// Maximum length of the file in the model tests.
const MAX_FILE_BYTES: usize = 11 * MIB;

impl Offset {
    fn bytes(&self, page: usize) -> usize {
        let unit = if self.1 & 1 == 0 { page } else { BLOCK_BYTES.max(page) };
        let at = self.0.index(MAX_FILE_BYTES / unit + 1) * unit;
        at.saturating_add_signed(isize::from(self.1) / 2).min(MAX_FILE_BYTES)
    }
}

impl Length {
    fn bytes(&self, page: usize) -> usize {
        match self.1 % 4 {
            0 => self.0.index(page),
            1 => self.0.index(4) * page + 1,
            2 => self.0.index(3) * BLOCK_BYTES,
            _ => self.0.index(3 * BLOCK_BYTES),
        }
    }
}

fn random_offset() -> impl Strategy<Value = Offset> {
    (any::<Index>(), prop_oneof![Just(0), Just(1), any::<i8>()]).prop_map(|(index, by)| Offset(index, by))
}

fn random_length() -> impl Strategy<Value = Length> {
    (any::<Index>(), any::<u8>()).prop_map(|(index, kind)| Length(index, kind))
}

fn random_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (random_offset(), random_length(), 1..=255u8).prop_map(|(at, len, byte)| Step::Write { at, len, byte }),
        4 => (random_offset(), random_length()).prop_map(|(at, len)| Step::Read { at, len }),
        1 => random_offset().prop_map(Step::Truncate),
        2 => (random_offset(), random_length()).prop_map(|(at, len)| Step::Punch { at, len }),
        1 => (random_offset(), random_length()).prop_map(|(at, len)| Step::Zero { at, len }),
        2 => random_offset().prop_map(Step::Split),
        2 => random_offset().prop_map(Step::Collapse),
        1 => Just(Step::SplitSparse),
        1 => (random_offset(), 1..=255u8).prop_map(|(at, byte)| Step::Hold { at, byte }),
        1 => (random_offset(), 1..=255u8).prop_map(|(at, byte)| Step::Pin { at, byte }),
    ]
}

/// Applies one step to the file and to the model, and compares the results.
fn apply(file: &Mapping, model: &mut Vec<u8>, page: usize, step: &Step) {
    match step {
        Step::Write { at, len, byte } => {
            let (at, len) = (at.bytes(page), len.bytes(page));
            let bytes: Vec<u8> = (0..len).map(|index| byte.wrapping_add((index / 1000) as u8)).collect();
            assert_eq!(file.write_at(&bytes, at as u64).unwrap(), len);
            if len > 0 {
                model.resize(model.len().max(at + len), 0);
                model[at..at + len].copy_from_slice(&bytes);
            }
        }
        Step::Read { at, len } => {
            let (at, len) = (at.bytes(page), len.bytes(page));
            let end = (at + len).min(model.len());
            let expected = model.get(at..end).unwrap_or_default();
            assert!(read(file, at, len) == expected, "{len} bytes from {at} on");
        }
        Step::Truncate(at) => {
            file.truncate(at.bytes(page) as u64).unwrap();
            model.resize(at.bytes(page), 0);
        }
        Step::Punch { at, len } => {
            file.punch_hole(at.bytes(page) as u64, len.bytes(page) as u64).unwrap();
            clear(model, at.bytes(page), len.bytes(page));
        }
        Step::Zero { at, len } => {
            file.zero_range(at.bytes(page) as u64, len.bytes(page) as u64).unwrap();
            clear(model, at.bytes(page), len.bytes(page));
        }
        Step::Split(at) => drop(file.split(at.bytes(page) as u64).unwrap()),
        Step::Collapse(at) => drop(file.collapse(at.bytes(page) as u64).unwrap()),
        Step::SplitSparse => drop(file.split_sparse().unwrap()),
        Step::Hold { at, byte } => match file.hold(at.bytes(page) as u64) {
            Ok(mut held) => {
                let offset = held.offset() as usize;
                held.fill(*byte);
                drop(held);
                // Bytes past the end are not kept.
                let end = model.len().min((offset + BLOCK_BYTES.max(page)).min(folio_end(file, offset, page)));
                model[offset..end].fill(*byte);
            }
            Err(error) => assert!(matches!(error, Error::PastEnd { .. }) && at.bytes(page) >= model.len()),
        },
        Step::Pin { at, byte } => match file.pin(at.bytes(page) as u64) {
            Ok(pin) => {
                let at = at.bytes(page);
                let len = pin.len_bytes().min(10).min(model.len() - at);
                pin.write_at(&vec![*byte; len], 0).unwrap();
                let past = model.len() - at + 1;
                if past <= pin.len_bytes() {
                    assert!(matches!(pin.write_at(&vec![1; past], 0), Err(Error::PastEnd { .. })));
                }
                model[at..at + len].fill(*byte);
            }
            Err(error) => assert!(matches!(error, Error::PastEnd { .. }) && at.bytes(page) >= model.len()),
        },
    }
    assert_eq!(file.size_bytes() as usize, model.len());
}

/// Returns the offset at which the folio that contains `offset` ends.
fn folio_end(file: &Mapping, offset: usize, _page: usize) -> usize {
    let pin = file.pin(offset as u64).unwrap();
    offset + pin.len_bytes()
}

fn clear(model: &mut [u8], at: usize, len: usize) {
    let end = (at + len).min(model.len());
    if at < end {
        model[at..end].fill(0);
    }
}

/// Asserts that `seek_data` and `seek_hole` report holes only where the model has zeros.
fn assert_seeks_agree(file: &Mapping, model: &[u8]) {
    let mut at = 0;
    while at < model.len() {
        let found = file.seek_data(at as u64).unwrap();
        // A search of a range finds the same, or that the range ends before it.
        for end in [at + 1, at + 5000, at + 100_000].map(|end| end as u64) {
            let in_range = file.seek_data_in(at as u64..end).unwrap();
            assert_eq!(in_range, found.filter(|data| *data < end), "{at}..{end}");
            let hole = file.seek_hole(at as u64).unwrap();
            assert_eq!(file.seek_hole_in(at as u64..end).unwrap(), hole.min(end), "{at}..{end}");
        }
        match found {
            Some(data) => {
                assert!(model[at..data as usize].iter().all(|byte| *byte == 0), "a hole is zero");
                at = file.seek_hole(data).unwrap() as usize;
                assert!(at > data as usize);
            }
            None => {
                assert!(model[at..].iter().all(|byte| *byte == 0));
                break;
            }
        }
    }
}

fn assert_file_equals_vector(page: usize, choose: impl Fn(Builder) -> Builder, steps: &[Step]) {
    let pagemill = pagemill_without_threads();
    let cache = choose(settings(page, 64 * MIB)).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    let mut model = Vec::new();
    for step in steps {
        apply(&file, &mut model, page, step);
    }
    cache.collapse_waiting(usize::MAX);
    // The first round skips folios that were written recently; the second round checks them.
    (0..2).for_each(|_| _ = cache.split_sparse_waiting(usize::MAX));
    assert!(read(&file, 0, model.len() + 1) == model);
    assert_seeks_agree(&file, &model);
    let usage = cache.usage();
    assert_eq!(usage.huge + usage.small + usage.pinned, usage.charged, "{usage:?}");
    drop(file);
    assert_eq!(cache.charged_bytes(), 0);
    let usage = cache.usage();
    assert_eq!((usage.huge, usage.small, usage.pinned), (0, 0, 0), "{usage:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn files_of_small_pages_equal_vectors(steps in prop::collection::vec(random_step(), 1..40)) {
        assert_file_equals_vector(4 * KIB, |settings| settings, &steps);
    }

    #[test]
    fn files_in_huge_folios_equal_vectors(steps in prop::collection::vec(random_step(), 1..40)) {
        assert_file_equals_vector(4 * KIB, |settings| settings.policy(Always), &steps);
    }

    #[test]
    fn files_whose_folios_are_never_split_equal_vectors(steps in prop::collection::vec(random_step(), 1..30)) {
        let steps: Vec<_> = steps.into_iter().filter(|step| !matches!(step, Step::Split(_))).collect();
        let choose = |settings: Builder| settings.policy(Always).split(false);
        assert_file_equals_vector(64 * KIB, choose, &steps);
    }

    #[test]
    fn files_of_pages_of_a_block_equal_vectors(steps in prop::collection::vec(random_step(), 1..30)) {
        assert_file_equals_vector(BLOCK_BYTES, |settings| settings, &steps);
    }

    #[test]
    fn files_of_pages_of_four_blocks_equal_vectors(steps in prop::collection::vec(random_step(), 1..30)) {
        assert_file_equals_vector(4 * BLOCK_BYTES, |settings| settings.policy(Never), &steps);
    }
}

/// Invalid requests must fail with an error that contains the rejected values, and change nothing.
#[test]
fn invalid_requests_fail() {
    let file = cache(4 * KIB, 4 * MIB).create().unwrap();
    assert_eq!(file.write_at(b"abc", 1).unwrap(), 3);
    let most = i64::MAX as u64;
    for offset in [most, u64::MAX - 1, u64::MAX] {
        assert!(matches!(file.read_at(&mut [0; 3], offset), Err(Error::BadOffset { .. })));
        assert!(matches!(file.write_at(&[1; 3], offset), Err(Error::BadOffset { .. })));
        assert!(matches!(file.punch_hole(offset, 3), Err(Error::BadOffset { .. })));
        assert!(matches!(file.zero_range(1, offset), Err(Error::BadOffset { .. })));
    }
    assert!(matches!(file.truncate(1 << 63), Err(Error::BadOffset { .. })));
    assert!(matches!(file.truncate(most), Err(Error::FileTooLarge { .. })));
    assert!(matches!(file.write_at(b"x", most - 1), Err(Error::FileTooLarge { .. })));
    assert_eq!(Error::FileTooLarge { size_bytes: 2, most_bytes: 1 }.errno(), libc::EFBIG);
    assert_eq!((file.read_at(&mut [], 0).unwrap(), file.write_at(&[], 1 << 40).unwrap()), (0, 0));
    assert_eq!((file.read_at(&mut [0; 8], 4).unwrap(), file.read_at(&mut [0; 8], 1 << 60).unwrap()), (0, 0));
    assert!(matches!(file.pin(4), Err(Error::PastEnd { offset: 4, size_bytes: 4 })));
    assert!(matches!(file.seek_data(4), Err(Error::PastEnd { .. })));
    assert_eq!((file.size_bytes(), read(&file, 0, 10)), (4, b"\0abc".to_vec()));
    let pagemill = pagemill_without_threads();
    assert!(
        matches!(
            settings(MIB, MIB - 1).build_in(pagemill.caches),
            Err(Error::BadLimit { limit_bytes, page_bytes }) if limit_bytes + 1 == page_bytes
        ),
        "less than a page"
    );
    assert!(matches!(settings(4 * KIB, 1 << 60).build_in(pagemill.caches), Err(Error::NoAddresses { .. })));
    let layout = Layout { pool_bytes: 4 * MIB, ..Layout::for_test() };
    let pagemill = Testbed::new(layout, UNLIMITED).unwrap();
    assert!(
        matches!(settings(8 * MIB, 8 * MIB).build_in(pagemill.caches), Err(Error::NoAddresses { .. })),
        "not one page"
    );
    assert!(PageSize::new(3000).is_none() && PageSize::new(16 * MIB).is_none());
}

/// Writes continue until the limit of the cache is reached. The last write must be short, and the next one must fail
/// with the amounts in the error. Existing data must stay, and freed pages must be usable again.
#[test]
fn writes_end_at_the_limit() {
    let cache = cache(4 * KIB, 40 * KIB);
    let file = cache.create().unwrap();
    let bytes: Vec<u8> = (0..100 * KIB).map(|at| (at / KIB) as u8 + 1).collect();
    assert_eq!(file.write_at(&bytes, 10).unwrap(), 40 * KIB - 10);
    assert_eq!(file.size_bytes() as usize, 40 * KIB);
    let error = file.write_at(b"x", 40 * KIB as u64).unwrap_err();
    let Error::NoMemory { wanted_bytes, used_bytes, limit_bytes } = error else { panic!("{error}") };
    assert_eq!((wanted_bytes, used_bytes, limit_bytes), (4 * KIB as u64, 40 * KIB as u64, 40 * KIB as u64));
    assert_eq!(read(&file, 10, 100 * KIB), bytes[..40 * KIB - 10]);
    assert_eq!(file.write_at(b"y", 5).unwrap(), 1, "in place");
    assert_eq!(file.punch_hole(4 * KIB as u64, 8 * KIB as u64).unwrap(), 8 * KIB as u64);
    assert_eq!(file.write_at(&bytes, 50 * KIB as u64).unwrap(), 6 * KIB, "two pages, the first from its middle on");
}

/// If no huge folio fits into the cache, the cache must use small folios and count that. The write must succeed.
#[test]
fn huge_folios_fall_back_to_small_ones() {
    let pagemill = pagemill_without_threads();
    let cache = settings(4 * KIB, 3 * MIB).policy(Always).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    let counted = || [Counter::HugeAllocated, Counter::HugeFallback].map(stats::get);
    let before = counted();
    assert_eq!(file.write_at(&vec![7; 3 * MIB], 0).unwrap(), 3 * MIB);
    // Other tests increment the same counters, so they are only compared with the values before.
    assert!(counted().iter().zip(before).all(|(now, before)| *now > before), "{before:?}, {:?}", counted());
    let usage = cache.usage();
    assert_eq!((usage.huge, usage.small), (2 << 20, 1 << 20), "{usage:?}");
    cache.set_huge(false);
    file.truncate(0).unwrap();
    file.write_at(&vec![7; 2 * MIB], 0).unwrap();
    assert_eq!(cache.usage().huge, 0, "switched off");
}

/// A cache is full of huge folios that have unused pages. A write must free these pages instead of failing.
#[test]
fn unused_pages_of_huge_folios_make_room() {
    let pagemill = pagemill_without_threads();
    let cache = settings(4 * KIB, 4 * MIB).policy(Always).build_in(pagemill.caches).unwrap();
    let (sparse, other) = (cache.create().unwrap(), cache.create().unwrap());
    for span in 0..2 {
        sparse.write_at(b"x", span * 2 * MIB as u64).unwrap();
    }
    assert_eq!(cache.charged_bytes() as usize, 4 * MIB);
    assert_eq!(other.write_at(&vec![1; MIB], 0).unwrap(), MIB);
    assert_eq!((read(&sparse, 0, 1), read(&sparse, 2 * MIB, 1)), (b"x".to_vec(), b"x".to_vec()));
    assert!(read(&other, 0, MIB) == vec![1; MIB]);
}

/// Free blocks of a cache must be returned to the system on request. Afterwards the cache must be able to use them
/// again.
#[test]
fn free_blocks_are_returned() {
    let pagemill = pagemill_without_threads();
    let cache = settings(4 * KIB, 64 * MIB).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    for byte in 1..3 {
        file.write_at(&vec![byte; 32 * MIB], 0).unwrap();
        assert!(pagemill.account.resident() as usize >= 32 * MIB);
        file.truncate(0).unwrap();
        assert_eq!(pagemill.account.giveable() as usize, 32 * MIB);
        assert_eq!(cache.usage().total(), cache.usage().free + cache.usage().frames + cache.usage().index);
        let freed = pagemill.account.give_back(u64::MAX, Context::Outside, Urgency::Request, Reason::Program);
        assert_eq!((freed as usize, pagemill.account.resident()), (32 * MIB, 0));
    }
    file.write_at(b"again", 0).unwrap();
    assert_eq!(read(&file, 0, 9), b"again");
}

/// At the limit of the process, unused pages of huge folios must be freed, so that many huge folios with little data
/// fit.
#[test]
fn a_limit_of_the_process_splits_sparse_huge_folios() {
    let pagemill = Testbed::new(Layout::for_test(), 64 * MIB as u64).unwrap();
    let cache = settings(4 * KIB, 256 * MIB).policy(Always).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    for span in 0..200_u64 {
        assert_eq!(file.write_at(&[span as u8 + 1; 4 * KIB], span * BLOCK_BYTES as u64).unwrap(), 4 * KIB, "{span}");
    }
    assert!(pagemill.account.resident() as usize <= 64 * MIB);
    for span in 0..200 {
        assert_eq!(read(&file, span * BLOCK_BYTES, 4 * KIB), [span as u8 + 1; 4 * KIB]);
    }
}

/// The pages with the highest possible indices in a file must be freed like all others.
#[test]
fn the_last_possible_pages_are_freed() {
    let pagemill = pagemill_without_threads();
    let cache = settings(4 * KIB, 64 * MIB).policy(Always).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    let most = ((1_u64 << 40) - 1) * 4096;
    assert_eq!(file.write_at(&[9; 100], most - 10).unwrap(), 10);
    file.truncate(0).unwrap();
    assert_eq!(cache.charged_bytes(), 0);
    file.truncate(most).unwrap();
    let mut byte = [1];
    assert_eq!((file.read_at(&mut byte, most - 5).unwrap(), byte), (1, [0]));
}

/// Holes must read as zeros and use no memory, even if the policy would choose a folio for the range of a hole.
#[test]
fn holes_need_no_memory() {
    let pagemill = Testbed::new(Layout::for_test(), MIB as u64).unwrap();
    let cache = settings(4 * KIB, 64 * MIB).policy(Always).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    file.truncate(8 * MIB as u64).unwrap();
    assert_eq!(read(&file, MIB, 100), [0; 100]);
    assert!(matches!(file.write_at(b"x", 0), Err(Error::NoMemory { .. })));
    assert_eq!(cache.charged_bytes(), 0);
}

/// A page is pinned and then removed from its file. A write through the pin must fail.
#[test]
fn writes_to_a_removed_page_fail() {
    let file = cache(4 * KIB, 8 * MIB).create().unwrap();
    file.write_at(&[1; 8192], 0).unwrap();
    let pin = file.pin(0).unwrap();
    file.punch_hole(0, 4096).unwrap();
    assert!(matches!(pin.write_at(&[2], 0), Err(Error::WrongState { .. })));
    assert_eq!(read(&file, 0, 1), [0]);
}

/// A cache is created whose limit is far above the machine's memory. The creation must succeed, because the cache's
/// addresses become accessible only when they are used.
#[test]
fn caches_larger_than_memory_can_be_created() {
    let layout = Layout { pool_bytes: 4 << 40, ..Layout::for_test() };
    let pagemill = Testbed::new(layout, UNLIMITED).unwrap();
    let cache = settings(64 * KIB, 1 << 40).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    file.write_at(b"x", 1 << 45).unwrap();
    assert_eq!(cache.charged_bytes(), 64 * KIB as u64);
}

/// A page is truncated while it is pinned. Its bytes must stay readable through the pin. Its memory must be freed when
/// the pin is dropped.
#[test]
fn pinned_bytes_survive_truncation() {
    let pagemill = pagemill_without_threads();
    for policy in [true, false] {
        let policy: Box<dyn pagemill_cache::mapping::Policy> = if policy { Box::new(Always) } else { Box::new(Never) };
        let cache = settings(4 * KIB, 8 * MIB).policy(policy).build_in(pagemill.caches).unwrap();
        let file = cache.create().unwrap();
        file.write_at(&vec![5; 3 * MIB], 0).unwrap();
        let pin = file.pin(MIB as u64 + 7).unwrap();
        assert!(matches!(file.collapse(MIB as u64), Err(Error::Busy { .. }) | Ok(false)));
        file.truncate(0).unwrap();
        assert_eq!(pin.read_u64(0), 0x0505_0505_0505_0505);
        assert_eq!(file.write_at(&[6; 4096], MIB as u64).unwrap(), 4096);
        assert_eq!(pin.read_u64(0), 0x0505_0505_0505_0505, "not the new page");
        assert!(cache.usage().pinned > 0);
        drop(pin);
        file.truncate(0).unwrap();
        assert_eq!(cache.charged_bytes(), 0);
        // The new end lies in a pinned huge folio, which stays. The rest of the folio is zeroed.
        file.write_at(&vec![5; 2 * MIB], 0).unwrap();
        let pin = file.pin(0).unwrap();
        file.truncate(100).unwrap();
        drop(pin);
        file.truncate(2 * MIB as u64).unwrap();
        assert!(read(&file, 100, 2 * MIB).iter().all(|byte| *byte == 0));
    }
}

/// A folio is held exclusively. Other accesses to the folio must fail after a second, and so must a truncation inside
/// the folio. A truncation that removes the whole folio must succeed.
#[test]
fn held_folios_are_exclusive() {
    let cache = cache(4 * KIB, 8 * MIB);
    let file = cache.create().unwrap();
    file.write_at(&[1; 8192], 0).unwrap();
    let mut held = file.hold(5000).unwrap();
    assert_eq!((held.offset(), held.len()), (4096, 4096));
    held.fill(2);
    assert!(matches!(file.read_at(&mut [0; 1], 5000), Err(Error::Busy { .. })));
    assert!(matches!(file.truncate(5000), Err(Error::Busy { .. })));
    assert_eq!(file.size_bytes(), 8192);
    assert_eq!(read(&file, 0, 4096), [1; 4096]);
    file.truncate(4096).unwrap();
    held.fill(3);
    drop(held);
    assert_eq!(cache.charged_bytes(), 4096);
    file.truncate(8192).unwrap();
    assert_eq!(read(&file, 4096, 4096), [0; 4096], "what its holder wrote after that is gone");
}

/// A pin of a range must return one pin for each folio. The first must begin at the first byte of the range.
#[test]
fn a_pin_of_a_range_has_one_pin_per_folio() {
    let pagemill = pagemill_without_threads();
    let cache = settings(4 * KIB, 64 * MIB).policy(Always).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    file.write_at(&vec![1; 5 * MIB], 0).unwrap();
    let lens = |offset: usize, len: usize| -> Vec<usize> {
        file.pin_range(offset as u64, len).unwrap().iter().map(pagemill_cache::mapping::Pin::len_bytes).collect()
    };
    assert_eq!(lens(0, MIB), [2 * MIB]);
    assert_eq!(lens(MIB, 2 * MIB), [MIB, 2 * MIB]);
    assert_eq!(lens(3 * MIB, 64 * MIB), [MIB, 2 * MIB], "to the end of the file");
    assert!(file.pin_range(5 * MIB as u64, MIB).unwrap().is_empty() && file.pin_range(0, 0).unwrap().is_empty());
    file.split(0).unwrap();
    assert_eq!(file.pin_range(100, 64 * KIB).unwrap().len(), 17);
}

/// One call writes several buffers, and another call reads them. Both must have the same result as calls with a single
/// buffer.
#[test]
fn vectored_calls_equal_calls_with_one_buffer() {
    let file = cache(4 * KIB, 8 * MIB).create().unwrap();
    let parts = [IoSlice::new(&[1; 3000]), IoSlice::new(&[]), IoSlice::new(&[2; 3000])];
    assert_eq!(file.write_vectored_at(&parts, 10).unwrap(), 6000);
    let (mut first, mut second) = ([9; 100], [9; 7000]);
    let mut parts = [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
    assert_eq!(file.read_vectored_at(&mut parts, 2960).unwrap(), 6010 - 2960);
    assert_eq!((first[49], first[50], second[2949], second[2950]), (1, 2, 2, 9));
}

/// Small folios that were written in order must be collapsed into a huge folio with the same bytes.
#[test]
fn dense_ranges_become_huge() {
    let pagemill = pagemill_without_threads();
    let cache = settings(4 * KIB, 64 * MIB).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    for page in 0..1024_u64 {
        file.write_at(&vec![page as u8; 4 * KIB], page * 4096).unwrap();
    }
    assert_eq!(cache.usage().huge, 0, "not known to be large yet");
    assert_eq!(cache.collapse_waiting(10), 2);
    assert_eq!((cache.usage().huge as usize, cache.usage().small), (4 * MIB, 0));
    for page in 0..1024 {
        assert_eq!(read(&file, page * 4096, 4096), vec![page as u8; 4096]);
    }
    for page in 1024..2048_u64 {
        file.write_at(&vec![page as u8; 4 * KIB], page * 4096).unwrap();
    }
    assert_eq!(cache.usage().huge as usize, 8 * MIB, "from here on at once");
}

/// Returns whether this process can create a cache and use a file of that cache.
fn can_use_own_cache() -> bool {
    let Ok(cache) = settings(4 * KIB, 8 * MIB).build_in(common::pagemill().caches) else { return false };
    let Ok(file) = cache.create() else { return false };
    let mut bytes = [0; 5];
    file.write_at(b"child", 4094).is_ok() && file.read_at(&mut bytes, 4094).is_ok() && bytes == *b"child"
}

/// A writer writes each page of a file as long as the cache's limit, and folios are collapsed in between. The collapses
/// must leave room for the writer.
#[test]
fn collapsing_leaves_room_for_writers() {
    let pagemill = pagemill_without_threads();
    let cache = settings(4 * KIB, 8 * MIB).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    let pages = (8 * MIB / (4 * KIB)) as u64;
    file.truncate(8 * MIB as u64).unwrap();
    for page in (0..pages).map(|page| page * 1021 % pages) {
        assert_eq!(file.write_at(&[1; 4 * KIB], page * 4096).unwrap(), 4 * KIB);
        let _ = file.collapse(page * 4096 / 7);
    }
    assert_eq!(cache.charged_bytes() as usize, 8 * MIB);
    for span in 0..4 {
        file.collapse(span * BLOCK_BYTES as u64).unwrap();
    }
    let usage = cache.usage();
    assert_eq!((usage.huge as usize, usage.charged as usize), (8 * MIB, 8 * MIB), "{usage:?}");
    drop(file);
    assert!(cache.shrink() as usize >= 8 * MIB);
    assert_eq!((cache.usage().free, cache.charged_bytes()), (0, 0));
}

/// In a fork child, calls on the cache of the parent must fail. The child must be able to create a cache of its own.
#[test]
fn calls_of_a_fork_child_fail() {
    let cache = settings(4 * KIB, 8 * MIB).build_in(common::pagemill().caches).unwrap();
    let file = cache.create().unwrap();
    file.write_at(b"parent", 0).unwrap();
    common::assert_in_child(|| {
        let is_refused = |result: pagemill_core::Result<usize>| matches!(result, Err(Error::WrongState { .. }));
        let is_over = is_refused(file.read_at(&mut [0; 6], 0)) && is_refused(file.write_at(b"child", 0));
        is_over && cache.create().is_err() && can_use_own_cache()
    });
    assert_eq!(read(&file, 0, 6), b"parent");
}

/// A cache grows before a fork. The child must make no memory resident for the cache of its parent, whether or not the
/// parent has requested chunks.
#[test]
fn a_fork_child_gets_no_chunks_ahead() {
    let pagemill = common::pagemill();
    pagemill.helper.claim();
    let cache = settings(4 * KIB, 32 * MIB).build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    assert_eq!(file.write_at(&vec![1; 8 * MIB], 0).unwrap(), 8 * MIB);
    common::assert_in_child(|| !pagemill.instance.prefault() && pagemill.account.resident() == 0);
}
