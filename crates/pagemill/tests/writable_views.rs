//! Tests of views that are written: the file, its store and other views must show the writes of a `ViewMut`, and only
//! the view itself those of a `PrivateView`.
#![allow(unsafe_code)] // passes addresses to system calls

use pagemill_cache::mapping::policy::{Always, Never};
use pagemill_cache::mapping::{Mapping, PageCache, Policy, Source, View};
use pagemill_core::Error;
use pagemill_core::units::PageSize;
use pagemill_store::{Faults, FaultyStore, MemoryStore, Store};
use pagemill_testbed::Testbed;
use std::io::{Read, Seek, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use std::thread;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;

fn page_size(bytes: usize) -> PageSize {
    PageSize::new(bytes).unwrap()
}

fn cache_of(policy: Box<dyn Policy>, limit_bytes: usize, page: PageSize) -> PageCache {
    let builder =
        PageCache::builder("views").limit(limit_bytes as u64).policy(policy).source(Source::Shared).page(page);
    builder.build_in(Testbed::for_test().caches).unwrap()
}

fn cache(policy: Box<dyn Policy>, limit_bytes: usize) -> PageCache {
    cache_of(policy, limit_bytes, page_size(4 << 10))
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / PAGE_BYTES * 31 + at) as u8).collect()
}

fn assert_view(view: &View, at: usize, expected: &[u8]) {
    let mut found = vec![0; expected.len()];
    view.read_at(&mut found, at);
    assert_same(&found, expected);
}

fn assert_file(file: &Mapping, expected: &[u8]) {
    let mut found = vec![0; expected.len()];
    assert_eq!(file.read_at(&mut found, 0).unwrap(), expected.len());
    assert_same(&found, expected);
}

#[track_caller]
fn assert_same(found: &[u8], expected: &[u8]) {
    if found == expected {
        return; // much faster than the search
    }
    let wrong = (0..expected.len()).find(|at| found[*at] != expected[*at]);
    assert_eq!(wrong, None, "the first wrong byte");
}

/// A file with huge folios, small folios and holes is written through a view that begins inside of a huge page, while
/// it is split, collapsed and punched. The file and another view must show each write.
#[test]
fn writes_change_the_file() {
    for policy in [Box::new(Always) as Box<dyn Policy>, Box::new(Never)] {
        let cache = cache(policy, 32 * MIB);
        let file = cache.create().unwrap();
        let mut content = bytes(5 * MIB);
        file.write_at(&content, 0).unwrap();
        file.truncate(8 * MIB as u64).unwrap();
        content.resize(8 * MIB, 0);
        let begin = 3 * PAGE_BYTES;
        let view = file.view_mut(begin as u64..8 * MIB as u64).unwrap();
        let other = file.view(0..8 * MIB as u64).unwrap();
        let mut write = |from: &[u8], at: usize| {
            view.write_at(from, at - begin);
            content[at..at + from.len()].copy_from_slice(from);
            assert_file(&file, &content);
            assert_view(&other, 0, &content);
            assert_view(&view, 0, &content[begin..]);
        };
        write(b"first", begin);
        write(&[7; 3 * MIB], MIB + 5);
        write(b"in a hole", 7 * MIB + 4090);
        let _ = file.split(2 * MIB as u64);
        write(b"after a split", 2 * MIB + 100);
        let _ = file.collapse(2 * MIB as u64);
        write(b"after a collapse", 2 * MIB + 4000);
        file.write_at(b"by a call", 6 * MIB as u64).unwrap();
        assert_view(&view, 6 * MIB - begin, b"by a call");
        file.punch_hole(2 * MIB as u64, MIB as u64).unwrap();
        let mut found = [1; 8];
        view.read_at(&mut found, 2 * MIB + 100 - begin);
        assert_eq!(found, [0; 8]);
        view.write_at(b"in the new hole", 2 * MIB + 100 - begin);
        assert_view(&other, 2 * MIB + 100, b"in the new hole");
    }
}

