//! Tests of views at the limits of mappings: that of the system for a process, and that of Pagemill for all views.
//!
//! Each test runs in a child process of its own, because the limits concern all views of a process.
#![allow(unsafe_code)] // uses up the mappings of the process

#[path = "common/stores.rs"]
mod stores;

use pagemill_cache::mapping::policy::Never;
use pagemill_cache::mapping::{PageCache, Source, View};
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{PageSize, os_page_bytes};
use pagemill_store::MemoryStore;
use pagemill_testbed::Testbed;
use std::io;
use std::ops::Range;
use std::process::Command;
use std::sync::Arc;
use stores::HookedStore;

const PAGE_BYTES: usize = 4 << 10;
const MIB: usize = 1 << 20;

/// Distance of pages of which none is mapped together with another.
const GROUP_BYTES: usize = 64 << 10;

/// The name of the test that a child process runs.
const TEST_ENV: &str = "VIEW_LIMITS_TEST";

/// Larger limits would need too much memory.
const MAX_MAPPINGS: usize = 100_000;

/// Runs a test again in a child process. Returns true in that process.
fn is_child(test: &str) -> bool {
    if std::env::var(TEST_ENV).is_ok() {
        return true;
    }
    if max_mappings() > MAX_MAPPINGS {
        println!("skipped: {} mappings are allowed", max_mappings());
        return false;
    }
    let output = Command::new(std::env::current_exe().unwrap()).args([test, "--exact"]).env(TEST_ENV, "1").output();
    let output = output.unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{}\n{stdout}\n{stderr}", output.status);
    false
}

fn max_mappings() -> usize {
    std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap()
}

fn cache(limit_bytes: usize) -> PageCache {
    let builder = PageCache::builder("limits").limit(limit_bytes as u64).policy(Never).source(Source::Shared);
    builder.page(PageSize::new(PAGE_BYTES).unwrap()).build_in(Testbed::for_test().caches).unwrap()
}

fn byte_at(at: usize) -> u8 {
    (at / PAGE_BYTES * 31 + at) as u8
}

fn read_byte(view: &View, at: usize) -> u8 {
    let mut byte = [0];
    view.read_at(&mut byte, at);
    byte[0]
}

