//! Guards: a folio that stays where it is, shared or alone.
#![allow(unsafe_code)] // lends the bytes of held folios

use super::fetch::{Content, Place};
use super::policy::Cause;
use super::{File, Mapping, Turn};
use crate::error::{Error, Result};
use crate::folio::word::Kind;
use crate::xarray as epoch;
use std::ops::{Deref, DerefMut};

/// A folio of a file that stays in memory, and in its place, until this goes: for I/O, or for reading many times. It is not
/// split, collapsed or evicted meanwhile. A `truncate` or `punch_hole` of all of it takes it out of the file all the same; its
/// bytes stay until then. Of a part of it: that part is zeroed, and the folio stays the file's.
///
/// Others may write to it at the same time, so its bytes are copied, never lent.
///
/// Cost: one atomic operation to get and one to put, whatever part of a huge folio is meant.
#[must_use = "it pins for as long as it is kept"]
pub struct Pin<'file> {
    file: &'file File,
    number: u32,
    /// The byte of the file that was asked for.
    offset: u64,
    /// From the folio's first byte to the one that was asked for.
    at: usize,
    len_bytes: usize,
}

/// The folios of a range, pinned, in order. One is kept without an allocation: a huge folio mostly is all of it.
#[must_use = "it pins for as long as it is kept"]
pub struct Pins<'file> {
    first: Option<Pin<'file>>,
    others: Vec<Pin<'file>>,
}

impl<'file> Pins<'file> {
    /// How many folios.
    pub fn len(&self) -> usize {
        usize::from(self.first.is_some()) + self.others.len()
    }

    /// Whether the range was empty, or lies behind the end of the file.
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub fn first(&self) -> Option<&Pin<'file>> {
        self.first.as_ref()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Pin<'file>> {
        self.first.iter().chain(&self.others)
    }
}

impl Mapping {
    /// Pins the folio that holds the byte at `offset`: from there to its end. Makes one where nothing is, as a write would.
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] at or past the end of the file; else as [`Mapping::write_at`].
    #[inline]
    pub fn pin(&self, offset: u64) -> Result<Pin<'_>> {
        let place = self.0.pin_made(offset)?;
        Ok(self.0.guard(&place, offset))
    }

    /// As [`Mapping::pin`]; `None` where nothing is in memory.
    ///
    /// # Errors
    ///
    /// As [`Mapping::pin`].
    #[inline]
    pub fn pin_present(&self, offset: u64) -> Result<Option<Pin<'_>>> {
        self.0.check_inside(offset)?;
        let place = self.0.pin_page(self.0.index_of(offset))?;
        Ok(place.map(|place| self.0.guard(&place, offset)))
    }

    /// Pins all folios from `offset` on for `len_bytes`, to the end of the file at most.
    ///
    /// Cost: as [`Mapping::pin`] for each folio.
    ///
    /// # Errors
    ///
    /// As [`Mapping::pin`]; none stays pinned then.
    pub fn pin_range(&self, offset: u64, len_bytes: usize) -> Result<Pins<'_>> {
        self.0.check(offset, len_bytes as u64)?;
        let end = (offset + len_bytes as u64).min(self.size_bytes());
        let mut pins = Pins { first: None, others: Vec::new() };
        let mut at = offset;
        while at < end {
            let pin = self.pin(at)?;
            at += pin.len_bytes as u64;
            match &pins.first {
                None => pins.first = Some(pin),
                Some(_) => pins.others.push(pin),
            }
        }
        Ok(pins)
    }

    /// Takes the folio that holds the byte at `offset` for this thread alone: others that read, write or pin it wait, a second at
    /// most. Makes one where nothing is.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if it is pinned, or held, for a second; else as [`Mapping::pin`].
    pub fn hold(&self, offset: u64) -> Result<Exclusive<'_>> {
        let file = &*self.0;
        file.check_inside(offset)?;
        let index = file.index_of(offset);
        let mut turn = Turn::new();
        loop {
            let guard = epoch::pin();
            let Some(hit) = file.tree.find(index, &guard) else {
                drop(guard);
                file.create(index, Cause::Write, &Content::Stored)?;
                continue;
            };
            let number = hit.value() as u32;
            // A truncation that has begun counts on nobody coming in.
            let inside = file.gate.beside();
            match file.pool().word(number).hold() {
                Ok(state) if hit.is_still() => {
                    let len_bytes = file.cache.folio_bytes(state.order()) as usize;
                    return Ok(Exclusive { file, number, first: hit.first(), len_bytes });
                }
                Ok(_) => file.end_hold(number, false),
                Err(_) if !hit.is_still() => {}
                Err(_) => {
                    drop((inside, guard));
                    turn.wait()?;
                }
            }
        }
    }
}

impl File {
    #[inline]
    fn check_inside(&self, offset: u64) -> Result<()> {
        if offset < self.size_bytes() && self.pool.generation() == self.generation {
            return Ok(());
        }
        self.is_outside(offset)
    }

