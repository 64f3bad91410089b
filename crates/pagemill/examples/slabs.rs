//! Slab caches that defragment themselves. The example inserts many values, removes nine of ten at random, and prints
//! the resident memory. The memory should be little more than the remaining values need.
//!
//! `cargo run --release -p pagemill --example slabs -- [VALUES]`
#![allow(unsafe_code)] // an owner of objects

use pagemill::slab::{
    self, Candidates, Done, Handle, HandleMap, Migrate, Moving, OwnerSlab, Settings, SlabCache, Target,
};
use pagemill::units::Bytes;
use std::error::Error;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A value of `WORDS` words. The first word is the index of the value.
type Value<const WORDS: usize> = [u64; WORDS];

/// Returns the resident bytes of this process, as the kernel reports them.
fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("Rss:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Returns whether the value with this index is one of the tenth that is not removed.
fn is_kept(number: u64) -> bool {
    let mixed = (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32 & 1023 < 102
}

/// The measurements of one case: live values, resident bytes before and after defragmentation, and how many values were
/// moved in what time.
struct Outcome {
    /// Bytes of the values that were not removed.
    live: u64,
    before: u64,
    after: u64,
    /// Bytes of the cache's handle table, which are not part of the resident bytes; 0 for a cache without handles.
    handle_bytes: u64,
    moved: u64,
    /// Duration of the defragmentation.
    duration: Duration,
}

fn print_outcome(what: &str, outcome: &Outcome) {
    let Outcome { live, before, after, handle_bytes, moved, duration } = outcome;
    let ratio = |bytes: u64| bytes as f64 / *live as f64;
    println!(
        "{what}: {} live; resident {} before ({:.2}x), {} after ({:.3}x), with a handle table of {}; {moved} moves in {duration:.1?}, {:.0} ns each",
        Bytes(*live),
        Bytes(*before),
        ratio(*before),
        Bytes(*after),
        ratio(*after),
        Bytes(*handle_bytes),
        duration.as_nanos() as f64 / (*moved).max(1) as f64,
    );
}

fn by_handle<const WORDS: usize>(values: u64) -> Result<Outcome, Box<dyn Error>> {
    let mut handles: Vec<Handle<Value<WORDS>>> = vec![Handle::from_bits(0); values as usize];
    let at_first = resident_bytes();
    let cache = HandleMap::<Value<WORDS>>::with(Settings::new("by handle").defrag_used_ratio(0))?;
    for (number, handle) in handles.iter_mut().enumerate() {
        *handle = cache.insert([number as u64; WORDS])?;
    }
    for (number, handle) in handles.iter().enumerate() {
        if !is_kept(number as u64) {
            cache.remove(*handle)?;
        }
    }
    let before = resident_bytes() - at_first - cache.handle_bytes();
    let began = Instant::now();
    cache.shrink()?;
    let duration = began.elapsed();
    let after = resident_bytes() - at_first - cache.handle_bytes();
    let guard = slab::enter();
    let mut left = 0;
    for (number, handle) in handles.iter().enumerate() {
        let value = cache.get(*handle, &guard);
        assert_eq!(value, is_kept(number as u64).then_some(&[number as u64; WORDS]));
        left += u64::from(value.is_some());
    }
    let live = left * size_of::<Value<WORDS>>() as u64;
    Ok(Outcome { live, before, after, handle_bytes: cache.handle_bytes(), moved: cache.info()?.moved, duration })
}

/// The owner of the objects. It stores the only reference to each object, at the object's index.
struct References<const WORDS: usize>(Vec<AtomicPtr<Object<WORDS>>>);

/// An object. Its first word is its index plus one while the object is live, and zero while it is free.
struct Object<const WORDS: usize>([AtomicU64; WORDS]);

// SAFETY: all calls of this example come from one thread, so live objects stay live while they are isolated and moved.
unsafe impl<const WORDS: usize> Migrate for References<WORDS> {
    type Object = Object<WORDS>;
    type Isolated = ();

    fn construct(&self) -> Object<WORDS> {
        Object([const { AtomicU64::new(0) }; WORDS])
    }

    fn isolate(&self, objects: &mut Candidates<'_, Object<WORDS>>) {
        // SAFETY: objects of the cache are constructed.
        objects.retain(|object| unsafe { object.as_ref() }.0[0].load(Relaxed) != 0);
    }

    fn migrate<'object>(
        &self,
        object: Moving<'object, Object<WORDS>>,
        to: &mut Target<'_, Object<WORDS>>,
        (): &mut (),
    ) -> Done<'object> {
        let Some(new) = to.take() else { return object.failed() };
        // SAFETY: both are objects of the cache.
        let (from, to) = unsafe { (object.object().as_ref(), new.object().as_ref()) };
        from.0.iter().zip(&to.0).for_each(|(from, to)| to.store(from.load(Relaxed), Relaxed));
        self.0[from.0[0].load(Relaxed) as usize - 1].store(new.object().as_ptr(), Relaxed);
        from.0[0].store(0, Relaxed);
        object.moved(new)
    }
}

