//! [`Builder`]: the parameters of a cache that is about to be created.

use crate::mapping::policy::Auto;
use crate::mapping::{Caches, PageCache, Policy, Source, Writeback};
use pagemill_core::error::Result;
use pagemill_core::units::PageSize;
use std::time::Duration;

/// The parameters of a cache that is about to be created ([`PageCache::builder`]).
///
/// ```
/// use pagemill::cache::{Never, PageCache, Writeback};
/// use pagemill::units::PageSize;
/// use std::time::Duration;
///
/// let cache = PageCache::builder("index")
///     .limit(32 << 20)
///     .page(PageSize::new(64 << 10).unwrap())
///     .policy(Never) // no huge folios
///     .writeback(Writeback::default().age(Duration::from_secs(5)))
///     .build()?;
/// assert_eq!(cache.page().bytes(), 65_536);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[must_use = "`build` creates the cache"]
pub struct Builder {
    pub(crate) name: String,
    pub(crate) page: PageSize,
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) use_huge: bool,
    pub(crate) may_split: bool,
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) source: Source,
    pub(crate) writeback: Writeback,
    pub(crate) timeout: Option<Duration>,
}

impl Builder {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            page: PageSize::os(),
            limit_bytes: None,
            use_huge: cfg!(feature = "huge"),
            may_split: true,
            policy: Box::new(Auto),
            source: Source::default(),
            writeback: Writeback::default(),
            timeout: None,
        }
    }

    /// Sets the maximum total bytes of the cache's folios (pages and huge pages of its files). The memory of the cache
    /// may exceed the limit by half of the limit and one huge folio: some blocks are only partly used, and free blocks
    /// are not returned before memory is needed. The default is a quarter of the machine's memory.
    pub fn limit(self, bytes: u64) -> Self {
        Self { limit_bytes: Some(bytes), ..self }
    }

    /// Sets the software page: the unit in which files get memory, and the smallest folio. The default is the OS page.
    pub fn page(self, page: PageSize) -> Self {
        Self { page, ..self }
    }

    /// Sets whether huge folios are allocated. [`PageCache::set_huge`] can change the setting later.
    pub fn huge(self, use_huge: bool) -> Self {
        Self { use_huge, ..self }
    }

    /// Sets whether huge folios may be split, so that parts of them can be freed. The default is true. Folios in
    /// reserved huge pages are never split.
    pub fn split(self, may_split: bool) -> Self {
        Self { may_split, ..self }
    }

    /// Sets the policy, which chooses between huge and small folios. The default is [`Auto`].
    pub fn policy(self, policy: impl Policy + 'static) -> Self {
        Self { policy: Box::new(policy), ..self }
    }

    /// Sets the kind of memory that the cache uses. The default is [`Source::Ordinary`].
    ///
    /// ```
    /// use pagemill::cache::{PageCache, Source};
    ///
    /// let cache = PageCache::builder("hot rows").limit(32 << 20).source(Source::Shared).build()?;
    /// println!("the shared memory lies in: {:?}", cache.usage().shared);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn source(self, source: Source) -> Self {
        Self { source, ..self }
    }

    /// Sets when dirty pages of files with a store are written back.
    pub fn writeback(self, writeback: Writeback) -> Self {
        Self { writeback, ..self }
    }

    /// Sets the time limit of blocking calls that wait for a store. Futures and queues wait without limit; the program
    /// decides how long it polls them. With `None`, the default, waits have no limit. A call that exceeds the
    /// limit fails ([`Error::Store`](pagemill_core::Error::Store) with `ETIMEDOUT`). The limit covers the call's own
    /// reads and in-flight reads of other threads that the call needs. The read itself continues, and a later call
    /// finds its bytes. For a store with blocking calls only
    /// ([`Store::is_asynchronous`](pagemill_store::Store::is_asynchronous)), reads on the calling thread have no limit.
    /// A sync fails with [`Error::Busy`](pagemill_core::Error::Busy) if no write of its file completes for this time.
    pub fn timeout(self, timeout: impl Into<Option<Duration>>) -> Self {
        Self { timeout: timeout.into(), ..self }
    }

    /// Returns the limit of the cache in bytes: the one that was set, or the default.
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit_bytes.unwrap_or_else(|| (pagemill_sys::process::machine_bytes() / 4).max(self.page.bytes() as u64))
    }

    /// Creates the cache. The first cache of the process also creates what all page caches share.
    ///
    /// Cost: address space for the limit, and for 16 bytes of metadata for each page of the limit. Memory becomes
    /// resident as files are written.
    ///
    /// # Errors
    ///
    /// [`Error::BadLimit`](pagemill_core::Error::BadLimit) for a limit below one page.
    /// [`Error::NoAddresses`](pagemill_core::Error::NoAddresses) if the limit is too large.
    /// [`Error::TooMany`](pagemill_core::Error::TooMany) if the process has 256 page caches.
    /// [`Error::WrongState`](pagemill_core::Error::WrongState) for invalid percentages of dirty pages.
    /// [`Error::System`](pagemill_core::Error::System) if the first use of the library fails, or if no file for shared
    /// memory can be created. With reserved huge pages
    /// (feature `hugetlb`), also [`Error::NoHugetlb`](pagemill_core::Error::NoHugetlb) and
    /// [`Error::Unsupported`](pagemill_core::Error::Unsupported).
    pub fn build(self) -> Result<PageCache> {
        self.build_in(Caches::of_process()?)
    }

    /// Creates the cache as one of `caches`.
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    #[doc(hidden)] // programs have one set of caches, tests have several
    pub fn build_in(self, caches: &'static Caches) -> Result<PageCache> {
        caches.make(self)
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, page, limit_bytes, use_huge, .. } = self;
        let mut text = f.debug_struct("Builder");
        text.field("name", name).field("page", page).field("limit_bytes", limit_bytes).field("use_huge", use_huge);
        text.finish_non_exhaustive()
    }
}
