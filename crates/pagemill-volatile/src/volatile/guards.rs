//! Guard pages of strict volatile ranges: a table of the guarded pages, and the handling of faults on them.
//!
//! A purge *closes* memory (`PROT_NONE`), discards its pages, installs guards (`MADV_GUARD_INSTALL`), and *opens* the
//! memory again. So the program never reads zeros in place of purged bytes: an access waits until the memory is open
//! again, and then raises `SIGBUS`.
//!
//! The table has a bit for each page, which is set from before the page is purged until after its guard is removed. The
//! fault handler reads the bit without a lock and does not allocate. The table is shared by all Pagemills of the
//! process.
#![allow(unsafe_code)] // changes the protection of the program's memory, reads the table through pointers

use pagemill_core::error::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::fault::{self, Access, AllSignalsBlocked, Fault, Verdict};
use pagemill_sys::maps::{Mapping, Maps};
use pagemill_sys::{fatal, mem, thread};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::SeqCst,
};

/// Bytes of address space that a leaf of the table of guarded pages covers.
const LEAF_SPAN_BYTES: usize = 1 << 32;
/// End of the addresses that the table of guarded pages covers. The kernel maps memory at higher addresses only if a
/// program requests such an address.
const TABLE_END: usize = 1 << 48;
const LEAF_COUNT: usize = TABLE_END / LEAF_SPAN_BYTES;

/// Maximum number of retries of a system call after `ENOMEM`. The kernel may lack memory for page tables until other
/// processes free memory.
const MAX_RETRIES: usize = 10_000;

/// The table of guarded pages. A leaf is a bit array for [`LEAF_SPAN_BYTES`] of addresses; its pointer is null until
/// [`prepare`] maps the leaf.
static GUARD_TABLE: [AtomicPtr<AtomicU64>; LEAF_COUNT] = [const { AtomicPtr::new(std::ptr::null_mut()) }; LEAF_COUNT];
/// Number of threads that are changing guards at the moment. Such a thread may have closed memory, that is made it
/// inaccessible.
static CLOSING_THREADS: AtomicU32 = AtomicU32::new(0);

/// Whether this process inherited the table of guarded pages in a fork. If so, a set bit does not prove that the page
/// may be discarded.
static HAS_INHERITED: AtomicBool = AtomicBool::new(false);

/// Whether the kernel supports guard pages; tested at the first use.
static GUARD_SUPPORT: AtomicU32 = AtomicU32::new(UNTESTED);
/// Value of [`GUARD_SUPPORT`] before the first test. The next two constants are its other values.
const UNTESTED: u32 = 0;
const SUPPORTED: u32 = 1;
const UNSUPPORTED: u32 = 2;

/// Returns the size of a leaf in bytes. A leaf has one bit for each OS page.
fn leaf_bytes() -> usize {
    LEAF_SPAN_BYTES / os_page_bytes() / 8
}

/// Returns the words of the leaf that covers `addr`; `None` if the leaf is not mapped.
fn leaf(addr: usize) -> Option<&'static [AtomicU64]> {
    let words = GUARD_TABLE.get(addr / LEAF_SPAN_BYTES)?.load(Acquire);
    // SAFETY: a leaf that is not null is a zeroed mapping of `leaf_bytes` by `prepare`, which is never unmapped.
    (!words.is_null()).then(|| unsafe { std::slice::from_raw_parts(words, leaf_bytes() / 8) })
}

/// Returns the table word with the bit of the page at `addr`, and the position of the bit in the word.
fn table_bit(addr: usize) -> Option<(&'static AtomicU64, u32)> {
    let page = addr % LEAF_SPAN_BYTES / os_page_bytes();
    Some((&leaf(addr)?[page / 64], page as u32 % 64))
}

/// Changes each table word with bits of pages in `range` by `change`, which gets the word and a mask of these bits.
fn change_bits(range: &Range<usize>, change: impl Fn(&AtomicU64, u64) -> u64) {
    let page = os_page_bytes();
    let mut at = range.start;
    while at < range.end {
        let word_end = (at & !(64 * page - 1)) + 64 * page;
        let bits = (range.end.min(word_end) - at) / page;
        if let Some((word, first)) = table_bit(at) {
            change(word, (!0 >> (64 - bits)) << first);
        }
        at = word_end;
    }
}

fn set_bits(range: &Range<usize>) {
    change_bits(range, |word, bits| word.fetch_or(bits, AcqRel));
}

fn clear_bits(range: &Range<usize>) {
    change_bits(range, |word, bits| word.fetch_and(!bits, AcqRel));
}

