//! What the helper does by the clock: watches limits that others use up, and gives back what an idle process keeps.
//!
//! It sleeps for good as long as there is nothing to give. Otherwise it looks
//! at the room that is left, as often as somebody could have used it up, and
//! every ten seconds (or as told) whether the process did anything. An idle one
//! gives its free memory back in small steps. No wake-up is left then.

use super::limits::{Bound, FASTEST_BYTES_PER_NS, NEAR_DIVISOR, Room};
use super::{Account, Reason, Urgency, Which};
use crate::arena::Context;
use crate::stats::{self, Counter};
use pagemill_sys::clock;
use std::time::Duration;

/// Less than this is not worth a wake-up.
pub const WORTHWHILE_BYTES: u64 = 1 << 20;

/// A process that is idle for so long gives back, unless told otherwise.
pub const DEFAULT_IDLE: Duration = Duration::from_secs(10);

/// Idle is who uses less than one part in so many of a CPU.
const IDLE_SHARE: u64 = 200;

/// An idle process gives so much at a time, and pauses so long: it may be just about to go on.
const IDLE_STEP_BYTES: u64 = 16 << 20;
const IDLE_PAUSE: Duration = Duration::from_millis(20);

/// Looks at the room that is left are so far apart.
const SHORTEST: Duration = Duration::from_millis(1);
const NEAR: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_secs(5);

/// Where the kernel would say that a group's limit gets near: limits may change.
const WARNED: Duration = Duration::from_secs(1);

/// Near a limit, while nobody uses it up, the looks become rarer up to this, as far as the room allows: somebody may begin
/// to, though not at the fastest.
const CALMEST: Duration = Duration::from_millis(64);
const CALM_SLOWER: u64 = 4;

/// What others take is foreseen for so long, up to one part in so many of the limit.
const FORESIGHT: Duration = Duration::from_millis(20);
const FORESEEN_DIVISOR: u64 = 16;

/// Who takes more than this in that time rushes.
const RUSH_BYTES: u64 = 4 << 20;
const CALM_BYTES: i64 = 1 << 20;

/// The small allocator is asked what it keeps from here on.
const ASKED_FROM_BYTES: u64 = 8 << 20;

/// A process that used less CPU than this has not moved.
const MOVED_NS: u64 = 1_000_000;

/// The longest that a process is left alone which does nothing.
const QUIETEST: Duration = Duration::from_secs(640);

/// A machine is not used up as fast as a group's limit can be reached: others have to touch the memory first.
const MACHINE_SLOWER: u64 = 4;

/// When somebody waits for memory and a limit is near so much goes, the coldest first, or one part in so many of what could go.
const STALL_BYTES: u64 = 64 << 20;
const STALL_DIVISOR: u64 = 8;

/// With less than [`NEAR_DIVISOR`] of a limit left what is cold is offered to the kernel, so much at a time.
const OFFER_BYTES: u64 = 32 << 20;

/// Time as the governor sees it; tests bring their own.
pub trait Clock {
    /// Nanoseconds that pass.
    fn now_ns(&self) -> u64;
    /// Nanoseconds of CPU that the other threads of this process used.
    fn cpu_ns(&self) -> u64;
}

/// The kernel's clocks.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    After(Duration),
    /// There is nothing to give: not before there is, or this time is over.
    WhenGiveable(Option<Duration>),
    /// There is, and nobody to give it to: not before somebody asks.
    WhenAsked,
}

/// What the kernel says by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signs {
    /// Somebody waited for memory in this process's group.
    pub group_stalls: bool,
    /// Somebody did on the machine.
    pub machine_stalls: bool,
    /// It would say if a group's limit got near.
    pub has_thresholds: bool,
}

/// What it remembers from look to look.
#[derive(Debug)]
pub struct Governor<C> {
    clock: C,
    /// `None`: an idle process keeps what it has.
    idle: Option<Duration>,
    /// When the process was last looked at, and what CPU it had used.
    looked: Option<(u64, u64)>,
    is_giving: bool,
    /// How long the process may be left alone, doubled while it does nothing and there is nothing to be had.
    quiet: Duration,
    /// The last look at the room.
    last: Option<Look>,
    /// The pause after it, doubled while nobody uses the room up.
    calm: Duration,
    /// The pause after a look that could give nothing, doubled each time.
    futile: Duration,
}

/// What a look found.
#[derive(Clone, Copy, Debug)]
struct Look {
    now_ns: u64,
    room_bytes: i64,
    /// What this process and its siblings held: they look after themselves.
    own_bytes: u64,
    giveable: u64,
}

