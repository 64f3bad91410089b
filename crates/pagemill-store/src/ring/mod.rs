//! Concurrent file transfers of one thread, by an io_uring, or by threads where the kernel refuses a ring.
//!
//! ```text
//!   attach(store) -> FileId       register(memory) -> RegionId       optional, for less CPU time per transfer
//!   read(file, offset, buffer) -> RequestId ... write ... submit        queued, then started together
//!   wait(least, timeout)                                             also starts; takes completions
//!   next() -> Done(id, buffer, result) | Late(id)                    each transfer ends once
//!     backend   io_uring, or `threads`; both report bytes or an error number
//!     regions   memory registered with the kernel
//! ```
//!
//! A transfer keeps the contract of [`super::Store`]: all of its bytes are transferred or it fails, and reads past the
//! end of the file return zeros. The ring may divide a transfer into several *pieces*: one request to the kernel each.
//! The ring owns the buffer until the kernel has finished with it. A transfer that takes longer than
//! [`Settings::timeout`] is reported ([`Event::Late`]) and cancelled; the ring returns its buffer when the device
//! releases the memory. Dropping a ring cancels all transfers and waits for them. Buffers that a device does not
//! release in time are never freed.
//!
//! Uses `uring` and `file`. Locks: only those of `regions` and `threads`. In a fork child the parent's rings do
//! nothing.
#![allow(unsafe_code)] // queues transfers of memory that it owns

mod backend;
pub(super) mod regions;
mod tables;
#[cfg(all(test, not(shuttle)))]
mod tests;
mod threads;

pub use regions::RegionId;
pub use tables::FileId;

use super::buffer::{self, Buffer};
use super::errno::{self, EBADF, ECANCELED, ETIMEDOUT};
use super::file::{FileHandle, IoMode, Piece, TransferProgress, TransferStep};
use super::transfer::Direction;
use crate::uring::{Completion, Target, Transfer, generation};
use backend::{Backend, WakeHandle};
use pagemill_core::stats::{self, Counter};
use pagemill_sys::clock::{coarse_ns, fine_ns};
use regions::Regions;
use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use tables::MEMORY_TABLE_LEN;

/// Maximum of [`Settings::depth`]; a ring uses this value in place of larger ones.
const MAX_DEPTH: u32 = 4096;

/// The kind of backend that does the transfers of a ring.
///
/// Example: [`Ring`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring, or threads where the kernel refuses a ring or the environment has `PAGEMILL_IO=threads`.
    #[default]
    Best,
    /// Threads, even if io_uring is available.
    Threads,
}

/// Settings of a ring.
///
/// Example: [`Ring`].
#[derive(Clone, Debug)]
pub struct Settings {
    /// Maximum number of transfers for which the caller has not taken [`Event::Done`], in flight or ended: 1 to 4096.
    pub depth: u32,
    /// Time limit of a transfer. A transfer that takes longer is reported ([`Event::Late`]) and cancelled.
    pub timeout: Duration,
    pub engine: Engine,
}

impl Default for Settings {
    fn default() -> Self {
        Self { depth: 64, timeout: Duration::from_secs(30), engine: Engine::Best }
    }
}

/// Id of a transfer of a ring. An id repeats after 2^31 transfers at the earliest.
///
/// Example: [`Ring`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(u64);

impl RequestId {
    /// Returns the index of the transfer's slot.
    fn slot_index(self) -> usize {
        self.0 as u32 as usize
    }
}

/// The end of a transfer, or a report that the transfer is late.
///
/// Example: [`Ring`].
#[derive(Debug)]
pub enum Event<B> {
    /// A transfer has ended, and the caller owns its buffer again. All bytes were transferred, or `result` is an error:
    /// `ECANCELED` after a cancel, `ETIMEDOUT` if the ring cancelled it for exceeding the time limit.
    Done { id: RequestId, buffer: B, result: io::Result<()> },
    /// A transfer exceeds the time limit and is being cancelled. [`Event::Done`] follows when the device releases the
    /// buffer, which may never happen.
    Late { id: RequestId },
}

/// A transfer in flight. The backend transfers one piece of it at a time.
struct InFlight<B> {
    buffer: B,
    file: FileId,
    direction: Direction,
    offset: u64,
    progress: TransferProgress,
    /// The piece that the backend transfers now.
    piece: Piece,
    /// Coarse time at which the transfer was queued.
    began_ns: u64,
    /// Whether the transfer was reported as late.
    is_late: bool,
    is_cancelled: bool,
}

