//! Dirty pages of files with a store: what triggers writeback, which threads wait, and what happens if the store fails
//! or hangs.

use pagemill::mapping::policy::{Always, Never};
use pagemill::mapping::{Cache, Mapping, Settings, Writeback};
use pagemill::stats::{self, Counter};
use pagemill::store::{Faults, FaultyStore, FileOptions, MemoryStore, Store};
use pagemill::units::PageSize;
use pagemill::{Error, Pagemill};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

const PAGE: usize = 4 << 10;
const MIB: usize = 1 << 20;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const ETIMEDOUT: i32 = 110;

/// Upper bound of any wait here.
const LONG: Duration = Duration::from_secs(600);
const NEVER: Duration = Duration::from_secs(1 << 20);

type Faulty = FaultyStore<MemoryStore>;

/// Nothing is written back except above a dirty share.
fn shares(background_percent: u8, most_percent: u8) -> Writeback {
    Writeback { age: NEVER, background_percent, most_percent, timeout: LONG }
}

/// A cache with small folios, with or without a background thread.
fn cache(limit_bytes: usize, writeback: Writeback, is_by_hand: bool) -> Cache {
    let caches = Pagemill::for_test().caches;
    if is_by_hand {
        caches.collapse_by_hand();
    }
    let page = PageSize::new(PAGE).unwrap();
    let settings = Settings::new("writeback", limit_bytes as u64);
    caches.make(Settings { policy: Box::new(Never), page, writeback, ..settings }).unwrap()
}

fn open(cache: &Cache) -> (Faulty, Mapping) {
    let store = FaultyStore::new(MemoryStore::new(Vec::new(), PAGE));
    let file = cache.open(Arc::new(store.clone())).unwrap();
    (store, file)
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write_page(file: &Mapping, page: usize, byte: u8) -> pagemill::error::Result<usize> {
    file.write_at(&[byte; PAGE], (page * PAGE) as u64)
}

/// Data dirty for longer than the age is written back in the background; other data is not. The thread handles all
/// files, and starts again after it had nothing to do.
#[test]
fn old_pages_are_written_back() {
    let cache = cache(64 * MIB, Writeback { age: Duration::from_millis(30), ..shares(100, 100) }, false);
    let files = [open(&cache), open(&cache)];
    let before = stats::get(Counter::CacheWrittenForAge);
    for round in 1..4 {
        for (store, file) in &files {
            for page in [0, 1, 2, 7] {
                write_page(file, page, round).unwrap();
            }
            until("old pages stay in memory", || file.dirty_bytes() == 0);
            assert!(store.inner().bytes()[..3 * PAGE].iter().all(|byte| *byte == round));
        }
    }
    assert_eq!((cache.dirty_bytes(), files[0].0.calls().syncs), (0, 0));
    assert!(stats::get(Counter::CacheWrittenForAge) - before >= (3 * 2 * 4 * PAGE) as u64);
    files.iter().for_each(|(_, file)| file.sync().unwrap());
}

/// By explicit calls: nothing is written before it is due; then everything is, adjacent pages together.
#[test]
fn what_is_not_due_stays() {
    let fresh = cache(64 * MIB, shares(100, 100), true);
    let (store, file) = open(&fresh);
    write_page(&file, 0, 1).unwrap();
    assert_eq!((fresh.write_back_due(), file.dirty_bytes(), store.calls().writes), (0, PAGE as u64, 0));
    let old = cache(64 * MIB, Writeback { age: Duration::ZERO, ..shares(100, 100) }, true);
    let (store, file) = open(&old);
    for page in (0..100).chain(200..300).rev() {
        write_page(&file, page, 1).unwrap();
    }
    assert_eq!((old.write_back_due(), file.dirty_bytes()), ((200 * PAGE) as u64, 0));
    assert_eq!(store.calls().writes, 2);
    assert_eq!(old.write_back_due(), 0);
}

/// Data above the background share is written back, by the thread or by a call, in any file.
#[test]
fn what_is_too_much_is_written_back() {
    for is_by_hand in [false, true] {
        let cache = cache(8 * MIB, shares(10, 90), is_by_hand);
        let files = [open(&cache), open(&cache)];
        let share = (8 * MIB / 10) as u64;
        for page in 0..150 {
            files.iter().for_each(|(_, file)| _ = write_page(file, page, 1).unwrap());
        }
        if is_by_hand {
            assert!(cache.dirty_bytes() > share);
            cache.write_back_due();
        }
        until("too much stays dirty", || cache.dirty_bytes() <= share);
        assert!(files.iter().all(|(store, _)| store.calls().syncs == 0));
    }
}

/// A writer above the dirty limit waits for a store that hangs, and continues when it does; the limit is never
/// exceeded.
#[test]
fn writers_wait_for_the_store() {
    for is_by_hand in [false, true] {
        let cache = cache(4 * MIB, shares(10, 25), is_by_hand);
        let (store, file) = open(&cache);
        store.hold();
        let before = stats::get(Counter::WritersThrottled);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for page in 0..2000 {
                    assert_eq!(write_page(&file, page, 1).unwrap(), PAGE);
                    assert!(cache.dirty_bytes() <= (MIB + PAGE) as u64);
                }
                is_over.store(true, SeqCst);
            });
            until("no thread waits", || store.held() > 0 && cache.dirty_bytes() >= MIB as u64);
            assert!(!is_over.load(SeqCst));
            // Rewriting a dirty page, and reading, never wait.
            let mut byte = [0];
            file.read_at(&mut byte, 0).unwrap();
            assert_eq!(byte, [1]);
            store.release();
        });
        assert!(stats::get(Counter::WritersThrottled) > before);
        file.sync().unwrap();
        assert!(store.inner().bytes().iter().all(|byte| *byte == 1) && file.dirty_bytes() == 0);
    }
}

