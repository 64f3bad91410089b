//! Faults of reads. Each table has the outcome of a call for each driver; all other checks are the same for all rows
//! ([`Scene::check_unharmed`]).

use super::driver::*;
use super::scene::{PAGE, Scene, Shape, TestCaches, pattern};
use super::store::End;
use super::{WAIT_LIMIT, wait_until};
use crate::mapping::inflight::Kind;
use crate::mapping::request::{Purpose, Reserved, Unpublished};
use libc::{ECANCELED, EIO, ENOMEM, ETIMEDOUT};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// All ends of a transfer.
pub const ENDS: [End; 5] = [End::Done, End::Failed, End::Short, End::Cancelled, End::Panicked];

/// What happens while the store has the reads of a call, before they complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Nothing,
    /// Nothing, and the store's `start` returns only when the read ends.
    StartBlocks,
    /// The file is truncated to [`TRUNCATED_BYTES`] and extended again.
    Truncated,
    /// The first page is zeroed.
    Zeroed,
    /// Another thread reads the first page.
    Overtaken,
    /// Another thread writes all of the first page, syncs, and evicts the page. The read in flight carries the
    /// old bytes, which must not enter the index.
    Replaced,
    /// The last handle of the file is dropped; a future, which borrows the file, before it.
    Closed,
    /// The queue or the future is dropped.
    Abandoned,
    /// The timeout of the call passes.
    TimedOut,
}

use Event::*;

const EVENTS: [Event; 9] = [Nothing, StartBlocks, Truncated, Zeroed, Overtaken, Replaced, Closed, Abandoned, TimedOut];

const TRUNCATED_BYTES: usize = 100;

/// Returns why an event cannot happen during a call, or cannot be tested; `None` if it can.
fn why_impossible(driver: Driver, event: Event) -> Option<&'static str> {
    match (event, driver) {
        (StartBlocks, Read | PartialWrite | BlockingQueue) => Some("the store's calls block without it, too"),
        (Replaced, PartialWrite) => Some("the order of the two writes is not determined"),
        (Closed, Read | ReadInTime | PartialWrite | BlockingQueue) => Some("the call borrows the handle"),
        (Abandoned, Read | ReadInTime | PartialWrite | BlockingQueue) => Some("the call blocks its thread"),
        (Abandoned, Readahead) => Some("no caller waits for readahead"),
        (TimedOut, Read | PartialWrite | BlockingQueue) => Some("a blocking call of the store has no time limit"),
        (TimedOut, Queue | Future | Readahead) => Some("the caller has the time limit, and drops the queue or future"),
        _ => None,
    }
}

/// Returns the outcome of a call whose reads end with `end` after the event.
///
/// | driver | failed, short | cancelled | the store panics |
/// |---|---|---|---|
/// | read, future | `Right`: reads the first page again | as failed | as failed; `Panicked` in the caller's thread |
/// | partial write, queue | `EIO` | `ECANCELED` | `ECANCELED`; `Panicked` in the caller's thread |
/// | readahead | `Right`: reports nothing | as failed | as failed; `Panicked` in the caller's thread |
///
/// A timeout gives `ETIMEDOUT`, whatever the end. A dropped queue or future gives `Abandoned`.
fn outcome_after(driver: Driver, event: Event, end: End) -> Outcome {
    let is_in_callers_thread = !driver.has_asynchronous_store() || event == StartBlocks;
    match (event, driver, end) {
        (TimedOut, ..) => Outcome::Error(ETIMEDOUT),
        (Abandoned, ..) | (Closed, Future, _) => Outcome::Abandoned,
        (_, _, End::Done) => Outcome::Right,
        (_, _, End::Panicked) if is_in_callers_thread => Outcome::Panicked,
        (_, Read | ReadInTime | Future | Readahead, _) => Outcome::Right,
        (_, _, End::Failed | End::Short) => Outcome::Error(EIO),
        (_, _, End::Cancelled | End::Panicked) => Outcome::Error(ECANCELED),
    }
}

