//! Tests of page caches in reserved huge pages (hugetlb). A cache must take its pages when it is created, and return
//! all of them when it ends. The tests are skipped where no pages can be reserved.

mod common;

use common::{assert_in_child, exclusive_test, pagemill};
use pagemill_cache::mapping::policy::{Always, Ask, Choice};
use pagemill_cache::mapping::{Builder, Fetch, Mapping, PageCache, Policy, Queue, Source};
use pagemill_core::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_store::{FileStore, MemoryStore};
use pagemill_sys::mem;
use std::fs;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const PAGE_BYTES: usize = 4 << 10;
const RESERVED_FOLDER: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

fn read_number(name: &str) -> Result<u64, String> {
    let path = format!("{RESERVED_FOLDER}/{name}");
    let text = fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    text.trim().parse().map_err(|_| format!("{path} says {text:?}"))
}

/// Returns the number of reserved huge pages that no mapping uses and that are not reserved for a mapping.
fn free_pages() -> u64 {
    // The two files are not read at the same instant. While a mapping ends, the second number may be larger than the
    // first.
    read_number("free_hugepages").unwrap().saturating_sub(read_number("resv_hugepages").unwrap())
}

/// Waits until `pages` reserved huge pages are free. The kernel releases the registered memory of a ring some time
/// after the ring is closed.
fn assert_becomes_free(pages: u64) {
    let begun = Instant::now();
    while free_pages() != pages && begun.elapsed() < Duration::from_secs(600) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(free_pages(), pages);
}

/// Returns the number of reserved huge pages before these tests. The number is read once, before the first test adds
/// pages.
fn initially_reserved() -> Result<u64, String> {
    static FIRST_READING: OnceLock<Result<u64, String>> = OnceLock::new();
    FIRST_READING.get_or_init(|| read_number("nr_hugepages")).clone()
}

/// Reserves additional huge pages. The field is the number of reserved huge pages before, which is restored on drop.
struct AdditionalPages(u64);

impl AdditionalPages {
    fn reserve(pages: u64) -> Result<Self, String> {
        // Without background threads, no cache exists longer than the test that created it.
        pagemill().caches.collapse_by_hand();
        let path = format!("{RESERVED_FOLDER}/nr_hugepages");
        let more = Self(initially_reserved()?);
        let wanted = more.0 + pages;
        fs::write(&path, wanted.to_string()).map_err(|error| format!("{path}: {error}"))?;
        match read_number("nr_hugepages")? {
            now if now < wanted => Err(format!("{now} pages are to be had where {wanted} are wanted")),
            _ => Ok(more),
        }
    }
}

impl Drop for AdditionalPages {
    fn drop(&mut self) {
        let _ = fs::write(format!("{RESERVED_FOLDER}/nr_hugepages"), self.0.to_string());
    }
}

/// Returns settings of a cache with a limit of `blocks` blocks. The cache itself has one block more.
fn settings(blocks: usize, source: Source) -> Builder {
    let page = PageSize::new(PAGE_BYTES).unwrap();
    PageCache::builder("reserved").limit((blocks * BLOCK_BYTES) as u64).page(page).policy(Always).source(source)
}

fn make_cache(blocks: usize) -> PageCache {
    settings(blocks, Source::Hugetlb).build_in(pagemill().caches).unwrap()
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| ((at / 509 + seed) % 251) as u8).collect()
}

#[track_caller]
fn assert_contents(file: &Mapping, bytes: &[u8]) {
    let mut read = vec![0xEE; bytes.len()];
    assert_eq!(file.read_at(&mut read, 0).unwrap(), bytes.len());
    assert!(read == bytes);
}

