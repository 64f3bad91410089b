//! Debug mode: detects writes outside of allocated objects and double frees. Debug mode uses redzones, poison, and the
//! recorded callers of each allocation and free.
//!
//! A trailer follows each object. The trailer consists of a *redzone* word and the source locations of the last
//! allocation and the last free. The value of the redzone also shows whether the object is free. Every allocation and
//! free checks the trailer and the poison of free objects. Magazines are not used. Damage causes a panic that names the
//! source locations of the last allocation and free.
#![allow(unsafe_code)] // accesses free objects and the bytes after objects

use std::panic::Location;

/// Redzone of an allocated object. The redzones and poison bytes have the values of Linux's slab allocator, so that a
/// memory dump looks familiar.
const IN_USE_REDZONE: u64 = 0xcccc_cccc_cccc_cccc;
/// Redzone of a free object.
const FREE_REDZONE: u64 = 0xbbbb_bbbb_bbbb_bbbb;
/// Poison: value of each byte of a free object, except the last byte.
const POISON_BYTE: u8 = 0x6b;
/// Poison: value of the last byte of a free object.
const LAST_POISON_BYTE: u8 = 0xa5;

/// Source location of a call, as a static reference.
type CallSite = &'static Location<'static>;

/// Data behind an object in memory: its redzone, and the source locations of its last allocation and free.
#[repr(C)]
struct Trailer {
    redzone: u64,
    allocated_at: Option<CallSite>,
    freed_at: Option<CallSite>,
}

/// The checks that one slab cache makes in debug mode.
///
/// # Invariants
///
/// A trailer follows each object of the cache, at the next multiple of eight. The owner of an allocated object has
/// exclusive access to object and trailer. While the object is free, only the thread that is about to allocate it
/// accesses the object and its trailer.
pub(crate) struct Checks {
    name: String,
    object_bytes: usize,
    /// Whether free objects are filled with poison. Free objects of a cache with a constructor keep their contents
    /// instead.
    is_poisoned: bool,
}

impl Checks {
    pub const TRAILER_BYTES: usize = size_of::<Trailer>();

    pub fn new(name: &str, object_bytes: usize, has_constructor: bool) -> Self {
        Self { name: name.to_owned(), object_bytes, is_poisoned: !has_constructor && object_bytes > 0 }
    }

    /// Returns the address of an object's trailer.
    fn trailer(&self, object: usize) -> *mut Trailer {
        (object + self.object_bytes.next_multiple_of(size_of::<u64>())) as *mut Trailer
    }

    /// Fills a free object with poison, unless the cache has a constructor.
    fn poison(&self, object: usize) {
        if self.is_poisoned {
            let last = self.object_bytes - 1;
            // SAFETY: the object is free, and accessed by this thread alone (type invariant).
            unsafe {
                std::ptr::write_bytes(object as *mut u8, POISON_BYTE, last);
                std::ptr::write((object + last) as *mut u8, LAST_POISON_BYTE);
            }
        }
    }

    /// Returns the index of the first byte of a free object that is not poison.
    fn first_damaged_byte(&self, object: usize) -> Option<usize> {
        // SAFETY: as in `poison`; all bytes were written there.
        let byte = |at: usize| unsafe { std::ptr::read((object + at) as *const u8) };
        let expected = |at: usize| if at + 1 == self.object_bytes { LAST_POISON_BYTE } else { POISON_BYTE };
        let mut bytes = if self.is_poisoned { 0..self.object_bytes } else { 0..0 };
        bytes.find(|at| byte(*at) != expected(*at))
    }

    /// Initializes the trailer and poison of an object in a new slab.
    pub fn note_new(&self, object: usize) {
        let trailer = Trailer { redzone: FREE_REDZONE, allocated_at: None, freed_at: None };
        // SAFETY: the slab is claimed by this thread, so no other thread accesses the object (type invariant).
        unsafe { self.trailer(object).write(trailer) };
        self.poison(object);
    }

    /// Checks a free object and records its allocation.
    ///
    /// # Panics
    ///
    /// If the redzone or the poison was overwritten while the object was free.
    #[track_caller]
    pub fn note_allocated(&self, object: usize) {
        // SAFETY: this thread is allocating the object, so no other thread accesses it (type invariant).
        let trailer = unsafe { &mut *self.trailer(object) };
        if trailer.redzone != FREE_REDZONE {
            self.report_damage(object, trailer, "was written behind while it was free");
        }
        if let Some(at) = self.first_damaged_byte(object) {
            self.report_damage(object, trailer, &format!("was written at byte {at} while it was free"));
        }
        trailer.redzone = IN_USE_REDZONE;
        trailer.allocated_at = Some(Location::caller());
    }

    /// Checks an allocated object and records that it is being freed.
    ///
    /// # Panics
    ///
    /// If the object is free already, or its redzone was overwritten.
    #[track_caller]
    pub fn note_freed(&self, object: usize) {
        // SAFETY: the caller owns the object (type invariant). A double free violates this; the check then reports it,
        // in the worst case with a wrong location.
        let trailer = unsafe { &mut *self.trailer(object) };
        match trailer.redzone {
            IN_USE_REDZONE => {}
            FREE_REDZONE => self.report_damage(object, trailer, "was freed twice"),
            _ => self.report_damage(object, trailer, "was written behind its end"),
        }
        trailer.redzone = FREE_REDZONE;
        trailer.freed_at = Some(Location::caller());
        self.poison(object);
    }

    /// Panics with a description of the damage and the object's call sites.
    #[cold]
    #[track_caller]
    fn report_damage(&self, object: usize, trailer: &Trailer, what: &str) -> ! {
        let location = |location: Option<CallSite>| location.map_or("nowhere".to_owned(), ToString::to_string);
        panic!(
            "slab cache {}: the object at {object:#x} {what} (allocated at {}, freed at {})",
            self.name,
            location(trailer.allocated_at),
            location(trailer.freed_at)
        );
    }
}
