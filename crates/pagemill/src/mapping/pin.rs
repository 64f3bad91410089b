//! Guards: a folio that stays where it is, shared or alone.
#![allow(unsafe_code)] // lends the bytes of held folios

use super::dirty::DIRTY;
use super::fetch::{Content, Place};
use super::policy::Cause;
use super::{File, Mapping, Turn};
use crate::epoch;
use crate::error::{Error, Result};
use crate::folio::word::Kind;
use crate::folio::{Frame, bytes};
use std::ops::{Deref, DerefMut};

/// A folio of a file that stays in memory, and in its place, until this goes: for I/O, or for reading many times. It is not
/// split, collapsed or evicted meanwhile. A `truncate` or `punch_hole` of all of it takes it out of the file all the same; its
/// bytes stay until then. Of a part of it: that part is zeroed, and the folio stays the file's.
///
/// Others may write to it at the same time, so its bytes are copied, never lent. A fork child must not use one that it inherited: the
/// memory may not be mapped there (docs/files-behind.md).
///
/// Cost: one atomic operation to get and one to put, whatever part of a huge folio is meant.
#[must_use = "it pins for as long as it is kept"]
pub struct Pin<'file> {
    file: &'file File,
    frame: &'static Frame,
    /// Where the byte is that was asked for.
    addr: usize,
    /// From the folio's first byte to that one.
    at: u32,
    /// From there to its last.
    len_bytes: u32,
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
        match self.0.try_pin(offset) {
            Some(pin) => Ok(pin),
            None => Ok(self.0.guard_of(self.0.pin_made(offset, offset + 1)?, offset)),
        }
    }

    /// As [`Mapping::pin`]; `None` where nothing is in memory.
    ///
    /// # Errors
    ///
    /// As [`Mapping::pin`].
    #[inline]
    pub fn pin_present(&self, offset: u64) -> Result<Option<Pin<'_>>> {
        match self.0.try_pin(offset) {
            Some(pin) => Ok(Some(pin)),
            None => Ok(self.0.pin_there(offset)?.map(|place| self.0.guard_of(place, offset))),
        }
    }

    /// Pins all folios from `offset` on for `len_bytes`, to the end of the file at most.
    ///
    /// Cost: as [`Mapping::pin`] for each folio.
    ///
    /// # Errors
    ///
    /// As [`Mapping::pin`]; none stays pinned then.
    #[inline]
    pub fn pin_range(&self, offset: u64, len_bytes: usize) -> Result<Pins<'_>> {
        if let Some(first) = self.0.try_pin(offset) {
            // A huge folio mostly is all of it.
            if len_bytes.wrapping_sub(1) < first.len_bytes() {
                return Ok(Pins { first: Some(first), others: Vec::new() });
            }
        }
        let (first, others) = self.0.pin_all(offset, len_bytes)?;
        Ok(Pins { first: first.map(|place| self.0.guard_of(place, offset)), others })
    }

    /// Takes the folio that holds the byte at `offset` for this thread alone: others that read, write or pin it wait, a second at
    /// most. Makes one where nothing is.
    ///
    /// # Errors
    ///
    /// [`Error::Busy`] if it is pinned, or held, for a second; [`Error::ReadOnly`], since it counts as written to; else as [`Mapping::pin`].
    pub fn hold(&self, offset: u64) -> Result<Exclusive<'_>> {
        let file = &*self.0;
        file.check_inside(offset)?;
        file.check_writable()?;
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
                Ok(_) => file.end_hold(number),
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
    /// # Errors
    ///
    /// Past the end; in a fork child.
    pub(super) fn check_inside(&self, offset: u64) -> Result<()> {
        self.check(offset, 1)?;
        let size_bytes = self.size_bytes();
        if offset >= size_bytes { Err(Error::PastEnd { offset, size_bytes }) } else { Ok(()) }
    }

    /// Pins what the index seems to have; `None` where that takes a closer look.
    #[inline]
    fn try_pin(&self, offset: u64) -> Option<Pin<'_>> {
        if offset >= self.size_bytes() || self.pool.generation() != self.generation {
            return None;
        }
        let (found, frame) = self.try_pin_page(self.index_of(offset))?;
        let place = Place { number: found.value as u32, first: found.first, order: found.order as u8 };
        Some(self.guard(place, frame, offset))
    }

    #[cold]
    fn pin_there(&self, offset: u64) -> Result<Option<Place>> {
        self.check_inside(offset)?;
        self.pin_page(self.index_of(offset))
    }

    /// Of a file with a store, what is missing up to `end` comes with it.
    #[cold]
    fn pin_made(&self, offset: u64, end: u64) -> Result<Place> {
        loop {
            if let Some(place) = self.pin_there(offset)? {
                return Ok(place);
            }
            let index = self.index_of(offset);
            if self.store.is_some() {
                self.note_access(self.offset_of(index), (end - offset) as usize);
                if self.bring_several(index..self.index_of(end - 1) + 1)? {
                    continue;
                }
            }
            self.create(self.index_of(offset), Cause::Write, &Content::Stored)?;
        }
    }

    /// The first folio of a range, and guards of the others.
    #[cold]
    fn pin_all(&self, offset: u64, len_bytes: usize) -> Result<(Option<Place>, Vec<Pin<'_>>)> {
        self.check(offset, len_bytes as u64)?;
        let end = (offset + len_bytes as u64).min(self.size_bytes());
        if offset >= end {
            return Ok((None, Vec::new()));
        }
        // A guard from the start: what follows may fail.
        let first = self.pin_made(offset, end).map(|place| self.guard_of(place, offset))?;
        let (mut others, mut at) = (Vec::new(), offset + u64::from(first.len_bytes));
        while at < end {
            let pin = self.guard_of(self.pin_made(at, end)?, at);
            at += u64::from(pin.len_bytes);
            others.push(pin);
        }
        Ok((Some(first.into_place()), others))
    }

    #[inline]
    fn guard_of(&self, place: Place, offset: u64) -> Pin<'_> {
        let frame = self.pool.frame(place.number);
        self.guard(place, frame, offset)
    }

    /// Of a place that is pinned, with its frame. Put together of what is in registers: a guard that was stored and is loaded
    /// again at once would cost as much as all the rest.
    #[inline]
    fn guard(&self, place: Place, frame: &'static Frame, offset: u64) -> Pin<'_> {
        let page_shift = self.pool.page_shift();
        let at = (offset - (place.first << page_shift)) as u32;
        let len_bytes = (1 << (page_shift + u32::from(place.order))) - at;
        Pin { file: self, frame, addr: self.pool.addr(place.number) + at as usize, at, len_bytes }
    }

    /// Gives a folio back that was held, and not changed; frees it if it left the file meanwhile.
    pub(super) fn end_hold(&self, number: u32) {
        self.note_revived(number, self.pool().word(number).end_hold(false));
    }

    /// As [`File::end_hold`], of one that was changed perhaps.
    fn end_hold_dirty(&self, number: u32, first: u64) {
        let word = self.pool().word(number);
        let state = word.load();
        let new_bytes = if state.is_dirty() { 0 } else { self.cache.folio_bytes(state.order()) };
        if new_bytes > 0 && self.dirty.is_some() {
            self.tree.lock().set_mark_of(first, u64::from(number), DIRTY);
            self.add_dirty(new_bytes);
        }
        let is_live = word.end_hold(true);
        if !is_live {
            self.sub_dirty(new_bytes);
        }
        self.note_revived(number, is_live);
    }
}