/// A store that hangs longer than writers may wait: they get an error, nothing is lost, and other threads continue.
#[test]
fn writers_do_not_wait_for_ever() {
    for is_by_hand in [false, true] {
        let timeout = Duration::from_millis(50);
        let cache = cache(4 * MIB, Writeback { timeout, ..shares(10, 25) }, is_by_hand);
        let ((store, file), (other_store, other)) = (open(&cache), open(&cache));
        store.hold();
        let (mut page, error) = (
            0,
            loop {
                match write_page(&file, page_of(&file), 1) {
                    Ok(_) => {}
                    Err(error) => break error,
                }
            },
        );
        assert_eq!(error.errno(), ETIMEDOUT, "{error}");
        page += page_of(&file);
        assert!(page >= MIB / PAGE - 1);
        for at in 0..100 {
            // It waits for its store no longer than the other thread, and continues nevertheless.
            until("a file whose store works", || write_page(&other, at, 2).is_ok());
        }
        let mut bytes = vec![0; page * PAGE];
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), bytes.len());
        assert!(bytes.iter().all(|byte| *byte == 1));
        store.release();
        file.sync().unwrap();
        other.sync().unwrap();
        assert!(store.inner().bytes() == bytes && other_store.inner().bytes() == vec![2; 100 * PAGE]);
        write_page(&file, page, 1).unwrap();
    }
}

/// Behind its end.
fn page_of(file: &Mapping) -> usize {
    file.size_bytes() as usize / PAGE
}

/// A store that fails: writers above the share get the cause, their data is there, and each handle gets the error once.
/// Once the store works, everything is written back.
#[test]
fn a_store_that_fails_loses_nothing() {
    let cache = cache(4 * MIB, shares(10, 25), false);
    let (store, file) = open(&cache);
    let others = [file.try_clone().unwrap(), file.try_clone().unwrap()];
    store.set_faults(Faults { fail_per_mille: 1000, errno: ENOSPC, ..Faults::default() });
    let error = loop {
        if let Err(error) = write_page(&file, page_of(&file), 1) {
            break error;
        }
    };
    assert!(matches!(error, Error::Store { .. }) && error.errno() == ENOSPC, "{error}");
    let pages = page_of(&file);
    assert!(file.dirty_bytes() == (pages * PAGE) as u64 && pages >= MIB / PAGE - 1);
    let mut bytes = vec![0; pages * PAGE];
    assert!(file.read_at(&mut bytes, 0).is_ok() && bytes.iter().all(|byte| *byte == 1));
    assert_eq!(file.sync().unwrap_err().errno(), ENOSPC);
    store.set_faults(Faults::default());
    // Below the share nothing is due any more.
    until("it is not tried again", || cache.dirty_bytes() <= 4 * MIB as u64 / 10);
    for handle in &others {
        assert_eq!(handle.sync().unwrap_err().errno(), ENOSPC);
        handle.sync().unwrap();
    }
    assert!(store.inner().bytes() == bytes);
    // It may have failed once more between its own sync and the end of the faults.
    let _ = file.sync();
    file.sync().unwrap();
}