/// A file of a store, four times the size of the cache, is written through a view by several threads, each its own
/// bytes, while another thread syncs, and pages are written back and evicted. After a sync, the store must have all
/// writes.
#[test]
fn writes_reach_the_store() {
    let len = 16 * MIB;
    let cache = cache(Box::new(Never), 4 * MIB);
    let store = Arc::new(MemoryStore::new(vec![0; len], 512));
    let file = cache.open(store.clone()).unwrap();
    let view = file.view_mut(0..len as u64).unwrap();
    let (is_over, threads, rounds) = (AtomicBool::new(false), 4, 3000_usize);
    // Byte N of a page belongs to thread N % 4. A thread writes its bytes of pages in a fixed random order.
    let place =
        |id: usize, round: usize| (round * 7919 + id * 13) % (len / PAGE_BYTES) * PAGE_BYTES + id + 4 * (round % 9);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..threads)
            .map(|id| {
                let view = &view;
                scope.spawn(move || {
                    for round in 0..rounds {
                        view.write_at(&[(round % 251) as u8 + 1], place(id, round));
                        let mut found = [0];
                        view.read_at(&mut found, place(id, round));
                        assert_eq!(found, [(round % 251) as u8 + 1], "thread {id}, round {round}");
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                file.sync().unwrap();
            }
        });
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        is_over.store(true, Relaxed);
        ended.into_iter().for_each(|end| end.unwrap());
    });
    assert!(view.take_error().is_none());
    file.sync().unwrap();
    let mut expected = vec![0; len];
    for id in 0..threads {
        (0..rounds).for_each(|round| expected[place(id, round)] = (round % 251) as u8 + 1);
    }
    assert_same(&store.bytes(), &expected);
    assert_file(&file, &expected);
    assert_eq!(file.dirty_bytes(), 0);
    view.write_at(b"again", 100);
    assert_eq!(file.dirty_bytes(), PAGE_BYTES as u64, "a write after a sync makes the page dirty");
    drop(view);
    file.close().map_err(|(_, error)| error).unwrap();
    assert_eq!(&store.bytes()[100..105], b"again");
}

/// Threads increment counters through views while other threads sync, collapse, split, write elsewhere and truncate the
/// end of the file. No increment may be lost.
#[test]
fn concurrent_writes_are_not_lost() {
    for has_store in [false, true] {
        let cache = cache(Box::new(Always), 16 * MIB);
        let file = if has_store {
            cache.open(Arc::new(MemoryStore::new(vec![0; 6 * MIB], 512))).unwrap()
        } else {
            cache.create().unwrap()
        };
        file.truncate(6 * MIB as u64).unwrap();
        let (is_over, sums) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let counters: Vec<_> = (0..8_usize)
                .map(|id| {
                    let (file, sums) = (&file, &sums);
                    scope.spawn(move || {
                        let view = file.view_mut(0..4 * MIB as u64).unwrap();
                        for round in 0..4000 {
                            let at = (round * 37 + id * 11) % (4 * MIB / PAGE_BYTES) * PAGE_BYTES + 8 * (round % 3);
                            view.atomic_u64(at).fetch_add(1, SeqCst);
                            sums.fetch_add(1, SeqCst);
                        }
                    })
                })
                .collect();
            let (file, is_over) = (&file, &is_over);
            scope.spawn(move || {
                for round in 0.. {
                    if is_over.load(Relaxed) {
                        break;
                    }
                    let _ = file.sync();
                    let _ = file.split(round % 2 * 2 * MIB as u64);
                    let _ = file.collapse(round % 2 * 2 * MIB as u64);
                    file.truncate((5 * MIB + round as usize % 100 * 1000) as u64).unwrap();
                    file.write_at(&[1; 5000], 4 * MIB as u64).unwrap();
                }
            });
            let ended: Vec<_> = counters.into_iter().map(|counter| counter.join()).collect();
            is_over.store(true, Relaxed);
            ended.into_iter().for_each(|end| end.unwrap());
        });
        let mut content = vec![0; 4 * MIB];
        file.read_at(&mut content, 0).unwrap();
        let found: u64 = content.chunks_exact(8).map(|bytes| u64::from_ne_bytes(bytes.try_into().unwrap())).sum();
        assert_eq!(found, sums.load(SeqCst), "with a store: {has_store}");
    }
}