/// A slot of the ring, which holds at most one in-flight transfer.
struct RequestSlot<B> {
    /// Number of transfers that this slot has held so far, modulo 2^31.
    use_count: u32,
    request: Option<InFlight<B>>,
}

impl<B> RequestSlot<B> {
    /// Returns the id of the slot's latest transfer. `at` is the index of the slot.
    fn id(&self, at: usize) -> RequestId {
        RequestId(u64::from(self.use_count) << u32::BITS | at as u64)
    }
}

/// In-flight transfers of one thread, each with its own buffer `B`.
///
/// # Invariants
///
/// 1. Every transfer with a piece in the backend is in a slot. Until that piece completes, the transfer's buffer is
///    neither moved out nor dropped, and its file is not detached.
/// 2. Every entry of the kernel's memory table refers to memory of a region in `regions`, which keeps the memory alive.
///
/// ```
/// use pagemill_store::ring::{Engine, Event, Ring, Settings};
/// use pagemill_store::{Aligned, FileStore};
/// use std::time::Duration;
///
/// # let path = std::env::temp_dir().join(format!("pagemill-doc-ring-{}", std::process::id()));
/// # std::fs::write(&path, vec![7; 8192]).unwrap();
/// let store = FileStore::open_read_only(&path)?;
/// let mut ring = Ring::new(&Settings { depth: 8, engine: Engine::Best, ..Settings::default() })?;
/// let file = ring.attach(&store)?;
/// let read = ring.read(file, 4096, Aligned::new(4096, 4096)).unwrap(); // queued
/// ring.wait(1, Duration::from_secs(60))?; // submits, then waits for one completion
/// let Some(Event::Done { buffer, result, .. }) = ring.next() else { panic!("{read:?} is late") };
/// result?;
/// assert_eq!(buffer[0], 7);
/// # std::fs::remove_file(&path).unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Ring<B: Buffer> {
    backend: ManuallyDrop<Backend>,
    slots: ManuallyDrop<Vec<RequestSlot<B>>>,
    /// Indexes of the slots without a transfer.
    free: Vec<u32>,
    /// Events that the caller has not taken.
    events: VecDeque<Event<B>>,
    /// Whether [`Event::Late`] was added to the events since they were last discarded.
    has_late: bool,
    /// The attached files. A [`FileId`] is an index into this vector.
    files: ManuallyDrop<Vec<Option<Arc<FileHandle>>>>,
    /// Number of dropped stores ([`DROPPED_STORES`](super::file::DROPPED_STORES)) at the last sweep after which no file of
    /// a dropped store was left.
    swept_stores: Option<u64>,
    /// Whether transfers may use the kernel's table of files.
    has_file_table: bool,
    regions: ManuallyDrop<Regions>,
    /// Whether the kernel has a table for registered memory; `None` before the first registration.
    has_memory_table: Option<bool>,
    timeout: Duration,
    /// Time of the last search for transfers over the time limit.
    last_late_search_ns: u64,
    /// Fork generation of the process that created the ring.
    generation: u32,
    /// Whether [`Ring::waker`] was called. If so, [`Ring::wait`] also waits while no transfer is in flight.
    has_waker: bool,
    counts: TransferCounts,
    /// Makes the ring `!Send`: only one thread may use it.
    not_send: PhantomData<*mut ()>,
}

/// Counts of transfers since the ring last added them to the statistics. The ring does so in batches, because all
/// threads share the cache lines of the statistics.
#[derive(Default)]
struct TransferCounts {
    read_bytes: u64,
    written_bytes: u64,
    writes: u64,
}

impl<B: Buffer> Ring<B> {
    /// Creates a ring for the calling thread.
    ///
    /// # Errors
    ///
    /// `EMFILE` or `ENOMEM` if neither io_uring nor threads are available.
    pub fn new(settings: &Settings) -> io::Result<Self> {
        let depth = settings.depth.clamp(1, MAX_DEPTH);
        let is_forced = std::env::var_os("PAGEMILL_IO").is_some_and(|engine| engine == "threads");
        let backend = match settings.engine {
            Engine::Best if !is_forced => Backend::kernel(depth).or_else(|_| {
                stats::add(Counter::RingsRefused, 1);
                Backend::threads()
            })?,
            _ => Backend::threads()?,
        };
        stats::add(Counter::Rings, 1);
        let slots = (0..depth).map(|_| RequestSlot { use_count: 0, request: None }).collect();
        Ok(Self {
            backend: ManuallyDrop::new(backend),
            slots: ManuallyDrop::new(slots),
            free: (0..depth).rev().collect(),
            events: VecDeque::new(),
            has_late: false,
            files: ManuallyDrop::new(Vec::new()),
            swept_stores: None,
            has_file_table: false,
            regions: ManuallyDrop::new(Regions::new(MEMORY_TABLE_LEN)),
            has_memory_table: None,
            timeout: settings.timeout,
            last_late_search_ns: 0,
            generation: generation()?,
            has_waker: false,
            counts: TransferCounts::default(),
            not_send: PhantomData,
        })
    }

