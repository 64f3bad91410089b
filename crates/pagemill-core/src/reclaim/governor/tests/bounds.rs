//! The governor's bounds: each is passed by one byte, or one nanosecond.

use super::*;
use std::collections::BTreeSet;

fn room_of(world: &World, bound: Bound, bytes: u64) -> Room {
    Room { bound, bytes: bytes as i64, ..world.sample() }
}

/// An owner that knows what it has only after it was measured.
#[derive(Default)]
struct Unmeasured {
    hidden: AtomicU64,
    known: AtomicU64,
    measured: AtomicU64,
    may_have_more: AtomicBool,
}

impl Shrinker for Unmeasured {
    fn name(&self) -> &'static str {
        "unmeasured"
    }

    fn may_nest(&self) -> bool {
        true
    }

    fn giveable_bytes(&self) -> u64 {
        self.known.load(Relaxed)
    }

    fn shrink(&self, _want_bytes: u64, _urgency: Urgency) -> u64 {
        0
    }

    fn may_have_more(&self) -> bool {
        self.may_have_more.load(Relaxed)
    }

    fn measure(&self) {
        self.measured.fetch_add(1, Relaxed);
        self.known.store(self.hidden.load(Relaxed), Relaxed);
    }
}

/// A stock is worth a look from [`WORTHWHILE_BYTES`] on, whether it is known or has to be measured first.
#[test]
fn a_worthwhile_stock_is_not_left_alone() {
    let (world, account) = world(WORTHWHILE_BYTES, None);
    let clock = FakeClock::default();
    assert_eq!(Governor::new(&clock).step(&account, Signs::default(), Return::Keep), Next::WhenAsked);
    assert_eq!(world.measured.load(Relaxed), 0, "known without a measurement");
    for may_have_more in [false, true] {
        for (hidden, is_worthwhile) in [(WORTHWHILE_BYTES - 1, false), (WORTHWHILE_BYTES, true)] {
            let owner: &'static Unmeasured = Box::leak(Box::default());
            owner.hidden.store(hidden, Relaxed);
            owner.may_have_more.store(may_have_more, Relaxed);
            let account = Account::new(u64::MAX);
            account.register(owner);
            let next = Governor::new(&clock).step(&account, Signs::default(), Return::Keep);
            assert_eq!(next == Next::WhenAsked, is_worthwhile, "{next:?}");
            assert_eq!(owner.measured.load(Relaxed), 1);
        }
    }
}

/// What other processes take is extrapolated from the room that was lost and not charged by this process.
#[test]
fn only_what_others_take_is_foreseen() {
    let look = |ms: u64, room: u64, own: u64| PeriodResult {
        now_ns: ms * 1_000_000,
        room_bytes: (room * MIB) as i64,
        own_bytes: own * MIB,
        giveable: 0,
    };
    assert_eq!(look(10, 50, 4).foreseen(&look(0, 60, 0)), 12 * MIB);
    assert_eq!(look(40, 57, 0).foreseen(&look(0, 60, 2)), 5 * MIB / 2);
    assert_eq!(look(10, 50, 11).foreseen(&look(0, 60, 0)), 0, "its own growth");
    assert_eq!(look(10, 61, 0).foreseen(&look(0, 60, 0)), 0);
    assert_eq!(look(5, 59, 0).foreseen(&look(5, 60, 0)), 20_000_000 * MIB, "no time has passed");
}

/// The process has moved if it used more than [`MOVED_NS`] of CPU since it was last seen running.
#[test]
fn little_cpu_is_no_move() {
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    clock.pass(Duration::ZERO, Duration::from_nanos(MOVED_NS));
    assert!(!governor.has_moved());
    clock.pass(Duration::ZERO, Duration::from_nanos(1));
    assert!(governor.has_moved() && !governor.has_moved());
}

/// The pauses of a process without a stock grow to minutes if no limit is watched or an event would report its approach,
/// else to seconds.
#[test]
fn without_a_warning_pauses_stay_short() {
    let (_, account) = world(0, Some(100 * MIB as i64));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let longest = |governor: &mut Governor<_>, has_thresholds| {
        let signs = Signs { has_thresholds, ..Signs::default() };
        (0..30).map(|_| governor.stay_quiet(signs)).max()
    };
    assert_eq!(longest(&mut governor, false), Some(QUIETEST), "no limit");
    governor.watch(&account, Signs::default());
    assert_eq!(longest(&mut governor, true), Some(QUIETEST));
    assert_eq!(longest(&mut governor, false), Some(QUIETEST_UNWARNED));
}

