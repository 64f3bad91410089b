//! *Chunks ahead* are free chunks that the helper thread made resident before they were needed, because the cache
//! grows.
//!
//! A thread that takes a free chunk into use notes the time. If the chunk before was taken a short time ago, the thread
//! requests chunks and wakes the helper. Chunks ahead are ordinary free chunks, so reclaim returns those that no
//! allocation uses.

use super::Pool;
use pagemill_core::reclaim::helper::Helper;
use pagemill_core::sync::{AtomicU32, AtomicU64, Relaxed, coarse_ns};
use std::sync::atomic::AtomicBool;

/// Maximum time between two chunks, in nanoseconds, for the pool to count as growing. While it grows, the next chunk is
/// made resident before it is needed. A cache that takes a single chunk gets none.
const GROWTH_NS: u64 = 50_000_000;

/// If the time between two chunks, in nanoseconds, is at least this, one chunk ahead is enough. The helper needs about
/// a quarter of a millisecond to make a chunk resident.
const SLOW_GROWTH_NS: u64 = 16_000_000;

/// Maximum number of bytes of the chunks ahead. Pools of larger chunks get none.
const MAX_AHEAD_BYTES: usize = 8 << 20;

/// A pool gets at most one chunk ahead for every 16 chunks that have memory, because chunks ahead stay when the growth
/// stops. So a pool of less than 32 MiB has none. Tests use small pools.
const CHUNKS_PER_CHUNK_AHEAD: u32 = if cfg!(test) { 1 } else { 16 };

/// What decides how many chunks ahead a pool gets.
pub(super) struct Growth {
    /// The thread that makes the chunks ahead resident.
    helper: &'static Helper,
    /// The helper makes chunks resident only while fewer chunks than this have memory: the limit of the pool's cache,
    /// rounded up to chunks.
    limit_chunks: AtomicU32,
    /// Time at which a chunk was last taken into use.
    last_use_ns: AtomicU64,
    /// Number of free chunks that the helper keeps resident; 0 while the pool does not grow.
    chunks_ahead: AtomicU32,
    /// Whether chunks ahead are requested and the helper has not handled that yet.
    is_requested: AtomicBool,
}

impl Growth {
    pub fn new(helper: &'static Helper) -> Self {
        Self {
            helper,
            limit_chunks: AtomicU32::new(0),
            last_use_ns: AtomicU64::new(0),
            chunks_ahead: AtomicU32::new(0),
            is_requested: AtomicBool::new(false),
        }
    }
}

/// Returns the number of chunks ahead after a chunk was taken into use, `since_last_ns` after the chunk before.
fn chunks_ahead_after_use(chunks_ahead: u32, since_last_ns: u64) -> u32 {
    match since_last_ns {
        0..SLOW_GROWTH_NS => chunks_ahead.max(1),
        SLOW_GROWTH_NS..=GROWTH_NS => 1,
        _ => 0,
    }
}

impl Pool {
    /// Sets the limit of the cache that uses the pool from now on.
    pub fn set_cache_limit(&self, limit_bytes: u64) {
        let chunks = limit_bytes.div_ceil(self.chunk_bytes as u64);
        self.growth.limit_chunks.store(chunks.min(u64::from(self.max_chunks)) as u32, Relaxed);
    }

    /// Notes that a chunk was taken into use. If the pool grows, requests chunks ahead. The caller holds no lock.
    #[cold]
    pub(super) fn note_chunk_used(&self) {
        let growth = &self.growth;
        if self.is_hugetlb() || !growth.helper.is_running() {
            return;
        }
        let now_ns = coarse_ns();
        let since_last_ns = now_ns.saturating_sub(growth.last_use_ns.swap(now_ns, Relaxed));
        let chunks_ahead = chunks_ahead_after_use(growth.chunks_ahead.load(Relaxed), since_last_ns);
        let chunks_ahead = chunks_ahead.min(self.max_chunks_ahead());
        growth.chunks_ahead.store(chunks_ahead, Relaxed);
        // Wakes the helper when at most half of the chunks ahead are left, not after each one.
        let is_due = self.free_chunks.load(Relaxed) <= chunks_ahead / 2;
        if is_due && self.wants_chunk_ahead() && !growth.is_requested.swap(true, Relaxed) {
            growth.helper.wake();
        }
    }

    /// Notes that an allocation had to make a chunk resident itself. If the pool grows, the helper was too late, so the
    /// number of chunks ahead doubles.
    pub(super) fn note_chunk_missed(&self) {
        let chunks_ahead = self.growth.chunks_ahead.load(Relaxed);
        self.growth.chunks_ahead.store((2 * chunks_ahead).min(self.max_chunks_ahead()), Relaxed);
    }

    /// Returns whether an allocation has requested chunks ahead that the helper has not provided yet.
    pub fn is_growth_requested(&self) -> bool {
        self.growth.is_requested.load(Relaxed)
    }

