//! Dentries: a name and the inode that it leads to, as values of a slab cache.

use crate::inode::InodeHandle;
use pagemill_slab::{Guard, Handle, HandleMap, Movable};
use std::sync::Arc;

pub(crate) type DentryHandle = Handle<Dentry>;
/// Byte strings that are too long for a dentry: names and targets of symbolic links.
pub(crate) type Texts = HandleMap<Arc<[u8]>>;
pub(crate) type TextHandle = Handle<Arc<[u8]>>;

/// Maximum length of a name that lies in the dentry itself. A dentry and the index of its handle take 64 bytes.
pub(crate) const INLINE_BYTES: usize = 47;

/// A name in a directory. A dentry always has the same name and leads to the same inode. A rename makes a new dentry,
/// and so does a new handle of the inode.
#[derive(Clone, Copy, Movable)]
pub(crate) struct Dentry {
    /// Handle of the inode; 0 in a negative dentry, whose name does not exist.
    inode: u64,
    len: u8,
    /// The name, or in a longer name the handle of its text.
    bytes: [u8; INLINE_BYTES],
}

const _: () = assert!(size_of::<Dentry>() + size_of::<u64>() == 64);

impl Dentry {
    /// Makes a dentry. `text` is the name's text if the name is longer than [`INLINE_BYTES`].
    pub fn new(name: &[u8], text: Option<TextHandle>, inode: Option<InodeHandle>) -> Self {
        let mut bytes = [0; INLINE_BYTES];
        match text {
            Some(text) => bytes[..size_of::<u64>()].copy_from_slice(&text.to_bits().to_ne_bytes()),
            None => bytes[..name.len()].copy_from_slice(name),
        }
        Self { inode: inode.map_or(0, Handle::to_bits), len: name.len() as u8, bytes }
    }

    /// Returns a dentry of the same name for another inode.
    pub fn with_inode(&self, inode: InodeHandle) -> Self {
        Self { inode: inode.to_bits(), ..*self }
    }

    pub fn inode(&self) -> Option<InodeHandle> {
        (self.inode != 0).then(|| Handle::from_bits(self.inode))
    }

    /// Returns the text of a long name.
    pub fn text(&self) -> Option<TextHandle> {
        let bits = || u64::from_ne_bytes(*self.bytes.first_chunk().expect("eight of the bytes"));
        (usize::from(self.len) > INLINE_BYTES).then(|| Handle::from_bits(bits()))
    }

    /// Returns the name; `None` if the dentry was removed meanwhile and its text with it.
    #[inline]
    pub fn name<'read>(&'read self, texts: &'read Texts, guard: &'read Guard) -> Option<&'read [u8]> {
        match self.text() {
            None => Some(&self.bytes[..usize::from(self.len)]),
            Some(text) => texts.get(text, guard).map(|text| &**text),
        }
    }

    #[inline]
    pub fn has_name(&self, name: &[u8], texts: &Texts, guard: &Guard) -> bool {
        usize::from(self.len) == name.len() && self.name(texts, guard) == Some(name)
    }
}
