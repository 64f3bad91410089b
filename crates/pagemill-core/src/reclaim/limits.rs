//! How much more memory may become resident before the kernel kills a process for it.
//!
//! [`Limits`] supplies the [`Room`], the bytes left below the nearest limit. [`super::kernel::Kernel`] reads it from
//! the kernel; tests use a fake. Reading the room costs system calls, so [`Headroom`] reads it as seldom as is safe. A
//! sample of the room gives *credit*: this process may use a part of the room without another sample, for as long as
//! other processes cannot have used up the rest. Below each limit there is a *margin*: memory is given back before
//! usage enters it.
//!
//! Uses `sync`. Locks: one, around a sample; a charge with credit does not take it.

use super::alarms::AlarmPlan;
use crate::stats::{self, Counter};
use crate::sync::Lock;
use pagemill_sys::cgroup::Limit;
use pagemill_sys::clock;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

/// The kind of the nearest limit.
///
/// Example: [`Room`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// No limit is known.
    None,
    /// The limit of a control group. The kernel kills processes of a group that exceeds it.
    Group,
    /// The machine's memory. A part of it is left to other processes.
    Machine,
}

/// A limit beyond which the kernel kills processes.
///
/// Example: [`Room`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KillLimit {
    /// The limit in bytes; `u64::MAX` for none.
    pub limit_bytes: u64,
    /// Usage of the group, without the memory that the kernel could reclaim.
    pub used_bytes: u64,
}

impl KillLimit {
    pub const NONE: Self = Self { limit_bytes: u64::MAX, used_bytes: 0 };

    /// Bytes that may still become resident before charges are refused. Charges may not use a reserve below the limit,
    /// so that page tables, stacks, the C library and executed code still get memory.
    pub fn room_bytes(&self) -> u64 {
        self.room_above_reserve(self.reserve_bytes())
    }

    /// As [`KillLimit::room_bytes`] for nested charges (made inside the small allocator), which may use half of the
    /// reserve.
    pub fn debt_room_bytes(&self) -> u64 {
        self.room_above_reserve(self.reserve_bytes() / 2)
    }

    /// Returns the bytes between the usage and a reserve of `reserve_bytes` below the limit.
    fn room_above_reserve(&self, reserve_bytes: u64) -> u64 {
        match self.limit_bytes {
            u64::MAX => u64::MAX,
            limit => (limit - reserve_bytes).saturating_sub(self.used_bytes),
        }
    }

    /// Returns the size of the reserve below the limit.
    fn reserve_bytes(&self) -> u64 {
        let most = self.limit_bytes / MAX_RESERVE_DIVISOR;
        (self.limit_bytes / RESERVE_DIVISOR).clamp(RESERVE_BYTES.start, RESERVE_BYTES.end).min(most)
    }
}

/// How much memory may still become resident below the nearest limit.
///
/// ```
/// use pagemill_core::reclaim::limits::{Bound, KillLimit, Room};
///
/// let room = Room::of_machine(16 << 30, 3 << 30); // 3 of 16 GiB are available
/// assert_eq!((room.bound, room.kill), (Bound::Machine, KillLimit::NONE));
/// assert_eq!((room.bytes, room.shortage(5 << 30)), (2 << 30, 3 << 30)); // a sixteenth stays for others
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub bound: Bound,
    /// Bytes left before usage enters the margin, in which free memory is given back. Negative inside the margin.
    pub bytes: i64,
    /// The nearest limit beyond which processes are killed. May differ from `limit_bytes`.
    pub kill: KillLimit,
    /// The limit with the least room; `u64::MAX` for none.
    pub limit_bytes: u64,
    /// No group has used three quarters of its limit, including file pages. Until a group has, an alarm suffices to
    /// wake the helper.
    pub is_far: bool,
    /// Bytes left before the machine's margin; `i64::MAX` if unknown.
    pub machine_bytes: i64,
}

impl Room {
    /// The room if there is no limit.
    pub const ENDLESS: Self = Self {
        bound: Bound::None,
        bytes: i64::MAX,
        kill: KillLimit::NONE,
        limit_bytes: u64::MAX,
        is_far: true,
        machine_bytes: i64::MAX,
    };

    /// Returns the room below a group's limits. The kernel can reclaim `idle_bytes` of the group's usage easily, and
    /// `other_bytes` with more effort.
    pub fn of_group(limit: Limit, usage_bytes: u64, idle_bytes: u64, other_bytes: u64) -> Self {
        let soft = limit.soft_bytes;
        let working_set = usage_bytes.saturating_sub(idle_bytes);
        let before_margin = soft - margin_bytes(limit);
        let kill = match limit.hard_bytes {
            u64::MAX => KillLimit::NONE,
            limit_bytes => KillLimit { limit_bytes, used_bytes: working_set.saturating_sub(other_bytes) },
        };
        Self {
            bound: Bound::Group,
            bytes: as_signed(before_margin).saturating_sub(as_signed(working_set)),
            kill,
            limit_bytes: limit.soft_bytes,
            is_far: usage_bytes < alarm_bytes(limit),
            machine_bytes: i64::MAX,
        }
    }