/// Returns whether the table records the page at `addr` as guarded.
fn is_bit_set(addr: usize) -> bool {
    table_bit(addr).is_some_and(|(word, bit)| word.load(Acquire) & 1 << bit != 0)
}

/// Returns the first run of pages in `range` whose bits in the table are all `wanted`.
fn next_run_with_bits(range: &Range<usize>, wanted: bool) -> Option<Range<usize>> {
    let first = next_page_with_bit(range, wanted)?;
    Some(first..next_page_with_bit(&(first..range.end), !wanted).unwrap_or(range.end))
}

/// Returns the address of the first page in `range` whose bit in the table is `wanted`.
fn next_page_with_bit(range: &Range<usize>, wanted: bool) -> Option<usize> {
    let page = os_page_bytes();
    let mut at = range.start;
    while at < range.end {
        let (bits, first) = table_bit(at).map_or((0, (at / page % 64) as u32), |(word, bit)| (word.load(Acquire), bit));
        let found = (if wanted { bits } else { !bits }) >> first;
        let next = at + found.trailing_zeros() as usize * page;
        if found != 0 {
            return (next < range.end).then_some(next);
        }
        at = (at & !(64 * page - 1)) + 64 * page;
    }
    None
}

/// Prepares a range for guards: checks that the kernel supports them, maps the table, installs the fault handler.
///
/// # Errors
///
/// [`Error::Unsupported`] before Linux 6.13; [`Error::BadRange`] for addresses beyond 2^48; [`Error::System`] without
/// memory for the table of guarded pages.
pub(super) fn prepare(range: &Range<usize>) -> pagemill_core::error::Result<()> {
    check_support()?;
    if range.end > TABLE_END {
        return Err(Error::BadRange { addr: range.start, len_bytes: range.len() });
    }
    for slot in &GUARD_TABLE[range.start / LEAF_SPAN_BYTES..=(range.end - 1) / LEAF_SPAN_BYTES] {
        if !slot.load(Acquire).is_null() {
            continue;
        }
        let words =
            mem::map_sparse(leaf_bytes(), os_page_bytes()).map_err(Error::system("mapping the table of guards"))?;
        if slot.compare_exchange(std::ptr::null_mut(), words as *mut AtomicU64, AcqRel, Relaxed).is_err() {
            // SAFETY: this call mapped the leaf, and no other thread knows its address.
            unsafe { mem::unreserve(words, leaf_bytes()) };
        }
    }
    fault::install(resolve_fault).map_err(Error::system("installing the fault handler"))
}

/// Returns an error if the kernel does not support guard pages.
fn check_support() -> pagemill_core::error::Result<()> {
    if GUARD_SUPPORT.load(Relaxed) == UNTESTED {
        let page = os_page_bytes();
        let scratch = mem::map_sparse(page, page).map_err(Error::system("testing guard pages"))?;
        // SAFETY: this call mapped the page, and no other thread knows its address.
        let result = unsafe { mem::install_guards(scratch, page) };
        let is_guarded = result.is_ok() && !fault::is_readable(scratch);
        // SAFETY: as above.
        unsafe { mem::unreserve(scratch, page) };
        match result {
            // Lack of memory is temporary, so the result is not recorded.
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                return Err(Error::System { doing: "testing guard pages", cause: error });
            }
            _ => GUARD_SUPPORT.store(if is_guarded { SUPPORTED } else { UNSUPPORTED }, Relaxed),
        }
    }
    match GUARD_SUPPORT.load(Relaxed) {
        SUPPORTED => Ok(()),
        _ => Err(Error::Unsupported { what: "strict ranges need guard pages (Linux 6.13)" }),
    }
}

/// A critical section in which this thread closes memory (makes it inaccessible). Blocks the program's signals on this
/// thread, because a signal handler that accesses closed memory would wait for this thread forever.
struct ClosedSection {
    _blocked: AllSignalsBlocked,
}

impl ClosedSection {
    fn begin() -> Self {
        let blocked = AllSignalsBlocked::begin();
        CLOSING_THREADS.fetch_add(1, SeqCst);
        Self { _blocked: blocked }
    }
}

impl Drop for ClosedSection {
    fn drop(&mut self) {
        CLOSING_THREADS.fetch_sub(1, SeqCst);
    }
}

