//! A range and its pins.
#![allow(unsafe_code)] // hands out a range's bytes

use super::word::{Phase, Refused};
use super::{Ranges, now};
use crate::error::{Error, Result};
use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

/// How a volatile range goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// As a whole.
    Full,
    /// From its end, a chunk at a time, in turn with the other ranges. Chunks are multiples of the OS page: 64 KiB, or
    /// 2 MiB where huge pages are to stay whole.
    Partial { chunk_bytes: usize },
}

/// What became of the bytes of a range since it was marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// All are what they were.
    Kept,
    /// The first `kept_bytes` are what they were; each of the others is that, or zero.
    Purged { kept_bytes: usize },
}

/// Memory of a program that it can do without. Made by [`Ranges::allocate`], held at first; dropped it is freed.
///
/// # Invariants
///
/// `addr` starts `len_bytes` readable and writable bytes that belong to this range's entry and to no other. They change by
/// a purge only while the entry's word is *Purging*, which excludes *Held* and pins.
pub struct Range {
    ranges: &'static Ranges,
    number: u32,
    addr: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the range owns its bytes, and all shared changes go through the atomic word.
unsafe impl Send for Range {}
// SAFETY: as above; bytes are written only through `&mut Range`.
unsafe impl Sync for Range {}

impl Range {
    pub(super) fn new(ranges: &'static Ranges, number: u32, addr: NonNull<u8>, len_bytes: usize) -> Self {
        Self { ranges, number, addr, len_bytes }
    }

    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Where its bytes are: for a page-aligned buffer's address, not to go around pins.
    pub fn addr(&self) -> usize {
        self.addr.as_ptr() as usize
    }

    /// Whether it is marked.
    pub fn is_volatile(&self) -> bool {
        matches!(self.entry().word.look().phase(), Phase::Volatile | Phase::Purging)
    }

    /// Whether a purge is at it at this moment.
    pub fn is_being_purged(&self) -> bool {
        self.entry().word.look().phase() == Phase::Purging
    }

    #[inline]
    fn entry(&self) -> &super::Entry {
        self.ranges.entry(self.number)
    }

    #[inline]
    fn insist<T>(&self, act: impl Fn() -> std::result::Result<T, Refused>) -> Result<T> {
        self.ranges.insist(self.number, act).map_err(|refused| Error::WrongState {
            what: match refused {
                Refused::Phase(Phase::Held) => "the range is not volatile",
                Refused::Phase(_) => "the range is volatile already",
                Refused::Pins | Refused::Purging => "the range has as many pins as it can have, 65535",
            },
        })
    }

    /// Lets its bytes go when memory is needed, from the moment on at which it has no pins.
    ///
    /// Cost: one compare-and-swap and a look at the clock, no system call. Of several ranges the one marked first goes first
    /// (to 4 ms).
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if it is volatile already.
    ///
    /// Source: J. Stultz and M. Kim, "vrange for anonymous page" v7, 2013, lwn.net/Articles/542504.
    #[inline]
    pub fn mark(&self) -> Result<()> {
        self.insist(|| self.entry().word.mark(now()))
    }

    /// Keeps its bytes from here on, and tells what became of them.
    ///
    /// Cost: one compare-and-swap; while it is being purged, some hundred microseconds at most.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if it is not volatile.
    #[inline]
    pub fn unmark(&self) -> Result<Contents> {
        let was_lost = self.insist(|| self.entry().word.unmark())?;
        Ok(if was_lost { self.note_loss() } else { Contents::Kept })
    }

    /// What is left, and room for what will be written anew.
    #[cold]
    fn note_loss(&self) -> Contents {
        let kept_bytes = self.kept_bytes();
        self.entry().word.unpin();
        // Asked for here, so that the memory need not be found on touch. Without room it is touched all the same.
        let _ = self.ranges.arena.budget.expect((self.len_bytes - kept_bytes) as u64);
        Contents::Purged { kept_bytes }
    }

    fn kept_bytes(&self) -> usize {
        (self.entry().kept_bytes.load(Relaxed) as usize).min(self.len_bytes)
    }

    /// Counts a volatile range as marked now. For caches: what is used goes last.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if it is not volatile.
    #[inline]
    pub fn refresh(&self) -> Result<()> {
        self.insist(|| self.entry().word.refresh(now()))
    }

    /// Its bytes, as far as they were kept; none goes while the pin lives. A held range is kept as a whole.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] beyond 65,535 pins.
    #[inline]
    pub fn pin(&self) -> Result<Pin<'_>> {
        let seen = self.insist(|| self.entry().word.pin())?;
        let is_whole = seen.phase() == Phase::Held || !seen.is_lost();
        let kept_bytes = if is_whole { self.len_bytes } else { self.kept_bytes() };
        let contents = if is_whole { Contents::Kept } else { Contents::Purged { kept_bytes } };
        Ok(Pin { range: self, kept_bytes, contents })
    }

    /// The bytes of a held range, to be written. What was purged before reads zero, or what it was.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if it is volatile.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        if self.is_volatile() {
            return Err(Error::WrongState { what: "the range is volatile: unmark it to write" });
        }
        // SAFETY: by the type's invariant ours alone; held, and `&mut self` keeps it so and excludes pins.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.addr.as_ptr(), self.len_bytes) })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        self.ranges.leave(self.number);
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self.entry().word.look();
        let mut text = f.debug_struct("Range");
        text.field("addr", &self.addr).field("len_bytes", &self.len_bytes);
        text.field("phase", &seen.phase()).field("pins", &seen.pins()).finish_non_exhaustive()
    }
}

/// Bytes of a range that stay while this lives: all of them, or what was kept from the start on.
#[derive(Debug)]
pub struct Pin<'range> {
    range: &'range Range,
    kept_bytes: usize,
    contents: Contents,
}

impl Pin<'_> {
    /// Whether the bytes are all there.
    pub fn contents(&self) -> Contents {
        self.contents
    }

    /// All of the bytes, if all were kept.
    pub fn whole(&self) -> Option<&[u8]> {
        (self.contents == Contents::Kept).then_some(self)
    }
}

impl Deref for Pin<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: inside the range, whose bytes no purge takes while this pin is counted, and that nobody writes while it
        // is borrowed.
        unsafe { std::slice::from_raw_parts(self.range.addr.as_ptr(), self.kept_bytes) }
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.range.entry().word.unpin();
    }
}
