//! The limits that the kernel sets: the control groups that this process is charged to, and the machine's memory.
//!
//! Below: `sys`. Locks: one, around `KernelRooms`; only tried, never waited for.
#![allow(unsafe_code)] // a call on a separate stack

use super::alarms::Plan;
use super::limits::{self, Kill, Limits, Room};
use crate::stats::{self, Counter};
use pagemill_sys::cgroup::{self, Hierarchy, Limit, MAX_LEVELS, Machine, Version};
use pagemill_sys::file::Path;
use pagemill_sys::{clock, stack};
use std::ffi::c_void;
use std::io;
use std::sync::Mutex;

/// The kernel as a source of limits: every visible control group above this process, and `MemAvailable`.
///
/// A limit that cannot be read does not bind: a group that vanished, a file without a number, no `/proc`.
///
/// ```
/// use pagemill::reclaim::{kernel::Kernel, limits::Limits};
///
/// static KERNEL: Kernel = Kernel::new(""); // a prefix of /proc and /sys, for tests
/// assert!(KERNEL.sample().limit_bytes > 0);
/// ```
pub struct Kernel {
    /// Prefix of every path: empty, or a folder with a test tree.
    root: &'static str,
    /// Only tried, never waited for: [`super::limits::Headroom`] allows one sample at a time.
    found: Mutex<KernelRooms>,
}

struct KernelRooms {
    /// Incremented with every change of the fields below.
    state: u32,
    groups: Option<Hierarchy>,
    /// Limits by level, innermost first.
    limits: [Limit; MAX_LEVELS],
    look_again_ns: u64,
    /// Groups could not be searched for: no descriptor was free, or no memory.
    is_blind: bool,
}

/// Interval of searching for groups and reading their limits: a move or a change is noticed within it.
const LOOK_AGAIN_NS: u64 = 1_000_000_000;

/// The interval where there are no groups.
const LOOK_IN_VAIN_NS: u64 = 10_000_000_000;

/// Searching for groups takes more stack than a small thread has to spare inside malloc.
const LOOK_STACK_BYTES: usize = 64 << 10;

impl Kernel {
    pub const fn new(root: &'static str) -> Self {
        let found = KernelRooms {
            state: 0,
            groups: None,
            limits: [Limit::NONE; MAX_LEVELS],
            look_again_ns: 0,
            is_blind: false,
        };
        Self { root, found: Mutex::new(found) }
    }
}

