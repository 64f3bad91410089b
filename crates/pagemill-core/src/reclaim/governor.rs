//! The governor, the helper's periodic work. It watches the limits of groups and of the machine, and returns memory
//! that has been free for long.
//!
//! Two independent tasks each set the time of their next run. *Watch* samples the room below the limits, as often as
//! other processes could use that room up. When usage is inside the margin below a limit, it gives memory back. *Age*
//! returns memory that was not reused for the age of [`Return`], in bounded steps, whether the process is busy or idle.
//!
//! The helper sleeps without a timeout while no shrinker has, or may have, anything to give back. A `free` in the small
//! allocator does not wake the helper. So a shrinker that may have more than it reports
//! ([`super::Shrinker::may_have_more`]) keeps both tasks and the alarms running. A process that used no CPU since the
//! last step has freed nothing, so the pauses between its steps grow.

use super::limits::{Bound, FASTEST_BYTES_PER_NS, NEAR_DIVISOR, Room};
use super::{Account, Reason, Return, Urgency, Which};
use crate::arena::Context;
use pagemill_sys::clock;
use std::time::Duration;

/// Less giveable memory than this number of bytes is not worth a wake-up of the helper thread.
pub const WORTHWHILE_BYTES: u64 = 1 << 20;

/// Number of searches for aged memory within the age that [`Return`] sets. More searches would cost CPU. Fewer searches
/// would return memory later.
const SEARCHES_PER_AGE: u32 = 10;

/// The shortest pause between two searches for aged memory.
const SHORTEST_SEARCH_PAUSE: Duration = Duration::from_millis(100);

/// Maximum number of bytes of aged memory that one step of the governor returns.
const AGED_STEP_BYTES: u64 = 16 << 20;
/// Pause after a step that returned [`AGED_STEP_BYTES`]. It limits the rate to 800 MiB a second.
const AGED_PAUSE: Duration = Duration::from_millis(20);

/// Shortest pause between two samples of the room, which is the bytes left below the nearest limit.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
/// Shortest pause between two samples of the room below the limits while no limit is near.
const SHORTEST_FAR_PAUSE: Duration = Duration::from_millis(5);
/// Longest pause between two samples of the room below the limits.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Longest pause between two samples of the room below the limits, while no limit is near and kernel events are set up
/// that will report when a group gets near its limit. Samples are needed nevertheless, because limits may change.
const LONGEST_PAUSE_WITH_EVENTS: Duration = Duration::from_secs(1);

/// Maximum of `calm_pause`, which starts at `SHORTEST_PAUSE` and doubles with each sample that finds that other
/// processes use almost no room (are *calm*). The pause until the next sample is at least `calm_pause`, or at least
/// `CALM_PAUSE_FACTOR` times the time in which the room could be used up, if that is shorter.
const LONGEST_CALM_PAUSE: Duration = Duration::from_millis(64);
/// While other processes use up none of the room below the limits, the room is assumed to last longer by this factor
/// than at the fastest rate of use.
const CALM_PAUSE_FACTOR: u64 = 4;

/// Time for which the memory use of other processes is extrapolated.
const EXTRAPOLATION_TIME: Duration = Duration::from_millis(20);
/// The extrapolated use by other processes counts only up to the limit divided by this number.
const EXTRAPOLATION_DIVISOR: u64 = 16;

/// Other processes *rush* (use memory up fast) if their extrapolated use exceeds this number of bytes.
const RUSH_BYTES: u64 = 4 << 20;
/// Other processes are *calm* if the room below the limits shrank by at most this number of bytes since the last
/// sample.
const MAX_CALM_ROOM_LOSS_BYTES: i64 = 1 << 20;

/// A process that used no more CPU time than this since it was last busy counts as idle.
const MAX_IDLE_CPU_NS: u64 = 50_000;

/// The longest pause of an idle process that has nothing to give back, if a threshold event would wake the helper.
const LONGEST_IDLE_PAUSE: Duration = Duration::from_secs(640);
/// The longest pause of an idle process that has nothing to give back, if no threshold event would wake the helper.
const LONGEST_IDLE_PAUSE_WITHOUT_EVENTS: Duration = Duration::from_secs(5);

