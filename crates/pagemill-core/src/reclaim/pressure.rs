//! Gives memory back before a control group's limit is exceeded or the machine runs short.
//!
//! These limits are shared with other processes. Inside their margin free memory is given back, by this process and by
//! its siblings. Only a charge that would use the reserve below a killing limit is refused, with `ENOMEM`.

use super::governor::WORTHWHILE_BYTES;
use super::limits::{Bound, Room};
use super::{Account, Reason, Urgency};
use crate::arena::Context;
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use pagemill_sys::clock;
use std::sync::atomic::Ordering::Relaxed;

/// Least amount given back at once, so that not every new block waits for another to go.
const STEP_BYTES: u64 = 4 << 20;

/// While nothing can be given back, this part of the room before the kill may become resident without a sample.
const GRANT_DIVISOR: u64 = 16;

/// After the siblings could not help, they are not asked first for this long.
const ELSEWHERE_PAUSE_NS: u64 = 100_000_000;

/// After nothing could be given back, the pause before the next attempt; doubled each time, up to the second value.
pub(super) const FUTILE_NS: std::ops::RangeInclusive<u64> = 1_000_000..=256_000_000;

impl Account {
    /// Makes room for `bytes` below the limits of groups and of the machine, as far as there is something to give back.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if the reserve below a group's limit would be used, counting all the group's file pages as
    /// free.
    #[inline]
    pub(super) fn make_system_room(&self, bytes: u64, context: Context) -> Result<()> {
        self.make_system_room_or(bytes, bytes, context)
    }

    /// As [`Account::make_system_room`], but refuses only if not even `least_bytes` fit.
    #[inline]
    pub(super) fn make_system_room_or(&self, bytes: u64, least_bytes: u64, context: Context) -> Result<()> {
        match self.headroom.is_short(bytes) {
            None => Ok(()),
            Some(room) => self.relieve(room, bytes, least_bytes, context),
        }
    }

    #[cold]
    fn relieve(&self, room: Room, bytes: u64, least_bytes: u64, context: Context) -> Result<()> {
        let room = self.give_for_system(room, bytes, context);
        let kill = room.kill;
        if room.shortage(bytes) == 0 || least_bytes <= kill.room_bytes() {
            return Ok(());
        }
        // Inside the small allocator most of its free memory is out of reach; the next call outside gives it back. The
        // reserve prevents a kill meanwhile.
        if self.admit_on_debt(context) && least_bytes <= kill.debt_room_bytes() {
            return Ok(());
        }
        stats::add(Counter::LimitRefused, 1);
        Err(Error::NoMemory { wanted_bytes: bytes, used_bytes: kill.used_bytes, limit_bytes: kill.limit_bytes })
    }

    /// Gives back until `bytes` more fit before the margin: first in this process, then in the siblings. Returns the
    /// room.
    pub(super) fn give_for_system(&self, mut room: Room, bytes: u64, context: Context) -> Room {
        let is_pausing = clock::fine_ns() < self.futile_until_ns.load(Relaxed);
        if room.shortage(bytes) == 0 || (is_pausing && bytes <= room.kill.room_bytes()) {
            return room;
        }
        let reason = if room.bound == Bound::Group { Reason::Group } else { Reason::Machine };
        let mut freed = 0;
        if self.is_better_off_elsewhere() {
            let short = room.shortage(bytes);
            let given = self.ask_for(short.max(STEP_BYTES), || self.headroom.sample().shortage(bytes) == 0);
            freed = given;
            room = self.headroom.sample();
            if room.shortage(bytes) >= short {
                // What the siblings gave lay in pieces, or was charged to another group.
                self.elsewhere_after_ns.store(clock::fine_ns() + ELSEWHERE_PAUSE_NS, Relaxed);
            }
        }
        for urgency in [Urgency::Request, Urgency::Limit] {
            let short = room.shortage(bytes);
            if short > 0 {
                freed = freed.saturating_add(self.give_back(short.max(STEP_BYTES), context, urgency, reason));
                room = self.headroom.sample();
            }
        }
        let short = room.shortage(bytes);
        if short > 0 && self.ask_for(short, || self.headroom.sample().shortage(bytes) == 0) > 0 {
            freed = freed.max(1);
            room = self.headroom.sample();
        }
        if context == Context::Outside {
            self.note_effort(freed > 0 || room.shortage(bytes) == 0, &room);
        }
        room
    }

    /// Whether a sibling could give back much more than this process, whose own free memory is needed again sooner.
    fn is_better_off_elsewhere(&self) -> bool {
        let Some(place) = self.place() else { return false };
        if clock::fine_ns() < self.elsewhere_after_ns.load(Relaxed) {
            return false;
        }
        let own = self.giveable();
        let elsewhere = place.page().totals().giveable.saturating_sub(place.published_giveable());
        elsewhere > WORTHWHILE_BYTES.max(own.saturating_mul(2))
    }

    /// Gives back, outside every lock, what nested charges exceeded a group's limit by. Returns whether that was
    /// enough.
    pub(super) fn pay_system_debt(&self) -> bool {
        let room = self.headroom.sample();
        // One byte, for which there is no room while there is a debt.
        self.give_for_system(room, 1, Context::Outside).kill.room_bytes() > 0
    }

    /// Records whether giving back helped. If it did not, it is not retried for a while.
    fn note_effort(&self, was_useful: bool, room: &Room) {
        let pause_ns = self.futile_pause_ns.load(Relaxed);
        if was_useful {
            self.futile_pause_ns.store(*FUTILE_NS.start(), Relaxed);
        } else {
            stats::add(Counter::NothingToGive, 1);
            self.futile_until_ns.store(clock::fine_ns() + pause_ns, Relaxed);
            self.futile_pause_ns.store((2 * pause_ns).clamp(*FUTILE_NS.start(), *FUTILE_NS.end()), Relaxed);
            self.headroom.grant((room.kill.room_bytes() / GRANT_DIVISOR).min(STEP_BYTES), *FUTILE_NS.start());
        }
    }
}