    /// Returns the room of the machine. A sixteenth of the machine's memory is the margin, which is left to other
    /// processes.
    pub fn of_machine(total_bytes: u64, available_bytes: u64) -> Self {
        let bytes = as_signed(available_bytes) - as_signed(total_bytes / MACHINE_MARGIN_DIVISOR);
        Self {
            bound: Bound::Machine,
            bytes,
            kill: KillLimit::NONE,
            limit_bytes: total_bytes,
            is_far: true,
            machine_bytes: bytes,
        }
    }

    /// Returns the bytes that must be given back before `bytes` more become resident.
    pub fn shortage(&self, bytes: u64) -> u64 {
        as_signed(bytes).saturating_sub(self.bytes).max(0) as u64
    }
}

/// Returns the usage from which a group counts as near its limit.
pub(super) fn alarm_bytes(limit: Limit) -> u64 {
    limit.soft_bytes - limit.soft_bytes / NEAR_DIVISOR
}

/// Returns the size of the margin below a group's limit.
pub(super) fn margin_bytes(limit: Limit) -> u64 {
    let margin = (limit.soft_bytes / GROUP_MARGIN_DIVISOR).clamp(GROUP_MARGIN_BYTES.start, GROUP_MARGIN_BYTES.end);
    margin.min(limit.soft_bytes / 2)
}

/// Converts a number of bytes to a signed number, which is at most `i64::MAX`.
fn as_signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The margin below a group's limit is the limit divided by this number, within [`GROUP_MARGIN_BYTES`]. The margin
/// covers page tables, stacks, and memory that several threads bring in between two samples.
const GROUP_MARGIN_DIVISOR: u64 = 16;
/// Bounds of the margin below a group's limit.
const GROUP_MARGIN_BYTES: std::ops::Range<u64> = 8 << 20..128 << 20;

/// The reserve below a limit at which the kernel kills is the limit divided by this number, within [`RESERVE_BYTES`].
/// The page tables of small pages alone take a 512th of the memory.
const RESERVE_DIVISOR: u64 = 64;
/// Bounds of the reserve below a limit at which the kernel kills.
const RESERVE_BYTES: std::ops::Range<u64> = 1 << 20..16 << 20;
/// The reserve is at most the limit divided by this number. Below a small limit that is less than the lower bound of
/// [`RESERVE_BYTES`].
const MAX_RESERVE_DIVISOR: u64 = 8;

/// A group is near its limit if less than `1/NEAR_DIVISOR` of the limit is left. Then samples also read the reclaimable
/// bytes.
pub(super) const NEAR_DIVISOR: u64 = 4;

/// The margin of the machine is its memory divided by this number.
const MACHINE_MARGIN_DIVISOR: u64 = 16;

/// A source of memory limits: the kernel, or a fake in tests.
///
/// ```
/// use pagemill_core::reclaim::limits::{Headroom, Limits, Room};
///
/// /// A fixed limit instead of the kernel's.
/// struct Fixed;
///
/// impl Limits for Fixed {
///     fn sample(&self) -> Room {
///         Room { bytes: 1 << 20, limit_bytes: 8 << 20, ..Room::ENDLESS }
///     }
/// }
///
/// let headroom = Headroom::default();
/// headroom.set_limits(&Fixed);
/// assert_eq!(headroom.sample().shortage(3 << 20), 2 << 20);
/// ```
pub trait Limits: Sync {
    /// Returns the room below the nearest limit now. May take some 50 us; must not allocate or lock.
    fn sample(&self) -> Room;

    /// Returns the alarms for the current limits, or `None` if these are still the limits of version `limits_version`,
    /// for which alarms were set.
    fn plan(&self, _limits_version: Option<u32>) -> Option<AlarmPlan> {
        None
    }
}

/// The room below the nearest limit, sampled no more often than is safe.
///
/// Example: [`Limits`].
pub struct Headroom {
    limits: OnceLock<&'static dyn Limits>,
    /// The credit: bytes that may still be charged before the next sample of the room.
    credit: AtomicI64,
    /// Time at which `credit` expires.
    valid_until_ns: AtomicU64,
    /// The room in the latest sample, in bytes.
    bytes: AtomicI64,
    /// The nearest limit in the latest sample.
    limit_bytes: AtomicU64,
    /// Whether the nearest limit in the latest sample is that of a control group.
    is_group: AtomicBool,
    sampling: Lock,
}