/// Writes behind the end of the file, in its last OS page, must read zero after the file has grown by a write or by
/// `truncate`. They must not reach the store.
#[test]
fn bytes_behind_the_end_are_lost() {
    for has_store in [false, true] {
        let cache = cache_of(Box::new(Never), 8 * MIB, page_size(64 << 10));
        let store = Arc::new(MemoryStore::new(vec![1; 100], 512));
        let file = if has_store { cache.open(store.clone()).unwrap() } else { cache.create().unwrap() };
        file.write_at(&[1; 100], 0).unwrap();
        let view = file.view_mut(0..MIB as u64).unwrap();
        view.write_at(&[2; 500], 50);
        file.write_at(&[3; 10], 300).unwrap();
        let mut expected = [[1; 50].as_slice(), &[2; 50], &[0; 200], &[3; 10]].concat();
        assert_file(&file, &expected);
        view.write_at(&[4; 100], 310);
        file.truncate(20_000).unwrap();
        expected.resize(20_000, 0);
        assert_file(&file, &expected);
        view.write_at(&[5; 100], 19_990);
        expected[19_990..].fill(5);
        if has_store {
            file.sync().unwrap();
            assert_same(&store.bytes(), &expected);
            assert_eq!(store.size_bytes().unwrap(), 20_000);
        }
        assert_file(&file, &expected);
        assert!(view.prefault(19_000..20_480).is_ok());
        let behind = view.prefault(19_000..20_481).map(drop);
        assert!(matches!(behind, Err(Error::PastEnd { .. })), "an OS page behind the end: {behind:?}");
        // The same after the view is gone.
        view.write_at(&[6; 100], 20_000);
        drop(view);
        file.truncate(20_200).unwrap();
        expected.resize(20_200, 0);
        assert_file(&file, &expected);
    }
}

/// A file is truncated while a thread writes behind its new end, through a system call that fails there instead of
/// raising a signal. The bytes must read zero when the file grows again.
#[test]
fn writes_during_a_truncation_are_lost() {
    let (page, at) = (64 << 10, 40_000);
    let cache = cache_of(Box::new(Never), 8 * MIB, page_size(page));
    let file = cache.create().unwrap();
    let view = file.view_mut(0..page as u64).unwrap();
    let mut source = tempfile::tempfile().unwrap();
    source.write_all(&[7; 8]).unwrap();
    let (round, written) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            // An odd number lets the writes run. The writer repeats an even number as soon as it has stopped.
            loop {
                match round.load(SeqCst) {
                    u64::MAX => return,
                    now if now % 2 == 0 => written.store(now, SeqCst),
                    _ => {
                        let addr = view.as_mut_ptr().wrapping_add(at).cast();
                        // SAFETY: the kernel writes into the view, or fails.
                        unsafe { libc::pread(std::os::fd::AsRawFd::as_raw_fd(&source), addr, 8, 0) };
                    }
                }
            }
        });
        let check = || {
            for now in (2..4000).step_by(2) {
                file.truncate(page as u64).unwrap();
                view.write_at(&[1], at);
                round.store(now - 1, SeqCst);
                (0..200).for_each(|_| std::hint::spin_loop());
                file.truncate(100).unwrap();
                round.store(now, SeqCst);
                while written.load(SeqCst) != now {
                    std::hint::spin_loop();
                }
                file.truncate(page as u64).unwrap();
                let mut found = [1; 8];
                file.read_at(&mut found, at as u64).unwrap();
                assert_eq!(found, [0; 8], "round {now}");
            }
        };
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check));
        round.store(u64::MAX, SeqCst);
        checked.unwrap();
    });
}

