//! The helper's periodic work: watches the limits of groups and of the machine, and returns memory that has been free
//! for long.
//!
//! Two independent tasks, each with its own next look. *Watch* samples the room below the limits of groups and of the
//! machine, as often as other processes could use it up. Inside the margin it gives memory back. *Age* returns memory
//! that was not reused for the age of [`Return`], in bounded steps, whether the process is busy or idle.
//!
//! The helper sleeps without a timeout while no owner has, or may have, anything to give back. An owner that cannot
//! tell ([`super::Shrinker::may_have_more`]) keeps both tasks and the alarms running, because a free to the small
//! allocator wakes nothing. If the process used no CPU since the last look, it freed nothing, so its looks become rare.

use super::limits::{Bound, FASTEST_BYTES_PER_NS, NEAR_DIVISOR, Room};
use super::{Account, Reason, Return, Urgency, Which};
use crate::arena::Context;
use pagemill_sys::clock;
use std::time::Duration;

/// Less than this is not worth a wake-up.
pub const WORTHWHILE_BYTES: u64 = 1 << 20;

/// Searches for aged memory per age of [`Return`]. More would cost CPU, fewer would return it later.
const LOOKS_PER_AGE: u32 = 10;

/// The shortest pause between two of these searches.
const SHORTEST_AGE_LOOK: Duration = Duration::from_millis(100);

/// Bytes returned by one step, and the pause after a step that returned as much: at most 800 MiB a second.
const AGED_STEP_BYTES: u64 = 16 << 20;
const AGED_PAUSE: Duration = Duration::from_millis(20);

/// Bounds of the pause between two samples of the room: shortest, shortest if no limit is near, longest.
const SHORTEST: Duration = Duration::from_millis(1);
const NEAR: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_secs(5);

/// Longest pause where the kernel reports that a group's limit gets near: limits may change.
const WARNED: Duration = Duration::from_secs(1);

/// Near a limit that nothing uses up, the pause grows up to this, as far as the room allows. The factor assumes that
/// other processes start slower than at the fastest rate.
const CALMEST: Duration = Duration::from_millis(64);
const CALM_SLOWER: u64 = 4;

/// Usage by other processes is extrapolated for this long, up to this part of the limit.
const FORESIGHT: Duration = Duration::from_millis(20);
const FORESEEN_DIVISOR: u64 = 16;

/// Other processes rush if they take more than this in that time.
const RUSH_BYTES: u64 = 4 << 20;
const CALM_BYTES: i64 = 1 << 20;

/// A process that used less CPU than this counts as idle.
const MOVED_NS: u64 = 50_000;

/// The longest pause of a process that uses no CPU and has nothing to give back: with a threshold event that would wake
/// the helper, and without one.
const QUIETEST: Duration = Duration::from_secs(640);
const QUIETEST_UNWARNED: Duration = Duration::from_secs(5);

/// The machine's memory is not used up as fast as a group's limit can be reached: other processes have to touch it
/// first.
const MACHINE_SLOWER: u64 = 4;

/// Bytes given back, coldest first, when a thread stalls on memory and a limit is near; or this part of what is
/// giveable if that is more.
const STALL_BYTES: u64 = 64 << 20;
const STALL_DIVISOR: u64 = 8;

/// With less than `1/NEAR_DIVISOR` of a limit left, cold memory is offered to the kernel in steps of this.
const OFFER_BYTES: u64 = 32 << 20;

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

/// When to look again.
///
/// Example: [`Governor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    After(Duration),
    /// Nothing to give back: sleep until an owner has something.
    WhenGiveable,
    /// Something to give back, but no limit and no age: sleep until a request.
    WhenAsked,
}

/// Kernel events since the last step.
///
/// Example: [`Governor`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    /// A thread stalled on memory in this process's group.
    pub group_stalls: bool,
    /// A thread stalled on memory on the machine.
    pub machine_stalls: bool,
    /// The kernel would report that a group's limit gets near.
    pub has_thresholds: bool,
    /// The kernel reported an event since the last step.
    pub is_woken: bool,
}

