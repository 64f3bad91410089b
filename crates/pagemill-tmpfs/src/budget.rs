//! Computes how much must be purged, and the size of the file system. Makes no system calls.
//!
//! For each limit there is a *purge threshold* (`mark_bytes`): while usage is above it, volatile files are purged as
//! fast as possible. Purges can be too slow, so the file system also gets a *size* with which it cannot grow beyond any
//! limit: a writer then gets `ENOSPC`, and the kernel kills no process.

use crate::file_access::FileSystemUsage;
use crate::groups::{INODE_BYTES, Sample, guard_bytes};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::cgroup::Machine;
use std::time::Duration;

/// Minimum distance of a purge threshold from its limit while the controller has real-time priority. For a group, the
/// distance is at least the limit divided by `MARGIN_DIVISOR`.
const MIN_MARGIN_BYTES: u64 = 64 * BLOCK_BYTES as u64;
const MARGIN_DIVISOR: u64 = 5;

/// The minimum distance for a controller without real-time priority. In a test, 200 MiB were enough and 64 MiB were
/// not.
const MIN_WIDE_MARGIN_BYTES: u64 = 100 * BLOCK_BYTES as u64;

/// Files are purged while less than this fraction (1/16) of the machine's memory is available. The computed size of the
/// file system leaves half of this fraction available.
const MACHINE_DIVISOR: u64 = 16;

/// New inodes may take 1/16 of the memory that is left below the nearest limit, or the memory allowed by
/// `INODE_GROWTH_FACTOR` if that is more.
const INODE_DIVISOR: u64 = 16;
/// New inodes may take four times the memory of the inodes that are predicted until the next check (as many as are
/// created in some 160 ms), but at most half of the memory that is left below the nearest limit.
const INODE_GROWTH_FACTOR: u64 = 4;

/// Upper bound of the rate at which processes can fill memory, in bytes per second.
const FASTEST_BYTES_PER_SECOND: u64 = 32 << 30;

/// Minimum pause between two checks of the limits.
pub const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
/// Maximum pause between two checks of the limits. It is short because an unknown group can fill its memory during a
/// pause. Checks at this interval wake the control loop a hundred times per second, which costs half a percent of a
/// CPU.
pub const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Identifies a limit: the file system's requested size, the limit of a group (its index in [`crate::groups`]), or the
/// machine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Size,
    Group(usize),
    Machine,
}

impl Bound {
    /// Returns the index of the group whose limit this is; `None` for the file system's size and the machine's memory.
    pub fn group(self) -> Option<usize> {
        match self {
            Self::Group(watch) => Some(watch),
            Self::Size | Self::Machine => None,
        }
    }
}

/// A limit, the usage that counts against it, and its purge threshold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitUsage {
    pub bound: Bound,
    pub name: String,
    pub limit_bytes: u64,
    pub used_bytes: u64,
    /// The part of `used_bytes` that no purge can free.
    pub fixed_bytes: u64,
    /// The purge threshold: files are purged while `used_bytes` is above it.
    pub mark_bytes: u64,
}

impl LimitUsage {
    /// Returns the bytes to purge: the usage above the purge threshold.
    pub fn excess_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.mark_bytes)
    }

    /// Returns the distance of the usage from the purge threshold; 0 above the threshold.
    pub fn room_bytes(&self) -> u64 {
        self.mark_bytes.saturating_sub(self.used_bytes)
    }
}

/// The result of one check of the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    pub lines: Vec<LimitUsage>,
    /// The size that the file system must get.
    pub size_bytes: u64,
    /// The maximum number of inodes that the file system must get.
    pub max_inodes: u64,
    /// Name of the limit that leaves the least room and so bounds `size_bytes`: that of a group, or of the machine.
    pub nearest: Option<String>,
}

