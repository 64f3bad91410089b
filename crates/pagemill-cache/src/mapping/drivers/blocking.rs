//! Reads in the calling thread: it fills the folio itself, or waits for the request that does.

use crate::mapping::File;
use crate::mapping::inflight::Kind;
use crate::mapping::request::{Purpose, READING, Reserved, Unpublished};
use pagemill_core::error::{Error, Result};
use std::ops::Range;

impl File {
    /// Reads the first of some missing pages into memory, and following ones that the same transfer can read. Fills
    /// pages of a file without a store with zeros. The first page may be missing again afterwards, because it was
    /// truncated, evicted, or in the way of another request.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`]. [`Error::Store`] with the store's error for the first page, or with `ETIMEDOUT` after the
    /// cache's timeout.
    pub(crate) fn bring_in(&self, pages: Range<u64>, purpose: Purpose) -> Result<()> {
        let first = pages.start..pages.start + 1;
        let is_one = pages == first;
        match self.bring_in_together(pages, purpose) {
            // Perhaps only one of the other pages cannot be read.
            Err(Error::Store { doing: READING, .. }) if !is_one => self.bring_in_together(first, purpose),
            result => result,
        }
    }

    fn bring_in_together(&self, pages: Range<u64>, purpose: Purpose) -> Result<()> {
        if self.cache.timeout.is_some() && self.is_asynchronous() {
            return self.bring_in_within_timeout(pages, purpose);
        }
        match Unpublished::reserve(self, pages, Kind::Uncancellable, purpose)? {
            Reserved::Present => Ok(()),
            Reserved::InFlight(other) => self.wait_for(other.id, self.deadline()),
            Reserved::New(mut folio) => {
                folio.fill_from_store()?;
                folio.publish().map(drop)
            }
        }
    }

    /// Submits the read to the store, and waits until it completes or the cache's timeout has passed.
    fn bring_in_within_timeout(&self, pages: Range<u64>, purpose: Purpose) -> Result<()> {
        let Some(file) = self.this.upgrade() else { return Ok(()) };
        let deadline = self.deadline();
        let Some((id, error)) = file.submit(pages, purpose)? else { return Ok(()) };
        self.wait_for(id, deadline)?;
        error.and_then(|error| error.with(Option::take)).map_or(Ok(()), Err)
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use crate::mapping::PageCache;
    use crate::mapping::policy::{Ask, Choice, Policy};
    use crate::test_process;
    use pagemill_core::error::Error;
    use pagemill_core::units::PageSize;
    use pagemill_store::MemoryStore;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    /// Counts its decisions, of which each attempt to read pages into memory needs one.
    struct CountingPolicy(Arc<AtomicU32>);

    impl Policy for CountingPolicy {
        fn choose(&self, _ask: &Ask) -> Choice {
            self.0.fetch_add(1, Relaxed);
            Choice::Small
        }
    }

    /// If all memory of a cache is pinned, a read of several pages must fail at its first attempt. Its first page alone
    /// would find no memory either.
    #[test]
    fn a_read_without_memory_is_attempted_once() {
        const PAGE: usize = PageSize::MIN_BYTES;
        let attempts = Arc::new(AtomicU32::new(0));
        let settings = PageCache::builder("pinned").limit(4 * PAGE as u64).page(PageSize::new(PAGE).unwrap());
        let cache = settings.policy(CountingPolicy(attempts.clone())).build_in(test_process::caches()).unwrap();
        let file = cache.open(Arc::new(MemoryStore::new(vec![1; 16 * PAGE], PAGE))).unwrap();
        let _pins = [0, 1, 2, 3].map(|page| file.pin(page * PAGE as u64).unwrap());
        let before = attempts.load(Relaxed);
        let read = file.read_at(&mut vec![0; 4 * PAGE], 4 * PAGE as u64);
        assert!(matches!(read, Err(Error::NoMemory { .. })), "{read:?}");
        assert_eq!(attempts.load(Relaxed) - before, 1);
    }
}
