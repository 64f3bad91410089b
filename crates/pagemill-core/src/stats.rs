//! Figures of this process: its counters and latest events, on one page that other processes can read.
//!
//! The page is private until [`publish`] moves the figures into a shared file mapping. `pagemill` commands can read the
//! file while the process runs and after it was killed. [`Figures`] is the layout, which [`VERSION`] identifies.
//! Commands validate all that they read, because other programs can write to the file. The module `counters` declares
//! the counters.
#![allow(unsafe_code)] // the shared page is reached through a pointer

mod counters;

pub(crate) use counters::MAX_COUNTERS;
pub use counters::{Counter, CounterKind, GIVEABLE, Row, TABLE, Unit};

use crate::trace::{self, EventRing};
use pagemill_sys::file::{self, Access, PublishedFile};
use pagemill_sys::futex::{self, Scope};
use pagemill_sys::{clock, process};
use std::ffi::CStr;
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::atomic::{
    AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};
use std::time::Duration;

/// Layout version of [`Figures`].
pub const VERSION: u32 = 3;

/// Whether sums and events are recorded. They are, except in the build without statistics that
/// `contrib/measure-statistics` compares with the usual one. That build only serves measurements: its sums are 0, so
/// tests that check them fail.
pub(crate) const RECORDS_SUMS_AND_EVENTS: bool = cfg!(not(pagemill_no_statistics));

/// First word of the page of figures. It identifies the file format.
const MAGIC: u64 = u64::from_le_bytes(*b"pagemill");

/// The page of figures: the process's identity, its counters and its latest events.
///
/// # Invariants
///
/// Every bit pattern is a valid value, because the page may be mapped from any file.
///
/// Example: [`Snapshot`], which copies the page.
#[repr(C)]
pub struct Figures {
    magic: AtomicU64,
    /// Version in the low half, process id in the high half.
    version_pid: AtomicU64,
    /// Start time of the process in clock ticks since boot. With the process id it identifies the process.
    start_ticks: AtomicU64,
    /// Process name, 15 bytes and a zero.
    name: [AtomicU8; 16],
    /// Addresses of the arena: the first, and one past the last. Both are 0 while there is no arena.
    arena: [AtomicU64; 2],
    /// Futex word on which the helper sleeps if the process is in no tree; incremented to wake it.
    wake: AtomicU32,
    /// Number of the latest request to this process. The process that makes a request stores it (`listing`).
    asked: AtomicU32,
    counters: [AtomicU64; MAX_COUNTERS],
    pub(crate) ring: EventRing,
}

impl Figures {
    /// Length of the file in bytes.
    pub const LEN: usize = size_of::<Self>().next_multiple_of(64 << 10);

    /// Returns a page of zeros.
    pub(crate) const fn new() -> Self {
        // SAFETY: every bit pattern is valid (type invariant).
        unsafe { std::mem::zeroed() }
    }

    /// Stores the process's identity and name on the page, and then the magic, which makes the page valid.
    fn write_header(&self, identity: process::Identity, name: [u8; 16]) {
        self.version_pid.store(u64::from(VERSION) | u64::from(identity.pid) << 32, Relaxed);
        self.start_ticks.store(identity.start_ticks, Relaxed);
        self.name.iter().zip(name).for_each(|(to, byte)| to.store(byte, Relaxed));
        self.magic.store(MAGIC, Release);
    }

    /// Wakes all threads that sleep on the page's `wake` word.
    fn wake_sleepers(&self) {
        self.wake.fetch_add(1, SeqCst);
        futex::wake(&self.wake, i32::MAX, Scope::Shared);
    }

    /// Returns the number of the latest request to the process of this page.
    pub fn latest_request(&self) -> u32 {
        self.asked.load(Relaxed)
    }

    /// Announces the request with this number to the process of this page, whose helper then answers all requests up to
    /// the number. Returns `false` if the number was announced before: then the helper may have looked for the
    /// request's file before the file existed.
    pub fn announce_request(&self, number: u32) -> bool {
        let before = self.asked.fetch_max(number, SeqCst);
        self.wake_sleepers();
        before < number
    }

