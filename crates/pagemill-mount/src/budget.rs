//! How much must go, and how large the file system may be: arithmetic without a system.
//!
//! Two lines lie below each limit. Above the *mark* volatile files go, as fast as they can: best effort. The *size* of the
//! file system is kept so that what it may still grow ends before the limit: there a writer gets ENOSPC, and nobody is killed.

use crate::door::Fill;
use crate::groups::Sample;
use pagemill::units::BLOCK_BYTES;
use pagemill_sys::cgroup::Machine;
use std::time::Duration;

/// Least distance of the mark from its limit, and as a part of the limit.
const MARGIN_BYTES: u64 = 64 * BLOCK_BYTES as u64;
const MARGIN_DIVISOR: u64 = 5;

/// The same without real-time priority: 200 MiB survived what 64 MiB did not.
const WIDE_MARGIN_BYTES: u64 = 100 * BLOCK_BYTES as u64;

/// What writers bring in while the size is being changed, page tables, and what is no file.
const GUARD_BYTES: u64 = 4 * BLOCK_BYTES as u64;
const GUARD_DIVISOR: u64 = 64;

/// Of the machine's memory a sixteenth is left to others; the size ends at half of that.
const MACHINE_DIVISOR: u64 = 16;

/// Nobody fills memory faster, in bytes a second.
const FASTEST: u64 = 32 << 30;

/// Bounds of the pause between two looks. Whose group is not known may fill it between two of them: at most a hundred
/// wake-ups a second, half a percent of a processor.
pub const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
pub const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Whose limit is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Size,
    Group(usize),
    Machine,
}

impl Bound {
    /// The limited group that is meant, if it is one.
    pub fn group(self) -> Option<usize> {
        match self {
            Self::Group(watch) => Some(watch),
            Self::Size | Self::Machine => None,
        }
    }
}

/// A limit, as it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub bound: Bound,
    pub name: String,
    pub limit_bytes: u64,
    pub used_bytes: u64,
    pub mark_bytes: u64,
}

impl Line {
    /// What must go.
    pub fn excess_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.mark_bytes)
    }

    /// What may come before something must go.
    pub fn room_bytes(&self) -> u64 {
        self.mark_bytes.saturating_sub(self.used_bytes)
    }
}

/// What follows from a look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    pub lines: Vec<Line>,
    /// The size that the file system is to have.
    pub size_bytes: u64,
}

impl Budget {
    /// `size_bytes` is what the user asked for, `held` says what the volatile files hold that count for a limit.
    pub fn new(
        size_bytes: u64,
        fill: Fill,
        groups: &[Sample],
        machine: Option<Machine>,
        margins: Margins,
        held: impl Fn(Bound) -> u64,
    ) -> Self {
        let line = |bound, name: &str, limit_bytes: u64, used_bytes: u64| {
            let mark_bytes = margins.mark_bytes(limit_bytes, used_bytes.saturating_sub(held(bound)));
            Line { bound, name: name.to_owned(), limit_bytes, used_bytes, mark_bytes }
        };
        let mut lines = vec![line(Bound::Size, "size", size_bytes, fill.used_bytes)];
        let mut headroom = u64::MAX;
        for group in groups {
            lines.push(line(Bound::Group(group.watch), &group.name, group.limit_bytes, group.working_set_bytes));
            // Who holds next to nothing here, and has not lately, does not set the size for all.
            let guard_bytes = guard_bytes(group.limit_bytes);
            if group.shared_bytes >= guard_bytes {
                headroom = headroom.min(group.hard_room_bytes.saturating_sub(guard_bytes));
            }
        }
        if let Some(Machine { total_bytes, available_bytes, .. }) = machine {
            let (kept_bytes, used_bytes) = (total_bytes / MACHINE_DIVISOR, total_bytes.saturating_sub(available_bytes));
            let mark_bytes = total_bytes - kept_bytes;
            lines.push(Line {
                bound: Bound::Machine,
                name: "machine".into(),
                limit_bytes: total_bytes,
                used_bytes,
                mark_bytes,
            });
            headroom = headroom.min(available_bytes.saturating_sub(kept_bytes / 2));
        }
        // Never less than is used, which tmpfs refuses, and never 0, which means without a limit.
        let size_bytes =
            size_bytes.min(fill.used_bytes.saturating_add(headroom)).max(fill.used_bytes).max(BLOCK_BYTES as u64);
        Self { lines, size_bytes }
    }

