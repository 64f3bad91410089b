//! Values that are read by handle under one guard, and the same values read through pointers.

use std::hint::black_box;
use std::time::{Duration, Instant};

use fastrand::Rng;
use pagemill_slab as slab;
use pagemill_slab::{Guard, Handle, HandleMap};

use super::pagemill_caches::{self, Object};
use super::speed::Words;
use crate::workload::{Failure, WorkloadResult, ensure};

crate::workload::arguments! {
    ReadsArguments:
    objects: usize,
    run_ms: u64,
}

/// A value of 192 bytes. Its first word is the index of another value, so that all values form one cycle.
type Value = Object<Words<23>>;

/// Approximate number of values that are read between two reads of the clock.
const BATCH_READS: u64 = 100_000;
/// Number of measured rounds. Each round makes every kind of read once.
const MEASURED_ROUNDS: u32 = 10;

/// The values of a cache, with a handle and a pointer to each value, by index. The order of the indexes is unrelated to
/// the addresses.
struct Values<'cache> {
    cache: &'cache HandleMap<Value>,
    guard: &'cache Guard,
    handles: Vec<Handle<Value>>,
    pointers: Vec<&'cache Value>,
}

/// A function that reads every value once and returns the sum of their first words. It is not inlined, so that the
/// compiler knows that nothing else changes the map. Otherwise each read would load the fields of the map again.
type Pass = fn(&Values<'_>) -> u64;

/// The measurements. Each has a subject, a metric, and the function that is timed.
const MEASUREMENTS: [(&str, &str, Pass); 4] = [
    ("handle-read", "ns", |values| values.sum_by_handle()),
    ("pointer-read", "ns", |values| values.sum_by_pointer()),
    ("handle-read", "chain_ns", |values| values.sum_cycle_by_handle()),
    ("pointer-read", "chain_ns", |values| values.sum_cycle_by_pointer()),
];

/// Measures the nanoseconds per read, for independent reads, and for reads that each depend on the previous one.
pub fn run(arguments: &ReadsArguments) -> WorkloadResult {
    let cache = pagemill_caches::handle_cache::<Words<23>>()?;
    let handles = insert_values(&cache, arguments.objects)?;
    let guard = slab::enter();
    let values = Values::new(&cache, &guard, handles)?;
    let run = Duration::from_millis(arguments.run_ms) / MEASURED_ROUNDS;
    let mut sums = [0.0; MEASUREMENTS.len()];
    // The first round only warms up the CPU.
    for round in 0..=MEASURED_ROUNDS {
        for (sum, (.., pass)) in sums.iter_mut().zip(MEASUREMENTS) {
            let ns = time_passes(run, arguments.objects as u64, || pass(black_box(&values)))?;
            *sum += if round == 0 { 0.0 } else { ns };
        }
    }
    let mut line = serde_json::json!({});
    for ((subject, name, _), sum) in MEASUREMENTS.iter().zip(sums) {
        line[subject][name] = (sum / f64::from(MEASURED_ROUNDS)).into();
    }
    Ok(line)
}

/// Inserts values that each contain the index of the next value, so that all values form one cycle. Returns the handles
/// by index; the index of a value is unrelated to its address.
fn insert_values(cache: &HandleMap<Value>, count: usize) -> Result<Vec<Handle<Value>>, Failure> {
    let mut random = Rng::with_seed(count as u64);
    let mut any_order = || {
        let mut order: Vec<usize> = (0..count).collect();
        random.shuffle(&mut order);
        order
    };
    let (places, cycle) = (any_order(), any_order());
    let mut next = vec![0; count];
    for (at, place) in cycle.iter().enumerate() {
        next[*place] = cycle[(at + 1) % count] as u64;
    }
    let mut handles = vec![Handle::from_bits(0); count];
    for place in places {
        handles[place] = cache.insert(Object::new(next[place]))?;
    }
    Ok(handles)
}

impl<'cache> Values<'cache> {
    fn new(
        cache: &'cache HandleMap<Value>,
        guard: &'cache Guard,
        handles: Vec<Handle<Value>>,
    ) -> Result<Self, Failure> {
        let pointers: Option<Vec<&Value>> = handles.iter().map(|handle| cache.get(*handle, guard)).collect();
        let pointers = pointers.ok_or_else(|| Failure::WrongAnswer("a value is not there".to_owned()))?;
        Ok(Self { cache, guard, handles, pointers })
    }

    #[inline]
    fn by_handle(&self, handle: Handle<Value>) -> u64 {
        self.cache.get(handle, self.guard).map_or(u64::MAX, |value| value.tag)
    }

    #[inline(never)]
    fn sum_by_handle(&self) -> u64 {
        self.handles.iter().fold(0, |sum, handle| sum.wrapping_add(self.by_handle(*handle)))
    }

    #[inline(never)]
    fn sum_by_pointer(&self) -> u64 {
        self.pointers.iter().fold(0, |sum, value| sum.wrapping_add(value.tag))
    }

    /// Follows the cycle of values for as many steps as there are values, and returns the sum of the indexes that it
    /// reads. A missing value makes the sum wrong.
    fn sum_cycle(&self, read: impl Fn(usize) -> u64) -> u64 {
        let (mut place, mut sum) = (0, 0u64);
        for _ in 0..self.handles.len() {
            let next = read(place);
            sum = sum.wrapping_add(next);
            place = next as usize;
        }
        sum
    }

    #[inline(never)]
    fn sum_cycle_by_handle(&self) -> u64 {
        self.sum_cycle(|place| self.handles.get(place).map_or(u64::MAX, |handle| self.by_handle(*handle)))
    }

    #[inline(never)]
    fn sum_cycle_by_pointer(&self) -> u64 {
        self.sum_cycle(|place| self.pointers.get(place).map_or(u64::MAX, |value| value.tag))
    }
}

/// Repeats `pass`, which reads `count` values, for the time `run`. Returns the nanoseconds per read. Fails if a pass
/// does not return the sum of all indexes.
fn time_passes(run: Duration, count: u64, pass: impl Fn() -> u64) -> Result<f64, Failure> {
    let (begun, mut done) = (Instant::now(), 0);
    while begun.elapsed() < run || done == 0 {
        for _ in 0..BATCH_READS.div_ceil(count) {
            let sum = pass();
            ensure(sum == count * (count - 1) / 2, || format!("what was read sums up to {sum}"))?;
            done += count;
        }
    }
    Ok(begun.elapsed().as_nanos() as f64 / done as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each kind of read must read every value once. After a value was removed, reads by handle must not find it, while
    /// reads by pointer must still find it under the guard.
    #[test]
    fn every_value_is_read() {
        assert!(run(&ReadsArguments { objects: 1000, run_ms: 1 }).is_ok());
        let cache = pagemill_caches::handle_cache::<Words<23>>().expect("a cache");
        let handles = insert_values(&cache, 100).expect("values");
        let guard = slab::enter();
        let values = Values::new(&cache, &guard, handles.clone()).expect("values");

        assert!(MEASUREMENTS.iter().all(|(.., pass)| pass(&values) == 99 * 100 / 2));
        assert!(cache.remove(handles[7]).expect("it is not pinned").is_some());
        let by_handle: Vec<u64> = [MEASUREMENTS[0], MEASUREMENTS[2]].iter().map(|(.., pass)| pass(&values)).collect();
        assert!(by_handle.iter().all(|sum| *sum != 99 * 100 / 2), "{by_handle:?}");
        assert_eq!(values.sum_by_pointer(), 99 * 100 / 2, "under the guard it is still there");
    }
}
