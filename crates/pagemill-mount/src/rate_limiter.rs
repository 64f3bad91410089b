//! Predicts how much the usage grows before the control loop's next check, from the measured growth.
//!
//! Even with real-time priority a check can be late by tens of milliseconds: a hypervisor runs other guests on the CPU,
//! or a purge waits for the lock of a folder whose holder does not run. So purges start farther below a limit while
//! writers are fast (`budget`).

use std::time::{Duration, Instant};

/// Delay of a check that occurs now and then. Writers must not reach a limit within this time.
const LATENESS: Duration = Duration::from_millis(40);

/// Duration of one measurement (a *window*); number of windows whose maximum counts; number of windows that count as
/// recent.
const WINDOW: Duration = Duration::from_millis(100);
const WINDOWS: usize = 300;
const LATELY: usize = 20;

/// A rate is growth divided by at least this time, because growth within a shorter time says little about the rate.
const SHORTEST: Duration = Duration::from_millis(10);

/// The growth of the file system's usage in the last windows.
#[derive(Clone, Debug)]
pub struct RateLimiter {
    used_bytes: u64,
    /// Growth since the window began.
    came_bytes: u64,
    began: Instant,
    /// For each of the last windows: the growth, and the largest growth between two checks.
    windows: [(u64, u64); WINDOWS],
    next: usize,
    worst_step_bytes: u64,
    /// Growth per window, measured in the current window so far. With it new writers count at once.
    present_rate: u64,
}

impl RateLimiter {
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

    /// Records that a purge freed `bytes`, so that writes that fill them again count as growth.
    pub fn freed(&mut self, bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(bytes);
    }

    /// Records the current usage.
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

    /// Predicts the growth before the next check if the check is late, from the windows of the last half minute.
    pub fn foreseen_bytes(&self) -> u64 {
        self.foreseen_by(WINDOWS)
    }

    /// Like [`Self::foreseen_bytes`], but from the windows of the last two seconds.
    pub fn lately_foreseen_bytes(&self) -> u64 {
        self.foreseen_by(LATELY)
    }

    fn foreseen_by(&self, windows: usize) -> u64 {
        let last = || (1..=windows).map(|back| self.windows[(self.next + WINDOWS - back) % WINDOWS]);
        let rate = last().map(|(rate, _)| rate).max().unwrap_or(0).max(self.present_rate);
        let step = last().map(|(_, step)| step).max().unwrap_or(0).max(self.worst_step_bytes);
        let late = u128::from(rate) * LATENESS.as_nanos() / WINDOW.as_nanos();
        // Adds a quarter to the largest growth seen.
        (late as u64).max(step.saturating_add(step / 4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A writer adds 10 MiB a millisecond, all of which is purged; then a check is late. The writer must count at once,
    /// and the prediction must stay the same for half a minute, but the recent one only for two seconds.
    #[test]
    fn fast_writers_are_foreseen() {
        let mut now = Instant::now();
        let mut rate_limiter = RateLimiter::new(0, now);
        for step in 0..200 {
            if step == 20 {
                assert_eq!(rate_limiter.foreseen_bytes(), 400 * MIB, "known before the window has ended");
            }
            now += Duration::from_millis(1);
            rate_limiter.look(10 * MIB, now);
            rate_limiter.freed(10 * MIB);
        }
        // 10 MiB a millisecond.
        assert_eq!(rate_limiter.foreseen_bytes(), 400 * MIB);
        now += Duration::from_millis(40);
        rate_limiter.look(400 * MIB, now);
        assert_eq!(rate_limiter.foreseen_bytes(), 500 * MIB);
        rate_limiter.freed(400 * MIB);
        let mut rest = |windows: usize| {
            for _ in 0..windows {
                now += WINDOW;
                rate_limiter.look(0, now);
            }
            (rate_limiter.lately_foreseen_bytes(), rate_limiter.foreseen_bytes())
        };
        assert_eq!((rest(30), rest(WINDOWS)), ((0, 500 * MIB), (0, 0)));
    }

    /// Files are deleted, so usage falls. The prediction must be 0 then, and later growth must count in full.
    #[test]
    fn deleting_is_no_growth() {
        let now = Instant::now();
        let mut rate_limiter = RateLimiter::new(100 * MIB, now);
        rate_limiter.look(10 * MIB, now + WINDOW);
        assert_eq!(rate_limiter.foreseen_bytes(), 0);
        rate_limiter.freed(20 * MIB);
        rate_limiter.look(MIB, now + 2 * WINDOW);
        assert_eq!(rate_limiter.foreseen_bytes(), MIB + MIB / 4);
    }
}
