//! Shuttle tests of views: threads access views while others remove, split, collapse, hold, write back and evict the
//! pages.
//!
//! The windows and the memory are real, but accesses do not fault. Where a page is not mapped, the test calls the
//! function that the fault handler calls ([`registry::resolve_fault`]), in which threads can be switched. No thread
//! runs between the check for a mapping and the access, as on a processor. At the end all mappings that are left must
//! show the file.
#![allow(unsafe_code)] // accesses the memory of views

use super::entry::{self, Entry};
use super::registry;
use super::{View, ViewMut};
use crate::mapping::shuttle_tests::{ConstantStore, PAGE, PAGES, SAMPLE_BYTES, model_caches, random_below};
use crate::mapping::shuttle_tests::{RandomSmall, run_in_many_schedules};
use crate::mapping::{Mapping, PageCache, Source, Writeback};
use pagemill_core::error::Error;
use pagemill_core::sync::{Relaxed, pause};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::Store;
use pagemill_sys::fault::{self, Access, Fault, Verdict};
use std::ptr;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Number of bytes of a file.
const FILE_BYTES: u64 = PAGES * PAGE as u64;

fn cache(limit_bytes: u64) -> PageCache {
    let builder = PageCache::builder("model").limit(limit_bytes).page(PageSize::new(PAGE).unwrap());
    let builder = builder.policy(RandomSmall).writeback(Writeback::default().age(Duration::ZERO));
    builder.source(Source::Shared).build_in(model_caches()).unwrap()
}

/// A file whose bytes are `byte` or zero, with a view that is read and one that is written. The second view begins
/// inside of a huge folio.
struct Viewed {
    byte: u8,
    read: View,
    written: ViewMut,
    file: Mapping,
}

/// Accesses the sample at offset `at` of a view: calls `act` with its address as soon as it is mapped for the access.
/// Returns `None` if the access would raise `SIGBUS`.
fn access<R>(view: &View, at: usize, kind: Access, act: impl FnOnce(*mut u8) -> R) -> Option<R> {
    let addr = view.as_ptr() as usize + at;
    loop {
        let is_mapped = if kind == Access::Write { fault::is_writable(addr) } else { fault::is_readable(addr) };
        if is_mapped {
            return Some(act(ptr::with_exposed_provenance_mut(addr)));
        }
        match registry::resolve_fault(&Fault { addr, is_protected: true, access: Some(kind) }) {
            // Two threads that always pause here could evict each other's page again and again.
            Verdict::Resolved if random_below(4) > 0 => {}
            Verdict::Resolved | Verdict::Again => pause(),
            Verdict::Purged => return None,
            Verdict::Program => panic!("the window is not in the table"),
        }
    }
}

fn sample(addr: *mut u8) -> [u8; SAMPLE_BYTES] {
    // SAFETY: the caller has checked that the addresses are mapped, and no other thread has run since.
    unsafe { addr.cast::<[u8; SAMPLE_BYTES]>().read_volatile() }
}

fn random_place() -> usize {
    random_below(PAGES as usize) * PAGE + [0, PAGE - SAMPLE_BYTES][random_below(2)]
}

fn is_fine<T>(result: Result<T, Error>) {
    let error = result.err();
    let is_expected = matches!(error, None | Some(Error::Busy { .. } | Error::NoMemory { .. } | Error::PastEnd { .. }));
    assert!(is_expected, "{error:?}");
}

/// Operations of the threads of a test.
#[derive(Clone, Copy)]
enum Act {
    Read,
    Write,
    /// Reads or writes by calls.
    Call,
    Remove,
    Reshape,
    Hold,
    /// Writes back what is due, or evicts.
    Clean,
    /// Unmaps pieces of all views, as at the limit of mappings.
    UnmapSome,
    /// Prefaults a page for reads. The test must not remove pages.
    Prefault,
    /// Prefaults a page for writes. The test must not remove pages.
    PrefaultMut,
}
use Act::{Call, Clean, Hold, Prefault, PrefaultMut, Read, Remove, Reshape, UnmapSome, Write};

impl Viewed {
    fn new(file: Mapping, byte: u8) -> Self {
        let (read, written) = (file.view(0..FILE_BYTES).unwrap(), file.view_mut(PAGE as u64..FILE_BYTES).unwrap());
        Self { byte, read, written, file }
    }

    fn assert_own_bytes(&self, bytes: &[u8]) {
        assert!(bytes.iter().all(|byte| [0, self.byte].contains(byte)), "{bytes:?} in the file of {}", self.byte);
    }

