//! Names in directories, as a file system caches them: objects in a cache by owner that refer to each other. One thread
//! changes the entries, while walks read them and defragmentation moves them.
#![allow(unsafe_code)] // an owner of relocatable objects that refer to each other

use std::hint;
use std::iter;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU64};
use std::sync::{Mutex, PoisonError};

use pagemill_slab::{Candidates, Done, Migrate, Moving, OwnerSlab, Settings, SlabCache, Slabs, Target};
use pagemill_xarray as xarray;

use crate::workload::{Failure, ensure};

/// Number of 64-bit words in the name of an entry.
const NAME_WORDS: usize = 5;

/// State of an entry that is not in the directory tree. `construct` makes such an entry.
const STATE_FREE: u64 = 0;
/// State of an entry that is in the directory tree.
const STATE_LIVE: u64 = 1;
/// State of an entry in the directory tree while defragmentation moves it.
const STATE_MOVING: u64 = 2;

/// A directory entry of 192 bytes, the size of a dentry in Linux.
pub struct Dentry {
    /// One of `STATE_FREE`, `STATE_LIVE` and `STATE_MOVING`.
    state: AtomicU64,
    /// Index of this entry in the owner's table.
    number: AtomicU64,
    is_directory: AtomicU64,
    parent: AtomicPtr<Dentry>,
    /// First entry in the list of this directory's entries.
    first: AtomicPtr<Dentry>,
    /// Last entry in the list of this directory's entries.
    last: AtomicPtr<Dentry>,
    /// Previous entry in the list of the parent directory.
    before: AtomicPtr<Dentry>,
    /// Next entry in the list of the parent directory.
    next: AtomicPtr<Dentry>,
    name: [AtomicU64; NAME_WORDS],
    attributes: [AtomicU64; 11],
}

const _: () = assert!(size_of::<Dentry>() == 192);

/// Returns the name for a serial number, as words that compare in the same order as the name's bytes.
fn name_of(serial: u64) -> [u64; NAME_WORDS] {
    let text = format!("{serial:020}.entry");
    let mut bytes = [0; NAME_WORDS * size_of::<u64>()];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    let mut name = [0; NAME_WORDS];
    for (word, bytes) in name.iter_mut().zip(bytes.chunks_exact(size_of::<u64>())) {
        *word = bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
    }
    name
}

/// A checksum of the entries that a walk of the directory tree visited. It depends on their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalkChecksum {
    pub entries: u64,
    pub hash: u64,
}

impl WalkChecksum {
    pub fn add(&mut self, serial: u64) {
        self.add_name(&name_of(serial));
    }

