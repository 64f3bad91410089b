//! Objects that are found by number. One thread replaces and changes them, another thread reads them, and a third
//! thread moves them.
#![allow(unsafe_code)] // an owner of objects

use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU64};
use std::{hint, thread};

use pagemill_slab as slab;
use pagemill_slab::{Guard, Handle, HandleMap, OwnerSlab, Settings, SlabCache, Slabs};

use super::owner_store::{AddressTable, HELD_BIT};
use crate::workload::{Failure, ensure};

/// Number of words in an object of 192 bytes.
const WORDS: usize = 24;

/// Index of the word that counts the changes of an object. All other words identify the object.
const CHANGES_WORD: usize = 1;

/// Returns the value of the words that identify the object with this number.
fn word_of(number: usize) -> u64 {
    (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A set of numbered objects. One thread makes, changes and frees objects while another thread reads them.
pub trait SharedObjects: Sync {
    /// Makes the object with this number, which must not exist yet.
    fn put(&self, number: usize) -> Result<(), Failure>;

    /// Frees the object with this number, which must exist.
    fn remove(&self, number: usize) -> Result<(), Failure>;

    /// Increments the number of changes in the object with this number, which must exist.
    fn change(&self, number: usize) -> Result<(), Failure>;

    /// Returns the number of changes that the object with this number has counted. Returns none if the object does not
    /// exist, and [`WrongObject`] if the words that were read belong to another object.
    fn read(&self, number: usize, guard: &Guard) -> Result<Option<u64>, WrongObject>;

    fn cache(&self) -> &dyn SlabCache;
}

/// The error that the words of another object were read, or that an object was lost.
#[derive(Debug)]
pub struct WrongObject;

type Value = [u64; WORDS];

/// Objects in a slab cache whose values are accessed by handle.
pub struct HandleObjects {
    cache: HandleMap<Value>,
    /// The bits of each object's handle, by object number; 0, which is no handle, if the object does not exist.
    table: Vec<AtomicU64>,
}

impl HandleObjects {
    pub fn new(slabs: &'static Slabs, count: usize) -> Result<Self, Failure> {
        let cache = slabs.by_handle(Settings::new("by handle"))?;
        Ok(Self { cache, table: (0..count).map(|_| AtomicU64::new(0)).collect() })
    }

    fn handle(&self, number: usize) -> Handle<Value> {
        Handle::from_bits(self.table[number].load(Acquire))
    }
}

/// Returns the state of the object with this number while no thread holds the object.
fn state_of(number: usize) -> u64 {
    number as u64 + 1
}

fn check_existed(was_there: bool) -> Result<(), Failure> {
    ensure(was_there, || "an object is not there")
}

impl SharedObjects for HandleObjects {
    fn put(&self, number: usize) -> Result<(), Failure> {
        let mut value = [word_of(number); WORDS];
        value[CHANGES_WORD] = 0;
        let handle = self.cache.insert(value)?;
        self.table[number].store(handle.to_bits(), Release);
        Ok(())
    }

    fn remove(&self, number: usize) -> Result<(), Failure> {
        let handle = self.handle(number);
        // The table entry is cleared first, so that a reader that finds a handle in the table finds its value.
        self.table[number].store(0, Release);
        check_existed(self.cache.remove(handle)?.is_some())
    }

    fn change(&self, number: usize) -> Result<(), Failure> {
        let change = |value: &Value| {
            let mut new = *value;
            new[CHANGES_WORD] += 1;
            new
        };
        check_existed(self.cache.update(self.handle(number), change)?)
    }

    fn read(&self, number: usize, guard: &Guard) -> Result<Option<u64>, WrongObject> {
        loop {
            let bits = self.table[number].load(Acquire);
            if bits == 0 {
                return Ok(None);
            }
            match self.cache.get(Handle::from_bits(bits), guard) {
                Some(value) if value[0] == word_of(number) && value[WORDS - 1] == word_of(number) => {
                    return Ok(Some(value[CHANGES_WORD]));
                }
                None if self.table[number].load(Acquire) != bits => {}
                _ => return Err(WrongObject),
            }
        }
    }

    fn cache(&self) -> &dyn SlabCache {
        &self.cache
    }
}

/// Index of the last word in the contents of an object.
const LAST_WORD: usize = WORDS - 2;

type Object = super::owner_store::Object<WORDS>;

/// Objects in a slab cache whose objects are moved by their owner.
pub struct OwnerObjects(OwnerSlab<AddressTable<WORDS>>);

/// Number of attempts to read an object after the words of another object were found at its address.
const READ_ATTEMPTS: usize = 100;
/// Number of attempts to hold an object after which the thread yields the CPU.
const SPINS_BEFORE_YIELD: usize = 1000;

impl OwnerObjects {
    pub fn new(slabs: &'static Slabs, count: usize) -> Result<Self, Failure> {
        slabs.by_owner(Settings::new("by owner"), AddressTable::new(count)).map(Self).map_err(Failure::from)
    }

    fn entry(&self, number: usize) -> &AtomicPtr<Object> {
        self.0.owner().table_entry(number as u64)
    }

    /// Holds an object at its current address, so that no other thread moves or frees the object. The guard prevents
    /// the reuse of the object's memory.
    fn hold(&self, number: usize, _guard: &Guard) -> Result<NonNull<Object>, Failure> {
        for spin in 1.. {
            let Some(at) = NonNull::new(self.entry(number).load(Acquire)) else { break };
            // SAFETY: this is an object of the cache, whose memory is not reused while current guards live.
            let object = unsafe { at.as_ref() };
            let live = state_of(number);
            // If the exchange succeeds, the address is current: a moved object stays held until it is free.
            if object.change_state(live, live | HELD_BIT) {
                return Ok(at);
            }
            if spin % SPINS_BEFORE_YIELD == 0 { thread::yield_now() } else { hint::spin_loop() }
        }
        check_existed(false).map(|()| NonNull::dangling())
    }
}

impl SharedObjects for OwnerObjects {
    fn put(&self, number: usize) -> Result<(), Failure> {
        let at = self.0.allocate()?;
        // SAFETY: the object was just allocated, and `construct` has initialized it.
        let object = unsafe { at.as_ref() };
        object.contents().iter().for_each(|word| word.store(word_of(number), Relaxed));
        object.contents()[CHANGES_WORD].store(0, Relaxed);
        self.entry(number).store(at.as_ptr(), Release);
        // After this store, the object can be moved.
        object.state().store(state_of(number), Release);
        Ok(())
    }

    fn remove(&self, number: usize) -> Result<(), Failure> {
        let at = self.hold(number, &slab::enter())?;
        self.entry(number).store(ptr::null_mut(), Release);
        // SAFETY: the object is held, nothing in the table refers to it, and it is freed once. A reader with its
        // address detects by the words that it belongs to another number.
        unsafe {
            at.as_ref().state().store(0, Release);
            self.0.free(at);
        }
        Ok(())
    }

    fn change(&self, number: usize) -> Result<(), Failure> {
        let at = self.hold(number, &slab::enter())?;
        // SAFETY: this thread holds the object.
        let object = unsafe { at.as_ref() };
        let changes = &object.contents()[CHANGES_WORD];
        changes.store(changes.load(Relaxed) + 1, Relaxed);
        object.state().store(state_of(number), Release);
        Ok(())
    }

    fn read(&self, number: usize, _guard: &Guard) -> Result<Option<u64>, WrongObject> {
        for _ in 0..READ_ATTEMPTS {
            let seen = self.entry(number).load(Acquire);
            let Some(at) = NonNull::new(seen) else { return Ok(None) };
            // SAFETY: this is an object of the cache, whose memory is not reused while the guard lives.
            let words = unsafe { at.as_ref() }.contents();
            let (first, changes, last) =
                (words[0].load(Relaxed), words[CHANGES_WORD].load(Relaxed), words[LAST_WORD].load(Relaxed));
            // If the words differ, the object was moved, or was freed and reused, after its address was read.
            if first == word_of(number) && last == first {
                return Ok(Some(changes));
            }
        }
        Err(WrongObject)
    }

    fn cache(&self) -> &dyn SlabCache {
        &self.0
    }
}