    fn run(&self, act: Act) {
        let (at, mut bytes) = (random_place(), [0; SAMPLE_BYTES]);
        let offset = at as u64;
        match act {
            Read => {
                let (view, at): (&View, _) = match random_below(2) {
                    0 => (&self.read, at),
                    _ => (&self.written, at % (FILE_BYTES as usize - PAGE)),
                };
                let found = access(view, at, Access::Read, sample);
                self.assert_own_bytes(&found.unwrap_or_default());
            }
            Write => {
                let write = |addr: *mut u8| {
                    self.assert_own_bytes(&sample(addr));
                    // SAFETY: as in `sample`.
                    unsafe { addr.cast::<[u8; SAMPLE_BYTES]>().write_volatile([self.byte; SAMPLE_BYTES]) };
                };
                access(&self.written, at % (FILE_BYTES as usize - PAGE), Access::Write, write);
            }
            Call if random_below(2) == 0 => is_fine(self.file.write_at(&[self.byte; SAMPLE_BYTES], offset)),
            Call => {
                is_fine(self.file.read_at(&mut bytes, offset));
                self.assert_own_bytes(&bytes);
            }
            Remove => match random_below(3) {
                0 => is_fine(self.file.truncate(offset)),
                1 if self.file.0.store.is_none() => is_fine(self.file.punch_hole(offset, PAGE as u64)),
                _ => is_fine(self.file.truncate(FILE_BYTES)),
            },
            Reshape if random_below(2) == 0 => is_fine(self.file.split(offset)),
            Reshape => is_fine(self.file.collapse(offset)),
            Hold => {
                if let Ok(mut held) = self.file.hold(offset) {
                    let before: [u8; SAMPLE_BYTES] = held[..SAMPLE_BYTES].try_into().unwrap();
                    self.assert_own_bytes(&before);
                    shuttle::thread::yield_now();
                    assert_eq!(held[..SAMPLE_BYTES], before, "no view is written during a hold");
                    held[..SAMPLE_BYTES].fill(self.byte);
                }
            }
            Clean if random_below(2) == 0 => _ = self.file.0.cache.flush(),
            Clean => {
                self.file.0.cache.evict_after_ns.store(0, Relaxed);
                self.file.0.cache.evict_some(PAGE as u64);
            }
            UnmapSome => registry::unmap_some(1),
            Prefault => {
                let at = at / PAGE * PAGE;
                if let Ok(_prefaulted) = self.read.prefault(at..at + PAGE) {
                    shuttle::thread::yield_now();
                    assert!(fault::is_readable(self.read.as_ptr() as usize + at), "a prefaulted page was unmapped");
                }
            }
            PrefaultMut => {
                let at = at / PAGE * PAGE % (FILE_BYTES as usize - PAGE);
                if let Ok(_prefaulted) = self.written.prefault_mut(at..at + PAGE) {
                    shuttle::thread::yield_now();
                    assert!(fault::is_writable(self.written.as_ptr() as usize + at), "not writable after a prefault");
                }
            }
        }
    }

    /// Asserts that all that is mapped shows the file, and that entries and mappings agree. Returns the number of
    /// pieces.
    fn check(&self) -> usize {
        let views: [&View; 2] = [&self.read, &self.written];
        views.into_iter().map(|view| self.check_view(view)).sum()
    }

    fn check_view(&self, view: &View) -> usize {
        let window = &view.window;
        let size_bytes = self.file.size_bytes();
        for page in window.pages() {
            for place in [0, PAGE - SAMPLE_BYTES] {
                let offset = page * PAGE as u64 + place as u64;
                let addr = window.addr_of(offset);
                if !fault::is_readable(addr) {
                    continue;
                }
                let end_of_file = size_bytes.next_multiple_of(pagemill_sys::mem::os_page_bytes() as u64);
                assert!(offset < end_of_file, "byte {offset} is mapped, and the file has {size_bytes}");
                let (found, mut expected) = (sample(ptr::with_exposed_provenance_mut(addr)), [0; SAMPLE_BYTES]);
                let len = self.file.read_at(&mut expected, offset).unwrap();
                assert_eq!(found[..len], expected[..len], "an outdated page is mapped at {offset}");
                let pin = self.file.pin_present(page * PAGE as u64).unwrap().expect("a mapped page is in memory");
                assert!(pin.is_dirty() || !fault::is_writable(addr), "a clean page is mapped writable at {offset}");
            }
        }
        let entry = |at: usize| window.entries.load(at);
        for at in (1..window.entries.count()).filter(|at| entry(*at).is_joined()) {
            let (before, number) = (entry(at - 1).number(), entry(at).number().unwrap());
            assert_eq!(before, number.checked_sub(1), "entry {at} is joined to another folio");
        }
        let is_piece = |at: &usize| entry(*at).number().is_some() && !entry(*at).is_joined();
        (0..window.entries.count()).filter(is_piece).count()
    }