/// Every second page of a private view is written, which would need more mappings than views may have. All writes must
/// succeed, and stay in the view.
#[test]
fn private_views_need_few_mappings() {
    let max_mappings: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    let len = (max_mappings / 2 + 2000) * PAGE_BYTES;
    if len > 512 * MIB {
        return println!("skipped: {max_mappings} mappings are allowed");
    }
    let cache = cache(Box::new(Never), 32 * MIB);
    let file = cache.open(Arc::new(MemoryStore::new(vec![0; len], 512))).unwrap();
    let view = file.view_private(0..len as u64).unwrap();
    (0..len).step_by(2 * PAGE_BYTES).for_each(|at| view.write_at(&[1], at));
    let mut found = [0; 2];
    for at in (PAGE_BYTES..len).step_by(2 * PAGE_BYTES) {
        view.read_at(&mut found, at - 1);
        assert_eq!(found, [0; 2]);
        view.read_at(&mut found, at - PAGE_BYTES);
        assert_eq!(found, [1, 0]);
    }
    assert!(view.copied_bytes() as usize > len / 2 && view.take_error().is_none());
}

/// Private writes must be visible only in their view. Pages without such a write must show the file, also after the
/// file was written, truncated and extended. Copied pages must survive that.
#[test]
fn private_writes_stay_in_the_view() {
    for (policy, page) in [
        (Box::new(Always) as Box<dyn Policy>, page_size(4 << 10)),
        (Box::new(Never), page_size(4 << 10)),
        (Box::new(Never), page_size(64 << 10)),
        (Box::new(Never), page_size(2 << 20)),
    ] {
        let cache = cache_of(policy, 32 * MIB, page);
        let mut content = bytes(5 * MIB);
        let file = cache.create().unwrap();
        file.write_at(&content, 0).unwrap();
        let begin = 5 * PAGE_BYTES;
        let view = file.view_private(begin as u64..5 * MIB as u64).unwrap();
        let mut own = content[begin..].to_vec();
        assert_view(&view, 0, &own);
        for (at, len) in
            [(0, 10), (MIB, 3 * PAGE_BYTES), (MIB + 5 * PAGE_BYTES, 1), (3 * MIB - 2, MIB), (MIB + 4095, 2)]
        {
            view.write_at(&vec![0xEE; len], at);
            own[at..at + len].fill(0xEE);
            assert_view(&view, 0, &own);
            assert_file(&file, &content);
        }
        let copied_bytes = view.copied_bytes();
        assert!(
            copied_bytes >= MIB as u64 && copied_bytes < 2 * MIB as u64 + 4 * page.bytes() as u64,
            "{copied_bytes}"
        );
        // The page of this byte was not copied, except with pages of 2 MiB.
        let at = 2 * MIB + 10 * PAGE_BYTES;
        file.write_at(b"of the file", at as u64).unwrap();
        content[at..at + 11].copy_from_slice(b"of the file");
        if page.bytes() < 2 * MIB {
            own[at - begin..at - begin + 11].copy_from_slice(b"of the file");
        }
        assert_view(&view, 0, &own);
        let _ = file.split(2 * MIB as u64);
        assert_view(&view, 0, &own);
        let _ = file.collapse(2 * MIB as u64);
        assert_view(&view, 0, &own);
        file.truncate(0).unwrap();
        assert_view(&view, 3 * MIB, &own[3 * MIB..3 * MIB + 1000]);
        file.truncate(5 * MIB as u64).unwrap();
        assert_view(&view, 3 * MIB, &own[3 * MIB..3 * MIB + 1000]);
        if page.bytes() < 2 * MIB {
            assert_view(&view, 4 * MIB + MIB / 2, &[0; 1000]);
        }
        assert_view(&file.view(0..MIB as u64).unwrap(), 0, &vec![0; MIB]);
    }
}