    /// Copies the page's counters. Returns `None` if the page has another layout version than [`VERSION`].
    fn snapshot(&self) -> Option<Snapshot> {
        let version_pid = self.version_pid.load(Relaxed);
        if self.magic.load(Relaxed) != MAGIC || version_pid as u32 != VERSION {
            return None;
        }
        let mut name = self.name.each_ref().map(|byte| byte.load(Relaxed));
        name[15] = 0;
        let (pid, start_ticks) = ((version_pid >> 32) as u32, self.start_ticks.load(Relaxed));
        Some(Snapshot {
            identity: process::Identity { pid, start_ticks },
            name,
            arena: self.arena[0].load(Relaxed)..self.arena[1].load(Relaxed),
            values: std::array::from_fn(|index| self.counters[index].load(Relaxed)),
        })
    }
}

/// The page of figures of this process until [`publish`] creates a shared page.
static PRIVATE_PAGE: Figures = Figures::new();
/// The shared page of figures of this process; null while [`PRIVATE_PAGE`] is used.
static SHARED_PAGE: AtomicPtr<Figures> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the page of figures that this process updates: the shared page, or the private one before [`publish`].
#[inline]
pub fn current() -> &'static Figures {
    let page = SHARED_PAGE.load(Relaxed);
    // SAFETY: a pointer that is not null refers to a page that `publish` mapped, and such a page is never unmapped.
    if page.is_null() { &PRIVATE_PAGE } else { unsafe { &*page } }
}

/// Returns the futex word on which the helper thread sleeps if the process is in no tree ([`Scope::Shared`]).
pub(crate) fn wake_word() -> &'static AtomicU32 {
    &current().wake
}

/// Wakes the helper thread of this process, if the process is in no tree.
pub fn wake() {
    loop {
        let page = SHARED_PAGE.load(SeqCst);
        current().wake_sleepers();
        // If `publish` replaced the page meanwhile, the helper may sleep on the new page: wake again.
        if page == SHARED_PAGE.load(SeqCst) {
            return;
        }
    }
}

/// Adds `amount` to a counter of this process.
#[inline]
pub fn add(counter: Counter, amount: u64) {
    if !RECORDS_SUMS_AND_EVENTS && TABLE[counter as usize].kind == CounterKind::Sum {
        return;
    }
    current().counters[counter as usize].fetch_add(amount, Relaxed);
}

/// Subtracts `amount` from a gauge of this process.
#[inline]
pub fn sub(counter: Counter, amount: u64) {
    current().counters[counter as usize].fetch_sub(amount, Relaxed);
}

/// Sets a gauge of this process to `amount`.
#[inline]
pub fn set(counter: Counter, amount: u64) {
    current().counters[counter as usize].store(amount, Relaxed);
}

/// Raises a peak of this process to `amount` if that is larger; returns whether the peak was raised.
#[inline]
pub fn raise(counter: Counter, amount: u64) -> bool {
    current().counters[counter as usize].fetch_max(amount, Relaxed) < amount
}

/// Returns the current value of a counter of this process.
#[inline]
pub fn get(counter: Counter) -> u64 {
    current().counters[counter as usize].load(Relaxed)
}

/// Stores the addresses of this process's arena on the page, so that commands can recognise the arena's mappings.
pub fn publish_arena_range(addresses: Range<usize>) {
    for (word, addr) in current().arena.iter().zip([addresses.start, addresses.end]) {
        word.store(addr as u64, Relaxed);
    }
}

/// A copy of the figures of one process.
///
/// ```
/// use pagemill::Pagemill;
/// use pagemill::stats::Counter;
///
/// let figures = Pagemill::of_process()?.figures();
/// let (resident, giveable) = (figures.get(Counter::Resident), figures.giveable_of_resident());
/// assert!(giveable <= resident && figures.memory_amounts().net <= resident);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Snapshot {
    #[doc(hidden)] // for commands, which depend on `pagemill-sys`
    pub identity: process::Identity,
    name: [u8; 16],
    /// Addresses of the process's arena; empty while it has none.
    pub arena: Range<u64>,
    values: [u64; MAX_COUNTERS],
}

impl Default for Snapshot {
    fn default() -> Self {
        Self { identity: process::Identity::default(), name: [0; 16], arena: 0..0, values: [0; MAX_COUNTERS] }
    }
}

