//! The limits that the kernel sets: those of the control groups that charge this process, and the machine's memory.
//!
//! Uses `sys`. Locks: one, around `ControlGroups`; it is only tried, so no thread waits for it.

use super::alarms::AlarmPlan;
use super::limits::{self, KillLimit, Limits, Room};
use crate::stats::{self, Counter};
use pagemill_sys::cgroup::{self, Hierarchy, Limit, MAX_LEVELS, Machine, Version};
use pagemill_sys::file::Path;
use pagemill_sys::{clock, stack};
use std::io;
use std::sync::Mutex;

/// The kernel as a source of limits: every visible control group above this process, and `MemAvailable`.
///
/// A limit that cannot be read is ignored, for example if a group has vanished, a file contains no number, or `/proc`
/// is missing.
///
/// ```
/// use pagemill_core::reclaim::{kernel::Kernel, limits::Limits};
///
/// static KERNEL: Kernel = Kernel::new(""); // a prefix of /proc and /sys, for tests
/// assert!(KERNEL.sample().limit_bytes > 0);
/// ```
pub struct Kernel {
    /// Prefix of every path: empty, or in tests a folder with fake files.
    root: &'static str,
    /// The lock is only tried, because [`super::limits::Headroom`] takes one sample at a time.
    groups: Mutex<ControlGroups>,
}

/// The control groups of this process and their limits, as of the last refresh.
struct ControlGroups {
    /// Version number of the fields below, incremented with every change.
    state: u32,
    groups: Option<Hierarchy>,
    /// Limit of each level, innermost first.
    limits: [Limit; MAX_LEVELS],
    /// Time of the next refresh.
    next_refresh_ns: u64,
    /// The last search for control groups failed because no descriptor or no memory was free.
    search_failed: bool,
}

/// Interval, in nanoseconds, between two refreshes of the groups and their limits. A move to another group, or a new
/// limit, is noticed within this time.
const REFRESH_INTERVAL_NS: u64 = 1_000_000_000;

/// Interval, in nanoseconds, between two searches for control groups if the process is in none.
const REFRESH_INTERVAL_WITHOUT_GROUPS_NS: u64 = 10_000_000_000;

/// Size of the stack for the search for control groups. A thread with a small stack may have less left when it calls
/// malloc.
const SEARCH_STACK_BYTES: usize = 64 << 10;

impl Kernel {
    pub const fn new(root: &'static str) -> Self {
        let groups = ControlGroups {
            state: 0,
            groups: None,
            limits: [Limit::NONE; MAX_LEVELS],
            next_refresh_ns: 0,
            search_failed: false,
        };
        Self { root, groups: Mutex::new(groups) }
    }
}

impl ControlGroups {
    /// Calls [`Self::refresh`] on a new stack, if the time of the next refresh has come.
    fn refresh_if_due(&mut self, root: &'static str) {
        let now = clock::fine_ns();
        if now < self.next_refresh_ns {
            return;
        }
        stack::call_on_new(SEARCH_STACK_BYTES, || self.refresh(root));
        let is_final = self.groups.is_none() && !self.search_failed;
        self.next_refresh_ns = now + if is_final { REFRESH_INTERVAL_WITHOUT_GROUPS_NS } else { REFRESH_INTERVAL_NS };
    }

    /// Reads the limits of the control groups. If the process is in other groups than before, searches for the groups
    /// first.
    fn refresh(&mut self, root: &str) {
        let is_current = self.groups.as_ref().is_some_and(|groups| groups.is_current(root));
        if !is_current {
            let found = Hierarchy::find(root);
            self.search_failed = found.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::NotFound);
            self.groups = found.ok();
        }
        let limits = std::array::from_fn(|level| {
            let limit = self.groups.as_ref().and_then(|groups| Some(groups.limit(&groups.folder(level)?)));
            limit.unwrap_or(Limit::NONE)
        });
        let has_moved = !is_current && self.groups.is_some();
        if has_moved || limits != self.limits {
            // The first result is counted as no change.
            stats::add(Counter::LimitsChanged, u64::from(self.state > 0));
            self.state += 1;
        }
        self.limits = limits;
    }

    /// Returns the control groups that have a limit, innermost first.
    fn limited_groups(&self) -> impl Iterator<Item = (Path, Limit)> {
        let levels = self.limits.iter().enumerate().filter(|(_, limit)| **limit != Limit::NONE);
        levels.filter_map(|(level, limit)| Some((self.groups.as_ref()?.folder(level)?, *limit)))
    }

    /// Returns the limits and files for which alarms are to be set.
    fn plan(&self, root: &str) -> AlarmPlan {
        let version = self.groups.as_ref().map(|groups| groups.version);
        let mut limited = self.limited_groups();
        let groups = std::array::from_fn(|_| limited.next());
        let own = self.groups.as_ref().and_then(|groups| groups.folder(0)).filter(|_| version == Some(Version::V2));
        let of_group = own.and_then(|own| Path::format(format_args!("{}/memory.pressure", own.as_str())));
        let of_machine = Path::format(format_args!("{root}/proc/pressure/memory"));
        AlarmPlan {
            state: self.state,
            version,
            groups,
            is_complete: limited.next().is_none(),
            stalls: [of_group, of_machine],
        }
    }

    /// Returns the room (bytes left below the limit) of the group with the least room. Its `kill` is the least room
    /// before a kill in any group.
    fn nearest_room(&self) -> Option<Room> {
        let groups = self.groups.as_ref()?;
        let rooms = self.limited_groups().filter_map(|(folder, limit)| {
            let usage = groups.usage_bytes(&folder);
            stats::add(Counter::LimitsUnread, u64::from(usage.is_err()));
            let usage = usage.ok()?;
            let is_near = usage > limits::alarm_bytes(limit);
            let (idle, other) = if is_near { groups.reclaimable_bytes(&folder) } else { (0, 0) };
            Some(Room::of_group(limit, usage, idle, other))
        });
        rooms.reduce(|nearest, room| {
            let kill = if room.kill.room_bytes() < nearest.kill.room_bytes() { room.kill } else { nearest.kill };
            let is_far = nearest.is_far && room.is_far;
            Room { kill, is_far, ..if room.bytes < nearest.bytes { room } else { nearest } }
        })
    }
}