/// The state kept between looks.
///
/// ```
/// use pagemill::reclaim::governor::{Governor, Signs, SystemClock};
/// use pagemill::{Pagemill, reclaim::Return};
///
/// let pagemill = Pagemill::for_test(); // without a helper of its own
/// let next = Governor::new(SystemClock).step(pagemill.account, Signs::default(), Return::BALANCED);
/// println!("looks again: {next:?}");
/// ```
#[derive(Debug)]
pub struct Governor<C> {
    clock: C,
    /// CPU that the process had used when it was last seen running.
    moved_cpu_ns: u64,
    /// It has run since it was last measured for being idle.
    has_news: bool,
    /// The pause while the process is idle and has nothing to give back; doubled each time.
    quiet: Duration,
    /// Time of the next search for aged memory.
    aged_at_ns: u64,
    /// The age that this was decided for.
    aged_for: Duration,
    /// State of a generator: the looks must not keep step with a program's own rhythm.
    jitter: u64,
    /// The last sample of the room.
    last: Option<PeriodResult>,
    /// The pause after it, doubled while nothing uses the room up.
    calm: Duration,
    /// The pause after a look that could give nothing back, doubled each time.
    futile: Duration,
}

/// The result of a look.
#[derive(Clone, Copy, Debug)]
struct PeriodResult {
    now_ns: u64,
    room_bytes: i64,
    /// What this process and its siblings held. Their own charges reclaim for them.
    own_bytes: u64,
    giveable: u64,
}

impl PeriodResult {
    /// What other processes will have taken after [`FORESIGHT`], at the rate since an earlier look.
    fn foreseen(&self, earlier: &Self) -> u64 {
        let fell = i128::from(earlier.room_bytes) - i128::from(self.room_bytes);
        let own = i128::from(self.own_bytes) - i128::from(earlier.own_bytes);
        let (taken, passed) = ((fell - own).max(0), i128::from(self.now_ns.saturating_sub(earlier.now_ns)).max(1));
        u64::try_from(taken * FORESIGHT.as_nanos() as i128 / passed).unwrap_or(u64::MAX)
    }
}

impl<C: Clock> Governor<C> {
    pub fn new(clock: C) -> Self {
        Self {
            clock,
            moved_cpu_ns: 0,
            has_news: true,
            quiet: SHORTEST_AGE_LOOK,
            aged_at_ns: 0,
            aged_for: Duration::ZERO,
            jitter: 0x9E37_79B9_7F4A_7C15,
            last: None,
            calm: SHORTEST,
            futile: SHORTEST,
        }
    }

    /// Samples the limits once and returns the memory that is due.
    pub fn step(&mut self, account: &Account, signs: Signs, policy: Return) -> Next {
        if account.giveable() < WORTHWHILE_BYTES
            && let Some(next) = self.step_without(account, signs)
        {
            return next;
        }
        let watch = self.watch(account, signs);
        let aged = policy.age().map(|age| self.give_aged(account, age));
        watch.into_iter().chain(aged).min().map_or(Next::WhenAsked, Next::After)
    }

    /// The step of a process that is not known to have anything to give back. Returns `None` if the limits must be
    /// watched all the same.
    fn step_without(&mut self, account: &Account, signs: Signs) -> Option<Next> {
        let has_moved = self.has_moved();
        if !account.may_have_more() {
            account.measure();
            let has_none = account.giveable() < WORTHWHILE_BYTES;
            return has_none.then(|| {
                self.aged_at_ns = 0;
                Next::WhenGiveable
            });
        }
        if has_moved || signs.is_woken {
            return None;
        }
        // The process is idle: what it freed is measured once and does not change after that.
        if std::mem::take(&mut self.has_news) {
            account.measure();
        }
        (account.giveable() < WORTHWHILE_BYTES).then(|| Next::After(self.stay_quiet(signs)))
    }

    /// Whether the process used CPU since this was last true.
    fn has_moved(&mut self) -> bool {
        let cpu = self.clock.cpu_ns();
        let has_moved = cpu.saturating_sub(self.moved_cpu_ns) > MOVED_NS;
        if has_moved {
            self.moved_cpu_ns = cpu;
            self.quiet = SHORTEST_AGE_LOOK;
            self.has_news = true;
        }
        has_moved
    }

    /// The pause of a process that freed nothing, because it did not run.
    fn stay_quiet(&mut self, signs: Signs) -> Duration {
        let is_warned = signs.has_thresholds || self.last.is_none();
        self.quiet = (2 * self.quiet).min(if is_warned { QUIETEST } else { QUIETEST_UNWARNED });
        self.quiet
    }