    /// Asserts that no page is mapped, and that all entries are empty.
    fn assert_is_empty(&self) {
        for view in [&self.read, &*self.written] {
            let entries = &view.window.entries;
            assert!((0..entries.count()).all(|at| entries.load(at) == Entry::EMPTY && entries.is_block_empty(at)));
            let mut places = (0..view.len_bytes()).step_by(PAGE).map(|at| view.as_ptr() as usize + at);
            assert!(!places.any(fault::is_readable), "a page stays mapped");
        }
    }
}

/// Opens two files with views. Without a store, all pages of the files exist.
fn viewed_files(cache: &PageCache, has_store: bool) -> Arc<[Viewed; 2]> {
    Arc::new([1, 2].map(|byte| {
        let file = if has_store { cache.open(Arc::new(ConstantStore(byte))) } else { cache.create() }.unwrap();
        file.truncate(FILE_BYTES).unwrap();
        if !has_store {
            (0..PAGES).for_each(|page| is_fine(file.write_at(&vec![byte; PAGE], page * PAGE as u64)));
        }
        Viewed::new(file, byte)
    }))
}

/// Asserts, when no thread uses the files, that all mappings that are left show their file, and that the counts of
/// pieces and entries are right. Then removes all pages: nothing may stay mapped or pinned.
fn check_all(files: &[Viewed; 2], cache: &PageCache) {
    let pieces: usize = files.iter().map(Viewed::check).sum();
    assert_eq!(entry::pieces(), pieces, "pieces are counted exactly");
    for viewed in files {
        viewed.file.truncate(0).unwrap();
        viewed.assert_is_empty();
    }
    assert_eq!((entry::pieces(), cache.charged_bytes()), (0, 0), "views of empty files keep neither pieces nor pins");
}