/// Returns the bytes of reserved huge pages that this process uses, as the kernel reports them.
fn own_reserved_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("HugetlbPages:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Two caches are created, one after the other. Each must have its reserved pages from its creation to its end, without
/// a charge. Huge and small folios must be able to use the whole limit, and no page may be returned before the end. The
/// second cache must not expose contents of the first one.
#[test]
fn caches_take_reserved_pages_and_return_them() {
    let _exclusive = exclusive_test();
    let _more = match AdditionalPages::reserve(4) {
        Ok(more) => more,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let before = free_pages();
    for seed in 0..2 {
        let charged = || [Counter::Cache, Counter::CacheHuge, Counter::CacheSmall, Counter::CacheFree].map(stats::get);
        let (charged_before, own) = (charged(), own_reserved_bytes());
        let cache = make_cache(3);
        assert_eq!((free_pages(), own_reserved_bytes()), (before - 4, own));
        assert_eq!(stats::get(Counter::CacheHugetlb), 4 * BLOCK_BYTES as u64);
        let (file, bytes) = (cache.create().unwrap(), pattern(3 * BLOCK_BYTES, seed));
        file.truncate(bytes.len() as u64).unwrap();
        assert_contents(&file, &vec![0; bytes.len()]);
        file.write_at(&bytes, 0).unwrap();
        assert_contents(&file, &bytes);
        assert!(own_reserved_bytes() >= own + 3 * BLOCK_BYTES as u64);
        let usage = cache.usage();
        assert_eq!((usage.is_hugetlb, usage.huge, usage.charged), (true, bytes.len() as u64, bytes.len() as u64));
        assert!(matches!(file.write_at(b"x", bytes.len() as u64), Err(Error::NoMemory { .. })));
        // Frees one huge folio, and allocates small folios in its place.
        file.truncate(2 * BLOCK_BYTES as u64).unwrap();
        cache.set_huge(false);
        let little = cache.create().unwrap();
        little.write_at(&bytes[..BLOCK_BYTES], 0).unwrap();
        assert_contents(&little, &bytes[..BLOCK_BYTES]);
        assert_eq!(cache.usage().small, BLOCK_BYTES as u64);
        drop(little);
        assert_eq!(cache.shrink(), 0);
        assert_contents(&file, &bytes[..2 * BLOCK_BYTES]);
        assert_eq!((free_pages(), charged()), (before - 4, charged_before));
        drop(cache);
        assert_eq!(free_pages(), before - 4, "a file still uses the cache");
        drop(file);
        assert_eq!((free_pages(), own_reserved_bytes(), stats::get(Counter::CacheHugetlb)), (before, own, 0));
    }
}

/// A huge folio in a reserved huge page must not be split. If a file ends inside of the folio, the file must keep all
/// of the folio's memory.
#[test]
fn reserved_pages_are_not_split() {
    let _exclusive = exclusive_test();
    let _more = match AdditionalPages::reserve(3) {
        Ok(more) => more,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let cache = make_cache(2);
    let (file, bytes) = (cache.create().unwrap(), pattern(2 * BLOCK_BYTES, 0));
    file.write_at(&bytes, 0).unwrap();
    file.truncate((BLOCK_BYTES + PAGE_BYTES) as u64).unwrap();
    assert_eq!((cache.usage().huge, file.split_sparse().unwrap()), (bytes.len() as u64, 0));
    assert_contents(&file, &bytes[..BLOCK_BYTES + PAGE_BYTES]);
    file.truncate(bytes.len() as u64).unwrap();
    let mut end = vec![0xEE; BLOCK_BYTES - PAGE_BYTES];
    file.read_at(&mut end, (BLOCK_BYTES + PAGE_BYTES) as u64).unwrap();
    assert!(end.iter().all(|byte| *byte == 0));
}

/// Fewer reserved huge pages are free than a cache needs. Its creation must fail with the reason, or use ordinary
/// memory, as the settings say. No page may leak.
#[test]
fn too_few_reserved_pages_are_reported() {
    let _exclusive = exclusive_test();
    let _more = match AdditionalPages::reserve(2) {
        Ok(more) => more,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let (before, refused) = (free_pages(), stats::get(Counter::HugetlbRefused));
    let blocks = before as usize;
    let error = settings(blocks, Source::Hugetlb).build_in(pagemill().caches).unwrap_err();
    let wanted = (blocks + 1) * BLOCK_BYTES;
    assert!(matches!(error, Error::NoHugetlb { wanted_bytes } if wanted_bytes == wanted as u64), "{error}");
    assert_eq!(error.errno(), libc::ENOMEM);
    assert!(error.to_string().contains("/proc/sys/vm/nr_hugepages"), "{error}");
    assert_eq!((free_pages(), stats::get(Counter::HugetlbRefused)), (before, refused));

    let cache = settings(blocks, Source::TryHugetlb).build_in(pagemill().caches).unwrap();
    assert!(!cache.usage().is_hugetlb);
    assert_eq!((free_pages(), stats::get(Counter::HugetlbRefused)), (before, refused + 1));
    let (file, bytes) = (cache.create().unwrap(), pattern(BLOCK_BYTES, 1));
    file.write_at(&bytes, 0).unwrap();
    assert_contents(&file, &bytes);

    let cache = settings(blocks - 1, Source::TryHugetlb).build_in(pagemill().caches).unwrap();
    assert_eq!((cache.usage().is_hugetlb, free_pages()), (true, 0));
    drop(cache);
    assert_eq!(free_pages(), before);

    let endless = settings(1, Source::Hugetlb).limit(u64::MAX);
    assert!(matches!(endless.build_in(pagemill().caches), Err(Error::NoAddresses { .. })));
}

/// A fork child does not map its parent's reserved huge pages, so it must need no additional ones. Calls on the cache
/// must fail in the child and continue to work in the parent.
#[test]
fn children_have_no_reserved_pages() {
    let _exclusive = exclusive_test();
    let _more = match AdditionalPages::reserve(2) {
        Ok(more) => more,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let cache = make_cache(1);
    let (file, bytes) = (cache.create().unwrap(), pattern(BLOCK_BYTES, 2));
    file.write_at(&bytes, 0).unwrap();
    let addr = file.pin(0).unwrap().as_ptr() as usize;
    mem::is_mapped(addr, BLOCK_BYTES).unwrap();
    assert_in_child(|| {
        let mut byte = [0];
        mem::is_mapped(addr, BLOCK_BYTES).is_err() && file.read_at(&mut byte, 0).is_err()
    });
    assert_contents(&file, &bytes);
    file.write_at(b"more", 0).unwrap();
}

/// Reads until the queue has registered memory. Returns false if the kernel does not register memory here.
fn register_memory(queue: &mut Queue, file: &Mapping, len: usize) -> bool {
    for _ in 0..4 {
        for offset in (0..len).step_by(BLOCK_BYTES) {
            if queue.fetch(file, offset as u64, offset as u64).unwrap() == Fetch::Started {
                queue.wait(1, Duration::from_secs(600)).unwrap();
                queue.next().unwrap().result.unwrap();
            }
        }
        if queue.registered_bytes() > 0 {
            return true;
        }
    }
    assert!(
        stats::get(Counter::RegionsRefused) + stats::get(Counter::RingsRefused) > 0,
        "no registration was attempted"
    );
    false
}

/// A ring has registered reserved huge pages. Reclaim must not request them, and a fork child must not map them. The
/// pages must be returned when their last user, the queue, is dropped.
#[test]
fn registered_reserved_pages_are_returned() {
    let _exclusive = exclusive_test();
    let _more = match AdditionalPages::reserve(4) {
        Ok(more) => more,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let (before, folder) = (free_pages(), tempfile::tempdir().unwrap());
    let (path, bytes) = (folder.path().join("file"), pattern(8 * BLOCK_BYTES, 3));
    fs::write(&path, &bytes).unwrap();
    let cache = make_cache(3);
    let file = cache.open(Arc::new(FileStore::open_read_only(&path).unwrap())).unwrap();
    let mut queue = cache.queue(2).unwrap();
    let is_registered = register_memory(&mut queue, &file, bytes.len());
    let (had, _) = (queue.registered_bytes(), cache.shrink());
    queue.wait(0, Duration::ZERO).unwrap();
    assert_eq!(queue.registered_bytes(), had);
    drop(queue);
    assert_contents(&file, &bytes);
    let addr = file.pin(0).unwrap().as_ptr() as usize;
    assert_in_child(|| mem::is_mapped(addr, BLOCK_BYTES).is_err());
    let mut queue = cache.queue(2).unwrap();
    register_memory(&mut queue, &file, bytes.len());
    drop((file, cache));
    assert_eq!(free_pages(), before - 4, "the queue still has the pages registered");
    drop(queue);
    assert_becomes_free(before);
    if !is_registered {
        println!("in part: memory cannot be registered here");
    }
}

/// A policy that chooses huge folios for every second range of a file.
struct EveryOtherHuge;

impl Policy for EveryOtherHuge {
    fn choose(&self, ask: &Ask) -> Choice {
        if (ask.offset / BLOCK_BYTES as u64).is_multiple_of(2) { Choice::Huge } else { Choice::Small }
    }
}

/// Two threads write and read files twice as long as the cache, in huge and in small folios. The cache has one block
/// more than its limit. Both threads must find room and read the bytes that they wrote.
#[test]
fn threads_find_room_in_reserved_pages() {
    let _exclusive = exclusive_test();
    let _more = match AdditionalPages::reserve(5) {
        Ok(more) => more,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let before = free_pages();
    let settings = settings(4, Source::Hugetlb).policy(EveryOtherHuge);
    let cache = settings.build_in(pagemill().caches).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let cache = &cache;
            scope.spawn(move || {
                let bytes = pattern(8 * BLOCK_BYTES, seed);
                let file = cache.open(Arc::new(MemoryStore::new(vec![0; bytes.len()], PAGE_BYTES))).unwrap();
                for (at, part) in bytes.chunks(16 * PAGE_BYTES).enumerate() {
                    file.write_at(part, (at * 16 * PAGE_BYTES) as u64).unwrap();
                }
                for step in [BLOCK_BYTES, 16 * PAGE_BYTES, 3 * PAGE_BYTES] {
                    let mut read = vec![0; step];
                    for (at, part) in bytes.chunks(step).enumerate() {
                        assert_eq!(file.read_at(&mut read[..part.len()], (at * step) as u64).unwrap(), part.len());
                        assert!(read[..part.len()] == *part, "{at} by {step}");
                    }
                }
                file.sync().unwrap();
            });
        }
    });
    assert!(cache.charged_bytes() <= 4 * BLOCK_BYTES as u64);
    drop(cache);
    assert_becomes_free(before);
}