/// Threads write to the same pages of a private view, each its own bytes. All writes must be there, and none in the
/// file.
#[test]
fn private_writes_of_several_threads_are_not_lost() {
    let cache = cache(Box::new(Always), 32 * MIB);
    let file = cache.create().unwrap();
    file.write_at(&vec![9; 4 * MIB], 0).unwrap();
    let view = file.view_private(0..4 * MIB as u64).unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = (0..8)
            .map(|id| {
                let view = &view;
                scope.spawn(move || {
                    for page in 0..4 * MIB / PAGE_BYTES {
                        view.write_at(&[id as u8; 16], page * PAGE_BYTES + id * 16);
                    }
                })
            })
            .collect();
        let (file, is_over) = (&file, &is_over);
        scope.spawn(move || {
            while !is_over.load(Relaxed) {
                let _ = file.split(0);
                let _ = file.collapse(0);
                file.write_at(&[9; 8192], MIB as u64).unwrap();
            }
        });
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        is_over.store(true, Relaxed);
        ended.into_iter().for_each(|end| end.unwrap());
    });
    let mut expected = vec![9; PAGE_BYTES];
    (0..128).for_each(|at| expected[at] = (at / 16) as u8);
    for page in 0..4 * MIB / PAGE_BYTES {
        assert_view(&view, page * PAGE_BYTES, &expected);
    }
    assert_eq!(view.copied_bytes(), 4 * MIB as u64);
    assert_file(&file, &vec![9; 4 * MIB]);
    // Adjacent copies are one mapping.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let own = format!("{:x}-{:x} rw", view.as_ptr() as usize, view.as_ptr() as usize + 4 * MIB);
    assert!(maps.contains(&own), "{own}");
}

/// A store that is read-only must refuse writable views. A private view of it must work.
#[test]
fn read_only_stores_have_private_views() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes(MIB)).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let cache = cache(Box::new(Never), 8 * MIB);
    let store = pagemill_store::FileStore::open_read_only(std::path::Path::new(&path));
    let Ok(store) = store else { return println!("skipped: {:?}", store.err()) };
    let mapping = cache.open(Arc::new(store)).unwrap();
    assert!(matches!(mapping.view_mut(0..MIB as u64), Err(Error::ReadOnly)));
    let view = mapping.view_private(0..MIB as u64).unwrap();
    view.write_at(b"own", 5000);
    let mut expected = bytes(MIB);
    expected[5000..5003].copy_from_slice(b"own");
    assert_view(&view, 0, &expected);
    assert_file(&mapping, &bytes(MIB));
}

/// A range of a writable and of a private view is prefaulted for writes. Then `read` must be able to fill it.
#[test]
fn system_calls_can_write_to_prefaulted_ranges() {
    let mut source = tempfile::tempfile().unwrap();
    source.write_all(&bytes(3 * MIB)).unwrap();
    let cache = cache(Box::new(Always), 32 * MIB);
    let file = cache.create().unwrap();
    file.truncate(4 * MIB as u64).unwrap();
    let mut fill = |view: &View, addr: *mut u8| {
        // SAFETY: the range lies in the view, and no other thread accesses it.
        let range = unsafe { std::slice::from_raw_parts_mut(addr, 3 * MIB) };
        source.rewind().unwrap();
        source.read_exact(range).unwrap();
        assert_view(view, 0, &bytes(3 * MIB));
    };
    let private = file.view_private(PAGE_BYTES as u64..4 * MIB as u64).unwrap();
    let prefaulted = private.prefault_mut(0..3 * MIB).unwrap();
    fill(&private, private.as_mut_ptr());
    drop(prefaulted);
    assert_file(&file, &vec![0; 4 * MIB]);
    // Between the copied pages, a prefault for reads must map the pages of the file.
    drop(private);
    let private = file.view_private(0..2 * MIB as u64).unwrap();
    [100, 102, 300].into_iter().for_each(|page| private.write_at(&[2], page * PAGE_BYTES));
    let prefaulted = private.prefault(0..2 * MIB).unwrap();
    // SAFETY: the range lies in the view, and no other thread writes to it.
    let range = unsafe { std::slice::from_raw_parts(private.as_ptr(), 2 * MIB) };
    tempfile::tempfile().unwrap().write_all(range).unwrap();
    drop(prefaulted);
    let view = file.view_mut(0..4 * MIB as u64).unwrap();
    let prefaulted = view.prefault_mut(0..3 * MIB).unwrap();
    fill(&view, view.as_mut_ptr());
    // Other fills of the same pages must not make them read-only.
    view.lock(0..MIB).unwrap();
    drop(view.prefault(0..MIB).unwrap());
    fill(&view, view.as_mut_ptr());
    drop(prefaulted);
    let mut expected = bytes(3 * MIB);
    expected.resize(4 * MIB, 0);
    assert_file(&file, &expected);

    let stored = cache.open(Arc::new(MemoryStore::new(vec![0; 4 * MIB], 512))).unwrap();
    let view = stored.view_mut(0..4 * MIB as u64).unwrap();
    let prefaulted = view.prefault_mut(0..3 * MIB).unwrap();
    view.lock(0..MIB).unwrap();
    fill(&view, view.as_mut_ptr());
    drop(prefaulted);
}

