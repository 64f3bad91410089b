//! Pages on their way in from a store, while nobody waits: taken, another's to write to, in no index yet.
#![allow(unsafe_code)] // lends memory that it has alone

use super::File;
use super::fetch::Content;
use super::flights::Ticket;
use super::policy::Cause;
use crate::error::Result;
use crate::folio::Owner;
use crate::store::Buffer;
use crate::sync::{Acquire, Relaxed};
use crate::xarray as epoch;
use std::ptr::NonNull;
use std::sync::Arc;

/// What came of asking for a page.
pub(super) enum Asked {
    /// It is there.
    Present,
    /// Another brings it in.
    Underway,
    /// It is to be read: [`Filling::finish`] puts it into the index then.
    Begun(Filling),
}

/// A folio that nobody knows of, under a loose flight. It goes back if it is dropped.
///
/// # Invariants
///
/// Its pages were taken from the pool, and are given back by nobody else.
pub(super) struct Filling {
    file: Arc<File>,
    ticket: Ticket,
    number: u32,
    order: u8,
    /// First index.
    first: u64,
    /// So many bytes of it the store has; the others are zero, whatever it says.
    stored_bytes: usize,
    /// As of the beginning.
    revoked: u32,
    /// The page that was asked for, and what whoever asked knows it by.
    pub index: u64,
    pub token: u64,
}

impl Filling {
    /// Begins to bring a page in, with others around it if the policy says so. It may overtake another loose flight.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoMemory`] if no room can be made.
    pub fn begin(file: &Arc<File>, index: u64, token: u64, overtakes: bool) -> Result<Asked> {
        if file.has_page(index) {
            return Ok(Asked::Present);
        }
        let revoked = file.revoked.load(Acquire);
        let is_huge = file.wants_huge(index, Cause::Read, &Content::Stored);
        let span = if is_huge { file.span_of(index) } else { index..index + 1 };
        let Ok(ticket) = file.fly_loosely(span.start, span.end - 1, overtakes) else { return Ok(Asked::Underway) };
        if file.is_present(span.start, span.end - 1) {
            file.cache.flights.end(ticket);
            return Ok(if file.has_page(index) { Asked::Present } else { Asked::Underway });
        }
        let (taken, first) = file.take_for(index, is_huge).inspect_err(|_| file.cache.flights.end(ticket))?;
        let len_bytes = file.cache.folio_bytes(taken.order);
        let stored_bytes =
            file.stored_bytes.load(Relaxed).saturating_sub(file.offset_of(first)).min(len_bytes) as usize;
        Ok(Asked::Begun(Self {
            file: file.clone(),
            ticket,
            number: taken.number,
            order: taken.order,
            first,
            stored_bytes,
            revoked,
            index,
            token,
        }))
    }

    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Of its first page.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Where it begins in the file, in bytes.
    pub fn offset(&self) -> u64 {
        self.file.offset_of(self.first)
    }

    /// Whether the store has to be asked at all.
    pub fn needs_store(&self) -> bool {
        self.stored_bytes > 0
    }

    /// The bytes to read into: zeros, should somebody put in less than he says.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.file.pool.zero(self.number, 0, self.stored_bytes);
        // SAFETY: type invariant, and mapped for as long as it is taken; borrowed as the value is.
        unsafe { std::slice::from_raw_parts_mut(self.addr().as_ptr(), self.stored_bytes) }
    }

    /// Puts it into the index, now that it holds what the store has. Returns whether it is there; otherwise the file was cut
    /// meanwhile, or another came in between.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoAddresses`] without nodes for the index.
    pub fn finish(self) -> Result<bool> {
        let (file, last) = (&*self.file, self.first + (1 << self.order) - 1);
        let pool = file.pool;
        pool.zero(self.number, self.stored_bytes, self.len_bytes() - self.stored_bytes);
        pool.set_owner(self.number, Owner { id: file.id, index: self.first });
        file.reach_order(self.number, self.order)?;
        let (mut writer, mut stock) = file.tree.lock_for(self.first, last, u32::from(self.order))?;
        if writer.next(self.first, last).is_some()
            || file.revoked.load(Relaxed) != self.revoked
            || file.is_closed.load(Relaxed)
            || !file.cache.flights.is_on(self.ticket)
        {
            return Ok(false);
        }
        pool.word(self.number).publish(self.order, !file.cache.may_split, false);
        pool.word(self.number).set_fetched();
        writer.store(self.first, u32::from(self.order), u64::from(self.number), &mut stock);
        file.enter_order(self.first, self.number, self.order);
        drop(writer);
        file.note_made(self.first, self.order);
        file.cache.flights.end(self.ticket);
        // What is in the index goes with that.
        let kept = std::mem::ManuallyDrop::new(self);
        // SAFETY: read once, and never used again where it was.
        drop(unsafe { std::ptr::read(&raw const kept.file) });
        Ok(true)
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        self.file.cache.flights.end(self.ticket);
        self.file.cache.give(self.number, self.order);
    }
}

// SAFETY: mapped and writable for as long as it is taken, which is until the value is dropped (type invariant); nobody else
// knows of it.
unsafe impl Buffer for Filling {
    fn addr(&self) -> NonNull<u8> {
        // SAFETY: a pool does not begin at address 0.
        unsafe { NonNull::new_unchecked(self.file.pool.addr(self.number) as *mut u8) }
    }

    fn len_bytes(&self) -> usize {
        self.file.cache.folio_bytes(self.order) as usize
    }
}

impl File {
    /// Whether a page is in memory.
    fn has_page(&self, index: u64) -> bool {
        self.tree.find(index, &epoch::pin()).is_some()
    }

    /// Whether anything is in memory from `first` to `last`.
    fn is_present(&self, first: u64, last: u64) -> bool {
        self.tree.next(first, last, &epoch::pin()).is_some()
    }
}
