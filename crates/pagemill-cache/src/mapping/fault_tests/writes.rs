//! Faults of writes to whole missing pages. Such a write reserves and fills its folios, registers its request, and then
//! publishes. It starts no transfer, so the store cannot fail it.

use super::driver::{Driver, Outcome, PAGES};
use super::reads::ENDS;
use super::scene::{PAGE, Scene, TestCaches};
use super::store::End;
use super::{WAIT_LIMIT, wait_until};
use crate::mapping::Mapping;
use libc::{ENOMEM, ETIMEDOUT};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::Duration;

const WRITTEN: [u8; PAGES * PAGE] = [9; PAGES * PAGE];

/// Writes the first pages of the file.
fn write(file: &Mapping) -> Outcome {
    match catch_unwind(AssertUnwindSafe(|| file.write_at(&WRITTEN, 0))) {
        Ok(Ok(len)) if len == WRITTEN.len() => Outcome::Right,
        Ok(result) => Outcome::Error(result.expect_err("a part was written").errno()),
        Err(_) => Outcome::Panicked,
    }
}

/// Checks the outcome, and that the file has the written bytes if the write has succeeded.
fn check(mut scene: Scene, outcome: Outcome, expected: Outcome, row: &str) {
    assert_eq!(outcome, expected, "{row}");
    if outcome == Outcome::Right {
        scene.expected[..WRITTEN.len()].copy_from_slice(&WRITTEN);
    }
    scene.check_unharmed(row);
}

/// *Reserve*: there is no memory, or the policy panics. *Publish*: there is no memory for nodes of the index.
#[test]
fn writes_fail_without_memory() {
    let caches = TestCaches::new();
    let scene = Scene::new(&caches, true, WAIT_LIMIT);
    let in_memory = scene.cache.create().unwrap();
    let pins = scene.fill(&in_memory, 0);
    let outcome = write(scene.file());
    drop(pins);
    drop(in_memory);
    check(scene, outcome, Outcome::Error(ENOMEM), "all memory is pinned");

    let scene = Scene::new(&caches, true, WAIT_LIMIT);
    scene.policy_panics.store(true, SeqCst);
    let outcome = write(scene.file());
    scene.policy_panics.store(false, SeqCst);
    check(scene, outcome, Outcome::Panicked, "the policy panics");

    let scene = Scene::new(&caches, true, WAIT_LIMIT);
    caches.forests.refuse_nodes(true);
    let outcome = write(scene.file());
    caches.forests.refuse_nodes(false);
    assert_eq!(scene.file().dirty_bytes(), 0);
    check(scene, outcome, Outcome::Error(ENOMEM), "the index has no memory");
}

/// A read of some of the pages is in flight, and ends in each way. The write waits for it, until its timeout at most.
/// Old bytes must not replace the written ones. A queue's read is cancelled instead.
#[test]
fn writes_wait_for_reads() {
    let caches = TestCaches::new();
    for (driver, end) in [Driver::Read, Driver::Readahead].into_iter().flat_map(|driver| ENDS.map(|end| (driver, end)))
    {
        [false, true].into_iter().for_each(|is_timed_out| write_during_read(&caches, driver, end, is_timed_out));
    }
    for end in ENDS {
        let row = format!("queue, {end:?}");
        let scene = Scene::new(&caches, true, WAIT_LIMIT);
        let mut queue = scene.cache.queue(2).unwrap();
        scene.store.keep(false);
        queue.fetch(scene.file(), PAGE as u64, 1).unwrap();
        scene.store.succeed();
        let outcome = write(scene.file());
        thread::scope(|scope| scope.spawn(|| scene.store.release(end)).join().unwrap());
        assert_eq!(queue.wait(1, WAIT_LIMIT).unwrap(), 1, "{row}");
        assert_eq!(queue.next().unwrap().result.is_ok(), end == End::Done, "{row}");
        drop(queue);
        check(scene, outcome, Outcome::Right, &row);
    }
}

fn write_during_read(caches: &TestCaches, driver: Driver, end: End, is_timed_out: bool) {
    let row = format!("{driver:?}, {end:?}, timed out: {is_timed_out}");
    let timeout = if is_timed_out { Duration::from_millis(5) } else { WAIT_LIMIT };
    let scene = Scene::new(caches, driver.has_asynchronous_store(), timeout);
    scene.store.keep(false);
    let outcome = thread::scope(|scope| {
        let (store, cache, file) = (&scene.store, &scene.cache, scene.file());
        let reading = scope.spawn(move || driver.run(cache, file.clone(), None));
        wait_until(&format!("{row}: the read"), || store.kept() == 1);
        store.succeed();
        let writing = scope.spawn(|| write(file));
        if is_timed_out {
            wait_until(&format!("{row}: the timeout"), || writing.is_finished());
        }
        scope.spawn(|| store.release(end)).join().unwrap();
        reading.join().unwrap();
        writing.join().unwrap()
    });
    let expected = if is_timed_out { Outcome::Error(ETIMEDOUT) } else { Outcome::Right };
    check(scene, outcome, expected, &row);
}
