//! Watches: events of changes, in queues of bounded length.

use crate::inode::Ino;
use pagemill_core::sync::{EventCount, Guarded, Relaxed};
use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// What has changed.
///
/// Example: [`Watch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A name was created: by a new file, a link, or a rename.
    Created,
    /// A name was removed, by an unlink or a rename.
    Removed,
    /// Data were written, or the length was changed.
    Modified,
    /// Attributes were changed.
    Attributes,
    /// The queue was full; the events since then are lost.
    Overflow,
}

/// A change.
///
/// Example: [`Watch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub kind: EventKind,
    /// The directory whose name was created or removed, or the inode that was changed; 0 for an overflow.
    pub ino: Ino,
    /// The name that was created or removed; else empty.
    pub name: Vec<u8>,
}

struct Queue {
    /// The inode that is watched; `None` for all.
    of: Option<Ino>,
    limit: usize,
    events: Guarded<VecDeque<Event>>,
    added: EventCount,
}

/// A queue of the changes of one inode, or of all. Dropping it ends the watch.
///
/// ```
/// use pagemill::ramfs::{EventKind, RamFs};
///
/// let fs = RamFs::new("spool")?;
/// fs.create_dir("/jobs")?;
/// let watch = fs.watch("/jobs", 100)?;
/// fs.write("/jobs/first", b"work")?;
/// let event = watch.next(std::time::Duration::from_secs(1)).expect("an event");
/// assert_eq!((event.kind, event.name.as_slice()), (EventKind::Created, &b"first"[..]));
/// # Ok::<(), pagemill::ramfs::Error>(())
/// ```
pub struct Watch(Arc<Queue>);

impl Watch {
    /// Returns the oldest event. Waits for one, at most for `timeout`.
    pub fn next(&self, timeout: Duration) -> Option<Event> {
        let deadline = std::time::Instant::now() + timeout;
        loop {
            let seen = self.0.added.count();
            let event = self.0.events.with(VecDeque::pop_front);
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            if event.is_some() || left.is_zero() {
                return event;
            }
            self.0.added.wait(seen, Some(left));
        }
    }

    /// Returns the oldest event, if there is one.
    pub fn try_next(&self) -> Option<Event> {
        self.0.events.with(VecDeque::pop_front)
    }
}

/// The watches of a file system.
#[derive(Default)]
pub(crate) struct Watches {
    /// Number of watches, perhaps with some that have ended.
    count: AtomicUsize,
    queues: Guarded<Vec<Weak<Queue>>>,
}

impl Watches {
    /// Begins a watch with a queue of `limit` events, at least one.
    pub fn add(&self, of: Option<Ino>, limit: usize) -> Watch {
        let events = Guarded::default();
        let queue = Arc::new(Queue { of, limit: limit.max(1), events, added: EventCount::default() });
        self.queues.with(|queues| {
            queues.retain(|queue| queue.strong_count() > 0);
            queues.push(Arc::downgrade(&queue));
            self.count.store(queues.len(), Relaxed);
        });
        Watch(queue)
    }

    /// Adds an event to the queues of the watches of this inode. Costs one load if nothing is watched.
    #[inline]
    pub fn notify(&self, kind: EventKind, ino: Ino, name: &[u8]) {
        if self.count.load(Relaxed) > 0 {
            self.notify_slowly(kind, ino, name);
        }
    }

    #[cold]
    fn notify_slowly(&self, kind: EventKind, ino: Ino, name: &[u8]) {
        let queues: Vec<Arc<Queue>> = self.queues.with(|queues| {
            queues.retain(|queue| queue.strong_count() > 0);
            self.count.store(queues.len(), Relaxed);
            queues.iter().filter_map(Weak::upgrade).collect()
        });
        for queue in queues.iter().filter(|queue| queue.of.is_none_or(|of| of == ino)) {
            let event = Event { kind, ino, name: name.to_vec() };
            queue.events.with(|events| {
                if events.len() < queue.limit {
                    let repeats = kind == EventKind::Modified && events.back() == Some(&event);
                    if !repeats {
                        events.push_back(event);
                    }
                } else if events.back().is_some_and(|last| last.kind != EventKind::Overflow) {
                    events.push_back(Event { kind: EventKind::Overflow, ino: 0, name: Vec::new() });
                }
            });
            queue.added.raise();
        }
    }
}