impl Budget {
    /// Computes the purge thresholds of all limits, and the size of the file system. `size_bytes` is the requested
    /// size, `usage` the usage of the file system, and `peak_bytes` the recent peak of [`occupied_bytes`]. `held`
    /// returns the memory of the volatile files whose purge lowers the usage of a limit.
    pub fn new(
        size_bytes: u64,
        (usage, peak_bytes): (FileSystemUsage, u64),
        groups: &[Sample],
        machine: Option<Machine>,
        margins: Margins,
        held: impl Fn(Bound) -> u64,
    ) -> Self {
        let line = |bound, name: &str, limit_bytes: u64, used_bytes: u64| {
            let fixed_bytes = used_bytes.saturating_sub(held(bound));
            let mark_bytes = margins.mark_bytes(bound, limit_bytes, fixed_bytes);
            debug_assert!(mark_bytes <= limit_bytes, "a purge begins before the limit");
            LimitUsage { bound, name: name.to_owned(), limit_bytes, used_bytes, fixed_bytes, mark_bytes }
        };
        let mut lines = vec![line(Bound::Size, "size", size_bytes, usage.used_bytes)];
        let (mut headroom, mut nearest) = (u64::MAX, None);
        let mut bound = |room_bytes: u64, name: String| {
            if room_bytes < headroom {
                (headroom, nearest) = (room_bytes, Some(name));
            }
        };
        for group in groups {
            lines.push(line(Bound::Group(group.watch), &group.name, group.limit_bytes, group.working_set_bytes));
            // A group that has written almost nothing to this file system must not reduce the size for all users. No
            // group has more memory here than the file system: what a group wrote may be deleted by now. The peak is
            // used because memory that was purged may be filled again.
            let guard_bytes = guard_bytes(group.limit_bytes);
            if group.here_bytes.min(peak_bytes) >= guard_bytes {
                bound(group.hard_room_bytes.saturating_sub(guard_bytes), format!("group {}", group.name));
            }
        }
        if let Some(Machine { total_bytes, available_bytes, .. }) = machine {
            let (kept_bytes, used_bytes) = (total_bytes / MACHINE_DIVISOR, total_bytes.saturating_sub(available_bytes));
            let mark_bytes = total_bytes - kept_bytes;
            lines.push(LimitUsage {
                bound: Bound::Machine,
                name: "machine".into(),
                limit_bytes: total_bytes,
                used_bytes,
                fixed_bytes: used_bytes.saturating_sub(held(Bound::Machine)),
                mark_bytes,
            });
            bound(available_bytes.saturating_sub(kept_bytes / 2), "the machine's memory".into());
        }
        // Size and inodes are at least the usage, since tmpfs refuses less. They are never 0, since 0 means unlimited.
        let predicted_bytes = margins.predicted_inodes.saturating_mul(INODE_BYTES * INODE_GROWTH_FACTOR);
        let for_inodes = predicted_bytes.clamp(headroom / INODE_DIVISOR, headroom / 2);
        debug_assert!(for_inodes <= headroom, "inodes take no more than the headroom");
        let size_bytes = size_bytes
            .min(usage.used_bytes.saturating_add(headroom - for_inodes))
            .max(usage.used_bytes)
            .max(BLOCK_BYTES as u64);
        let most_inodes = machine.map_or(usage.max_inodes, |machine| default_inodes(machine.total_bytes));
        let max_inodes =
            most_inodes.min(usage.inodes.saturating_add(for_inodes / INODE_BYTES)).max(usage.inodes).max(1);
        debug_assert!(size_bytes > 0 && max_inodes > 0, "0 means unlimited");
        debug_assert!(
            size_bytes >= usage.used_bytes && max_inodes >= usage.inodes,
            "tmpfs refuses less than the usage"
        );
        Self { lines, size_bytes, max_inodes, nearest }
    }

    /// Returns the smallest distance between the usage of a limit and its purge threshold, over all limits.
    pub fn room_bytes(&self) -> u64 {
        self.lines.iter().map(LimitUsage::room_bytes).min().unwrap_or(u64::MAX)
    }

    /// Returns the smallest distance between the usage of a limit and the limit, over all limits. Ignores the limits in
    /// `except`.
    pub fn room_to_limit_bytes(&self, except: &[Bound]) -> u64 {
        let lines = self.lines.iter().filter(|line| !except.contains(&line.bound));
        lines.map(|line| line.limit_bytes.saturating_sub(line.used_bytes)).min().unwrap_or(u64::MAX)
    }

