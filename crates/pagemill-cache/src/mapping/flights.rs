//! In-flight reads of stored files: one for each page, so that the store is read once, and nothing stale enters the
//! index.
//!
//! A thread that puts a folio of a file with a store into the index has a *flight* over its pages. It began the flight
//! before it looked for an existing folio, and before it read the store. So no page comes, is changed, written back and
//! dropped while another thread still reads the store's bytes from before.
//!
//! | flight | ended by | a thread that finds it |
//! |---|---|---|
//! | *firm* | the thread that began it, at once | waits |
//! | *behind* | the thread that finishes its transfer, mostly one of the store | waits |
//! | *loose* | its owner with a later call, which may never come, or the waiting thread's own | overtakes it: what it brings counts for nothing then |
//!
//! Threads sleep meanwhile ([`Flights::wait`]), tasks leave a waker ([`Landed`]).

use super::File;
use super::cache::Inner;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{EventCount, Guarded};
use pagemill_store::errno::{self, ETIMEDOUT};
use std::mem::ManuallyDrop;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// Lists, by file and huge folio: flights that could be over the same pages are in one list.
const SHARDS: usize = 16;

/// 2^64 over the golden ratio: multiples of any number are spread by it.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// All flights of a cache.
#[derive(Default)]
pub(super) struct Flights {
    shards: [Shard; SHARDS],
    numbers: AtomicU64,
}

#[derive(Default)]
struct Shard {
    entries: Guarded<Vec<Entry>>,
    /// A flight has ended.
    ended: EventCount,
}

struct Entry {
    ticket: u64,
    /// [`File::serial`]: ids are used again.
    file: u64,
    first: u64,
    last: u64,
    is_loose: bool,
    /// Of tasks that wait for its end, each under a number of its own.
    wakers: Vec<(u64, Waker)>,
}

/// One flight. It has to be ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "others wait for its end"]
pub(super) struct Ticket {
    shard: usize,
    number: u64,
}

/// What ends a flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// This thread, at once.
    Firm,
    /// The thread that finishes a transfer.
    Behind,
    /// Its owner, with a later call.
    Loose,
    /// The same, after a long wait.
    LooseAtLast,
}

/// Another's flight is over some of the pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Underway {
    pub ticket: Ticket,
    /// Its first and last page.
    pub pages: (u64, u64),
}

/// A flight that this thread ends, or that another ends after [`Flight::go_on`].
pub(super) struct Flight<'cache> {
    cache: &'cache Inner,
    ticket: Ticket,
}

impl<'cache> Flight<'cache> {
    pub fn new(cache: &'cache Inner, ticket: Ticket) -> Self {
        Self { cache, ticket }
    }

    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Leaves its end to the owner of the ticket.
    pub fn go_on(self) -> Ticket {
        ManuallyDrop::new(self).ticket
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.cache.flights.end(self.ticket);
    }
}

impl Flights {
    /// Begins a flight over the pages of a file, which lie in one range of a huge folio (`range` says which). Loose ones that
    /// are in the way are overtaken, or not.
    fn begin(&self, file: u64, range: u64, pages: (u64, u64), kind: Kind) -> std::result::Result<Ticket, Underway> {
        let (first, last) = pages;
        // By the upper bits: ranges begin at multiples of their length.
        let shard = ((range + file).wrapping_mul(GOLDEN) >> (u64::BITS - SHARDS.ilog2())) as usize;
        self.shards[shard].entries.with(|entries| {
            let is_over = |entry: &Entry| entry.file == file && entry.first <= last && entry.last >= first;
            // Of several the first one: up to there the pages are free.
            let in_the_way = |entry: &&Entry| is_over(entry) && (kind == Kind::Loose || !entry.is_loose);
            if let Some(other) = entries.iter().filter(in_the_way).min_by_key(|entry| entry.first) {
                let ticket = Ticket { shard, number: other.ticket };
                return Err(Underway { ticket, pages: (other.first, other.last) });
            }
            entries.retain(|entry| !is_over(entry));
            let number = self.numbers.fetch_add(1, Relaxed);
            let is_loose = matches!(kind, Kind::Loose | Kind::LooseAtLast);
            entries.push(Entry { ticket: number, file, first, last, is_loose, wakers: Vec::new() });
            Ok(Ticket { shard, number })
        })
    }