/// *Complete* and *Publish*: the store has the reads of a call. An event happens, and then the reads end on another
/// thread, in each way.
fn complete_after_event(caches: &TestCaches, shape: Shape, driver: Driver, event: Event, end: End) {
    let row = format!("{shape:?}, {driver:?}, {event:?}, {end:?}");
    let timeout = if event == TimedOut { Duration::from_millis(5) } else { WAIT_LIMIT };
    let mut scene = Scene::with_shape(caches, driver.has_asynchronous_store(), timeout, shape);
    if shape != Shape::Huge {
        driver.prepare(&scene);
    }
    scene.store.keep(event == StartBlocks);
    let mut handle = scene.file.take();
    let (order, orders) = mpsc::channel();
    let (follow, followed) = mpsc::channel();
    let orders = Orders { orders, followed: follow };
    let outcome = thread::scope(|scope| {
        let (store, cache, file) = (&scene.store, &scene.cache, handle.clone().expect("the file is open"));
        let calling = scope.spawn(move || driver.run(cache, file, (event != StartBlocks).then_some(&orders)));
        // One read of a huge folio reads all pages.
        let kept_calls = if event == StartBlocks || shape == Shape::Huge { 1 } else { driver.kept_calls() };
        wait_until(&format!("{row}: the read"), || store.kept() == kept_calls);
        store.succeed();
        let give = |what| {
            order.send(what).unwrap();
            followed.recv_timeout(WAIT_LIMIT).expect(&row);
        };
        if driver.follows_orders() && event != StartBlocks {
            // The call has submitted all its reads, and waits or would wait.
            give(Order::Report);
        }
        let mut disturbing = None;
        match event {
            Closed => {
                if driver == Future {
                    give(Order::Abandon);
                }
                give(Order::CloseHandle);
                drop(handle.take());
            }
            Abandoned => give(Order::Abandon),
            TimedOut => wait_until(&format!("{row}: the timeout"), || calling.is_finished()),
            _ => {
                let file = handle.clone().expect("the file is open");
                let act = scope.spawn(move || match event {
                    Truncated => {
                        file.truncate(TRUNCATED_BYTES as u64).unwrap();
                        file.truncate(pattern(1).len() as u64).unwrap();
                    }
                    Zeroed => file.zero_range(0, PAGE as u64).unwrap(),
                    Overtaken => assert_eq!(file.read_at(&mut [0; 10], 20).unwrap(), 10),
                    Replaced => {
                        assert_eq!(file.write_at(&[REPLACED; PAGE], 0).unwrap(), PAGE);
                        file.sync().unwrap();
                        file.dont_need(0, PAGE as u64).unwrap();
                    }
                    _ => {}
                });
                // Zeroing, reading and replacing wait for the read in flight. Only a queue's read is cancelled instead.
                // A truncation waits only for a partial write.
                let waits = match event {
                    Truncated => driver == PartialWrite,
                    Zeroed | Overtaken | Replaced => !matches!(driver, Queue | BlockingQueue),
                    _ => false,
                };
                if !waits {
                    wait_until(&format!("{row}: the event"), || act.is_finished());
                }
                disturbing = Some(act);
            }
        }
        scope.spawn(|| store.release(end)).join().unwrap();
        // The order is not received if the call follows no orders.
        let _ = order.send(Order::Finish);
        if let Some(act) = disturbing {
            act.join().expect(&row);
        }
        calling.join().unwrap()
    });
    scene.file = handle;
    assert_eq!(outcome, outcome_after(driver, event, end), "{row}");
    scene.note_outcome(driver, outcome);
    match event {
        Truncated => scene.expected[TRUNCATED_BYTES..].fill(0),
        Zeroed => scene.expected[..PAGE].fill(0),
        Replaced => scene.expected[..PAGE].fill(REPLACED),
        _ => {}
    }
    scene.check_unharmed(&row);
}

/// Tests every combination of a driver, an event and an end that can happen.
fn complete_in_each_way(shape: Shape) {
    let caches = TestCaches::new();
    for driver in DRIVERS {
        for event in EVENTS.into_iter().filter(|event| why_impossible(driver, *event).is_none()) {
            ENDS.into_iter().for_each(|end| complete_after_event(&caches, shape, driver, event, end));
        }
    }
}

/// All combinations, with contiguous pages.
#[test]
fn reads_complete_late_in_each_way() {
    complete_in_each_way(Shape::Contiguous);
}

/// All combinations, with pages that are read through a buffer.
#[test]
fn reads_of_scattered_pages_complete_late_in_each_way() {
    complete_in_each_way(Shape::Scattered);
}

/// All combinations, with a huge folio.
#[test]
fn reads_of_huge_folios_complete_late_in_each_way() {
    complete_in_each_way(Shape::Huge);
}

