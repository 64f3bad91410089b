//! [`VolatileBuf`]: a volatile range with a handle, and [`Pin`], which gives access to its bytes.
#![allow(unsafe_code)] // accesses a range's bytes

use super::word::{Outcome, RangePhase, RangeWord, Refused};
use super::{Ranges, current_epoch};
use pagemill_core::error::{Error, Result};
use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;

/// How the contents of a volatile range are purged.
///
/// Example: [`VolatileBuf`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// The range is purged as a whole.
    Full,
    /// The range is purged from the end, one chunk at a time, alternating with other ranges. `chunk_bytes` is a
    /// multiple of the OS page: for example 64 KiB, or 2 MiB if the range should use huge pages.
    Partial { chunk_bytes: usize },
}

/// Whether the bytes of a range have survived since the range was marked.
///
/// Example: [`VolatileBuf`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// All bytes survived.
    Kept,
    /// The first `kept_bytes` bytes survived. Each of the other bytes is unchanged or zero.
    Purged { kept_bytes: usize },
}

/// A volatile range: memory whose contents the program can recreate.
///
/// A new range is *held*: its bytes stay. After [`VolatileBuf::mark`] they may be purged, until
/// [`VolatileBuf::unmark`], which reports whether they survived. Dropping the range frees its memory for reuse.
///
/// ```
/// use pagemill::{Contents, VolatileBuf};
///
/// let mut tile = VolatileBuf::new(1 << 20)?;
/// tile.bytes_mut()?.fill(7);
/// tile.mark()?; // from here on reclaim may purge the bytes
/// match tile.unmark()? {
///     Contents::Kept => assert!(tile.pin()?.iter().all(|byte| *byte == 7)),
///     Contents::Purged { .. } => println!("make the contents again"),
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
///
/// A test can purge all marked ranges that are not pinned with `Pagemill::return_all` of the crate `pagemill`, to
/// check that the program computes their bytes again. Ranges with [`Behaviour::Partial`] are then purged as a whole,
/// too, unless they have more than 100 chunks.
///
/// ```
/// use pagemill::{Contents, Pagemill, VolatileBuf};
///
/// let mut tile = VolatileBuf::new(1 << 20)?;
/// tile.bytes_mut()?.fill(7);
/// tile.mark()?;
/// Pagemill::of_process()?.return_all();
/// assert_eq!(tile.unmark()?, Contents::Purged { kept_bytes: 0 });
/// # Ok::<(), pagemill::Error>(())
/// ```
pub struct VolatileBuf {
    // Type invariant: the `len_bytes` bytes at `addr` are readable and writable and belong to the entry of this range
    // only. A purge changes them only while the entry's word is *Purging*, which excludes *Held* and pins.
    ranges: &'static Ranges,
    number: u32,
    addr: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the range owns its bytes, and all shared changes go through the atomic word.
unsafe impl Send for VolatileBuf {}
// SAFETY: as above, and bytes are written only through `&mut VolatileBuf`.
unsafe impl Sync for VolatileBuf {}

impl VolatileBuf {
    /// Allocates `len_bytes`, which are held at first. They are zeros, or contents of memory that this process has
    /// freed. Reclaim purges the buffer as a whole.
    ///
    /// Cost: that of a large allocation. No byte is resident before it is written.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] over the limit. [`Error::NoAddresses`] if the buffer is too long, or if there are 2^24
    /// ranges. [`Error::BadLength`] for zero bytes. [`Error::System`] if the kernel refuses the memory, or if the first
    /// use of the library fails.
    pub fn new(len_bytes: usize) -> Result<Self> {
        Self::with(len_bytes, Behaviour::Full)
    }

    /// As [`VolatileBuf::new`], but reclaim purges the buffer as `behaviour` says.
    ///
    /// # Errors
    ///
    /// As [`VolatileBuf::new`]. [`Error::BadChunk`] for chunks that are not a multiple of the OS page.
    pub fn with(len_bytes: usize, behaviour: Behaviour) -> Result<Self> {
        crate::Base::of_process()?.ranges.allocate(len_bytes, behaviour)
    }

    pub(super) fn of_entry(ranges: &'static Ranges, number: u32, addr: NonNull<u8>, len_bytes: usize) -> Self {
        Self { ranges, number, addr, len_bytes }
    }

    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the address of the bytes, for example for a system call. The bytes may be accessed only while the range
    /// is pinned or held.
    pub fn addr(&self) -> usize {
        self.addr.as_ptr() as usize
    }

    /// Returns whether the range is marked volatile.
    pub fn is_volatile(&self) -> bool {
        matches!(self.entry().word.load().phase(), RangePhase::Volatile | RangePhase::Purging)
    }

    /// Returns whether a purge is discarding bytes of the range at this moment.
    pub fn is_being_purged(&self) -> bool {
        self.entry().word.load().phase() == RangePhase::Purging
    }

    #[inline]
    fn entry(&self) -> &super::RangeEntry {
        self.ranges.entry(self.number)
    }

    #[inline]
    fn retry_after_purge<T>(&self, act: impl Fn(&RangeWord) -> Outcome<T>) -> Result<T> {
        self.entry().retry_after_purge(act).map_err(|refused| Error::WrongState {
            what: match refused {
                Refused::RangePhase(RangePhase::Held) => "the range is not volatile",
                Refused::RangePhase(_) => "the range is volatile already",
                Refused::Pins | Refused::Purging => "the range has the maximum number of pins, 65535",
            },
        })
    }