    /// Ends it and wakes waiting threads and tasks. Wakers are called, so no lock may be held.
    pub fn end(&self, ticket: Ticket) {
        let shard = &self.shards[ticket.shard];
        let ended = shard.entries.with(|entries| {
            let at = entries.iter().position(|entry| entry.ticket == ticket.number)?;
            Some(entries.swap_remove(at))
        });
        if let Some(entry) = ended {
            shard.ended.raise();
            entry.wakers.into_iter().for_each(|(_, waker)| waker.wake());
        }
    }

    /// Returns whether it was neither overtaken nor ended.
    pub fn is_on(&self, ticket: Ticket) -> bool {
        self.with_entry(ticket, |_| ()).is_some()
    }

    fn with_entry<R>(&self, ticket: Ticket, act: impl FnOnce(&mut Entry) -> R) -> Option<R> {
        self.shards[ticket.shard]
            .entries
            .with(|entries| entries.iter_mut().find(|entry| entry.ticket == ticket.number).map(act))
    }

    /// It is over fewer pages than it began with: others may bring in those behind `last`.
    pub fn shorten(&self, ticket: Ticket, last: u64) {
        self.with_entry(ticket, |entry| entry.last = last);
    }

    /// Sleeps until a flight has ended. Returns whether it has: not, if `deadline` comes first.
    pub fn wait(&self, ticket: Ticket, deadline: Option<Instant>) -> bool {
        let ended = &self.shards[ticket.shard].ended;
        loop {
            let seen = ended.count();
            if !self.is_on(ticket) {
                return true;
            }
            let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if rest.is_some_and(|rest| rest.is_zero()) {
                return false;
            }
            ended.wait(seen, rest);
        }
    }
}

/// Resolves when a flight has ended. Dropped before, it leaves nothing behind.
#[must_use = "it does nothing unless it is awaited"]
pub(super) struct Landed<'cache> {
    flights: &'cache Flights,
    ticket: Ticket,
    /// Its waker's, once it has left one.
    number: Option<u64>,
}

impl<'cache> Landed<'cache> {
    pub fn new(flights: &'cache Flights, ticket: Ticket) -> Self {
        Self { flights, ticket, number: None }
    }
}

impl Future for Landed<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let flights = self.flights;
        let number = *self.number.get_or_insert_with(|| flights.numbers.fetch_add(1, Relaxed));
        // Cloned and dropped outside of the lock: a waker runs foreign code.
        let mut waker = Some(context.waker().clone());
        let mut is_on = false;
        let before = flights.with_entry(self.ticket, |entry| {
            is_on = true;
            let waker = waker.take()?;
            match entry.wakers.iter_mut().find(|(known, _)| *known == number) {
                Some((_, known)) => Some(std::mem::replace(known, waker)),
                None => {
                    entry.wakers.push((number, waker));
                    None
                }
            }
        });
        drop(before);
        if is_on { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl Drop for Landed<'_> {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let waker = self.flights.with_entry(self.ticket, |entry| {
            let at = entry.wakers.iter().position(|(known, _)| *known == number)?;
            Some(entry.wakers.swap_remove(at))
        });
        drop(waker);
    }
}

impl File {
    /// Begins a flight over pages of one range.
    ///
    /// # Errors
    ///
    /// Another's is over some of them.
    pub(super) fn begin_flight(&self, first: u64, last: u64, kind: Kind) -> std::result::Result<Ticket, Underway> {
        self.cache.flights.begin(self.serial, self.span_of(first).start, (first, last), kind)
    }