/// A page that cannot be written blocks no other page, and is tried again.
#[test]
fn a_bad_page_keeps_no_other() {
    let cache = cache(64 * MIB, Writeback { age: Duration::ZERO, ..shares(100, 100) }, true);
    let (store, file) = open(&cache);
    for page in (0..200).step_by(2) {
        write_page(&file, page, 1).unwrap();
    }
    store.set_faults(Faults { seed: 1, fail_per_mille: 300, errno: EIO, ..Faults::default() });
    cache.write_back_due();
    assert!(file.dirty_bytes() < (60 * PAGE) as u64, "{}", file.dirty_bytes());
    store.set_faults(Faults::default());
    until("it rests for ever", || {
        cache.write_back_due();
        file.dirty_bytes() == 0
    });
    assert_eq!((file.sync().unwrap_err().errno(), file.sync().is_ok()), (EIO, true));
}

/// All pages of a cache are dirty: a thread that needs one writes some back, and is refused only if that fails.
#[test]
fn dirty_pages_make_room() {
    for is_by_hand in [false, true] {
        let cache = cache(64 * PAGE, shares(100, 100), is_by_hand);
        let (store, file) = open(&cache);
        let memory = cache.create().unwrap();
        file.truncate((200 * PAGE) as u64).unwrap();
        // Writers are throttled at 100 % only; writes through pins and holds are never throttled.
        for page in 0..64 {
            file.pin((page * PAGE) as u64).unwrap().write_at(&[1], 0).unwrap();
        }
        assert_eq!(cache.dirty_bytes(), (64 * PAGE) as u64);
        let before = stats::get(Counter::CacheWrittenForRoom);
        let mut byte = [9];
        assert_eq!(file.read_at(&mut byte, (100 * PAGE) as u64).unwrap(), 1);
        assert!(byte == [0] && stats::get(Counter::CacheWrittenForRoom) > before);
        assert_eq!(memory.write_at(&vec![5; 60 * PAGE], 0).unwrap(), 60 * PAGE, "the others, too");
        file.hold(0).unwrap()[0] = 7;
        for page in 1..4 {
            file.pin((page * PAGE) as u64).unwrap().set_dirty();
        }
        store.set_faults(Faults { fail_per_mille: 1000, errno: ENOSPC, ..Faults::default() });
        let error = file.read_at(&mut byte, (101 * PAGE) as u64).unwrap_err();
        assert_eq!((error.errno(), matches!(error, Error::Store { .. })), (ENOSPC, true));
        store.set_faults(Faults::default());
        file.read_at(&mut byte, 0).unwrap();
        assert_eq!(byte, [7]);
        let _ = file.sync();
        assert_eq!(file.read_at(&mut byte, (101 * PAGE) as u64).unwrap(), 1);
        drop((file, memory));
        assert_eq!((cache.dirty_bytes(), cache.charged_bytes()), (0, 0));
    }
}

/// A thread that needs a page when all are dirty gets one, wherever the last pass over the file ended: the next pass
/// starts there, finds nothing, and starts over.
#[test]
fn room_is_made_wherever_the_last_turn_ended() {
    let cache = cache(8 * MIB, shares(100, 100), true);
    let (_, file) = open(&cache);
    let pages = 8 * MIB / PAGE;
    (0..pages).for_each(|page| _ = write_page(&file, page, 1).unwrap());
    // A pass that ends in the middle of the file.
    write_page(&file, pages, 1).unwrap();
    assert!(file.dirty_bytes() > 0, "only a part was written");
    file.sync().unwrap();
    file.dont_need(0, 16 * MIB as u64).unwrap();
    // All dirty data lies before that, and there is nothing else.
    let other = cache.create().unwrap();
    other.write_at(&vec![1; 7 * MIB], 0).unwrap();
    (0..MIB / PAGE).for_each(|page| _ = write_page(&file, page, 2).unwrap());
    assert_eq!((file.dirty_bytes(), cache.charged_bytes()), (MIB as u64, 8 * MIB as u64));
    assert_eq!(other.write_at(&[1], 8 * MIB as u64).unwrap(), 1);
}