    #[cold]
    fn is_outside(&self, offset: u64) -> Result<()> {
        self.check(offset, 1)?;
        let size_bytes = self.size_bytes();
        if offset >= size_bytes { Err(Error::PastEnd { offset, size_bytes }) } else { Ok(()) }
    }

    #[inline]
    fn pin_made(&self, offset: u64) -> Result<Place> {
        self.check_inside(offset)?;
        let index = self.index_of(offset);
        loop {
            if let Some(place) = self.pin_page(index)? {
                return Ok(place);
            }
            self.create(index, Cause::Write, &Content::Stored)?;
        }
    }

    #[inline]
    fn guard(&self, place: &Place, offset: u64) -> Pin<'_> {
        let at = (offset - self.offset_of(place.first)) as usize;
        let len_bytes = self.cache.folio_bytes(place.order) as usize - at;
        Pin { file: self, number: place.number, offset, at, len_bytes }
    }

    /// Gives a folio back that was held; frees it if it left the file meanwhile.
    fn end_hold(&self, number: u32, is_dirty: bool) {
        self.note_revived(number, self.pool().word(number).end_hold(is_dirty));
    }
}

impl Pin<'_> {
    /// Bytes from the one that was asked for to the end of the folio.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Copies bytes out, from `at` bytes behind the one that was asked for.
    ///
    /// # Panics
    ///
    /// Past [`Pin::len_bytes`].
    pub fn read_at(&self, to: &mut [u8], at: usize) {
        self.check(at, to.len());
        self.file.pool().copy_out(self.number, self.at + at, to);
    }

    /// Copies bytes in, to where the file has some.
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] past the end of the file, which may be shorter by now; [`Error::WrongState`] where the page is no
    /// longer the file's (a hole, say).
    ///
    /// # Panics
    ///
    /// Past [`Pin::len_bytes`].
    pub fn write_at(&self, from: &[u8], at: usize) -> Result<()> {
        self.check(at, from.len());
        // What is behind the end reads zero when the file grows: nobody may write there, and nobody shortens it meanwhile.
        let _inside = self.file.gate.beside();
        let (end, size_bytes) = (self.offset + (at + from.len()) as u64, self.file.size_bytes());
        if end > size_bytes {
            return Err(Error::PastEnd { offset: end - 1, size_bytes });
        }
        if self.file.pool().word(self.number).load().kind() == Kind::Gone {
            return Err(Error::WrongState { what: "the page has left the file" });
        }
        self.file.pool().copy_in(self.number, self.at + at, from);
        self.file.pool().word(self.number).set_dirty();
        Ok(())
    }

    /// Eight bytes, least significant first.
    ///
    /// # Panics
    ///
    /// Past [`Pin::len_bytes`].
    #[inline]
    pub fn read_u64(&self, at: usize) -> u64 {
        self.check(at, size_of::<u64>());
        self.file.pool().read_u64(self.number, self.at + at)
    }

    /// Where the bytes are, for who does I/O to them: mapped and in place for as long as this is kept. Others may change them.
    /// Such as lie past the end of the file have to stay zero; who changed others says so by [`Pin::set_dirty`].
    pub fn as_ptr(&self) -> *mut u8 {
        (self.file.pool().addr(self.number) + self.at) as *mut u8
    }

    /// Notes that bytes were changed, for the store.
    pub fn set_dirty(&self) {
        self.file.pool().word(self.number).set_dirty();
    }

    #[inline]
    fn check(&self, at: usize, len: usize) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len_bytes), "{at} + {len} of {}", self.len_bytes);
    }
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        self.file.cache.unpin(self.number);
    }
}

/// A folio that this thread has alone: its bytes are a slice. Others wait, a second at most, so it should not be kept long.
#[must_use = "others wait for as long as it is kept"]
pub struct Exclusive<'file> {
    file: &'file File,
    number: u32,
    first: u64,
    len_bytes: usize,
}

impl Exclusive<'_> {
    /// Offset in the file of its first byte.
    pub fn offset(&self) -> u64 {
        self.file.offset_of(self.first)
    }
}

impl Deref for Exclusive<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: held since this guard was made, for as long as it lives; the length is the folio's.
        unsafe { self.file.pool().held_bytes(self, self.number, self.len_bytes) }
    }
}

impl DerefMut for Exclusive<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        let (pool, number, len_bytes) = (self.file.pool(), self.number, self.len_bytes);
        // SAFETY: as above.
        unsafe { pool.held_bytes_mut(self, number, len_bytes) }
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        // What the holder wrote past the end of the file is not part of it: it would show when the file grows.
        let end = self.file.size_bytes().saturating_sub(self.offset());
        if end < self.len_bytes as u64 {
            self.file.pool().zero(self.number, end as usize, self.len_bytes - end as usize);
        }
        self.file.end_hold(self.number, true);
    }
}