/// After a sample, charges may use up the room divided by this number (the *credit*) before the next sample. The rest
/// is left to other processes, which use the room, too.
const CREDIT_DIVISOR: i64 = 4;

/// Upper bound of the rate at which memory can be used up, in bytes per nanosecond.
pub(super) const FASTEST_BYTES_PER_NS: u64 = 16;

/// The credit of a sample expires after this time, in nanoseconds, at the latest.
const MAX_CREDIT_NS: u64 = 100_000_000;

impl Default for Headroom {
    fn default() -> Self {
        Self {
            limits: OnceLock::new(),
            credit: AtomicI64::new(0),
            valid_until_ns: AtomicU64::new(0),
            bytes: AtomicI64::new(i64::MAX),
            limit_bytes: AtomicU64::new(u64::MAX),
            is_group: AtomicBool::new(false),
            sampling: Lock::new(),
        }
    }
}

impl Headroom {
    /// Sets the source of limits. Before this call the room is unlimited.
    pub fn set_limits(&self, limits: &'static dyn Limits) {
        let _ = self.limits.set(limits);
    }

    /// Returns the kind of limit and the bytes left in the latest sample, without taking a new sample.
    pub fn latest_sample(&self) -> Room {
        let limit_bytes = self.limit_bytes.load(Relaxed);
        let bound = match (limit_bytes, self.is_group.load(Relaxed)) {
            (u64::MAX, _) => Bound::None,
            (_, true) => Bound::Group,
            (_, false) => Bound::Machine,
        };
        Room { bound, bytes: self.bytes.load(Relaxed), limit_bytes, ..Room::ENDLESS }
    }

    /// Returns the alarms for the current limits ([`Limits::plan`]). The caller must set the alarms after this call,
    /// outside of the lock, because setting them takes long.
    pub(super) fn plan(&self, limits_version: Option<u32>) -> Option<AlarmPlan> {
        let limits = self.limits.get()?;
        // The lock keeps the source of limits consistent in a fork child.
        let _guard = self.sampling.lock();
        limits.plan(limits_version)
    }

    /// Measures the room below the nearest limit now, and replaces the latest sample.
    pub fn sample(&self) -> Room {
        let Some(limits) = self.limits.get() else { return Room::ENDLESS };
        let _guard = self.sampling.lock();
        self.sample_locked(*limits)
    }

    /// Samples the room and replaces the credit. The caller must hold `sampling`.
    fn sample_locked(&self, limits: &dyn Limits) -> Room {
        let room = limits.sample();
        stats::add(Counter::RoomSampled, 1);
        self.bytes.store(room.bytes, Relaxed);
        self.limit_bytes.store(room.limit_bytes, Relaxed);
        self.is_group.store(room.bound == Bound::Group, Relaxed);
        let credit = room.bytes.max(0) / CREDIT_DIVISOR;
        self.credit.store(credit, Relaxed);
        let valid_ns = (credit as u64 / FASTEST_BYTES_PER_NS).min(MAX_CREDIT_NS);
        self.valid_until_ns.store(clock::fine_ns() + valid_ns, Relaxed);
        room
    }

    /// Returns the room if `bytes` more do not fit before the margin below the nearest limit. Otherwise subtracts them
    /// from the credit and returns `None`. The credit usually suffices without a sample; the call then costs one atomic
    /// subtraction and one read of the clock.
    pub fn is_short(&self, bytes: u64) -> Option<Room> {
        let limits = self.limits.get()?;
        let amount = as_signed(bytes);
        let has_credit =
            || clock::fine_ns() < self.valid_until_ns.load(Relaxed) && self.credit.fetch_sub(amount, Relaxed) >= amount;
        if has_credit() {
            return None;
        }
        let _guard = self.sampling.lock();
        if has_credit() {
            return None;
        }
        let room = self.sample_locked(*limits);
        // The bytes of this caller are subtracted from the new credit.
        self.credit.fetch_sub(amount, Relaxed);
        (room.shortage(bytes) > 0).then_some(room)
    }

    /// Gives credit for `bytes`, valid for `time_ns`, although there is no room before the margin. The caller has found
    /// that nothing can be given back, so a sample for every charge would be useless.
    pub(super) fn grant_credit(&self, bytes: u64, time_ns: u64) {
        self.credit.store(as_signed(bytes), Relaxed);
        self.valid_until_ns.store(clock::fine_ns() + time_ns, Relaxed);
    }

    /// Drops the credit that a fork child has inherited from its parent.
    pub(super) fn drop_credit(&self) {
        self.valid_until_ns.store(0, Relaxed);
    }

    /// Waits until no thread samples the room, and prevents new samples. Called before `fork`.
    pub fn acquire_for_fork(&self) {
        self.sampling.acquire();
    }