    /// Returns whether io_uring does the transfers; false for threads.
    pub fn is_kernel(&self) -> bool {
        self.backend.is_kernel()
    }

    /// Returns whether this process created the ring.
    fn is_ours(&self) -> bool {
        generation().is_ok_and(|generation| generation == self.generation)
    }

    /// Returns the error `EBADF` in a fork child of the process that created the ring.
    fn check_process(&self) -> io::Result<()> {
        if self.is_ours() { Ok(()) } else { Err(errno::error(EBADF)) }
    }

    /// Returns the maximum number of transfers for which the caller has not taken [`Event::Done`], in flight or ended.
    pub fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of transfers that have not ended.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns whether the caller must take events before it can queue another transfer.
    pub fn is_full(&self) -> bool {
        self.events.len() >= self.free.len()
    }

    /// Queues a read of all of `buffer` from `offset` on.
    ///
    /// # Errors
    ///
    /// Returns the buffer if the ring is full ([`Ring::is_full`]). All other errors arrive as events of [`Ring::next`].
    ///
    /// # Panics
    ///
    /// If the file is not attached.
    pub fn read(&mut self, file: FileId, offset: u64, buffer: B) -> Result<RequestId, B> {
        self.start_transfer(Direction::Read, file, offset, buffer)
    }

    /// Queues a write of all of `buffer` at `offset`.
    ///
    /// # Errors
    ///
    /// As [`Ring::read`].
    ///
    /// # Panics
    ///
    /// As [`Ring::read`].
    pub fn write(&mut self, file: FileId, offset: u64, buffer: B) -> Result<RequestId, B> {
        self.start_transfer(Direction::Write, file, offset, buffer)
    }

    fn start_transfer(&mut self, direction: Direction, file: FileId, offset: u64, buffer: B) -> Result<RequestId, B> {
        let Some(handle) = self.files.get(file.0 as usize).and_then(Option::as_ref) else {
            panic!("no file is attached as {file:?}");
        };
        if self.is_full() {
            return Err(buffer);
        }
        // Before a slot is taken, because the buffer is code of the caller, which may panic.
        let len_bytes = buffer.len_bytes();
        let allowed = self.check_process().and_then(|()| match direction {
            Direction::Read => Ok(()),
            Direction::Write => handle.check_write(offset, len_bytes),
        });
        let Some(at) = self.free.pop() else { return Err(buffer) };
        let slot = &mut self.slots[at as usize];
        debug_assert!(slot.request.is_none(), "a free slot has no request");
        slot.use_count = slot.use_count.wrapping_add(1) & (u32::MAX >> 1);
        let request = InFlight {
            buffer,
            file,
            direction,
            offset,
            progress: TransferProgress::default(),
            piece: Piece { mode: IoMode::Buffered, len_bytes: 0 },
            began_ns: coarse_ns(),
            is_late: false,
            is_cancelled: false,
        };
        slot.request = Some(request);
        let id = slot.id(at as usize);
        match allowed {
            Ok(()) if len_bytes > 0 => self.queue_next_piece(at),
            result => self.end_transfer(at, result),
        }
        Ok(id)
    }