/// The room below the machine's limit is assumed to last longer by this factor than as much room below a group's limit.
const MACHINE_PAUSE_FACTOR: u64 = 4;

/// Minimum number of bytes to give back, coldest first, when a thread stalls on memory and a limit is near.
const MIN_STALL_RETURN_BYTES: u64 = 64 << 20;
/// When a thread stalls on memory and a limit is near, at least the giveable bytes divided by this number are given
/// back.
const STALL_RETURN_DIVISOR: u64 = 8;

/// Near a limit (less than `1/NEAR_DIVISOR` of it is left), each step offers up to this many bytes of free memory to
/// the kernel.
const OFFER_STEP_BYTES: u64 = 32 << 20;

/// The governor's source of time. Tests supply their own.
///
/// Example: [`Governor`].
pub trait Clock {
    /// Monotonic time in nanoseconds.
    fn now_ns(&self) -> u64;
    /// Nanoseconds of CPU that the other threads of this process used.
    fn cpu_ns(&self) -> u64;
}

/// The kernel's clocks.
///
/// Example: [`Governor`].
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now_ns(&self) -> u64 {
        clock::fine_ns()
    }

    fn cpu_ns(&self) -> u64 {
        clock::others_cpu_ns()
    }
}

/// When the next step of the governor is due.
///
/// Example: [`Governor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// After this pause.
    After(Duration),
    /// There is nothing to give back: the helper sleeps until a shrinker has giveable memory.
    WhenGiveable,
    /// There is something to give back, but neither a limit nor an age: the helper sleeps until it gets a request.
    WhenAsked,
}

/// The kernel events since the governor's last step.
///
/// Example: [`Governor`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelEvents {
    /// A thread stalled on memory in this process's group.
    pub group_stalls: bool,
    /// A thread stalled on memory on the machine.
    pub machine_stalls: bool,
    /// Alarms are set that report when a group gets near its limit.
    pub has_thresholds: bool,
    /// The kernel reported an event since the last step.
    pub is_woken: bool,
}

/// The governor: it watches memory limits and returns free memory, one step at a time. The fields are its state between
/// two steps.
///
/// ```
/// use pagemill_core::reclaim::governor::{Governor, KernelEvents, SystemClock};
/// use pagemill_testbed::Testbed;
/// use pagemill_core::reclaim::Return;
///
/// let pagemill = Testbed::for_test(); // without a helper of its own
/// let next = Governor::new(SystemClock).step(pagemill.account, KernelEvents::default(), Return::BALANCED);
/// println!("next step: {next:?}");
/// ```
#[derive(Debug)]
pub struct Governor<C> {
    clock: C,
    /// CPU time of the process when it last counted as busy.
    busy_cpu_ns: u64,
    /// The process has used CPU since its giveable memory was last measured.
    is_unmeasured: bool,
    /// The pause while the process is idle and has nothing to give back; it grows with each step.
    idle_pause: Duration,
    /// Time of the next search for aged memory; 0 if none is planned.
    next_search_ns: u64,
    /// The age for which `next_search_ns` was computed.
    searched_age: Duration,
    /// State of a pseudo-random generator. Random pauses keep the searches from following a program's own rhythm.
    random_state: u64,
    /// The latest sample of the room below the limits; `None` before the first sample.
    last_sample: Option<RoomSample>,
    /// The pause after a sample near a limit. It doubles while other processes do not use up the room.
    calm_pause: Duration,
    /// The pause after a step that could give nothing back. It doubles with each further such step.
    futile_pause: Duration,
}

/// A sample of the room (bytes left below the nearest limit), and of the bytes that were resident at that time.
#[derive(Clone, Copy, Debug)]
struct RoomSample {
    now_ns: u64,
    room_bytes: i64,
    /// Resident bytes of this process and its siblings. Growth of these bytes is not extrapolated, because the charges
    /// of these processes reclaim for it.
    own_bytes: u64,
    /// Bytes that this process could have given back.
    giveable: u64,
}