impl Look {
    /// What others will have taken after [`FORESIGHT`], if they go on as since an earlier look.
    fn foreseen(&self, earlier: &Self) -> u64 {
        let fell = i128::from(earlier.room_bytes) - i128::from(self.room_bytes);
        let own = i128::from(self.own_bytes) - i128::from(earlier.own_bytes);
        let (taken, passed) = ((fell - own).max(0), i128::from(self.now_ns.saturating_sub(earlier.now_ns)).max(1));
        u64::try_from(taken * FORESIGHT.as_nanos() as i128 / passed).unwrap_or(u64::MAX)
    }
}

impl<C: Clock> Governor<C> {
    pub fn new(clock: C, idle: Option<Duration>) -> Self {
        Self {
            clock,
            idle,
            looked: None,
            is_giving: false,
            quiet: idle.unwrap_or(DEFAULT_IDLE),
            last: None,
            calm: SHORTEST,
            futile: SHORTEST,
        }
    }

    /// Looks once, gives back what is due.
    pub fn step(&mut self, account: &Account, signs: Signs) -> Next {
        if account.giveable() < WORTHWHILE_BYTES {
            // What the small allocator keeps is only known by asking.
            account.measure();
            if account.giveable() < WORTHWHILE_BYTES {
                self.is_giving = false;
                return self.wait_for_small();
            }
        }
        let watch = self.watch(account, signs);
        let idle = self.give_if_idle(account);
        watch.into_iter().chain(idle).min().map_or(Next::WhenAsked, Next::After)
    }

    /// What is freed to the small allocator wakes nobody. Where it holds much it is asked now and then, ever more seldom
    /// while the process does nothing.
    fn wait_for_small(&mut self) -> Next {
        if self.idle.is_none() || stats::get(Counter::Small) < ASKED_FROM_BYTES {
            self.looked = None;
            return Next::WhenGiveable(None);
        }
        let cpu = self.clock.cpu_ns();
        let has_moved = self.looked.is_none_or(|(_, cpu_then)| cpu.saturating_sub(cpu_then) > MOVED_NS);
        self.looked = Some((self.clock.now_ns(), cpu));
        self.leave_alone(has_moved);
        Next::WhenGiveable(Some(self.quiet))
    }

    /// The next look at an idle process: soon after it moved, ever later while it does not.
    fn leave_alone(&mut self, has_moved: bool) {
        let idle = self.idle.unwrap_or(DEFAULT_IDLE);
        self.quiet = if has_moved { idle } else { (2 * self.quiet).min(QUIETEST.max(idle)) };
    }

    /// Gives back what a group or the machine is short of.
    fn watch(&mut self, account: &Account, signs: Signs) -> Option<Duration> {
        account.reap();
        let room = account.headroom.sample();
        let (own_bytes, giveable) = (account.tree_resident(), account.giveable());
        let look = Look { now_ns: self.clock.now_ns(), room_bytes: room.bytes, own_bytes, giveable };
        let last = self.last.replace(look).unwrap_or(look);
        // Others who rush are met earlier: this thread may be held up just when it matters, or its CPU.
        let foreseen = look.foreseen(&last).min(room.limit_bytes / FORESEEN_DIVISOR);
        if foreseen > RUSH_BYTES && room.bytes < (room.limit_bytes / NEAR_DIVISOR) as i64 {
            account.offer(u64::MAX, Which::All);
        }
        if room.shortage(foreseen) == 0 {
            self.futile = SHORTEST;
            let is_calm = room.bytes.saturating_add(CALM_BYTES) >= last.room_bytes;
            self.calm = if is_calm { (2 * self.calm).min(CALMEST) } else { SHORTEST };
            // Free memory that nobody took any of since the last look will hardly be taken before the next.
            let which = if giveable >= last.giveable { Which::All } else { Which::Cold };
            be_polite(account, &room, signs, which);
            let is_warned = signs.has_thresholds && room.is_far && room.bound == Bound::Group;
            // Nobody warns of the machine's memory in time.
            let longest = until_used_up(room.machine_bytes, MACHINE_SLOWER).clamp(NEAR, WARNED);
            return Some(if is_warned { longest } else { self.pause(&room)? });
        }
        let before = account.giveable();
        let room = account.give_for_system(room, foreseen, Context::Outside);
        self.last = Some(Look { room_bytes: room.bytes, own_bytes: account.tree_resident(), ..look });
        self.calm = SHORTEST;
        if room.shortage(0) == 0 || account.giveable() < before {
            self.futile = SHORTEST;
            return Some(SHORTEST);
        }
        self.futile = (2 * self.futile).min(LONGEST);
        Some(self.futile)
    }

    /// How long somebody would need to use up the room that is left; longer while nobody does.
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

