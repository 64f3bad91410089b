//! Debug mode: redzones behind objects, poison in free objects, and the callers that allocated and freed each object.
//!
//! Behind each object lie a *redzone*, which also records whether it is free, and the source locations of its last
//! allocation and its last free. Every call checks all of it, without magazines. Damage causes a panic that names these
//! locations.
#![allow(unsafe_code)] // accesses the bytes behind objects, and free objects

use std::panic::Location;

/// The kernel's values, so that a dump looks familiar: redzones of allocated and free objects, a free byte, and the last
/// free byte.
const IN_USE: u64 = 0xcccc_cccc_cccc_cccc;
const FREE: u64 = 0xbbbb_bbbb_bbbb_bbbb;
const POISON: u8 = 0x6b;
const LAST_POISON: u8 = 0xa5;

type CallSite = &'static Location<'static>;

/// The redzone behind an object, and the source locations of its last allocation and free.
#[repr(C)]
struct Trailer {
    redzone: u64,
    taken: Option<CallSite>,
    given: Option<CallSite>,
}

/// # Invariants
///
/// A trailer lies behind each object of the cache, at the next multiple of eight. The owner of an allocated object has
/// exclusive access to both; for a free object, the thread that is about to allocate it has.
pub(super) struct Checks {
    name: String,
    object_bytes: usize,
    /// Free objects of caches with a constructor are not poisoned: they keep their constructed contents.
    is_poisoned: bool,
}

impl Checks {
    pub const TRAILER_BYTES: usize = size_of::<Trailer>();

    pub fn new(name: &str, object_bytes: usize, has_constructor: bool) -> Self {
        Self { name: name.to_owned(), object_bytes, is_poisoned: !has_constructor && object_bytes > 0 }
    }

    fn trailer(&self, object: usize) -> *mut Trailer {
        (object + self.object_bytes.next_multiple_of(size_of::<u64>())) as *mut Trailer
    }

    fn poison(&self, object: usize) {
        if self.is_poisoned {
            let last = self.object_bytes - 1;
            // SAFETY: the object is free, and accessed by this thread alone (type invariant).
            unsafe {
                std::ptr::write_bytes(object as *mut u8, POISON, last);
                std::ptr::write((object + last) as *mut u8, LAST_POISON);
            }
        }
    }

    /// The first byte of a free object that differs from the poison.
    fn damage(&self, object: usize) -> Option<usize> {
        // SAFETY: as in `poison`; all bytes were written there.
        let byte = |at: usize| unsafe { std::ptr::read((object + at) as *const u8) };
        let expected = |at: usize| if at + 1 == self.object_bytes { LAST_POISON } else { POISON };
        let mut bytes = if self.is_poisoned { 0..self.object_bytes } else { 0..0 };
        bytes.find(|at| byte(*at) != expected(*at))
    }

    /// Initializes the trailer and poison of an object in a new slab.
    pub fn note_new(&self, object: usize) {
        let trailer = Trailer { redzone: FREE, taken: None, given: None };
        // SAFETY: the slab is claimed, so the object is free (type invariant).
        unsafe { self.trailer(object).write(trailer) };
        self.poison(object);
    }

    /// Records an allocation.
    ///
    /// # Panics
    ///
    /// If the redzone or the poison was overwritten while the object was free.
    #[track_caller]
    pub fn note_taken(&self, object: usize) {
        // SAFETY: no other thread has allocated it (type invariant).
        let trailer = unsafe { &mut *self.trailer(object) };
        if trailer.redzone != FREE {
            self.report(object, trailer, "was written behind while it was free");
        }
        if let Some(at) = self.damage(object) {
            self.report(object, trailer, &format!("was written at byte {at} while it was free"));
        }
        trailer.redzone = IN_USE;
        trailer.taken = Some(Location::caller());
    }

    /// Records that an object is about to be freed.
    ///
    /// # Panics
    ///
    /// If it is free already, or its redzone was overwritten.
    #[track_caller]
    pub fn note_given(&self, object: usize) {
        // SAFETY: the caller owns it (type invariant). If it does not, this check reports that, in the worst case with a
        // wrong location.
        let trailer = unsafe { &mut *self.trailer(object) };
        match trailer.redzone {
            IN_USE => {}
            FREE => self.report(object, trailer, "was freed twice"),
            _ => self.report(object, trailer, "was written behind its end"),
        }
        trailer.redzone = FREE;
        trailer.given = Some(Location::caller());
        self.poison(object);
    }

    #[cold]
    #[track_caller]
    fn report(&self, object: usize, trailer: &Trailer, what: &str) -> ! {
        let place = |place: Option<CallSite>| place.map_or("nowhere".to_owned(), ToString::to_string);
        panic!(
            "slab cache {}: the object at {object:#x} {what} (taken at {}, given at {})",
            self.name,
            place(trailer.taken),
            place(trailer.given)
        );
    }
}
