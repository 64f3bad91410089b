//! Writers wait before memory is full of dirty pages, and never for ever; and room where all pages are dirty.
//!
//! Outside of the gate and of all locks. Who waits helps: he writes his own file back, unless another does.

use super::File;
use super::cache::Inner;
use super::flush::Balance;
use super::writeback::Why;
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use crate::store::errno::{self, ETIMEDOUT};
use crate::sync::{Patience, Relaxed, sleep};
use crate::units::BLOCK_BYTES;
use std::time::Duration;

/// Who makes this much dirty has written back as much, where too much is.
const HELP_BYTES: u64 = 2 * BLOCK_BYTES as u64;

/// Writers are slowed once for so much that is made dirty, whoever it is: often enough for no pause to be long, and
/// seldom enough for it to be one.
const PACED_BYTES: u64 = BLOCK_BYTES as u64 / 4;

const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// Between two looks whether another has made room.
const STEP: Duration = Duration::from_millis(1);

impl Balance {
    /// How long whoever has made so much dirty pauses: as long as that takes to be written, half way from where writers are
    /// slowed to the most; so it settles there.
    fn pause(&self, dirty_bytes: u64) -> Duration {
        let (over, span) =
            (dirty_bytes.saturating_sub(self.free_bytes), self.most_bytes - self.free_bytes.min(self.most_bytes));
        let takes_ns = u128::from(self.ns_per_mib.load(Relaxed)) * u128::from(PACED_BYTES) / (BLOCK_BYTES as u128 / 2);
        let pause_ns = takes_ns * 2 * u128::from(over) / u128::from(span.max(1));
        Duration::from_nanos(u64::try_from(pause_ns).unwrap_or(u64::MAX)).min(LONGEST_PAUSE)
    }
}

/// What has become clean so far, and since when nothing has.
struct Standstill {
    cleaned_bytes: u64,
    since: Patience,
}

impl Standstill {
    fn new(balance: &Balance) -> Self {
        Self { cleaned_bytes: balance.cleaned_bytes.load(Relaxed), since: Patience::new() }
    }

    /// Whether it lasts longer than anybody has to wait.
    fn is_too_long(&mut self, balance: &Balance) -> bool {
        let cleaned_bytes = balance.cleaned_bytes.load(Relaxed);
        if cleaned_bytes != self.cleaned_bytes {
            *self = Self { cleaned_bytes, since: Patience::new() };
        }
        u128::from(self.since.waited_ns()) > balance.patience.as_nanos()
    }
}

fn stuck() -> Error {
    Error::Store { doing: "waiting until what was written before is in the store", cause: errno::error(ETIMEDOUT) }
}

impl File {
    /// Whether who is about to make so much dirty has to wait first ([`File::throttle`]).
    #[cold]
    pub(super) fn must_wait(&self, bytes: u64) -> bool {
        if self.dirty.is_none() {
            return false;
        }
        let (balance, dirty_bytes) = (&self.cache.balance, self.cache.dirty_bytes());
        if dirty_bytes < balance.free_bytes {
            return false;
        }
        let made = balance.made_bytes.fetch_add(bytes, Relaxed);
        dirty_bytes >= balance.most_bytes || made / PACED_BYTES != (made + bytes) / PACED_BYTES
    }

    /// Waits until this file may have another dirty folio. Not under a lock, nor inside the gate.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with what the store says where nothing can be written back; as timed out if it does not go on.
    #[cold]
    pub(super) fn throttle(&self) -> Result<()> {
        let (cache, began) = (&self.cache, Patience::new());
        let dirty_bytes = cache.dirty_bytes();
        let done = if dirty_bytes < cache.balance.most_bytes {
            sleep(cache.balance.pause(dirty_bytes));
            Ok(())
        } else {
            self.await_clean()
        };
        stats::add(Counter::WritersThrottled, 1);
        stats::add(Counter::WritersThrottledUs, began.waited_ns() / 1000);
        done
    }

    fn await_clean(&self) -> Result<()> {
        let (cache, balance) = (&self.cache, &self.cache.balance);
        let mut standstill = Standstill::new(balance);
        while cache.dirty_bytes() >= balance.most_bytes {
            let Some((file, dirty)) = cache.file(self.id).zip(self.dirty.as_ref()) else { return Ok(()) };
            let is_helped = match file.write_some(Why::Share, HELP_BYTES, balance.patience) {
                Ok(bytes) => bytes.is_some_and(|bytes| bytes > 0),
                Err(Error::Busy { .. }) => return Err(stuck()),
                Err(error) => return Err(error),
            };
            // Other files have it all: their stores are to blame, this one's works.
            if dirty.bytes() < HELP_BYTES.min(balance.most_bytes / 4).max(1) {
                return Ok(());
            }
            if dirty.turns.is_failing() {
                return Err(dirty.failure());
            }
            if !is_helped {
                cache.note_much_dirty();
                sleep(STEP);
            }
            if standstill.is_too_long(balance) {
                return Err(stuck());
            }
        }
        Ok(())
    }
}

impl Inner {
    /// Writes folios back that can make room then, where nothing clean is left. Returns whether some became clean.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] as [`File::throttle`].
    pub(super) fn clean_some(&self, want_bytes: u64) -> Result<bool> {
        let balance = &self.balance;
        let mut standstill = Standstill::new(balance);
        let begun = standstill.cleaned_bytes;
        while self.dirty_bytes() > 0 {
            let (mut failure, mut may_go_on) = (None, false);
            for entry in self.dirty_files() {
                let Some(file) = entry.upgrade() else { continue };
                let Some(dirty) = &file.dirty else { continue };
                match file.write_some(Why::Room, want_bytes.max(HELP_BYTES), balance.patience) {
                    Ok(Some(bytes)) => may_go_on |= bytes > 0 || dirty.turns.is_midway(),
                    Ok(None) if dirty.turns.is_failing() => failure = Some(dirty.failure()),
                    // Another is at it, or was just now.
                    Ok(None) => may_go_on = true,
                    Err(Error::Busy { .. }) => failure = Some(stuck()),
                    Err(error) => failure = Some(error),
                }
                if balance.cleaned_bytes.load(Relaxed) != begun {
                    return Ok(true);
                }
            }
            if !may_go_on {
                return failure.map_or(Ok(false), Err);
            }
            if standstill.is_too_long(balance) {
                return Err(stuck());
            }
            sleep(STEP);
        }
        Ok(balance.cleaned_bytes.load(Relaxed) != begun)
    }
}