/// Prefaulted pages are removed from the file. Their memory must not get pages of another file until the guard is
/// dropped, because the kernel may still transfer data to it. The view must show that the pages are gone.
#[test]
fn prefaulted_memory_is_not_reused() {
    for policy in [Box::new(Always) as Box<dyn Policy>, Box::new(Never)] {
        let cache = cache(policy, 8 * MIB);
        let (file, other) = (cache.create().unwrap(), cache.create().unwrap());
        file.write_at(&bytes(4 * MIB), 0).unwrap();
        let view = file.view_mut(0..4 * MIB as u64).unwrap();
        let prefaulted = view.prefault_mut(PAGE_BYTES..4 * MIB).unwrap();
        let begins = |file: &Mapping| -> Vec<usize> {
            let pins = file.pin_range(0, file.size_bytes() as usize).unwrap();
            pins.iter().map(|pin| pin.as_ptr() as usize).collect()
        };
        let before = begins(&file);
        file.truncate(0).unwrap();
        let written = (0..8).take_while(|at| matches!(other.write_at(&bytes(MIB), at * MIB as u64), Ok(MIB))).count();
        assert!((1..5).contains(&written), "{written} MiB were free");
        other.truncate((written * MIB) as u64).unwrap();
        assert!(begins(&other).iter().all(|addr| !before[1..].contains(addr)), "memory was reused");
        file.truncate(4 * MIB as u64).unwrap();
        assert_file(&file, &vec![0; 4 * MIB]);
        drop(prefaulted);
        other.write_at(&bytes(6 * MIB), 0).unwrap();
        assert_view(&view, 0, &[0; MIB]);
    }
}

