//! Makes random calls on a file in memory. Each six bytes of the input are decoded as one call. The file is compared
//! with a byte vector.
//!
//! Run it by `cargo +nightly fuzz run file_calls`. Each input starts with an empty file in an empty cache.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemill_cache::mapping::policy::{Ask, Choice};
use pagemill_cache::mapping::{Mapping, PageCache, Policy};
use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::units::{BLOCK_BYTES, PageSize};
use pagemill_testbed::Testbed;
use std::sync::OnceLock;

/// Maximum length of the file in bytes.
const MAX_FILE_BYTES: usize = 3 * BLOCK_BYTES;

/// Offsets and lengths are multiples of this number of bytes.
const OFFSET_UNIT_BYTES: usize = 256;

/// Page size of the cache: 128 KiB, so that a huge folio has sixteen pages.
const PAGE_BYTES: usize = BLOCK_BYTES / 16;

/// A folio policy that chooses a huge folio for every other block of the file.
struct HugeForEvenBlocks;

impl Policy for HugeForEvenBlocks {
    fn choose(&self, ask: &Ask) -> Choice {
        if ask.offset.is_multiple_of(2 * ask.span_bytes) { Choice::Huge } else { Choice::Small }
    }
}

fn cache() -> &'static PageCache {
    static CACHE: OnceLock<PageCache> = OnceLock::new();
    CACHE.get_or_init(|| {
        let pagemill = Testbed::new(Layout::for_test(), UNLIMITED).expect("address space");
        pagemill.caches.collapse_by_hand();
        let page = PageSize::new(PAGE_BYTES).expect("a power of two");
        let settings = PageCache::builder("fuzz").limit(2 * MAX_FILE_BYTES as u64).page(page).policy(HugeForEvenBlocks);
        settings.build_in(pagemill.caches).expect("a cache")
    })
}

fn zero_range_of_model(model: &mut [u8], at: usize, len: usize) {
    let end = (at + len).min(model.len());
    if at < end {
        model[at..end].fill(0);
    }
}

fn make_call(file: &Mapping, model: &mut Vec<u8>, kind: u8, at: usize, len: usize) {
    match kind % 8 {
        0 | 1 => {
            let bytes = vec![kind | 1; len];
            assert_eq!(file.write_at(&bytes, at as u64).unwrap(), len);
            if len > 0 {
                model.resize(model.len().max(at + len), 0);
                model[at..at + len].fill(kind | 1);
            }
        }
        2 => {
            file.truncate(at as u64).unwrap();
            model.resize(at, 0);
        }
        3 => {
            file.punch_hole(at as u64, len as u64).unwrap();
            zero_range_of_model(model, at, len);
        }
        4 => {
            file.zero_range(at as u64, len as u64).unwrap();
            zero_range_of_model(model, at, len);
        }
        5 => drop(file.split(at as u64).unwrap()),
        6 => drop(file.collapse(at as u64).unwrap()),
        7 if kind & 8 == 0 => drop(file.split_sparse().unwrap()),
        _ => _ = cache().split_sparse_waiting(usize::MAX),
    }
    let mut bytes = vec![0xEE; len + 1];
    let count = file.read_at(&mut bytes, at as u64).unwrap();
    let end = (at + len + 1).min(model.len());
    assert!(bytes[..count] == *model.get(at..end).unwrap_or_default());
}

fuzz_target!(|data: &[u8]| {
    let (cache, mut model) = (cache(), Vec::new());
    let file = cache.create().unwrap();
    for call in data.chunks_exact(6) {
        let offset = |high: u8, low: u8| usize::from(u16::from_le_bytes([low, high])) * OFFSET_UNIT_BYTES;
        let at = (offset(call[1], call[2]) + usize::from(call[5])) % MAX_FILE_BYTES;
        let len = offset(call[3], call[4]) % (MAX_FILE_BYTES - at);
        make_call(&file, &mut model, call[0], at, len);
    }
    let mut bytes = vec![0; model.len()];
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), model.len());
    assert!(bytes == model);
    drop(file);
    assert_eq!(cache.charged_bytes(), 0);
});
