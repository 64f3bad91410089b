//! Reading: copies out of folios, without a lock and without a pin.

use super::fetch::Content;
use super::policy::{Ask, Cause, Choice};
use super::{File, Mapping, Turn, in_pieces, in_turn};
use crate::epoch;
use crate::error::{Error, Result};
use std::io::IoSliceMut;

impl Mapping {
    /// Copies bytes from `offset` on into `to`, up to the end of the file; returns how many. 0 at or past the end, and for an
    /// empty buffer.
    ///
    /// Holes read zero. Beside writes it may find bytes of before and of after in one page, as in any file; beside
    /// `truncate` and `punch_hole` old bytes or zeros.
    ///
    /// Cost: a look at the index for each folio (a huge one is one), and the copy. Writes to no shared memory; of files with a
    /// store a use is noted now and then.
    ///
    /// # Errors
    ///
    /// [`Error::BadOffset`] past 2^63; [`Error::Busy`] if somebody holds a folio alone for a second;
    /// [`Error::Store`], and [`Error::NoMemory`] where what a store has finds no room (what was written stays until
    /// [`Mapping::sync`]); unless a part was read, which is returned instead. Behind that `to` is as it was, or zero.
    pub fn read_at(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        let file = &*self.0;
        file.check(offset, to.len() as u64)?;
        let size = file.size_bytes();
        let len = (to.len() as u64).min(size.saturating_sub(offset)) as usize;
        in_pieces(len, |done| file.read_piece(&mut to[done..len], offset + done as u64))
    }

    /// As [`Mapping::read_at`] into several buffers, one after the other.
    ///
    /// # Errors
    ///
    /// As [`Mapping::read_at`].
    pub fn read_vectored_at(&self, to: &mut [IoSliceMut<'_>], offset: u64) -> Result<usize> {
        self.0.check(offset, to.iter().fold(0, |sum: u64, buffer| sum.saturating_add(buffer.len() as u64)))?;
        in_turn(to.iter_mut().map(|buffer| &mut **buffer), |buffer, done| self.read_at(buffer, offset + done))
    }
}

/// What became of a read where nothing was.
enum Hole {
    /// So many bytes were read.
    Zeros(usize),
    /// This call has made a folio there.
    Filled,
    /// There is one, or was for a moment, that is not marked as used: another made it, or it came with others.
    FilledByOther,
}

impl File {
    /// Copies from one folio, or zeros from a hole. Returns how many bytes.
    #[inline]
    pub(super) fn read_piece(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        let index = self.index_of(offset);
        if let Some((found, frame)) = self.hint(index) {
            let (number, at) = (found.value as u32, (offset - self.offset_of(found.first)) as usize);
            // The word and the bytes are both far away: at the same time, then.
            self.pool.prefetch(number, at);
            let seen = frame.word.load();
            if seen.is_readable() && u32::from(seen.order()) == found.order && self.is_of(frame, found.first) {
                let len = to.len().min(self.cache.folio_bytes(seen.order()) as usize - at);
                self.pool.copy_out(number, at, &mut to[..len]);
                // All the time, then, it was that owner's.
                if frame.word.is_unchanged(seen) {
                    if self.note_used(frame) {
                        self.note_first_use(frame, offset, to.len());
                    }
                    return Ok(len);
                }
            }
        }
        self.read_piece_slowly(to, offset).inspect_err(|_| self.wipe(to))
    }

    /// A copy that was thrown away may have been of another file's bytes: where nothing took its place the caller must not see it.
    #[cold]
    fn wipe(&self, to: &mut [u8]) {
        // No copy is of more than a folio.
        let most = to.len().min(self.pool.chunk_bytes());
        to[..most].fill(0);
    }

    /// As [`File::read_piece`], where the index has to be believed: a hole, or somebody changes what is there.
    #[cold]
    fn read_piece_slowly(&self, to: &mut [u8], offset: u64) -> Result<usize> {
        let (pool, index) = (self.pool(), self.index_of(offset));
        // To have brought it in is no use of it.
        let mut is_new = false;
        let mut turn = Turn::new();
        loop {
            let guard = epoch::pin();
            let Some(hit) = self.tree.find(index, &guard) else {
                drop(guard);
                match self.read_hole(to, offset)? {
                    Hole::Zeros(bytes) => return Ok(bytes),
                    Hole::Filled => is_new = true,
                    Hole::FilledByOther => is_new = false,
                }
                continue;
            };
            let number = hit.value() as u32;
            let word = pool.word(number);
            let seen = word.load();
            if !hit.is_still() {
                continue;
            }
            if !seen.is_readable() {
                drop(guard);
                turn.wait()?;
                continue;
            }
            let found = hit.found();
            // What is copied now may be thrown away, but stays mapped: nothing waits for this reader.
            drop(guard);
            let at = (offset - self.offset_of(found.first)) as usize;
            let len = to.len().min(self.cache.folio_bytes(found.order as u8) as usize - at);
            pool.copy_out(number, at, &mut to[..len]);
            if word.is_unchanged(seen) {
                if !is_new && self.note_used(pool.frame(number)) {
                    self.note_first_use(pool.frame(number), offset, to.len());
                }
                return Ok(len);
            }
        }
    }

    /// Zeros, up to the end of the page; or a folio is there now.
    #[cold]
    fn read_hole(&self, to: &mut [u8], offset: u64) -> Result<Hole> {
        let index = self.index_of(offset);
        let end = self.offset_of(index + 1);
        // Cut meanwhile: nothing is to come in behind the end.
        if self.store.is_some() && offset >= self.size_bytes() {
            let len = to.len().min((end - offset) as usize);
            to[..len].fill(0);
            return Ok(Hole::Zeros(len));
        }
        if self.store.is_some() {
            self.note_access(offset, to.len());
            if self.bring_several(index..self.index_of(offset + to.len() as u64 - 1) + 1)? {
                return Ok(Hole::FilledByOther);
            }
        }
        if self.store.is_some() || self.wants_folio_for_hole(index) {
            match self.create(index, Cause::Read, &Content::Stored) {
                Ok(Some(_)) => return Ok(Hole::Filled),
                Ok(None) => return Ok(Hole::FilledByOther),
                // A hole is zero without memory, too.
                Err(Error::NoMemory { .. }) if self.store.is_none() => {}
                Err(error) => return Err(error),
            }
        }
        let len = to.len().min((end - offset) as usize);
        to[..len].fill(0);
        Ok(Hole::Zeros(len))
    }

    fn wants_folio_for_hole(&self, index: u64) -> bool {
        let span = self.span_of(index);
        let is_wanted = match self.choose_for_hole(index) {
            Choice::Nothing => false,
            Choice::Small => true,
            // Beside others it would be a small one.
            Choice::Huge => self.tree.next(span.start, span.end - 1, &epoch::pin()).is_none(),
        };
        // What cannot be had is zero without memory.
        is_wanted && self.cache.has_room()
    }

    pub(super) fn choose_for_hole(&self, index: u64) -> Choice {
        let span = self.span_of(index);
        self.cache.policy.choose(&Ask {
            cause: Cause::Read,
            offset: self.offset_of(span.start),
            span_bytes: self.cache.folio_bytes(self.pool().chunk_order()),
            wanted_bytes: self.page_bytes() as u64,
            present_bytes: 0,
            size_bytes: self.size_bytes(),
            streak_bytes: 0,
        })
    }
}
