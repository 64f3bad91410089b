//! Reads that are started and go on behind: the store finishes them, on whatever thread, into folios that enter the index then.
//!
//! ```text
//!   a thread that wants pages            the store's thread
//!     begin: flight, memory
//!     Store::start ------------------->  transfer
//!     waits: a thread sleeps,            land: into the index; the flight ends
//!     a task leaves its waker  <-------  wakes them
//! ```
//!
//! Stores may finish transfers before [`pagemill_store::Store::start`] returns: no lock is held around it.

use super::File;
use super::ahead::Reading;
use super::fill::{Asked, DOING, Filling};
use super::flights::{Kind, Landed, Ticket};
use super::sync::failed;
use crate::folio::word::Prefetch;
use pagemill_core::error::{Error, Result};
use pagemill_core::sync::{Acquire, AtomicU32, EventCount, Guarded, Release};
use pagemill_store::errno::{self, ETIMEDOUT};
use pagemill_store::{Cancel, Transfer};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Dropping a file waits this long for its reads to be cancelled. They end later if they must.
const MOST_WAIT: Duration = Duration::from_secs(1);

/// What goes on behind a file.
#[derive(Default)]
pub(super) struct Behind {
    /// Reads that were started and are not over.
    underway: AtomicU32,
    ended: EventCount,
    /// Their pages are not wanted any more.
    cancel: Cancel,
    pub reading: Reading,
}

impl Behind {
    fn is_idle(&self) -> bool {
        self.underway.load(Acquire) == 0
    }
}

/// The failure of a read, for the thread that started it.
#[derive(Default)]
pub(super) struct Outcome(Guarded<Option<Error>>);

/// A read that was started, or another's.
enum Started {
    /// It is over: the page is there, unless it was cut off meanwhile.
    Present,
    Another(Ticket),
    Own(Ticket, Arc<Outcome>),
}

impl Outcome {
    fn set(&self, error: Error) {
        self.0.with(|place| *place = Some(error));
    }

    fn take(&self) -> Result<()> {
        self.0.with(Option::take).map_or(Ok(()), Err)
    }
}

impl File {
    /// Brings the first of some pages in, which a task waits for, and some behind it. They may be gone again.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`]; [`Error::Store`] with what the store says to the read of that page.
    pub(super) async fn bring(self: &Arc<Self>, pages: Range<u64>) -> Result<()> {
        let first = pages.start..pages.start + 1;
        let is_one = pages == first;
        match self.bring_together(pages).await {
            // It may be one of the others that cannot be read.
            Err(Error::Store { .. }) if !is_one => self.bring_together(first).await,
            result => result,
        }
    }

    async fn bring_together(self: &Arc<Self>, pages: Range<u64>) -> Result<()> {
        match self.start(pages)? {
            Started::Present => Ok(()),
            Started::Another(ticket) => {
                Landed::new(&self.cache.flights, ticket).await;
                Ok(())
            }
            Started::Own(ticket, outcome) => {
                Landed::new(&self.cache.flights, ticket).await;
                outcome.take()
            }
        }
    }

    /// Brings the first of some pages in, and those behind it that come by the same transfer, in this thread. Returns whether there is
    /// something now; otherwise the first is to be read by itself, which tells what is wrong with it.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] with `ETIMEDOUT`, of a cache with a patience.
    pub(super) fn bring_several(&self, pages: Range<u64>) -> Result<bool> {
        if pages.end - pages.start < 2 {
            return Ok(false);
        }
        if self.has_patience() {
            return match self.bring_within_patience(pages) {
                Err(Error::Store { cause, .. }) if !errno::is(&cause, ETIMEDOUT) => Ok(false),
                result => result,
            };
        }
        let Some(file) = self.cache.file(self.id) else { return Ok(false) };
        match Filling::begin_some(&file, pages, Kind::Firm, Prefetch::Requested) {
            Ok(Asked::Present) => Ok(true),
            Ok(Asked::Underway(other)) => self.await_flight(other.ticket, self.deadline()).map(|()| true),
            Ok(Asked::Begun(mut filling)) => Ok(filling.read().and_then(|()| filling.enter()).is_ok()),
            Err(_) => Ok(false),
        }
    }

