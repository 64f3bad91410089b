//! Makes random calls on a file. Its store is a file of the system, or a store that fails, shortens and reorders
//! transfers. Each six bytes of the input are decoded as one call, and the results are compared with a model.
//!
//! Run it by `cargo +nightly fuzz run store_calls`. The first byte of an input chooses the store and the length of the
//! file: some pages in a cache of half that size, or a huge folio and some pages. For each byte of the file, the model
//! has its value, and the set of values that the store may have. These are the value at the last sync and the values
//! written since then.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemill_cache::mapping::policy::{Ask, Choice};
use pagemill_cache::mapping::{Mapping, PageCache, Pin, Policy, Queue};
use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_core::{Error, Result};
use pagemill_store::{Faults, FaultyStore, FileStore, MemoryStore, Store};
use pagemill_testbed::Testbed;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const PAGE_BYTES: usize = PageSize::MIN_BYTES;

/// Length in bytes of a small file, and of the part of a large file after its huge folio.
const SMALL_FILE_BYTES: usize = 16 * PAGE_BYTES;

/// Number of bytes of which file offsets are multiples. Some multiples are at the edges of pages, and others are inside
/// of pages.
const OFFSET_UNIT_BYTES: usize = PAGE_BYTES / 8;

const COMPLETION_WAIT_TIME: Duration = Duration::from_millis(1);

/// A folio policy that chooses a huge folio for the first block of the file.
struct HugeForFirstBlock;

impl Policy for HugeForFirstBlock {
    fn choose(&self, ask: &Ask) -> Choice {
        if ask.offset == 0 { Choice::Huge } else { Choice::Small }
    }
}

/// A page cache and its queue of transfers, which are reused for many inputs.
struct CacheWithQueue {
    cache: PageCache,
    queue: Queue,
    most: usize,
}

impl CacheWithQueue {
    fn new(use_huge: bool) -> Self {
        let pagemill = Testbed::new(Layout::for_test(), UNLIMITED).expect("address space");
        pagemill.caches.collapse_by_hand();
        let huge = if use_huge { BLOCK_BYTES } else { 0 };
        let page = PageSize::new(PAGE_BYTES).expect("a power of two");
        let limit = (huge + SMALL_FILE_BYTES / 2) as u64;
        let settings = PageCache::builder("fuzz").limit(limit).page(page).huge(use_huge).policy(HugeForFirstBlock);
        let cache = settings.build_in(pagemill.caches).expect("a cache");
        let queue = cache.queue(4).expect("a queue");
        Self { cache, queue, most: huge + SMALL_FILE_BYTES }
    }
}

thread_local! {
    static CACHES: std::cell::RefCell<[Option<CacheWithQueue>; 2]> = const { std::cell::RefCell::new([None, None]) };
}

/// The store of the file under test. The test can also inject failures into it and read the stored bytes.
enum FileStoreUnderTest {
    Faulty(FaultyStore<MemoryStore>),
    File(PathBuf),
}

impl FileStoreUnderTest {
    fn new(is_file: bool) -> Self {
        let bytes = vec![7; 5 * PAGE_BYTES + 100];
        if !is_file {
            return Self::Faulty(FaultyStore::new(MemoryStore::new(bytes, 512)));
        }
        let folder = if PathBuf::from("/dev/shm").exists() { "/dev/shm".into() } else { std::env::temp_dir() };
        let path = folder.join(format!("pagemill-fuzz-{}", std::process::id()));
        std::fs::write(&path, bytes).expect("a file");
        Self::File(path)
    }

    fn open(&self) -> Arc<dyn Store> {
        match self {
            Self::Faulty(store) => Arc::new(store.clone()),
            Self::File(path) => Arc::new(FileStore::open(path).expect("it is there")),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Faulty(store) => store.inner().bytes(),
            Self::File(path) => std::fs::read(path).expect("it is there"),
        }
    }

    fn set_faults(&self, faults: Faults) {
        if let Self::Faulty(store) = self {
            store.set_faults(faults);
        }
    }