    /// Queues the next piece of the transfer in slot `at`. The backend must have no other piece of that transfer.
    fn queue_next_piece(&mut self, at: u32) {
        let slot = &mut self.slots[at as usize];
        let Some(request) = &mut slot.request else { return };
        let Some(handle) = &self.files[request.file.0 as usize] else { return };
        let (addr, len_bytes) = (request.buffer.addr().as_ptr() as usize, request.buffer.len_bytes());
        let done = request.progress.done_bytes;
        debug_assert!(done < len_bytes, "bytes are left to transfer");
        request.piece = request.progress.next_piece(handle, addr, request.offset, len_bytes);
        debug_assert!(request.piece.len_bytes > 0 && done + request.piece.len_bytes <= len_bytes);
        let table_index = request.file.table_index(request.piece.mode).filter(|_| self.has_file_table);
        let target =
            table_index.map_or_else(|| Target::Descriptor(handle.descriptor(request.piece.mode)), Target::Registered);
        let transfer = Transfer {
            target,
            is_write: request.direction == Direction::Write,
            addr: addr + done,
            len_bytes: request.piece.len_bytes as u32,
            offset: request.offset + done as u64,
            registered: self.regions.find(addr + done, request.piece.len_bytes),
        };
        let token = slot.id(at as usize).0;
        // SAFETY: the slot keeps the buffer, and `files` the file, until the completion has arrived (invariant 1). The
        // piece lies inside of the buffer, which no other code uses meanwhile (trait's promise). The table entry
        // belongs to a region that contains the piece.
        if let Err(error) = unsafe { self.backend.queue(&transfer, token) } {
            self.end_transfer(at, Err(error));
        }
    }

    /// Ends the transfer in slot `at` and queues its [`Event::Done`]. The backend must have no piece of that transfer.
    fn end_transfer(&mut self, at: u32, mut result: io::Result<()>) {
        let slot = &mut self.slots[at as usize];
        let id = slot.id(at as usize);
        let Some(request) = slot.request.take() else { return };
        debug_assert!(request.progress.done_bytes <= request.buffer.len_bytes());
        self.free.push(at);
        debug_assert!(self.free.len() <= self.slots.len(), "a slot is freed once");
        let len_bytes = request.buffer.len_bytes() as u64;
        match (&result, request.direction) {
            (Ok(()), Direction::Read) => {
                buffer::zero_from(&request.buffer, request.progress.done_bytes);
                self.counts.read_bytes += len_bytes;
            }
            (Ok(()), Direction::Write) => {
                self.counts.written_bytes += len_bytes;
                self.counts.writes += 1;
            }
            (Err(error), _) if errno::is(error, ECANCELED) => {
                stats::add(Counter::TransfersCancelled, 1);
                if request.is_late {
                    result = Err(errno::error(ETIMEDOUT));
                }
            }
            (Err(_), _) => {}
        }
        self.events.push_back(Event::Done { id, buffer: request.buffer, result });
    }

    /// Cancels a transfer that has not ended. The transfer still ends with an [`Event::Done`].
    pub fn cancel(&mut self, id: RequestId) {
        let is_ours = self.is_ours();
        let request = Self::find(&mut self.slots, id).filter(|request| is_ours && !request.is_cancelled);
        let Some(request) = request else { return };
        request.is_cancelled = true;
        // If the cancel fails, the transfer ends normally or is reported as late.
        let _ = self.backend.cancel(id.0);
    }

    /// Cancels all in-flight transfers for whose buffer `matches` returns true.
    pub(crate) fn cancel_where(&mut self, matches: impl Fn(&B) -> bool) {
        let matching =
            self.in_flight_requests().filter(|(_, request)| !request.is_cancelled && matches(&request.buffer));
        let ids: Vec<RequestId> = matching.map(|(id, _)| id).collect();
        ids.into_iter().for_each(|id| self.cancel(id));
    }

    /// Returns whether `matches` returns true for the buffer of any in-flight transfer.
    ///
    /// # Safety
    ///
    /// `matches` accesses no byte that the device may read or write.
    pub unsafe fn any_in_flight(&self, matches: impl Fn(&B) -> bool) -> bool {
        self.in_flight_requests().any(|(_, request)| matches(&request.buffer))
    }

    /// Returns the buffer of an in-flight transfer; `None` if the transfer has ended. The device may change the
    /// buffer's bytes at any time.
    pub(crate) fn buffer(&self, id: RequestId) -> Option<&B> {
        let slot = self.slots.get(id.slot_index()).filter(|slot| slot.id(id.slot_index()) == id)?;
        slot.request.as_ref().map(|request| &request.buffer)
    }

    /// Returns the in-flight transfer with this id.
    fn find(slots: &mut [RequestSlot<B>], id: RequestId) -> Option<&mut InFlight<B>> {
        let slot = slots.get_mut(id.slot_index()).filter(|slot| slot.id(id.slot_index()) == id)?;
        slot.request.as_mut()
    }

