//! Tests of page caches on kernels with OS pages of 16 or 64 KiB. Child processes simulate these page sizes on any
//! kernel.

use pagemill_cache::mapping::policy::{Always, Auto, Policy};
use pagemill_cache::mapping::{Mapping, PageCache};
use pagemill_core::units::{BLOCK_BYTES, PageSize, os_page_bytes, os_pages_per_block};
use pagemill_sys::mem;
use pagemill_testbed::Testbed;
use std::process::Command;

const KIB: usize = 1 << 10;

/// Environment variable with the OS page size in bytes that a child process simulates.
const OS_PAGE_ENV: &str = "OS_PAGE_TEST_BYTES";

/// Maximum length of the test's file.
const MAX_FILE_BYTES: usize = 5 * BLOCK_BYTES / 2;

/// Runs [`caches_work_with_simulated_os_pages`] in a child process that simulates OS pages of `bytes` bytes. The child
/// must succeed.
fn run_with_os_pages_of(bytes: usize) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "caches_work_with_simulated_os_pages", "--ignored", "--nocapture", "--test-threads=1"]);
    let output = command.env(OS_PAGE_ENV, bytes.to_string()).output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// A page cache must work in a child process with OS pages of 16 KiB.
#[test]
fn caches_work_with_os_pages_of_16_kib() {
    run_with_os_pages_of(16 * KIB);
}

/// A page cache must work in a child process with OS pages of 64 KiB.
#[test]
fn caches_work_with_os_pages_of_64_kib() {
    run_with_os_pages_of(64 * KIB);
}

/// The part of the tests that runs in the child processes, with the OS page size of [`OS_PAGE_ENV`].
#[test]
#[ignore = "for other tests"]
fn caches_work_with_simulated_os_pages() {
    let Some(bytes) = std::env::var(OS_PAGE_ENV).ok().and_then(|bytes| bytes.parse().ok()) else { return };
    mem::pretend_os_page(bytes);
    assert_eq!((os_page_bytes(), os_pages_per_block()), (bytes, BLOCK_BYTES / bytes));
    assert!(PageSize::new(bytes / 2).is_none() && PageSize::os().bytes() == bytes);
    for page in [bytes, 4 * bytes, BLOCK_BYTES, 4 * BLOCK_BYTES] {
        for is_always in [false, true] {
            let policy: Box<dyn Policy> = if is_always { Box::new(Always) } else { Box::new(Auto) };
            assert_file_equals_vector(PageSize::new(page).unwrap(), policy);
        }
    }
}

/// Random calls on a file must have the same results as on a vector of bytes. Afterwards the cache must return all
/// memory.
fn assert_file_equals_vector(page: PageSize, policy: Box<dyn Policy>) {
    let pagemill = Testbed::for_test();
    pagemill.caches.collapse_by_hand();
    let settings = PageCache::builder("os pages").limit(64 << 20).page(page).policy(policy);
    let cache = settings.build_in(pagemill.caches).unwrap();
    let file = cache.create().unwrap();
    let (mut model, mut seed) = (Vec::new(), page.bytes() as u64);
    for step in 0..200 {
        apply(&cache, &file, &mut model, page.bytes(), &mut seed);
        let usage = cache.usage();
        assert_eq!(usage.huge + usage.small + usage.pinned, usage.charged, "step {step}: {usage:?}");
        assert_eq!(usage.charged + usage.free, pagemill.account.resident(), "step {step}: {usage:?}");
    }
    assert_same_bytes(&file, &model);
    assert!(cache.usage().frames > 0 && cache.usage().frames.is_multiple_of(os_page_bytes() as u64));
    drop(file);
    cache.shrink();
    assert_eq!((cache.charged_bytes(), cache.usage().free, pagemill.account.resident()), (0, 0, 0));
}

fn assert_same_bytes(file: &Mapping, model: &[u8]) {
    let mut bytes = vec![0xEE; model.len() + 1];
    let len = file.read_at(&mut bytes, 0).unwrap();
    assert!(bytes[..len] == *model, "{len} bytes of {}", model.len());
}

fn random_below(seed: &mut u64, end: usize) -> usize {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 8) as usize % end
}

/// Makes one random call on the file and on its model, a vector of bytes. Offsets lie near borders of pages and of OS
/// pages.
fn apply(cache: &PageCache, file: &Mapping, model: &mut Vec<u8>, page: usize, seed: &mut u64) {
    let unit = [page, 4 * KIB][random_below(seed, 2)];
    let at = (random_below(seed, MAX_FILE_BYTES / unit + 1) * unit + random_below(seed, 3))
        .saturating_sub(1)
        .min(MAX_FILE_BYTES);
    let len = [random_below(seed, 2 * page), page, random_below(seed, BLOCK_BYTES)][random_below(seed, 3)];
    let end = (at + len).min(model.len());
    match random_below(seed, 9) {
        0..=2 => {
            let byte = random_below(seed, 255) as u8 + 1;
            assert_eq!(file.write_at(&vec![byte; len], at as u64).unwrap(), len);
            if len > 0 {
                model.resize(model.len().max(at + len), 0);
                model[at..at + len].fill(byte);
            }
        }
        3 => {
            file.truncate(at as u64).unwrap();
            model.resize(at, 0);
        }
        4 | 5 => {
            file.punch_hole(at as u64, len as u64).unwrap();
            model.get_mut(at..end).unwrap_or_default().fill(0);
        }
        6 => drop((file.split(at as u64).unwrap(), file.split_sparse().unwrap())),
        7 => drop((file.collapse(at as u64).unwrap(), cache.collapse_waiting(1))),
        _ => drop((cache.split_sparse_waiting(usize::MAX), cache.shrink())),
    }
    if let Ok(pin) = file.pin(at as u64) {
        let mut bytes = vec![0; pin.len_bytes().min(model.len() - at)];
        pin.read_at(&mut bytes, 0);
        assert!(bytes == model[at..at + bytes.len()], "a pin at {at}");
    }
}