    /// Returns memory if a group or the machine is short of it.
    fn watch(&mut self, account: &Account, signs: Signs) -> Option<Duration> {
        account.reap();
        let room = account.headroom.sample();
        let (own_bytes, giveable) = (account.tree_resident(), account.giveable());
        let look = PeriodResult { now_ns: self.clock.now_ns(), room_bytes: room.bytes, own_bytes, giveable };
        let last = self.last.replace(look).unwrap_or(look);
        // Reclaim earlier if other processes rush: this thread may not get a CPU when it matters.
        let foreseen = look.foreseen(&last).min(room.limit_bytes / FORESEEN_DIVISOR);
        if foreseen > RUSH_BYTES && room.bytes < (room.limit_bytes / NEAR_DIVISOR) as i64 {
            account.offer(u64::MAX, Which::All);
        }
        if room.shortage(foreseen) == 0 {
            self.futile = SHORTEST;
            let is_calm = room.bytes.saturating_add(CALM_BYTES) >= last.room_bytes;
            self.calm = if is_calm { (2 * self.calm).min(CALMEST) } else { SHORTEST };
            // Free memory of which nothing was reused since the last look is unlikely to be reused before the next.
            let which = if giveable >= last.giveable { Which::All } else { Which::Cold };
            be_polite(account, &room, signs, which);
            let is_warned = signs.has_thresholds && room.is_far && room.bound == Bound::Group;
            // No event reports a shortage of the machine's memory in time.
            let longest = until_used_up(room.machine_bytes, MACHINE_SLOWER).clamp(NEAR, WARNED);
            return Some(if is_warned { longest } else { self.pause(&room)? });
        }
        let before = account.giveable();
        let room = account.give_for_system(room, foreseen, Context::Outside);
        self.last = Some(PeriodResult { room_bytes: room.bytes, own_bytes: account.tree_resident(), ..look });
        self.calm = SHORTEST;
        if room.shortage(0) == 0 || account.giveable() < before {
            self.futile = SHORTEST;
            return Some(SHORTEST);
        }
        self.futile = (2 * self.futile).min(LONGEST);
        Some(self.futile)
    }

    /// Returns the pause until the next sample: the time that other processes need to use up the room that is left,
    /// longer while they use none.
    fn pause(&self, room: &Room) -> Option<Duration> {
        let slower = match room.bound {
            Bound::None => return None,
            Bound::Group => 1,
            Bound::Machine => MACHINE_SLOWER,
        };
        let shortest = if room.bytes < room.limit_bytes as i64 / 16 { SHORTEST } else { NEAR };
        let calm = self.calm.min(until_used_up(room.bytes, slower * CALM_SLOWER));
        Some(until_used_up(room.bytes, slower).clamp(shortest, LONGEST).max(calm))
    }

    /// Returns one step of memory that has been free for `age`, if a search is due. Returns the pause until the next
    /// search.
    fn give_aged(&mut self, account: &Account, age: Duration) -> Duration {
        let now_ns = self.clock.now_ns();
        let period = (age / LOOKS_PER_AGE).max(SHORTEST_AGE_LOOK);
        if std::mem::replace(&mut self.aged_for, age) != age {
            self.aged_at_ns = 0;
            self.quiet = SHORTEST_AGE_LOOK;
        }
        if self.aged_at_ns == 0 {
            self.aged_at_ns = now_ns + period.as_nanos() as u64;
        }
        if now_ns < self.aged_at_ns {
            return Duration::from_nanos(self.aged_at_ns - now_ns);
        }
        account.measure();
        let freed = account.give_aged(AGED_STEP_BYTES, age);
        let pause = if freed >= AGED_STEP_BYTES {
            AGED_PAUSE
        } else if freed > 0 || self.has_moved() {
            self.quiet = SHORTEST_AGE_LOOK;
            self.jittered(period)
        } else {
            // Memory ages without CPU. Once all of it is old, the rest lies in pieces that cannot be given back.
            self.quiet = (self.quiet + self.quiet / LOOKS_PER_AGE).min(QUIETEST);
            self.jittered(period).max(self.quiet)
        };
        self.aged_at_ns = now_ns + pause.as_nanos() as u64;
        pause
    }

    /// A random length from half a period to one and a half.
    fn jittered(&mut self, period: Duration) -> Duration {
        // Xorshift (G. Marsaglia, 2003).
        self.jitter ^= self.jitter << 13;
        self.jitter ^= self.jitter >> 7;
        self.jitter ^= self.jitter << 17;
        period / 2 + period * (self.jitter % 1024) as u32 / 1024
    }
}

