//! Extended attributes: of the namespaces `user`, `trusted` and `security`.

use super::Inner;
use super::charge::charge_of_bytes;
use crate::access::{Access, Caller};
use crate::error::{Error, Result};
use crate::inode::{Inode, InodeHandle};
use crate::watch::EventKind;
use pagemill_slab::{Handle, enter};
use std::collections::BTreeMap;
use std::sync::Arc;

const MAX_NAME_BYTES: usize = 255;
/// Maximum length of a value, as in Linux.
const MAX_VALUE_BYTES: usize = 64 << 10;
/// Maximum length of all names of an inode, and of all names and values together.
const MAX_LIST_BYTES: usize = 64 << 10;
const MAX_TOTAL_BYTES: usize = 1 << 20;

/// The extended attributes of an inode. Never changed; a change makes a new set.
pub(crate) type XattrSet = BTreeMap<Box<[u8]>, Box<[u8]>>;

/// Whether [`crate::RamFs::set_xattr`] creates or replaces an attribute.
///
/// Example: [`crate::RamFs::set_xattr`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SetXattr {
    #[default]
    Either,
    /// Fails if the attribute exists (`XATTR_CREATE`).
    Create,
    /// Fails if it does not exist (`XATTR_REPLACE`).
    Replace,
}

/// Checks that the caller may access an attribute of this name. `wanted` is the permission for the namespace `user`.
fn check_name(name: &[u8], inode: &Inode, wanted: Access, caller: &Caller) -> Result<()> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Error::NameTooLong { len_bytes: name.len(), most_bytes: MAX_NAME_BYTES });
    }
    let is_change = wanted == Access::WRITE;
    let inside = |prefix: &[u8]| name.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty());
    if name.contains(&0) {
        Err(Error::Invalid { what: "an attribute's name with a zero byte" })
    } else if inside(b"user.") {
        if !inode.is_regular() && !inode.is_directory() {
            return Err(match is_change {
                true => Error::NotPermitted { what: "only files and directories have attributes of users" },
                false => Error::NoAttribute,
            });
        }
        if is_change && inode.is_directory() && inode.mode & libc::S_ISVTX != 0 {
            caller.check_owner(inode)?;
        }
        caller.check(inode, wanted)
    } else if inside(b"trusted.") {
        match (caller.is_privileged(), is_change) {
            (true, _) => Ok(()),
            (false, true) => Err(Error::NotPermitted { what: "trusted attributes" }),
            (false, false) => Err(Error::NoAttribute),
        }
    } else if inside(b"security.") {
        match caller.is_privileged() || !is_change {
            true => Ok(()),
            false => Err(Error::NotPermitted { what: "security attributes" }),
        }
    } else if [&b"user."[..], b"trusted.", b"security."].contains(&name) {
        Err(Error::Invalid { what: "an attribute without a name" })
    } else {
        Err(Error::Unsupported { what: "attributes outside of user, trusted and security" })
    }
}

fn list_bytes(set: &XattrSet) -> usize {
    set.keys().map(|name| name.len() + 1).sum()
}

fn total_bytes(set: &XattrSet) -> usize {
    list_bytes(set) + set.values().map(|value| value.len()).sum::<usize>()
}

fn charge_of(set: &XattrSet) -> u64 {
    /// Memory of an attribute beside its bytes: two boxes, and a place in the tree.
    const OTHER_BYTES: usize = 96;
    charge_of_bytes(total_bytes(set) + set.len() * OTHER_BYTES)
}

impl Inner {
    fn xattr_set(&self, inode: &Inode) -> Option<Arc<XattrSet>> {
        (inode.xattrs != 0).then(|| self.xattrs.get(Handle::from_bits(inode.xattrs), &enter()).cloned()).flatten()
    }

    /// Number of inodes that are charged for the attributes of an inode.
    pub fn xattr_charge(&self, inode: &Inode) -> u64 {
        self.xattr_set(inode).map_or(0, |set| charge_of(&set))
    }

