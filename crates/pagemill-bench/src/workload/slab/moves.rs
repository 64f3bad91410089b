//! A reader thread and a writer thread on the same objects, with or without a third thread that moves the objects.
//!
//! The writer fragments the slabs all the time. It processes one group of objects after the other, and frees nine of
//! ten objects of each group in random order. At the same time, it makes the freed objects of the opposite group again
//! (half of all groups ahead). So at any time, half of the slabs are sparsely used.

use std::time::{Duration, Instant};

use fastrand::Rng;
use pagemill_slab as slab;
use pagemill_slab::Slabs;

use super::shared_objects::{HandleObjects, OwnerObjects, SharedObjects};
use super::turns::run_with_defragmentation;
use crate::workload::steps::{self, StepWork};
use crate::workload::{Failure, WorkloadResult, ensure};

/// The kind of slab cache: its objects are found through their owner, or by handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CacheKind {
    #[value(name = "by-owner")]
    OwnerSlab,
    #[value(name = "by-handle")]
    HandleMap,
}

crate::workload::arguments! {
    MovesArguments:
    kind: CacheKind,
    /// Defragment the slabs in a third thread, concurrently with the reader and the writer.
    defrag: bool,
    objects: usize,
    run_ms: u64,
}

const GROUP_COUNT: usize = 16;
/// In each group, the writer keeps one object in this many on average, and frees the others.
const OBJECTS_PER_KEPT_ONE: usize = 10;
/// Number of reads or writes in a step of a thread. No clock is read during a step.
const OPERATIONS_PER_STEP: usize = 1024;
/// Number of reads that the reader makes under one epoch guard.
const READS_PER_GUARD: usize = 64;

/// After each step, the defragmenting thread sleeps this many times as long as the step took. So it uses a twentieth of
/// a CPU.
const SLEEP_FACTOR: u32 = 19;
/// Minimum time for which the defragmenting thread sleeps after each step.
const MIN_SLEEP: Duration = Duration::from_millis(1);
/// Slabs of which less than this percentage is in use are defragmented.
const DEFRAG_USED_PERCENT: u32 = 30;

/// Measures reads and writes per second, and the number of moved objects.
pub fn run(arguments: &MovesArguments, slabs: &'static Slabs) -> WorkloadResult {
    match arguments.kind {
        CacheKind::HandleMap => {
            measure_reader_and_writer(arguments, slabs, &HandleObjects::new(slabs, arguments.objects)?)
        }
        CacheKind::OwnerSlab => {
            measure_reader_and_writer(arguments, slabs, &OwnerObjects::new(slabs, arguments.objects)?)
        }
    }
}

fn measure_reader_and_writer<O: SharedObjects>(
    arguments: &MovesArguments,
    slabs: &'static Slabs,
    objects: &O,
) -> WorkloadResult {
    objects.cache().set_defrag_used_ratio(if arguments.defrag { DEFRAG_USED_PERCENT } else { 0 })?;
    let begun = Instant::now();
    let make = |thread| -> Result<Box<dyn StepWork>, Failure> {
        Ok(match thread {
            READER_THREAD => {
                Box::new(Reader { objects, count: arguments.objects, random: Rng::with_seed(0), wrong: 0 })
            }
            _ => Box::new(Writer::new(objects, arguments.objects)?),
        })
    };
    let rest = |took: Duration| (took * SLEEP_FACTOR).max(MIN_SLEEP);
    let times = run_with_defragmentation(arguments.defrag.then_some(slabs), rest, || {
        steps::measure_threads(2, Duration::from_millis(arguments.run_ms), OPERATIONS_PER_STEP as u64, make)
    })?;
    let took = begun.elapsed();
    let moved = objects.cache().info()?.moved;
    if (moved > 0) != arguments.defrag {
        return Err(format!("{moved} objects were moved, which is not what was to be measured").into());
    }
    Ok(serde_json::json!({
        "reads_per_second": times.per_second(READER_THREAD),
        "writes_per_second": times.per_second(WRITER_THREAD),
        "moves_per_second": moved as f64 / took.as_secs_f64(),
        "moved": moved,
    }))
}

const READER_THREAD: usize = 0;
const WRITER_THREAD: usize = 1;

struct Reader<'objects, O> {
    objects: &'objects O,
    count: usize,
    random: Rng,
    wrong: u64,
}

impl<O: SharedObjects> StepWork for Reader<'_, O> {
    fn step(&mut self) -> Result<(), Failure> {
        for _ in 0..OPERATIONS_PER_STEP / READS_PER_GUARD {
            let guard = slab::enter();
            for _ in 0..READS_PER_GUARD {
                let number = self.random.usize(..self.count);
                self.wrong += u64::from(self.objects.read(number, &guard).is_err());
            }
        }
        Ok(())
    }

    fn check_results(&mut self) -> Result<(), Failure> {
        ensure(self.wrong == 0, || format!("{} reads found another object", self.wrong))
    }
}