    /// The least that may come before something must go.
    pub fn room_bytes(&self) -> u64 {
        self.lines.iter().map(Line::room_bytes).min().unwrap_or(u64::MAX)
    }

    /// Until when nobody can have used the room up.
    pub fn pause(&self) -> Duration {
        Duration::from_nanos((u128::from(self.room_bytes()) * 1_000_000_000 / u128::from(FASTEST)) as u64)
            .clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
    }

    /// Whether the size in force is so far from the right one that it is to be changed: at once if it is too large; if it is
    /// too small when that begins to matter, or there is much to win.
    pub fn wants_size(&self, fill: Fill) -> bool {
        let (now, right) = (fill.size_bytes, self.size_bytes);
        let near_bytes = 16 * BLOCK_BYTES as u64;
        if right < now {
            return now - right >= BLOCK_BYTES as u64;
        }
        let is_full = now.saturating_sub(fill.used_bytes) < 2 * near_bytes;
        (is_full && right - now >= BLOCK_BYTES as u64) || right - now >= near_bytes.max(now / 16)
    }
}

/// What decides how far marks lie from their limits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Margins {
    /// The controller goes before others.
    pub is_preferred: bool,
    /// So much may come in before it looks again.
    pub foreseen_bytes: u64,
}

impl Margins {
    /// Where the mark lies if so much of what is used cannot go. At most half a limit below it; where writers are that fast
    /// five eighths, but for them alone a quarter of the limit is left to volatile files: the newest.
    fn mark_bytes(self, limit_bytes: u64, fixed_bytes: u64) -> u64 {
        let least = if self.is_preferred { MARGIN_BYTES } else { WIDE_MARGIN_BYTES };
        let usual = limit_bytes - least.max(limit_bytes / MARGIN_DIVISOR).min(limit_bytes / 2);
        let for_the_fast = limit_bytes - self.foreseen_bytes.min(limit_bytes / 8 * 5);
        usual.min(for_the_fast.max(fixed_bytes.saturating_add(limit_bytes / 4)))
    }
}