    /// Begins a flight over pages of one range, unless another's is over some of them.
    pub(super) fn try_fly(&self, first: u64, last: u64) -> Option<Flight<'_>> {
        let ticket = self.begin_flight(first, last, Kind::Firm).ok()?;
        Some(Flight::new(&self.cache, ticket))
    }

    /// Begins a flight over pages of one range, after another's that is over some of them. They may be there by then.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with `ETIMEDOUT` if that takes longer than the cache's patience.
    pub(super) fn fly(&self, first: u64, last: u64) -> Result<Flight<'_>> {
        let mut deadline = None;
        loop {
            match self.begin_flight(first, last, Kind::Firm) {
                Ok(ticket) => return Ok(Flight::new(&self.cache, ticket)),
                Err(other) => {
                    let deadline = *deadline.get_or_insert_with(|| self.deadline());
                    self.await_flight(other.ticket, deadline)?;
                }
            }
        }
    }

    /// Until when a call that begins now waits for others' reads, and for its own where the store can do them behind.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.cache.timeout.and_then(|patience| Instant::now().checked_add(patience))
    }

    /// # Errors
    ///
    /// [`Error::Store`] with `ETIMEDOUT` if the flight takes longer.
    pub(super) fn await_flight(&self, ticket: Ticket, deadline: Option<Instant>) -> Result<()> {
        if self.cache.flights.wait(ticket, deadline) {
            return Ok(());
        }
        stats::add(Counter::ReadsLate, 1);
        Err(Error::Store { doing: "waiting for a page of a file", cause: errno::error(ETIMEDOUT) })
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;
    use std::time::Duration;

    /// Flights over different huge folios of one file are in different lists mostly, and those over one in one.
    #[test]
    fn ranges_are_spread_over_the_lists() {
        for pages in [1u64, 16, 512] {
            let flights = Flights::default();
            for range in 0..64 {
                let first = range * pages;
                for page in [first, first + pages - 1].into_iter().take(pages.min(2) as usize) {
                    let _ = flights.begin(7, first, (page, page), Kind::Firm).unwrap();
                }
            }
            let longest = flights.shards.iter().map(|shard| shard.entries.with(|entries| entries.len())).max();
            assert!(longest <= Some(16), "{longest:?} of {} in one, of {pages} pages", 64 * pages.min(2));
        }
    }

    /// Flights over the same pages exclude each other, in one file; a loose one is overtaken, and learns of it.
    #[test]
    fn one_at_a_time_is_over_a_page() {
        let flights = Flights::default();
        let begin = |file, first, last, kind| flights.begin(file, 0, (first, last), kind);
        let firm = begin(1, 4, 7, Kind::Firm).unwrap();
        for (first, last) in [(4, 4), (7, 9), (0, 4), (0, 100)] {
            for kind in [Kind::Firm, Kind::Behind, Kind::Loose, Kind::LooseAtLast] {
                let other = begin(1, first, last, kind).unwrap_err();
                assert_eq!((other.ticket, other.pages), (firm, (4, 7)));
            }
        }
        let (before, behind, other) =
            (begin(1, 3, 3, Kind::Firm), begin(1, 8, 8, Kind::Loose), begin(2, 4, 7, Kind::Firm));
        let (before, behind, other) = (before.unwrap(), behind.unwrap(), other.unwrap());
        assert!(begin(1, 8, 8, Kind::Loose).is_err(), "loose ones wait for each other");
        let last = begin(1, 8, 8, Kind::LooseAtLast).expect("not for ever");
        let taker = begin(1, 8, 8, Kind::Behind).unwrap();
        assert!(!flights.is_on(behind) && !flights.is_on(last) && flights.is_on(taker) && flights.is_on(firm));
        assert!(begin(1, 8, 8, Kind::Firm).is_err(), "somebody sees to its end");
        flights.shorten(firm, 5);
        let rest = begin(1, 6, 7, Kind::Behind).expect("nobody is over these any more");
        assert!(begin(1, 5, 5, Kind::Behind).is_err());
        [firm, rest, before, behind, other, taker].into_iter().for_each(|ticket| flights.end(ticket));
        assert!(flights.shards.iter().all(|shard| shard.entries.with(|entries| entries.is_empty())));
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    /// A task hears of the end once, by the waker that it had last; one that was dropped does not.
    #[test]
    fn tasks_hear_of_the_end() {
        let flights = Flights::default();
        let ticket = flights.begin(1, 0, (0, 9), Kind::Behind).unwrap();
        let counts: [Arc<Count>; 3] = Default::default();
        let wakers = counts.clone().map(Waker::from);
        let (mut one, mut other) = (Landed::new(&flights, ticket), Landed::new(&flights, ticket));
        let poll = |landed: &mut Landed<'_>, at: usize| Pin::new(landed).poll(&mut Context::from_waker(&wakers[at]));
        assert!(poll(&mut one, 0).is_pending() && poll(&mut one, 1).is_pending() && poll(&mut other, 2).is_pending());
        drop(other);
        flights.end(ticket);
        assert_eq!(counts.map(|count| count.0.load(Relaxed)), [0, 1, 0]);
        assert!(poll(&mut one, 0).is_ready());
    }

    /// A thread that waits sleeps until the end, or for as long as it has.
    #[test]
    fn threads_wait_for_the_end() {
        let flights = Flights::default();
        let ticket = flights.begin(1, 0, (0, 9), Kind::Behind).unwrap();
        assert!(!flights.wait(ticket, Some(Instant::now() + Duration::from_millis(5))));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| flights.wait(ticket, None));
            flights.end(ticket);
            assert!(waiting.join().unwrap());
        });
    }
}