    /// Marks the range volatile: its bytes may be purged when memory is needed, as soon as the range has no pins.
    ///
    /// Ranges are purged in the order in which they were marked (accurate to 4 ms). Cost: one compare-and-swap and a
    /// read of the clock, no system call.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if the range is volatile.
    ///
    /// Source: J. Stultz and M. Kim, "vrange for anonymous page" v7, 2013, lwn.net/Articles/542504.
    #[inline]
    pub fn mark(&self) -> Result<()> {
        self.retry_after_purge(|word| word.mark(current_epoch()))
    }

    /// Unmarks the range: purges no longer discard its bytes. Returns whether the bytes survived.
    ///
    /// Cost: one compare-and-swap. While the range is being purged, also a wait of some hundred microseconds at most.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if the range is not volatile.
    #[inline]
    pub fn unmark(&self) -> Result<Contents> {
        let was_lost = self.retry_after_purge(RangeWord::unmark)?;
        Ok(if was_lost { self.report_loss() } else { Contents::Kept })
    }

    /// Called when bytes were purged: returns the number of kept bytes. Also reserves memory for the bytes that the
    /// program will write again.
    #[cold]
    fn report_loss(&self) -> Contents {
        let kept_bytes = self.kept_bytes();
        self.entry().word.unpin();
        // Reserving reclaims now if memory is short, instead of at the first touch. An error is ignored, because the
        // program may touch the range anyway.
        let _ = self.ranges.arena.budget.reserve((self.len_bytes - kept_bytes) as u64);
        Contents::Purged { kept_bytes }
    }

    /// Returns the number of bytes at the start of the range that were not purged.
    fn kept_bytes(&self) -> usize {
        (self.entry().kept_bytes.load(Relaxed) as usize).min(self.len_bytes)
    }

    /// Sets the time of a volatile range's mark to now. Caches call `refresh` at each use, so that recently used ranges
    /// are purged last.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if the range is not volatile.
    #[inline]
    pub fn refresh(&self) -> Result<()> {
        self.retry_after_purge(|word| word.refresh(current_epoch()))
    }

    /// Pins the range and returns the pin, which dereferences to the bytes that were kept. No byte is purged while the
    /// pin exists. Of a held range all bytes are accessible.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] beyond 65,535 pins.
    // Always inlined, so that the guard stays in registers (docs/decisions.md).
    #[inline(always)]
    pub fn pin(&self) -> Result<Pin<'_>> {
        let seen = self.retry_after_purge(RangeWord::pin)?;
        let is_whole = seen.phase() == RangePhase::Held || !seen.is_lost();
        let kept_bytes = if is_whole { self.len_bytes } else { self.kept_bytes() };
        let contents = if is_whole { Contents::Kept } else { Contents::Purged { kept_bytes } };
        Ok(Pin { range: self, kept_bytes, contents })
    }

    /// Returns the bytes of a held range for writing. Each purged byte has its old value or is zero.
    ///
    /// # Errors
    ///
    /// [`Error::WrongState`] if the range is volatile.
    pub fn bytes_mut(&mut self) -> Result<&mut [u8]> {
        if self.is_volatile() {
            return Err(Error::WrongState { what: "the range is volatile: unmark it to write" });
        }
        // SAFETY: the bytes belong to this range only (type invariant). The range is held, and `&mut self` excludes
        // pins and marking.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.addr.as_ptr(), self.len_bytes) })
    }
}

impl Drop for VolatileBuf {
    fn drop(&mut self) {
        self.ranges.release_entry(self.number);
    }
}

impl fmt::Debug for VolatileBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seen = self.entry().word.load();
        let mut text = f.debug_struct("VolatileBuf");
        text.field("addr", &self.addr).field("len_bytes", &self.len_bytes);
        text.field("phase", &seen.phase()).field("pins", &seen.pins()).finish_non_exhaustive()
    }
}

/// A pin: while it exists, no byte of its range is purged. A pin dereferences to the bytes that were kept.
///
/// ```
/// use pagemill::VolatileBuf;
///
/// let mut range = VolatileBuf::new(1 << 20)?;
/// range.bytes_mut()?[0] = 7;
/// range.mark()?;
/// let pin = range.pin()?; // the range is still volatile, but is not purged while it is pinned
/// assert!(pin.whole().is_none_or(|bytes| bytes[0] == 7)); // `None` if bytes were purged before
/// # drop(pin);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Debug)]
pub struct Pin<'range> {
    range: &'range VolatileBuf,
    kept_bytes: usize,
    contents: Contents,
}

impl Pin<'_> {
    /// Returns whether all bytes were kept until the range was pinned.
    pub fn contents(&self) -> Contents {
        self.contents
    }

    /// Returns all bytes of the range; `None` if some bytes were purged.
    pub fn whole(&self) -> Option<&[u8]> {
        (self.contents == Contents::Kept).then_some(self)
    }
}

impl Deref for Pin<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are inside the range. No purge discards them while this pin is counted, and no thread
        // writes them while the range is borrowed.
        unsafe { std::slice::from_raw_parts(self.range.addr.as_ptr(), self.kept_bytes) }
    }
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        self.range.entry().word.unpin();
    }
}