/// Purges the pages in `part` with `discard` and installs guards on them. Pages that have guards are skipped. Returns
/// `None` if the kernel, or `discard`, refused a run of pages. The pages of that run and those behind it are unchanged.
///
/// If a guard cannot be installed (for example because the program has just locked the memory), the purged pages stay
/// inaccessible. Accesses to these pages also raise `SIGBUS`.
///
/// # Safety
///
/// The caller has claimed `part`. It is private, readable and writable memory inside one mapping, and the program does
/// not need its contents.
pub(super) unsafe fn purge_and_guard(
    part: Range<usize>,
    mut discard: impl FnMut(Range<usize>) -> Option<()>,
) -> Option<()> {
    let mut rest = part;
    while let Some(run) = next_run_with_bits(&rest, false) {
        // SAFETY: guaranteed by the caller.
        unsafe { purge_and_guard_run(&run, &mut discard) }?;
        rest.start = run.end;
    }
    Some(())
}

/// As [`purge_and_guard`], for a run of pages without guards. Returns `None` if the run was not purged.
///
/// # Safety
///
/// As [`purge_and_guard`].
unsafe fn purge_and_guard_run(run: &Range<usize>, discard: impl FnOnce(Range<usize>) -> Option<()>) -> Option<()> {
    // `MADV_COLD` fails for locked memory, so a run with locked memory is refused before it is closed.
    mem::cool(run.start, run.len()).ok()?;
    let _section = ClosedSection::begin();
    set_bits(run);
    // SAFETY: a thread that accesses closed memory faults and waits in the fault handler (`resolve_fault`).
    if unsafe { mem::close(run.start, run.len()) }.is_err() {
        clear_bits(run);
        return None;
    }
    // SAFETY: the run was open before this call.
    let open = || unsafe { mem::open(run.start, run.len()) };
    if discard(run.clone()).is_none() {
        if let Err(error) = retry_while_no_memory(open) {
            fatal(format_args!("pagemill: {} bytes at {:#x} cannot be opened again: {error}", run.len(), run.start));
        }
        clear_bits(run);
        return None;
    }
    // SAFETY: guaranteed by the caller.
    if retry_while_no_memory(|| unsafe { mem::install_guards(run.start, run.len()) }).is_ok() {
        // The run is opened only if it has guards. A run without guards stays closed until it is unmarked.
        let _ = retry_while_no_memory(open);
    }
    Some(())
}

/// Calls `act`. While `act` fails for lack of memory, repeats the call after a pause, at most [`MAX_RETRIES`] times.
fn retry_while_no_memory(act: impl Fn() -> io::Result<()>) -> io::Result<()> {
    for _ in 0..MAX_RETRIES {
        match act() {
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => thread::pause(),
            result => return result,
        }
    }
    act()
}

/// Removes the guards in a range. The pages read zero afterwards, and the kernel can use huge pages again.
///
/// # Errors
///
/// [`Error::System`] if closed memory cannot be made accessible again. The rest of the range then still has its guards.
///
/// # Safety
///
/// The caller has claimed the range, so no purge works on it.
pub(super) unsafe fn remove(range: &Range<usize>) -> pagemill_core::error::Result<()> {
    let (maps, mut rest) = (Maps::open().ok(), range.clone());
    while let Some(mut run) = next_run_with_bits(&rest, true) {
        let mapping = maps.as_ref().and_then(|maps| maps.find(run.start).ok().flatten());
        let mut kind = MappingKind::Other;
        if let Some(mapping) = mapping {
            run.end = run.end.min(mapping.addresses.end);
            kind = MappingKind::of(&mapping, run.start);
        }
        remove_from(&run, kind).map_err(Error::system("opening purged memory"))?;
        rest.start = run.end;
    }
    Ok(())
}

/// The kind of mapping at an address.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MappingKind {
    /// Private memory that can be read and written.
    Open,
    /// Private memory without access: a purge has left the memory closed, or the memory was closed when this process
    /// was forked.
    Closed,
    /// Another kind of memory, or a protection that the program has set.
    Other,
}

impl MappingKind {
    fn of(mapping: &Mapping, addr: usize) -> Self {
        let is_ours = mapping.addresses.contains(&addr) && !mapping.is_shared && !mapping.has_file;
        match (mapping.is_readable, mapping.is_writable, mapping.is_executable) {
            (true, true, false) if is_ours => Self::Open,
            (false, false, false) if is_ours => Self::Closed,
            _ => Self::Other,
        }
    }
}

