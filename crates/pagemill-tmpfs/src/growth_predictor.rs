//! Predicts how much the usage grows before the control loop's next check, from the measured growth.
//!
//! Even with real-time priority, a check can be late by tens of milliseconds: a hypervisor runs other guests on the
//! CPU, or a purge waits for the lock of a folder while the thread that holds the lock does not run. So the faster the
//! writers are, the farther below a limit purges start (`budget`).

use crate::groups::INODE_BYTES;
use std::time::{Duration, Instant};

/// A check of the control loop is now and then late by this much. Writers must not reach a limit within this time.
const CHECK_LATENESS: Duration = Duration::from_millis(40);

/// Duration of one measurement of the growth (a *window*).
const WINDOW_TIME: Duration = Duration::from_millis(100);
/// Number of last windows from which [`GrowthPredictor::predicted_bytes`] predicts.
const WINDOW_COUNT: usize = 300;
/// Number of last windows from which [`GrowthPredictor::recently_predicted_bytes`] predicts.
const RECENT_WINDOW_COUNT: usize = 20;

/// Minimum time by which growth is divided to get a rate. Growth within a shorter time says little about the rate of a
/// writer.
const MIN_RATE_TIME: Duration = Duration::from_millis(10);

/// The growth of the file system's usage in the last half minute, measured in windows of 100 ms.
#[derive(Clone, Debug)]
pub struct GrowthPredictor {
    used_bytes: u64,
    /// Growth of the usage since the current window began.
    grown_bytes: u64,
    began: Instant,
    /// For each of the last windows: the growth of the usage in the window, and the largest growth between two checks.
    windows: [(u64, u64); WINDOW_COUNT],
    next: usize,
    /// Largest growth of the usage between two checks since the current window began.
    worst_step_bytes: u64,
    inodes: u64,
    /// Largest growth of the number of inodes between two checks. Decreases by a 64th with each check.
    inode_step: u64,
    /// Rate of growth in the current window so far, in bytes per window. It lets new writers count at once.
    current_rate: u64,
}

impl GrowthPredictor {
    pub fn new(used_bytes: u64, inodes: u64, now: Instant) -> Self {
        Self {
            used_bytes,
            grown_bytes: 0,
            began: now,
            windows: [(0, 0); WINDOW_COUNT],
            next: 0,
            worst_step_bytes: 0,
            inodes,
            inode_step: 0,
            current_rate: 0,
        }
    }

    /// Records that a purge freed `bytes`. Writes that fill these bytes again then count as growth.
    pub fn freed(&mut self, bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(bytes);
    }

    /// Records the current number of inodes.
    pub fn record_inodes(&mut self, inodes: u64) {
        let step = inodes.saturating_sub(self.inodes);
        self.inode_step = step.max(self.inode_step - self.inode_step / 64);
        self.inodes = inodes;
    }

    /// Predicts the growth of the number of inodes before the next check, if that check is late: four times the largest
    /// growth between two recent checks.
    pub fn predicted_inodes(&self) -> u64 {
        self.inode_step.saturating_mul(4)
    }

    /// Records the current usage.
    pub fn record_usage(&mut self, used_bytes: u64, now: Instant) {
        let step_bytes = used_bytes.saturating_sub(self.used_bytes);
        self.used_bytes = used_bytes;
        self.grown_bytes += step_bytes;
        self.worst_step_bytes = self.worst_step_bytes.max(step_bytes);
        debug_assert!(self.worst_step_bytes <= self.grown_bytes, "a step is a part of the growth");
        let took = now.saturating_duration_since(self.began);
        let rate = u128::from(self.grown_bytes) * WINDOW_TIME.as_nanos() / took.max(MIN_RATE_TIME).as_nanos();
        self.current_rate = rate as u64;
        if took >= WINDOW_TIME {
            self.windows[self.next] = (rate as u64, self.worst_step_bytes);
            debug_assert!(self.next < WINDOW_COUNT);
            self.next = (self.next + 1) % WINDOW_COUNT;
            (self.began, self.grown_bytes, self.worst_step_bytes) = (now, 0, 0);
        }
    }

    /// Predicts the growth of the usage before the next check, if that check is late. Uses the windows of the last half
    /// minute.
    pub fn predicted_bytes(&self) -> u64 {
        self.predict_from(WINDOW_COUNT)
    }