    /// Returns whether opens must wait while writers are fast: the usage of a limit is above its purge threshold by
    /// more than a quarter of the distance between threshold and limit. Ignores the limits in `except`. Also ignores
    /// limits for which the memory that cannot be purged alone exceeds that value, because a purge cannot end the
    /// delay, unless the limit is in `searched`: it is unknown then how much can be purged.
    pub fn is_close_to_limit(&self, except: &[Bound], searched: &[Bound]) -> bool {
        self.lines.iter().filter(|line| !except.contains(&line.bound)).any(|line| {
            debug_assert!(line.mark_bytes <= line.limit_bytes && line.fixed_bytes <= line.used_bytes);
            let threshold_bytes = line.mark_bytes + line.limit_bytes.saturating_sub(line.mark_bytes) / 4;
            let may_purge = line.fixed_bytes <= threshold_bytes || searched.contains(&line.bound);
            line.used_bytes > threshold_bytes && may_purge
        })
    }

    /// Returns how long a writer at the rate `FASTEST_BYTES_PER_SECOND` needs to reach the nearest purge threshold,
    /// between 1 and 10 ms.
    pub fn pause(&self) -> Duration {
        Duration::from_nanos(
            (u128::from(self.room_bytes()) * 1_000_000_000 / u128::from(FASTEST_BYTES_PER_SECOND)) as u64,
        )
        .clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
    }

    /// Returns whether the file system's size or its maximum number of inodes must be changed to the computed one. A
    /// size that is too large by a block or more must be changed at once. One that is too small must be changed if the
    /// file system is nearly full or if the difference is large.
    pub fn wants_change(&self, usage: FileSystemUsage) -> bool {
        self.wants_size(usage) || self.wants_inodes(usage)
    }

    /// Returns whether the maximum number of inodes must be changed. The number of free inodes may differ from the
    /// computed number by an eighth, since each change costs a system call.
    fn wants_inodes(&self, usage: FileSystemUsage) -> bool {
        let free = |max_inodes: u64| max_inodes.saturating_sub(usage.inodes);
        let (now, right) = (free(usage.max_inodes), free(self.max_inodes));
        now.abs_diff(right) > right / 8
    }

    pub fn wants_size(&self, usage: FileSystemUsage) -> bool {
        let (now, right) = (usage.size_bytes, self.size_bytes);
        let near_bytes = 16 * BLOCK_BYTES as u64;
        if right < now {
            return now - right >= BLOCK_BYTES as u64;
        }
        let is_full = now.saturating_sub(usage.used_bytes) < 2 * near_bytes;
        (is_full && right - now >= BLOCK_BYTES as u64) || right - now >= near_bytes.max(now / 16)
    }
}

/// Returns the memory of all files and inodes of the file system.
pub fn occupied_bytes(usage: FileSystemUsage) -> u64 {
    usage.used_bytes.saturating_add(usage.inodes.saturating_mul(INODE_BYTES))
}

/// Returns tmpfs's default for the maximum number of inodes: half of the machine's pages.
fn default_inodes(machine_bytes: u64) -> u64 {
    machine_bytes / os_page_bytes() as u64 / 2
}

/// What determines the distance of purge thresholds from their limits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Margins {
    /// The controller has real-time priority, so its checks are rarely late.
    pub is_preferred: bool,
    /// Predicted growth of the usage before the next check ([`crate::growth_predictor`]).
    pub predicted_bytes: u64,
    /// Predicted growth of the number of inodes before the next check.
    pub predicted_inodes: u64,
}