    fn in_flight_requests(&self) -> impl Iterator<Item = (RequestId, &InFlight<B>)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(at, slot)| slot.request.as_ref().map(|request| (slot.id(at), request)))
    }

    /// Returns the number of requests, transfers and cancels, that are queued but not started.
    pub fn queued(&mut self) -> usize {
        if self.is_ours() { self.backend.queued() } else { 0 }
    }

    /// Starts the queued transfers without waiting. [`Ring::wait`] starts them, too.
    ///
    /// # Errors
    ///
    /// `EBADF` in a fork child; errors of `io_uring_enter`.
    pub fn submit(&mut self) -> io::Result<()> {
        self.check_process()?;
        self.backend.submit()
    }

    /// Starts the queued transfers and waits until the caller can take at least `least` events, at most for `timeout`.
    /// Returns the number of events. Returns earlier when no transfer is in flight any more, or when another thread
    /// wakes the ring ([`Ring::waker`]). A ring with a waker also waits while nothing is in flight. With `least` 0 the
    /// call does not wait.
    ///
    /// # Errors
    ///
    /// See [`Ring::submit`].
    pub fn wait(&mut self, least: usize, timeout: Duration) -> io::Result<usize> {
        self.check_process()?;
        if least == 0 {
            self.backend.wait(0, Duration::ZERO)?;
        }
        let mut end_ns = None;
        loop {
            while let Some(done) = self.backend.pop() {
                self.handle_completion(done);
            }
            self.cancel_late_transfers();
            let missing = least.saturating_sub(self.events.len());
            let can_come = self.in_flight() > 0 || (self.has_waker && self.events.is_empty());
            let rest = end_ns.map_or(timeout, |end_ns: u64| Duration::from_nanos(end_ns.saturating_sub(fine_ns())));
            let is_over = end_ns.is_some() && rest.is_zero();
            if missing == 0 || !can_come || is_over || (self.has_waker && self.backend.take_wake()) {
                self.backend.submit()?;
                self.flush_counts();
                return Ok(self.events.len());
            }
            let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
            end_ns.get_or_insert_with(|| fine_ns().saturating_add(timeout_ns));
            // The wait is cut into steps, to search for late transfers between them.
            let step = if self.in_flight() > 0 { rest.min(self.timeout / 4) } else { rest };
            let least = missing.min(self.in_flight()).max(1);
            self.backend.wait(least, step)?;
        }
    }

    /// Removes and returns the next event; `None` if no event has arrived.
    #[allow(clippy::should_implement_trait)] // an iterator would borrow the ring
    pub fn next(&mut self) -> Option<Event<B>> {
        self.events.pop_front()
    }

    /// Returns the number of events that [`Ring::next`] can return.
    pub fn ready(&self) -> usize {
        self.events.len()
    }

    /// Removes the reports of late transfers ([`Event::Late`]).
    pub fn discard_late(&mut self) {
        if std::mem::take(&mut self.has_late) {
            self.events.retain(|event| matches!(event, Event::Done { .. }));
        }
    }

    /// Returns the buffers of the transfers whose [`Event::Done`] was not taken yet.
    pub fn completed_buffers(&self) -> impl Iterator<Item = &B> {
        self.events.iter().filter_map(|event| match event {
            Event::Done { buffer, .. } => Some(buffer),
            Event::Late { .. } => None,
        })
    }

    /// Handles the completion of a piece.
    fn handle_completion(&mut self, done: Completion) {
        let (id, at) = (RequestId(done.token), done.token as u32);
        let Some(request) = Self::find(&mut self.slots, id) else { return };
        let Some(handle) = &self.files[request.file.0 as usize] else { return };
        let result = usize::try_from(done.result).map_err(|_| errno::error(-done.result));
        let step = request.progress.record(handle, request.direction, request.piece, result);
        let is_whole = request.progress.done_bytes == request.buffer.len_bytes();
        match step {
            Ok(TransferStep::More) if !is_whole && request.is_cancelled => {
                self.end_transfer(at, Err(errno::error(ECANCELED)))
            }
            Ok(TransferStep::More) if !is_whole => self.queue_next_piece(at),
            Ok(_) => self.end_transfer(at, Ok(())),
            Err(error) => self.end_transfer(at, Err(error)),
        }
    }

    /// Reports and cancels transfers that exceed the time limit.
    fn cancel_late_transfers(&mut self) {
        let (now_ns, timeout_ns) = (coarse_ns(), self.timeout.as_nanos() as u64);
        if self.in_flight() == 0 || now_ns.saturating_sub(self.last_late_search_ns) < timeout_ns / 8 {
            return;
        }
        self.last_late_search_ns = now_ns;
        let is_late = |request: &InFlight<B>| !request.is_late && now_ns.saturating_sub(request.began_ns) >= timeout_ns;
        let late = self.in_flight_requests().filter(|(_, request)| is_late(request));
        let ids: Vec<RequestId> = late.map(|(id, _)| id).collect();
        debug_assert!(ids.len() <= self.in_flight());
        for id in ids {
            self.cancel(id);
            if let Some(request) = Self::find(&mut self.slots, id) {
                request.is_late = true;
            }
            stats::add(Counter::TransfersLate, 1);
            self.events.push_back(Event::Late { id });
            self.has_late = true;
        }
    }

    /// Adds the ring's counts of transfers to the statistics of the process, and sets the counts to zero.
    fn flush_counts(&mut self) {
        let TransferCounts { read_bytes, written_bytes, writes } = std::mem::take(&mut self.counts);
        if read_bytes > 0 {
            stats::add(Counter::StoreRead, read_bytes);
        }
        if written_bytes > 0 {
            stats::add(Counter::StoreWritten, written_bytes);
            stats::add(Counter::StoreWrites, writes);
        }
    }

    /// Returns a waker with which other threads end a wait of this ring.
    ///
    /// # Errors
    ///
    /// `EMFILE`.
    pub fn waker(&mut self) -> io::Result<RingWaker> {
        self.check_process()?;
        let waker = self.backend.waker()?;
        self.has_waker = true;
        Ok(RingWaker(waker))
    }

    /// Returns a descriptor that becomes readable when there are events. An event loop can poll the descriptor and then
    /// call [`Ring::wait`] with `least` 0. After this call each completion costs a little more.
    ///
    /// # Errors
    ///
    /// `EMFILE`.
    pub fn watch(&mut self) -> io::Result<BorrowedFd<'_>> {
        self.check_process()?;
        self.backend.watch()
    }

    /// Cancels all transfers, and waits until they end or the time limit has passed. Returns whether all of them have
    /// ended.
    fn cancel_and_wait(&mut self) -> bool {
        self.cancel_where(|_| true);
        let end_ns = coarse_ns().saturating_add(self.timeout.as_nanos() as u64);
        self.has_waker = false;
        while self.in_flight() > 0 {
            self.events.clear();
            let rest = Duration::from_nanos(end_ns.saturating_sub(coarse_ns()));
            if rest.is_zero() || self.wait(self.in_flight(), rest).is_err() {
                return false;
            }
        }
        self.flush_counts();
        self.backend.stop_waker(self.timeout)
    }
}

