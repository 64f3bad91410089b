//! Dirty folios of files with a store: the number of dirty bytes, and the marks in the index by which writeback finds
//! the folios.
//!
//! A thread that is about to change a pinned or held folio proceeds in three steps. It sets the mark of the folio's
//! index entry, then the dirty bit of the folio's word, and then changes bytes. So writeback finds each folio whose
//! word is dirty. Writeback clears the mark under the index's lock while the folio is frozen, then clears the dirty
//! bit. A thread that removes a dirty folio from the file subtracts the folio's bytes from the number of dirty bytes.
//! In files without a store, dirty folios are neither marked nor counted.

use crate::mapping::cache::Inner;
use crate::mapping::index::Place;
use crate::mapping::writeback::flush::FileFlush;
use crate::mapping::{File, Mapping};
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{AtomicU32, AtomicU64, Relaxed};
use pagemill_xarray::Mark;
use std::io;
use std::sync::atomic::Ordering::{AcqRel, SeqCst};

/// Mark of an index entry whose folio is dirty, or about to be.
pub(crate) const DIRTY: Mark = Mark::A;

/// State of the dirty folios of one file.
#[derive(Default)]
pub(crate) struct Dirty {
    /// Total bytes of the file's dirty folios.
    bytes: AtomicU64,
    /// Time when the oldest dirty folio became dirty, or earlier.
    pub since_ns: AtomicU64,
    /// Number of write transfers that the store has received and not completed.
    pub in_flight: AtomicU32,
    /// In the lower half, the file's number of writeback failures; in the upper half, the error number of the last one.
    errors: AtomicU64,
    /// State of the background writeback of the file.
    pub flush: FileFlush,
}