impl Margins {
    /// Returns the purge threshold of a limit, given that `fixed_bytes` of the usage cannot be purged.
    ///
    /// The distance between threshold and limit is the larger of two values. The first value does not depend on
    /// writers:
    ///
    /// - For a group: 128 MiB or a fifth of the limit, whichever is more, but at most a quarter of the limit. The
    ///   kernel kills processes beyond a group's limit.
    /// - For the size: 128 MiB, but at most an eighth of the size. Beyond the size, only writes fail.
    /// - Without real-time priority: 200 MiB instead of 128, and at most twice the fraction.
    ///
    /// The second value is the predicted growth, but at most five eighths of a group's limit, or three eighths of the
    /// size. It must leave a quarter of the limit above `fixed_bytes` for the newest volatile files.
    fn mark_bytes(self, bound: Bound, limit_bytes: u64, fixed_bytes: u64) -> u64 {
        let least = if self.is_preferred { MIN_MARGIN_BYTES } else { MIN_WIDE_MARGIN_BYTES };
        let part = if self.is_preferred { 1 } else { 2 };
        let (unmeasured, most) = match bound {
            Bound::Group(_) => {
                (least.max(limit_bytes / MARGIN_DIVISOR).min(limit_bytes / 4 * part), limit_bytes / 8 * 5)
            }
            Bound::Size | Bound::Machine => (least.min(limit_bytes / 8 * part), limit_bytes / 8 * 3),
        };
        debug_assert!(unmeasured <= limit_bytes && most <= limit_bytes, "margins are parts of the limit");
        let for_the_fast = limit_bytes - self.predicted_bytes.min(most);
        (limit_bytes - unmeasured).min(for_the_fast.max(fixed_bytes.saturating_add(limit_bytes / 4)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = BLOCK_BYTES as u64 / 2;

    const NOTHING: fn(Bound) -> u64 = |_| 0;

    const PREFERRED: Margins = Margins { is_preferred: true, predicted_bytes: 0, predicted_inodes: 0 };

    fn usage(size: u64, used: u64) -> FileSystemUsage {
        FileSystemUsage { size_bytes: size * MIB, used_bytes: used * MIB, max_inodes: 1, inodes: 1 }
    }

    /// Returns `usage` with the recent peak of a file system that had much more memory some seconds ago.
    fn with_high_peak(usage: FileSystemUsage) -> (FileSystemUsage, u64) {
        (usage, u64::MAX)
    }

    fn group(limit: u64, used: u64) -> Sample {
        let hard_room_bytes = limit.saturating_sub(used) * MIB;
        Sample {
            watch: 3,
            name: "/g".into(),
            limit_bytes: limit * MIB,
            working_set_bytes: used * MIB,
            hard_room_bytes,
            here_bytes: used * MIB,
        }
    }

    /// A group uses 420 of 512 MiB. The purge threshold must be 128 MiB below the limit, and the size 8 MiB smaller
    /// than what fits below the limit.
    #[test]
    fn a_group_bounds_the_size() {
        let budget =
            Budget::new(8192 * MIB, with_high_peak(usage(8192, 400)), &[group(512, 420)], None, PREFERRED, NOTHING);
        let line = &budget.lines[1];
        assert_eq!((line.bound, line.mark_bytes / MIB, line.excess_bytes() / MIB), (Bound::Group(3), 384, 36));
        let headroom = (512 - 420 - 8) * MIB;
        assert_eq!(budget.size_bytes, 400 * MIB + headroom / 16 * 15);
        assert_eq!(budget.max_inodes, 1, "the tests' file system has no more");
        assert!(budget.wants_change(usage(8192, 400)));
        assert!(!budget.wants_change(usage(480, 400)));
        assert_eq!((budget.room_bytes(), budget.pause()), (0, SHORTEST_PAUSE));
    }

    /// Opens must wait while usage is above the purge threshold by more than a quarter of the distance to the limit
    /// (384 + 32 MiB of 512), but not if nothing can be purged for that limit.
    #[test]
    fn opens_wait_close_to_a_limit() {
        let budget = |used: u64, held: u64| {
            Budget::new(8192 * MIB, with_high_peak(usage(8192, 400)), &[group(512, used)], None, PREFERRED, |_| {
                held * MIB
            })
        };
        let is_close = |used, held, except: &[Bound]| budget(used, held).is_close_to_limit(except, &[]);
        assert_eq!([300, 416, 417].map(|used| is_close(used, 100, &[])), [false, false, true]);
        assert!(!is_close(417, 100, &[Bound::Group(3)]) && !is_close(450, 10, &[]) && is_close(450, 40, &[]));
        assert!(budget(450, 10).is_close_to_limit(&[], &[Bound::Group(3)]), "a scan searches for files");
        assert_eq!([300, 500, 520].map(|used| budget(used, 0).room_to_limit_bytes(&[]) / MIB), [212, 12, 0]);
        assert_eq!(budget(500, 0).room_to_limit_bytes(&[Bound::Group(3)]) / MIB, 7792);
    }

    /// A group near its limit has written only 1 MiB to the file system. The group's limit must not bound the size, but
    /// the group's files must be purged.
    #[test]
    fn limits_of_nonwriters_do_not_bound_the_size() {
        let stranger = Sample { here_bytes: MIB, ..group(64, 60) };
        let budget = Budget::new(8192 * MIB, with_high_peak(usage(8192, 400)), &[stranger], None, PREFERRED, NOTHING);
        assert_eq!(budget.size_bytes, 8192 * MIB);
        assert_eq!(budget.lines[1].excess_bytes() / MIB, 12);
    }

    /// A group counts with much memory, but the file system recently had less than `guard_bytes` of the group's limit:
    /// the group's files were deleted, or they are in another tmpfs. The limit must not bound the size.
    #[test]
    fn groups_do_not_bound_an_empty_file_system() {
        let budget = |usage: FileSystemUsage, peak: u64| {
            Budget::new(8192 * MIB, (usage, peak * MIB), &[group(512, 500)], None, PREFERRED, NOTHING)
        };
        assert_eq!(budget(usage(8192, 0), 7).size_bytes, 8192 * MIB);
        assert_eq!(
            budget(usage(8192, 0), 8).size_bytes,
            4 * MIB / 16 * 15,
            "8 MiB were purged and may be filled again"
        );
        let inodes = FileSystemUsage { inodes: 10_000, ..usage(8192, 7) };
        assert_eq!(occupied_bytes(inodes), 7 * MIB + 10_000 * INODE_BYTES);
    }

    /// Computes purge thresholds of several limits. A threshold must be lower without real-time priority and for fast
    /// writers. For a small limit, the distance must be a quarter of the limit (a half without priority).
    #[test]
    fn margins_fit_the_limit() {
        let mark = |margins: Margins, limit: u64, fixed: u64| {
            margins.mark_bytes(Bound::Group(0), limit * MIB, fixed * MIB) / MIB
        };
        assert_eq!(mark(PREFERRED, 512, 0), 512 - 128);
        assert_eq!(mark(Margins::default(), 512, 0), 512 - 200);
        assert_eq!((mark(PREFERRED, 100, 0), mark(Margins::default(), 100, 0)), (75, 50));
        assert_eq!(mark(PREFERRED, 10_000, 0), 8000);
        let fast = Margins { predicted_bytes: 300 * MIB, ..PREFERRED };
        assert_eq!((mark(fast, 1000, 0), mark(fast, 512, 0), mark(fast, 400, 0)), (700, 212, 150));
        // Fast writers lower the threshold only so far that the fixed memory and a quarter of the limit fit below it,
        // and never raise it.
        assert_eq!((mark(fast, 512, 100), mark(fast, 512, 300)), (228, 384));
    }

    /// The purge threshold of small file systems must be seven eighths of the size (three quarters without priority),
    /// and lower only for fast writers.
    #[test]
    fn small_sizes_have_narrow_margins() {
        let mark = |margins: Margins, size: u64| margins.mark_bytes(Bound::Size, size * MIB, 0) / MIB;
        assert_eq!([64, 200, 8192].map(|size| mark(PREFERRED, size)), [56, 175, 8064]);
        assert_eq!([64, 200, 8192].map(|size| mark(Margins::default(), size)), [48, 150, 7992]);
        let faster = |mib: u64| mark(Margins { predicted_bytes: mib * MIB, ..PREFERRED }, 200);
        assert_eq!([10, 40, 60, 1000].map(faster), [175, 160, 140, 125]);
    }

    /// Far from every limit, the size must be the requested one, and the pause must be `LONGEST_PAUSE`. If the machine
    /// has little memory, both the size and the purge threshold must follow.
    #[test]
    fn far_from_limits_the_pause_is_longest() {
        let machine = Machine { total_bytes: 32_000 * MIB, available_bytes: 30_000 * MIB, swap_free_bytes: 0 };
        let budget = Budget::new(8192 * MIB, with_high_peak(usage(8192, 0)), &[], Some(machine), PREFERRED, NOTHING);
        assert_eq!((budget.size_bytes, budget.pause()), (8192 * MIB, LONGEST_PAUSE));
        assert!(!budget.wants_size(usage(8192, 0)));
        let short = Machine { available_bytes: 1500 * MIB, ..machine };
        let budget = Budget::new(8192 * MIB, with_high_peak(usage(8192, 4000)), &[], Some(short), PREFERRED, NOTHING);
        assert_eq!(budget.size_bytes, 4000 * MIB + 500 * MIB / 16 * 15);
        assert_eq!(budget.lines[1].excess_bytes() / MIB, 500);
    }

    /// Empty files take memory of the group that creates them, too. Their number must be bounded by a sixteenth of the
    /// memory below the limit, and by tmpfs's default. The bound must be set when it is much lower, or when few inodes
    /// are free.
    #[test]
    fn a_group_bounds_the_inodes() {
        let machine = Machine { total_bytes: 32_000 * MIB, available_bytes: 30_000 * MIB, swap_free_bytes: 0 };
        let usage = |max_inodes, inodes| FileSystemUsage { max_inodes, inodes, ..usage(8192, 0) };
        let budget = |group: &[Sample], inodes| {
            Budget::new(8192 * MIB, with_high_peak(usage(1, inodes)), group, Some(machine), PREFERRED, NOTHING)
        };
        let near = budget(&[group(512, 420)], 1000);
        assert_eq!(near.max_inodes, 1000 + (512 - 420 - 8) * MIB / 16 / INODE_BYTES);
        let is_wanted = |max_inodes, inodes| near.wants_inodes(usage(max_inodes, inodes));
        assert!(is_wanted(1 << 20, 1000) && !is_wanted(near.max_inodes + 400, 1000));
        assert!(is_wanted(near.max_inodes - 500, 1000) && !is_wanted(near.max_inodes - 400, 1000));
        let fast = Margins { predicted_inodes: 10_000, ..PREFERRED };
        let fast =
            Budget::new(8192 * MIB, with_high_peak(usage(1, 0)), &[group(512, 420)], Some(machine), fast, NOTHING);
        assert_eq!(fast.max_inodes, 42 * MIB / INODE_BYTES, "half of the room");
        assert_eq!(budget(&[group(512, 510)], 1000).max_inodes, 1000, "no room is left");
        assert_eq!(budget(&[], 0).max_inodes, (30_000 - 1000) * MIB / 16 / INODE_BYTES);
        assert_eq!(budget(&[], 1 << 30).max_inodes, 1 << 30, "tmpfs refuses less than are in use");
    }

    /// The current size is smaller than the computed one. It must be raised when usage comes near it or the difference
    /// is large, but not for a few MiB.
    #[test]
    fn a_small_size_is_raised_in_time() {
        let budget =
            Budget::new(8192 * MIB, with_high_peak(usage(1000, 900)), &[group(4096, 1000)], None, PREFERRED, NOTHING);
        assert!(budget.wants_change(usage(1000, 980)) && budget.wants_change(usage(1000, 900)));
        let close = Budget { size_bytes: 1010 * MIB, ..budget };
        assert!(!close.wants_change(usage(1000, 900)), "not worth the call");
        assert!(close.wants_change(usage(1000, 970)));
    }

    proptest! {
        /// Any usage and limits. The size must be at least the usage and at least a block. It must be at most the
        /// requested size, unless usage is above that size. No computation may overflow.
        #[test]
        fn sizes_stay_in_their_bounds(size in 1u64.., used in 0u64.., limit in 1u64.., working in 0u64.., hard in 0u64.., total in 0u64.., available in 0u64.., max_inodes in 0u64.., inodes in 0u64..) {
            let usage = FileSystemUsage { size_bytes: size, used_bytes: used, max_inodes, inodes };
            let group = Sample { watch: 0, name: String::new(), limit_bytes: limit, working_set_bytes: working, hard_room_bytes: hard, here_bytes: working };
            let machine = Machine { total_bytes: total, available_bytes: available, swap_free_bytes: 0 };
            let budget = Budget::new(size, with_high_peak(usage), &[group], Some(machine), PREFERRED, NOTHING);
            prop_assert!(budget.size_bytes >= used.max(BLOCK_BYTES as u64));
            prop_assert!(budget.size_bytes <= size.max(used).max(BLOCK_BYTES as u64));
            prop_assert!(budget.max_inodes >= inodes.max(1));
            let _ = (budget.pause(), budget.wants_change(usage));
        }
    }
}