fn guard_bytes(limit_bytes: u64) -> u64 {
    GUARD_BYTES.max(limit_bytes / GUARD_DIVISOR).min(limit_bytes / 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = BLOCK_BYTES as u64 / 2;

    const NOTHING: fn(Bound) -> u64 = |_| 0;

    const PREFERRED: Margins = Margins { is_preferred: true, foreseen_bytes: 0 };

    fn fill(size: u64, used: u64) -> Fill {
        Fill { size_bytes: size * MIB, used_bytes: used * MIB, inodes: 0 }
    }

    fn group(limit: u64, used: u64) -> Sample {
        let hard_room_bytes = limit.saturating_sub(used) * MIB;
        Sample {
            watch: 3,
            name: "/g".into(),
            limit_bytes: limit * MIB,
            working_set_bytes: used * MIB,
            hard_room_bytes,
            shared_bytes: used * MIB,
        }
    }

    /// A limited writer: files go from 128 MiB below the limit on, and the size ends 8 MiB before it.
    #[test]
    fn a_group_bounds_the_size() {
        let budget = Budget::new(8192 * MIB, fill(8192, 400), &[group(512, 420)], None, PREFERRED, NOTHING);
        let line = &budget.lines[1];
        assert_eq!((line.bound, line.mark_bytes / MIB, line.excess_bytes() / MIB), (Bound::Group(3), 384, 36));
        assert_eq!(budget.size_bytes / MIB, 400 + (512 - 420) - 8);
        assert!(budget.wants_size(fill(8192, 400)));
        assert!(!budget.wants_size(fill(484, 400)));
        assert_eq!((budget.room_bytes(), budget.pause()), (0, SHORTEST_PAUSE));
    }

    /// A group that has next to nothing here bounds nobody else; its volatile files go all the same.
    #[test]
    fn strangers_limits_do_not_bound_the_size() {
        let stranger = Sample { shared_bytes: MIB, ..group(64, 60) };
        let budget = Budget::new(8192 * MIB, fill(8192, 400), &[stranger], None, PREFERRED, NOTHING);
        assert_eq!(budget.size_bytes, 8192 * MIB);
        assert_eq!(budget.lines[1].excess_bytes() / MIB, 28);
    }

    /// Without real-time priority the margin is wider; small limits keep half.
    #[test]
    fn margins_fit_the_limit() {
        let mark = |margins: Margins, limit: u64, fixed: u64| margins.mark_bytes(limit * MIB, fixed * MIB) / MIB;
        assert_eq!(mark(PREFERRED, 512, 0), 512 - 128);
        assert_eq!(mark(Margins::default(), 512, 0), 512 - 200);
        assert_eq!(mark(PREFERRED, 100, 0), 50);
        assert_eq!(mark(PREFERRED, 10_000, 0), 8000);
        let fast = Margins { foreseen_bytes: 300 * MIB, ..PREFERRED };
        assert_eq!((mark(fast, 1000, 0), mark(fast, 512, 0), mark(fast, 400, 0)), (700, 212, 150));
        // What cannot go and the newest files stay, up to the usual mark.
        assert_eq!((mark(fast, 512, 100), mark(fast, 512, 300)), (228, 384));
    }

    /// Far from every limit the size is the user's and there is time.
    #[test]
    fn far_from_limits_there_is_time() {
        let machine = Machine { total_bytes: 32_000 * MIB, available_bytes: 30_000 * MIB, swap_free_bytes: 0 };
        let budget = Budget::new(8192 * MIB, fill(8192, 0), &[], Some(machine), PREFERRED, NOTHING);
        assert_eq!((budget.size_bytes, budget.pause()), (8192 * MIB, LONGEST_PAUSE));
        assert!(!budget.wants_size(fill(8192, 0)));
        let short = Machine { available_bytes: 1500 * MIB, ..machine };
        let budget = Budget::new(8192 * MIB, fill(8192, 4000), &[], Some(short), PREFERRED, NOTHING);
        assert_eq!(budget.size_bytes / MIB, 4000 + 500);
        assert_eq!(budget.lines[1].excess_bytes() / MIB, 500);
    }

    /// A size that has become too small is raised before anybody meets it.
    #[test]
    fn a_small_size_is_raised_in_time() {
        let budget = Budget::new(8192 * MIB, fill(1000, 900), &[group(4096, 1000)], None, PREFERRED, NOTHING);
        assert!(budget.wants_size(fill(1000, 980)) && budget.wants_size(fill(1000, 900)));
        let close = Budget { size_bytes: 1010 * MIB, ..budget };
        assert!(!close.wants_size(fill(1000, 900)), "not worth the call");
        assert!(close.wants_size(fill(1000, 970)));
    }

    proptest! {
        /// Never less than is used, never more than was asked for unless that much is used, and no overflow anywhere.
        #[test]
        fn sizes_are_possible(size in 1u64.., used in 0u64.., limit in 1u64.., working in 0u64.., hard in 0u64.., total in 0u64.., available in 0u64..) {
            let fill = Fill { size_bytes: size, used_bytes: used, inodes: 0 };
            let group = Sample { watch: 0, name: String::new(), limit_bytes: limit, working_set_bytes: working, hard_room_bytes: hard, shared_bytes: working };
            let machine = Machine { total_bytes: total, available_bytes: available, swap_free_bytes: 0 };
            let budget = Budget::new(size, fill, &[group], Some(machine), PREFERRED, NOTHING);
            prop_assert!(budget.size_bytes >= used.max(BLOCK_BYTES as u64));
            prop_assert!(budget.size_bytes <= size.max(used).max(BLOCK_BYTES as u64));
            let _ = (budget.pause(), budget.wants_size(fill));
        }
    }
}
