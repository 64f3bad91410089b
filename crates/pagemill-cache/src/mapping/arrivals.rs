//! Pages on their way to a queue from stores that are no files of the system: these end their reads on whatever thread they like.

use super::fill::Filling;
use pagemill_core::sync::Guarded;
use pagemill_store::ring::RingWaker;
use pagemill_store::{Cancel, Store, Transfer};
use std::io;
use std::sync::Arc;

/// What came of a read.
type Arrived = (Filling, io::Result<()>);

/// What one queue has asked such stores for. What is under way when it goes is given up, and goes when the store lets go of it.
pub(super) struct Arrivals {
    hall: Arc<Hall>,
    cancel: Cancel,
    underway: usize,
}

/// Where stores leave what they bring.
struct Hall {
    /// `None`: the queue is gone.
    arrived: Guarded<Option<Vec<Arrived>>>,
    bell: RingWaker,
}

impl Arrivals {
    /// The owner of the bell checks for arrivals.
    pub fn new(bell: RingWaker) -> Self {
        let hall = Hall { arrived: Guarded::new(Some(Vec::new())), bell };
        Self { hall: Arc::new(hall), cancel: Cancel::new(), underway: 0 }
    }

    /// Has a store read what it has of a folio.
    pub fn start(&mut self, store: &dyn Store, mut filling: Filling) {
        filling.prepare();
        let hall = self.hall.clone();
        let transfer = Transfer::read(filling.offset(), filling, move |result, filling| hall.leave(filling, result));
        self.underway += 1;
        store.start(vec![transfer.with_cancel(&self.cancel)]);
    }

    /// Reads that were not taken.
    pub fn len(&self) -> usize {
        self.underway
    }

    /// All that has arrived since the last time.
    pub fn take(&mut self) -> Vec<Arrived> {
        let arrived = self.hall.arrived.with(|arrived| arrived.as_mut().map(std::mem::take)).unwrap_or_default();
        self.underway -= arrived.len();
        arrived
    }
}

impl Hall {
    fn leave(&self, filling: Filling, result: io::Result<()>) {
        let mut arrival = Some((filling, result));
        self.arrived.with(|arrived| {
            if let Some(arrived) = arrived {
                arrived.extend(arrival.take());
            }
        });
        // If the queue is gone, it is dropped here, and not under the lock.
        if arrival.is_none() {
            self.bell.wake();
        }
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.cancel.cancel();
        drop(self.hall.arrived.with(Option::take));
    }
}
