//! The memory that caches use: ordinary memory, shared memory, or huge pages that the administrator reserved.

use crate::folio::{MemoryKind, Pool};
use crate::mapping::cache::config::Builder;
use crate::mapping::cache::{Caches, Inner, MAX_CACHES};
use pagemill_core::arena::Reserve;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_core::units::BLOCK_BYTES;
use pagemill_sys::memory_file::FileSystem;
use std::sync::Weak;

/// The kind of memory that a cache uses.
///
/// Example: [`Builder`](crate::mapping::Builder).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Memory of the process, charged to its limit. Uses huge pages as far as the kernel provides them.
    #[default]
    Ordinary,
    /// Memory of a file without a name, so that its pages can also be mapped at other addresses. Charged, returned and
    /// backed by huge pages as ordinary memory is; the kernel counts it as shared (`RssShmem`). Fork children do not
    /// inherit it, so they cannot read through a [`Pin`] of the parent. [`Usage::shared`] reports where the file lies.
    ///
    /// [`Pin`]: crate::mapping::Pin
    /// [`Usage::shared`]: crate::mapping::Usage::shared
    Shared,
    /// Huge pages that the administrator has reserved (hugetlb, `/proc/sys/vm/nr_hugepages`). At its creation the cache
    /// takes enough pages for its limit, and one more to move folios; the cache keeps these pages until it ends. Folios
    /// are never split, as if [`Builder::split`] were false. The pages count against no memory limit. If too few are
    /// free, the cache is not created ([`Error::NoHugetlb`]).
    #[cfg(feature = "hugetlb")]
    Hugetlb,
    /// As `Hugetlb` if enough pages are free, else [`Source::Ordinary`]. [`Usage::is_hugetlb`] reports which one.
    ///
    /// [`Usage::is_hugetlb`]: crate::mapping::Usage::is_hugetlb
    #[cfg(feature = "hugetlb")]
    TryHugetlb,
}

/// Where the file of a cache in shared memory lies.
///
/// Example: [`Builder`](crate::mapping::Builder).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedMemory {
    /// In the kernel's own file system for shared memory (`memfd_create`).
    Memfd,
    /// In a tmpfs that only this process can reach, because the setting `shmem_enabled` of the machine allows no huge
    /// pages in a memfd.
    Tmpfs,
}

impl From<FileSystem> for SharedMemory {
    fn from(file_system: FileSystem) -> Self {
        match file_system {
            FileSystem::Memfd => Self::Memfd,
            FileSystem::Tmpfs => Self::Tmpfs,
        }
    }
}

/// The pools, each with its current cache.
type Pools = Vec<(&'static Pool, Weak<Inner>)>;

impl Source {
    /// Returns the kind of memory of a new pool. If ordinary memory may replace it, that is not considered.
    fn kind(self) -> MemoryKind {
        match self {
            Self::Ordinary => MemoryKind::Private,
            Self::Shared => MemoryKind::Shared,
            #[cfg(feature = "hugetlb")]
            Self::Hugetlb | Self::TryHugetlb => MemoryKind::Hugetlb,
        }
    }

    /// Returns whether ordinary memory may replace reserved huge pages.
    fn may_be_ordinary(self) -> bool {
        match self {
            #[cfg(feature = "hugetlb")]
            Self::TryHugetlb => true,
            _ => false,
        }
    }

    /// Takes reserved huge pages for a new cache. Returns `None` if the cache uses other memory.
    fn take_reserve(self, settings: &Builder) -> Result<Option<Reserve>> {
        if self.kind() != MemoryKind::Hugetlb {
            return Ok(None);
        }
        let chunk_bytes = settings.page.bytes().max(BLOCK_BYTES) as u64;
        let limit_bytes = settings.limit_bytes();
        let bytes = limit_bytes.checked_next_multiple_of(chunk_bytes).and_then(|bytes| bytes.checked_add(chunk_bytes));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let taken = bytes.ok_or(Error::NoAddresses { wanted_bytes: limit_bytes }).and_then(Reserve::take);
        match taken {
            Ok(reserve) => Ok(Some(reserve)),
            Err(error) if !self.may_be_ordinary() => Err(error),
            Err(_) => {
                stats::add(Counter::HugetlbRefused, 1);
                Ok(None)
            }
        }
    }
}

impl Caches {
    /// Returns the index of a pool for a new cache: an unused pool that fits the settings, or a new pool.
    pub(crate) fn pool_index_for(&self, users: &mut Pools, settings: &Builder) -> Result<usize> {
        if settings.source.kind() == MemoryKind::Hugetlb {
            // Returns reserved pages of ended caches that could not be returned earlier. The new cache may need them.
            self.end_reserves(users);
        }
        let reserve = settings.source.take_reserve(settings)?;
        let max_bytes = match &reserve {
            Some(reserve) => reserve.len_bytes() as u64,
            None => ordinary_bytes(settings)?,
        };
        let kind = match settings.source.kind() {
            MemoryKind::Hugetlb if reserve.is_none() => MemoryKind::Private,
            kind => kind,
        };
        let is_free = |cache: &Weak<Inner>| cache.strong_count() == 0;
        let fits = |pool: &Pool| {
            let is_right = match kind {
                MemoryKind::Hugetlb => pool.is_closed() && pool.max_bytes() == max_bytes,
                _ => pool.max_bytes() >= max_bytes,
            };
            is_right && pool.kind() == kind && pool.page == settings.page && pool.is_idle()
        };
        let mut own = self.inherited.load(Relaxed)..users.len();
        let at = match own.find(|at| is_free(&users[*at].1) && fits(users[*at].0)) {
            Some(at) => at,
            None => self.new_pool(users, settings, max_bytes, kind)?,
        };
        if let Some(reserve) = reserve {
            users[at].0.place_hugetlb(reserve)?;
        }
        Ok(at)
    }

    /// Creates a pool of `max_bytes` and adds it to the list of pools. Returns its index there.
    fn new_pool(&self, users: &mut Pools, settings: &Builder, max_bytes: u64, kind: MemoryKind) -> Result<usize> {
        if users.len() == MAX_CACHES {
            return Err(Error::TooMany { what: "page caches", most: MAX_CACHES });
        }
        let pool = Pool::new(self.arena, self.helper, settings.page, max_bytes, self.arena.current_node(), kind)?;
        let _ = self.pools[users.len()].set(pool);
        users.push((pool, Weak::new()));
        Ok(users.len() - 1)
    }

    /// Returns the reserved huge pages of caches that have ended to the system.
    pub(crate) fn end_reserves(&self, users: &Pools) {
        let own = users.iter().skip(self.inherited.load(Relaxed));
        own.filter(|(_, cache)| cache.strong_count() == 0).for_each(|(pool, _)| pool.return_hugetlb());
    }
}

/// Returns the size of a pool of ordinary or shared memory. The size is a power of two, so that similar caches can reuse the
/// addresses. The size is at least 1.5 times the cache's limit, because not all chunks are filled completely.
fn ordinary_bytes(settings: &Builder) -> Result<u64> {
    let chunk_bytes = settings.page.bytes().max(BLOCK_BYTES) as u64;
    let wanted = settings.limit_bytes().saturating_add(settings.limit_bytes() / 2).max(2 * chunk_bytes);
    wanted.checked_next_power_of_two().ok_or(Error::NoAddresses { wanted_bytes: wanted })
}