fn until_used_up(bytes: i64, slower: u64) -> Duration {
    Duration::from_nanos((bytes.max(0) as u64 / FASTEST_BYTES_PER_NS).saturating_mul(slower))
}

/// Near a limit, offers memory to the kernel. Gives some back if a thread stalls below that same limit; stalls below
/// another limit would not be helped.
fn be_polite(account: &Account, room: &Room, signs: Signs, which: Which) {
    if room.bytes >= (room.limit_bytes / NEAR_DIVISOR) as i64 {
        return;
    }
    account.offer(OFFER_BYTES, which);
    let is_stalled = match room.bound {
        Bound::Group => signs.group_stalls,
        Bound::Machine => signs.machine_stalls,
        Bound::None => false,
    };
    if is_stalled {
        let part = STALL_BYTES.max(account.giveable() / STALL_DIVISOR);
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
    use crate::reclaim::limits::{Kill, Limits};
    use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

    const MIB: u64 = 1 << 20;

    /// A shrinker with a fixed stock, in a group with a limit of 256 MiB that gains the room it gives back.
    #[derive(Default)]
    struct World {
        hoard: AtomicU64,
        offered: AtomicU64,
        room: AtomicI64,
        is_far: AtomicBool,
        /// The part of `hoard` that was not reused.
        aged: AtomicU64,
        may_have_more: AtomicBool,
        measured: AtomicU64,
    }

    impl Shrinker for World {
        fn name(&self) -> &'static str {
            "hoard"
        }

        fn may_nest(&self) -> bool {
            true
        }

        fn giveable_bytes(&self) -> u64 {
            self.hoard.load(Relaxed)
        }

        fn shrink(&self, want_bytes: u64, _urgency: Urgency) -> u64 {
            let given = want_bytes.min(self.hoard.load(Relaxed));
            self.hoard.fetch_sub(given, Relaxed);
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
            let most = if which == Which::All { self.hoard.load(Relaxed) } else { u64::MAX };
            self.offered.fetch_add(want_bytes.min(most), Relaxed);
            want_bytes.min(most)
        }
    }

    impl Limits for World {
        fn sample(&self) -> Room {
            let bytes = self.room.load(Relaxed);
            let unused = Kill { limit_bytes: 320 * MIB, used_bytes: 0 };
            let used_bytes = (unused.room_bytes() as i64 - 16 * MIB as i64 - bytes) as u64;
            Room {
                bound: Bound::Group,
                bytes,
                kill: Kill { used_bytes, ..unused },
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
        fn pass(&self, time: Duration, cpu: Duration) {
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

    #[track_caller]
    fn pause_of(next: Next) -> Duration {
        match next {
            Next::After(pause) => pause,
            other => panic!("{other:?}"),
        }
    }

    fn world(hoard: u64, room: Option<i64>) -> (&'static World, Account) {
        let world: &'static World = Box::leak(Box::default());
        world.hoard.store(hoard, Relaxed);
        let account = Account::new(u64::MAX);
        account.register(world);
        if let Some(room) = room {
            world.room.store(room, Relaxed);
            account.headroom.set_limits(world);
        }
        (world, account)
    }

    const AGE: Duration = Duration::from_secs(10);

    /// The governor sets no timeout if there is nothing to give back, or if there is neither a limit nor an age.
    #[test]
    fn without_a_reason_there_is_no_wake_up() {
        let clock = FakeClock::default();
        let (_, poor) = world(MIB - 1, Some(-5));
        let signs = Signs::default();
        assert_eq!(Governor::new(&clock).step(&poor, signs, Return::BALANCED), Next::WhenGiveable);
        let (_, alone) = world(100 * MIB, None);
        assert_eq!(Governor::new(&clock).step(&alone, signs, Return::Keep), Next::WhenAsked);
    }

    /// Memory that was not reused is returned in steps with pauses between, also by a busy process. The rest stays, and
    /// is searched ten times in an age.
    #[test]
    fn aged_memory_returns_in_steps() {
        let (world, account) = world(200 * MIB, None);
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let mut step = |account| pause_of(governor.step(account, Signs::default(), Return::After(AGE)));
        let first = step(&account);
        assert_eq!(first, AGE / LOOKS_PER_AGE);
        world.aged.store(100 * MIB, Relaxed);
        clock.pass(first, first);
        for steps in 1..=6 {
            assert_eq!(step(&account), AGED_PAUSE);
            assert_eq!(world.hoard.load(Relaxed), 200 * MIB - steps * AGED_STEP_BYTES);
            clock.pass(AGED_PAUSE, AGED_PAUSE);
        }
        for _ in 0..20 {
            let pause = step(&account);
            assert!(pause >= AGE / LOOKS_PER_AGE / 2 && pause <= AGE / LOOKS_PER_AGE * 2, "{pause:?}");
            clock.pass(pause, pause);
        }
        assert_eq!(world.hoard.load(Relaxed), 100 * MIB);
    }

    /// The pauses of an idle process with memory that cannot be given back grow. They become short as soon as it runs.
    #[test]
    fn looks_at_a_still_process_become_rare() {
        let (_, account) = world(100 * MIB, None);
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let mut pass = |cpu| {
            let pause = pause_of(governor.step(&account, Signs::default(), Return::After(AGE)));
            clock.pass(pause, cpu);
            pause
        };
        let pauses: Vec<_> = (0..200).map(|_| pass(Duration::ZERO)).collect();
        assert_eq!(pauses[199], QUIETEST);
        assert!(pauses.iter().take_while(|pause| **pause < AGE).count() > LOOKS_PER_AGE as usize, "{pauses:?}");
        pass(Duration::from_secs(1));
        assert!(pass(Duration::ZERO) <= AGE / LOOKS_PER_AGE * 2);
    }

    /// An owner that may hold more than it knows keeps the limits watched. An idle process is measured once, and then
    /// rarely looked at.
    #[test]
    fn limits_are_watched_for_memory_that_is_not_known() {
        let (world, account) = world(0, Some(100 * MIB as i64));
        world.may_have_more.store(true, Relaxed);
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let mut step = |signs| {
            let pause = pause_of(governor.step(&account, signs, Return::Keep));
            (pause, governor.last.is_some_and(|last| last.now_ns == (&clock).now_ns()))
        };
        clock.pass(Duration::from_secs(1), Duration::from_secs(1));
        assert!(step(Signs::default()).1, "watched");
        clock.pass(Duration::from_secs(1), Duration::ZERO);
        let steps: Vec<_> = (0..20).map(|_| step(Signs::default())).collect();
        assert_eq!(world.measured.load(Relaxed), 1);
        assert!(steps[0].0 < steps[1].0 && steps[19] == (QUIETEST_UNWARNED, false), "{steps:?}");
        world.hoard.store(100 * MIB, Relaxed);
        world.room.store(-(30 * MIB as i64), Relaxed);
        step(Signs { is_woken: true, ..Signs::default() });
        assert!(world.hoard.load(Relaxed) <= 70 * MIB, "what is missing, and what others are about to take");
    }

    /// Other processes use up a group's memory: what is missing before the margin is given back, and the pauses become
    /// shorter.
    #[test]
    fn a_group_that_runs_short_is_given_to() {
        let (world, account) = world(100 * MIB, Some(200 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let far = pause_of(governor.step(&account, Signs::default(), Return::Keep));
        let minute = Duration::from_secs(60);
        clock.pass(minute, Duration::ZERO);
        world.room.store(20 * MIB as i64, Relaxed);
        let near = pause_of(governor.step(&account, Signs::default(), Return::Keep));
        assert!(near < far && near >= SHORTEST, "{near:?} {far:?}");
        assert_eq!(world.hoard.load(Relaxed), 100 * MIB, "nothing is given without need");
        clock.pass(minute, Duration::ZERO);
        world.room.store(-(30 * MIB as i64), Relaxed);
        governor.step(&account, Signs::default(), Return::Keep);
        // Slightly more than is missing, because the usage is extrapolated at this rate.
        assert_eq!((world.hoard.load(Relaxed) / MIB, world.room.load(Relaxed) / MIB as i64), (69, 0));
    }

    /// Other processes rush towards a limit: memory is given back before the margin, as much as they will take. The
    /// process's own growth does not count.
    #[test]
    fn rushing_others_are_met_early() {
        let (world, account) = world(100 * MIB, Some(60 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        governor.step(&account, Signs::default(), Return::Keep);
        let take = |mib: u64| {
            world.room.fetch_sub((mib * MIB) as i64, Relaxed);
            clock.pass(Duration::from_millis(10), Duration::ZERO);
        };
        take(40);
        governor.step(&account, Signs::default(), Return::Keep);
        assert_eq!(world.hoard.load(Relaxed), 100 * MIB, "there is room for sixteen more");
        assert!(world.offered.load(Relaxed) >= 100 * MIB, "all is offered, in case this thread is held up");
        take(10);
        governor.step(&account, Signs::default(), Return::Keep);
        assert_eq!((world.hoard.load(Relaxed), world.room.load(Relaxed)), (94 * MIB, 16 * MIB as i64));
        world.room.store(60 * MIB as i64, Relaxed);
        governor.step(&account, Signs::default(), Return::Keep);
        account.admit(50 * MIB, Context::Outside).unwrap();
        take(50);
        governor.step(&account, Signs::default(), Return::Keep);
        assert_eq!(world.hoard.load(Relaxed), 94 * MIB, "its own charge");
    }

    /// A thread stalls on memory: some of the coldest memory is given back if a limit is near, none if not. Cold memory
    /// is offered.
    #[test]
    fn stalls_are_heard_near_a_limit() {
        let (world, account) = world(1000 * MIB, Some(200 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let stalled = Signs { group_stalls: true, ..Signs::default() };
        governor.step(&account, stalled, Return::Keep);
        assert_eq!((world.hoard.load(Relaxed), world.offered.load(Relaxed)), (1000 * MIB, 0));
        clock.pass(Duration::from_secs(60), Duration::ZERO);
        world.room.store(30 * MIB as i64, Relaxed);
        governor.step(&account, Signs::default(), Return::Keep);
        assert_eq!((world.hoard.load(Relaxed), world.offered.load(Relaxed)), (1000 * MIB, OFFER_BYTES));
        governor.step(&account, Signs { machine_stalls: true, ..Signs::default() }, Return::Keep);
        assert_eq!(world.hoard.load(Relaxed), 1000 * MIB, "stalls of the machine, near the group's limit");
        governor.step(&account, stalled, Return::Keep);
        assert_eq!(world.hoard.load(Relaxed), 875 * MIB);
    }

    /// With threshold events the governor does not look every few milliseconds.
    #[test]
    fn thresholds_save_looks() {
        let (world, account) = world(100 * MIB, Some(100 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        let warned = Signs { has_thresholds: true, ..Signs::default() };
        assert!(pause_of(governor.step(&account, warned, Return::Keep)) < WARNED, "near already");
        world.is_far.store(true, Relaxed);
        assert_eq!(pause_of(governor.step(&account, warned, Return::Keep)), WARNED);
        assert!(pause_of(governor.step(&account, Signs::default(), Return::Keep)) < WARNED);
    }

    /// Nothing left to give back and still short: the pauses grow.
    #[test]
    fn futile_looks_become_rare() {
        let (world, account) = world(2 * MIB, Some(-(500 * MIB as i64)));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock);
        governor.step(&account, Signs::default(), Return::Keep);
        assert_eq!(world.hoard.load(Relaxed), 0);
        assert_eq!(governor.step(&account, Signs::default(), Return::Keep), Next::WhenGiveable);
        // An owner that reports giveable memory and gives nothing back.
        struct Liar;
        impl Shrinker for Liar {
            fn name(&self) -> &'static str {
                "liar"
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
        account.register(&Liar);
        let pauses: Vec<_> =
            (0..20).map(|_| pause_of(governor.step(&account, Signs::default(), Return::Keep))).collect();
        assert!(pauses.windows(2).all(|pair| pair[0] <= pair[1]) && pauses[19] == LONGEST, "{pauses:?}");
    }

    /// A charge near a group's limit makes the owners give back. A charge that would exceed the limit itself is
    /// refused.
    #[test]
    fn charges_stay_below_a_groups_limit() {
        let (world, account) = world(6 * MIB, Some(0));
        account.admit(4 * MIB, Context::Outside).unwrap();
        assert!(world.hoard.load(Relaxed) <= 2 * MIB);
        world.room.store(-(10 * MIB as i64), Relaxed);
        account.admit(2 * MIB, Context::Outside).unwrap();
        let refused = account.admit(64 * MIB, Context::Outside);
        assert!(matches!(refused, Err(Error::NoMemory { limit_bytes, .. }) if limit_bytes == 320 * MIB), "{refused:?}");
    }
}
