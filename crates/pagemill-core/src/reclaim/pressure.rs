//! Pressure: gives memory back before a control group's limit is exceeded or the machine runs short.
//!
//! Other processes share these limits. When usage is inside the margin below a limit, this process and its siblings
//! give free memory back. A charge is refused, with `ENOMEM`, only if it would use the reserve below a limit beyond
//! which the kernel kills.

use super::governor::WORTHWHILE_BYTES;
use super::limits::{Bound, Room};
use super::{Account, Reason, Urgency};
use crate::arena::Context;
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use pagemill_sys::clock;
use std::sync::atomic::Ordering::Relaxed;

/// Minimum number of bytes to request from shrinkers at once. With smaller steps, every new block would have to wait
/// for a reclaim.
const MIN_STEP_BYTES: u64 = 4 << 20;

/// While nothing can be given back, the bytes left before the kernel kills, divided by this number, may become resident
/// without a new sample of the room.
const CREDIT_GRANT_DIVISOR: u64 = 16;

/// Time, in nanoseconds, for which this process reclaims its own memory first, after requests to siblings did not help.
const SIBLINGS_FIRST_PAUSE_NS: u64 = 100_000_000;

/// Pause, in nanoseconds, after an attempt that could give nothing back. Each further such attempt doubles the pause,
/// up to the end of the range.
pub(super) const RECLAIM_PAUSE_NS: std::ops::RangeInclusive<u64> = 1_000_000..=256_000_000;

impl Account {
    /// Gives memory back until `bytes` fit below the limits of groups and of the machine, or until nothing is left to
    /// give back.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if a charge of `least_bytes` would use the reserve below a group's limit, even if all of the
    /// group's file pages were free.
    #[inline]
    pub(super) fn make_system_room(&self, bytes: u64, least_bytes: u64, context: Context) -> Result<()> {
        match self.headroom.is_short(bytes) {
            None => Ok(()),
            Some(room) => self.give_back_or_refuse(room, bytes, least_bytes, context),
        }
    }

    /// Gives memory back until `bytes` more fit below the limits. Fails if not even `least_bytes` more fit afterwards.
    #[cold]
    fn give_back_or_refuse(&self, room: Room, bytes: u64, least_bytes: u64, context: Context) -> Result<()> {
        let room = self.give_for_system(room, bytes, context);
        let kill = room.kill;
        if room.shortage(bytes) == 0 || least_bytes <= kill.room_bytes() {
            return Ok(());
        }
        // Inside the small allocator's locks, most of that allocator's free memory cannot be purged. The next call
        // outside of the locks gives it back; the reserve prevents a kill until then.
        if self.may_exceed_limit(context) && least_bytes <= kill.debt_room_bytes() {
            return Ok(());
        }
        stats::add(Counter::LimitRefused, 1);
        Err(Error::NoMemory { wanted_bytes: bytes, used_bytes: kill.used_bytes, limit_bytes: kill.limit_bytes })
    }

    /// Gives memory back until `bytes` more fit before the margin: first in this process, then in the siblings. Returns
    /// the new room.
    pub(super) fn give_for_system(&self, mut room: Room, bytes: u64, context: Context) -> Room {
        let is_pausing = clock::fine_ns() < self.reclaim_paused_until_ns.load(Relaxed);
        if room.shortage(bytes) == 0 || (is_pausing && bytes <= room.kill.room_bytes()) {
            return room;
        }
        let reason = if room.bound == Bound::Group { Reason::Group } else { Reason::Machine };
        let mut freed = 0;
        if self.siblings_have_more_giveable() {
            let short = room.shortage(bytes);
            let given =
                self.request_from_siblings(short.max(MIN_STEP_BYTES), || self.headroom.sample().shortage(bytes) == 0);
            freed = given;
            room = self.headroom.sample();
            if room.shortage(bytes) >= short {
                // The siblings freed only parts of pages, or their memory was charged to another group.
                self.siblings_first_after_ns.store(clock::fine_ns() + SIBLINGS_FIRST_PAUSE_NS, Relaxed);
            }
        }
        for urgency in [Urgency::Request, Urgency::Limit] {
            let short = room.shortage(bytes);
            if short > 0 {
                freed = freed.saturating_add(self.give_back(short.max(MIN_STEP_BYTES), context, urgency, reason));
                room = self.headroom.sample();
            }
        }
        let short = room.shortage(bytes);
        if short > 0 && self.request_from_siblings(short, || self.headroom.sample().shortage(bytes) == 0) > 0 {
            freed = freed.max(1);
            room = self.headroom.sample();
        }
        if context == Context::Outside {
            self.update_reclaim_pause(freed > 0 || room.shortage(bytes) == 0, &room);
        }
        room
    }

    /// Returns whether the siblings could give back more than twice as much as this process. If so, requests are sent
    /// to the siblings first, because this process will need its own free memory sooner.
    fn siblings_have_more_giveable(&self) -> bool {
        let Some(place) = self.place() else { return false };
        if clock::fine_ns() < self.siblings_first_after_ns.load(Relaxed) {
            return false;
        }
        let own = self.giveable();
        let siblings_giveable = place.page().totals().giveable.saturating_sub(place.published_giveable());
        siblings_giveable > WORTHWHILE_BYTES.max(own.saturating_mul(2))
    }

    /// Gives back the bytes by which nested charges exceeded a group's limit. Returns whether usage is below the
    /// reserve again. The caller must hold no lock.
    pub(super) fn pay_system_debt(&self) -> bool {
        let room = self.headroom.sample();
        // Request one byte: while there is a debt, not even one byte has room.
        self.give_for_system(room, 1, Context::Outside).kill.room_bytes() > 0
    }

    /// Records whether giving memory back helped. If not, the next attempt waits for a pause that doubles each time.
    fn update_reclaim_pause(&self, was_useful: bool, room: &Room) {
        let pause_ns = self.reclaim_pause_ns.load(Relaxed);
        if was_useful {
            self.reclaim_pause_ns.store(*RECLAIM_PAUSE_NS.start(), Relaxed);
        } else {
            stats::add(Counter::NothingToGive, 1);
            self.reclaim_paused_until_ns.store(clock::fine_ns() + pause_ns, Relaxed);
            self.reclaim_pause_ns
                .store((2 * pause_ns).clamp(*RECLAIM_PAUSE_NS.start(), *RECLAIM_PAUSE_NS.end()), Relaxed);
            self.headroom.grant_credit(
                (room.kill.room_bytes() / CREDIT_GRANT_DIVISOR).min(MIN_STEP_BYTES),
                *RECLAIM_PAUSE_NS.start(),
            );
        }
    }
}