struct Writer<'objects, O> {
    objects: &'objects O,
    /// For each object, by number: how often it must have been changed; none while the object does not exist.
    expected: Vec<Option<u64>>,
    /// The order in which the objects of each group are freed and made, as indexes within the group.
    order: Vec<usize>,
    /// Index of the group whose objects are being freed; it is never reset, and is used modulo the number of groups.
    group: usize,
    /// Position in `order` of the next object to free.
    at: usize,
    random: Rng,
}

impl<'objects, O: SharedObjects> Writer<'objects, O> {
    /// Makes all objects, then frees most objects of each group once.
    fn new(objects: &'objects O, count: usize) -> Result<Self, Failure> {
        let mut random = Rng::with_seed(1);
        let mut order: Vec<usize> = (0..count / GROUP_COUNT).collect();
        random.shuffle(&mut order);
        let mut writer = Self { objects, expected: vec![None; count], order, group: 0, at: 0, random };
        (0..count).try_for_each(|number| writer.put(number))?;
        while writer.group < GROUP_COUNT {
            writer.replace_one()?;
        }
        Ok(writer)
    }

    fn put(&mut self, number: usize) -> Result<(), Failure> {
        if self.expected[number].is_none() {
            self.objects.put(number)?;
            self.expected[number] = Some(0);
        }
        Ok(())
    }

    /// Takes the next object of the current group and frees it, unless it is chosen at random to be kept. Makes the
    /// object at the same index of the opposite group, half of all groups ahead, if that object does not exist. Changes
    /// a random object.
    fn replace_one(&mut self) -> Result<(), Failure> {
        let number = |group: usize| (group % GROUP_COUNT) * self.order.len() + self.order[self.at];
        let (freed, made) = (number(self.group), number(self.group + GROUP_COUNT / 2));
        let changed_number = self.random.usize(..self.expected.len());
        if self.random.usize(..OBJECTS_PER_KEPT_ONE) > 0 && self.expected[freed].take().is_some() {
            self.objects.remove(freed)?;
        }
        self.put(made)?;
        if let Some(count) = &mut self.expected[changed_number] {
            self.objects.change(changed_number)?;
            *count += 1;
        }
        self.at += 1;
        if self.at == self.order.len() {
            (self.at, self.group) = (0, self.group + 1);
        }
        Ok(())
    }
}

impl<O: SharedObjects> StepWork for Writer<'_, O> {
    fn step(&mut self) -> Result<(), Failure> {
        (0..OPERATIONS_PER_STEP).try_for_each(|_| self.replace_one())
    }

    /// Checks that exactly those objects exist which this writer made and did not free, and that each was changed as
    /// often as the writer changed it.
    fn check_results(&mut self) -> Result<(), Failure> {
        for (number, expected) in self.expected.iter().enumerate() {
            let found = self.objects.read(number, &slab::enter()).ok();
            ensure(found == Some(*expected), || format!("object {number}: {found:?} instead of {expected:?}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::slab::slabs_of_test;

    /// The writer's check must fail after an object was removed, or changed, without the writer.
    #[test]
    fn lost_objects_and_changes_are_detected() {
        fn check_before_and_after_loss(objects: &impl SharedObjects, lose: impl Fn(usize)) -> [bool; 2] {
            let mut writer = Writer::new(objects, 1600).expect("objects");
            let is_right = writer.check_results().is_ok();
            let there = writer.expected.iter().position(Option::is_some).expect("some stay");
            lose(there);
            [is_right, writer.check_results().is_ok()]
        }
        let slabs = slabs_of_test().expect("slabs");
        let handled = HandleObjects::new(slabs, 1600).expect("a cache");
        let owned = OwnerObjects::new(slabs, 1600).expect("a cache");

        assert_eq!(
            check_before_and_after_loss(&handled, |number| handled.remove(number).expect("it is there")),
            [true, false]
        );
        assert_eq!(
            check_before_and_after_loss(&owned, |number| owned.change(number).expect("it is there")),
            [true, false]
        );
    }

    /// All objects must be found while they are moved, by handle and through their owner. Without defragmentation, no
    /// object may be moved.
    #[test]
    fn objects_are_found_while_they_move() {
        for kind in [CacheKind::HandleMap, CacheKind::OwnerSlab] {
            for defrag in [false, true] {
                let moves = MovesArguments { kind, defrag, objects: 100_000, run_ms: 300 };
                let line = run(&moves, slabs_of_test().expect("slabs"));
                assert!(line.is_ok(), "{kind:?}, {defrag}: {line:?}");
            }
        }
    }
}