impl Pin<'_> {
    /// Bytes from the one that was asked for to the end of the folio.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes as usize
    }

    /// Copies bytes out, from `at` bytes behind the one that was asked for.
    ///
    /// # Panics
    ///
    /// Past [`Pin::len_bytes`].
    pub fn read_at(&self, to: &mut [u8], at: usize) {
        self.check(at, to.len());
        self.file.pool().copy_out(self.number(), self.at as usize + at, to);
    }

    /// Copies bytes in, to where the file has some.
    ///
    /// # Errors
    ///
    /// [`Error::PastEnd`] past the end of the file, which may be shorter by now; [`Error::WrongState`] where the page is no
    /// longer the file's (a hole, say); [`Error::ReadOnly`].
    ///
    /// # Panics
    ///
    /// Past [`Pin::len_bytes`].
    pub fn write_at(&self, from: &[u8], at: usize) -> Result<()> {
        self.check(at, from.len());
        self.file.check_writable()?;
        // What is behind the end reads zero when the file grows: nobody may write there, and nobody shortens it meanwhile.
        let _inside = self.file.gate.beside();
        let begin = self.file.offset_of(self.frame.owner().index) + u64::from(self.at);
        let (end, size_bytes) = (begin + (at + from.len()) as u64, self.file.size_bytes());
        if end > size_bytes {
            return Err(Error::PastEnd { offset: end - 1, size_bytes });
        }
        let state = self.frame.word.load();
        if state.kind() == Kind::Gone {
            return Err(Error::WrongState { what: "the page has left the file" });
        }
        if !state.is_dirty() {
            self.file.make_dirty(&self.place());
        }
        self.file.pool().copy_in(self.number(), self.at as usize + at, from);
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
        // SAFETY: inside of the folio, as just checked, which is mapped for as long as it is pinned.
        unsafe { bytes::read_u64((self.addr + at) as *const u8) }
    }

    /// Where the bytes are, for who does I/O to them: mapped and in place for as long as this is kept. Others may change them.
    /// Such as lie past the end of the file have to stay zero; who changed others says so by [`Pin::set_dirty`].
    pub fn as_ptr(&self) -> *mut u8 {
        self.addr as *mut u8
    }

    /// Notes that bytes were changed, for the store; for one that is only read they last until room is made for others.
    pub fn set_dirty(&self) {
        if !self.file.is_writable {
            return;
        }
        // It leaves the file before, or after.
        let _inside = self.file.gate.beside();
        let state = self.frame.word.load();
        if !state.is_dirty() && state.kind() != Kind::Gone {
            self.file.make_dirty(&self.place());
        }
    }

    fn place(&self) -> Place {
        Place { number: self.number(), first: self.frame.owner().index, order: self.frame.word.load().order() }
    }

    /// Lets go of the guard, not of the pin.
    fn into_place(self) -> Place {
        std::mem::ManuallyDrop::new(self).place()
    }

    fn number(&self) -> u32 {
        self.file.pool().number_at(self.addr - self.at as usize)
    }

    #[inline]
    fn check(&self, at: usize, len: usize) {
        let is_inside = self.len_bytes().checked_sub(len).is_some_and(|last| at <= last);
        assert!(is_inside, "{at} + {len} of {}", self.len_bytes);
    }

    #[cold]
    fn free(&self) {
        self.file.cache.give(self.number(), self.frame.word.load().order());
    }
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.frame.word.unpin() {
            self.free();
        }
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
        self.file.end_hold_dirty(self.number, self.first);
    }
}