impl Dirty {
    /// Returns the total bytes of the file's dirty folios.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(SeqCst)
    }

    /// Returns the file's number of writeback failures, and the error number of the last one.
    pub fn errors(&self) -> (u32, i32) {
        let errors = self.errors.load(SeqCst);
        (errors as u32, (errors >> u32::BITS) as i32)
    }

    /// Returns the file's last writeback error.
    pub fn failure(&self) -> Error {
        Error::Store { doing: "writing a file back", cause: io::Error::from_raw_os_error(self.errors().1) }
    }

    /// Records a writeback failure with this error number.
    fn note_error(&self, errno: i32) {
        let mut seen = self.errors.load(Relaxed);
        loop {
            let next = u64::from((seen as u32).wrapping_add(1)) | u64::from(errno as u32) << u32::BITS;
            match self.errors.compare_exchange(seen, next, SeqCst, Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }
}

impl Clone for Mapping {
    /// Returns another handle of the same file. The file exists until its last handle is dropped. Each handle reports
    /// each writeback failure once ([`Mapping::sync`]). The new handle also reports the failures that this handle has
    /// not reported yet.
    fn clone(&self) -> Self {
        self.0.handles.fetch_add(1, Relaxed);
        Self(self.0.clone(), AtomicU32::new(self.1.load(Relaxed)))
    }
}

impl Mapping {
    /// Returns the bytes of the file's dirty folios: changed in memory, and not yet in the store.
    pub fn dirty_bytes(&self) -> u64 {
        self.0.dirty.as_ref().map_or(0, |dirty| dirty.bytes())
    }

    /// Returns the result of a sync by this handle. `done` is the result of the sync itself. If that has succeeded,
    /// returns a writeback failure since the last sync by this handle.
    pub(crate) fn report_failures(&self, done: Result<()>) -> Result<()> {
        let Some(dirty) = &self.0.dirty else { return done };
        let (count, errno) = dirty.errors();
        let reported = self.1.swap(count, AcqRel);
        done?;
        if reported == count {
            return Ok(());
        }
        Err(Error::Store { doing: "writing a file back earlier", cause: io::Error::from_raw_os_error(errno) })
    }
}

impl File {
    /// Records a writeback failure, which each handle then reports once.
    pub(crate) fn note_error(&self, error: &Error) {
        if let Some(dirty) = &self.dirty {
            dirty.note_error(error.errno());
            stats::add(Counter::CacheWriteFailed, 1);
        }
    }

    /// Makes a folio dirty that was clean and is about to change. The caller has pinned the folio, and holds the file's
    /// gate.
    #[cold]
    pub(crate) fn make_dirty(&self, place: &Place) {
        if self.dirty.is_some() {
            self.tree.lock().set_mark_of(place.first, u64::from(place.number), DIRTY);
        }
        debug_assert!(self.pool.word(place.number).load().pins() > 0, "the caller has pinned the folio");
        if self.pool.word(place.number).set_dirty() {
            self.add_dirty(self.cache.folio_bytes(place.order));
        }
    }

    /// Adds bytes to the number of dirty bytes of the file and of its cache. Wakes background writeback if needed. Must
    /// not be called under the lock of the index, because the function may allocate.
    pub(crate) fn add_dirty(&self, bytes: u64) {
        let Some(dirty) = &self.dirty else { return };
        let was_clean = self.count_dirty(bytes);
        if was_clean {
            self.note_first_dirty(dirty);
        }
        self.cache.note_much_dirty();
    }

    /// Adds bytes to the number of dirty bytes of the file and of its cache. Returns whether the file had no dirty
    /// bytes before.
    pub(crate) fn count_dirty(&self, bytes: u64) -> bool {
        let Some(dirty) = self.dirty.as_ref().filter(|_| bytes > 0) else { return false };
        debug_assert!(bytes.is_multiple_of(self.page_bytes() as u64));
        let was_clean = dirty.bytes.fetch_add(bytes, SeqCst) == 0;
        self.cache.dirty_bytes.fetch_add(bytes, SeqCst);
        stats::add(Counter::CacheDirty, bytes);
        was_clean
    }

    /// Subtracts the bytes of folios that are clean now, or were removed from the file, from the number of dirty bytes.
    pub(crate) fn sub_dirty(&self, bytes: u64) {
        let Some(dirty) = self.dirty.as_ref().filter(|_| bytes > 0) else { return };
        let of_file = dirty.bytes.fetch_sub(bytes, SeqCst);
        debug_assert!(of_file >= bytes, "{of_file} dirty bytes of the file, {bytes} of them clean");
        let of_cache = self.cache.dirty_bytes.fetch_sub(bytes, SeqCst);
        debug_assert!(of_cache >= bytes, "{of_cache} dirty bytes of the cache, {bytes} of them clean");
        self.cache.balance.cleaned_bytes.fetch_add(bytes, SeqCst);
        stats::sub(Counter::CacheDirty, bytes);
    }
}

impl Inner {
    /// Returns the bytes of dirty folios of the cache's files with a store.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty_bytes.load(SeqCst)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use crate::folio::word::Kind;
    use crate::mapping::PageCache;
    use crate::mapping::policy::Auto;
    use crate::test_process;
    use pagemill_core::epoch;
    use pagemill_core::units::{BLOCK_BYTES, PageSize};
    use pagemill_store::{Faults, FaultyStore, MemoryStore};
    use std::sync::Arc;

    const PAGE: usize = PageSize::MIN_BYTES;
    const FILE_BYTES: usize = 3 * BLOCK_BYTES;

    /// Returns the next number below `end` of a fixed pseudo-random sequence (splitmix64).
    fn random_below(random: &mut u64, end: usize) -> usize {
        *random = random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (*random ^ *random >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ mixed >> 27) % end as u64) as usize
    }

    /// Asserts that the numbers of dirty bytes agree with the state words of all folios, and with the dirty marks.
    fn assert_counts_agree(cache: &PageCache, files: &[Mapping]) {
        for file in files {
            let (mut dirty, mut marked) = (0, 0);
            let guard = epoch::pin();
            let mut at = 0;
            while let Some(found) = file.0.tree.next(at, u64::from(u32::MAX), &guard) {
                let state = file.0.pool.word(found.value as u32).load();
                assert_eq!((state.kind(), state.pins()), (Kind::Live, 0));
                let bytes = cache.0.folio_bytes(found.order as u8);
                dirty += if state.is_dirty() { bytes } else { 0 };
                marked += if file.0.tree.get_mark(found.first, DIRTY, &guard) { bytes } else { 0 };
                at = found.last() + 1;
            }
            let is_stored = file.0.store.is_some();
            assert_eq!((file.dirty_bytes(), marked), if is_stored { (dirty, dirty) } else { (0, 0) });
        }
        assert_eq!(cache.0.dirty_bytes(), files.iter().map(Mapping::dirty_bytes).sum::<u64>());
    }

    fn run_random_operation(random: &mut u64, file: &Mapping, store: &FaultyStore<MemoryStore>) {
        let at = random_below(random, FILE_BYTES) as u64;
        let len = [1, PAGE, 70 * PAGE, BLOCK_BYTES][random_below(random, 4)];
        match random_below(random, 14) {
            0..=3 => _ = file.write_at(&vec![1; len], at).unwrap(),
            4 => _ = file.read_at(&mut vec![0; len], at).unwrap(),
            5 => file.truncate(at).unwrap(),
            6 => file.zero_range(at, len as u64).unwrap(),
            7 => _ = file.split(at),
            8 => _ = file.collapse(at),
            9 => {
                if let Ok(pin) = file.pin(at) {
                    match random_below(random, 2) {
                        0 => pin.set_dirty(),
                        _ => pin.write_at(&[3], 0).unwrap(),
                    }
                }
            }
            10 => {
                if let Ok(mut held) = file.hold(at) {
                    held[0] = 2;
                }
            }
            11 => file.sync().unwrap(),
            12 => file.write_back(at, len as u64).unwrap(),
            _ => {
                store.set_faults(Faults { seed: *random, fail_per_mille: 500, ..Faults::default() });
                let _ = file.sync();
                store.set_faults(Faults::default());
                let _ = file.sync();
            }
        }
    }

    /// Runs random operations on two files with a store and one without. After each operation, the numbers of dirty
    /// bytes, the dirty marks in the index and the state words of the folios must agree. At the end nothing may be
    /// dirty, even after a dirty file was dropped.
    #[test]
    fn dirty_counts_marks_and_words_agree() {
        let page = PageSize::new(PAGE).unwrap();
        for seed in 0..4 {
            let (mut random, caches) = (seed, test_process::caches());
            caches.collapse_by_hand();
            let settings = PageCache::builder("dirty").limit(64 * BLOCK_BYTES as u64).page(page).policy(Auto);
            let cache = settings.build_in(caches).unwrap();
            let store = || FaultyStore::new(MemoryStore::new(vec![9; BLOCK_BYTES / 3], PAGE));
            let stores = [store(), store()];
            let mut files: Vec<_> = stores.iter().map(|store| cache.open(Arc::new(store.clone())).unwrap()).collect();
            files.push(cache.create().unwrap());
            for _ in 0..250 {
                let which = random_below(&mut random, files.len());
                run_random_operation(&mut random, &files[which], &stores[which % 2]);
                assert_counts_agree(&cache, &files);
            }
            files[0].sync().unwrap();
            assert_eq!(files[0].dirty_bytes(), 0, "seed {seed}");
            files[1].write_at(&[1; 10 * PAGE], 0).unwrap();
            assert!(cache.0.dirty_bytes() >= 10 * PAGE as u64);
            drop(files);
            assert_eq!((cache.0.dirty_bytes(), cache.charged_bytes()), (0, 0), "seed {seed}");
        }
    }

    /// A failed writeback or sync must be reported once by each handle: by the call that failed, and by the next sync
    /// of each other handle.
    #[test]
    fn every_handle_reports_a_failure_once() {
        let cache = PageCache::builder("told").limit(32 * BLOCK_BYTES as u64).build_in(test_process::caches()).unwrap();
        let store = FaultyStore::new(MemoryStore::new(Vec::new(), PAGE));
        let first = cache.open(Arc::new(store.clone())).unwrap();
        let (second, third) = (first.clone(), first.clone());
        first.write_at(&[7; 100], 0).unwrap();
        store.set_faults(Faults { fail_per_mille: 1000, errno: libc::ENOSPC, ..Faults::default() });
        assert_eq!(second.write_back(0, 100).unwrap_err().errno(), libc::ENOSPC);
        assert_eq!(first.dirty_bytes(), cache.0.folio_bytes(0), "the page stays dirty");
        store.set_faults(Faults::default());
        drop(third);
        let third = second.clone();
        for handle in [&first, &second, &third] {
            let error = handle.sync().unwrap_err();
            assert!(error.errno() == libc::ENOSPC && error.to_string().contains("earlier"), "{error}");
            handle.sync().unwrap();
        }
        assert_eq!(store.inner().bytes(), [7; 100], "the store has the bytes");
        first.clone().sync().unwrap();
        // A sync reports its own failure at once, and other handles report it once.
        first.write_at(&[8; 100], 0).unwrap();
        store.set_faults(Faults { fail_per_mille: 1000, ..Faults::default() });
        assert_eq!(first.sync().unwrap_err().errno(), libc::EIO);
        store.set_faults(Faults::default());
        first.sync().unwrap();
        assert_eq!((second.sync().unwrap_err().errno(), second.sync().is_ok()), (libc::EIO, true));
        // The file exists as long as one of its handles.
        drop((first, second));
        assert_eq!(third.size_bytes(), 100);
        drop(third);
        assert_eq!(cache.charged_bytes(), 0);
    }
}
