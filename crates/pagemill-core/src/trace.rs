//! The event ring: the latest decisions of the memory manager, with their times, on the page of figures.
//!
//! Recording an event costs some 30 ns and happens only next to a system call. Writers reserve entries with an atomic
//! counter; a reader skips an entry that is being written.

use crate::stats;
use pagemill_sys::clock;
use pagemill_sys::file::PublishedFile;
use std::ffi::CStr;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};

/// Number of events in the ring; a new event overwrites the oldest.
const MAX_EVENTS: usize = 1024;

/// The format of one of the two 64-bit numbers of an event. A number has one named value, or two packed ones.
struct NumberFormat {
    name: &'static str,
    /// If two values are packed: the width of the lower value in bits, and the name of the upper value.
    upper: Option<(u32, &'static str)>,
}

impl NumberFormat {
    const fn new(name: &'static str, upper: &[(u32, &'static str)]) -> Self {
        Self { name, upper: if upper.is_empty() { None } else { Some(upper[0]) } }
    }

    /// Packs two values into a number. If the format has no upper value, returns `lower`.
    fn pack(&self, lower: u64, upper: u64) -> u64 {
        self.upper.map_or(lower, |(bits, _)| lower & ((1 << bits) - 1) | upper << bits)
    }

    /// Unpacks a number into its values, each with its name.
    fn unpack(&self, number: u64) -> impl Iterator<Item = (&'static str, u64)> {
        let lower = self.upper.map_or(number, |(bits, _)| number & ((1 << bits) - 1));
        let upper = self.upper.map(|(bits, name)| (name, number >> bits));
        std::iter::once((self.name, lower)).chain(upper)
    }
}

macro_rules! events {
    ($(#[doc = $meaning:literal] $name:ident $text:literal
       ($first:literal $($bits:literal $above:literal)?, $second:literal $($second_bits:literal $second_above:literal)?);)*
    ) => {
        /// The kinds of events. Each event has two numbers, and a number may pack two values.
        ///
        /// Example: [`Recorded`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Event { $(#[doc = $meaning] $name),* }

        /// The name of each event and the formats of its two numbers.
        const EVENTS: &[(Event, &str, [NumberFormat; 2])] = &[$((Event::$name, $text, [
            NumberFormat::new($first, &[$(($bits, $above))?]),
            NumberFormat::new($second, &[$(($second_bits, $second_above))?]),
        ])),*];
    };
}

