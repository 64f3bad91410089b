//! The trait [`SlabCache`]: operations that all kinds of slab caches have in common.

use crate::cache::Cache;
use crate::defrag::passes::Progress;
use crate::report::info::{self, SlabInfo};
use crate::{FixedSlab, HandleMap, Migrate, Movable, OwnerSlab};
use pagemill_core::error::Result;
use std::time::Duration;

/// Access to the cache inside a public type. Other crates cannot name this trait, so they cannot implement
/// [`SlabCache`].
///
/// Example: [`SlabCache`].
pub trait Inner {
    /// Returns the cache inside, without the type of its objects.
    #[expect(private_interfaces, reason = "other crates cannot name this trait")]
    fn inner(&self) -> &dyn Cache;
}

impl<T> Inner for FixedSlab<T> {
    #[expect(private_interfaces, reason = "as in the trait")]
    fn inner(&self) -> &dyn Cache {
        &*self.inner
    }
}

impl<M: Migrate> Inner for OwnerSlab<M> {
    #[expect(private_interfaces, reason = "as in the trait")]
    fn inner(&self) -> &dyn Cache {
        &*self.inner
    }
}

impl<T: Movable> Inner for HandleMap<T> {
    #[expect(private_interfaces, reason = "as in the trait")]
    fn inner(&self) -> &dyn Cache {
        &*self.inner
    }
}

/// Operations of all kinds of slab caches: [`FixedSlab`], [`OwnerSlab`], [`HandleMap`].
///
/// ```
/// use pagemill::slab::{FixedSlab, SlabCache};
///
/// fn report(cache: &impl SlabCache) -> pagemill::Result<()> {
///     let info = cache.info()?;
///     println!("{}: {} objects, {} bytes", info.name, info.total.used, info.total.resident_bytes);
///     Ok(())
/// }
///
/// let cache = FixedSlab::new("names")?;
/// let name = cache.insert("page".to_owned())?;
/// report(&cache)?;
/// drop(name);
/// cache.shrink()?; // the empty slab returns to the system
/// assert_eq!(cache.info()?.total.used, 0);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub trait SlabCache: Inner {
    /// Packs all movable objects into as few slabs and blocks as possible, drops removed values, and frees the unused
    /// memory: free objects that threads and NUMA nodes keep (in magazines and barns), idle blocks, empty slabs, unused
    /// pages of the handle table. Returns by how many bytes the memory charged for the cache fell.
    ///
    /// Afterwards the cache has at most one partial slab on each NUMA node, unless some objects could not be moved.
    /// Waits for readers, at most one second, so a thread that has a guard must not call it. Waits at most one second
    /// for another thread that defragments the cache, such as Pagemill's background thread.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::Busy`] if another thread defragments the cache for longer than a second, or a thread was
    /// stopped during an allocation or free. [`pagemill_core::Error::WrongState`] in a fork child.
    ///
    /// # Panics
    ///
    /// If [`Migrate::isolate`] or [`Migrate::migrate`] panics: the slab is unusable afterwards.
    fn shrink(&self) -> Result<u64> {
        self.inner().shrink()
    }

    /// Runs a step of defragmentation for about `budget`: empties slabs and blocks of which a smaller percentage is in
    /// use than the cache's `defrag_used_ratio`. The time is checked after every 64 objects, but at least one slab is
    /// finished. Moves nothing in a [`FixedSlab`] cache, or if the ratio is 0.
    ///
    /// The memory of the emptied slabs is freed after readers of the moved objects have finished: by a later call, by
    /// the background thread, or by [`SlabCache::shrink`]. Some empty slabs and one block on each NUMA node keep their
    /// memory for the next objects until `shrink`, or until memory is needed. Example: [`Progress`].
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::Busy`] if another thread defragments the cache, or a thread was stopped during an
    /// allocation or free. This call does not wait for it, and the other thread may be Pagemill's background thread, so
    /// a program must expect the error at any call. It can wait a millisecond and repeat the call, or call
    /// [`SlabCache::shrink`], which waits up to a second. With a ratio of 0 the background thread does not work on the
    /// cache, and `shrink` is the only call that compacts it ([`Settings::defrag_used_ratio`]).
    ///
    /// [`Settings::defrag_used_ratio`]: crate::Settings::defrag_used_ratio
    ///
    /// # Panics
    ///
    /// As [`SlabCache::shrink`].
    fn defrag_step(&self, budget: Duration) -> Result<Progress> {
        self.inner().defrag(budget)
    }

    /// Moves up to `most` objects from one NUMA node to another. Does nothing for a [`FixedSlab`] cache.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::BadNode`], and as [`SlabCache::shrink`].
    fn move_objects(&self, from: usize, to: usize, most: u64) -> Result<Progress> {
        self.inner().move_objects(from, to, most)
    }

    /// Moves objects from NUMA nodes with more than the average number of objects to nodes with fewer, until each has
    /// the average. Does nothing for a [`FixedSlab`] cache.
    ///
    /// # Errors
    ///
    /// As [`SlabCache::shrink`].
    fn balance(&self) -> Result<Progress> {
        self.inner().balance()
    }

    /// Sets the percentage of use below which [`SlabCache::defrag_step`] empties slabs: 0 empties none, 100 all that
    /// are not full. If the background thread skips the cache after a panic of a callback, the thread resumes work on
    /// the cache ([`SlabInfo::is_given_up`]).
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::BadRatio`].
    fn set_defrag_used_ratio(&self, percent: u32) -> Result<()> {
        self.inner().engine().set_used_ratio(percent)
    }

    /// Returns the statistics of the cache.
    ///
    /// # Errors
    ///
    /// [`pagemill_core::Error::WrongState`] in a fork child.
    fn info(&self) -> Result<SlabInfo> {
        info::of(self.inner())
    }
}

impl<C: Inner> SlabCache for C {}