/// As [`remove`], for a part that lies inside one mapping of the kind `mapped`.
fn remove_from(part: &Range<usize>, mapped: MappingKind) -> io::Result<()> {
    let blocks = part.start.next_multiple_of(BLOCK_BYTES)..part.end & !(BLOCK_BYTES - 1);
    let may_discard = !HAS_INHERITED.load(Relaxed) && !blocks.is_empty();
    let _section = ClosedSection::begin();
    // The kernel can use a huge page again only after a discard has removed the block's page table. The memory is
    // closed first, so that no thread writes to it between the removal of the guards and the discard.
    let closed = match mapped {
        MappingKind::Closed => part.clone(),
        // SAFETY: a thread that accesses closed memory faults and waits in the fault handler (`resolve_fault`).
        MappingKind::Open if may_discard && unsafe { mem::close(blocks.start, blocks.len()) }.is_ok() => blocks.clone(),
        _ => 0..0,
    };
    // The kernel refuses this only where the memory was unmapped.
    let _ = mem::remove_guards(part.start, part.len());
    if !closed.is_empty() {
        if may_discard {
            // SAFETY: guarded pages have no contents, and no thread could write to the closed memory.
            let _ = unsafe { mem::discard(blocks.start, blocks.len()) };
        }
        // SAFETY: the memory was open before it was closed by this call or by a purge.
        retry_while_no_memory(|| unsafe { mem::open(closed.start, closed.len()) })?;
    }
    clear_bits(part);
    Ok(())
}

/// Decides what the fault handler does with a fault: repeat the access, raise `SIGBUS`, or call the program's handler.
/// Runs in a signal handler, so it neither allocates nor locks.
fn resolve_fault(fault: &Fault) -> Verdict {
    let was_closing = CLOSING_THREADS.load(SeqCst) > 0;
    if is_bit_set(fault.addr) {
        let is_closed = fault.is_protected && (was_closing || CLOSING_THREADS.load(SeqCst) > 0);
        if is_closed {
            return Verdict::Again;
        }
        stats::add(Counter::PurgedTouched, 1);
        return Verdict::Purged;
    }
    if leaf(fault.addr).is_none() {
        return Verdict::Program;
    }
    // The guard may have been removed since the fault.
    let can_be_done = match fault.access {
        Some(Access::Read) => fault::is_readable(fault.addr),
        Some(Access::Write) => fault::is_writable(fault.addr),
        Some(Access::Fetch) | None => false,
    };
    // A new guard may have been installed since the first test.
    if can_be_done || is_bit_set(fault.addr) { Verdict::Again } else { Verdict::Program }
}

/// Handles a fault on a strict range or in a view of a cached file. Returns false if the fault was elsewhere.
///
/// A program that installs its own `SIGSEGV` handler (`SA_SIGINFO`) after its first strict mark or view must call
/// `handle_fault` first in the handler, and return from the handler at once if the result is true. The access is then
/// repeated, or `SIGBUS` is raised at the faulting instruction. For strict ranges `handle_fault` neither allocates nor
/// locks. For a view it may read the page into memory, on a stack of its own.
///
/// # Safety
///
/// The arguments must be those of the handler.
pub unsafe fn handle_fault(signal: i32, info: *const c_void, context: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    unsafe { fault::handle(signal, info, context) }
}

/// Resets the state in a fork child: no thread changes guards, and guarded pages may be unmapped (`MADV_DONTFORK`).
pub(super) fn begin_child() {
    CLOSING_THREADS.store(0, Relaxed);
    HAS_INHERITED.store(true, Relaxed);
    fault::begin_child();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 50, ..ProptestConfig::default() })]

        /// Sets and clears the bits of random ranges, also across words and leaves of the table. Bits and runs must
        /// agree with an array of `bool`.
        #[test]
        fn table_agrees_with_bool_array(steps in prop::collection::vec((0usize..600, 1usize..300, any::<bool>()), 1..20)) {
            static ONE_CASE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
            let _guard = ONE_CASE_AT_A_TIME.lock();
            let page = os_page_bytes();
            // Addresses without any mapping: the test uses their bits in the table only.
            let start = 5 * LEAF_SPAN_BYTES - 300 * page;
            let all = start..start + 900 * page;
            if prepare(&all).is_err() {
                println!("skipped: no guard pages here");
                return Ok(());
            }
            clear_bits(&all);
            let mut model = [false; 900];
            for (first, pages, wanted) in steps {
                let range = start + first * page..start + (first + pages) * page;
                if wanted { set_bits(&range) } else { clear_bits(&range) }
                model[first..first + pages].fill(wanted);
                for at in 0..900 {
                    prop_assert_eq!(is_bit_set(start + at * page), model[at]);
                    let rest = start + at * page..all.end;
                    let run = next_run_with_bits(&rest, true);
                    let begin = (at..900).find(|at| model[*at]);
                    let end = begin.map(|begin| (begin..900).find(|at| !model[*at]).unwrap_or(900));
                    prop_assert_eq!(run, begin.zip(end).map(|(begin, end)| start + begin * page..start + end * page));
                }
            }
            clear_bits(&all);
        }
    }
}