impl Limits for Kernel {
    fn sample(&self) -> Room {
        let group = self.groups.try_lock().ok().and_then(|mut groups| {
            groups.refresh_if_due(self.root);
            groups.nearest_room()
        });
        let machine = cgroup::machine(self.root);
        stats::add(Counter::LimitsUnread, u64::from(machine.is_err()));
        let of_machine = |machine: &Machine| Room::of_machine(machine.total_bytes, machine.available_bytes);
        let room = machine.as_ref().map_or(Room::ENDLESS, of_machine);
        let Some(group) = group else { return room };
        // With free swap the kernel writes pages to swap before it kills, so no charge is refused.
        let has_swap = machine.is_ok_and(|machine| machine.swap_free_bytes > 0);
        let kill = if has_swap { KillLimit::NONE } else { group.kill };
        let nearer = if group.bytes <= room.bytes { group } else { room };
        Room { kill, is_far: group.is_far, machine_bytes: room.machine_bytes, ..nearer }
    }

    fn plan(&self, limits_version: Option<u32>) -> Option<AlarmPlan> {
        let groups = self.groups.try_lock().ok()?;
        (limits_version != Some(groups.state)).then(|| groups.plan(self.root))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::reclaim::limits::Bound;

    fn write_file(root: &str, path: &str, text: &str) {
        let path = std::path::PathBuf::from(format!("{root}{path}"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Fake files describe two nested groups with limits. The sample must be that of the group with the least room.
    /// File pages that the kernel can reclaim must not count as used. Limits that cannot be read must be ignored.
    #[test]
    fn the_limit_with_the_least_room_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let root: &'static str = Box::leak(folder.path().to_str().unwrap().to_owned().into_boxed_str());
        write_file(root, "/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n");
        let system = Kernel::new(root);
        assert_eq!(system.sample().bound, Bound::Machine);

        write_file(root, "/proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n");
        write_file(root, "/proc/self/cgroup", "0::/app/worker\n");
        write_file(root, "/cg/app/worker/memory.current", "1000000\n");
        write_file(root, "/cg/app/worker/memory.max", "2147483648\n");
        write_file(root, "/cg/app/memory.current", "900000000\n");
        write_file(root, "/cg/app/memory.max", "1073741824\n");
        write_file(root, "/cg/app/memory.stat", "file 100000000\ninactive_file 100000000\n");
        system.groups.lock().unwrap().next_refresh_ns = 0;
        let room = system.sample();
        assert_eq!((room.bound, room.limit_bytes), (Bound::Group, 1 << 30));
        assert_eq!(room.kill, KillLimit { limit_bytes: 1 << 30, used_bytes: 800_000_000 });
        write_file(root, "/cg/app/worker/memory.current", "1500000000\n");
        write_file(root, "/cg/app/worker/memory.max", "1600000000\n");
        system.groups.lock().unwrap().next_refresh_ns = 0;
        let nearest = KillLimit { limit_bytes: 1_600_000_000, used_bytes: 1_500_000_000 };
        assert_eq!(system.sample().kill, nearest, "the nearest killing limit, also if another limit has less room");
        write_file(root, "/cg/app/worker/memory.current", "1000000\n");
        write_file(root, "/cg/app/worker/memory.max", "2147483648\n");
        system.groups.lock().unwrap().next_refresh_ns = 0;

        write_file(root, "/cg/app/memory.current", "-5\n");
        assert_eq!(system.sample().limit_bytes, 2 << 30, "the limit of the inner group counts");
        write_file(root, "/cg/app/worker/memory.max", "max\n");
        system.groups.lock().unwrap().next_refresh_ns = 0;
        assert_eq!(system.sample().bound, Bound::Machine, "a limit that changes is noticed");
        write_file(root, "/proc/meminfo", "\n");
        assert_eq!(system.sample(), Room::ENDLESS);
    }
}
