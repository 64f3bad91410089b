//! The memory that caches use: ordinary memory, or huge pages that the administrator reserved.

use crate::folio::Pool;
use crate::mapping::cache::config::Builder;
use crate::mapping::cache::{Caches, Inner, MAX_CACHES};
use pagemill_core::arena::Reserve;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::Relaxed;
use pagemill_core::units::BLOCK_BYTES;
use std::sync::Weak;

/// The kind of memory that a cache uses.
///
/// Example: [`Builder`](crate::mapping::Builder).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Memory of the process, charged to its limit. Uses huge pages as far as the kernel provides them.
    #[default]
    Ordinary,
    /// Huge pages that the administrator has reserved (hugetlb, `/proc/sys/vm/nr_hugepages`). At its creation the cache
    /// takes enough pages for its limit, and one more to move folios; the cache keeps these pages until it ends. Folios
    /// are never split, as if [`Builder::split`] were false. The pages count against no memory limit. If too few are
    /// free, the cache is not created ([`Error::NoHugetlb`]).
    Hugetlb,
    /// As `Hugetlb` if enough pages are free, else [`Source::Ordinary`]. [`Usage::is_hugetlb`] reports which one.
    ///
    /// [`Usage::is_hugetlb`]: crate::mapping::Usage::is_hugetlb
    TryHugetlb,
}

/// The pools, each with its current cache.
type Pools = Vec<(&'static Pool, Weak<Inner>)>;

impl Source {
    /// Takes reserved huge pages for a new cache. Returns `None` if the cache uses ordinary memory.
    fn take_reserve(self, settings: &Builder) -> Result<Option<Reserve>> {
        if !cfg!(feature = "hugetlb") || self == Self::Ordinary {
            return Ok(None);
        }
        let chunk_bytes = settings.page.bytes().max(BLOCK_BYTES) as u64;
        let limit_bytes = settings.limit_bytes();
        let bytes = limit_bytes.checked_next_multiple_of(chunk_bytes).and_then(|bytes| bytes.checked_add(chunk_bytes));
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
        let taken = bytes.ok_or(Error::NoAddresses { wanted_bytes: limit_bytes }).and_then(Reserve::take);
        match taken {
            Ok(reserve) => Ok(Some(reserve)),
            Err(error) if self == Self::Hugetlb => Err(error),
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
        if settings.source != Source::Ordinary {
            // Returns reserved pages of ended caches that could not be returned earlier. The new cache may need them.
            self.end_reserves(users);
        }
        let reserve = settings.source.take_reserve(settings)?;
        let max_bytes = match &reserve {
            Some(reserve) => reserve.len_bytes() as u64,
            None => ordinary_bytes(settings)?,
        };
        let is_free = |cache: &Weak<Inner>| cache.strong_count() == 0;
        let fits = |pool: &Pool| {
            let is_right = match &reserve {
                Some(_) => pool.is_closed() && pool.max_bytes() == max_bytes,
                None => !pool.is_hugetlb() && pool.max_bytes() >= max_bytes,
            };
            is_right && pool.page == settings.page && pool.is_idle()
        };
        let mut own = self.inherited.load(Relaxed)..users.len();
        let at = match own.find(|at| is_free(&users[*at].1) && fits(users[*at].0)) {
            Some(at) => at,
            None => self.new_pool(users, settings, max_bytes, reserve.is_some())?,
        };
        if let Some(reserve) = reserve {
            users[at].0.place_hugetlb(reserve)?;
        }
        Ok(at)
    }

    /// Creates a pool of `max_bytes` and adds it to the list of pools. Returns its index there.
    fn new_pool(&self, users: &mut Pools, settings: &Builder, max_bytes: u64, is_hugetlb: bool) -> Result<usize> {
        if users.len() == MAX_CACHES {
            return Err(Error::TooMany { what: "page caches", most: MAX_CACHES });
        }
        let pool = Pool::new(self.arena, self.helper, settings.page, max_bytes, self.arena.current_node(), is_hugetlb)?;
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

/// Returns the size of a pool of ordinary memory. The size is a power of two, so that similar caches can reuse the
/// addresses. The size is at least 1.5 times the cache's limit, because not all chunks are filled completely.
fn ordinary_bytes(settings: &Builder) -> Result<u64> {
    let chunk_bytes = settings.page.bytes().max(BLOCK_BYTES) as u64;
    let wanted = settings.limit_bytes().saturating_add(settings.limit_bytes() / 2).max(2 * chunk_bytes);
    wanted.checked_next_power_of_two().ok_or(Error::NoAddresses { wanted_bytes: wanted })
}
