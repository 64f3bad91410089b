//! How much may come in before the controller looks again: from how fast writers were, and how late it was.
//!
//! Even with real-time priority it may be late by tens of milliseconds: a virtual machine's processors are taken away, and
//! who holds the lock of a folder may have to wait for his turn, while the purge waits for him. Marks therefore lie further from their limits while writers are fast.

use std::time::{Duration, Instant};

/// So late it is now and then; writers must not meet the limit meanwhile.
const LATENESS: Duration = Duration::from_millis(40);

/// A rate is taken over so long, and the fastest counts for so many of these.
const WINDOW: Duration = Duration::from_millis(100);
const WINDOWS: usize = 20;

/// What came in less than this is no rate yet.
const SHORTEST: Duration = Duration::from_millis(10);

/// What has come in lately.
#[derive(Clone, Debug)]
pub struct Pace {
    used_bytes: u64,
    /// Since the window began.
    came_bytes: u64,
    began: Instant,
    /// What came in each of the last windows, and the most that came between two looks in it.
    windows: [(u64, u64); WINDOWS],
    next: usize,
    worst_step_bytes: u64,
    /// The rate of the window that has not ended: writers that have just begun are fast, too.
    present_rate: u64,
}

impl Pace {
    pub fn new(used_bytes: u64, now: Instant) -> Self {
        Self {
            used_bytes,
            came_bytes: 0,
            began: now,
            windows: [(0, 0); WINDOWS],
            next: 0,
            worst_step_bytes: 0,
            present_rate: 0,
        }
    }

    /// Memory of `bytes` was given back by purging.
    pub fn freed(&mut self, bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(bytes);
    }

    /// Takes note of how full it is now.
    pub fn look(&mut self, used_bytes: u64, now: Instant) {
        let step_bytes = used_bytes.saturating_sub(self.used_bytes);
        self.used_bytes = used_bytes;
        self.came_bytes += step_bytes;
        self.worst_step_bytes = self.worst_step_bytes.max(step_bytes);
        let took = now.saturating_duration_since(self.began);
        let rate = u128::from(self.came_bytes) * WINDOW.as_nanos() / took.max(SHORTEST).as_nanos();
        self.present_rate = rate as u64;
        if took >= WINDOW {
            self.windows[self.next] = (rate as u64, self.worst_step_bytes);
            self.next = (self.next + 1) % WINDOWS;
            (self.began, self.came_bytes, self.worst_step_bytes) = (now, 0, 0);
        }
    }

    /// What may come in before the next look, if that is late.
    pub fn foreseen_bytes(&self) -> u64 {
        let rate = self.windows.iter().map(|(rate, _)| *rate).max().unwrap_or(0).max(self.present_rate);
        let step = self.windows.iter().map(|(_, step)| *step).max().unwrap_or(0).max(self.worst_step_bytes);
        let late = u128::from(rate) * LATENESS.as_nanos() / WINDOW.as_nanos();
        // What has happened may happen again, and worse.
        (late as u64).max(step.saturating_add(step / 4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A fast writer is foreseen for two seconds, a late look as well; what is purged in between counts as room, not as rest.
    #[test]
    fn fast_writers_are_foreseen() {
        let mut now = Instant::now();
        let mut pace = Pace::new(0, now);
        for step in 0..200 {
            if step == 20 {
                assert_eq!(pace.foreseen_bytes(), 400 * MIB, "known before the window has ended");
            }
            now += Duration::from_millis(1);
            pace.look(10 * MIB, now);
            pace.freed(10 * MIB);
        }
        // 10 MiB a millisecond.
        assert_eq!(pace.foreseen_bytes(), 400 * MIB);
        now += Duration::from_millis(40);
        pace.look(400 * MIB, now);
        assert_eq!(pace.foreseen_bytes(), 500 * MIB);
        pace.freed(400 * MIB);
        for _ in 0..30 {
            now += WINDOW;
            pace.look(0, now);
        }
        assert_eq!(pace.foreseen_bytes(), 0);
    }

    /// Files that users delete are no negative growth.
    #[test]
    fn deleting_is_no_growth() {
        let now = Instant::now();
        let mut pace = Pace::new(100 * MIB, now);
        pace.look(10 * MIB, now + WINDOW);
        assert_eq!(pace.foreseen_bytes(), 0);
        pace.freed(20 * MIB);
        pace.look(MIB, now + 2 * WINDOW);
        assert_eq!(pace.foreseen_bytes(), MIB + MIB / 4);
    }
}
