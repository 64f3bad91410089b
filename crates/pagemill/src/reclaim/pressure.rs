//! Giving back before a control group's limit is passed, or the machine runs short.
//!
//! Limits of others are approached, not owned: inside their margin free
//! memory is given back, here and by the siblings. Nothing is refused for that,
//! except what would pass a group's limit itself: `ENOMEM` instead of a kill.

use super::limits::{Bound, Room};
use super::{Account, Reason, Urgency};
use crate::arena::Context;
use crate::error::{Error, Result};
use crate::stats::{self, Counter};
use pagemill_sys::clock;
use std::sync::atomic::Ordering::Relaxed;

/// Given back at once at the least, so that not every block that comes in waits for another to go.
const STEP_BYTES: u64 = 4 << 20;

/// After nothing could be given, nobody tries for so long; doubled each time, up to the second.
pub(super) const FUTILE_NS: std::ops::RangeInclusive<u64> = 1_000_000..=256_000_000;

impl Account {
    /// Makes room for `bytes` below the limits of groups and of the machine, as far as there is something to give.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] if a group's limit would be passed, counting all its file pages as free.
    #[inline]
    pub(super) fn make_system_room(&self, bytes: u64, context: Context) -> Result<()> {
        if self.headroom.shortage(bytes) == 0 { Ok(()) } else { self.relieve(bytes, context) }
    }

    #[cold]
    fn relieve(&self, bytes: u64, context: Context) -> Result<()> {
        let room = self.give_for_system(bytes, context);
        if room.shortage(bytes) == 0 || bytes <= room.hard_bytes {
            return Ok(());
        }
        stats::add(Counter::LimitRefused, 1);
        let (limit_bytes, left_bytes) = (room.limit_bytes, room.hard_bytes);
        Err(Error::NoMemory { wanted_bytes: bytes, used_bytes: limit_bytes.saturating_sub(left_bytes), limit_bytes })
    }

    /// Gives back until `bytes` more fit before the margin, here first, then at the siblings. Returns the room there is.
    pub(super) fn give_for_system(&self, bytes: u64, context: Context) -> Room {
        let mut room = self.headroom.sample();
        if room.shortage(bytes) == 0 || clock::fine_ns() < self.futile_until_ns.load(Relaxed) {
            return room;
        }
        let reason = if room.bound == Bound::Group { Reason::Group } else { Reason::Machine };
        let mut freed = 0;
        for urgency in [Urgency::Request, Urgency::Limit] {
            let short = room.shortage(bytes);
            if short > 0 {
                freed += self.give_back(short.max(STEP_BYTES), context, urgency, reason);
                room = self.headroom.sample();
            }
        }
        let short = room.shortage(bytes);
        if short > 0 && self.ask_for(short, || self.headroom.sample().shortage(bytes) == 0) > 0 {
            freed += 1;
            room = self.headroom.sample();
        }
        self.note_effort(freed > 0 || room.shortage(bytes) == 0);
        room
    }

    /// Whether giving back had a use; if not, it is not tried again at once.
    fn note_effort(&self, was_useful: bool) {
        let pause_ns = self.futile_pause_ns.load(Relaxed);
        if was_useful {
            self.futile_pause_ns.store(*FUTILE_NS.start(), Relaxed);
        } else {
            stats::add(Counter::NothingToGive, 1);
            self.futile_until_ns.store(clock::fine_ns() + pause_ns, Relaxed);
            self.futile_pause_ns.store((2 * pause_ns).clamp(*FUTILE_NS.start(), *FUTILE_NS.end()), Relaxed);
        }
    }
}