/// Makes as many mappings of reserved addresses as the system allows.
fn use_up_mappings() {
    let len_bytes = 2 * MAX_MAPPINGS * os_page_bytes();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: reserves unused addresses.
    let addr = unsafe { libc::mmap(std::ptr::null_mut(), len_bytes, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(addr, libc::MAP_FAILED);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the page lies in the reservation made above.
    let open = |at: usize| unsafe { libc::mprotect(addr.byte_add(at), os_page_bytes(), access) };
    let is_used_up = (0..len_bytes).step_by(2 * os_page_bytes()).any(|at| open(at) != 0);
    assert!(is_used_up, "the system allows more mappings");
}

/// A process has as many mappings as the system allows. A write to a clean page in the middle of a mapping of 16 pages
/// must unmap other pages and then succeed: the mapping that it cannot split is still valid.
#[test]
fn a_clean_page_is_written_at_the_limit_of_the_system() {
    if !is_child("a_clean_page_is_written_at_the_limit_of_the_system") {
        return;
    }
    let (cache, len) = (cache(16 * MIB), 4 * MIB);
    let file = cache.open(Arc::new(MemoryStore::new((0..len).map(byte_at).collect(), 512))).unwrap();
    let view = file.view_mut(0..len as u64).unwrap();
    // Groups that lie beside each other in the file do not so in the pool, so that their mappings do not merge.
    for group in (0..len / GROUP_BYTES).map(|at| at * 37 % (len / GROUP_BYTES)) {
        file.read_at(&mut [0; GROUP_BYTES], (group * GROUP_BYTES) as u64).unwrap();
    }
    (0..len).step_by(GROUP_BYTES).for_each(|at| assert_eq!(read_byte(&view, at), byte_at(at)));
    // Maps a stack for later fills.
    view.write_at(&[1], len - PAGE_BYTES);
    use_up_mappings();
    view.write_at(&[7], 5 * PAGE_BYTES + 1);
    assert_eq!((read_byte(&view, 5 * PAGE_BYTES + 1), view.take_error().map(|error| error.errno())), (7, None));
    for at in (3..len - PAGE_BYTES).step_by(PAGE_BYTES) {
        assert_eq!(read_byte(&view, at), byte_at(at), "byte {at}");
    }
    assert_eq!(read_byte(&view, len - PAGE_BYTES), 1);
}

/// Views have as many mappings as they may have. A write to a private view would first copy the pages up to the nearest
/// copy, of which the store cannot read one. The write must nevertheless succeed.
#[test]
fn a_private_write_does_not_fail_for_another_page() {
    if !is_child("a_private_write_does_not_fail_for_another_page") {
        return;
    }
    let (cache, len) = (cache(256 * MIB), MIB);
    let store = MemoryStore::new((0..len).map(byte_at).collect(), 512);
    let before_read = |read: Range<u64>| {
        let is_bad = read.start < 4 * PAGE_BYTES as u64 && read.end > 3 * PAGE_BYTES as u64;
        if is_bad { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
    };
    let file = cache.open(Arc::new(HookedStore { inner: store, before_read })).unwrap();
    let view = file.view_private(0..len as u64).unwrap();
    let filler_bytes = (max_mappings() / 4 + 10) * GROUP_BYTES;
    let filler = cache.create().unwrap();
    filler.truncate(filler_bytes as u64).unwrap();
    let filler = filler.view(0..filler_bytes as u64).unwrap();
    view.write_at(&[1], 0);
    let mut places = (0..filler_bytes).step_by(GROUP_BYTES);
    while stats::get(Counter::ViewMappings) < stats::get(Counter::ViewMappingsMax) {
        assert_eq!(read_byte(&filler, places.next().unwrap()), 0);
    }
    view.write_at(&[7], 10 * PAGE_BYTES + 1);
    assert_eq!(view.take_error().map(|error| error.errno()), None);
    for page in (0..len / PAGE_BYTES).filter(|page| *page != 3) {
        let expected = [1, byte_at(page * PAGE_BYTES)][usize::from(page > 0)];
        assert_eq!(read_byte(&view, page * PAGE_BYTES), expected, "page {page}");
    }
    assert_eq!(read_byte(&view, 10 * PAGE_BYTES + 1), 7);
}

/// A range of small folios that are in memory is prefaulted and locked. Each group of 16 pages must take one mapping.
/// All folios must be pinned by the guard, also after the file has lost them.
#[test]
fn prefaulted_pages_are_mapped_together() {
    if !is_child("prefaulted_pages_are_mapped_together") {
        return;
    }
    let (cache, len) = (cache(16 * MIB), 4 * MIB);
    let file = cache.create().unwrap();
    file.write_at(&(0..len).map(byte_at).collect::<Vec<_>>(), 0).unwrap();
    let assert_few_mappings = |groups: usize| {
        let mappings = stats::get(Counter::ViewMappings) as usize;
        // Some pages may not lie beside each other in the pool.
        assert!((groups..groups + groups / 4).contains(&mappings), "{mappings} mappings of {groups} groups");
    };
    let view = file.view_mut(0..len as u64).unwrap();
    let prefaulted = view.prefault_mut(PAGE_BYTES..len - PAGE_BYTES).unwrap();
    assert_few_mappings(len / GROUP_BYTES);
    assert_eq!(stats::get(Counter::ViewFaults), 0);
    (0..len).step_by(PAGE_BYTES).for_each(|at| assert_eq!(read_byte(&view, at), byte_at(at)));
    assert_few_mappings(len / GROUP_BYTES);
    let other = file.view(0..len as u64).unwrap();
    other.lock(0..len).unwrap();
    assert_few_mappings(2 * len / GROUP_BYTES);
    other.unlock(0..len).unwrap();
    file.truncate(0).unwrap();
    assert_eq!(cache.usage().pinned, (len - 2 * PAGE_BYTES) as u64);
    drop(prefaulted);
    assert_eq!(cache.usage().pinned, 0);
}
