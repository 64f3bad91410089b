//! The drivers of a request, each as a call for the first [`PAGES`] pages of the scene's file.

use super::scene::{PAGE, Scene, pattern};
use super::{WAIT_LIMIT, wait_until};
use crate::mapping::{Fetch, Mapping, PageCache};
use pagemill_core::error::Result;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

/// Number of pages that each call needs.
pub const PAGES: usize = 4;

/// The byte that a partial write writes.
const WRITTEN: u8 = 9;

/// The byte of a page that another thread replaces during a call.
pub const REPLACED: u8 = 250;

/// A call that needs pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// A read of a store with blocking calls (`drivers/blocking`).
    Read,
    /// A read of an asynchronous store, which waits until the timeout (`drivers/blocking`).
    ReadInTime,
    /// A write to a part of a page of a store with blocking calls. It needs the first page only (`drivers/blocking`).
    PartialWrite,
    /// A queue with an asynchronous store: one read for each page (`drivers/queue`, `drivers/completions`).
    Queue,
    /// A queue with a store with blocking calls (`drivers/queue`).
    BlockingQueue,
    /// A future (`drivers/future`).
    Future,
    /// A hint that starts two reads in one batch, because the second page is in memory (`drivers/readahead`).
    Readahead,
}

pub use Driver::*;

pub const DRIVERS: [Driver; 7] = [Read, ReadInTime, PartialWrite, Queue, BlockingQueue, Future, Readahead];

/// Result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All pages that the call reports have the right bytes. Readahead reports none.
    Right,
    /// An error with this number.
    Error(i32),
    Panicked,
    /// The test has dropped the queue or the future.
    Abandoned,
}

/// What a driver does next, after it has submitted its reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Finishes the call.
    Finish,
    /// Drops the queue or the future.
    Abandon,
    /// Drops its handle of the file.
    CloseHandle,
    /// Only reports that the call has begun.
    Report,
}

/// The end of a channel with which a driver learns what to do next.
pub struct Orders {
    pub orders: Receiver<Order>,
    /// Gets a message after each order that the driver has followed.
    pub followed: Sender<()>,
}

impl Orders {
    /// Follows orders until the call has to be finished. `call` is the queue or the future. Returns it, or `None` if it
    /// was dropped.
    fn follow<T>(&self, file: &mut Option<Arc<Mapping>>, call: T) -> Option<T> {
        let mut call = Some(call);
        loop {
            match self.orders.recv_timeout(WAIT_LIMIT).expect("the test gives an order") {
                Order::Finish => return call,
                Order::Abandon => drop(call.take()),
                Order::CloseHandle => drop(file.take()),
                Order::Report => {}
            }
            self.followed.send(()).unwrap();
        }
    }
}

/// A waker that unparks a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls a future until it resolves, 60 seconds at most.
pub fn block_on<F: std::future::Future>(future: F) -> F::Output {
    let mut future = Box::pin(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let began = std::time::Instant::now();
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return done;
        }
        let rest = WAIT_LIMIT.saturating_sub(began.elapsed());
        assert!(!rest.is_zero(), "the task was not woken in time");
        std::thread::park_timeout(rest);
    }
}

impl Driver {
    pub fn has_asynchronous_store(self) -> bool {
        matches!(self, ReadInTime | Queue | Future | Readahead)
    }

    /// Returns whether the driver follows orders while the store has its reads. The others block then.
    pub fn follows_orders(self) -> bool {
        matches!(self, Queue | Future | Readahead)
    }

    /// Returns the number of transfers or calls that the store holds at once if it completes none.
    pub fn kept_calls(self) -> usize {
        match self {
            Queue => PAGES,
            Readahead => 2,
            _ => 1,
        }
    }

    /// Reads the pages that must be in memory before this driver's call.
    pub fn prepare(self, scene: &Scene) {
        if self == Readahead {
            scene.file().read_at(&mut [0], PAGE as u64).unwrap();
        }
    }

