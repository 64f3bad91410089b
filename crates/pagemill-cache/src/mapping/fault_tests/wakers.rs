//! Panics of the program's code in the middle of other calls: of a task's waker while a read completes, of a store's
//! waker while a transfer is cancelled, and of a store or policy while a queue requests a page again.

use super::driver::{Driver, PAGES};
use super::reads::ENDS;
use super::scene::{PAGE, Scene, TestCaches};
use super::store::End;
use super::{WAIT_LIMIT, wait_until};
use crate::mapping::Fetch;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

/// A waker that counts its calls, and panics if it is broken.
struct CountingWaker {
    is_broken: bool,
    calls: AtomicUsize,
}

impl Wake for CountingWaker {
    fn wake(self: Arc<Self>) {
        self.calls.fetch_add(1, SeqCst);
        assert!(!self.is_broken, "the test asked for a panic of the waker");
    }
}

/// *Complete*: three tasks and a thread wait for a page, and the waker of the second task panics. The others must be
/// woken. The panic must not unwind through the call or the store's thread that completes the read, which may be
/// unwinding already.
#[test]
fn a_waker_that_panics_stops_no_other_task() {
    let caches = TestCaches::new();
    for (is_asynchronous, end) in ENDS.iter().flat_map(|end| [(false, *end), (true, *end)]) {
        let row = format!("asynchronous store: {is_asynchronous}, {end:?}");
        let scene = Scene::new(&caches, is_asynchronous, WAIT_LIMIT);
        scene.store.keep(false);
        let wakers = [false, true, false].map(|is_broken| CountingWaker { is_broken, calls: AtomicUsize::new(0) });
        let wakers = wakers.map(Arc::new);
        thread::scope(|scope| {
            let (store, cache, file) = (&scene.store, &scene.cache, scene.file());
            let driver = if is_asynchronous { Driver::ReadInTime } else { Driver::Read };
            let completing = scope.spawn(move || driver.run(cache, file.clone(), None));
            wait_until(&format!("{row}: the read"), || store.kept() == 1);
            store.succeed();
            let mut tasks = [(); 3].map(|()| Box::pin(file.pin_async(0)));
            for (task, waker) in tasks.iter_mut().zip(&wakers) {
                let waker = Waker::from(waker.clone());
                assert!(task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), "{row}");
            }
            let waiting = scope.spawn(|| file.read_at(&mut [0; PAGE], 0));
            scope.spawn(|| store.release(end)).join().expect(&row);
            completing.join().expect(&row);
            waiting.join().unwrap().expect(&row);
            let calls = wakers.each_ref().map(|waker| waker.calls.load(SeqCst));
            assert_eq!(calls, [1; 3], "{row}: each waker is called once");
            for mut task in tasks {
                let polled = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                assert!(matches!(polled, Poll::Ready(Ok(_))), "{row}");
            }
        });
        scene.check_unharmed(&row);
    }
}

/// A store registers wakers that stop its transfers when they are cancelled, and one panics. The drop of a file or of a
/// queue must not panic, and must call the other wakers.
#[test]
fn a_waker_of_a_store_that_panics_stops_no_drop() {
    let caches = TestCaches::new();
    for driver in [Driver::Queue, Driver::Readahead] {
        let row = format!("{driver:?}");
        let mut scene = Scene::new(&caches, true, WAIT_LIMIT);
        scene.store.keep(false);
        let wakers = [false, true, false].map(|is_broken| CountingWaker { is_broken, calls: AtomicUsize::new(0) });
        let wakers = wakers.map(Arc::new);
        let mut queue = scene.cache.queue(1).unwrap();
        if driver == Driver::Queue {
            queue.fetch(scene.file(), 0, 0).unwrap();
        } else {
            scene.file().will_need(0, PAGE as u64).unwrap();
        }
        wakers.iter().for_each(|waker| scene.store.wake_when_cancelled(&Waker::from(waker.clone())));
        drop(queue);
        drop(scene.file.take());
        let calls = wakers.each_ref().map(|waker| waker.calls.load(SeqCst));
        assert_eq!(calls, [1; 3], "{row}: each waker is called once");
        scene.store.release(End::Cancelled);
        scene.check_unharmed(&row);
    }
}

/// A queue waits for the read of another call, and must then read the pages itself. The policy or the store panics
/// during that. The panic unwinds through the queue's call, and the queue must still report each page once.
#[test]
fn a_queue_reports_each_page_after_a_panic() {
    let caches = TestCaches::new();
    for (is_asynchronous, is_policy) in [(false, false), (false, true), (true, false), (true, true)] {
        let row = format!("asynchronous store: {is_asynchronous}, panic of the policy: {is_policy}");
        let scene = Scene::new(&caches, is_asynchronous, WAIT_LIMIT);
        let mut queue = scene.cache.queue(8).unwrap();
        scene.store.keep(false);
        thread::scope(|scope| {
            let (store, cache, file) = (&scene.store, &scene.cache, scene.file());
            let other = match is_asynchronous {
                true => {
                    file.will_need(0, (PAGES * PAGE) as u64).unwrap();
                    None
                }
                false => Some(scope.spawn(|| Driver::PartialWrite.run(cache, file.clone(), None))),
            };
            wait_until(&format!("{row}: the other read"), || store.kept() == 1);
            let pages = if is_asynchronous { PAGES } else { 1 };
            for page in 0..pages {
                let fetched = queue.fetch(file, (page * PAGE) as u64, page as u64).unwrap();
                assert_eq!(fetched, Fetch::Started, "{row}");
            }
            store.release(End::Failed);
            other.map(|other| other.join().unwrap());
            if is_policy {
                scene.policy_panics.store(true, SeqCst);
            } else {
                store.end_calls(0, End::Panicked);
            }
            let (mut reported, mut panics) = (vec![0; pages], 0);
            while !queue.is_empty() {
                match catch_unwind(AssertUnwindSafe(|| queue.wait(1, WAIT_LIMIT))) {
                    Ok(completed) => assert!(completed.unwrap() > 0, "{row}: a page is not reported"),
                    Err(_) => panics += 1,
                }
                while let Some(fetched) = queue.next() {
                    assert!(fetched.result.is_err(), "{row}");
                    reported[fetched.token as usize] += 1;
                }
            }
            assert_eq!((reported, panics), (vec![1; pages], pages), "{row}: reports of the pages, and panics");
            scene.policy_panics.store(false, SeqCst);
            store.succeed();
            assert_eq!(queue.fetch(file, 0, 9).unwrap() == Fetch::Present, !is_asynchronous, "{row}");
            while !queue.is_empty() {
                assert!(queue.wait(1, WAIT_LIMIT).unwrap() > 0, "{row}");
                queue.next().unwrap().result.expect(&row);
            }
        });
        drop(queue);
        scene.check_unharmed(&row);
    }
}