/// A huge folio that a truncation could not split, because it was pinned, is split later: its pages behind the end are
/// not dirty.
#[test]
fn what_is_behind_the_end_is_not_dirty_for_ever() {
    let settings =
        Settings { policy: Box::new(Always), writeback: shares(100, 100), ..Settings::new("end", 64 * MIB as u64) };
    let cache = Pagemill::for_test().caches.make(settings).unwrap();
    let (store, file) = open(&cache);
    file.write_at(&vec![1; 2 * MIB], 0).unwrap();
    let pin = file.pin(0).unwrap();
    file.truncate(PAGE as u64).unwrap();
    drop(pin);
    assert!(file.split(0).unwrap() && file.dirty_bytes() == 2 * MIB as u64);
    file.sync().unwrap();
    assert!(file.dirty_bytes() == 0 && store.inner().bytes() == [1; PAGE]);
    file.truncate(2 * MIB as u64).unwrap();
    let mut bytes = vec![9; 2 * MIB - PAGE];
    file.read_at(&mut bytes, PAGE as u64).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
}

/// `write_back` writes a range to the store without durability; a sync then has nothing to write.
#[test]
fn writing_back_is_not_syncing() {
    let cache = cache(64 * MIB, shares(100, 100), true);
    let (store, file) = open(&cache);
    for page in 0..10 {
        write_page(&file, page, 1).unwrap();
    }
    file.write_back(0, 0).unwrap();
    file.write_back((2 * PAGE + 1) as u64, (2 * PAGE) as u64).unwrap();
    let calls = store.calls();
    assert_eq!((file.dirty_bytes(), calls.writes, calls.syncs), ((7 * PAGE) as u64, 1, 0));
    file.write_back(0, u64::MAX).unwrap();
    assert_eq!((file.dirty_bytes(), store.calls().syncs), (0, 0));
    let before = store.calls().writes;
    file.sync().unwrap();
    assert_eq!((store.calls().writes, store.calls().syncs), (before, 1));
    assert!(matches!(file.write_back(1 << 63, 1), Err(Error::BadOffset { .. })));
    cache.create().unwrap().write_back(0, 1).unwrap();
}

/// Impossible shares are refused; a background share of 0 and of 100 % are valid.
#[test]
fn absurd_shares_are_refused() {
    let caches = Pagemill::for_test().caches;
    for (background, most, is_fine) in
        [(0, 0, true), (100, 100, true), (0, 100, true), (41, 40, false), (10, 101, false)]
    {
        let made = caches.make(Settings { writeback: shares(background, most), ..Settings::new("odd", MIB as u64) });
        match made {
            Ok(cache) => {
                assert!(is_fine);
                let (store, file) = open(&cache);
                for page in 0..4 {
                    write_page(&file, page, 3).unwrap();
                }
                file.sync().unwrap();
                assert_eq!(store.inner().bytes(), vec![3; 4 * PAGE]);
            }
            Err(error) => assert!(!is_fine && error.errno() == 22, "{error}"),
        }
    }
}

/// Writers, background, syncs and truncations of one file concurrently: the final contents are those written last.
#[test]
fn writers_beside_everything_lose_nothing() {
    let writeback = Writeback { age: Duration::from_millis(2), timeout: LONG, ..shares(5, 15) };
    let cache = cache(4 * MIB, writeback, false);
    let (store, file) = open(&cache);
    store.set_faults(Faults { seed: 9, delay_per_mille: 50, is_reordered: true, ..Faults::default() });
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3_usize)
            .map(|thread| {
                let file = &file;
                scope.spawn(move || {
                    for step in 0..3000_usize {
                        let page = step * 7919 % 500 * 3 + thread;
                        write_page(file, page, (step / 500 + 1) as u8).unwrap();
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !is_over.load(SeqCst) {
                file.sync().unwrap();
                // Behind everything that is checked.
                file.write_at(&[9; 100], (1600 * PAGE) as u64).unwrap();
                file.truncate((1550 * PAGE) as u64).unwrap();
            }
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        is_over.store(true, SeqCst);
    });
    file.sync().unwrap();
    store.set_faults(Faults::default());
    let mut bytes = vec![0; 1500 * PAGE];
    store.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 6) && file.dirty_bytes() == 0);
}