    fn add_name(&mut self, name: &[u64; NAME_WORDS]) {
        self.entries += 1;
        let mixed = name.iter().fold(0, |mixed: u64, word| mixed.rotate_left(23) ^ word);
        self.hash = (self.hash.rotate_left(5) ^ mixed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// The owner of the directory entries. It has the address of each entry by number, and the lock that a thread holds
/// while it changes the references between entries.
pub struct DentryOwner {
    table: Vec<AtomicPtr<Dentry>>,
    change_lock: Mutex<()>,
}

impl DentryOwner {
    fn table_entry(&self, number: u64) -> &AtomicPtr<Dentry> {
        &self.table[number as usize]
    }

    fn with_change_lock<T>(&self, change: impl FnOnce() -> T) -> T {
        let _changing = self.change_lock.lock().unwrap_or_else(PoisonError::into_inner);
        change()
    }

    /// Returns the two references to an entry that its neighbours have: one in the previous entry of the list, one in
    /// the next entry. At the ends of the list, the parent directory has the reference instead. Must be called within
    /// [`Self::with_change_lock`].
    fn referrers<'a>(&self, entry: &'a Dentry) -> (Option<&'a AtomicPtr<Dentry>>, Option<&'a AtomicPtr<Dentry>>) {
        let parent = entry_at(&entry.parent);
        let from_before = entry_at(&entry.before).map(|before| &before.next).or(parent.map(|parent| &parent.first));
        let from_behind = entry_at(&entry.next).map(|next| &next.before).or(parent.map(|parent| &parent.last));
        (from_before, from_behind)
    }
}

/// Returns the entry that a reference points to. The caller must have an epoch guard or be within
/// [`DentryOwner::with_change_lock`], so that the entry stays valid.
fn entry_at<'a>(place: &AtomicPtr<Dentry>) -> Option<&'a Dentry> {
    let dentry = NonNull::new(place.load(Acquire));
    // SAFETY:
    // 1. References point only to objects of the cache, which are constructed.
    // 2. The caller has a guard or changes the tree, so the object's memory is not reused.
    dentry.map(|dentry| unsafe { dentry.as_ref() })
}

// SAFETY:
// 1. A free entry has state STATE_FREE, which `isolate` skips; it needs no destructor.
// 2. `isolate` changes the state of the entries that it keeps to STATE_MOVING, and `DentryTree::remove` frees only
// entries in state STATE_LIVE.
// 3. All references to an entry are in its neighbours and in the table, and one thread at a time changes them. Walks
// follow these references under a guard.
unsafe impl Migrate for DentryOwner {
    type Object = Dentry;
    type Isolated = ();

    fn construct(&self) -> Dentry {
        Dentry {
            state: AtomicU64::new(STATE_FREE),
            number: AtomicU64::default(),
            is_directory: AtomicU64::default(),
            parent: AtomicPtr::default(),
            first: AtomicPtr::default(),
            last: AtomicPtr::default(),
            before: AtomicPtr::default(),
            next: AtomicPtr::default(),
            name: Default::default(),
            attributes: Default::default(),
        }
    }

    fn isolate(&self, objects: &mut Candidates<'_, Dentry>) {
        objects.retain(|dentry| {
            // SAFETY: objects of the cache are always constructed.
            let dentry = unsafe { dentry.as_ref() };
            dentry.state.compare_exchange(STATE_LIVE, STATE_MOVING, AcqRel, Relaxed).is_ok()
        });
    }

    fn migrate<'object>(
        &self,
        object: Moving<'object, Dentry>,
        to: &mut Target<'_, Dentry>,
        (): &mut (),
    ) -> Done<'object> {
        // SAFETY: this is an object of the cache, which is always constructed.
        let old = unsafe { object.object().as_ref() };
        let Some(place) = to.take() else {
            old.state.store(STATE_LIVE, Release);
            return object.failed();
        };
        // SAFETY: this is an object of the cache, which is always constructed.
        let new = unsafe { place.object().as_ref() };
        self.with_change_lock(|| {
            copy_fields(old, new);
            new.state.store(STATE_LIVE, Release);
            let new_at = place.object().as_ptr();
            let (from_before, from_behind) = self.referrers(old);
            from_before.into_iter().chain(from_behind).for_each(|referrer| referrer.store(new_at, Release));
            iter::successors(entry_at(&new.first), |child| entry_at(&child.next))
                .for_each(|child| child.parent.store(new_at, Release));
            self.table_entry(old.number.load(Relaxed)).store(new_at, Release);
            old.state.store(STATE_FREE, Release);
        });
        object.moved(place)
    }
}

fn pointer_fields(Dentry { parent, first, last, before, next, .. }: &Dentry) -> [&AtomicPtr<Dentry>; 5] {
    [parent, first, last, before, next]
}

fn word_fields(dentry: &Dentry) -> impl Iterator<Item = &AtomicU64> {
    [&dentry.number, &dentry.is_directory].into_iter().chain(&dentry.name).chain(&dentry.attributes)
}