    /// Gives a step back if the process did nothing since the last look, or goes on giving.
    fn give_if_idle(&mut self, account: &Account) -> Option<Duration> {
        let idle = self.idle?;
        let (now, cpu) = (self.clock.now_ns(), self.clock.cpu_ns());
        let period = if self.is_giving { IDLE_PAUSE } else { self.quiet };
        let Some((then, cpu_then)) = self.looked else {
            self.looked = Some((now, cpu));
            return Some(idle);
        };
        let passed = Duration::from_nanos(now.saturating_sub(then));
        if passed < period {
            return Some(period - passed);
        }
        self.looked = Some((now, cpu));
        let used = cpu.saturating_sub(cpu_then);
        // Over twenty milliseconds a share says little.
        let share = if self.is_giving { IDLE_SHARE / 10 } else { IDLE_SHARE };
        self.is_giving = used <= passed.as_nanos() as u64 / share;
        if !self.is_giving {
            self.leave_alone(true);
            return Some(idle);
        }
        let freed = account.give_back(IDLE_STEP_BYTES, Context::Outside, Urgency::Request, Reason::Idleness);
        if freed > 0 {
            self.leave_alone(true);
            return Some(IDLE_PAUSE);
        }
        // In pieces, none of which can go.
        self.is_giving = false;
        self.leave_alone(used > MOVED_NS);
        Some(self.quiet)
    }
}

fn until_used_up(bytes: i64, slower: u64) -> Duration {
    Duration::from_nanos((bytes.max(0) as u64 / FASTEST_BYTES_PER_NS).saturating_mul(slower))
}