    /// Makes chunks resident as far as they were requested, if there is room without reclaim. A step of the helper
    /// thread.
    pub fn grow_ahead(&self) {
        self.growth.is_requested.store(false, Relaxed);
        for _ in 0..self.max_chunks_ahead() {
            let is_wanted = self.wants_chunk_ahead() && !self.growth.helper.has_events();
            if !(is_wanted && self.add_chunk_ahead()) {
                return;
            }
        }
    }

    /// Ends the request for chunks ahead, because no cache uses the pool.
    pub fn drop_growth_request(&self) {
        self.growth.is_requested.store(false, Relaxed);
    }

    /// Makes a chunk resident and free. Never reclaims. Returns false, and adds no chunk, if it does not fit below the
    /// limit of the cache or of the process, or if the kernel has no page.
    fn add_chunk_ahead(&self) -> bool {
        let claimed = self.state.with(|state| {
            // Chunks that are being returned count, too, so the sum is never too low.
            let chunks = self.filled_chunks.load(Relaxed) + state.chunks_in_transit;
            (chunks < self.growth.limit_chunks.load(Relaxed)).then(|| self.take_empty_chunk(state).ok()).flatten()
        });
        let Some(chunk) = claimed else { return false };
        let is_filled = self.fill_chunk_ahead(chunk);
        if is_filled {
            self.publish_chunk(chunk, |_| ());
        } else {
            self.return_claimed_chunk(chunk);
        }
        is_filled
    }

    /// Returns whether there are fewer free chunks than wanted, and the cache's limit has room for one more.
    fn wants_chunk_ahead(&self) -> bool {
        self.free_chunks.load(Relaxed) < self.growth.chunks_ahead.load(Relaxed)
            && self.filled_chunks.load(Relaxed) < self.growth.limit_chunks.load(Relaxed)
    }

