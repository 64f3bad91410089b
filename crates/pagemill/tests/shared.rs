//! Tests of page caches in shared memory: the figures of the kernel, huge pages, and refusals of the kernel. The test
//! program `on_shared_memory` has the tests that all kinds of memory share.
#![allow(unsafe_code)] // calls on descriptors

mod common;

use common::{assert_in_child, exclusive_test, pagemill};
use pagemill_cache::mapping::policy::Always;
use pagemill_cache::mapping::{Mapping, PageCache, Source};
use pagemill_core::Error;
use pagemill_core::arena::{Context, Layout};
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Reason, Urgency};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::mem;
use pagemill_testbed::Testbed;
use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;

const MIB: usize = 1 << 20;

fn make_cache(pagemill: &'static Testbed, blocks: usize, use_huge: bool) -> PageCache {
    pagemill.caches.collapse_by_hand();
    let settings = PageCache::builder("shared").limit((blocks * BLOCK_BYTES) as u64).huge(use_huge).policy(Always);
    settings.source(Source::Shared).build_in(pagemill.caches).unwrap()
}

fn new_pagemill() -> &'static Testbed {
    Testbed::new(Layout::for_test(), UNLIMITED).unwrap()
}

/// Returns the value in bytes of a row in `/proc/self/status`.
fn status_bytes(name: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let row = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    row.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Returns the sum of a row of `/proc/self/smaps` over the mappings in a range, in bytes.
fn mapped_bytes(range: &Range<usize>, name: &str) -> usize {
    let (text, mut is_inside, mut kib) = (fs::read_to_string("/proc/self/smaps").unwrap(), false, 0);
    for line in text.lines() {
        let first = line.split(' ').next().unwrap();
        if let Some((from, to)) = first.split_once('-') {
            let bound = |text| usize::from_str_radix(text, 16).unwrap();
            is_inside = bound(from) < range.end && bound(to) > range.start;
        } else if is_inside && first == name {
            kib += line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap();
        }
    }
    kib << 10
}

/// Returns the numbers of the open descriptors.
fn descriptors() -> BTreeSet<i32> {
    let entries = fs::read_dir("/proc/self/fd").unwrap();
    let numbers = entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap());
    // Without the descriptor of the directory, which is closed already.
    numbers.collect::<Vec<i32>>().into_iter().filter(|fd| is_open(*fd)).collect()
}

fn is_open(descriptor: i32) -> bool {
    // SAFETY: the call accesses no memory.
    unsafe { libc::fcntl(descriptor, libc::F_GETFD) >= 0 }
}

/// Creates a cache, and returns the descriptor of its memory file, too.
fn cache_with_descriptor(pagemill: &'static Testbed, blocks: usize) -> (PageCache, i32) {
    let before = descriptors();
    let cache = make_cache(pagemill, blocks, true);
    // The first use of the instance may open other descriptors.
    let is_memory_file = |fd: &i32| {
        let link = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap().to_string_lossy().into_owned();
        link.starts_with("/memfd:pagemill") || link.starts_with("/#")
    };
    let new: Vec<i32> = descriptors().difference(&before).copied().filter(is_memory_file).collect();
    assert_eq!(new.len(), 1, "one descriptor per cache");
    (cache, new[0])
}

fn give_back(pagemill: &Testbed) -> usize {
    pagemill.account.give_back(u64::MAX, Context::Outside, Urgency::Request, Reason::Program) as usize
}

#[track_caller]
fn assert_all(file: &Mapping, range: Range<usize>, byte: u8) {
    let mut bytes = vec![0xEE; range.len()];
    assert_eq!(file.read_at(&mut bytes, range.start as u64).unwrap(), range.len());
    assert!(bytes.iter().all(|found| *found == byte));
}

/// A cache is filled, emptied and filled again. The kernel's figures of shared memory must grow and shrink by the bytes
/// that are charged, and those of private memory must not. Returned memory must read zero when it is used again.
#[test]
fn the_kernel_counts_what_is_charged() {
    let _exclusive = exclusive_test();
    const LEN: usize = 32 * MIB;
    for use_huge in [true, false] {
        let pagemill = new_pagemill();
        let cache = make_cache(pagemill, 32, use_huge);
        let pool = pagemill.arena.pool.base()..pagemill.arena.pool.base() + pagemill.arena.pool.len_bytes();
        assert_eq!(mapped_bytes(&pool, "Rss:"), 0);
        let (shared, private) = (status_bytes("RssShmem"), status_bytes("RssAnon"));
        let huge_before = stats::get(Counter::BlocksHuge);
        for byte in 1..3 {
            let file = cache.create().unwrap();
            file.write_at(&[byte], BLOCK_BYTES as u64 - 1).unwrap();
            assert_all(&file, 0..BLOCK_BYTES - 1, 0);
            let whole = vec![byte; BLOCK_BYTES];
            (0..LEN).step_by(BLOCK_BYTES).for_each(|at| _ = file.write_at(&whole, at as u64).unwrap());
            assert_all(&file, 0..LEN, byte);
            assert_eq!((pagemill.account.resident() as usize, mapped_bytes(&pool, "Rss:")), (LEN, LEN));
            assert!(status_bytes("RssShmem") >= shared + LEN);
            assert!(status_bytes("RssAnon") < private + LEN / 2, "index nodes and frames are private");
            let huge = mapped_bytes(&pool, "ShmemPmdMapped:");
            let expected = (stats::get(Counter::BlocksHuge) - huge_before) as usize * BLOCK_BYTES;
            if use_huge && byte == 1 {
                assert_eq!(huge, expected, "pages that count as huge are huge");
                println!("{:?}: {} of {} MiB in huge pages", cache.usage().shared, huge / MIB, LEN / MIB);
            }
            file.truncate(0).unwrap();
            assert_eq!(give_back(pagemill), LEN);
            assert_eq!((pagemill.account.resident(), mapped_bytes(&pool, "Rss:")), (0, 0));
            assert!(status_bytes("RssShmem") < shared + LEN / 2);
            let free = mem::resident_bytes(pool.start, 2 * LEN).unwrap_or(0);
            assert_eq!(free, 0, "the file has no pages");
        }
        assert!(cache.usage().shared.is_some() && !cache.usage().is_hugetlb);
    }
}