/// Near a limit offers memory to the kernel, and gives some of it if somebody waits for memory below that same limit: who
/// waits below another is not helped.
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
    use super::*;
    use crate::arena::Budget;
    use crate::error::Error;
    use crate::reclaim::Shrinker;
    use crate::reclaim::limits::{Kill, Limits};
    use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};

    const MIB: u64 = 1 << 20;

    /// Gives from a hoard; a group with a limit of 256 MiB gets what it gives.
    #[derive(Default)]
    struct World {
        hoard: AtomicU64,
        offered: AtomicU64,
        room: AtomicI64,
        is_far: AtomicBool,
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

    /// Without anything to give, or anybody to give it to, there is no wake-up.
    #[test]
    fn it_sleeps_for_good_without_a_reason() {
        let clock = FakeClock::default();
        let (_, poor) = world(MIB - 1, Some(-5));
        assert_eq!(Governor::new(&clock, Some(DEFAULT_IDLE)).step(&poor, Signs::default()), Next::WhenGiveable(None));
        let (_, alone) = world(100 * MIB, None);
        assert_eq!(Governor::new(&clock, None).step(&alone, Signs::default()), Next::WhenAsked);
    }

    /// Ten seconds without CPU: all goes, in steps with pauses between, and then it sleeps.
    #[test]
    fn an_idle_process_gives_in_small_steps() {
        let (world, account) = world(100 * MIB, None);
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock, Some(DEFAULT_IDLE));
        assert_eq!(governor.step(&account, Signs::default()), Next::After(DEFAULT_IDLE));
        clock.pass(DEFAULT_IDLE, Duration::from_millis(1));
        let mut steps = 0;
        while let Next::After(pause) = governor.step(&account, Signs::default()) {
            assert_eq!(pause, IDLE_PAUSE);
            steps += 1;
            assert_eq!(world.hoard.load(Relaxed), 100 * MIB - (steps * IDLE_STEP_BYTES).min(100 * MIB));
            clock.pass(pause, Duration::from_millis(1));
        }
        assert_eq!((steps, world.hoard.load(Relaxed)), (7, 0));
    }

    /// A process that works keeps what it has, also one that goes on working in the middle of giving.
    #[test]
    fn a_busy_process_keeps_its_memory() {
        let (world, account) = world(100 * MIB, None);
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock, Some(DEFAULT_IDLE));
        for _ in 0..5 {
            assert_eq!(governor.step(&account, Signs::default()), Next::After(DEFAULT_IDLE));
            clock.pass(DEFAULT_IDLE, Duration::from_secs(1));
        }
        assert_eq!(world.hoard.load(Relaxed), 100 * MIB);
        governor.step(&account, Signs::default());
        clock.pass(DEFAULT_IDLE, Duration::ZERO);
        assert_eq!(governor.step(&account, Signs::default()), Next::After(IDLE_PAUSE));
        let kept = world.hoard.load(Relaxed);
        clock.pass(IDLE_PAUSE, IDLE_PAUSE);
        assert_eq!(
            (governor.step(&account, Signs::default()), world.hoard.load(Relaxed)),
            (Next::After(DEFAULT_IDLE), kept)
        );
    }

    /// Others use a group's memory up: what is missing before the margin is given, and the looks come closer.
    #[test]
    fn a_group_that_runs_short_is_given_to() {
        let (world, account) = world(100 * MIB, Some(200 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock, None);
        let far = pause_of(governor.step(&account, Signs::default()));
        let minute = Duration::from_secs(60);
        clock.pass(minute, Duration::ZERO);
        world.room.store(20 * MIB as i64, Relaxed);
        let near = pause_of(governor.step(&account, Signs::default()));
        assert!(near < far && near >= SHORTEST, "{near:?} {far:?}");
        assert_eq!(world.hoard.load(Relaxed), 100 * MIB, "nothing is given without need");
        clock.pass(minute, Duration::ZERO);
        world.room.store(-(30 * MIB as i64), Relaxed);
        governor.step(&account, Signs::default());
        // A little more than is missing: it goes on at this rate.
        assert_eq!((world.hoard.load(Relaxed) / MIB, world.room.load(Relaxed) / MIB as i64), (69, 0));
    }

    /// Others who rush towards a limit are met before its margin, by as much as they will take; the process's own growth
    /// is its own care.
    #[test]
    fn rushing_others_are_met_early() {
        let (world, account) = world(100 * MIB, Some(60 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock, None);
        governor.step(&account, Signs::default());
        let take = |mib: u64| {
            world.room.fetch_sub((mib * MIB) as i64, Relaxed);
            clock.pass(Duration::from_millis(10), Duration::ZERO);
        };
        take(40);
        governor.step(&account, Signs::default());
        assert_eq!(world.hoard.load(Relaxed), 100 * MIB, "there is room for sixteen more");
        assert!(world.offered.load(Relaxed) >= 100 * MIB, "all is offered, in case this thread is held up");
        take(10);
        governor.step(&account, Signs::default());
        assert_eq!((world.hoard.load(Relaxed), world.room.load(Relaxed)), (94 * MIB, 16 * MIB as i64));
        world.room.store(60 * MIB as i64, Relaxed);
        governor.step(&account, Signs::default());
        account.admit(50 * MIB, Context::Outside).unwrap();
        take(50);
        governor.step(&account, Signs::default());
        assert_eq!(world.hoard.load(Relaxed), 94 * MIB, "its own charge");
    }

    /// Somebody waits for memory: some of the coldest goes if a limit is near, nothing if not. What is cold is offered.
    #[test]
    fn stalls_are_heard_near_a_limit() {
        let (world, account) = world(1000 * MIB, Some(200 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock, None);
        let stalled = Signs { group_stalls: true, ..Signs::default() };
        governor.step(&account, stalled);
        assert_eq!((world.hoard.load(Relaxed), world.offered.load(Relaxed)), (1000 * MIB, 0));
        clock.pass(Duration::from_secs(60), Duration::ZERO);
        world.room.store(30 * MIB as i64, Relaxed);
        governor.step(&account, Signs::default());
        assert_eq!((world.hoard.load(Relaxed), world.offered.load(Relaxed)), (1000 * MIB, OFFER_BYTES));
        governor.step(&account, Signs { machine_stalls: true, ..Signs::default() });
        assert_eq!(world.hoard.load(Relaxed), 1000 * MIB, "stalls of the machine, near the group's limit");
        governor.step(&account, stalled);
        assert_eq!(world.hoard.load(Relaxed), 875 * MIB);
    }

    /// Where the kernel warns in time nobody looks every few milliseconds.
    #[test]
    fn thresholds_save_looks() {
        let (world, account) = world(100 * MIB, Some(100 * MIB as i64));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock, None);
        let warned = Signs { has_thresholds: true, ..Signs::default() };
        assert!(pause_of(governor.step(&account, warned)) < WARNED, "near already");
        world.is_far.store(true, Relaxed);
        assert_eq!(pause_of(governor.step(&account, warned)), WARNED);
        assert!(pause_of(governor.step(&account, Signs::default())) < WARNED);
    }

    /// Nothing left to give, and still short: it looks ever more seldom.
    #[test]
    fn futile_looks_become_rare() {
        let (world, account) = world(2 * MIB, Some(-(500 * MIB as i64)));
        let clock = FakeClock::default();
        let mut governor = Governor::new(&clock, None);
        governor.step(&account, Signs::default());
        assert_eq!(world.hoard.load(Relaxed), 0);
        assert_eq!(governor.step(&account, Signs::default()), Next::WhenGiveable(None));
        // An owner that says it could give, and gives nothing.
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
        let pauses: Vec<_> = (0..20).map(|_| pause_of(governor.step(&account, Signs::default()))).collect();
        assert!(pauses.windows(2).all(|pair| pair[0] <= pair[1]) && pauses[19] == LONGEST, "{pauses:?}");
    }

    /// A charge near a group's limit makes the owners give; one that would pass the limit itself is refused.
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
