//! Tests of pins and reads with a hint: a hint may be right, outdated, of another page, or of another file. The bytes
//! must be those of the requested page in every case.

#[path = "common/source.rs"]
mod source;

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{FolioHint, Mapping, PageCache, Policy};
use pagemill_core::Error;
use pagemill_store::{MemoryStore, Store};
use pagemill_testbed::Testbed;
use source::source;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

fn cache(policy: Box<dyn Policy>, limit_bytes: u64) -> PageCache {
    let pagemill = Testbed::for_test();
    pagemill.caches.collapse_by_hand();
    PageCache::builder("hints").source(source()).limit(limit_bytes).policy(policy).build_in(pagemill.caches).unwrap()
}

/// Returns the number that each file of these tests has at the begin of a page.
fn number_of(file: u64, page: u64) -> u64 {
    file << 32 | page
}

fn fill(file: &Mapping, id: u64, pages: u64) {
    for page in 0..pages {
        let bytes = number_of(id, page).to_le_bytes().repeat(2);
        assert_eq!(file.write_at(&bytes, page * PAGE).unwrap(), 16);
    }
}

fn read_number(file: &Mapping, hint: &mut FolioHint, page: u64) -> u64 {
    let mut bytes = [0; 8];
    assert_eq!(file.read_at_hinted(hint, &mut bytes, page * PAGE).unwrap(), 8);
    u64::from_le_bytes(bytes)
}

/// Pins and reads each page with each of some hints, and checks its number. Returns the hints as they were corrected.
fn check_all(file: &Mapping, id: u64, pages: u64, hints: &[FolioHint]) -> Vec<FolioHint> {
    let mut corrected = Vec::new();
    for page in 0..pages {
        for hint in hints {
            let mut hint = *hint;
            for _ in 0..2 {
                let pin = file.pin_hinted(&mut hint, page * PAGE + 8).unwrap();
                assert!(pin.len_bytes() <= 2 * MIB as usize - 8);
                drop(pin);
                let pin = file.pin_hinted(&mut hint, page * PAGE).unwrap();
                assert_eq!(pin.read_u64(0), number_of(id, page), "page {page}, {hint:?}");
            }
            corrected.push(hint);
            let mut hint_of_reads = hints[corrected.len() % hints.len()];
            for _ in 0..2 {
                assert_eq!(read_number(file, &mut hint_of_reads, page), number_of(id, page), "page {page}");
            }
            assert_eq!(hint_of_reads, hint, "reads and pins find the same folio");
        }
    }
    corrected.dedup();
    corrected
}

/// Hints of all pages of two files are used for all pages of both, in small and in huge folios. Then the folios are
/// collapsed or split, and a part is cut off and written again.
#[test]
fn any_hint_pins_the_right_page() {
    for is_huge in [false, true] {
        let policy: Box<dyn Policy> = if is_huge { Box::new(Always) } else { Box::new(Never) };
        let cache = cache(policy, 32 * MIB);
        let (one, other) = (cache.create().unwrap(), cache.create().unwrap());
        let pages = 2 * MIB / PAGE + 3;
        fill(&one, 1, pages);
        fill(&other, 2, 40);
        let mut hints = check_all(&one, 1, pages, &[FolioHint::default()]);
        hints.extend(check_all(&other, 2, 40, &[FolioHint::default()]));
        hints.truncate(60);
        check_all(&other, 2, 40, &hints);
        check_all(&one, 1, 50, &hints);
        if is_huge {
            one.split(0).unwrap();
        } else {
            one.collapse(0).unwrap();
        }
        check_all(&one, 1, 50, &hints);
        one.truncate(PAGE).unwrap();
        let behind_end = one.pin_hinted(&mut hints[1], 20 * PAGE);
        assert!(matches!(behind_end, Err(Error::PastEnd { .. })), "{behind_end:?}");
        fill(&one, 3, 30);
        check_all(&one, 3, 30, &hints);
    }
}

/// A read with a right hint crosses the end of its folio, or of its file. It must return the bytes of both folios, and
/// stop at the end.
#[test]
fn a_hinted_read_crosses_folios_and_stops_at_the_end() {
    let cache = cache(Box::new(Never), 8 * MIB);
    let file = cache.create().unwrap();
    let bytes: Vec<u8> = (0..2 * PAGE + 100).map(|at| (at / 7) as u8).collect();
    file.write_at(&bytes, 0).unwrap();
    let mut hint = FolioHint::default();
    for (offset, len) in [(0, 1), (PAGE - 4, 8), (1, 2 * PAGE as usize), (2 * PAGE, 100), (2 * PAGE + 50, 99)] {
        let mut to = vec![0xee; len];
        for _ in 0..2 {
            let read = file.read_at_hinted(&mut hint, &mut to, offset).unwrap();
            let expected = &bytes[offset as usize..(offset as usize + len).min(bytes.len())];
            assert_eq!((read, &to[..read]), (expected.len(), expected));
            assert!(to[read..].iter().all(|byte| *byte == 0xee), "bytes past the end");
        }
    }
    for (offset, expected) in [(2 * PAGE + 100, 0), (u64::MAX / 2, 0)] {
        assert_eq!(file.read_at_hinted(&mut hint, &mut [0; 8], offset).unwrap_or(0), expected);
    }
    assert!(matches!(file.read_at_hinted(&mut hint, &mut [0; 8], u64::MAX), Err(Error::BadOffset { .. })));
    assert_eq!(file.read_at_hinted(&mut hint, &mut [], 0).unwrap(), 0);
}

