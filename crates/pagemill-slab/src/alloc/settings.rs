//! [`Settings`]: the parameters of a slab cache.

/// Default of [`Settings::defrag_used_ratio`], as in Linux.
const DEFRAG_USED_RATIO: u32 = 30;

/// Settings of a slab cache.
///
/// ```
/// use pagemill::slab::{HandleMap, Settings, SlabCache};
///
/// let cache = HandleMap::<u64>::with(Settings::new("sessions").defrag_used_ratio(50).debug(true))?;
/// assert!(cache.info()?.is_debug);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Settings {
    pub(crate) name: String,
    pub(crate) slab_bytes: Option<usize>,
    pub(crate) defrag_used_ratio: u32,
    pub(crate) remote_node_defrag_ratio: u32,
    pub(crate) is_debug: bool,
    pub(crate) is_movable: bool,
}

impl Settings {
    /// Creates settings with default values. Reports show the cache under `name`.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            slab_bytes: None,
            defrag_used_ratio: DEFRAG_USED_RATIO,
            remote_node_defrag_ratio: 100,
            is_debug: false,
            is_movable: true,
        }
    }

    /// Sets the slab size in bytes: a power of two, at least 16 KiB and one OS page, at most 2 MiB. With `None`, the
    /// default, the size follows from the object size.
    pub fn slab_bytes(self, slab_bytes: impl Into<Option<usize>>) -> Self {
        Self { slab_bytes: slab_bytes.into(), ..self }
    }

    /// Sets the percentage of use below which defragmentation empties slabs and blocks, both in calls of the program
    /// and in the background. With 0, none are emptied, and with 100, all that are not full. The default is 30, as in
    /// Linux.
    ///
    /// With 0, Pagemill's background thread does not work on the cache, except for shrinks that another process
    /// requests (`pagemill slabinfo -s`). So the thread runs no callbacks of the owner and no destructors of removed
    /// values. [`SlabCache::defrag_step`](crate::SlabCache::defrag_step) then moves nothing. The cache is compacted by
    /// [`SlabCache::shrink`](crate::SlabCache::shrink), and a [`HandleMap`](crate::HandleMap) also at a memory limit.
    pub fn defrag_used_ratio(self, percent: u32) -> Self {
        Self { defrag_used_ratio: percent, ..self }
    }

    /// Sets the percentage of allocations that try other NUMA nodes if the current node has no free object. The other
    /// allocations set up a new slab on the current node without trying other nodes. The default is 100.
    pub fn remote_node_defrag_ratio(self, percent: u32) -> Self {
        Self { remote_node_defrag_ratio: percent, ..self }
    }

    /// Sets whether the cache detects damaged objects with redzones and poison, and records the callers that allocated
    /// and freed an object. Each allocation and free then acquires a lock and checks the object. The default is false.
    pub fn debug(self, is_debug: bool) -> Self {
        Self { is_debug, ..self }
    }

    /// Sets whether a [`HandleMap`](crate::HandleMap) moves its values. The default is true. With false, values keep
    /// their address as in a [`FixedSlab`](crate::FixedSlab): calls that move objects do nothing, and
    /// [`SlabCache::shrink`](crate::SlabCache::shrink) frees only empty slabs and blocks. Other kinds of caches ignore
    /// the setting.
    pub fn movable(self, is_movable: bool) -> Self {
        Self { is_movable, ..self }
    }
}
