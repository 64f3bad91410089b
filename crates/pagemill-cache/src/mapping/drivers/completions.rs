//! The completion queue of a [`Queue`](crate::mapping::Queue) for stores that are no files of the system. Such stores
//! complete reads on threads of their own.

use crate::mapping::request::Unpublished;
use pagemill_core::sync::Guarded;
use pagemill_store::ring::RingWaker;
use pagemill_store::{Cancel, Store, Transfer};
use std::io;
use std::sync::Arc;

/// A completed read: the folio, and the store's result.
type Completed = (Unpublished, io::Result<()>);

/// The reads that one queue has submitted to such stores. Dropping it cancels the reads in flight; the store's thread
/// then drops their folios.
pub(crate) struct Completions {
    shared: Arc<Shared>,
    cancel: Cancel,
    /// Number of reads that were submitted and not taken.
    pub in_flight: usize,
}

/// The part that the stores' threads use.
struct Shared {
    /// Completed reads that the queue has not taken yet. `None` once the queue is dropped.
    completed: Guarded<Option<Vec<Completed>>>,
    waker: RingWaker,
}

impl Completions {
    /// Creates a completion queue. Each completion calls `waker`.
    pub fn new(waker: RingWaker) -> Self {
        let shared = Shared { completed: Guarded::new(Some(Vec::new())), waker };
        Self { shared: Arc::new(shared), cancel: Cancel::new(), in_flight: 0 }
    }

    /// Submits the read of a folio to a store.
    pub fn submit(&mut self, store: &dyn Store, mut folio: Unpublished) {
        folio.prepare();
        let shared = self.shared.clone();
        let transfer = Transfer::read(folio.offset(), folio, move |result, folio| shared.complete(folio, result));
        self.in_flight += 1;
        store.start(vec![transfer.with_cancel(&self.cancel)]);
    }

    /// Takes all reads that have completed since the last call.
    pub fn take(&mut self) -> Vec<Completed> {
        let completed = self.shared.completed.with(|completed| completed.as_mut().map(std::mem::take));
        let completed = completed.unwrap_or_default();
        self.in_flight -= completed.len();
        completed
    }
}

impl Shared {
    fn complete(&self, folio: Unpublished, result: io::Result<()>) {
        let mut read = Some((folio, result));
        self.completed.with(|completed| {
            if let Some(completed) = completed {
                completed.extend(read.take());
            }
        });
        // If the queue was dropped, the folio is dropped here, outside of the lock.
        if read.is_none() {
            self.waker.wake();
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        self.cancel.cancel();
        drop(self.shared.completed.with(Option::take));
    }
}
