//! Limits the control loop's share of a CPU, without delaying it after a stall.
//!
//! A thread's CPU time includes time in which a hypervisor ran other guests on the CPU. Such a stall of tens of
//! milliseconds is no work, and resting as long again lets writers reach the limit. Work repeats and stalls do not, so
//! the mean of the last few looks without the longest is the work of one.

use std::time::{Duration, Instant};

/// Number of looks of which all but the longest count.
const LOOKS: usize = 4;

/// CPU time of the last looks.
#[derive(Clone, Debug, Default)]
pub struct Duty {
    worked: [Duration; LOOKS],
    next: usize,
}

impl Duty {
    /// Returns when to look again, after a look that ended `now` and took `worked` of CPU time.
    ///
    /// The pause counts from `sampled`, when usage was read: after a stall the next look follows soon. But the loop
    /// rests at least as long as a look usually works, so that it takes half of a CPU at most.
    pub fn next_look(&mut self, sampled: Instant, now: Instant, pause: Duration, worked: Duration) -> Instant {
        self.worked[self.next] = worked;
        self.next = (self.next + 1) % LOOKS;
        let longest = self.worked.iter().max().copied().unwrap_or_default();
        let usual = (self.worked.iter().sum::<Duration>() - longest) / (LOOKS as u32 - 1);
        (sampled + pause).max(now + usual)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Feeds looks of this CPU time, each sampled when it begins. Returns the rests after their ends.
    fn rests(pause: Duration, worked: &[Duration]) -> Vec<Duration> {
        let (mut duty, mut now) = (Duty::default(), Instant::now());
        let look = |worked: &Duration| {
            let sampled = now;
            now += *worked;
            let next = duty.next_look(sampled, now, pause, *worked);
            let rest = next.saturating_duration_since(now);
            now = next;
            rest
        };
        worked.iter().map(look).collect()
    }

    /// After a stall the next look follows at once: what it sampled is old.
    #[test]
    fn a_stall_is_not_followed_by_a_pause() {
        let quick = MS / 10;
        let rests = rests(MS, &[quick, quick, quick, quick, 65 * MS, quick]);
        assert_eq!(rests, [MS - quick, MS - quick, MS - quick, MS - quick, quick, MS - quick]);
    }

    /// Not every look is as long as the others, and the long ones count.
    #[test]
    fn uneven_work_is_followed_by_a_rest() {
        let rests = rests(MS, &[15 * MS, 15 * MS, 15 * MS, MS / 10].repeat(4));
        assert!(rests[LOOKS..].iter().all(|rest| *rest > 10 * MS), "{rests:?}");
    }

    /// Many limits take long to read, each time: half of a CPU is left.
    #[test]
    fn long_work_is_followed_by_a_rest() {
        assert_eq!(rests(MS, &[15 * MS; 6])[LOOKS - 1..], [15 * MS; 3]);
        assert_eq!(rests(20 * MS, &[15 * MS; 6])[LOOKS - 1..], [15 * MS; 3]);
        assert_eq!(rests(40 * MS, &[15 * MS; 6])[LOOKS - 1..], [25 * MS; 3]);
    }
}