    /// Returns the maximum number of chunks ahead of this pool.
    fn max_chunks_ahead(&self) -> u32 {
        let most = (MAX_AHEAD_BYTES / self.chunk_bytes) as u32;
        most.min(self.filled_chunks.load(Relaxed) / CHUNKS_PER_CHUNK_AHEAD)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::mapping::{Caches, Mapping, PageCache};
    use crate::test_process;
    use pagemill_core::arena::{Budget, Context};
    use pagemill_core::reclaim::tree::UNLIMITED;
    use pagemill_core::units::BLOCK_BYTES;

    /// A cache of `limit_chunks` chunks in a process with a helper, and a file without a store.
    fn growing_cache(caches: &'static Caches, limit_chunks: usize, use_huge: bool) -> (PageCache, Mapping) {
        caches.helper.claim();
        let settings = PageCache::builder("growing").limit((limit_chunks * BLOCK_BYTES) as u64).huge(use_huge);
        let cache = settings.build_in(caches).unwrap();
        let file = cache.create().unwrap();
        (cache, file)
    }

    /// Writes the chunk with this index, a short time after the chunk before.
    fn write_soon(cache: &PageCache, file: &Mapping, chunk: usize) {
        // A last use in the future makes `since_last_ns` zero (saturating subtraction).
        cache.0.pool.growth.last_use_ns.store(u64::MAX, Relaxed);
        write(file, chunk);
    }

    fn write(file: &Mapping, chunk: usize) {
        let written = file.write_at(&vec![1; BLOCK_BYTES], (chunk * BLOCK_BYTES) as u64).unwrap();
        assert_eq!(written, BLOCK_BYTES);
    }

    /// Returns the number of chunks with memory, and the number of free ones among them.
    fn filled_and_free(cache: &PageCache) -> (u32, u32) {
        let pool = cache.0.pool;
        (pool.filled_chunks.load(Relaxed), pool.free_chunks.load(Relaxed))
    }

    /// The first chunk must request none. From the second chunk on the helper must provide the next one, which the next
    /// write must use. Each time that the helper is late it must provide twice as many, up to four. A chunk after a
    /// pause must end this.
    #[test]
    fn a_growing_cache_gets_chunks_ahead() {
        for use_huge in [false, true] {
            let caches = test_process::caches();
            let (cache, file) = growing_cache(caches, 64, use_huge);
            write(&file, 0);
            assert!(!caches.grow_ahead());
            assert_eq!(filled_and_free(&cache), (1, 0));
            write_soon(&cache, &file, 1);
            assert_eq!((filled_and_free(&cache), caches.grow_ahead()), ((2, 0), true));
            assert_eq!((filled_and_free(&cache), caches.grow_ahead()), ((3, 1), false));
            assert_eq!(cache.0.pool.giveable_bytes(), BLOCK_BYTES as u64);
            write_soon(&cache, &file, 2);
            assert_eq!((filled_and_free(&cache), caches.grow_ahead()), ((3, 0), true));
            let mut at = 3;
            for (used, provided) in [(2, 2), (3, 4), (5, 4)] {
                (at..at + used).for_each(|chunk| write_soon(&cache, &file, chunk));
                at += used;
                assert_eq!((filled_and_free(&cache), caches.grow_ahead()), ((at as u32, 0), true));
                assert_eq!(filled_and_free(&cache), (at as u32 + provided, provided));
            }
            // The helper is woken when half of the chunks ahead are left.
            write_soon(&cache, &file, at);
            assert!(!caches.grow_ahead());
            write_soon(&cache, &file, at + 1);
            assert!(caches.grow_ahead());
            assert_eq!(filled_and_free(&cache).1, 4);
            cache.0.pool.growth.last_use_ns.store(0, Relaxed);
            write(&file, at + 2);
            assert_eq!((caches.grow_ahead(), filled_and_free(&cache).1), (false, 3));
            assert_eq!(cache.shrink(), 3 * BLOCK_BYTES as u64);
        }
    }

    /// An allocation of contiguous pages makes a chunk free before it uses the chunk. That must count as one use.
    #[test]
    fn contiguous_pages_use_a_chunk_once() {
        let caches = test_process::caches();
        let (cache, _file) = growing_cache(caches, 4, false);
        let pages = cache.0.allocate_contiguous(64, 1).unwrap();
        assert!(!cache.0.pool.is_growth_requested());
        pages.for_each(|page| cache.0.free(page, 0));
    }

    /// The last chunk below the limit must be provided, but none above the limit, however many are wanted.
    #[test]
    fn chunks_ahead_stay_below_the_limit() {
        let caches = test_process::caches();
        let (cache, file) = growing_cache(caches, 4, false);
        let pool = cache.0.pool;
        write(&file, 0);
        write_soon(&cache, &file, 1);
        pool.growth.chunks_ahead.store(4, Relaxed);
        assert!(caches.grow_ahead());
        assert_eq!(filled_and_free(&cache), (4, 2));
        write_soon(&cache, &file, 2);
        write_soon(&cache, &file, 3);
        assert!(!caches.grow_ahead());
        pool.growth.is_requested.store(true, Relaxed);
        assert!(caches.grow_ahead());
        assert_eq!((filled_and_free(&cache), pool.max_bytes() > 4 * BLOCK_BYTES as u64), ((4, 0), true));
    }

    /// Without room for two blocks below the limit of the process, no chunk must be provided and nothing charged or
    /// returned. With room the chunk must be provided.
    #[test]
    fn chunks_ahead_take_only_room() {
        let (account, caches) = test_process::caches_with_limit(32 << 20);
        let (cache, file) = growing_cache(caches, 16, false);
        write(&file, 0);
        write_soon(&cache, &file, 1);
        let used_bytes = (32 << 20) - account.resident() - 2 * BLOCK_BYTES as u64 + 1;
        account.admit(used_bytes, Context::Outside).unwrap();
        let resident = account.resident();
        assert!(caches.grow_ahead());
        assert_eq!((filled_and_free(&cache), account.resident()), ((2, 0), resident));
        account.discharge(used_bytes);
        cache.0.pool.growth.is_requested.store(true, Relaxed);
        assert!(caches.grow_ahead());
        assert_eq!(filled_and_free(&cache), (3, 1));
        assert_eq!(account.resident(), resident - used_bytes + BLOCK_BYTES as u64);
    }

    /// No chunk must be provided for a cache that has ended, for one of the parent process, or without a helper.
    #[test]
    fn other_caches_get_no_chunks_ahead() {
        let caches = test_process::caches_with_limit(UNLIMITED).1;
        let (cache, file) = growing_cache(caches, 16, false);
        let pool = cache.0.pool;
        write(&file, 0);
        caches.helper.unclaim();
        write_soon(&cache, &file, 1);
        assert!(!pool.is_growth_requested());
        caches.helper.claim();
        write_soon(&cache, &file, 2);
        assert!(pool.is_growth_requested());
        caches.inherited.store(1, Relaxed);
        assert!(!caches.grow_ahead());
        caches.inherited.store(0, Relaxed);
        drop((file, cache));
        assert!(caches.grow_ahead());
        assert!(pool.is_idle() && !pool.is_growth_requested());
        assert_eq!(pool.filled_bytes(), 3 * BLOCK_BYTES as u64);
    }

    /// The first chunk after a pause must request none. Quick growth must keep the number, slower growth must set it to
    /// one, and a pause must end the growth.
    #[test]
    fn the_number_of_chunks_ahead_follows_the_growth() {
        for (chunks, since_last_ns, expected) in [
            (0, u64::MAX, 0),
            (0, 0, 1),
            (0, GROWTH_NS, 1),
            (1, 0, 1),
            (4, SLOW_GROWTH_NS - 1, 4),
            (4, SLOW_GROWTH_NS, 1),
            (4, GROWTH_NS + 1, 0),
        ] {
            assert_eq!(chunks_ahead_after_use(chunks, since_last_ns), expected, "{chunks}, {since_last_ns} ns");
        }
    }
}