/// Runs threads over two files in many schedules. Each thread runs the operations of its list. `limit_pages` is the
/// limit of the cache.
fn run_threads(has_store: bool, limit_pages: u64, threads: &'static [&'static [Act]]) {
    run_in_many_schedules(1, move || {
        let cache = cache(limit_pages * PAGE as u64);
        let files = viewed_files(&cache, has_store);
        let threads: Vec<_> = threads
            .iter()
            .map(|acts| {
                let files = files.clone();
                shuttle::thread::spawn(move || acts.iter().for_each(|act| files[random_below(2)].run(*act)))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        check_all(&files, &cache);
    });
}

/// Accesses to the second page of the first file, which may be mapped before, race with `change`, while a third thread
/// needs memory for a page of the other file. The races happen at a few points only, so there are many runs of few
/// steps.
fn race(has_store: bool, change: fn(&Mapping)) {
    const RUNS_FACTOR: usize = 4;
    run_in_many_schedules(RUNS_FACTOR, move || {
        let cache = cache(10 * PAGE as u64);
        let files = viewed_files(&cache, has_store);
        files[1].file.truncate(0).unwrap();
        files[1].file.truncate(FILE_BYTES).unwrap();
        files[0].file.read_at(&mut [0], PAGE as u64).unwrap();
        let (views, kinds) = ([&files[0].read, &*files[0].written], [Access::Read, Access::Write]);
        let (view, kind) = [(views[0], kinds[0]), (views[1], kinds[0]), (views[1], kinds[1])][random_below(3)];
        let at = PAGE - (FILE_BYTES as usize - view.len_bytes());
        let access_once = || {
            let found = access(view, at, kind, sample);
            files[0].assert_own_bytes(&found.unwrap_or_default());
        };
        (0..random_below(2)).for_each(|_| access_once());
        let (changed, taken) = (files.clone(), files.clone());
        let changer = shuttle::thread::spawn(move || change(&changed[0].file));
        let taker = shuttle::thread::spawn(move || is_fine(taken[1].file.write_at(&[2; PAGE], 0)));
        (0..2).for_each(|_| access_once());
        changer.join().unwrap();
        taker.join().unwrap();
        check_all(&files, &cache);
    });
}

#[test]
fn accesses_race_with_an_eviction() {
    race(true, |file| is_fine(file.dont_need(0, FILE_BYTES)));
}

/// A page is evicted while a thread handles a fault there, and its memory gets a page of another file. The thread must
/// not map that page: unlike a removal, an eviction looks for mappings before it removes the page.
#[test]
fn a_reused_page_is_not_mapped() {
    const RUNS_FACTOR: usize = 20;
    run_in_many_schedules(RUNS_FACTOR, || {
        let cache = cache(10 * PAGE as u64);
        let stored = cache.open(Arc::new(ConstantStore(1))).unwrap();
        let (view, other) = (stored.view(0..FILE_BYTES).unwrap(), cache.open(Arc::new(ConstantStore(2))).unwrap());
        let file = Arc::new(stored);
        file.read_at(&mut [0], 0).unwrap();
        let evicted = file.clone();
        let evicter = shuttle::thread::spawn(move || {
            is_fine(evicted.dont_need(0, FILE_BYTES));
            is_fine(other.read_at(&mut [0], 0));
            other
        });
        let found = access(&view, 0, Access::Read, sample);
        let other = evicter.join().unwrap();
        assert_eq!(found, Some([1; SAMPLE_BYTES]));
        assert_eq!(access(&view, 0, Access::Read, sample), found, "a page of another file is mapped");
        drop((view, other));
    });
}

#[test]
fn accesses_race_with_a_removal() {
    race(false, |file| is_fine(file.punch_hole(PAGE as u64, PAGE as u64)));
}

/// The file loses a part of the page, and the pages behind it.
#[test]
fn accesses_race_with_a_truncation() {
    race(false, |file| is_fine(file.truncate((PAGE + SAMPLE_BYTES) as u64)));
}

#[test]
fn accesses_race_with_writeback() {
    race(true, |file| {
        is_fine(file.write_at(&[1; SAMPLE_BYTES], PAGE as u64));
        is_fine(file.sync());
    });
}

#[test]
fn accesses_during_removals() {
    run_threads(false, 10, &[&[Read, Read, Write], &[Write, Read, Call], &[Remove, Call, Remove, Remove]]);
}

#[test]
fn accesses_during_splits_collapses_and_holds() {
    run_threads(false, 10, &[&[Read, Write, Read], &[Write, Read, Write], &[Reshape, Hold, Reshape, Reshape]]);
}

#[test]
fn accesses_during_evictions_and_writeback() {
    run_threads(true, 3, &[&[Read, Write, Read], &[Write, Read, Call], &[Clean, Call, Clean, Remove, Clean]]);
}

#[test]
fn accesses_at_the_limit_of_mappings() {
    run_threads(true, 6, &[&[Read, Write, Read], &[Prefault, Read, Prefault], &[UnmapSome, Clean, UnmapSome, Reshape]]);
}

/// A page is prefaulted while accesses map and unmap the huge folio in which it lies.
#[test]
fn prefaulted_pages_stay_mapped() {
    run_threads(true, 6, &[&[Read, Read, Read], &[PrefaultMut, Prefault, PrefaultMut], &[UnmapSome, Clean, UnmapSome]]);
}

/// A thread reads a page of a clean huge folio through a view, while another thread prefaults the folio's other page
/// for writes. The read must not make that page read-only.
#[test]
fn a_read_keeps_a_prefaulted_page_writable() {
    run_in_many_schedules(4, || {
        let cache = cache(10 * PAGE as u64);
        let file = cache.open(Arc::new(ConstantStore(1))).unwrap();
        let view = Arc::new(file.view_mut(0..FILE_BYTES).unwrap());
        file.read_at(&mut [0], 0).unwrap();
        let read = view.clone();
        let reader = shuttle::thread::spawn(move || access(&read, 0, Access::Read, sample));
        let prefaulted = view.prefault_mut(PAGE..2 * PAGE).unwrap();
        assert_eq!(reader.join().unwrap(), Some([1; SAMPLE_BYTES]));
        assert!(fault::is_writable(view.as_ptr() as usize + PAGE), "not writable after a prefault");
        drop(prefaulted);
    });
}

/// A store of one number for each page, at the begin of the page.
struct NumberStore(Mutex<[u64; PAGES as usize]>);

impl NumberStore {
    /// Returns the numbers of the pages from `offset` on, each with its place in `bytes`.
    fn places(offset: u64, len: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..len).step_by(PAGE).map(move |at| ((offset as usize + at) / PAGE, at))
    }
}

impl Store for NumberStore {
    fn size_bytes(&self) -> std::io::Result<u64> {
        Ok(FILE_BYTES)
    }

    fn block_bytes(&self) -> usize {
        SAMPLE_BYTES
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> std::io::Result<()> {
        let numbers = self.0.lock().unwrap();
        for (page, at) in Self::places(offset, to.len()) {
            to[at..at + SAMPLE_BYTES].copy_from_slice(&numbers[page].to_ne_bytes());
        }
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::io::Result<()> {
        for (page, at) in Self::places(offset, from.len()) {
            pagemill_core::sync::modelled::scheduling_point();
            let number = u64::from_ne_bytes(from[at..at + SAMPLE_BYTES].try_into().unwrap());
            self.0.lock().unwrap()[page] = number;
        }
        Ok(())
    }

    fn set_size(&self, _size_bytes: u64) -> std::io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Threads add to numbers through views of a file, and read them, while its pages are written back, evicted, split,
/// collapsed and held. No addition may be lost: neither in the file nor, after a sync, in the store.
#[test]
fn writes_during_writeback_are_not_lost() {
    run_in_many_schedules(1, || {
        let cache = cache(3 * PAGE as u64);
        let store = Arc::new(NumberStore(Mutex::default()));
        let file = cache.open(store.clone()).unwrap();
        let viewed = Arc::new(Viewed::new(file, 0));
        let sums: Arc<[AtomicU64; PAGES as usize]> = Arc::default();
        let adders: Vec<_> = (0..2)
            .map(|_| {
                let (viewed, sums) = (viewed.clone(), sums.clone());
                shuttle::thread::spawn(move || {
                    for _ in 0..4 {
                        let page = 1 + random_below(PAGES as usize - 1);
                        let add = |addr: *mut u8| {
                            let number = u64::from_ne_bytes(sample(addr)) + 1;
                            // SAFETY: as in `sample`.
                            unsafe { addr.cast::<[u8; SAMPLE_BYTES]>().write_volatile(number.to_ne_bytes()) };
                            sums[page].fetch_add(1, Relaxed);
                        };
                        // Without effect if all memory is in use.
                        access(&viewed.written, (page - 1) * PAGE, Access::Write, add);
                        let page = random_below(PAGES as usize);
                        let before = sums[page].load(Relaxed);
                        let found = access(&viewed.read, page * PAGE, Access::Read, sample);
                        let expected = before..=sums[page].load(Relaxed);
                        let is_right = found.is_none_or(|found| expected.contains(&u64::from_ne_bytes(found)));
                        assert!(is_right, "{found:?} in page {page}: an addition is not visible, {expected:?}");
                    }
                })
            })
            .collect();
        let changer = viewed.clone();
        let changer = shuttle::thread::spawn(move || {
            for _ in 0..6 {
                match random_below(6) {
                    0 => is_fine(changer.file.sync()),
                    1 => changer.run(Reshape),
                    2 => drop(changer.file.hold(random_place() as u64)),
                    _ => changer.run(Clean),
                }
            }
        });
        adders.into_iter().for_each(|adder| adder.join().unwrap());
        changer.join().unwrap();
        assert_eq!(entry::pieces(), viewed.check());
        viewed.file.sync().unwrap();
        let sums = sums.each_ref().map(|sum| sum.load(Relaxed));
        let mut found = [0; PAGES as usize];
        for (page, number) in found.iter_mut().enumerate() {
            let mut bytes = [0; SAMPLE_BYTES];
            viewed.file.read_at(&mut bytes, (page * PAGE) as u64).unwrap();
            *number = u64::from_ne_bytes(bytes);
        }
        assert_eq!((found, *store.0.lock().unwrap()), (sums, sums), "numbers of the file and the store");
    });
}

/// A view is dropped while a thread handles a fault in it. Nothing may be mapped afterwards at the addresses of the
/// view, and no folio may stay pinned.
#[test]
fn a_view_is_dropped_during_a_fault() {
    run_in_many_schedules(4, || {
        let cache = cache(6 * PAGE as u64);
        let file = cache.create().unwrap();
        is_fine(file.write_at(&[1; 2 * PAGE], 0));
        let view = file.view(0..2 * BLOCK_BYTES as u64).unwrap();
        let addr = view.as_ptr() as usize;
        let faulting = shuttle::thread::spawn(move || {
            for at in [0, PAGE] {
                let _ =
                    registry::resolve_fault(&Fault { addr: addr + at, is_protected: true, access: Some(Access::Read) });
            }
        });
        drop(view);
        faulting.join().unwrap();
        assert!(!fault::is_readable(addr) && !fault::is_readable(addr + PAGE), "mapped after the drop of the view");
        assert_eq!((entry::pieces(), cache.usage().pinned), (0, 0));
        drop(file);
        assert_eq!(cache.charged_bytes(), 0);
    });
}