    /// Returns the value of an attribute.
    pub fn get_xattr(&self, handle: InodeHandle, name: &[u8], caller: &Caller) -> Result<Vec<u8>> {
        let inode = self.inode(handle)?;
        check_name(name, &inode, Access::READ, caller)?;
        let set = self.xattr_set(&inode).ok_or(Error::NoAttribute)?;
        set.get(name).map(|value| value.to_vec()).ok_or(Error::NoAttribute)
    }

    /// Returns the names of all attributes that the caller may see.
    pub fn list_xattrs(&self, handle: InodeHandle, caller: &Caller) -> Result<Vec<Vec<u8>>> {
        let Some(set) = self.xattr_set(&self.inode(handle)?) else { return Ok(Vec::new()) };
        let is_seen = |name: &[u8]| caller.is_privileged() || !name.starts_with(b"trusted.");
        Ok(set.keys().filter(|name| is_seen(name)).map(|name| name.to_vec()).collect())
    }

    /// Sets an attribute.
    pub fn set_xattr(
        &self,
        handle: InodeHandle,
        name: &[u8],
        value: &[u8],
        how: SetXattr,
        caller: &Caller,
    ) -> Result<()> {
        if value.len() > MAX_VALUE_BYTES {
            return Err(Error::AttributeTooLarge { len_bytes: value.len(), most_bytes: MAX_VALUE_BYTES });
        }
        self.change_xattrs(handle, name, caller, |set| {
            match (how, set.contains_key(name)) {
                (SetXattr::Create, true) => return Err(Error::Exists),
                (SetXattr::Replace, false) => return Err(Error::NoAttribute),
                _ => set.insert(Box::from(name), Box::from(value)),
            };
            for (len_bytes, most_bytes) in [(list_bytes(set), MAX_LIST_BYTES), (total_bytes(set), MAX_TOTAL_BYTES)] {
                if len_bytes > most_bytes {
                    return Err(Error::AttributeTooLarge { len_bytes, most_bytes });
                }
            }
            Ok(())
        })
    }

    /// Removes an attribute.
    pub fn remove_xattr(&self, handle: InodeHandle, name: &[u8], caller: &Caller) -> Result<()> {
        self.change_xattrs(handle, name, caller, |set| set.remove(name).map(drop).ok_or(Error::NoAttribute))
    }

    fn change_xattrs(
        &self,
        handle: InodeHandle,
        name: &[u8],
        caller: &Caller,
        change: impl FnOnce(&mut XattrSet) -> Result<()>,
    ) -> Result<()> {
        let ino = self.inode(handle)?.ino;
        let _locked = self.locks.lock([ino]);
        let inode = self.inode(handle)?;
        check_name(name, &inode, Access::WRITE, caller)?;
        let mut set = self.xattr_set(&inode).map_or_else(XattrSet::new, |set| (*set).clone());
        let before = charge_of(&set);
        change(&mut set)?;
        let after = charge_of(&set);
        self.charge_inodes(&inode, after.saturating_sub(before))?;
        let replaced = self.replace_xattr_set(handle, &inode, set);
        replaced.inspect_err(|_| self.discharge_inodes(&inode, after.saturating_sub(before)))?;
        self.discharge_inodes(&inode, before.saturating_sub(after));
        self.watches.notify(EventKind::Attributes, ino, b"");
        Ok(())
    }

    fn replace_xattr_set(&self, handle: InodeHandle, inode: &Inode, set: XattrSet) -> Result<()> {
        let new = match set.is_empty() {
            true => None,
            false => Some(self.xattrs.insert(Arc::new(set))?),
        };
        let now_ns = self.clock.now_ns();
        let bits = new.map_or(0, Handle::to_bits);
        let updated = self.update_inode(handle, |old| Inode { xattrs: bits, changed_ns: now_ns, ..*old });
        updated.inspect_err(|_| _ = new.map(|new| self.xattrs.remove(new)))?;
        if inode.xattrs != 0 {
            let _ = self.xattrs.remove(Handle::from_bits(inode.xattrs));
        }
        Ok(())
    }
}