events! {
    /// The figures were published.
    Start "start" ("pid", "time_ns");
    /// A block (2 MiB) became resident as a huge page.
    BlockHuge "block_huge" ("block", "resident_bytes");
    /// A block (2 MiB) got small pages because no huge page was available.
    BlockFallback "block_fallback" ("block", "resident_bytes");
    /// Memory was given back because the program requested it.
    GivenForProgram "given_for_program" ("wanted_bytes", "freed_bytes");
    /// The huge page of a block was split so that a part could be given back.
    Split "split" ("block", "freed_bytes");
    /// A charge would have exceeded the limit, so reclaim started.
    OverLimit "over_limit" ("wanted_bytes", "used_bytes");
    /// A charge was refused, because reclaim could not free enough.
    Refused "refused" ("wanted_bytes", "used_bytes");
    /// This process requested memory from its siblings.
    AskSiblings "ask_siblings" ("wanted_bytes", "given_bytes");
    /// A sibling requested memory from this process.
    Asked "asked" ("wanted_bytes", "given_bytes");
    /// The process started as a fork child.
    Forked "forked" ("pid", "generation");
    /// Memory was given back because the limit of the process or of its tree was reached.
    GivenForLimit "given_for_limit" ("wanted_bytes", "freed_bytes");
    /// Memory was given back because a control group's limit was near.
    GivenForGroup "given_for_group" ("wanted_bytes", "freed_bytes");
    /// Memory was given back because the machine's memory was short.
    GivenForMachine "given_for_machine" ("wanted_bytes", "freed_bytes");
    /// Memory was given back because a sibling requested it.
    GivenForSibling "given_for_sibling" ("wanted_bytes", "freed_bytes");
    /// Memory was given back because it was free and not reused for the age that --return sets.
    GivenForAge "given_for_age" ("wanted_bytes", "freed_bytes");
    /// Free memory was given back to compensate for new memory that became resident.
    GivenForNew "given_for_new" ("wanted_bytes", "freed_bytes");
    /// Memory was given back, coldest first, because a thread stalls on memory.
    GivenForStall "given_for_stall" ("wanted_bytes", "freed_bytes");
    /// Free memory was offered to the kernel (MADV_FREE), which may take it.
    Offered "offered" ("wanted_bytes", "offered_bytes");
    /// The kernel took memory that was offered.
    Taken "taken" ("block", "taken_bytes");
    /// The kernel woke the helper. Bits of `signs`: limit near (1), stall in the group (2), stall on the machine (4).
    Sign "sign" ("signs", "room_bytes");
    /// Bytes of a volatile range were purged.
    RangePurged "range_purged" ("addr", "purged_bytes");
    /// A folio of several pages was allocated for a file.
    FolioMade "folio_made" ("page_index" 40 "file", "order" 8 "cache");
    /// A folio of several pages was split.
    FolioSplit "folio_split" ("page_index" 40 "file", "order" 8 "cache");
    /// Small folios were collapsed into one of several pages.
    FolioCollapsed "folio_collapsed" ("page_index" 40 "file", "order" 8 "cache");
    /// A callback of a slab cache panicked in the background; the cache is not defragmented in the background any more.
    SlabBehindFailed "slab_behind_failed" ("cache", "slabs_lost");
    /// The drop of a file's last handle waited for writeback, for the store, or for other threads.
    SlowDrop "slow_drop" ("waited_us", "dirty_bytes");
    /// Defragmentation moved objects of a slab cache.
    SlabMoved "slab_moved" ("objects", "cache" 32 "emptied_slabs");
}

/// An entry of the event ring, which holds one event.
#[repr(C)]
struct EventSlot {
    /// Sequence number shifted left by 8, with the event in the low byte; 0 while the entry is being written.
    tag: AtomicU64,
    time_ns: AtomicU64,
    numbers: [AtomicU64; 2],
}

/// The ring of a page's latest events.
///
/// Example: [`Recorded`].
#[repr(C)]
pub struct EventRing {
    /// Sequence number of the latest event; 0 before the first.
    next: AtomicU64,
    /// The entries; an event's index is its sequence number modulo [`MAX_EVENTS`].
    entries: [EventSlot; MAX_EVENTS],
}

impl EventRing {
    /// Stores an event in the next entry of the ring.
    fn record(&self, event: Event, first: u64, second: u64) {
        // Sequence numbers start at 1, because 0 is the tag of an entry that is empty or being written.
        let sequence = self.next.fetch_add(1, Relaxed) + 1;
        let entry = &self.entries[sequence as usize % MAX_EVENTS];
        entry.tag.store(0, Relaxed);
        entry.time_ns.store(clock::fine_ns(), Release);
        entry.numbers[0].store(first, Release);
        entry.numbers[1].store(second, Release);
        entry.tag.store(sequence << 8 | event as u64, Release);
    }

    fn read(&self) -> Vec<Recorded> {
        let mut events: Vec<Recorded> = self.entries.iter().filter_map(EventSlot::read).collect();
        events.sort_by_key(|event| event.sequence);
        events
    }
}

impl EventSlot {
    fn read(&self) -> Option<Recorded> {
        let tag = self.tag.load(Acquire);
        let (_, event, names) = EVENTS.get((tag & 0xFF) as usize)?;
        let numbers = [self.numbers[0].load(Acquire), self.numbers[1].load(Acquire)];
        let time_ns = self.time_ns.load(Acquire);
        (tag >> 8 != 0 && self.tag.load(Relaxed) == tag).then(|| Recorded {
            sequence: tag >> 8,
            time_ns,
            event,
            numbers: names.iter().zip(numbers).flat_map(|(name, number)| name.unpack(number)).collect(),
        })
    }
}