impl Snapshot {
    /// The value of a counter in this copy.
    pub fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize]
    }

    /// Sets a counter of this copy to `amount`.
    pub fn set(&mut self, counter: Counter, amount: u64) {
        self.values[counter as usize] = amount;
    }

    /// The process's name. Unprintable characters are replaced, because other programs can write to the page's file.
    pub fn name(&self) -> String {
        process::printable_letters(&self.name).collect()
    }

    /// Bytes that the process would give back at once on request: the sum over all owners of memory.
    pub fn giveable_bytes(&self) -> u64 {
        self.giveable_of_resident().saturating_add(self.get(Counter::MarkedForeign))
    }

    /// The part of [`Snapshot::giveable_bytes`] that `resident` includes: all but volatile memory that Pagemill did not
    /// allocate.
    pub fn giveable_of_resident(&self) -> u64 {
        let sum = GIVEABLE.iter().fold(0u64, |sum, counter| sum.saturating_add(self.get(*counter)));
        sum.saturating_sub(self.get(Counter::MarkedForeign)).min(self.get(Counter::Resident))
    }

    /// The process's resident bytes, its giveable bytes, and its resident bytes without the giveable ones (`net`).
    pub fn memory_amounts(&self) -> MemoryAmounts {
        let resident = self.get(Counter::Resident);
        MemoryAmounts { resident, giveable: self.giveable_bytes(), net: resident - self.giveable_of_resident() }
    }

    /// Returns the time since the last measurement of all figures; `None` if the figures were never measured.
    pub fn age(&self) -> Option<Duration> {
        let measured_ns = self.get(Counter::MeasuredAt);
        (measured_ns > 0).then(|| Duration::from_nanos(clock::fine_ns().saturating_sub(measured_ns)))
    }

    /// The values of all counters, in the order of [`TABLE`].
    pub fn values(&self) -> &[u64; MAX_COUNTERS] {
        &self.values
    }

    /// Returns a copy of this snapshot that has the counter values `values`.
    pub(crate) fn with_values(&self, values: [u64; MAX_COUNTERS]) -> Self {
        Self { values, ..self.clone() }
    }

    /// Adds the counters of another instance in the same process. Adds peaks, too: the sum of two peaks is an upper
    /// bound of the process's peak.
    pub fn add(&mut self, other: &Self) {
        for row in TABLE {
            let (mine, theirs) = (&mut self.values[row.counter as usize], other.get(row.counter));
            *mine = if row.kind == CounterKind::Moment { (*mine).min(theirs) } else { mine.saturating_add(theirs) };
        }
    }

    /// Adds the sums of a process that has ended, and keeps the larger of two peaks. Gauges and moments are left out.
    pub fn absorb_ended(&mut self, other: &Self) {
        for row in TABLE {
            let (mine, theirs) = (&mut self.values[row.counter as usize], other.get(row.counter));
            match row.kind {
                CounterKind::Sum => *mine = mine.saturating_add(theirs),
                CounterKind::Peak => *mine = (*mine).max(theirs),
                CounterKind::Gauge | CounterKind::Moment => {}
            }
        }
    }
}

/// The result of `pagemill_figures`, laid out as in include/pagemill.h.
///
/// Example: [`Snapshot`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MemoryAmounts {
    pub resident: u64,
    pub giveable: u64,
    /// The part of `resident` that is not giveable.
    pub net: u64,
}

/// Returns the figures of this process as they are now, without a measurement.
pub fn snapshot() -> Snapshot {
    let page = current();
    if page.magic.load(Relaxed) != MAGIC {
        page.write_header(process::own_identity(), process::name(process::id()));
    }
    page.snapshot().unwrap_or_default()
}

/// Moves the figures to a new shared file at `path`. From then on counters are updated in that file.
///
/// Updates that other threads make during the move are carried over. An update within the last few instructions of the
/// move may be lost.
///
/// # Errors
///
/// The error of creating the file. The figures stay private after an error.
pub fn publish(path: &CStr, identity: process::Identity) -> io::Result<()> {
    let map = |access| file::map_shared(path, Figures::LEN, access);
    // A file from before an `exec` of this process is reused, because other processes may have mapped it.
    let addr = match map(Access::Create) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => map(Access::Update)?,
        created => created?,
    };
    // SAFETY: the mapping is as long as the type and page aligned, and every bit pattern is valid (type invariant).
    let page: &'static Figures = unsafe { &*(addr as *const Figures) };
    page.write_header(identity, process::name(identity.pid));
    let before = current();
    let copied: [u64; MAX_COUNTERS] = std::array::from_fn(|index| before.counters[index].load(Relaxed));
    for (to, amount) in page.counters.iter().zip(copied) {
        to.store(amount, Relaxed);
    }
    for (to, from) in page.arena.iter().zip(&before.arena) {
        to.store(from.load(Relaxed), Relaxed);
    }
    SHARED_PAGE.store(addr as *mut Figures, SeqCst);
    // Wake the threads that sleep on the old page. From now on wake-ups go to the new page.
    before.wake_sleepers();
    // Add the updates that other threads made on the old page since it was copied.
    for ((to, from), amount) in page.counters.iter().zip(&before.counters).zip(copied) {
        to.fetch_add(from.load(Relaxed).wrapping_sub(amount), Relaxed);
    }
    trace::event(trace::Event::Start, u64::from(identity.pid), clock::fine_ns());
    Ok(())
}