impl KernelRooms {
    fn look_again(&mut self, root: &'static str) {
        struct GroupSearch<'found> {
            found: &'found mut KernelRooms,
            root: &'static str,
        }
        extern "C" fn look(argument: *mut c_void) {
            let look = argument.cast::<GroupSearch<'_>>();
            // SAFETY: points to the `GroupSearch` passed below, which nothing else uses during the call.
            let look = unsafe { &mut *look };
            look.found.find(look.root);
        }
        let now = clock::fine_ns();
        if now < self.look_again_ns {
            return;
        }
        let mut argument = GroupSearch { found: self, root };
        // SAFETY: `look` returns, and its argument outlives the call.
        unsafe { stack::call_on_new(LOOK_STACK_BYTES, look, (&raw mut argument).cast()) };
        let is_final = self.groups.is_none() && !self.is_blind;
        self.look_again_ns = now + if is_final { LOOK_IN_VAIN_NS } else { LOOK_AGAIN_NS };
    }

    fn find(&mut self, root: &str) {
        let is_current = self.groups.as_ref().is_some_and(|groups| groups.is_current(root));
        if !is_current {
            let found = Hierarchy::find(root);
            self.is_blind = found.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::NotFound);
            self.groups = found.ok();
        }
        let limits = std::array::from_fn(|level| {
            let limit = self.groups.as_ref().and_then(|groups| Some(groups.limit(&groups.folder(level)?)));
            limit.unwrap_or(Limit::NONE)
        });
        let has_moved = !is_current && self.groups.is_some();
        if has_moved || limits != self.limits {
            // The first result is not a change.
            stats::add(Counter::LimitsChanged, u64::from(self.state > 0));
            self.state += 1;
        }
        self.limits = limits;
    }

    /// The groups with a limit, innermost first.
    fn limited(&self) -> impl Iterator<Item = (Path, Limit)> {
        let levels = self.limits.iter().enumerate().filter(|(_, limit)| **limit != Limit::NONE);
        levels.filter_map(|(level, limit)| Some((self.groups.as_ref()?.folder(level)?, *limit)))
    }

    /// The limits and files that alarms are to be set for.
    fn plan(&self, root: &str) -> Plan {
        let version = self.groups.as_ref().map(|groups| groups.version);
        let mut limited = self.limited();
        let groups = std::array::from_fn(|_| limited.next());
        let own = self.groups.as_ref().and_then(|groups| groups.folder(0)).filter(|_| version == Some(Version::V2));
        let of_group = own.and_then(|own| Path::format(format_args!("{}/memory.pressure", own.as_str())));
        let of_machine = Path::format(format_args!("{root}/proc/pressure/memory"));
        Plan {
            state: self.state,
            version,
            groups,
            is_complete: limited.next().is_none(),
            stalls: [of_group, of_machine],
        }
    }

    /// The room of the group with the least room, combined with the least room before a kill in any group.
    fn nearest(&self) -> Option<Room> {
        let groups = self.groups.as_ref()?;
        let rooms = self.limited().filter_map(|(folder, limit)| {
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
        let group = self.found.try_lock().ok().and_then(|mut found| {
            found.look_again(self.root);
            found.nearest()
        });
        let machine = cgroup::machine(self.root);
        stats::add(Counter::LimitsUnread, u64::from(machine.is_err()));
        let of_machine = |machine: &Machine| Room::of_machine(machine.total_bytes, machine.available_bytes);
        let room = machine.as_ref().map_or(Room::ENDLESS, of_machine);
        let Some(group) = group else { return room };
        // With free swap the kernel writes pages out before it kills, so no charge is refused.
        let has_swap = machine.is_ok_and(|machine| machine.swap_free_bytes > 0);
        let kill = if has_swap { Kill::NONE } else { group.kill };
        let nearer = if group.bytes <= room.bytes { group } else { room };
        Room { kill, is_far: group.is_far, machine_bytes: room.machine_bytes, ..nearer }
    }

    fn plan(&self, set_for: Option<u32>) -> Option<Plan> {
        let found = self.found.try_lock().ok()?;
        (set_for != Some(found.state)).then(|| found.plan(self.root))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::reclaim::limits::Bound;

    fn write(root: &str, path: &str, text: &str) {
        let path = std::path::PathBuf::from(format!("{root}{path}"));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// The nearest limit of all ancestors binds. File pages that the kernel can take do not count. Unreadable values
    /// bind nothing.
    #[test]
    fn the_nearest_limit_of_a_tree_binds() {
        let folder = tempfile::tempdir().unwrap();
        let root: &'static str = Box::leak(folder.path().to_str().unwrap().to_owned().into_boxed_str());
        write(root, "/proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n");
        let system = Kernel::new(root);
        assert_eq!(system.sample().bound, Bound::Machine);

        write(root, "/proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n");
        write(root, "/proc/self/cgroup", "0::/app/worker\n");
        write(root, "/cg/app/worker/memory.current", "1000000\n");
        write(root, "/cg/app/worker/memory.max", "2147483648\n");
        write(root, "/cg/app/memory.current", "900000000\n");
        write(root, "/cg/app/memory.max", "1073741824\n");
        write(root, "/cg/app/memory.stat", "file 100000000\ninactive_file 100000000\n");
        system.found.lock().unwrap().look_again_ns = 0;
        let room = system.sample();
        assert_eq!((room.bound, room.limit_bytes), (Bound::Group, 1 << 30));
        assert_eq!(room.kill, Kill { limit_bytes: 1 << 30, used_bytes: 800_000_000 });
        write(root, "/cg/app/worker/memory.current", "1500000000\n");
        write(root, "/cg/app/worker/memory.max", "1600000000\n");
        system.found.lock().unwrap().look_again_ns = 0;
        let nearest = Kill { limit_bytes: 1_600_000_000, used_bytes: 1_500_000_000 };
        assert_eq!(system.sample().kill, nearest, "the nearest kill counts, whoever binds");
        write(root, "/cg/app/worker/memory.current", "1000000\n");
        write(root, "/cg/app/worker/memory.max", "2147483648\n");
        system.found.lock().unwrap().look_again_ns = 0;

        write(root, "/cg/app/memory.current", "-5\n");
        assert_eq!(system.sample().limit_bytes, 2 << 30, "the next one binds");
        write(root, "/cg/app/worker/memory.max", "max\n");
        system.found.lock().unwrap().look_again_ns = 0;
        assert_eq!(system.sample().bound, Bound::Machine, "a limit that changes is noticed");
        write(root, "/proc/meminfo", "\n");
        assert_eq!(system.sample(), Room::ENDLESS);
    }
}