    /// Whether there is a bound to how long a read may take, and the store can read behind.
    fn has_patience(&self) -> bool {
        self.cache.timeout.is_some() && self.is_asynchronous()
    }

    /// Brings the first of some pages in, and some behind it, if there is a bound to how long that may take. Returns whether it did; the
    /// page may be gone again.
    ///
    /// # Errors
    ///
    /// As [`File::bring`], and [`Error::Store`] with `ETIMEDOUT`.
    pub(super) fn bring_within_patience(&self, pages: Range<u64>) -> Result<bool> {
        let Some(file) = self.has_patience().then(|| self.cache.file(self.id)).flatten() else { return Ok(false) };
        let deadline = self.deadline();
        match file.start(pages)? {
            Started::Present => {}
            Started::Another(ticket) => self.await_flight(ticket, deadline)?,
            Started::Own(ticket, outcome) => {
                self.await_flight(ticket, deadline)?;
                outcome.take()?;
            }
        }
        Ok(true)
    }

    /// Starts the read of the first of some pages, and some behind it.
    fn start(self: &Arc<Self>, pages: Range<u64>) -> Result<Started> {
        match Filling::begin_some(self, pages, Kind::Behind, Prefetch::Requested)? {
            Asked::Present => Ok(Started::Present),
            Asked::Underway(other) => Ok(Started::Another(other.ticket)),
            Asked::Begun(filling) => {
                let outcome = Arc::new(Outcome::default());
                let ticket = filling.ticket();
                self.start_all(vec![(filling, Some(outcome.clone()))]);
                Ok(Started::Own(ticket, outcome))
            }
        }
    }

    /// Starts reads; each ends by itself.
    pub(super) fn start_all(&self, fillings: Vec<(Filling, Option<Arc<Outcome>>)>) {
        let (Some(store), Some(behind)) = (&self.store, &self.behind) else { return };
        let mut batch = Vec::with_capacity(fillings.len());
        for (mut filling, outcome) in fillings {
            if !filling.needs_store() {
                land(filling, Ok(()), outcome.as_deref());
                continue;
            }
            filling.prepare();
            let behind = behind.clone();
            behind.underway.fetch_add(1, Release);
            let cancel = behind.cancel.clone();
            let done = move |result, filling| {
                land(filling, result, outcome.as_deref());
                // With the file, if it was the last one that had it.
                behind.underway.fetch_sub(1, Release);
                behind.ended.raise();
            };
            batch.push(Transfer::read(filling.offset(), filling, done).with_cancel(&cancel));
        }
        if !batch.is_empty() {
            store.start(batch);
        }
    }

    /// The file is dropped: gives up what goes on behind it, and waits until the store has let go of it, mostly at once. Others
    /// may want the store then.
    pub(super) fn end_behind(&self) {
        let Some(behind) = self.behind.as_ref().filter(|behind| !behind.is_idle()) else { return };
        behind.cancel.cancel();
        let deadline = Instant::now() + MOST_WAIT;
        loop {
            let seen = behind.ended.count();
            let rest = deadline.saturating_duration_since(Instant::now());
            if behind.is_idle() || rest.is_zero() {
                return;
            }
            behind.ended.wait(seen, Some(rest));
        }
    }
}

/// Ends a read. Its flight ends, and waiting threads go on, once all is recorded.
fn land(mut filling: Filling, result: io::Result<()>, outcome: Option<&Outcome>) {
    let entered = result.map_err(failed(DOING)).and_then(|()| filling.enter());
    if filling.is_ahead() {
        Behind::note_ahead(&filling, matches!(entered, Ok(true)));
    }
    if let (Err(error), Some(outcome)) = (entered, outcome) {
        outcome.set(error);
    }
    drop(filling);
}
