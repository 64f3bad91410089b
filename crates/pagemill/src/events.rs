//! Forwards the events of the memory manager to the crate `tracing`.
//!
//! The memory manager records events while it holds locks, and a subscriber may do anything. So a thread reads the
//! recorded events from time to time, and passes them to the subscriber.

use pagemill_core::trace::{self, Recorded};
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tracing::Level;

/// A thread that forwards the events of the memory manager to `tracing`. Dropping the value forwards the events that
/// are left, and ends the thread.
///
/// Example: [`Pagemill::forward_events`](crate::Pagemill::forward_events).
#[derive(Debug)]
#[must_use = "dropping the value ends the thread"]
pub struct EventForwarder {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl EventForwarder {
    pub(crate) fn start(interval: Duration) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread =
            thread::Builder::new().name("pagemill-events".into()).spawn(move || forward(&stopped, interval))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for EventForwarder {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the subscriber has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// Forwards events until the sender of `stopped` is dropped.
fn forward(stopped: &Receiver<()>, interval: Duration) {
    let mut last = None;
    loop {
        let has_ended = stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout);
        forward_events_after(&mut last);
        if has_ended {
            return;
        }
    }
}

/// Forwards the events that follow the one with the number `last`, and updates `last`.
fn forward_events_after(last: &mut Option<u64>) {
    for event in trace::own_events() {
        let expected = last.map_or(event.sequence, |last| last + 1);
        if event.sequence < expected {
            continue;
        }
        if event.sequence > expected {
            let lost = event.sequence - expected;
            tracing::warn!(target: "pagemill", lost, "events were overwritten before they were forwarded");
        }
        *last = Some(event.sequence);
        emit(&event);
    }
}

/// Passes an event to `tracing`. The fields of an event of `tracing` are fixed, so all numbers of all events are fields;
/// those that the event does not have are absent.
macro_rules! fields {
    ($($field:ident),*) => {
        /// The fields of all events, without `event`, `sequence` and `monotonic_ns`.
        #[cfg(test)]
        const FIELDS: &[&str] = &[$(stringify!($field)),*];

        fn emit(event: &Recorded) {
            let number = |name: &str| event.numbers.iter().find(|(found, _)| *found == name).map(|(_, number)| *number);
            let (name, sequence, monotonic_ns) = (event.event, event.sequence, event.time_ns);
            let is_warning = ["refused", "slab_behind_failed"].contains(&name);
            if is_warning {
                tracing::event!(target: "pagemill", Level::WARN, event = name, sequence, monotonic_ns,
                    $($field = number(stringify!($field))),*);
            } else {
                tracing::event!(target: "pagemill", Level::DEBUG, event = name, sequence, monotonic_ns,
                    $($field = number(stringify!($field))),*);
            }
        }
    };
}

fields!(
    addr,
    block,
    cache,
    dirty_bytes,
    emptied_slabs,
    file,
    freed_bytes,
    generation,
    given_bytes,
    objects,
    offered_bytes,
    order,
    page_index,
    pid,
    purged_bytes,
    resident_bytes,
    room_bytes,
    signs,
    slabs_lost,
    taken_bytes,
    time_ns,
    used_bytes,
    waited_us,
    wanted_bytes
);

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Each number of each event must be a field, and each field a number of an event.
    #[test]
    fn each_number_is_a_field() {
        let names: BTreeSet<&str> = trace::number_names().collect();
        assert_eq!(names, FIELDS.iter().copied().collect());
    }
}
