//! Quotas of directories: limits of bytes and inodes below a directory.

use crate::error::{Error, Result};
use crate::inode::Ino;
use pagemill_core::sync::{Guarded, Relaxed};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

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
    /// Files, directories and other inodes below the directory.
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

/// Use and limit of bytes and inodes. The file system itself has one for its inodes.
pub(crate) struct Domain {
    /// The domain of the directory above, which is charged, too.
    parent: Option<Arc<Domain>>,
    /// Number of the directory that has the quota.
    root: Ino,
    limit: Quota,
    bytes: AtomicU64,
    inodes: AtomicU64,
}

impl Domain {
    pub fn new(limit: Quota, root: Ino, parent: Option<Arc<Self>>) -> Self {
        Self { parent, root, limit, bytes: AtomicU64::new(0), inodes: AtomicU64::new(0) }
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

    /// Charges an inode here and above; nothing if one domain has no room.
    pub fn charge_inode(&self) -> Result<()> {
        charge(&self.inodes, 1, self.limit.inodes, "inodes")?;
        let above = self.parent.as_ref().map_or(Ok(()), |parent| parent.charge_inode());
        above.inspect_err(|_| _ = self.inodes.fetch_sub(1, Relaxed))
    }

    pub fn discharge_inode(&self) {
        let before = self.inodes.fetch_sub(1, Relaxed);
        debug_assert!(before > 0, "a charged inode is discharged once");
        self.parent.iter().for_each(|parent| parent.discharge_inode());
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

    /// Removes a domain that no inode refers to.
    pub fn remove(&self, number: u32) {
        if let Some(at) = (number as usize).checked_sub(1) {
            self.0.with(|domains| domains[at] = None);
        }
    }
}