    /// Changes the store as another process would: cuts the file to `at` bytes, then appends `len` bytes.
    fn change_from_outside(&self, at: usize, len: usize) {
        let others: &dyn Store = match self {
            Self::Faulty(store) => store.inner(),
            Self::File(path) => {
                let file = std::fs::File::options().write(true).open(path).expect("it is there");
                file.set_len(at as u64).expect("cut");
                return std::os::unix::fs::FileExt::write_all_at(&file, &vec![6; len], at as u64).expect("written");
            }
        };
        others.set_size(at as u64).expect("cut");
        others.write(at as u64, &vec![6; len]).expect("written");
    }
}

impl Drop for FileStoreUnderTest {
    fn drop(&mut self) {
        if let Self::File(path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The model of the file: its bytes and, for each byte, a bit set of the values (0 to 7) that the store may have.
struct Model {
    bytes: Vec<u8>,
    stored: Vec<u8>,
}

impl Model {
    fn new(bytes: Vec<u8>, most: usize) -> Self {
        let mut model = Self { bytes, stored: vec![1; most] };
        model.sync(0, most);
        model
    }

    /// Records that the store has the file's current bytes in the `len` bytes at offset `at`.
    fn sync(&mut self, at: usize, len: usize) {
        let end = (at + len).min(self.bytes.len());
        let range = at.min(end)..end;
        let is = self.bytes[range.clone()].iter().map(|byte| 1 << byte);
        self.stored[range].iter_mut().zip(is).for_each(|(may_be, is)| *may_be = is);
        if len >= self.stored.len() {
            self.stored[self.bytes.len()..].fill(1);
        }
    }

    fn write(&mut self, at: usize, len: usize, byte: u8) {
        if len > 0 {
            self.bytes.resize(self.bytes.len().max(at + len), 0);
            self.bytes[at..at + len].fill(byte);
            self.stored[at..at + len].iter_mut().for_each(|may_be| *may_be |= 1 << byte);
        }
    }

    fn truncate(&mut self, size: usize) {
        self.bytes.resize(size, 0);
        self.stored[size..].iter_mut().for_each(|may_be| *may_be |= 1);
    }

    fn check_stored(&self, found: &[u8]) {
        // This makes no branch for each byte, because the fuzzer would count such branches as coverage.
        let allowed = found.iter().zip(&self.stored).fold(1, |allowed, (byte, may_be)| allowed & may_be >> byte);
        assert!(found.len() <= self.stored.len() && allowed == 1);
    }
}

/// Returns whether a failing store or a full cache may cause this error. These cannot cause the error `Busy`, because
/// no other thread uses pages.
fn is_excusable(error: &Error) -> bool {
    matches!(error, Error::Store { .. } | Error::NoMemory { .. })
}

fn panic_unless_excusable<T>(result: Result<T>) -> Option<T> {
    result.map_err(|error| assert!(is_excusable(&error), "{error:?}")).ok()
}

fn check_read(file: &Mapping, model: &Model, at: usize, len: usize) {
    let mut bytes = vec![0xEE; len + 1];
    let count = panic_unless_excusable(file.read_at(&mut bytes, at as u64)).unwrap_or(0);
    let end = (at + count).min(model.bytes.len());
    assert!(bytes[..count] == *model.bytes.get(at..end).unwrap_or_default());
    assert!(bytes[count..].iter().all(|byte| *byte == 0xEE || *byte == 0));
}

/// Makes a call on the file or its store that is allowed while pages are pinned.
fn make_call(
    place: &mut CacheWithQueue,
    behind: &FileStoreUnderTest,
    file: &Mapping,
    model: &mut Model,
    call: &[u8],
    at: usize,
    len: usize,
) {
    let (kind, offset) = (call[0] / 16, at as u64);
    match kind {
        0..3 => {
            let byte = call[5] % 7 + 1;
            let count = panic_unless_excusable(file.write_at(&vec![byte; len], offset)).unwrap_or(0);
            model.write(at, count, byte);
        }
        3 => {
            file.truncate(offset).expect("nothing has to be asked");
            model.truncate(at);
        }
        4 => {
            let end = (at + len).min(model.bytes.len());
            if panic_unless_excusable(file.zero_range(offset, len as u64)).is_some() && at < end {
                model.write(at, end - at, 0);
            } else if at < end {
                // The failed call may have zeroed a part of the range. A read of the file shows which part.
                model.stored[at..end].iter_mut().for_each(|may_be| *may_be |= 1);
                behind.set_faults(Faults::default());
                for at in (at..end).step_by(PAGE_BYTES) {
                    let mut bytes = vec![0; PAGE_BYTES.min(end - at)];
                    let count = panic_unless_excusable(file.read_at(&mut bytes, at as u64)).unwrap_or(0);
                    let old = &mut model.bytes[at..at + count];
                    let is_other = |(old, new): (&u8, &u8)| u8::from(*new != 0) & u8::from(old != new);
                    assert_eq!(old.iter().zip(&bytes).map(is_other).max().unwrap_or(0), 0);
                    old.copy_from_slice(&bytes[..count]);
                }
            }
        }
        5 => drop(file.split(offset).map_err(|error| assert!(matches!(error, Error::Busy { .. }), "{error:?}"))),
        6 => drop(file.collapse(offset).map_err(|error| {
            assert!(is_excusable(&error) || matches!(error, Error::Busy { .. }), "{error:?}");
        })),
        7 => {
            let faults = Faults {
                seed: u64::from(call[1]),
                fail_per_mille: u32::from(call[2] & 3) * 200,
                short_per_mille: u32::from(call[3] & 3) * 200,
                is_reordered: call[4] & 1 == 1,
                fails_after: (call[4] & 2 == 2).then_some(u64::from(call[5] % 8)),
                ..Faults::default()
            };
            behind.set_faults(faults);
        }
        8 => behind.set_faults(Faults::default()),
        9 => {
            match place.queue.fetch(file, offset, 0) {
                Err(Error::PastEnd { .. } | Error::Busy { .. }) => {}
                other => drop(panic_unless_excusable(other)),
            }
            if call[4] & 1 == 1 {
                take_completions(place, usize::from(call[4] & 2));
            }
        }
        _ => take_completions(place, 1),
    }
}

fn take_completions(place: &mut CacheWithQueue, least: usize) {
    place.queue.wait(least, COMPLETION_WAIT_TIME).expect("a ring works");
    while let Some(fetched) = place.queue.next() {
        panic_unless_excusable(fetched.result);
    }
}

fn drain(place: &mut CacheWithQueue) {
    while !place.queue.is_empty() {
        take_completions(place, 1);
    }
}

/// Makes a call on the file that waits until no page is pinned. The caller must have no pins.
fn make_call_without_pins(
    behind: &FileStoreUnderTest,
    file: &Mapping,
    model: &mut Model,
    call: &[u8],
    at: usize,
    len: usize,
) {
    match call[0] / 16 {
        11 => {
            if panic_unless_excusable(file.sync()).is_some() {
                model.sync(0, model.stored.len());
                assert!(behind.bytes() == model.bytes);
            }
        }
        12 => {
            if len > 0 && panic_unless_excusable(file.sync_range(at as u64, len as u64)).is_some() {
                model.sync(at, len.min(model.stored.len() - 1));
                assert_eq!(behind.bytes().len(), model.bytes.len());
            }
        }
        13 if at < model.bytes.len() => {
            if let Some(mut held) = panic_unless_excusable(file.hold(at as u64)) {
                let begin = held.offset() as usize;
                let end = (begin + held.len()).min(model.bytes.len());
                assert!(held[..end - begin] == model.bytes[begin..end]);
                assert!(held[end - begin..].iter().all(|byte| *byte == 0));
                held[at - begin..].fill(5);
                model.write(at, end - at, 5);
            }
        }
        _ => {
            // A refresh fails if the file has unsynced changes. So the test changes the store only after a sync.
            let is_synced = call[4] & 1 == 1 && panic_unless_excusable(file.sync()).is_some();
            if is_synced {
                behind.change_from_outside(at, len);
                *model = Model::new(behind.bytes(), model.stored.len());
            }
            match file.refresh() {
                Err(Error::WrongState { .. }) if !is_synced => {}
                result => result.expect("no caller has a page"),
            }
        }
    }
}

/// Pins a page of the file, or writes to a page that is already pinned.
fn pin_or_write_pinned<'file>(
    pins: &mut Vec<(Pin<'file>, usize)>,
    file: &'file Mapping,
    model: &mut Model,
    call: &[u8],
    at: usize,
) {
    if call[4] & 1 == 0 && pins.len() < 3 {
        match file.pin(at as u64) {
            Err(Error::PastEnd { .. }) => {}
            other => pins.extend(panic_unless_excusable(other).map(|pin| (pin, at))),
        }
    } else if let Some((pin, at)) = pins.get(usize::from(call[4] / 2) % 3) {
        let len = pin.len_bytes().min(usize::from(call[5]) * 8);
        match pin.write_at(&vec![4; len], 0) {
            Ok(()) => model.write(*at, len, 4),
            Err(Error::PastEnd { .. } | Error::WrongState { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// Makes the calls that `data` encodes, until a call closes the file or `data` ends. Returns how many bytes of `data`
/// were used.
fn make_calls(place: &mut CacheWithQueue, behind: &FileStoreUnderTest, model: &mut Model, data: &[u8]) -> usize {
    let most = place.most;
    let Some(file) = panic_unless_excusable(place.cache.open(behind.open())) else { return data.len() };
    let mut pins = Vec::new();
    let mut count = 0;
    for call in data.chunks_exact(6) {
        count += 6;
        // Most offsets are near the beginning of the file, or near the end of the first block.
        let far = if call[1] & 1 == 1 { most - SMALL_FILE_BYTES / 2 } else { 0 };
        let at = (far + usize::from(call[2]) * OFFSET_UNIT_BYTES + usize::from(call[5]) / 64) % most;
        let len = (usize::from(call[3]) * OFFSET_UNIT_BYTES + usize::from(call[4]) / 64) % (most - at);
        match call[0] / 16 {
            11..15 if pins.is_empty() || call[4] & 4 == 4 => {
                pins.clear();
                make_call_without_pins(behind, &file, model, call, at, len);
            }
            15 if call[4] & 8 == 8 => {
                drop(pins);
                drop(file);
                // Bytes that were not synced may be in the store, or may be lost.
                let found = behind.bytes();
                model.check_stored(&found);
                *model = Model::new(found, most);
                return count;
            }
            11..15 => {}
            15 => pin_or_write_pinned(&mut pins, &file, model, call, at),
            _ => make_call(place, behind, &file, model, call, at, len),
        }
        check_read(&file, model, at, len);
        if call[0] / 16 >= 11 {
            model.check_stored(&behind.bytes());
        }
    }
    pins.clear();
    behind.set_faults(Faults::default());
    file.sync().expect("the store is well again");
    assert!(behind.bytes() == model.bytes);
    let mut bytes = vec![0; model.bytes.len() + 1];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), model.bytes.len());
    assert!(bytes[..model.bytes.len()] == model.bytes);
    data.len()
}

fuzz_target!(|data: &[u8]| {
    let Some((first, mut data)) = data.split_first() else { return };
    let (use_huge, is_file) = (first & 1 == 1, first & 2 == 2);
    CACHES.with_borrow_mut(|places| {
        let place = places[usize::from(use_huge)].get_or_insert_with(|| CacheWithQueue::new(use_huge));
        let behind = FileStoreUnderTest::new(is_file);
        let mut model = Model::new(behind.bytes(), place.most);
        while !data.is_empty() {
            let count = make_calls(place, &behind, &mut model, data);
            // A file with reads in flight stays open until these reads have ended.
            drain(place);
            data = &data[count.min(data.len())..];
        }
        assert_eq!(place.cache.charged_bytes(), 0);
    });
});