/// Bytes of a view are borrowed as a slice. All calls that change the file must fail until the guards are dropped;
/// reads and pins must work, and no memory of the range may be evicted.
#[test]
fn borrowed_bytes_do_not_change() {
    let cache = cache(Box::new(Never), 4 * MIB);
    let store = Arc::new(MemoryStore::new(bytes(16 * MIB), 512));
    let file = cache.open(store).unwrap();
    let view = file.view(PAGE_BYTES as u64..16 * MIB as u64).unwrap();
    let expected = bytes(2 * MIB);
    let borrowed = view.bytes(0..MIB).unwrap();
    let (other, pin) = (view.bytes(500..600).unwrap(), file.pin(PAGE_BYTES as u64).unwrap());
    let mut buffer = vec![0; 16 * MIB];
    file.read_at(&mut buffer, 0).unwrap();
    assert_same(&borrowed, &expected[PAGE_BYTES..PAGE_BYTES + MIB]);
    assert_eq!(&*other, &expected[PAGE_BYTES + 500..PAGE_BYTES + 600]);
    let is_busy = |result: Result<(), Error>| matches!(result, Err(Error::Busy { .. }));
    assert!(is_busy(file.write_at(&[1], 8 * MIB as u64).map(drop)) && is_busy(pin.write_at(&[1], 0)));
    assert!(is_busy(file.truncate(0)) && is_busy(file.truncate(20 * MIB as u64)) && is_busy(file.refresh()));
    assert!(is_busy(file.zero_range(0, 100)) && is_busy(file.hold(9 * MIB as u64).map(drop)));
    assert!(is_busy(file.view_mut(0..MIB as u64).map(drop)));
    drop((borrowed, pin));
    assert!(is_busy(file.write_at(&[1], 0).map(drop)), "one guard is left");
    drop(other);
    file.write_at(&[1], 0).unwrap();
    let writable = file.view_mut(0..MIB as u64).unwrap();
    assert!(is_busy(view.bytes(0..100).map(drop)));
    drop(writable);
    assert!(matches!(view.bytes(16 * MIB - PAGE_BYTES..16 * MIB), Err(Error::PastEnd { .. })));
    file.truncate(10 * MIB as u64).unwrap();
    assert!(matches!(view.bytes(10 * MIB - 5000..10 * MIB), Err(Error::PastEnd { .. })));

    let mut private = file.view_private(0..MIB as u64).unwrap();
    assert!(matches!(private.bytes(0..10), Err(Error::Unsupported { .. })));
    let own = private.bytes_mut(4000..4200).unwrap();
    assert_eq!(own, &expected[4000..4200]);
    own.fill(3);
    assert_eq!(private.copied_bytes(), 2 * PAGE_BYTES as u64);
    assert_view(&private, 3999, &[&expected[3999..4000], &[3; 200], &expected[4200..4210]].concat());
}

/// Half of a small cache is locked. The locked pages must stay in memory while other pages are read, and must be
/// written back while they are locked. After `unlock` they must be evictable.
#[test]
fn locked_ranges_stay_in_memory() {
    let (len, limit) = (16 * MIB, 4 * MIB);
    let cache = cache(Box::new(Never), limit);
    let store = FaultyStore::new(MemoryStore::new(bytes(len), 512));
    let file = cache.open(Arc::new(store.clone())).unwrap();
    let view = file.view_mut(0..len as u64).unwrap();
    let read_all = || {
        let mut buffer = vec![0; 64 << 10];
        (2 * MIB..len).step_by(buffer.len()).for_each(|at| assert!(file.read_at(&mut buffer, at as u64).unwrap() > 0));
    };
    // Counts the first pages that are in memory: their pins succeed although the store fails.
    let pages = || {
        store.set_faults(Faults { fail_per_mille: 1000, ..Faults::default() });
        let count = (0..MIB).step_by(PAGE_BYTES).filter(|at| file.pin(*at as u64).is_ok()).count();
        store.set_faults(Faults::default());
        count
    };
    view.lock(0..MIB).unwrap();
    view.lock(0..MIB).unwrap();
    assert_eq!(cache.usage().locked_ranges, 2 * MIB as u64);
    read_all();
    assert_eq!(pages(), MIB / PAGE_BYTES);
    view.write_at(b"written", 100);
    file.sync().unwrap();
    assert_eq!(file.dirty_bytes(), 0);
    assert!(file.dont_need(0, len as u64).unwrap() > 0);
    read_all();
    assert_eq!(pages(), MIB / PAGE_BYTES);
    assert!(matches!(view.unlock(0..2 * MIB), Err(Error::WrongState { .. })));
    view.unlock(0..MIB).unwrap();
    read_all();
    assert_eq!(pages(), MIB / PAGE_BYTES, "one lock is left");
    view.unlock(0..MIB).unwrap();
    assert!(matches!(view.unlock(0..MIB), Err(Error::WrongState { .. })));
    assert_eq!(cache.usage().locked_ranges, 0);
    file.dont_need(0, MIB as u64).unwrap();
    assert_eq!(pages(), 0);
    let more = view.lock(0..8 * MIB);
    assert!(matches!(more, Err(Error::NoMemory { .. })), "more than the cache: {more:?}");
    assert_eq!(cache.usage().locked_ranges, 0);
    view.lock(0..MIB).unwrap();
    drop(view);
    assert_eq!(cache.usage().locked_ranges, 0);
}

