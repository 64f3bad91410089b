//! Objects in a slab cache whose objects are moved by their owner. The owner is a table that maps each number to its
//! object. Only the table refers to the objects.
#![allow(unsafe_code)] // an owner of relocatable objects

use std::hint;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU64};

use pagemill_slab::{Candidates, Done, Migrate, Moving, OwnerSlab, Settings, SlabCache, Slabs, Target};
use pagemill_xarray as xarray;

use super::object_stores::ObjectStore;
use crate::workload::Failure;

/// Bit of an object's state that is set while a thread *holds* the object. While it is set, only that thread may change,
/// move or free the object.
pub const HELD_BIT: u64 = 1 << 63;

/// An object of the slab cache. Its first word is its state: 0 while the object is free, otherwise its number plus one,
/// with the bit [`HELD_BIT`] set during a move. The other words are its contents.
pub struct Object<const WORDS: usize>([AtomicU64; WORDS]);

impl<const WORDS: usize> Object<WORDS> {
    pub fn state(&self) -> &AtomicU64 {
        &self.0[0]
    }

    pub fn contents(&self) -> &[AtomicU64] {
        &self.0[1..]
    }

    /// Changes the object's state from `from` to `to`. Returns `false` if the state is not `from`, for example during a
    /// move.
    pub fn change_state(&self, from: u64, to: u64) -> bool {
        self.state().compare_exchange(from, to, AcqRel, Relaxed).is_ok()
    }
}

/// The owner of the objects: a table of their addresses, by object number.
pub struct AddressTable<const WORDS: usize>(Vec<AtomicPtr<Object<WORDS>>>);

impl<const WORDS: usize> AddressTable<WORDS> {
    /// Makes a table for objects with numbers below `count`. All pages of the table become resident.
    pub fn new(count: usize) -> Self {
        let places: Vec<_> = (0..count).map(|_| AtomicPtr::default()).collect();
        let table = hint::black_box(Self(places));
        table.0.iter().for_each(|place| place.store(ptr::null_mut(), Relaxed));
        table
    }

    pub fn table_entry(&self, number: u64) -> &AtomicPtr<Object<WORDS>> {
        &self.0[number as usize]
    }
}

// SAFETY:
// 1. A free object has state 0, which `isolate` skips; it needs no destructor.
// 2. `isolate` keeps only objects that it could hold, and a thread frees only an object that it holds or that no thread
// holds (`OwnerStore::free_object`, `OwnerObjects::remove`).
// 3. The table has the new address before the old object is free. Users read addresses from the table, under a guard.
unsafe impl<const WORDS: usize> Migrate for AddressTable<WORDS> {
    type Object = Object<WORDS>;
    type Isolated = ();

    fn construct(&self) -> Object<WORDS> {
        Object([const { AtomicU64::new(0) }; WORDS])
    }

    fn isolate(&self, objects: &mut Candidates<'_, Object<WORDS>>) {
        objects.retain(|object| {
            // SAFETY: objects of the cache are always constructed.
            let object = unsafe { object.as_ref() };
            let state = object.state().load(Relaxed);
            let is_live = state != 0 && state & HELD_BIT == 0;
            is_live && object.change_state(state, state | HELD_BIT)
        });
    }

    fn migrate<'object>(
        &self,
        object: Moving<'object, Object<WORDS>>,
        to: &mut Target<'_, Object<WORDS>>,
        (): &mut (),
    ) -> Done<'object> {
        // SAFETY: this is an object of the cache, which is always constructed.
        let from = unsafe { object.object().as_ref() };
        let state = from.state().load(Relaxed) & !HELD_BIT;
        let Some(new) = to.take() else {
            from.state().store(state, Release);
            return object.failed();
        };
        // SAFETY: this is an object of the cache, which is always constructed.
        let to = unsafe { new.object().as_ref() };
        from.contents().iter().zip(to.contents()).for_each(|(from, to)| to.store(from.load(Relaxed), Relaxed));
        // The new object is held until the table has its address.
        to.state().store(state | HELD_BIT, Release);
        self.table_entry(state - 1).store(new.object().as_ptr(), Release);
        to.state().store(state, Release);
        from.state().store(0, Release);
        object.moved(new)
    }
}

/// A slab cache whose objects are moved by their owner, an [`AddressTable`]. The workload refers to an object by its
/// number.
pub struct OwnerStore<const WORDS: usize>(OwnerSlab<AddressTable<WORDS>>);

impl<const WORDS: usize> OwnerStore<WORDS> {
    pub fn new(slabs: &'static Slabs, table: AddressTable<WORDS>) -> Result<Self, Failure> {
        slabs.by_owner(Settings::new("by owner"), table).map(Self).map_err(Failure::from)
    }
}

impl<const WORDS: usize> ObjectStore<WORDS> for OwnerStore<WORDS> {
    type Reference = u64;

    #[inline]
    fn make_object(&self, number: u64) -> Result<u64, Failure> {
        let object = self.0.allocate()?;
        // SAFETY: this is a free object of the cache, which is constructed.
        let new = unsafe { object.as_ref() };
        new.contents().iter().for_each(|word| word.store(number, Relaxed));
        self.0.owner().table_entry(number).store(object.as_ptr(), Release);
        new.state().store(number + 1, Release);
        Ok(number)
    }

    #[inline]
    fn free_object(&self, number: u64) -> Result<(), Failure> {
        loop {
            let _guard = xarray::pin();
            let place = self.0.owner().table_entry(number);
            let object = NonNull::new(place.load(Acquire));
            let object = object.ok_or_else(|| Failure::WrongAnswer(format!("object {number} is not there")))?;
            // SAFETY: this is an object of the cache. Under the guard its memory is not reused, even if it is moved.
            if unsafe { object.as_ref() }.change_state(number + 1, 0) {
                place.store(ptr::null_mut(), Relaxed);
                // SAFETY: the object was live and not being moved, and this thread changed its state to free.
                unsafe { self.0.free(object) };
                return Ok(());
            }
            hint::spin_loop();
        }
    }

    fn has_number(&self, number: &u64, expected: u64) -> bool {
        let _guard = xarray::pin();
        let place = self.0.owner().table_entry(*number);
        loop {
            let at = place.load(Acquire);
            // SAFETY: this is an object of the cache. Under the guard its memory is not reused, even if it is moved.
            let Some(object) = NonNull::new(at).map(|object| unsafe { object.as_ref() }) else { return false };
            let state = object.state().load(Acquire) & !HELD_BIT;
            if state == 0 && place.load(Acquire) != at {
                continue;
            }
            return state == expected + 1 && object.contents().iter().all(|word| word.load(Relaxed) == expected);
        }
    }

    fn movable_cache(&self) -> Option<&dyn SlabCache> {
        Some(&self.0)
    }
}