/// All memory is offered only if other processes rush (more than 4 MiB in 20 ms), and the limit is near.
#[test]
fn all_is_offered_only_in_a_rush_near_a_limit() {
    let (world, account) = world(100 * MIB, Some(80 * MIB as i64));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let mut offered_after = |taken_bytes: u64| {
        world.room.fetch_sub(taken_bytes as i64, Relaxed);
        clock.pass(Duration::from_millis(20), Duration::ZERO);
        governor.step(&account, Signs::default(), Return::Keep);
        world.offered.swap(0, Relaxed)
    };
    assert_eq!(offered_after(0), 0);
    assert_eq!(offered_after(16 * MIB), 0, "a rush, but a quarter of the limit is left");
    assert_eq!(offered_after(4 * MIB), 32 * MIB, "near, without a rush");
    assert_eq!(offered_after(4 * MIB + 4096), 132 * MIB);
    assert_eq!(world.hoard.load(Relaxed), 100 * MIB);
}

/// Near a limit all free memory is offered if none of it was reused since the last look, else the cold part.
#[test]
fn what_is_reused_is_not_offered() {
    let (world, account) = world(10 * MIB, Some(30 * MIB as i64));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let mut offered_of = |hoard: u64| {
        world.hoard.store(hoard, Relaxed);
        clock.pass(Duration::from_secs(1), Duration::ZERO);
        governor.step(&account, Signs::default(), Return::Keep);
        world.offered.swap(0, Relaxed)
    };
    // This owner counts no more than its stock if all may be offered.
    assert_eq!([10, 8, 8, 9].map(|mib| offered_of(mib * MIB)), [10 * MIB, 32 * MIB, 8 * MIB, 9 * MIB]);
}

/// A stall gives back 64 MiB, or an eighth of a larger stock.
#[test]
fn a_stall_returns_64_mib_at_least() {
    let (world, account) = world(100 * MIB, Some(30 * MIB as i64));
    let clock = FakeClock::default();
    let stalled = Signs { group_stalls: true, ..Signs::default() };
    Governor::new(&clock).step(&account, stalled, Return::Keep);
    assert_eq!(world.hoard.load(Relaxed), 36 * MIB);
}

/// While nothing uses up the room, the pauses near a limit double as far as the room allows. A loss of more than 1 MiB ends
/// that.
#[test]
fn pauses_grow_while_the_room_stays() {
    let (world, account) = world(100 * MIB, Some(40 * MIB as i64));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let mut pause_after = |taken_bytes: u64| {
        world.room.fetch_sub(taken_bytes as i64, Relaxed);
        clock.pass(Duration::from_secs(60), Duration::ZERO);
        pause_of(governor.step(&account, Signs::default(), Return::Keep)).as_nanos() as u64
    };
    let longest = |room_bytes: u64| room_bytes / FASTEST_BYTES_PER_NS * CALM_SLOWER;
    assert_eq!([0; 5].map(&mut pause_after), [5_000_000, 5_000_000, 8_000_000, longest(40 * MIB), longest(40 * MIB)]);
    assert_eq!(pause_after(MIB), longest(39 * MIB));
    assert_eq!(pause_after(MIB + 1), 5_000_000);
}

/// The pause follows from the room that is left, and from the limit that it belongs to.
#[test]
fn the_pause_follows_from_the_room() {
    let (world, _) = world(0, Some(0));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let pause = |governor: &Governor<_>, bound, bytes| {
        governor.pause(&room_of(world, bound, bytes)).map(|pause| pause.as_nanos() as u64)
    };
    assert_eq!(pause(&governor, Bound::None, 0), None);
    assert_eq!(pause(&governor, Bound::Group, 0), Some(1_000_000));
    assert_eq!(pause(&governor, Bound::Group, 16 * MIB - 1), Some(MIB - 1), "less than a sixteenth of the limit");
    assert_eq!(pause(&governor, Bound::Group, 16 * MIB), Some(5_000_000));
    assert_eq!(pause(&governor, Bound::Machine, 100 * MIB), Some(100 * MIB / 16 * 4));
    assert_eq!(pause(&governor, Bound::Group, 1 << 50), Some(5_000_000_000));
    governor.calm = CALMEST;
    assert_eq!(pause(&governor, Bound::Group, 20 * MIB), Some(20 * MIB / 16 * 4));
    assert_eq!(pause(&governor, Bound::Machine, 20 * MIB), Some(20 * MIB / 16 * 16));
    assert_eq!(pause(&governor, Bound::Machine, 200 * MIB), Some(64_000_000));
}

/// An owner that holds what it has given to the program, and discharges what it gives back.
struct Charged(&'static World, &'static Account);