/// An event that was read from the page of figures of a process.
///
/// ```
/// use pagemill_core::trace::{self, Event};
/// use pagemill_testbed::Testbed;
/// use pagemill_core::published;
///
/// Testbed::of_process()?;
/// trace::event(Event::Forked, 1 << 30, 1);
/// let (file, _) = published::find(std::process::id()).expect("a folder for this user's figures");
/// let events = trace::read(file.as_c_str(), None).unwrap();
/// assert!(events.iter().any(|recorded| recorded.numbers[0].1 == 1 << 30));
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Number of the event among those on the same page, counted from 1.
    pub sequence: u64,
    /// Time of the event in nanoseconds of `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    pub event: &'static str,
    /// Two to four values, each with its name.
    pub numbers: Vec<(&'static str, u64)>,
}

/// Records an event of this process, with its two numbers.
pub fn event(event: Event, first: u64, second: u64) {
    if stats::RECORDS_SUMS_AND_EVENTS {
        stats::current().ring.record(event, first, second);
    }
}

/// As [`event`], for numbers that pack two values. Each part is the lower and the upper value of one number.
pub fn event_with_packed_values(event: Event, parts: [(u64, u64); 2]) {
    let (_, _, names) = &EVENTS[event as usize];
    let [first, second] = [0, 1].map(|at| names[at].pack(parts[at].0, parts[at].1));
    self::event(event, first, second);
}

/// Returns the latest events of this process, oldest first.
pub fn own_events() -> Vec<Recorded> {
    stats::current().ring.read()
}

/// Returns the names of the numeric arguments of all events, event by event. Two values packed in one number have a name
/// each.
pub fn number_names() -> impl Iterator<Item = &'static str> {
    let formats = EVENTS.iter().flat_map(|(_, _, formats)| formats);
    formats.flat_map(|format| std::iter::once(format.name).chain(format.upper.map(|(_, name)| name)))
}

/// Reads the latest events of the process that published its figures at `path`, oldest first. `owner` is the user that
/// must own the file; `None` skips the check.
///
/// # Errors
///
/// The error of opening the file.
pub fn read(path: &CStr, owner: Option<u32>) -> io::Result<Vec<Recorded>> {
    let file = PublishedFile::open(path, owner)?;
    let copy = || stats::with_copy(&file, size_of::<stats::Figures>(), |page| page.ring.read());
    // An entry that was overwritten while the first copy was made has another sequence number in the second copy.
    let (mut events, after) = (copy()?, copy()?);
    events.retain(|event| after.binary_search_by_key(&event.sequence, |event| event.sequence).is_ok());
    Ok(events)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Records ten more events than the ring has entries. The ring must then contain the latest events, in order.
    #[test]
    fn ring_has_latest_events() {
        let ring = stats::Figures::new().ring;
        for number in 0..MAX_EVENTS as u64 + 10 {
            ring.record(Event::GivenForProgram, number, 2 * number);
        }
        let events = ring.read();
        assert_eq!(events.len(), MAX_EVENTS);
        assert_eq!(events[0].numbers[0], ("wanted_bytes", 10));
        assert!(events.windows(2).all(|pair| pair[0].sequence + 1 == pair[1].sequence));
    }

    /// `EVENTS` must be in the order of the enum. Packing and unpacking must return the same values, also for numbers
    /// with a single value.
    #[test]
    fn packed_values_unpack_unchanged() {
        assert!(EVENTS.iter().enumerate().all(|(at, (event, ..))| *event as usize == at));
        let (_, _, [number, plain]) = &EVENTS[Event::FolioMade as usize];
        let both = |lower, upper| number.unpack(number.pack(lower, upper)).collect::<Vec<_>>();
        for (index, file) in [(0, 0), ((1 << 40) - 1, 0), (7, (1 << 24) - 1)] {
            assert_eq!(both(index, file), [("page_index", index), ("file", file)]);
        }
        assert_eq!(plain.unpack(plain.pack(9, 255)).collect::<Vec<_>>(), [("order", 9), ("cache", 255)]);
        let (_, _, [plain, _]) = &EVENTS[Event::Start as usize];
        assert_eq!(plain.unpack(plain.pack(u64::MAX, 1)).collect::<Vec<_>>(), [("pid", u64::MAX)]);
    }
}
