//! Tests of keys of a `VolatileCache` whose destructors use the cache or panic.

use pagemill_testbed::Testbed;
use pagemill_volatile::VolatileCache;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Number of further destructor calls that panic.
static PANICS_LEFT: AtomicUsize = AtomicUsize::new(0);
static CACHE: OnceLock<VolatileCache<Key, Vec<u8>>> = OnceLock::new();

fn cache() -> &'static VolatileCache<Key, Vec<u8>> {
    CACHE.get_or_init(|| VolatileCache::new_in(Testbed::for_test().ranges))
}

/// A key whose destructor locks each shard of the cache. It would deadlock if the thread that drops the key held the
/// lock of a shard.
#[derive(PartialEq, Eq, Hash)]
struct Key(u32);

impl Drop for Key {
    fn drop(&mut self) {
        assert!(cache().len() < 1 << 20);
        let panics = PANICS_LEFT.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok();
        assert!(!panics || std::thread::panicking(), "the test asked for a panic");
    }
}

/// Looks up a value whose creation fails. Each such lookup leaves a key without a value in the cache.
fn look_up_without_value(number: u32) -> Result<Vec<u8>, ()> {
    cache().get_or_try_insert(Key(number), || Err(()))
}

/// The cache drops keys when a value is removed, and when it sweeps keys without values. It must hold no lock of a
/// shard at that time. A panic of a key's destructor must not prevent later sweeps.
#[test]
fn destructors_of_keys_may_use_the_cache_and_panic() {
    for number in 0..100 {
        cache().insert(Key(number), &vec![1; 10]).unwrap();
        cache().insert(Key(number), &vec![2; 10]).unwrap();
    }
    assert!((0..100).all(|number| cache().remove(&Key(number)).is_some() && cache().remove(&Key(number)).is_none()));
    assert!(cache().is_empty());

    (0..5_000).for_each(|number| assert!(look_up_without_value(number).is_err()));
    let kept = cache().len();
    assert!(kept < 4_000, "{kept} keys without a value are kept");

    PANICS_LEFT.store(200, SeqCst);
    let mut panicked = 0;
    for number in 5_000..10_000 {
        panicked += usize::from(catch_unwind(AssertUnwindSafe(|| look_up_without_value(number))).is_err());
    }
    assert!(panicked > 0 && PANICS_LEFT.load(SeqCst) == 0);
    (10_000..30_000).for_each(|number| assert!(look_up_without_value(number).is_err()));
    let kept = cache().len();
    assert!(kept < 4_000, "{kept} keys without a value are kept after the panics");
}
