//! Inodes in use: those with open files, and those whose numbers a client has looked up.
//!
//! An inode in use keeps its handle and its data. When its last use ends and it has no name, it is freed.

use crate::file_data::FileData;
use crate::inode::{Ino, InodeHandle};
use crate::range_lock::RangeLocks;
use pagemill_core::sync::{Guarded, Lock, Padded, Relaxed};
use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

/// Number of shards; a power of two.
const SHARDS: usize = 64;

/// An inode in use.
pub(crate) struct Active {
    pub ino: Ino,
    pub inode: InodeHandle,
    /// Data of a regular file, once it has some.
    pub data: OnceLock<Arc<FileData>>,
    /// Held while the file's data or length are changed.
    pub writing: Lock,
    pub range_locks: RangeLocks,
    /// Number of uses: open files and lookups. Changed under the lock of the inode's shard.
    uses: AtomicU64,
}

/// Inode numbers are consecutive, so the number itself is the hash.
#[derive(Default)]
pub(crate) struct InoHasher(u64);

impl std::hash::Hasher for InoHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("only inode numbers are hashed")
    }

    fn write_u64(&mut self, ino: u64) {
        // The low bits choose the shard; the map uses the high bits, too.
        self.0 = (ino / SHARDS as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

type Shard = HashMap<Ino, Arc<Active>, BuildHasherDefault<InoHasher>>;

/// All inodes in use.
pub(crate) struct ActiveInodes(Box<[Padded<Guarded<Shard>>]>);

/// What the end of uses leaves.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Left {
    InUse,
    Unused,
}

impl ActiveInodes {
    pub fn new() -> Self {
        Self((0..SHARDS).map(|_| Padded::default()).collect())
    }

    fn shard(&self, ino: Ino) -> &Guarded<Shard> {
        &self.0[(ino % SHARDS as u64) as usize].0
    }

    /// Returns the handle of the inode with this number if it is in use.
    pub fn handle(&self, ino: Ino) -> Option<InodeHandle> {
        self.shard(ino).with(|shard| shard.get(&ino).map(|active| active.inode))
    }

    /// Begins a use of an inode. `data` is called for an inode that was not in use; it returns the inode's data, or
    /// `None` if the inode does not exist any more.
    pub fn begin(
        &self,
        ino: Ino,
        inode: InodeHandle,
        data: impl FnOnce() -> Option<Option<Arc<FileData>>>,
    ) -> Option<Arc<Active>> {
        self.shard(ino).with(|shard| {
            if let Some(active) = shard.get(&ino) {
                debug_assert_eq!(active.inode, inode, "an inode in use keeps its handle");
                active.uses.fetch_add(1, Relaxed);
                return Some(active.clone());
            }
            let data = data()?.map_or_else(OnceLock::new, OnceLock::from);
            let (writing, range_locks, uses) = (Lock::new(), RangeLocks::default(), AtomicU64::new(1));
            let active = Arc::new(Active { ino, inode, data, writing, range_locks, uses });
            shard.insert(ino, active.clone());
            Some(active)
        })
    }

    /// Begins the first use of a new inode, which has no data.
    pub fn begin_new(&self, ino: Ino, inode: InodeHandle) -> Arc<Active> {
        self.begin(ino, inode, || Some(None)).expect("a new inode exists")
    }

    /// Ends `count` uses of an inode. If they were the last ones, calls `unused` before the inode can be used again.
    pub fn end(&self, ino: Ino, count: u64, unused: impl FnOnce(&Active)) -> Left {
        self.shard(ino).with(|shard| {
            let Some(active) = shard.get(&ino) else { return Left::Unused };
            let uses = active.uses.load(Relaxed);
            debug_assert!(uses >= count, "a use ends once");
            active.uses.store(uses.saturating_sub(count), Relaxed);
            if uses > count {
                return Left::InUse;
            }
            if let Some(active) = shard.remove(&ino) {
                unused(&active);
            }
            Left::Unused
        })
    }

    /// Calls `act` if the inode is not in use. No use begins meanwhile.
    pub fn if_unused<R>(&self, ino: Ino, act: impl FnOnce() -> R) -> Option<R> {
        self.shard(ino).with(|shard| (!shard.contains_key(&ino)).then(act))
    }

    /// Number of inodes in use.
    pub fn count(&self) -> usize {
        self.0.iter().map(|shard| shard.0.with(|shard| shard.len())).sum()
    }
}
