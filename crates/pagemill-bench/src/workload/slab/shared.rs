//! Objects by number, which one thread replaces and changes while another reads them, and a third one moves them.
#![allow(unsafe_code)] // an owner of objects

use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU64};
use std::{hint, thread};

use pagemill::slab::{
    self, ByHandle, ByOwner, Candidates, Done, Guard, Handle, Migrate, Moving, Settings, SlabInfo, Slabs, Target,
};

use crate::workload::Failure;
use crate::workload::hit::failed;

/// 192 bytes.
const WORDS: usize = 24;

/// Where the number of changes is. All other words tell which object it is.
const CHANGES: usize = 1;

/// What is in the words of an object.
fn word_of(number: usize) -> u64 {
    (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Objects of which one thread reads, and another one makes, changes and ends them.
pub trait Objects: Sync {
    /// Makes an object that is not there.
    fn put(&self, number: usize) -> Result<(), Failure>;

    /// Ends one that is there.
    fn remove(&self, number: usize) -> Result<(), Failure>;

    /// Adds a change to one that is there.
    fn change(&self, number: usize) -> Result<(), Failure>;

    /// How many changes an object has had; none where it is not there, and an answer of its own where it is another one.
    fn read(&self, number: usize, guard: &Guard) -> Result<Option<u64>, Wrong>;

    /// Below how many percent of use slabs are emptied.
    fn set_used_ratio(&self, percent: u32) -> Result<(), Failure>;

    fn info(&self) -> Result<SlabInfo, Failure>;
}

/// An object was another one, or was lost.
#[derive(Debug)]
pub struct Wrong;

type Value = [u64; WORDS];

/// Objects by handle.
pub struct Handled {
    cache: ByHandle<Value>,
    /// Handles as numbers. No handle is 0.
    table: Vec<AtomicU64>,
}

impl Handled {
    pub fn new(slabs: &'static Slabs, count: usize) -> Result<Self, Failure> {
        let cache = slabs.by_handle(Settings::new("by handle")).map_err(failed)?;
        Ok(Self { cache, table: (0..count).map(|_| AtomicU64::new(0)).collect() })
    }

    fn handle(&self, number: usize) -> Handle<Value> {
        Handle::from_bits(self.table[number].load(Acquire))
    }
}

fn must(was_there: bool) -> Result<(), Failure> {
    if was_there { Ok(()) } else { Err(Failure::WrongAnswer("an object is not there".to_owned())) }
}

impl Objects for Handled {
    fn put(&self, number: usize) -> Result<(), Failure> {
        let mut value = [word_of(number); WORDS];
        value[CHANGES] = 0;
        let handle = self.cache.insert(value).map_err(failed)?;
        self.table[number].store(handle.to_bits(), Release);
        Ok(())
    }

    fn remove(&self, number: usize) -> Result<(), Failure> {
        let handle = self.handle(number);
        // Who finds a handle here finds its value.
        self.table[number].store(0, Release);
        must(self.cache.remove(handle).map_err(failed)?)
    }

    fn change(&self, number: usize) -> Result<(), Failure> {
        let change = |value: &Value| {
            let mut new = *value;
            new[CHANGES] += 1;
            new
        };
        must(self.cache.update(self.handle(number), change).map_err(failed)?)
    }

    fn read(&self, number: usize, guard: &Guard) -> Result<Option<u64>, Wrong> {
        loop {
            let bits = self.table[number].load(Acquire);
            if bits == 0 {
                return Ok(None);
            }
            match self.cache.get(Handle::from_bits(bits), guard) {
                Some(value) if value[0] == word_of(number) && value[WORDS - 1] == word_of(number) => {
                    return Ok(Some(value[CHANGES]));
                }
                None if self.table[number].load(Acquire) != bits => {}
                _ => return Err(Wrong),
            }
        }
    }

    fn set_used_ratio(&self, percent: u32) -> Result<(), Failure> {
        self.cache.set_defrag_used_ratio(percent).map_err(failed)
    }

    fn info(&self) -> Result<SlabInfo, Failure> {
        self.cache.info().map_err(failed)
    }
}

/// An object of an owner.
///
/// Its state is 0 while it is free, else twice its number and 2, and one more while somebody holds it, who alone may change, move
/// or free it.
pub struct Object {
    state: AtomicU64,
    words: [AtomicU64; WORDS - 1],
}

/// The last word of those.
const LAST: usize = WORDS - 2;

fn state_of(number: usize) -> u64 {
    (number as u64 + 1) << 1
}

const HELD: u64 = 1;

/// Refers to objects by number, and nobody else does.
///
/// # Invariants
///
/// An address in the table is that of an object with this number's state, or about to have it. One is changed by who holds the
/// object that it refers to, or by the one thread that puts objects where there is none.
pub struct Owner {
    table: Vec<AtomicPtr<Object>>,
}

// SAFETY: `isolate` keeps what it could take hold of, which is live, and which nobody else frees or moves meanwhile. Old objects are out of
// the table, and free, before their end is told; who read their address before looks at words that stay as they are until guards
// have gone.
unsafe impl Migrate for Owner {
    type Object = Object;
    type Isolated = ();

    fn construct(&self) -> Object {
        Object { state: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; WORDS - 1] }
    }

    fn isolate(&self, objects: &mut Candidates<'_, Object>) {
        objects.retain(|object| {
            // SAFETY: objects of the cache are constructed.
            let state = unsafe { &object.as_ref().state };
            let seen = state.load(Relaxed);
            let is_live = seen != 0 && seen & HELD == 0;
            is_live && state.compare_exchange(seen, seen | HELD, Acquire, Relaxed).is_ok()
        });
    }

    fn migrate<'object>(
        &self,
        object: Moving<'object, Object>,
        to: &mut Target<'_, Object>,
        (): &mut (),
    ) -> Done<'object> {
        // SAFETY: an object of the cache, which is held.
        let old = unsafe { object.object().as_ref() };
        let live = old.state.load(Relaxed) & !HELD;
        let Some(new) = to.take() else {
            old.state.store(live, Release);
            return object.failed();
        };
        let at = new.object();
        // SAFETY: a free object of the cache.
        let fresh = unsafe { at.as_ref() };
        fresh.words.iter().zip(&old.words).for_each(|(to, from)| to.store(from.load(Relaxed), Relaxed));
        self.table[(live >> 1) as usize - 1].store(at.as_ptr(), Release);
        fresh.state.store(live, Release);
        old.state.store(0, Release);
        object.moved(new)
    }
}

