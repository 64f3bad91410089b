//! Faults of *Reserve*: there is no memory, or another request reads the pages, or the program's code panics.

use super::driver::*;
use super::reads::ENDS;
use super::scene::{LIMIT_PAGES, PAGE, Scene, TestCaches};
use super::store::{End, ScriptedStore};
use super::{WAIT_LIMIT, wait_until};
use libc::{ECANCELED, EIO, ENOMEM};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc;
use std::thread;

/// Runs the call without a fault of its store. Returns the outcome.
fn run(driver: Driver, scene: &mut Scene) -> Outcome {
    let outcome = driver.run(&scene.cache, scene.file().clone(), None);
    scene.note_outcome(driver, outcome);
    outcome
}

/// All memory is pinned, or all but two pages; the calls need four, a partial write one. A call fails only if no page
/// is free. But a queue of an asynchronous store fails with two as well, because it needs the memory of all its reads
/// at once. Readahead reports nothing.
#[test]
fn reads_fail_without_memory() {
    let caches = TestCaches::new();
    for (driver, free_pages) in DRIVERS.map(|driver| [(driver, 0), (driver, 2)]).into_iter().flatten() {
        let row = format!("{driver:?}, {free_pages} free pages");
        let mut scene = Scene::new(&caches, driver.has_asynchronous_store(), WAIT_LIMIT);
        let in_memory = scene.cache.create().unwrap();
        let pins = scene.fill(&in_memory, free_pages);
        let expected = match (driver, free_pages) {
            (Readahead, _) => Outcome::Right,
            (Queue, _) | (_, 0) => Outcome::Error(ENOMEM),
            _ => Outcome::Right,
        };
        assert_eq!(run(driver, &mut scene), expected, "{row}");
        drop(pins);
        drop(in_memory);
        scene.check_unharmed(&row);
    }
}

/// The policy panics when it is asked for the size of the folio.
#[test]
fn panics_of_the_policy_unwind_through_the_call() {
    let caches = TestCaches::new();
    for driver in DRIVERS {
        let row = format!("{driver:?}");
        let mut scene = Scene::new(&caches, driver.has_asynchronous_store(), WAIT_LIMIT);
        scene.policy_panics.store(true, SeqCst);
        assert_eq!(run(driver, &mut scene), Outcome::Panicked, "{row}");
        scene.policy_panics.store(false, SeqCst);
        scene.check_unharmed(&row);
    }
}

/// Another request reads the pages, and ends in each way. The call must then read the pages itself: it never gets the
/// error of the other request. A queue or future may also be dropped while it waits.
#[test]
fn reads_wait_for_other_requests() {
    let caches = TestCaches::new();
    for (driver, end) in DRIVERS.iter().flat_map(|driver| ENDS.map(|end| (*driver, end))) {
        let may_abandon = matches!(driver, Queue | Future);
        for is_abandoned in [false, true].into_iter().filter(|is_abandoned| may_abandon || !is_abandoned) {
            wait_for_other_request(&caches, driver, end, is_abandoned);
        }
    }
}

fn wait_for_other_request(caches: &TestCaches, driver: Driver, end: End, is_abandoned: bool) {
    let row = format!("{driver:?}, the other read {end:?}, abandoned: {is_abandoned}");
    let is_asynchronous = driver.has_asynchronous_store();
    let mut scene = Scene::new(caches, is_asynchronous, WAIT_LIMIT);
    scene.store.keep(false);
    let (order, orders) = mpsc::channel();
    let (follow, followed) = mpsc::channel();
    let orders = Orders { orders, followed: follow };
    let outcome = thread::scope(|scope| {
        let (store, cache, file) = (&scene.store, &scene.cache, scene.file());
        let first = match is_asynchronous {
            true => {
                file.will_need(0, (PAGES * PAGE) as u64).unwrap();
                None
            }
            false => Some(scope.spawn(|| Read.run(cache, file.clone(), None))),
        };
        wait_until(&format!("{row}: the other read"), || store.kept() == 1);
        store.succeed();
        let calling = scope.spawn(move || driver.run(cache, file.clone(), Some(&orders)));
        if driver.follows_orders() || driver == BlockingQueue {
            // The call has found the other request.
            order.send(if is_abandoned { Order::Abandon } else { Order::Report }).unwrap();
            followed.recv_timeout(WAIT_LIMIT).expect(&row);
        }
        scope.spawn(|| store.release(end)).join().unwrap();
        let _ = order.send(Order::Finish);
        first.map(|first| first.join().unwrap());
        calling.join().unwrap()
    });
    let expected = if is_abandoned { Outcome::Abandoned } else { Outcome::Right };
    assert_eq!(outcome, expected, "{row}");
    scene.note_outcome(driver, outcome);
    scene.check_unharmed(&row);
}

/// All memory of the cache has dirty pages of another file. The call writes them back, and that fails in each way, at
/// once or on another thread. Readahead does not write back.
#[test]
fn reads_fail_when_dirty_pages_cannot_be_written_back() {
    let caches = TestCaches::new();
    for (driver, end) in DRIVERS.iter().flat_map(|driver| ENDS.map(|end| (*driver, end))) {
        [false, true].into_iter().for_each(|is_late| write_back_for_room(&caches, driver, end, is_late));
    }
}

fn write_back_for_room(caches: &TestCaches, driver: Driver, end: End, is_late: bool) {
    let row = format!("{driver:?}, writeback {end:?}, late: {is_late}");
    let mut scene = Scene::new(caches, driver.has_asynchronous_store(), WAIT_LIMIT);
    let victim_store = Arc::new(ScriptedStore::new(Vec::new(), PAGE, true));
    let victim = scene.cache.open(victim_store.clone()).unwrap();
    scene.other.dont_need(0, u64::MAX).unwrap();
    let bytes = vec![5; LIMIT_PAGES * PAGE];
    assert_eq!(victim.write_at(&bytes, 0).unwrap(), bytes.len());
    assert_eq!(scene.cache.dirty_bytes(), bytes.len() as u64);
    if is_late {
        victim_store.keep(false);
    } else {
        victim_store.end_calls(0, end);
    }
    let outcome = thread::scope(|scope| {
        let calling = scope.spawn(|| run(driver, &mut scene));
        if is_late && driver != Readahead {
            wait_until(&format!("{row}: the write"), || victim_store.kept() > 0);
            victim_store.release(end);
        }
        calling.join().unwrap()
    });
    let expected = match end {
        _ if driver == Readahead => Outcome::Right,
        End::Done => Outcome::Right,
        End::Failed | End::Short => Outcome::Error(EIO),
        End::Panicked if !is_late => Outcome::Panicked,
        End::Cancelled | End::Panicked => Outcome::Error(ECANCELED),
    };
    assert_eq!(outcome, expected, "{row}");
    victim_store.succeed();
    // The first sync may report the failure.
    let _ = victim.sync();
    victim.sync().expect(&row);
    assert!(victim_store.inner.bytes() == bytes, "{row}: a write is lost");
    drop(victim);
    scene.check_unharmed(&row);
}