/// *Submit*: the reads end during the call that starts them. All fail, or only those after the first. A read of the
/// same batch that has succeeded is not lost.
#[test]
fn reads_fail_when_they_are_submitted() {
    let caches = TestCaches::new();
    for (driver, first_calls) in DRIVERS.map(|driver| [(driver, 0), (driver, 1)]).into_iter().flatten() {
        // The other drivers start one read.
        let has_several = matches!(driver, Queue | BlockingQueue | Readahead);
        for end in ENDS.into_iter().filter(|_| first_calls == 0 || has_several) {
            let row = format!("{driver:?}, {first_calls} succeed, {end:?}");
            let mut scene = Scene::new(&caches, driver.has_asynchronous_store(), WAIT_LIMIT);
            driver.prepare(&scene);
            scene.store.end_calls(first_calls, end);
            let outcome = driver.run(&scene.cache, scene.file().clone(), None);
            let expected = match (driver, end) {
                (_, End::Done) => Outcome::Right,
                (_, End::Panicked) => Outcome::Panicked,
                (Readahead, _) => Outcome::Right,
                (_, End::Failed | End::Short) => Outcome::Error(EIO),
                (_, End::Cancelled) => Outcome::Error(ECANCELED),
            };
            assert_eq!(outcome, expected, "{row}");
            if driver == Readahead {
                assert_eq!(scene.file().0.has_page(0), first_calls > 0 || end == End::Done, "{row}");
            }
            scene.note_outcome(driver, outcome);
            scene.store.succeed();
            scene.check_unharmed(&row);
        }
    }
}

/// A queue is dropped after one of its reads has completed, and while the store has the other. The completed page is
/// freed at once, the other one when the store has finished with it.
#[test]
fn a_dropped_queue_frees_completed_reads() {
    let caches = TestCaches::new();
    for end in ENDS {
        let row = format!("{end:?}");
        let scene = Scene::new(&caches, true, WAIT_LIMIT);
        let before = scene.cache.charged_bytes();
        let mut queue = scene.cache.queue(2).unwrap();
        queue.fetch(scene.file(), 0, 0).unwrap();
        scene.store.keep(false);
        queue.fetch(scene.file(), PAGE as u64, 1).unwrap();
        assert_eq!((queue.len(), scene.cache.charged_bytes() - before), (2, 2 * PAGE as u64), "{row}");
        drop(queue);
        assert_eq!(scene.cache.charged_bytes() - before, PAGE as u64, "{row}");
        scene.store.release(end);
        assert_eq!(scene.cache.charged_bytes(), before, "{row}");
        scene.check_unharmed(&row);
    }
}

/// *Publish*: a request is reserved after the file was closed and its pages were removed, as a queue's thread may do.
/// Its pages must not enter the index, because another file may get the id.
#[test]
fn a_closed_file_gets_no_pages() {
    let caches = TestCaches::new();
    let mut scene = Scene::new(&caches, false, WAIT_LIMIT);
    let handle = scene.file.take().expect("the file is open");
    let file = handle.0.clone();
    drop(handle);
    let reserved = Unpublished::reserve(file.clone(), 0..4, Kind::Cancellable, Purpose::Read).unwrap();
    let Reserved::New(mut folio) = reserved else { panic!("the page is missing") };
    folio.fill_from_store().unwrap();
    assert!(!folio.publish().unwrap());
    drop(folio);
    assert!(!file.has_page(0));
    drop(file);
    scene.check_unharmed("closed");
}

/// *Publish*: there is no memory for nodes of the index. Readahead does not report that. A partial write succeeds,
/// because an index of only the first page needs no node.
#[test]
fn reads_fail_when_the_index_has_no_memory() {
    let caches = TestCaches::new();
    for driver in DRIVERS {
        let row = format!("{driver:?}");
        let mut scene = Scene::new(&caches, driver.has_asynchronous_store(), WAIT_LIMIT);
        caches.forests.refuse_nodes(true);
        let outcome = driver.run(&scene.cache, scene.file().clone(), None);
        caches.forests.refuse_nodes(false);
        let expected = match driver {
            Readahead | PartialWrite => Outcome::Right,
            _ => Outcome::Error(ENOMEM),
        };
        assert_eq!(outcome, expected, "{row}");
        assert!(!scene.file().0.has_page(PAGES as u64 - 1), "{row}");
        scene.note_outcome(driver, outcome);
        scene.check_unharmed(&row);
    }
}