/// Objects that an owner has.
pub struct Owned(ByOwner<Owner>);

/// So often an object that looks like another one is looked at again.
const LOOKS: usize = 100;
/// After so many looks at an object that is held, the processor is left to others.
const SPINS: usize = 1000;

impl Owned {
    pub fn new(slabs: &'static Slabs, count: usize) -> Result<Self, Failure> {
        let owner = Owner { table: (0..count).map(|_| AtomicPtr::default()).collect() };
        Ok(Self(slabs.by_owner(Settings::new("by owner"), owner).map_err(failed)?))
    }

    fn entry(&self, number: usize) -> &AtomicPtr<Object> {
        &self.0.owner().table[number]
    }

    /// Under a guard. Takes hold of an object wherever it is.
    fn hold(&self, number: usize, _guard: &Guard) -> Result<NonNull<Object>, Failure> {
        for spin in 1.. {
            let Some(at) = NonNull::new(self.entry(number).load(Acquire)) else { break };
            // SAFETY: an object of the cache, whose memory stays until guards of now have gone.
            let state = unsafe { &at.as_ref().state };
            let live = state_of(number);
            // Where this is so it is no old one: that was held until it was free.
            if state.compare_exchange_weak(live, live | HELD, Acquire, Relaxed).is_ok() {
                return Ok(at);
            }
            if spin % SPINS == 0 { thread::yield_now() } else { hint::spin_loop() }
        }
        must(false).map(|()| NonNull::dangling())
    }
}

impl Objects for Owned {
    fn put(&self, number: usize) -> Result<(), Failure> {
        let at = self.0.allocate().map_err(failed)?;
        // SAFETY: an object that was taken just now, and was constructed.
        let object = unsafe { at.as_ref() };
        object.words.iter().for_each(|word| word.store(word_of(number), Relaxed));
        object.words[CHANGES].store(0, Relaxed);
        self.entry(number).store(at.as_ptr(), Release);
        // From here on it can be moved.
        object.state.store(state_of(number), Release);
        Ok(())
    }

    fn remove(&self, number: usize) -> Result<(), Failure> {
        let at = self.hold(number, &slab::pin())?;
        self.entry(number).store(ptr::null_mut(), Release);
        // SAFETY: it is held: an object of this cache, and given back once. Nobody refers to it; who reads it still, by an address
        // of before, sees by the table that it is another one's.
        unsafe {
            at.as_ref().state.store(0, Release);
            self.0.free(at);
        }
        Ok(())
    }

    fn change(&self, number: usize) -> Result<(), Failure> {
        let at = self.hold(number, &slab::pin())?;
        // SAFETY: it is held.
        let object = unsafe { at.as_ref() };
        let changes = &object.words[CHANGES];
        changes.store(changes.load(Relaxed) + 1, Relaxed);
        object.state.store(state_of(number), Release);
        Ok(())
    }

    fn read(&self, number: usize, _guard: &Guard) -> Result<Option<u64>, Wrong> {
        for _ in 0..LOOKS {
            let seen = self.entry(number).load(Acquire);
            let Some(at) = NonNull::new(seen) else { return Ok(None) };
            // SAFETY: an object of the cache, whose memory stays until the guard has gone.
            let words = unsafe { &at.as_ref().words };
            let (first, changes, last) =
                (words[0].load(Relaxed), words[CHANGES].load(Relaxed), words[LAST].load(Relaxed));
            // It may have been given back meanwhile, and be another one's; it has moved, or gone, then.
            if first == word_of(number) && last == first {
                return Ok(Some(changes));
            }
        }
        Err(Wrong)
    }

    fn set_used_ratio(&self, percent: u32) -> Result<(), Failure> {
        self.0.set_defrag_used_ratio(percent).map_err(failed)
    }

    fn info(&self) -> Result<SlabInfo, Failure> {
        self.0.info().map_err(failed)
    }
}
