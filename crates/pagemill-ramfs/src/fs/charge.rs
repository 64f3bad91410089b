//! Charges of inodes to the limit of the file system and to quotas.
//!
//! A file is charged one inode for itself and its first name, one for each further name, and one for each KiB of its
//! extended attributes or of its target. So the limit of inodes bounds the memory of all metadata.

use super::Inner;
use crate::error::{Error, Result};
use crate::inode::Inode;
use crate::quota::Domain;
use pagemill_slab::{Handle, enter};
use std::sync::Arc;

/// Bytes of metadata that count as one inode.
const BYTES_PER_INODE: usize = 1024;

impl Inner {
    /// Number of inodes that an inode without further names is charged.
    pub fn inode_charge(&self, inode: &Inode) -> u64 {
        let target = match inode.is_symlink() {
            true => self.texts.get(Handle::from_bits(inode.data), &enter()).map_or(0, |target| target.len()),
            false => 0,
        };
        1 + charge_of_bytes(target) + self.xattr_charge(inode)
    }

    /// Charges `count` inodes for an inode or its metadata; nothing if the file system or a quota has no room.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], [`Error::QuotaExceeded`].
    pub fn charge_inodes(&self, inode: &Inode, count: u64) -> Result<()> {
        self.whole.charge_inodes(count).map_err(|error| match error {
            Error::QuotaExceeded { what, used, limit } => Error::NoSpace { what, used, limit },
            error => error,
        })?;
        let charged = self.domain_above(inode).map_or(Ok(()), |domain| domain.charge_inodes(count));
        charged.inspect_err(|_| _ = self.whole.discharge_inodes(count))
    }

    pub fn discharge_inodes(&self, inode: &Inode, count: u64) {
        self.domain_above(inode).iter().for_each(|domain| self.domains.discharge_inodes(domain, count));
        self.whole.discharge_inodes(count);
    }

    /// Ends the quota of a directory that was freed, if it had one.
    pub fn end_quota_of(&self, inode: &Inode) {
        if self.domains.get(inode.quota).is_some_and(|domain| domain.is_root(inode.ino)) {
            self.domains.end(inode.quota);
        }
    }

    /// Returns the domain that an inode is charged to. A directory with a quota is charged to the domain above.
    fn domain_above(&self, inode: &Inode) -> Option<Arc<Domain>> {
        let domain = self.domains.get(inode.quota)?;
        if domain.is_root(inode.ino) { domain.parent() } else { Some(domain) }
    }
}

/// Number of inodes that are charged for `bytes` of names, values or a target.
pub(super) fn charge_of_bytes(bytes: usize) -> u64 {
    (bytes / BYTES_PER_INODE) as u64
}