fn copy_fields(from: &Dentry, to: &Dentry) {
    pointer_fields(from)
        .into_iter()
        .zip(pointer_fields(to))
        .for_each(|(from, to)| to.store(from.load(Relaxed), Relaxed));
    word_fields(from).zip(word_fields(to)).for_each(|(from, to)| to.store(from.load(Relaxed), Relaxed));
}

/// A tree of directories and files. Entry number 0 is the root directory.
pub struct DentryTree {
    cache: OwnerSlab<DentryOwner>,
    /// The entry numbers that are not in use.
    free: Vec<u64>,
}

impl DentryTree {
    pub fn new(slabs: &'static Slabs, capacity: usize) -> Result<Self, Failure> {
        let table = (0..capacity).map(|_| AtomicPtr::default()).collect();
        let owner = DentryOwner { table, change_lock: Mutex::new(()) };
        let cache = slabs.by_owner(Settings::new("dentries"), owner)?;
        // With this ratio, every partial slab is defragmented. A lower ratio would leave slabs that are half used as
        // they are, and this workload adds and removes directories by halves.
        cache.set_defrag_used_ratio(100)?;
        let mut tree = Self { cache, free: (0..capacity as u64).rev().collect() };
        tree.make_entry(None, 0, true)?;
        Ok(tree)
    }

    /// Appends an entry to a directory and returns the entry's number. The serial number must be larger than those of
    /// all entries in the directory.
    pub fn add(&mut self, parent: u64, serial: u64, is_directory: bool) -> Result<u64, Failure> {
        self.make_entry(Some(parent), serial, is_directory)
    }

    fn make_entry(&mut self, parent: Option<u64>, serial: u64, is_directory: bool) -> Result<u64, Failure> {
        let number = self.free.pop().ok_or("the table of entries is full")?;
        let owner = self.cache.owner();
        let new = self.cache.allocate()?;
        // SAFETY: this is a free object of the cache, which is constructed.
        let dentry = unsafe { new.as_ref() };
        dentry.number.store(number, Relaxed);
        dentry.is_directory.store(u64::from(is_directory), Relaxed);
        dentry.name.iter().zip(name_of(serial)).for_each(|(word, name)| word.store(name, Relaxed));
        [&dentry.first, &dentry.last, &dentry.next].into_iter().for_each(|none| none.store(ptr::null_mut(), Relaxed));
        owner.with_change_lock(|| {
            let parent = parent.and_then(|parent| entry_at(owner.table_entry(parent)));
            let parent_at = parent.map_or(ptr::null_mut(), |parent| ptr::from_ref(parent).cast_mut());
            dentry.parent.store(parent_at, Relaxed);
            let last = parent.map_or(ptr::null_mut(), |parent| parent.last.load(Relaxed));
            dentry.before.store(last, Relaxed);
            let (from_before, from_behind) = owner.referrers(dentry);
            from_before.into_iter().chain(from_behind).for_each(|referrer| referrer.store(new.as_ptr(), Release));
            owner.table_entry(number).store(new.as_ptr(), Release);
            dentry.state.store(STATE_LIVE, Release);
        });
        Ok(number)
    }

    pub fn remove(&mut self, number: u64) -> Result<(), Failure> {
        let owner = self.cache.owner();
        let entry = loop {
            let _guard = xarray::pin();
            let entry = entry_at(owner.table_entry(number));
            let entry = entry.ok_or_else(|| Failure::WrongAnswer(format!("there is no entry {number}")))?;
            if entry.state.compare_exchange(STATE_LIVE, STATE_FREE, AcqRel, Relaxed).is_ok() {
                break entry;
            }
            hint::spin_loop();
        };
        owner.with_change_lock(|| {
            let (from_before, from_behind) = owner.referrers(entry);
            let (before, next) = (entry.before.load(Relaxed), entry.next.load(Relaxed));
            from_before.into_iter().for_each(|referrer| referrer.store(next, Release));
            from_behind.into_iter().for_each(|referrer| referrer.store(before, Release));
            owner.table_entry(number).store(ptr::null_mut(), Release);
        });
        // SAFETY: this thread ended the entry's live state and removed all references to it; `&mut self` excludes
        // walks.
        unsafe { self.cache.free(NonNull::from(entry)) };
        self.free.push(number);
        Ok(())
    }