    /// Allows samples of the room again. Called after `fork`, in the parent and in the child.
    pub fn release_after_fork(&self) {
        self.sampling.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// A source of limits that returns the room that the test sets, and counts samples.
    struct FakeLimits {
        bytes: AtomicI64,
        samples: AtomicUsize,
    }

    impl Limits for FakeLimits {
        fn sample(&self) -> Room {
            self.samples.fetch_add(1, Relaxed);
            let bytes = self.bytes.load(Relaxed);
            Room { bound: Bound::Group, bytes, limit_bytes: 1 << 30, ..Room::ENDLESS }
        }
    }

    /// Returns a headroom whose source of limits is a fake with `bytes` of room.
    fn headroom(bytes: i64) -> (Headroom, &'static FakeLimits) {
        let fake = Box::leak(Box::new(FakeLimits { bytes: AtomicI64::new(bytes), samples: AtomicUsize::new(0) }));
        let headroom = Headroom::default();
        headroom.set_limits(fake);
        (headroom, fake)
    }

    /// There are 64 GiB of room. One sample must give credit for many charges, and each charge must be subtracted from
    /// the credit.
    #[test]
    fn credit_saves_samples() {
        let (headroom, fake) = headroom(64 << 30);
        for _ in 0..1000 {
            assert_eq!(headroom.is_short(1 << 20), None);
        }
        let samples = fake.samples.load(Relaxed);
        assert!((1..200).contains(&samples), "asked {samples} times");
        assert_eq!(headroom.is_short(1 << 40).unwrap().shortage(1 << 40), (1 << 40) - (64 << 30));
    }

    /// There is little room. Every charge must take a sample, unless credit was granted.
    #[test]
    fn near_the_limit_every_charge_is_sampled() {
        let (headroom, fake) = headroom(1000);
        for _ in 0..10 {
            assert_eq!(headroom.is_short(4096).unwrap().shortage(4096), 3096);
        }
        assert_eq!(fake.samples.load(Relaxed), 10);
        fake.bytes.store(-50, Relaxed);
        let short = |bytes| headroom.is_short(bytes).unwrap().shortage(bytes);
        assert_eq!((short(1), short(0)), (51, 50));
        headroom.grant_credit(100, u64::MAX / 4);
        assert_eq!((headroom.is_short(60), headroom.is_short(60).is_some()), (None, true));
        assert_eq!(headroom.latest_sample().bound, Bound::Group);
    }

    /// Without a source of limits, a charge of any size must fit.
    #[test]
    fn without_a_source_of_limits_room_is_unlimited() {
        let headroom = Headroom::default();
        assert_eq!((headroom.is_short(u64::MAX), headroom.sample()), (None, Room::ENDLESS));
    }

    /// Margins and reserves must stay within their bounds for groups of many sizes.
    #[test]
    fn margins_and_reserves_are_bounded() {
        for limit in [64u64 << 20, 256 << 20, 1 << 30, 64 << 30] {
            let both = Limit { soft_bytes: limit, hard_bytes: limit };
            let room = Room::of_group(both, 0, 0, 0);
            assert!(room.bytes < limit as i64 && (limit < 128 << 20 || room.bytes * 10 >= limit as i64 * 9), "{limit}");
            let over = Room::of_group(both, limit + 1, 0, 0);
            assert!(over.bytes < 0 && over.kill.room_bytes() == 0);
        }
        let limit = Limit { soft_bytes: 100, hard_bytes: 140 };
        let room = Room::of_group(limit, 90, 30, 20);
        assert_eq!(
            room,
            Room {
                bound: Bound::Group,
                bytes: -10,
                kill: KillLimit { limit_bytes: 140, used_bytes: 40 },
                limit_bytes: 100,
                is_far: false,
                machine_bytes: i64::MAX
            }
        );
        assert_eq!((room.kill.room_bytes(), room.kill.debt_room_bytes()), (100 - 17, 100 - 8));
        assert_eq!(Room::of_group(Limit { soft_bytes: 0, hard_bytes: 0 }, 5, 0, 0).kill.room_bytes(), 0);
        for (hard, reserve) in [(1 << 20, 128 << 10), (64 << 20, 1 << 20), (128 << 20, 2 << 20), (64 << 30, 16 << 20)] {
            let both = Limit { soft_bytes: hard, hard_bytes: hard };
            assert_eq!(Room::of_group(both, 0, 0, 0).kill.room_bytes(), hard - reserve);
        }
        let high = Limit { soft_bytes: 100, hard_bytes: u64::MAX };
        assert_eq!(Room::of_group(high, 500, 0, 0).kill.room_bytes(), u64::MAX, "memory.high kills no process");
        assert_eq!(Room::of_machine(160, 60).bytes, 50);
    }
}