    /// Makes the call. Between submission and completion, queues, futures and readahead follow `orders`, if there are
    /// any.
    pub fn run(self, cache: &PageCache, file: Arc<Mapping>, orders: Option<&Orders>) -> Outcome {
        catch_unwind(AssertUnwindSafe(|| match self.call(cache, file, orders) {
            Ok(true) => Outcome::Right,
            Ok(false) => Outcome::Abandoned,
            Err(error) => Outcome::Error(error.errno()),
        }))
        .unwrap_or(Outcome::Panicked)
    }

    /// As [`Driver::run`]. Returns false if the queue or the future was dropped.
    fn call(self, cache: &PageCache, file: Arc<Mapping>, orders: Option<&Orders>) -> Result<bool> {
        let mut bytes = vec![0; PAGES * PAGE];
        match self {
            Read | ReadInTime => {
                let len = file.read_at(&mut bytes, 0)?;
                assert_right(&bytes[..len]);
                Ok(true)
            }
            PartialWrite => file.write_at(&[WRITTEN; 10], 5).map(|_| true),
            Queue | BlockingQueue => fetch_all(cache, file, orders),
            Future => {
                let shared = file.clone();
                let mut file = Some(file);
                let reading =
                    async move { shared.read_async(&mut bytes, 0).await.map(|len| assert_right(&bytes[..len])) };
                let mut reading: std::pin::Pin<Box<dyn std::future::Future<Output = Result<()>>>> = Box::pin(reading);
                let Some(orders) = orders else { return block_on(reading).map(|()| true) };
                let first = reading.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                assert!(first.is_pending(), "the read is in flight");
                match orders.follow(&mut file, reading) {
                    Some(reading) => block_on(reading).map(|()| true),
                    None => Ok(false),
                }
            }
            Readahead => {
                file.will_need(0, (PAGES * PAGE) as u64)?;
                let mut file = Some(file);
                orders.map(|orders| orders.follow(&mut file, ()));
                wait_until("the end of readahead", || cache.0.inflight.is_empty());
                Ok(true)
            }
        }
    }
}

impl Scene {
    /// Called after a call with its outcome: a partial write has changed the file.
    pub fn note_outcome(&mut self, driver: Driver, outcome: Outcome) {
        if (driver, outcome) == (PartialWrite, Outcome::Right) {
            self.expected[5..15].fill(WRITTEN);
        }
    }
}

/// Asserts that each byte is that of the store, or of the file after another thread has truncated, zeroed or replaced
/// it.
fn assert_right(bytes: &[u8]) {
    assert!(!bytes.is_empty(), "the read returned no bytes");
    let wrong = bytes.iter().zip(pattern(1)).position(|(found, stored)| ![stored, 0, REPLACED].contains(found));
    assert_eq!(wrong, None, "first wrong byte");
}

/// Fetches all pages by a queue. Returns the first error. Each page must be reported.
fn fetch_all(cache: &PageCache, file: Arc<Mapping>, orders: Option<&Orders>) -> Result<bool> {
    let mut queue = cache.queue(PAGES as u32 * 2)?;
    let mut started = 0;
    for page in 0..PAGES {
        if queue.fetch(&file, (page * PAGE) as u64, page as u64)? == Fetch::Started {
            started += 1;
        }
    }
    let mut file = Some(file);
    let queue = match orders {
        Some(orders) => orders.follow(&mut file, queue),
        None => Some(queue),
    };
    let Some(mut queue) = queue else { return Ok(false) };
    let (mut reported, mut failure) = (0, None);
    while !queue.is_empty() {
        assert!(queue.wait(1, WAIT_LIMIT)? > 0, "a page is not reported");
        while let Some(fetched) = queue.next() {
            reported += 1;
            failure = failure.or(fetched.result.err());
        }
    }
    assert_eq!(reported, started, "each page is reported once");
    failure.map_or(Ok(true), Err)
}
