//! Quotas of directories: limits of bytes and inodes below a directory.

use crate::error::{Error, Result};
use crate::inode::Ino;
use pagemill_core::sync::{Guarded, Relaxed};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Limits of everything below a directory.
///
/// ```
/// use pagemill::ramfs::{Quota, RamFs};
///
/// let fs = RamFs::new("shared")?;
/// fs.create_dir("/team")?;
/// fs.set_quota("/team", Quota { bytes: 64 << 10, inodes: 100 })?;
/// fs.write("/team/small", &[1; 1000])?;
/// assert_eq!(fs.write("/team/large", &[1; 100_000]).unwrap_err().errno(), 122); // EDQUOT
/// assert_eq!(fs.quota_usage("/team")?.inodes, 2); // the file exists, with as many bytes as fit
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Bytes of memory of file data, in whole pages.
    pub bytes: u64,
    /// Files, directories and other inodes below the directory. Each further name of a file, and each KiB of a file's
    /// extended attributes (with 96 bytes for each) or of a symbolic link's target, counts as one more.
    pub inodes: u64,
}

/// What is used of a quota.
///
/// Example: [`Quota`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaUsage {
    pub limit: Quota,
    pub bytes: u64,
    pub inodes: u64,
}

/// A quota domain: use and limit of all that lies below a directory. One more domain, without a directory, limits the
/// inodes of the whole file system.
pub(crate) struct Domain {
    /// The domain of the directory above, which is charged, too.
    parent: Option<Arc<Domain>>,
    /// Number of the directory that has the quota.
    root: Ino,
    limit: Quota,
    bytes: AtomicU64,
    inodes: AtomicU64,
    /// The directory was freed. Set under the lock of [`Domains`].
    has_ended: AtomicBool,
}

impl Domain {
    pub fn new(limit: Quota, root: Ino, parent: Option<Arc<Self>>) -> Self {
        let (bytes, inodes, has_ended) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        Self { parent, root, limit, bytes, inodes, has_ended }
    }

    pub fn parent(&self) -> Option<Arc<Self>> {
        self.parent.clone()
    }

    pub fn is_root(&self, ino: Ino) -> bool {
        self.root == ino
    }

    pub fn usage(&self) -> QuotaUsage {
        QuotaUsage { limit: self.limit, bytes: self.bytes.load(Relaxed), inodes: self.inodes.load(Relaxed) }
    }

    /// Charges inodes here and above; nothing if one domain has no room.
    pub fn charge_inodes(&self, count: u64) -> Result<()> {
        charge(&self.inodes, count, self.limit.inodes, "inodes")?;
        let above = self.parent.as_ref().map_or(Ok(()), |parent| parent.charge_inodes(count));
        above.inspect_err(|_| _ = self.inodes.fetch_sub(count, Relaxed))
    }

    /// Ends charges here, not above. Returns whether no inode is charged any more.
    pub fn discharge_inodes(&self, count: u64) -> bool {
        let before = self.inodes.fetch_sub(count, Relaxed);
        debug_assert!(before >= count, "a charged inode is discharged once");
        before == count
    }

    /// Charges bytes here and above; nothing if one domain has no room.
    pub fn charge_bytes(&self, bytes: u64) -> Result<()> {
        charge(&self.bytes, bytes, self.limit.bytes, "bytes")?;
        let above = self.parent.as_ref().map_or(Ok(()), |parent| parent.charge_bytes(bytes));
        above.inspect_err(|_| _ = self.bytes.fetch_sub(bytes, Relaxed))
    }

    /// Charges bytes that are in use already, also above the limits.
    pub fn charge_excess(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
        self.parent.iter().for_each(|parent| parent.charge_excess(bytes));
    }

    pub fn discharge_bytes(&self, bytes: u64) {
        let before = self.bytes.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "charged bytes are discharged once");
        self.parent.iter().for_each(|parent| parent.discharge_bytes(bytes));
    }

    /// Bytes that may still be charged, here and above.
    pub fn room_bytes(&self) -> u64 {
        let own = self.limit.bytes.saturating_sub(self.bytes.load(Relaxed));
        self.parent.as_ref().map_or(own, |parent| own.min(parent.room_bytes()))
    }
}

fn charge(counter: &AtomicU64, more: u64, limit: u64, what: &'static str) -> Result<()> {
    let fits = |used: u64| used.checked_add(more).filter(|sum| *sum <= limit);
    let charged = counter.fetch_update(Relaxed, Relaxed, fits);
    charged.map(|_| ()).map_err(|used| Error::QuotaExceeded { what, used, limit })
}

/// The domains of a file system, by the number that inodes contain. Number 0 means none.
#[derive(Default)]
pub(crate) struct Domains(Guarded<Vec<Option<Arc<Domain>>>>);

impl Domains {
    /// Adds a domain, and returns its number.
    pub fn add(&self, domain: Arc<Domain>) -> u32 {
        self.0.with(|domains| match domains.iter().position(Option::is_none) {
            Some(free) => {
                domains[free] = Some(domain);
                free as u32 + 1
            }
            None => {
                domains.push(Some(domain));
                domains.len() as u32
            }
        })
    }

    #[inline]
    pub fn get(&self, number: u32) -> Option<Arc<Domain>> {
        let at = (number as usize).checked_sub(1)?;
        self.0.with(|domains| domains.get(at).cloned().flatten())
    }

    /// Ends a domain whose directory was freed. It is removed as soon as no inode is charged to it, because files of
    /// the directory may still be open.
    pub fn end(&self, number: u32) {
        let Some(domain) = self.get(number) else { return };
        self.0.with(|domains| {
            domain.has_ended.store(true, Relaxed);
            remove_if_unused(domains, &domain);
        });
    }

    /// Ends charges of inodes in a domain and in those above.
    pub fn discharge_inodes(&self, domain: &Arc<Domain>, count: u64) {
        if domain.discharge_inodes(count) {
            self.0.with(|domains| remove_if_unused(domains, domain));
        }
        domain.parent.iter().for_each(|parent| self.discharge_inodes(parent, count));
    }
}

fn remove_if_unused(domains: &mut [Option<Arc<Domain>>], domain: &Arc<Domain>) {
    if domain.has_ended.load(Relaxed) && domain.inodes.load(Relaxed) == 0 {
        let is_it = |found: &&mut Option<Arc<Domain>>| found.as_ref().is_some_and(|found| Arc::ptr_eq(found, domain));
        domains.iter_mut().find(is_it).into_iter().for_each(|found| *found = None);
    }
}
