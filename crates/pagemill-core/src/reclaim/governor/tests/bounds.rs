//! Tests of the governor's thresholds, with a value on each side: one byte, or one nanosecond, apart.

use super::*;
use std::collections::BTreeSet;

fn room_of(fake: &FakeGroup, bound: Bound, bytes: u64) -> Room {
    Room { bound, bytes: bytes as i64, ..fake.sample() }
}

/// A shrinker that reports its giveable bytes only after it has measured them.
#[derive(Default)]
struct UnmeasuredShrinker {
    hidden: AtomicU64,
    known: AtomicU64,
    measured: AtomicU64,
    may_have_more: AtomicBool,
}

impl Shrinker for UnmeasuredShrinker {
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

/// Giveable memory below [`WORTHWHILE_BYTES`] must be ignored, whether its amount is known or has to be measured.
#[test]
fn the_governor_acts_from_the_worthwhile_amount_on() {
    let (fake, account) = fake_group(WORTHWHILE_BYTES, None);
    let clock = FakeClock::default();
    assert_eq!(Governor::new(&clock).step(&account, KernelEvents::default(), Return::Keep), NextStep::WhenAsked);
    assert_eq!(fake.measured.load(Relaxed), 0, "known without a measurement");
    for may_have_more in [false, true] {
        for (hidden, is_worthwhile) in [(WORTHWHILE_BYTES - 1, false), (WORTHWHILE_BYTES, true)] {
            let owner: &'static UnmeasuredShrinker = Box::leak(Box::default());
            owner.hidden.store(hidden, Relaxed);
            owner.may_have_more.store(may_have_more, Relaxed);
            let account = Account::new(u64::MAX);
            account.register(owner);
            let next = Governor::new(&clock).step(&account, KernelEvents::default(), Return::Keep);
            assert_eq!(next == NextStep::WhenAsked, is_worthwhile, "{next:?}");
            assert_eq!(owner.measured.load(Relaxed), 1);
        }
    }
}

/// The usage of other processes must be extrapolated from the room that was lost, minus the bytes that this process
/// charged.
#[test]
fn only_usage_by_others_is_extrapolated() {
    let sample = |ms: u64, room: u64, own: u64| RoomSample {
        now_ns: ms * 1_000_000,
        room_bytes: (room * MIB) as i64,
        own_bytes: own * MIB,
        giveable: 0,
    };
    assert_eq!(sample(10, 50, 4).extrapolated_use_bytes(&sample(0, 60, 0)), 12 * MIB);
    assert_eq!(sample(40, 57, 0).extrapolated_use_bytes(&sample(0, 60, 2)), 5 * MIB / 2);
    assert_eq!(sample(10, 50, 11).extrapolated_use_bytes(&sample(0, 60, 0)), 0, "its own growth");
    assert_eq!(sample(10, 61, 0).extrapolated_use_bytes(&sample(0, 60, 0)), 0);
    assert_eq!(sample(5, 59, 0).extrapolated_use_bytes(&sample(5, 60, 0)), 20_000_000 * MIB, "no time has passed");
}

/// A process must count as busy only if it used more than [`MAX_IDLE_CPU_NS`] of CPU since it last counted as busy.
#[test]
fn little_cpu_counts_as_idle() {
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    clock.advance(Duration::ZERO, Duration::from_nanos(MAX_IDLE_CPU_NS));
    assert!(!governor.has_used_cpu());
    clock.advance(Duration::ZERO, Duration::from_nanos(1));
    assert!(governor.has_used_cpu() && !governor.has_used_cpu());
}

/// Pauses of an idle process without giveable memory must grow to ten minutes, or to 5 seconds if no event would report
/// that a limit gets near.
#[test]
fn without_threshold_events_idle_pauses_stay_short() {
    let (_, account) = fake_group(0, Some(100 * MIB as i64));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let longest = |governor: &mut Governor<_>, has_thresholds| {
        let signs = KernelEvents { has_thresholds, ..KernelEvents::default() };
        (0..30).map(|_| governor.lengthen_idle_pause(signs)).max()
    };
    assert_eq!(longest(&mut governor, false), Some(LONGEST_IDLE_PAUSE), "no limit");
    governor.watch_limits(&account, KernelEvents::default());
    assert_eq!(longest(&mut governor, true), Some(LONGEST_IDLE_PAUSE));
    assert_eq!(longest(&mut governor, false), Some(LONGEST_IDLE_PAUSE_WITHOUT_EVENTS));
}

/// All free memory must be offered to the kernel at once only if the limit is near and other processes have used more
/// than 4 MiB in 20 ms.
#[test]
fn all_free_memory_is_offered_only_in_a_rush_near_a_limit() {
    let (fake, account) = fake_group(100 * MIB, Some(80 * MIB as i64));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let mut offered_after = |taken_bytes: u64| {
        fake.room.fetch_sub(taken_bytes as i64, Relaxed);
        clock.advance(Duration::from_millis(20), Duration::ZERO);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        fake.offered.swap(0, Relaxed)
    };
    assert_eq!(offered_after(0), 0);
    assert_eq!(offered_after(16 * MIB), 0, "a rush, but a quarter of the limit is left");
    assert_eq!(offered_after(4 * MIB), 32 * MIB, "near, without a rush");
    assert_eq!(offered_after(4 * MIB + 4096), 132 * MIB);
    assert_eq!(fake.stock.load(Relaxed), 100 * MIB);
}

/// Near a limit, all free memory must be offered to the kernel. If some of it was reused since the last sample, only
/// the cold part may be offered.
#[test]
fn reused_memory_is_not_offered() {
    let (fake, account) = fake_group(10 * MIB, Some(30 * MIB as i64));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let mut offered_of = |stock: u64| {
        fake.stock.store(stock, Relaxed);
        clock.advance(Duration::from_secs(1), Duration::ZERO);
        governor.step(&account, KernelEvents::default(), Return::Keep);
        fake.offered.swap(0, Relaxed)
    };
    // The fake shrinker offers at most its stock if all may be offered.
    assert_eq!([10, 8, 8, 9].map(|mib| offered_of(mib * MIB)), [10 * MIB, 32 * MIB, 8 * MIB, 9 * MIB]);
}

/// Near a limit, a thread stalls on memory. The shrinker must give back 64 MiB, or an eighth of its stock if that is
/// more.
#[test]
fn a_stall_returns_64_mib_at_least() {
    let (fake, account) = fake_group(100 * MIB, Some(30 * MIB as i64));
    let clock = FakeClock::default();
    let stalled = KernelEvents { group_stalls: true, ..KernelEvents::default() };
    Governor::new(&clock).step(&account, stalled, Return::Keep);
    assert_eq!(fake.stock.load(Relaxed), 36 * MIB);
}

/// Near a limit, the pauses must double while the room stays the same, up to a maximum that depends on the room. If the
/// room shrinks by more than 1 MiB, the next pause must be short again.
#[test]
fn pauses_grow_while_the_room_stays() {
    let (fake, account) = fake_group(100 * MIB, Some(40 * MIB as i64));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let mut pause_after = |taken_bytes: u64| {
        fake.room.fetch_sub(taken_bytes as i64, Relaxed);
        clock.advance(Duration::from_secs(60), Duration::ZERO);
        pause_of(governor.step(&account, KernelEvents::default(), Return::Keep)).as_nanos() as u64
    };
    let longest = |room_bytes: u64| room_bytes / FASTEST_BYTES_PER_NS * CALM_PAUSE_FACTOR;
    assert_eq!([0; 5].map(&mut pause_after), [5_000_000, 5_000_000, 8_000_000, longest(40 * MIB), longest(40 * MIB)]);
    assert_eq!(pause_after(MIB), longest(39 * MIB));
    assert_eq!(pause_after(MIB + 1), 5_000_000);
}

/// The pause must follow from the remaining room, and from whether the nearest limit is a group's or the machine's.
#[test]
fn the_pause_follows_from_the_room() {
    let (fake, _) = fake_group(0, Some(0));
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let pause = |governor: &Governor<_>, bound, bytes| {
        governor.pause_until_sample(&room_of(fake, bound, bytes)).map(|pause| pause.as_nanos() as u64)
    };
    assert_eq!(pause(&governor, Bound::None, 0), None);
    assert_eq!(pause(&governor, Bound::Group, 0), Some(1_000_000));
    assert_eq!(pause(&governor, Bound::Group, 16 * MIB - 1), Some(MIB - 1), "less than a sixteenth of the limit");
    assert_eq!(pause(&governor, Bound::Group, 16 * MIB), Some(5_000_000));
    assert_eq!(pause(&governor, Bound::Machine, 100 * MIB), Some(100 * MIB / 16 * 4));
    assert_eq!(pause(&governor, Bound::Group, 1 << 50), Some(5_000_000_000));
    governor.calm_pause = LONGEST_CALM_PAUSE;
    assert_eq!(pause(&governor, Bound::Group, 20 * MIB), Some(20 * MIB / 16 * 4));
    assert_eq!(pause(&governor, Bound::Machine, 20 * MIB), Some(20 * MIB / 16 * 16));
    assert_eq!(pause(&governor, Bound::Machine, 200 * MIB), Some(64_000_000));
}

/// A shrinker that discharges the bytes that it gives back.
struct DischargingShrinker(&'static FakeGroup, &'static Account);

impl Shrinker for DischargingShrinker {
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

/// A step gives memory back. The stored sample must be one that was taken afterwards, so that the next step does not
/// count the bytes as usage by other processes.
#[test]
fn the_sample_is_updated_after_giving_back() {
    let fake: &'static FakeGroup = Box::leak(Box::default());
    let account: &'static Account = Box::leak(Box::new(Account::new(u64::MAX)));
    account.admit(100 * MIB, Context::Outside).unwrap();
    account.register(Box::leak(Box::new(DischargingShrinker(fake, account))));
    fake.stock.store(100 * MIB, Relaxed);
    fake.room.store(-(30 * MIB as i64), Relaxed);
    account.headroom.set_limits(fake);
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    assert_eq!(governor.step(account, KernelEvents::default(), Return::Keep), NextStep::After(SHORTEST_PAUSE));
    let (last, given) = (governor.last_sample.unwrap(), 100 * MIB - fake.stock.load(Relaxed));
    assert!(given >= 30 * MIB);
    assert_eq!((last.room_bytes, last.own_bytes), (fake.room.load(Relaxed), 100 * MIB - given));
}

/// A step that gave memory back must be followed by the shortest pause, although memory is still short.
#[test]
fn giving_back_something_keeps_the_pause_short() {
    let (_, account) = fake_group(2 * MIB, Some(-(500 * MIB as i64)));
    let clock = FakeClock::default();
    assert_eq!(
        Governor::new(&clock).step(&account, KernelEvents::default(), Return::Keep),
        NextStep::After(SHORTEST_PAUSE)
    );
}

/// `give_aged` must return the time that remains until the next search. The pauses of an idle process must grow. A
/// search that finds aged memory must make the pauses short again.
#[test]
fn finding_aged_memory_ends_long_pauses() {
    let (fake, account) = fake_group(100 * MIB, None);
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    assert_eq!(governor.give_aged(&account, AGE), AGE / SEARCHES_PER_AGE);
    clock.advance(Duration::from_millis(300), Duration::ZERO);
    assert_eq!(governor.give_aged(&account, AGE), AGE / SEARCHES_PER_AGE - Duration::from_millis(300));
    clock.advance(Duration::from_millis(700), Duration::ZERO);
    for _ in 0..100 {
        let pause = governor.give_aged(&account, AGE);
        assert_eq!(governor.give_aged(&account, AGE), pause, "nothing is due before");
        clock.advance(pause, Duration::ZERO);
    }
    assert!(governor.idle_pause > AGE);
    fake.aged.store(AGED_STEP_BYTES / 4, Relaxed);
    for _ in 0..2 {
        let pause = governor.give_aged(&account, AGE);
        assert!(pause <= AGE / SEARCHES_PER_AGE * 3 / 2, "{pause:?}");
        clock.advance(pause, Duration::ZERO);
    }
    assert_eq!(fake.stock.load(Relaxed), 100 * MIB - AGED_STEP_BYTES / 4);
}

/// The random pauses must be spread evenly from half of the period to one and a half of it.
#[test]
fn random_pauses_are_spread_evenly() {
    let clock = FakeClock::default();
    let mut governor = Governor::new(&clock);
    let period = Duration::from_nanos(1 << 20);
    let parts: Vec<u64> = (0..4096).map(|_| (governor.random_pause(period).as_nanos() as u64 * 8) >> 20).collect();
    for part in 4..12 {
        let count = parts.iter().filter(|of| **of == part).count();
        assert!((400..624).contains(&count), "{count} of 4096 in eighth {part}");
    }
    let lengths: BTreeSet<Duration> = (0..4096).map(|_| governor.random_pause(period)).collect();
    assert!(lengths.len() > 900, "{} of 1024", lengths.len());
}

/// Monotonic time and the CPU time of the other threads must advance.
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