/// Written data reaches the store when the last handle is dropped, with the file's length. A store that fails or hangs
/// is waited for a limited time, and lost bytes are counted. `close` returns the handle on failure.
#[test]
fn the_last_handle_writes_back() {
    let of_timeout = |timeout| cache(64 * MIB, Writeback { timeout, ..shares(100, 100) }, true);
    let cache = of_timeout(LONG);
    let (store, file) = open(&cache);
    let other = file.try_clone().unwrap();
    for page in [0, 5, 6] {
        write_page(&file, page, 1).unwrap();
    }
    drop(file);
    assert_eq!(store.calls().writes, 0);
    other.truncate((6 * PAGE + 10) as u64).unwrap();
    drop(other);
    let bytes = store.inner().bytes();
    assert!(bytes.len() == 6 * PAGE + 10 && bytes[..PAGE] == [1; PAGE] && bytes[6 * PAGE..] == [1; 10]);
    // Nothing has changed, so nothing is done.
    let calls = store.calls();
    drop(cache.open(Arc::new(store.clone())).unwrap());
    assert_eq!(store.calls(), calls);

    let lost = stats::get(Counter::CacheLost);
    let file = cache.open(Arc::new(store.clone())).unwrap();
    write_page(&file, 0, 2).unwrap();
    store.set_faults(Faults { fail_per_mille: 1000, errno: ENOSPC, ..Faults::default() });
    let (file, error) = file.close().unwrap_err();
    assert_eq!((error.errno(), file.dirty_bytes()), (ENOSPC, PAGE as u64));
    drop(file);
    assert!(stats::get(Counter::CacheLost) - lost >= PAGE as u64);
    store.set_faults(Faults::default());
    let hasty = of_timeout(Duration::from_millis(50));
    let file = hasty.open(Arc::new(store.clone())).unwrap();
    write_page(&file, 0, 3).unwrap();
    store.hold();
    drop(file);
    assert!(stats::get(Counter::CacheLost) - lost >= (2 * PAGE) as u64);
    assert_eq!((cache.dirty_bytes(), hasty.dirty_bytes()), (0, 0));
    store.release();
    let file = cache.open(Arc::new(store.clone())).unwrap();
    write_page(&file, 1, 4).unwrap();
    let syncs = store.calls().syncs;
    file.close().unwrap();
    assert!(store.calls().syncs == syncs + 1 && store.inner().bytes()[PAGE..2 * PAGE] == [4; PAGE]);
}

/// Many concurrent transfers of a system file: all data is there, whatever the runs, and the file can be reopened
/// immediately after close, although its threads have only just ended.
#[test]
fn files_are_written_back_and_opened_again() {
    let folder = std::env::temp_dir().join(format!("pagemill-writeback-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("file");
    let cache = cache(64 * MIB, Writeback { age: Duration::ZERO, ..shares(5, 20) }, false);
    for round in 1..30_u8 {
        let file = cache.open(Arc::new(FileOptions::new().create().open(&path).unwrap())).unwrap();
        for step in 0..1500_usize {
            write_page(&file, step * 7919 % 6000, round).unwrap();
        }
        match round % 3 {
            0 => file.sync().unwrap(),
            1 => file.write_back(0, u64::MAX >> 1).unwrap(),
            _ => {}
        }
        drop(file);
        let bytes = std::fs::read(&path).unwrap();
        for step in 0..1500_usize {
            let at = step * 7919 % 6000 * PAGE;
            assert!(bytes[at..at + PAGE] == [round; PAGE], "round {round}, step {step}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Two pinned pages block no other page's writeback; a sync waits one second, not two, and reports that not everything
/// is durable.
#[test]
fn a_pinned_page_keeps_no_other_back() {
    let cache = cache(64 * MIB, shares(50, 90), true);
    let (store, file) = open(&cache);
    (0..64).for_each(|page| _ = write_page(&file, page, 7).unwrap());
    let pins = [5, 9].map(|page| file.pin(page * PAGE as u64).unwrap());
    for result in [file.sync(), file.write_back(0, (64 * PAGE) as u64)] {
        assert!(matches!(result, Err(Error::Busy { .. })), "{result:?}");
        assert_eq!(file.dirty_bytes(), 2 * PAGE as u64);
    }
    assert_eq!(store.inner().bytes().iter().filter(|byte| **byte == 7).count(), 62 * PAGE);
    // An error of a store is reported before that.
    (0..64).for_each(|page| _ = write_page(&file, page, 8).unwrap());
    store.set_faults(Faults { fail_per_mille: 1000, errno: ENOSPC, ..Faults::default() });
    assert_eq!(file.sync().unwrap_err().errno(), ENOSPC);
    store.set_faults(Faults::default());
    drop(pins);
    file.sync().unwrap();
    assert_eq!(store.inner().bytes(), [8; 64 * PAGE]);
}