    /// Walks all directories, and returns a checksum of the entries that it visits. In each directory, it visits the
    /// entries in the order of their names, then the subdirectories.
    pub fn walk(&self) -> Result<WalkChecksum, Failure> {
        let mut sum = WalkChecksum::default();
        self.walk_directory(0, &mut sum)?;
        Ok(sum)
    }

    fn walk_directory(&self, number: u64, sum: &mut WalkChecksum) -> Result<(), Failure> {
        let mut directories = Vec::new();
        {
            // While the guard lives, the old copies of moved entries keep their contents. So references in them stay
            // valid.
            let _guard = xarray::pin();
            let directory = entry_at(self.cache.owner().table_entry(number));
            let directory = directory.ok_or_else(|| Failure::WrongAnswer(format!("there is no directory {number}")))?;
            let mut last = [0; NAME_WORDS];
            for entry in iter::successors(entry_at(&directory.first), |entry| entry_at(&entry.next)) {
                let name = entry.name.each_ref().map(|word| word.load(Relaxed));
                let parent = entry_at(&entry.parent).map(|parent| parent.number.load(Relaxed));
                let is_right = name > last && parent == Some(number);
                ensure(is_right, || format!("an entry is out of its place in directory {number}"))?;
                sum.add_name(&name);
                last = name;
                if entry.is_directory.load(Relaxed) == 1 {
                    directories.push(entry.number.load(Relaxed));
                }
            }
        }
        directories.into_iter().try_for_each(|directory| self.walk_directory(directory, sum))
    }

    pub fn compact(&self) -> Result<(), Failure> {
        self.cache.shrink().map(|_| ()).map_err(Failure::from)
    }

    pub fn moved_count(&self) -> Result<u64, Failure> {
        self.cache.info().map(|info| info.moved).map_err(Failure::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::slab::slabs_of_test;

    /// A walk must visit the entries in order, directory by directory, before and after the entries are moved. It must
    /// not find a removed entry.
    #[test]
    fn entries_are_walked_in_order() {
        let mut tree = DentryTree::new(slabs_of_test().expect("slabs"), 4000).expect("a tree");
        let directory = tree.add(0, 1, true).expect("a directory");
        let files: Vec<u64> = (2..3000).map(|serial| tree.add(directory, serial, false).expect("a file")).collect();
        let inner = tree.add(0, 3000, true).expect("a directory");
        tree.add(inner, 3001, false).expect("a file");
        for number in files.iter().filter(|number| *number % 7 != 0) {
            tree.remove(*number).expect("it is there");
        }
        let mut expected = WalkChecksum::default();
        let left = (2..3000).zip(&files).filter(|(_, number)| *number % 7 == 0).map(|(serial, _)| serial);
        [1, 3000].into_iter().chain(left).chain([3001]).for_each(|serial| expected.add(serial));
        assert_eq!(tree.walk().expect("a walk"), expected);

        tree.compact().expect("packed");

        assert!(tree.moved_count().expect("figures") > 0);
        assert_eq!(tree.walk().expect("a walk"), expected);
        assert!(tree.remove(files[1]).is_err());
    }

    /// Names must compare like their serial numbers, and the checksum must depend on the order of the entries.
    #[test]
    fn checksum_depends_on_the_order() {
        assert!(name_of(9) < name_of(10) && name_of(u64::MAX) > name_of(1 << 40));
        let sum = |serials: [u64; 2]| {
            let mut sum = WalkChecksum::default();
            serials.into_iter().for_each(|serial| sum.add(serial));
            sum
        };
        assert_ne!(sum([1, 2]), sum([2, 1]));
    }
}