impl RoomSample {
    /// Bytes that other processes will take within [`EXTRAPOLATION_TIME`], at their rate since an `earlier` sample.
    fn extrapolated_use_bytes(&self, earlier: &Self) -> u64 {
        let fell = i128::from(earlier.room_bytes) - i128::from(self.room_bytes);
        let own = i128::from(self.own_bytes) - i128::from(earlier.own_bytes);
        let (taken, passed) = ((fell - own).max(0), i128::from(self.now_ns.saturating_sub(earlier.now_ns)).max(1));
        u64::try_from(taken * EXTRAPOLATION_TIME.as_nanos() as i128 / passed).unwrap_or(u64::MAX)
    }
}

impl<C: Clock> Governor<C> {
    pub fn new(clock: C) -> Self {
        Self {
            clock,
            busy_cpu_ns: 0,
            is_unmeasured: true,
            idle_pause: SHORTEST_SEARCH_PAUSE,
            next_search_ns: 0,
            searched_age: Duration::ZERO,
            random_state: 0x9E37_79B9_7F4A_7C15,
            last_sample: None,
            calm_pause: SHORTEST_PAUSE,
            futile_pause: SHORTEST_PAUSE,
        }
    }

    /// Samples the limits once, and gives back memory that is due. Returns when the next step is due.
    pub fn step(&mut self, account: &Account, signs: KernelEvents, policy: Return) -> NextStep {
        if account.giveable() < WORTHWHILE_BYTES
            && let Some(next) = self.step_without_giveable(account, signs)
        {
            return next;
        }
        let watch = self.watch_limits(account, signs);
        let aged = policy.age().map(|age| self.give_aged(account, age));
        watch.into_iter().chain(aged).min().map_or(NextStep::WhenAsked, NextStep::After)
    }

    /// Runs a step for a process that reports less than [`WORTHWHILE_BYTES`] of giveable memory. Returns `None` if this
    /// step must watch the limits nevertheless.
    fn step_without_giveable(&mut self, account: &Account, signs: KernelEvents) -> Option<NextStep> {
        let has_used_cpu = self.has_used_cpu();
        if !account.may_have_more() {
            account.measure();
            let has_none = account.giveable() < WORTHWHILE_BYTES;
            return has_none.then(|| {
                self.next_search_ns = 0;
                NextStep::WhenGiveable
            });
        }
        if has_used_cpu || signs.is_woken {
            return None;
        }
        // The process is idle: one measurement finds all that it freed, and the amount does not change after that.
        if std::mem::take(&mut self.is_unmeasured) {
            account.measure();
        }
        (account.giveable() < WORTHWHILE_BYTES).then(|| NextStep::After(self.lengthen_idle_pause(signs)))
    }

    /// Returns whether the process used CPU since this function last returned true.
    fn has_used_cpu(&mut self) -> bool {
        let cpu = self.clock.cpu_ns();
        let has_used_cpu = cpu.saturating_sub(self.busy_cpu_ns) > MAX_IDLE_CPU_NS;
        if has_used_cpu {
            self.busy_cpu_ns = cpu;
            self.idle_pause = SHORTEST_SEARCH_PAUSE;
            self.is_unmeasured = true;
        }
        has_used_cpu
    }

    /// Lengthens and returns the pause of an idle process, which freed nothing because it did not run.
    fn lengthen_idle_pause(&mut self, signs: KernelEvents) -> Duration {
        let is_warned = signs.has_thresholds || self.last_sample.is_none();
        self.idle_pause =
            (2 * self.idle_pause).min(if is_warned { LONGEST_IDLE_PAUSE } else { LONGEST_IDLE_PAUSE_WITHOUT_EVENTS });
        debug_assert!((SHORTEST_SEARCH_PAUSE..=LONGEST_IDLE_PAUSE).contains(&self.idle_pause));
        self.idle_pause
    }