/// A second cache must use the pool of a cache that has ended, and so its file. A cache in ordinary memory must not.
#[test]
fn a_later_cache_uses_the_same_file() {
    let _exclusive = exclusive_test();
    let pagemill = new_pagemill();
    let (cache, _) = cache_with_descriptor(pagemill, 4);
    let number = cache.usage().number;
    drop(cache);
    let ordinary = PageCache::builder("ordinary").limit(4 * BLOCK_BYTES as u64).build_in(pagemill.caches).unwrap();
    assert_eq!((ordinary.usage().number == number, ordinary.usage().shared), (false, None));
    let before = descriptors();
    assert_eq!((make_cache(pagemill, 4, true).usage().number, descriptors()), (number, before));
}

/// A fork child must have neither the memory nor the file of the cache. Calls on the cache must fail in the child and
/// continue to work in the parent. The child must be able to create a cache of its own.
#[test]
fn children_have_no_shared_memory() {
    let _exclusive = exclusive_test();
    let (cache, descriptor) = cache_with_descriptor(pagemill(), 2);
    let file = cache.create().unwrap();
    file.write_at(&[1; BLOCK_BYTES], 0).unwrap();
    let addr = file.pin(0).unwrap().as_ptr() as usize;
    mem::is_mapped(addr, BLOCK_BYTES).unwrap();
    assert_in_child(|| {
        let is_gone = mem::is_mapped(addr, BLOCK_BYTES).is_err() && !is_open(descriptor);
        let is_refused = file.read_at(&mut [0], 0).is_err() && file.write_at(b"child", 0).is_err();
        let own = make_cache(pagemill(), 2, true);
        is_gone && is_refused && own.create().is_ok_and(|file| file.write_at(b"child", 0).is_ok())
    });
    assert!(is_open(descriptor));
    assert_all(&file, 0..BLOCK_BYTES, 1);
    file.write_at(b"more", 0).unwrap();
}

/// The kernel refuses memory: the file is cut off. The write must fail with `NoMemory` instead of a signal, and nothing
/// may stay charged for it.
#[test]
fn refused_memory_is_an_error() {
    let _exclusive = exclusive_test();
    let pagemill = new_pagemill();
    let (cache, descriptor) = cache_with_descriptor(pagemill, 8);
    // SAFETY: the call only cuts the file off, where it has no pages.
    assert_eq!(unsafe { libc::ftruncate(descriptor, 2 * BLOCK_BYTES as i64) }, 0);
    let file = cache.create().unwrap();
    assert_eq!(file.write_at(&vec![1; 4 * BLOCK_BYTES], 0).unwrap(), 2 * BLOCK_BYTES);
    let refused = file.write_at(&[1; BLOCK_BYTES], 2 * BLOCK_BYTES as u64);
    assert!(matches!(refused, Err(Error::NoMemory { .. })), "{refused:?}");
    assert_eq!(pagemill.account.resident() as usize, 2 * BLOCK_BYTES);
    // SAFETY: the call only makes the file longer.
    assert_eq!(unsafe { libc::ftruncate(descriptor, 64 * BLOCK_BYTES as i64) }, 0);
    assert_eq!(file.write_at(&[1; BLOCK_BYTES], 2 * BLOCK_BYTES as u64).unwrap(), BLOCK_BYTES);
    assert_all(&file, 0..3 * BLOCK_BYTES, 1);
}

/// The program closes all descriptors, and opens a file that gets the number of the cache's file. Memory must be
/// returned all the same, and the other file must keep its bytes.
#[test]
fn memory_is_returned_without_a_descriptor() {
    let _exclusive = exclusive_test();
    let pagemill = new_pagemill();
    let (cache, descriptor) = cache_with_descriptor(pagemill, 4);
    let file = cache.create().unwrap();
    file.write_at(&vec![1; 4 * BLOCK_BYTES], 0).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other");
    fs::write(&path, vec![7; BLOCK_BYTES]).unwrap();
    let other = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // SAFETY: the call replaces the descriptor of the cache.
    assert_eq!(unsafe { libc::dup2(std::os::fd::AsRawFd::as_raw_fd(&other), descriptor) }, descriptor);
    file.truncate(0).unwrap();
    assert_eq!((give_back(pagemill), pagemill.account.resident()), (4 * BLOCK_BYTES, 0));
    file.write_at(&[2; BLOCK_BYTES], 0).unwrap();
    assert_all(&file, 0..BLOCK_BYTES, 2);
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 7));
}