/// More of a cache than may be dirty is prefaulted for writes, so it cannot be written back. Writes to other pages must
/// succeed nevertheless, by calls and by the view, and must themselves be written back. No background thread runs.
#[test]
fn writes_do_not_wait_for_prefaulted_pages() {
    for (policy, page, folio) in [
        (Box::new(Always) as Box<dyn Policy>, 4 << 10, 2 * MIB),
        (Box::new(Never), 4 << 10, 4 << 10),
        (Box::new(Never), 64 << 10, 64 << 10),
    ] {
        let (len, kept) = (8 * MIB, 2 * MIB);
        let caches = Testbed::for_test().caches;
        caches.collapse_by_hand();
        let builder = PageCache::builder("kept").limit(4 * MIB as u64).policy(policy).page(page_size(page));
        let cache = builder.source(Source::Shared).build_in(caches).unwrap();
        let store = Arc::new(MemoryStore::new(vec![0; len], 512));
        let file = cache.open(store.clone()).unwrap();
        let view = file.view_mut(0..len as u64).unwrap();
        let prefaulted = view.prefault_mut(0..kept).unwrap();
        let mut expected = vec![0; len];
        let mut write = |at: usize, count: usize, write: &dyn Fn(&[u8])| {
            expected[at..at + count].fill(5);
            write(&expected[at..at + count]);
        };
        write(3 * MIB, 5000, &|bytes| assert_eq!(file.write_at(bytes, 3 * MIB as u64).unwrap(), bytes.len()));
        write(100, 5000, &|bytes| view.write_at(bytes, 100));
        (4 * MIB..len).step_by(MIB / 4).for_each(|at| write(at, 9, &|bytes| view.write_at(bytes, at)));
        assert!(file.dirty_bytes() <= (kept + folio) as u64, "{} bytes are dirty", file.dirty_bytes());
        write(6 * MIB, MIB, &|bytes| assert_eq!(file.write_at(bytes, 6 * MIB as u64).unwrap(), bytes.len()));
        assert!(view.take_error().is_none());
        drop(prefaulted);
        file.sync().unwrap();
        assert_same(&store.bytes(), &expected);
    }
}

/// A locked range of zeros must not be freed as a sparse huge folio.
#[test]
fn locked_zeros_stay_in_memory() {
    let cache = cache(Box::new(Always), 32 * MIB);
    let file = cache.create().unwrap();
    file.truncate(4 * MIB as u64).unwrap();
    let view = file.view_mut(0..4 * MIB as u64).unwrap();
    view.lock(0..4 * MIB).unwrap();
    assert_eq!(file.split_sparse().unwrap(), 0);
    assert_eq!(cache.usage().charged, 4 * MIB as u64);
    view.unlock(0..4 * MIB).unwrap();
    assert!(file.split_sparse().unwrap() > 3 * MIB as u64);
}

/// A write behind the end of the file, or to a page that the store cannot read, must raise `SIGBUS` in each kind of
/// view.
#[test]
fn wrong_writes_raise_sigbus() {
    const ACCESS_ENV: &str = "VIEWS_ACCESS";
    if let Ok(access) = std::env::var(ACCESS_ENV) {
        let cache = cache(Box::new(Never), 8 * MIB);
        let file = cache.create().unwrap();
        file.write_at(&[1; 5000], 0).unwrap();
        match access.as_str() {
            "shared" => file.view_mut(0..MIB as u64).unwrap().write_at(&[1], 8192),
            "private" => file.view_private(0..MIB as u64).unwrap().write_at(&[1], 8192),
            _ => unreachable!(),
        }
        return;
    }
    for access in ["shared", "private"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["wrong_writes_raise_sigbus", "--exact"]).env(ACCESS_ENV, access);
        let output = child.output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{access}: {:?}", output.status);
    }
}