/// A store of zeros. A write waits until the test lets it end, if the test has asked for that.
#[derive(Default)]
struct SlowStore(AtomicU8);

impl SlowStore {
    const WAIT_IN_WRITE: u8 = 1;
    const IN_WRITE: u8 = 2;

    fn wait_while(&self, state: u8) {
        while self.0.load(SeqCst) == state {
            std::thread::yield_now();
        }
    }
}

impl Store for SlowStore {
    fn size_bytes(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn block_bytes(&self) -> usize {
        512
    }

    fn read(&self, _offset: u64, to: &mut [u8]) -> io::Result<()> {
        to.fill(0);
        Ok(())
    }

    fn write(&self, _offset: u64, _from: &[u8]) -> io::Result<()> {
        if self.0.compare_exchange(Self::WAIT_IN_WRITE, Self::IN_WRITE, SeqCst, SeqCst).is_ok() {
            self.wait_while(Self::IN_WRITE);
        }
        Ok(())
    }

    fn set_size(&self, _size_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A page is cut off while writeback writes it to the store, and the file grows again. The folio of the page still has
/// the old bytes until the write ends, but neither a read nor a pin with its hint may find them.
#[test]
fn a_hint_does_not_find_a_page_that_was_cut_off_during_writeback() {
    let cache = cache(Box::new(Never), 8 * MIB);
    let store = Arc::new(SlowStore::default());
    let file = cache.open(store.clone()).unwrap();
    fill(&file, 1, 2);
    let mut hint = FolioHint::default();
    assert_eq!(read_number(&file, &mut hint, 0), number_of(1, 0));
    store.0.store(SlowStore::WAIT_IN_WRITE, SeqCst);
    std::thread::scope(|scope| {
        let writeback = scope.spawn(|| file.sync());
        store.wait_while(SlowStore::WAIT_IN_WRITE);
        file.truncate(0).unwrap();
        file.truncate(PAGE).unwrap();
        let mut old_hint = hint;
        let number = read_number(&file, &mut old_hint, 0);
        let pinned = file.pin_hinted(&mut hint, 0).unwrap().read_u64(0);
        store.0.store(0, SeqCst);
        writeback.join().unwrap().unwrap();
        assert_eq!((number, pinned), (0, 0));
    });
}

/// A file is closed, and the next one gets its id and its pages. Hints of the closed file must not find old bytes.
#[test]
fn hints_of_a_closed_file_find_the_pages_of_the_next() {
    let cache = cache(Box::new(Never), 8 * MIB);
    let old = cache.create().unwrap();
    fill(&old, 1, 20);
    let hints = check_all(&old, 1, 20, &[FolioHint::default()]);
    drop(old);
    let new = cache.create().unwrap();
    fill(&new, 2, 20);
    check_all(&new, 2, 20, &hints);
}

/// Threads pin pages of a file that is larger than the cache, each with hints of its own that evictions make outdated.
#[test]
fn hints_are_checked_while_pages_are_evicted() {
    let cache = cache(Box::new(Never), 2 * MIB);
    let pages = 8 * MIB / PAGE;
    let bytes = (0..pages).flat_map(|page| number_of(9, page).to_le_bytes().repeat(PAGE as usize / 8)).collect();
    let file = cache.open(Arc::new(MemoryStore::new(bytes, 512))).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let file = &file;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread);
                let mut hints = vec![FolioHint::default(); pages as usize];
                let mut hits = 0;
                for _ in 0..30_000 {
                    // Half of the accesses are to few pages, whose hints are mostly right.
                    let range = if random.bool() { 50 } else { pages };
                    let page = random.u64(..range);
                    let before = hints[page as usize];
                    let pin = file.pin_hinted(&mut hints[page as usize], page * PAGE).unwrap();
                    assert_eq!(pin.read_u64(0), number_of(9, page));
                    drop(pin);
                    hits += u64::from(before == hints[page as usize]);
                    let page = random.u64(..range);
                    assert_eq!(read_number(file, &mut hints[page as usize], page), number_of(9, page));
                }
                assert!(hits > 0, "no hint was right");
            });
        }
    });
}
