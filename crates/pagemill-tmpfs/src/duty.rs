//! Limits the fraction of a CPU that the control loop uses (its duty cycle), without delaying the loop after a stall.
//!
//! The control loop checks all limits periodically and sleeps in between. The sleep should be at least as long as a
//! check uses the CPU. The CPU time of the last check alone is a bad measure: it includes *stalls*, in which a
//! hypervisor ran other guests on the CPU. A stall can take tens of milliseconds. If the loop slept for as long
//! afterwards, writers could reach a limit. Long checks repeat and stalls do not, so the estimate is the mean of the
//! last four checks without the longest one.

use std::time::{Duration, Instant};

/// Number of recent checks from which the CPU time of the next check is estimated. The longest of them does not count.
const RECENT_CHECK_COUNT: usize = 4;

/// CPU times of the last checks, which determine how long the control loop sleeps.
#[derive(Clone, Debug, Default)]
pub struct Duty {
    worked: [Duration; RECENT_CHECK_COUNT],
    next: usize,
}

impl Duty {
    /// Returns the time of the next check. The last check ended at `now` and used the CPU for `worked`.
    ///
    /// The next check is due `pause` after `sampled`, the time at which the last check read the usage. So a check that
    /// was delayed by a stall is soon followed by another. But at least the estimated CPU time of a check passes after
    /// `now`, so that the loop uses at most half of a CPU.
    pub fn next_check(&mut self, sampled: Instant, now: Instant, pause: Duration, worked: Duration) -> Instant {
        debug_assert!(sampled <= now, "the usage was read before the check ended");
        self.worked[self.next] = worked;
        self.next = (self.next + 1) % RECENT_CHECK_COUNT;
        let longest = self.worked.iter().max().copied().unwrap_or_default();
        let usual = (self.worked.iter().sum::<Duration>() - longest) / (RECENT_CHECK_COUNT as u32 - 1);
        (sampled + pause).max(now + usual)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Simulates checks with these CPU times, each of which reads the usage when it begins. Returns how long the
    /// control loop sleeps after each check.
    fn simulated_sleeps(pause: Duration, worked: &[Duration]) -> Vec<Duration> {
        let (mut duty, mut now) = (Duty::default(), Instant::now());
        let look = |worked: &Duration| {
            let sampled = now;
            now += *worked;
            let next = duty.next_check(sampled, now, pause, *worked);
            let rest = next.saturating_duration_since(now);
            now = next;
            rest
        };
        worked.iter().map(look).collect()
    }

    /// One of several short checks takes 65 ms of CPU time because of a stall. The usage that it read is old, so the
    /// next check must follow without the usual pause.
    #[test]
    fn a_stall_is_not_followed_by_a_pause() {
        let quick = MS / 10;
        let sleeps = simulated_sleeps(MS, &[quick, quick, quick, quick, 65 * MS, quick]);
        assert_eq!(sleeps, [MS - quick, MS - quick, MS - quick, MS - quick, quick, MS - quick]);
    }

    /// Three of four checks are long. After each check, the sleep must be more than two thirds of the CPU time of a
    /// long check.
    #[test]
    fn uneven_checks_are_followed_by_long_sleeps() {
        let sleeps = simulated_sleeps(MS, &[15 * MS, 15 * MS, 15 * MS, MS / 10].repeat(4));
        assert!(sleeps[RECENT_CHECK_COUNT..].iter().all(|rest| *rest > 10 * MS), "{sleeps:?}");
    }

    /// Every check needs 15 ms of CPU time. Each sleep must be at least 15 ms, or as long as the rest of the pause if
    /// that is longer.
    #[test]
    fn long_checks_are_followed_by_long_sleeps() {
        assert_eq!(simulated_sleeps(MS, &[15 * MS; 6])[RECENT_CHECK_COUNT - 1..], [15 * MS; 3]);
        assert_eq!(simulated_sleeps(20 * MS, &[15 * MS; 6])[RECENT_CHECK_COUNT - 1..], [15 * MS; 3]);
        assert_eq!(simulated_sleeps(40 * MS, &[15 * MS; 6])[RECENT_CHECK_COUNT - 1..], [25 * MS; 3]);
    }
}