    /// Like [`Self::predicted_bytes`], but from the windows of the last two seconds.
    pub fn recently_predicted_bytes(&self) -> u64 {
        self.predict_from(RECENT_WINDOW_COUNT)
    }

    /// Returns how long a growth by `bytes` takes at the rate of the last two seconds, at most a second.
    pub fn time_to_grow(&self, bytes: u64) -> Duration {
        let predicted = u128::from(self.recently_predicted_bytes().max(1));
        let nanos = u128::from(bytes) * CHECK_LATENESS.as_nanos() / predicted;
        Duration::from_nanos(nanos.min(1_000_000_000) as u64)
    }

    /// Predicts the growth of the usage from the given number of last windows. For the memory of files it is the larger
    /// of the growth in `CHECK_LATENESS` at the maximum rate, and five quarters of the largest growth between two
    /// checks. The memory of new inodes is added.
    fn predict_from(&self, windows: usize) -> u64 {
        debug_assert!(windows > 0 && windows <= WINDOW_COUNT);
        let last = || (1..=windows).map(|back| self.windows[(self.next + WINDOW_COUNT - back) % WINDOW_COUNT]);
        let rate = last().map(|(rate, _)| rate).max().unwrap_or(0).max(self.current_rate);
        let step = last().map(|(_, step)| step).max().unwrap_or(0).max(self.worst_step_bytes);
        let late = u128::from(rate) * CHECK_LATENESS.as_nanos() / WINDOW_TIME.as_nanos();
        // A quarter is added to the largest growth between two checks.
        let in_files = (late as u64).max(step.saturating_add(step / 4));
        in_files.saturating_add(self.predicted_inodes().saturating_mul(INODE_BYTES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A writer adds 10 MiB per millisecond, all of which is purged. Then a check is late. The prediction must include
    /// the writer at once and keep its value for half a minute, but the recent prediction only for two seconds.
    #[test]
    fn fast_writers_are_predicted() {
        let mut now = Instant::now();
        let mut growth_predictor = GrowthPredictor::new(0, 0, now);
        for step in 0..200 {
            if step == 20 {
                assert_eq!(growth_predictor.predicted_bytes(), 400 * MIB, "known before the window has ended");
            }
            now += Duration::from_millis(1);
            growth_predictor.record_usage(10 * MIB, now);
            growth_predictor.freed(10 * MIB);
        }
        // 10 MiB a millisecond.
        assert_eq!(growth_predictor.predicted_bytes(), 400 * MIB);
        now += Duration::from_millis(40);
        growth_predictor.record_usage(400 * MIB, now);
        assert_eq!(growth_predictor.predicted_bytes(), 500 * MIB);
        growth_predictor.freed(400 * MIB);
        let mut rest = |windows: usize| {
            for _ in 0..windows {
                now += WINDOW_TIME;
                growth_predictor.record_usage(0, now);
            }
            (growth_predictor.recently_predicted_bytes(), growth_predictor.predicted_bytes())
        };
        assert_eq!((rest(30), rest(WINDOW_COUNT)), ((0, 500 * MIB), (0, 0)));
    }

    /// Files are deleted, so usage falls. The prediction must then be 0, and later growth must count in full.
    #[test]
    fn deleting_is_no_growth() {
        let now = Instant::now();
        let mut growth_predictor = GrowthPredictor::new(100 * MIB, 0, now);
        growth_predictor.record_usage(10 * MIB, now + WINDOW_TIME);
        assert_eq!(growth_predictor.predicted_bytes(), 0);
        growth_predictor.freed(20 * MIB);
        growth_predictor.record_usage(MIB, now + 2 * WINDOW_TIME);
        assert_eq!(growth_predictor.predicted_bytes(), MIB + MIB / 4);
    }

    /// Inodes are created in one check, then no more. The prediction must rise at once and fall slowly.
    #[test]
    fn inodes_are_predicted() {
        let now = Instant::now();
        let mut growth_predictor = GrowthPredictor::new(0, 5, now);
        growth_predictor.record_inodes(1005);
        assert_eq!(growth_predictor.predicted_inodes(), 4000);
        assert_eq!(growth_predictor.predicted_bytes(), 4000 * INODE_BYTES);
        growth_predictor.record_inodes(905);
        assert!((3900..4000).contains(&growth_predictor.predicted_inodes()));
        (0..1000).for_each(|_| growth_predictor.record_inodes(905));
        assert!(growth_predictor.predicted_inodes() < 300);
    }
}