/// Replaces the parent's shared page by a private page of zeros, in a fork child. The new page has the same address.
///
/// # Safety
///
/// The process is a fork child with one thread and calls this once. The call unmaps the page at that address.
pub unsafe fn detach_in_child() {
    let page = SHARED_PAGE.load(Relaxed);
    if page.is_null() {
        PRIVATE_PAGE.counters.iter().for_each(|counter| counter.store(0, Relaxed));
        return;
    }
    // SAFETY: `publish` made the mapping at this address, and no other thread uses it, because there is none.
    if unsafe { file::map_private_over(page as usize, Figures::LEN) }.is_err() {
        SHARED_PAGE.store(std::ptr::null_mut(), Relaxed);
    }
}

/// Reads the figures that a process published at `path`.
///
/// # Errors
///
/// The error of opening the file; `InvalidData` if it holds no figures of this version.
pub fn read(path: &CStr) -> io::Result<Snapshot> {
    read_of(path, None)
}

/// As [`read`], but fails with `EACCES` unless `owner` owns the file; `None` skips the check. Root calls this to read
/// files in other users' folders.
///
/// # Errors
///
/// As [`read`].
pub fn read_of(path: &CStr, owner: Option<u32>) -> io::Result<Snapshot> {
    read_file(&PublishedFile::open(path, owner)?)
}

/// As [`read`], from an open file.
pub(crate) fn read_file(file: &PublishedFile) -> io::Result<Snapshot> {
    // Without the events, the copy takes a twentieth of the time.
    let snapshot = with_copy(file, offset_of!(Figures, ring), Figures::snapshot)?;
    snapshot.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Calls `act` with a copy of the first `len` bytes of a page of figures; the other bytes are zero. `act` gets no
/// mapping of the file, because accessing a mapping would raise `SIGBUS` if the file's user truncates the file. The copy
/// takes 34 KiB of stack.
pub(crate) fn with_copy<T>(file: &PublishedFile, len: usize, act: impl Fn(&Figures) -> T) -> io::Result<T> {
    let mut copy = Figures::new();
    let start = (&raw mut copy).cast::<u8>();
    // SAFETY: these are the bytes of a local value for which every bit pattern is valid (type invariant).
    let bytes = unsafe { std::slice::from_raw_parts_mut(start, size_of::<Figures>()) };
    file.read(&mut bytes[..len])?;
    Ok(act(&copy))
}

/// Calls `act` with the mapped page of figures of another process, so that `act` can send a request to that process.
/// Fails with `InvalidData` if the file at `path` is not a page of figures of this version.
pub(crate) fn with_page_of_process<T>(path: &CStr, act: impl FnOnce(&Figures) -> T) -> io::Result<T> {
    let addr = file::map_shared(path, Figures::LEN, Access::Update)?;
    // SAFETY: as in `publish`.
    let page = unsafe { &*(addr as *const Figures) };
    let is_ours = page.magic.load(Relaxed) == MAGIC && page.version_pid.load(Relaxed) as u32 == VERSION;
    let result = is_ours.then(|| act(page));
    // SAFETY: nothing uses the mapping any more.
    unsafe { file::unmap(addr, Figures::LEN) };
    result.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Reads invalid files. A short file and a file without the magic must be rejected. A page of which all other bits
    /// are 1 must be read: the name must be printable, and sums must saturate.
    #[test]
    fn invalid_pages_are_rejected_or_harmless() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page");
        let c_path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        std::fs::write(&path, b"short").unwrap();
        assert!(read(&c_path).is_err());
        std::fs::write(&path, vec![0u8; Figures::LEN]).unwrap();
        assert!(read(&c_path).is_err());
        let mut bytes = vec![0xFFu8; Figures::LEN];
        bytes[..8].copy_from_slice(b"pagemill");
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        let snapshot = read(&c_path).unwrap();
        assert_eq!(snapshot.name(), "?".repeat(15));
        assert_eq!(snapshot.giveable_bytes(), u64::MAX);
        let mut total = snapshot.clone();
        total.absorb_ended(&snapshot);
        assert_eq!(total.get(Counter::PurgeFreed), u64::MAX);
    }
}