    /// Samples the room, and gives memory back if a group or the machine runs short. Returns the pause until the next
    /// sample, or `None` if no limit is known.
    fn watch_limits(&mut self, account: &Account, signs: KernelEvents) -> Option<Duration> {
        account.reap();
        let room = account.headroom.sample();
        let (own_bytes, giveable) = (account.totals().resident, account.giveable());
        let sample = RoomSample { now_ns: self.clock.now_ns(), room_bytes: room.bytes, own_bytes, giveable };
        let last = self.last_sample.replace(sample).unwrap_or(sample);
        debug_assert!(last.now_ns <= sample.now_ns, "the clock is monotonic");
        // Memory is given back earlier if other processes rush towards the limit: this thread may get no CPU later.
        let extrapolated_use_bytes = sample.extrapolated_use_bytes(&last).min(room.limit_bytes / EXTRAPOLATION_DIVISOR);
        if extrapolated_use_bytes > RUSH_BYTES && room.bytes < (room.limit_bytes / NEAR_DIVISOR) as i64 {
            account.offer(u64::MAX, Which::All);
        }
        if room.shortage(extrapolated_use_bytes) == 0 {
            self.futile_pause = SHORTEST_PAUSE;
            let is_calm = room.bytes.saturating_add(MAX_CALM_ROOM_LOSS_BYTES) >= last.room_bytes;
            self.calm_pause = if is_calm { (2 * self.calm_pause).min(LONGEST_CALM_PAUSE) } else { SHORTEST_PAUSE };
            // Free memory of which nothing was reused since the last sample is unlikely to be reused before the next
            // one.
            let which = if giveable >= last.giveable { Which::All } else { Which::Cold };
            offer_near_limit(account, &room, signs, which);
            let is_warned = signs.has_thresholds && room.is_far && room.bound == Bound::Group;
            // No kernel event reports a shortage of the machine's memory in time.
            let longest = time_until_used_up(room.machine_bytes, MACHINE_PAUSE_FACTOR)
                .clamp(SHORTEST_FAR_PAUSE, LONGEST_PAUSE_WITH_EVENTS);
            return Some(if is_warned { longest } else { self.pause_until_sample(&room)? });
        }
        let before = account.giveable();
        let room = account.give_for_system(room, extrapolated_use_bytes, Context::Outside);
        self.last_sample = Some(RoomSample { room_bytes: room.bytes, own_bytes: account.totals().resident, ..sample });
        self.calm_pause = SHORTEST_PAUSE;
        if room.shortage(0) == 0 || account.giveable() < before {
            self.futile_pause = SHORTEST_PAUSE;
            return Some(SHORTEST_PAUSE);
        }
        self.futile_pause = (2 * self.futile_pause).min(LONGEST_PAUSE);
        debug_assert!(self.futile_pause >= SHORTEST_PAUSE, "the helper never spins");
        Some(self.futile_pause)
    }

    /// Returns the pause until the next sample: the time in which other processes could use up the room. The pause is
    /// longer while other processes use no room.
    fn pause_until_sample(&self, room: &Room) -> Option<Duration> {
        let factor = match room.bound {
            Bound::None => return None,
            Bound::Group => 1,
            Bound::Machine => MACHINE_PAUSE_FACTOR,
        };
        let shortest = if room.bytes < room.limit_bytes as i64 / 16 { SHORTEST_PAUSE } else { SHORTEST_FAR_PAUSE };
        debug_assert!((SHORTEST_PAUSE..=LONGEST_CALM_PAUSE).contains(&self.calm_pause));
        let calm = self.calm_pause.min(time_until_used_up(room.bytes, factor * CALM_PAUSE_FACTOR));
        Some(time_until_used_up(room.bytes, factor).clamp(shortest, LONGEST_PAUSE).max(calm))
    }

    /// Returns at most [`AGED_STEP_BYTES`] of memory that has been free for `age` to the system, if a search is due.
    /// Returns the pause until the next search.
    fn give_aged(&mut self, account: &Account, age: Duration) -> Duration {
        let now_ns = self.clock.now_ns();
        let period = (age / SEARCHES_PER_AGE).max(SHORTEST_SEARCH_PAUSE);
        if std::mem::replace(&mut self.searched_age, age) != age {
            self.next_search_ns = 0;
            self.idle_pause = SHORTEST_SEARCH_PAUSE;
        }
        if self.next_search_ns == 0 {
            self.next_search_ns = now_ns + period.as_nanos() as u64;
        }
        if now_ns < self.next_search_ns {
            return Duration::from_nanos(self.next_search_ns - now_ns);
        }
        account.measure();
        let freed = account.give_aged(AGED_STEP_BYTES, age);
        let pause = if freed >= AGED_STEP_BYTES {
            AGED_PAUSE
        } else if freed > 0 || self.has_used_cpu() {
            self.idle_pause = SHORTEST_SEARCH_PAUSE;
            self.random_pause(period)
        } else {
            // Free memory grows older while the process uses no CPU. If a search then frees nothing, the remaining free
            // memory lies in ranges that cannot be given back.
            self.idle_pause = (self.idle_pause + self.idle_pause / SEARCHES_PER_AGE).min(LONGEST_IDLE_PAUSE);
            self.random_pause(period).max(self.idle_pause)
        };
        debug_assert!(!pause.is_zero(), "the helper never spins");
        self.next_search_ns = now_ns + pause.as_nanos() as u64;
        pause
    }

