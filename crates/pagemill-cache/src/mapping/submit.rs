//! Asynchronous reads of a file: a thread submits requests to the store, and the store's thread completes them.
//!
//! ```text
//!   submitting thread                        the store's thread
//!     Unpublished::reserve: request, folio
//!     Store::start ----------------------->  transfer
//!     waits: a thread sleeps,                complete: publishes the folio, completes the request
//!     a task registers its waker  <--------  wakes threads and tasks
//! ```
//!
//! A store may complete a transfer before [`pagemill_store::Store::start`] returns, so the caller holds no lock.

use super::File;
use super::drivers::readahead::Reading;
use super::inflight::{Kind, RequestId};
use super::request::{Purpose, READING, Reserved, Unpublished};
use super::writeback::sync::failed;
use pagemill_core::error::{Error, Result};
use pagemill_core::stats::{self, Counter};
use pagemill_core::sync::{Acquire, AtomicU32, EventCount, Guarded, Release};
use pagemill_store::{Cancel, Transfer};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time for which the drop of a file waits until its cancelled reads have completed. Later completions do no
/// harm.
const MAX_CANCEL_WAIT: Duration = Duration::from_secs(1);

/// The asynchronous reads of a file, and its readahead state.
#[derive(Default)]
pub(crate) struct AsyncReads {
    /// Number of submitted reads that have not completed.
    in_flight: AtomicU32,
    completed: EventCount,
    /// Cancels the submitted reads when the file is dropped.
    cancel: Cancel,
    pub reading: Reading,
}

impl AsyncReads {
    fn is_idle(&self) -> bool {
        self.in_flight.load(Acquire) == 0
    }
}

/// The error of a read, for the thread that submitted it.
pub(crate) type ReadError = Guarded<Option<Error>>;

impl File {
    /// Submits a read that begins with the first of `pages` and includes as many of the others as one transfer can
    /// read. If another call reads that page already, submits nothing.
    ///
    /// Returns the request that reads the first page. If this call has submitted the request, also returns the place in
    /// which its error will be stored. Returns `None` if the page is in memory; until the caller uses it, the page can
    /// be truncated or evicted.
    pub(crate) fn submit(
        self: &Arc<Self>,
        pages: Range<u64>,
        purpose: Purpose,
    ) -> Result<Option<(RequestId, Option<Arc<ReadError>>)>> {
        match Unpublished::reserve(self.clone(), pages, Kind::Uncancellable, purpose)? {
            Reserved::Present => Ok(None),
            Reserved::InFlight(other) => Ok(Some((other.id, None))),
            Reserved::New(folio) => {
                let (id, error) = (folio.request_id(), Arc::new(ReadError::default()));
                self.submit_all(vec![(folio, Some(error.clone()))]);
                Ok(Some((id, Some(error))))
            }
        }
    }

    /// Submits reads to the store, which completes them. An error is stored in the read's [`ReadError`].
    pub(crate) fn submit_all(&self, folios: Vec<(Unpublished, Option<Arc<ReadError>>)>) {
        let (Some(store), Some(reads)) = (&self.store, &self.reads) else { return };
        let mut batch = Vec::with_capacity(folios.len());
        for (mut folio, error) in folios {
            if !folio.needs_store() {
                complete(folio, Ok(()), error.as_deref());
                continue;
            }
            folio.prepare();
            let reads = reads.clone();
            reads.in_flight.fetch_add(1, Release);
            let cancel = reads.cancel.clone();
            let done = move |result, folio| {
                // May drop the last reference to the file, but not `reads`.
                complete(folio, result, error.as_deref());
                reads.in_flight.fetch_sub(1, Release);
                reads.completed.raise();
            };
            batch.push(Transfer::read(folio.offset(), folio, done).with_cancel(&cancel));
        }
        if !batch.is_empty() {
            store.start(batch);
        }
    }

    /// Called when the last handle of the file is dropped: cancels the file's asynchronous reads, and waits for their
    /// completion. The caller may reopen the store at once.
    pub(crate) fn cancel_reads(&self) {
        let Some(reads) = self.reads.as_ref().filter(|reads| !reads.is_idle()) else { return };
        reads.cancel.cancel();
        let deadline = Instant::now() + MAX_CANCEL_WAIT;
        loop {
            let seen = reads.completed.count();
            let rest = deadline.saturating_duration_since(Instant::now());
            if reads.is_idle() || rest.is_zero() {
                return;
            }
            reads.completed.wait(seen, Some(rest));
        }
    }
}

/// Completes a read: publishes the folio, records the result, and then completes the request, which wakes waiting
/// threads.
fn complete(mut folio: Unpublished, result: io::Result<()>, error: Option<&ReadError>) {
    let published = result.map_err(failed(READING)).and_then(|()| folio.publish());
    if folio.is_readahead() && matches!(published, Ok(true)) {
        stats::add(Counter::ReadAhead, folio.total_bytes() as u64);
    }
    if let (Err(cause), Some(error)) = (published, error) {
        error.with(|place| *place = Some(cause));
    }
    drop(folio);
}