fn by_owner<const WORDS: usize>(values: u64) -> Result<Outcome, Box<dyn Error>> {
    let references = References((0..values).map(|_| AtomicPtr::default()).collect());
    let at_first = resident_bytes();
    let cache: OwnerSlab<References<WORDS>> =
        OwnerSlab::with(Settings::new("by owner").defrag_used_ratio(0), references)?;
    // SAFETY: the referenced objects are live, and belong to this thread.
    let object = |at: &AtomicPtr<Object<WORDS>>| unsafe { NonNull::new(at.load(Relaxed)).map(|at| at.as_ref()) };
    for (number, at) in cache.owner().0.iter().enumerate() {
        at.store(cache.allocate()?.as_ptr(), Relaxed);
        object(at).into_iter().flat_map(|object| &object.0).for_each(|word| word.store(number as u64 + 1, Relaxed));
    }
    for (_, at) in cache.owner().0.iter().enumerate().filter(|(number, _)| !is_kept(*number as u64)) {
        let gone = NonNull::new(at.swap(std::ptr::null_mut(), Relaxed)).expect("it was there");
        // SAFETY: its only reference is gone.
        unsafe {
            gone.as_ref().0[0].store(0, Relaxed);
            cache.free(gone);
        }
    }
    let before = resident_bytes() - at_first;
    let began = Instant::now();
    cache.shrink()?;
    let duration = began.elapsed();
    let after = resident_bytes() - at_first;
    let live = cache.owner().0.iter().filter_map(object).count() as u64;
    for (number, at) in cache.owner().0.iter().enumerate() {
        let words = object(at).into_iter().flat_map(|object| &object.0);
        words.for_each(|word| assert_eq!(word.load(Relaxed), number as u64 + 1));
    }
    let live = live * size_of::<Object<WORDS>>() as u64;
    Ok(Outcome { live, before, after, handle_bytes: 0, moved: cache.info()?.moved, duration })
}

/// The names of the cases. Each case runs in a process of its own, so that the process's resident bytes belong to that
/// case.
const CASES: [&str; 4] = ["owner-192", "owner-576", "handle-192", "handle-576"];

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let values = args.next().map_or(Ok(2_000_000), |text| text.parse())?;
    let Some(case) = args.next() else {
        for case in CASES {
            let status = Command::new(std::env::current_exe()?).args([&values.to_string(), case]).status()?;
            assert!(status.success(), "{case}: {status}");
        }
        return Ok(());
    };
    let outcome = match case.as_str() {
        "owner-192" => by_owner::<24>(values),
        "owner-576" => by_owner::<72>(values),
        "handle-192" => by_handle::<24>(values),
        "handle-576" => by_handle::<72>(values),
        other => Err(format!("{other} is none of {CASES:?}").into()),
    };
    print_outcome(&case, &outcome?);
    Ok(())
}