    /// Returns a random pause between a half and one and a half of `period`.
    fn random_pause(&mut self, period: Duration) -> Duration {
        // A xorshift generator (G. Marsaglia, 2003) makes the next random number.
        self.random_state ^= self.random_state << 13;
        self.random_state ^= self.random_state >> 7;
        self.random_state ^= self.random_state << 17;
        debug_assert!(self.random_state != 0, "the generator would stay at 0");
        let pause = period / 2 + period * (self.random_state % 1024) as u32 / 1024;
        debug_assert!(pause <= period / 2 + period);
        pause
    }
}

/// Returns the time in which processes use up `bytes` at the fastest possible rate, times `factor`.
fn time_until_used_up(bytes: i64, factor: u64) -> Duration {
    Duration::from_nanos((bytes.max(0) as u64 / FASTEST_BYTES_PER_NS).saturating_mul(factor))
}

/// Near a limit, offers memory to the kernel. If threads stall on memory because of this limit, also gives memory back.
/// At other stalls the function gives nothing back, because free memory of this process would not end them.
fn offer_near_limit(account: &Account, room: &Room, signs: KernelEvents, which: Which) {
    if room.bytes >= (room.limit_bytes / NEAR_DIVISOR) as i64 {
        return;
    }
    account.offer(OFFER_STEP_BYTES, which);
    let is_stalled = match room.bound {
        Bound::Group => signs.group_stalls,
        Bound::Machine => signs.machine_stalls,
        Bound::None => false,
    };
    if is_stalled {
        let part = MIN_STALL_RETURN_BYTES.max(account.giveable() / STALL_RETURN_DIVISOR);
        account.give_back(part, Context::Outside, Urgency::Request, Reason::Stall);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    mod bounds;

    use super::*;
    use crate::arena::Budget;
    use crate::error::Error;
    use crate::reclaim::Shrinker;
    use crate::reclaim::limits::{KillLimit, Limits};
    use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

    const MIB: u64 = 1 << 20;

    /// A shrinker with a fixed stock of bytes, and a fake control group with a limit of 256 MiB. The bytes that the
    /// shrinker gives back are added to the group's room.
    #[derive(Default)]
    struct FakeGroup {
        stock: AtomicU64,
        offered: AtomicU64,
        room: AtomicI64,
        is_far: AtomicBool,
        /// The bytes of `stock` that were not reused.
        aged: AtomicU64,
        may_have_more: AtomicBool,
        measured: AtomicU64,
    }

    impl Shrinker for FakeGroup {
        fn name(&self) -> &'static str {
            "stock"
        }

        fn may_nest(&self) -> bool {
            true
        }

        fn giveable_bytes(&self) -> u64 {
            self.stock.load(Relaxed)
        }

        fn shrink(&self, want_bytes: u64, _urgency: Urgency) -> u64 {
            let given = want_bytes.min(self.stock.load(Relaxed));
            self.stock.fetch_sub(given, Relaxed);
            self.room.fetch_add(given as i64, Relaxed);
            given
        }

        fn shrink_aged(&self, want_bytes: u64, _age: Duration) -> Option<u64> {
            let given = self.shrink(want_bytes.min(self.aged.load(Relaxed)), Urgency::Request);
            self.aged.fetch_sub(given, Relaxed);
            Some(given)
        }

        fn may_have_more(&self) -> bool {
            self.may_have_more.load(Relaxed)
        }

        fn measure(&self) {
            self.measured.fetch_add(1, Relaxed);
        }

        fn offer(&self, want_bytes: u64, which: Which) -> u64 {
            let most = if which == Which::All { self.stock.load(Relaxed) } else { u64::MAX };
            self.offered.fetch_add(want_bytes.min(most), Relaxed);
            want_bytes.min(most)
        }
    }

    impl Limits for FakeGroup {
        fn sample(&self) -> Room {
            let bytes = self.room.load(Relaxed);
            let unused = KillLimit { limit_bytes: 320 * MIB, used_bytes: 0 };
            let used_bytes = (unused.room_bytes() as i64 - 16 * MIB as i64 - bytes) as u64;
            Room {
                bound: Bound::Group,
                bytes,
                kill: KillLimit { used_bytes, ..unused },
                limit_bytes: 256 * MIB,
                is_far: self.is_far.load(Relaxed),
                machine_bytes: i64::MAX,
            }
        }
    }

    #[derive(Default)]
    struct FakeClock {
        now_ns: AtomicU64,
        cpu_ns: AtomicU64,
    }

    impl FakeClock {
        /// Advances both clocks.
        fn advance(&self, time: Duration, cpu: Duration) {
            self.now_ns.fetch_add(time.as_nanos() as u64, Relaxed);
            self.cpu_ns.fetch_add(cpu.as_nanos() as u64, Relaxed);
        }
    }

    impl Clock for &FakeClock {
        fn now_ns(&self) -> u64 {
            self.now_ns.load(Relaxed)
        }

        fn cpu_ns(&self) -> u64 {
            self.cpu_ns.load(Relaxed)
        }
    }

    /// Returns the pause that a step requested. Panics if the step requested none.
    #[track_caller]
    fn pause_of(next: NextStep) -> Duration {
        match next {
            NextStep::After(pause) => pause,
            other => panic!("{other:?}"),
        }
    }

    /// Returns an account whose only shrinker has `stock` bytes. If `room` is given, the fake group is also the
    /// account's source of limits, with this room in bytes.
    fn fake_group(stock: u64, room: Option<i64>) -> (&'static FakeGroup, Account) {
        let fake: &'static FakeGroup = Box::leak(Box::default());
        fake.stock.store(stock, Relaxed);
        let account = Account::new(u64::MAX);
        account.register(fake);
        if let Some(room) = room {
            fake.room.store(room, Relaxed);
            account.headroom.set_limits(fake);
        }
        (fake, account)
    }

    const AGE: Duration = Duration::from_secs(10);

    /// The governor must set no timeout if there is nothing to give back, or if there is neither a limit nor an age.
    #[test]
    fn without_giveable_memory_or_limit_there_is_no_timeout() {
        let clock = FakeClock::default();
        let (_, poor) = fake_group(MIB - 1, Some(-5));
        let signs = KernelEvents::default();
        assert_eq!(Governor::new(&clock).step(&poor, signs, Return::BALANCED), NextStep::WhenGiveable);
        let (_, alone) = fake_group(100 * MIB, None);
        assert_eq!(Governor::new(&clock).step(&alone, signs, Return::Keep), NextStep::WhenAsked);
    }

    /// Half of the free memory is old enough to be returned. It must be returned in steps with pauses, also while the
    /// process is busy. Younger memory must stay. About ten searches must be made within the age.
    #[test]
    fn aged_memory_is_returned_in_steps() {
        let (fake, account) = fake_group(200 * MIB, None);
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let mut step = |account| pause_of(governor.step(account, KernelEvents::default(), Return::After(AGE)));
        let first = step(&account);
        assert_eq!(first, AGE / SEARCHES_PER_AGE);
        fake.aged.store(100 * MIB, Relaxed);
        clock.advance(first, first);
        for steps in 1..=6 {
            assert_eq!(step(&account), AGED_PAUSE);
            assert_eq!(fake.stock.load(Relaxed), 200 * MIB - steps * AGED_STEP_BYTES);
            clock.advance(AGED_PAUSE, AGED_PAUSE);
        }
        for _ in 0..20 {
            let pause = step(&account);
            assert!(pause >= AGE / SEARCHES_PER_AGE / 2 && pause <= AGE / SEARCHES_PER_AGE * 2, "{pause:?}");
            clock.advance(pause, pause);
        }
        assert_eq!(fake.stock.load(Relaxed), 100 * MIB);
    }

    /// The pauses must grow while a process is idle and its memory cannot be given back. The pauses must become short
    /// again once the process uses CPU.
    #[test]
    fn pauses_grow_while_the_process_is_idle() {
        let (_, account) = fake_group(100 * MIB, None);
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let mut pass = |cpu| {
            let pause = pause_of(governor.step(&account, KernelEvents::default(), Return::After(AGE)));
            clock.advance(pause, cpu);
            pause
        };
        let pauses: Vec<_> = (0..200).map(|_| pass(Duration::ZERO)).collect();
        assert_eq!(pauses[199], LONGEST_IDLE_PAUSE);
        assert!(pauses.iter().take_while(|pause| **pause < AGE).count() > SEARCHES_PER_AGE as usize, "{pauses:?}");
        pass(Duration::from_secs(1));
        assert!(pass(Duration::ZERO) <= AGE / SEARCHES_PER_AGE * 2);
    }

    /// Limits must be watched while a shrinker may have more than it reports. An idle process must be measured once;
    /// then its pauses must grow.
    #[test]
    fn limits_are_watched_while_an_owner_may_have_more() {
        let (fake, account) = fake_group(0, Some(100 * MIB as i64));
        fake.may_have_more.store(true, Relaxed);
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let mut step = |signs| {
            let pause = pause_of(governor.step(&account, signs, Return::Keep));
            (pause, governor.last_sample.is_some_and(|last| last.now_ns == (&clock).now_ns()))
        };
        clock.advance(Duration::from_secs(1), Duration::from_secs(1));
        assert!(step(KernelEvents::default()).1, "watched");
        clock.advance(Duration::from_secs(1), Duration::ZERO);
        let steps: Vec<_> = (0..20).map(|_| step(KernelEvents::default())).collect();
        assert_eq!(fake.measured.load(Relaxed), 1);
        assert!(steps[0].0 < steps[1].0 && steps[19] == (LONGEST_IDLE_PAUSE_WITHOUT_EVENTS, false), "{steps:?}");
        fake.stock.store(100 * MIB, Relaxed);
        fake.room.store(-(30 * MIB as i64), Relaxed);
        step(KernelEvents { is_woken: true, ..KernelEvents::default() });
        assert!(fake.stock.load(Relaxed) <= 70 * MIB, "the missing bytes and the extrapolated ones");
    }

    /// A group's usage gets near its limit: the pauses must get shorter. Then usage enters the margin below the limit:
    /// the missing bytes must be given back.
    #[test]
    fn memory_is_given_back_inside_the_margin_of_a_group() {
        let (fake, account) = fake_group(100 * MIB, Some(200 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let far = pause_of(governor.step(&account, KernelEvents::default(), Return::Keep));
        let minute = Duration::from_secs(60);
        clock.advance(minute, Duration::ZERO);
        fake.room.store(20 * MIB as i64, Relaxed);
        let near = pause_of(governor.step(&account, KernelEvents::default(), Return::Keep));
        assert!(near < far && near >= SHORTEST_PAUSE, "{near:?} {far:?}");
        assert_eq!(fake.stock.load(Relaxed), 100 * MIB, "nothing is given without need");
        clock.advance(minute, Duration::ZERO);
        fake.room.store(-(30 * MIB as i64), Relaxed);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        // Slightly more than the missing bytes is given back, because the usage is extrapolated at this rate.
        assert_eq!((fake.stock.load(Relaxed) / MIB, fake.room.load(Relaxed) / MIB as i64), (69, 0));
    }

    /// Other processes use 40 MiB in 10 ms. Near the limit, the bytes that they will use by extrapolation must be given
    /// back before usage reaches the margin. Growth of this process itself must not be extrapolated.
    #[test]
    fn memory_is_given_back_early_if_others_rush() {
        let (fake, account) = fake_group(100 * MIB, Some(60 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        let take = |mib: u64| {
            fake.room.fetch_sub((mib * MIB) as i64, Relaxed);
            clock.advance(Duration::from_millis(10), Duration::ZERO);
        };
        take(40);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        assert_eq!(fake.stock.load(Relaxed), 100 * MIB, "the extrapolated bytes still fit");
        assert!(fake.offered.load(Relaxed) >= 100 * MIB, "all free memory is offered");
        take(10);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        assert_eq!((fake.stock.load(Relaxed), fake.room.load(Relaxed)), (94 * MIB, 16 * MIB as i64));
        fake.room.store(60 * MIB as i64, Relaxed);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        account.admit(50 * MIB, Context::Outside).unwrap();
        take(50);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        assert_eq!(fake.stock.load(Relaxed), 94 * MIB, "the process itself took them");
    }

    /// A thread stalls on memory. Near the group's limit an eighth of the free memory must be given back. Far from the
    /// limit nothing may be given back.
    #[test]
    fn a_stall_gives_memory_back_near_the_limit() {
        let (fake, account) = fake_group(1000 * MIB, Some(200 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let stalled = KernelEvents { group_stalls: true, ..KernelEvents::default() };
        governor.step(&account, stalled, Return::Keep);
        assert_eq!((fake.stock.load(Relaxed), fake.offered.load(Relaxed)), (1000 * MIB, 0));
        clock.advance(Duration::from_secs(60), Duration::ZERO);
        fake.room.store(30 * MIB as i64, Relaxed);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        assert_eq!((fake.stock.load(Relaxed), fake.offered.load(Relaxed)), (1000 * MIB, OFFER_STEP_BYTES));
        governor.step(&account, KernelEvents { machine_stalls: true, ..KernelEvents::default() }, Return::Keep);
        assert_eq!(fake.stock.load(Relaxed), 1000 * MIB, "stalls of the machine, near the group's limit");
        governor.step(&account, stalled, Return::Keep);
        assert_eq!(fake.stock.load(Relaxed), 875 * MIB);
    }

    /// With threshold events, the pause far from a limit must be a second instead of milliseconds.
    #[test]
    fn threshold_events_lengthen_the_pause() {
        let (fake, account) = fake_group(100 * MIB, Some(100 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let warned = KernelEvents { has_thresholds: true, ..KernelEvents::default() };
        assert!(pause_of(governor.step(&account, warned, Return::Keep)) < LONGEST_PAUSE_WITH_EVENTS, "near already");
        fake.is_far.store(true, Relaxed);
        assert_eq!(pause_of(governor.step(&account, warned, Return::Keep)), LONGEST_PAUSE_WITH_EVENTS);
        assert!(pause_of(governor.step(&account, KernelEvents::default(), Return::Keep)) < LONGEST_PAUSE_WITH_EVENTS);
    }

    /// Pauses must grow while memory is short and nothing can be given back.
    #[test]
    fn pauses_grow_while_nothing_can_be_given_back() {
        let (fake, account) = fake_group(2 * MIB, Some(-(500 * MIB as i64)));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        assert_eq!(fake.stock.load(Relaxed), 0);
        assert_eq!(governor.step(&account, KernelEvents::default(), Return::Keep), NextStep::WhenGiveable);
        // A shrinker that reports giveable memory and gives nothing back.
        struct ShrinkerWithoutMemory;
        impl Shrinker for ShrinkerWithoutMemory {
            fn name(&self) -> &'static str {
                "without memory"
            }
            fn may_nest(&self) -> bool {
                true
            }
            fn giveable_bytes(&self) -> u64 {
                10 * MIB
            }
            fn shrink(&self, _want_bytes: u64, _urgency: Urgency) -> u64 {
                0
            }
        }
        account.register(&ShrinkerWithoutMemory);
        let pauses: Vec<_> =
            (0..20).map(|_| pause_of(governor.step(&account, KernelEvents::default(), Return::Keep))).collect();
        assert!(pauses.windows(2).all(|pair| pair[0] <= pair[1]) && pauses[19] == LONGEST_PAUSE, "{pauses:?}");
    }

    /// A charge near a group's limit must make the shrinkers give memory back. A charge that would exceed the limit
    /// itself must be refused.
    #[test]
    fn charges_stay_below_a_groups_limit() {
        let (fake, account) = fake_group(6 * MIB, Some(0));
        account.admit(4 * MIB, Context::Outside).unwrap();
        assert!(fake.stock.load(Relaxed) <= 2 * MIB);
        fake.room.store(-(10 * MIB as i64), Relaxed);
        account.admit(2 * MIB, Context::Outside).unwrap();
        let refused = account.admit(64 * MIB, Context::Outside);
        assert!(matches!(refused, Err(Error::NoMemory { limit_bytes, .. }) if limit_bytes == 320 * MIB), "{refused:?}");
    }
}