/// A waker of a ring. Any thread can use it to end a call of [`Ring::wait`].
///
/// Example: [`Ring`].
#[derive(Clone)]
pub struct RingWaker(Arc<WakeHandle>);

impl RingWaker {
    /// Makes the ring's thread return from its current call of [`Ring::wait`], or else from its next one. The
    /// descriptor of [`Ring::watch`] becomes readable.
    pub fn wake(&self) {
        self.0.wake();
    }

    /// Returns whether this waker and `other` wake the same ring.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<B: Buffer> Drop for Ring<B> {
    fn drop(&mut self) {
        if !self.is_ours() {
            // The transfers belong to the parent, so this child only closes its descriptor.
            std::mem::forget(std::mem::take(&mut self.events));
            // SAFETY: the field is not used again.
            unsafe { ManuallyDrop::drop(&mut self.backend) };
            return;
        }
        stats::sub(Counter::Rings, 1);
        let have_ended = self.cancel_and_wait();
        // Buffers of ended transfers are freed in any case.
        self.events.clear();
        if !have_ended {
            // A device may still write to the remaining buffers, so they are never freed.
            stats::add(Counter::TransfersStuck, self.in_flight() as u64);
            return;
        }
        // The tables are cleared here. Otherwise the kernel would release their contents some time after the descriptor
        // is closed.
        for at in 0..self.files.len() {
            let _ = self.detach(FileId(at as u32));
        }
        while let Some(id) = self.regions.last() {
            if self.unregister(id).is_err() {
                break;
            }
        }
        // SAFETY: the fields are not used again, and no transfer is in flight. Memory that is still registered stays
        // alive in `regions`, which is not dropped then.
        unsafe {
            ManuallyDrop::drop(&mut self.backend);
            ManuallyDrop::drop(&mut self.slots);
            ManuallyDrop::drop(&mut self.files);
        }
        if self.regions.len() == 0 {
            // SAFETY: the field is not used again.
            unsafe { ManuallyDrop::drop(&mut self.regions) };
        }
    }
}