impl Shrinker for Charged {
    fn name(&self) -> &'static str {
        "charged"
    }

    fn may_nest(&self) -> bool {
        true
    }

    fn giveable_bytes(&self) -> u64 {
        self.0.giveable_bytes()
    }

    fn shrink(&self, want_bytes: u64, urgency: Urgency) -> u64 {
        let given = self.0.shrink(want_bytes, urgency);
        self.1.discharge(given);
        given
    }
}

/// The next look compares with the room and the charge after memory was given back: that is nothing others did.
#[test]
fn a_look_remembers_what_was_left() {
    let world: &'static World = Box::leak(Box::default());
    let account: &'static Account = Box::leak(Box::new(Account::new(u64::MAX)));
    account.admit(100 * MIB, Context::Outside).unwrap();
    account.register(Box::leak(Box::new(Charged(world, account))));
    world.hoard.store(100 * MIB, Relaxed);
    world.room.store(-(30 * MIB as i64), Relaxed);
    account.headroom.set_limits(world);
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    assert_eq!(governor.step(account, Signs::default(), Return::Keep), Next::After(SHORTEST));
    let (last, given) = (governor.last.unwrap(), 100 * MIB - world.hoard.load(Relaxed));
    assert!(given >= 30 * MIB);
    assert_eq!((last.room_bytes, last.own_bytes), (world.room.load(Relaxed), 100 * MIB - given));
}

/// A look that gave something back is not futile, although memory is short still.
#[test]
fn a_look_that_gives_is_not_futile() {
    let (_, account) = world(2 * MIB, Some(-(500 * MIB as i64)));
    let clock = FakeClock::default();
    assert_eq!(Governor::new(&clock).step(&account, Signs::default(), Return::Keep), Next::After(SHORTEST));
}

/// Between two searches for aged memory the rest of the pause is returned. A search that finds something ends the long
/// pauses of an idle process.
#[test]
fn a_find_ends_the_long_pauses() {
    let (world, account) = world(100 * MIB, None);
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    assert_eq!(governor.give_aged(&account, AGE), AGE / LOOKS_PER_AGE);
    clock.pass(Duration::from_millis(300), Duration::ZERO);
    assert_eq!(governor.give_aged(&account, AGE), AGE / LOOKS_PER_AGE - Duration::from_millis(300));
    clock.pass(Duration::from_millis(700), Duration::ZERO);
    for _ in 0..100 {
        let pause = governor.give_aged(&account, AGE);
        assert_eq!(governor.give_aged(&account, AGE), pause, "nothing is due before");
        clock.pass(pause, Duration::ZERO);
    }
    assert!(governor.quiet > AGE);
    world.aged.store(AGED_STEP_BYTES / 4, Relaxed);
    for _ in 0..2 {
        let pause = governor.give_aged(&account, AGE);
        assert!(pause <= AGE / LOOKS_PER_AGE * 3 / 2, "{pause:?}");
        clock.pass(pause, Duration::ZERO);
    }
    assert_eq!(world.hoard.load(Relaxed), 100 * MIB - AGED_STEP_BYTES / 4);
}

/// The jitter is spread evenly from half a period to one and a half.
#[test]
fn jitter_is_spread_over_a_period() {
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let period = Duration::from_nanos(1 << 20);
    let parts: Vec<u64> = (0..4096).map(|_| (governor.jittered(period).as_nanos() as u64 * 8) >> 20).collect();
    for part in 4..12 {
        let count = parts.iter().filter(|of| **of == part).count();
        assert!((400..624).contains(&count), "{count} of 4096 in eighth {part}");
    }
    let lengths: BTreeSet<Duration> = (0..4096).map(|_| governor.jittered(period)).collect();
    assert!(lengths.len() > 900, "{} of 1024", lengths.len());
}

/// The kernel's clocks advance: monotonic time, and the CPU of other threads.
#[test]
fn the_clocks_of_the_kernel_advance() {
    let before_ns = clock::fine_ns();
    let now_ns = SystemClock.now_ns();
    assert!(before_ns <= now_ns && now_ns <= clock::fine_ns());
    let (first_ns, is_over) = (SystemClock.cpu_ns(), AtomicBool::new(false));
    let deadline_ns = now_ns + 60_000_000_000;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                std::hint::spin_loop();
            }
        });
        while SystemClock.cpu_ns() < first_ns + 1_000_000 && clock::fine_ns() < deadline_ns {
            std::thread::yield_now();
        }
        is_over.store(true, Relaxed);
    });
    assert!(SystemClock.cpu_ns() >= first_ns + 1_000_000);
}
