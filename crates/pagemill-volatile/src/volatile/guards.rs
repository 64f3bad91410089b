//! Guards on purged pages of strict ranges: which pages have one, and how a fault on them is resolved.
//!
//! A purge removes access to a part, gives its pages back, installs guards in their place, and restores access. So the
//! program never reads zeros where its bytes were: a touch waits for the short time that this takes, and then raises
//! `SIGBUS`.
//!
//! A bit per page is set from before its bytes are purged until after its guard is removed. The fault handler reads it
//! without a lock, allocates nothing, and calls the kernel only if the guard was removed after the fault. The table
//! belongs to the process, as addresses do, not to one Pagemill.
#![allow(unsafe_code)] // closes and opens the program's memory, reads its table

use pagemill_core::error::Error;
use pagemill_core::stats::{self, Counter};
use pagemill_core::units::{BLOCK_BYTES, os_page_bytes};
use pagemill_sys::fault::{self, Access, Fault, Quiet, Verdict};
use pagemill_sys::maps::{Mapping, Maps};
use pagemill_sys::{fatal, mem, thread};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed,
    Ordering::SeqCst,
};

/// Bytes of address space that a leaf of the table covers.
const LEAF_SPAN: usize = 1 << 32;
/// Programs have addresses below this unless they request higher ones.
const END: usize = 1 << 48;
const LEAVES: usize = END / LEAF_SPAN;

/// The kernel may lack memory for a page table while others give theirs back. Maximum number of retries, each after a
/// pause.
const TRIES: usize = 10_000;

static TABLE: [AtomicPtr<AtomicU64>; LEAVES] = [const { AtomicPtr::new(std::ptr::null_mut()) }; LEAVES];
/// Number of parts that are closed at the moment.
static UNDER_WAY: AtomicU32 = AtomicU32::new(0);

/// The table was inherited from the parent: its contents do not justify discarding memory.
static HAS_INHERITED: AtomicBool = AtomicBool::new(false);

/// Whether the kernel supports guards, once known.
static SUPPORT: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = 0;
const SUPPORTED: u32 = 1;
const MISSING: u32 = 2;

fn leaf_bytes() -> usize {
    LEAF_SPAN / os_page_bytes() / 8
}

/// The table words of the leaf that contains `addr`, if it exists.
fn leaf(addr: usize) -> Option<&'static [AtomicU64]> {
    let words = TABLE.get(addr / LEAF_SPAN)?.load(Acquire);
    // SAFETY: not null means a mapping of `leaf_bytes`, made by `prepare`, zeroed, and never unmapped.
    (!words.is_null()).then(|| unsafe { std::slice::from_raw_parts(words, leaf_bytes() / 8) })
}

/// The word that contains the bit of a page, and the bit's number.
fn place(addr: usize) -> Option<(&'static AtomicU64, u32)> {
    let page = addr % LEAF_SPAN / os_page_bytes();
    Some((&leaf(addr)?[page / 64], page as u32 % 64))
}

/// Calls `act` with each word of the pages in `range` and the bits of those pages.
fn each_word(range: &Range<usize>, mut act: impl FnMut(&AtomicU64, u64)) {
    let page = os_page_bytes();
    let mut at = range.start;
    while at < range.end {
        let word_end = (at & !(64 * page - 1)) + 64 * page;
        let bits = (range.end.min(word_end) - at) / page;
        if let Some((word, first)) = place(at) {
            act(word, (!0 >> (64 - bits)) << first);
        }
        at = word_end;
    }
}

fn set(range: &Range<usize>) {
    each_word(range, |word, bits| {
        word.fetch_or(bits, AcqRel);
    });
}

fn clear(range: &Range<usize>) {
    each_word(range, |word, bits| {
        word.fetch_and(!bits, AcqRel);
    });
}

fn is_set(addr: usize) -> bool {
    place(addr).is_some_and(|(word, bit)| word.load(Acquire) & 1 << bit != 0)
}

/// The first run of pages in `range` whose bits all equal `wanted`.
fn next_run(range: &Range<usize>, wanted: bool) -> Option<Range<usize>> {
    let first = next_page(range, wanted)?;
    Some(first..next_page(&(first..range.end), !wanted).unwrap_or(range.end))
}

fn next_page(range: &Range<usize>, wanted: bool) -> Option<usize> {
    let page = os_page_bytes();
    let mut at = range.start;
    while at < range.end {
        let (bits, first) = place(at).map_or((0, (at / page % 64) as u32), |(word, bit)| (word.load(Acquire), bit));
        let found = (if wanted { bits } else { !bits }) >> first;
        let next = at + found.trailing_zeros() as usize * page;
        if found != 0 {
            return (next < range.end).then_some(next);
        }
        at = (at & !(64 * page - 1)) + 64 * page;
    }
    None
}

/// Prepares a range for guards: checks kernel support, allocates the table, installs the fault handler.
///
/// # Errors
///
/// On an error nothing has changed. [`Error::Unsupported`] before Linux 6.13; [`Error::BadRange`] for addresses beyond
/// 2^48; [`Error::System`] without memory for the table.
pub(super) fn prepare(range: &Range<usize>) -> pagemill_core::error::Result<()> {
    check_support()?;
    if range.end > END {
        return Err(Error::BadRange { addr: range.start, len_bytes: range.len() });
    }
    for slot in &TABLE[range.start / LEAF_SPAN..=(range.end - 1) / LEAF_SPAN] {
        if !slot.load(Acquire).is_null() {
            continue;
        }
        let words =
            mem::map_sparse(leaf_bytes(), os_page_bytes()).map_err(Error::system("mapping the table of guards"))?;
        if slot.compare_exchange(std::ptr::null_mut(), words as *mut AtomicU64, AcqRel, Relaxed).is_err() {
            // SAFETY: mapped above, and no other thread has seen it.
            unsafe { mem::unreserve(words, leaf_bytes()) };
        }
    }
    fault::install(judge).map_err(Error::system("installing the fault handler"))
}

fn check_support() -> pagemill_core::error::Result<()> {
    if SUPPORT.load(Relaxed) == UNKNOWN {
        let page = os_page_bytes();
        let scratch = mem::map_sparse(page, page).map_err(Error::system("testing guard pages"))?;
        // SAFETY: mapped above, and no other thread has seen it.
        let result = unsafe { mem::install_guards(scratch, page) };
        let is_guarded = result.is_ok() && !fault::is_readable(scratch);
        // SAFETY: as above.
        unsafe { mem::unreserve(scratch, page) };
        match result {
            // A temporary failure.
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => {
                return Err(Error::System { doing: "testing guard pages", cause: error });
            }
            _ => SUPPORT.store(if is_guarded { SUPPORTED } else { MISSING }, Relaxed),
        }
    }
    match SUPPORT.load(Relaxed) {
        SUPPORTED => Ok(()),
        _ => Err(Error::Unsupported { what: "strict ranges need guard pages (Linux 6.13)" }),
    }
}

/// Held while a part is closed. Blocks the program's signal handlers on this thread: a handler that touches the part
/// would wait for itself.
struct Passage {
    _quiet: Quiet,
}

impl Passage {
    fn begin() -> Self {
        let quiet = Quiet::begin();
        UNDER_WAY.fetch_add(1, SeqCst);
        Self { _quiet: quiet }
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, SeqCst);
    }
}

/// The kernel, or `discard`, refused a part. `freed`: what had been freed of the same part before, if anything.
pub(super) struct GuardsRefused {
    pub freed: Option<u64>,
}

/// Purges a part with `discard` and guards its pages. Pages that are guarded already stay guarded. Returns the bytes
/// that the kernel took.
///
/// If no guard can be installed (for example because the program just locked the memory), the purged pages stay closed.
/// A touch then behaves the same.
///
/// # Errors
///
/// [`GuardsRefused`]: the rest is unchanged.
///
/// # Safety
///
/// The part is claimed: private, readable and writable memory inside one mapping, whose contents the program can
/// recreate.
pub(super) unsafe fn replace(
    part: Range<usize>,
    mut discard: impl FnMut(Range<usize>) -> Option<u64>,
) -> Result<u64, GuardsRefused> {
    let (mut freed, mut rest) = (None, part);
    while let Some(run) = next_run(&rest, false) {
        // SAFETY: guaranteed by the caller.
        match unsafe { replace_run(&run, &mut discard) } {
            Some(bytes) => freed = Some(freed.unwrap_or(0) + bytes),
            None => return Err(GuardsRefused { freed }),
        }
        rest.start = run.end;
    }
    Ok(freed.unwrap_or(0))
}

/// # Safety
///
/// As [`replace`]; none of the run has a guard.
unsafe fn replace_run(run: &Range<usize>, discard: impl FnOnce(Range<usize>) -> Option<u64>) -> Option<u64> {
    // Fail early for locked memory, which would be noticed only after closing.
    mem::cool(run.start, run.len()).ok()?;
    let _passage = Passage::begin();
    set(run);
    // SAFETY: a thread that touches it meanwhile faults and waits (`judge`).
    if unsafe { mem::close(run.start, run.len()) }.is_err() {
        clear(run);
        return None;
    }
    // SAFETY: it was open before.
    let open = || unsafe { mem::open(run.start, run.len()) };
    let Some(freed) = discard(run.clone()) else {
        if let Err(error) = insist(open) {
            fatal(format_args!("pagemill: {} bytes at {:#x} cannot be opened again: {error}", run.len(), run.start));
        }
        clear(run);
        return None;
    };
    // SAFETY: guaranteed by the caller.
    if insist(|| unsafe { mem::install_guards(run.start, run.len()) }).is_ok() {
        // Without a guard it stays closed until it is unmarked.
        let _ = insist(open);
    }
    Some(freed)
}

/// Retries while the kernel is short of memory.
fn insist(act: impl Fn() -> io::Result<()>) -> io::Result<()> {
    let mut result = act();
    for _ in 0..TRIES {
        match &result {
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => thread::pause(),
            _ => break,
        }
        result = act();
    }
    result
}

/// Removes the guards in a range: its pages read zero, and huge pages become possible again.
///
/// # Errors
///
/// [`Error::System`] if closed memory cannot be opened again; the parts not reached are still guarded.
///
/// # Safety
///
/// No purge works on the range meanwhile.
pub(super) unsafe fn remove(range: &Range<usize>) -> pagemill_core::error::Result<()> {
    let (maps, mut rest) = (Maps::open().ok(), range.clone());
    while let Some(run) = next_run(&rest, true) {
        let mut at = run.start;
        while at < run.end {
            let mapping = maps.as_ref().and_then(|maps| maps.find(at).ok().flatten());
            let end = mapping.as_ref().map_or(run.end, |mapping| mapping.addresses.end).min(run.end);
            let access = mapping.map_or(Mapped::Otherwise, |mapping| Mapped::of(&mapping, at));
            remove_from(&(at..end), access).map_err(Error::system("opening purged memory"))?;
            at = end;
        }
        rest.start = run.end;
    }
    Ok(())
}

/// What the mapping allows, for private memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mapped {
    /// Reading and writing.
    Open,
    /// No access: it stayed closed, or was closed when this process was forked.
    Closed,
    /// Access that the program chose, or a different kind of memory by now.
    Otherwise,
}

impl Mapped {
    fn of(mapping: &Mapping, addr: usize) -> Self {
        let is_ours = mapping.addresses.contains(&addr) && !mapping.is_shared && !mapping.has_file;
        match (mapping.is_readable, mapping.is_writable, mapping.is_executable) {
            (true, true, false) if is_ours => Self::Open,
            (false, false, false) if is_ours => Self::Closed,
            _ => Self::Otherwise,
        }
    }
}

/// As [`remove`], inside one mapping.
fn remove_from(part: &Range<usize>, mapped: Mapped) -> io::Result<()> {
    let blocks = part.start.next_multiple_of(BLOCK_BYTES)..part.end & !(BLOCK_BYTES - 1);
    let may_discard = !HAS_INHERITED.load(Relaxed) && !blocks.is_empty();
    let _passage = Passage::begin();
    // A huge page is possible only without a page table, which the next discard removes. The part is closed, so that no
    // thread writes there before the discard.
    let closed = match mapped {
        Mapped::Closed => part.clone(),
        // SAFETY: a thread that touches it meanwhile faults and waits (`judge`).
        Mapped::Open if may_discard && unsafe { mem::close(blocks.start, blocks.len()) }.is_ok() => blocks.clone(),
        _ => 0..0,
    };
    // Refused only where nothing is mapped any more.
    let _ = mem::remove_guards(part.start, part.len());
    if !closed.is_empty() {
        if may_discard {
            // SAFETY: where the guards were there are no pages, and no thread could write since.
            let _ = unsafe { mem::discard(blocks.start, blocks.len()) };
        }
        // SAFETY: it was open before.
        insist(|| unsafe { mem::open(closed.start, closed.len()) })?;
    }
    clear(part);
    Ok(())
}

/// Decides how a fault is resolved. Runs in a signal handler: neither allocates nor locks.
fn judge(fault: &Fault) -> Verdict {
    let was_under_way = UNDER_WAY.load(SeqCst) > 0;
    if is_set(fault.addr) {
        let is_closed = fault.is_protected && (was_under_way || UNDER_WAY.load(SeqCst) > 0);
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
    // Or a new one may have been installed.
    if can_be_done || is_set(fault.addr) { Verdict::Again } else { Verdict::Program }
}

/// For a program's own `SIGSEGV` handler (with `SA_SIGINFO`) that it installed after its first strict mark. The handler
/// must call this first and return at once if it returns true. Then the access is repeated, or `SIGBUS` is raised at
/// the fault.
///
/// Neither allocates nor locks.
///
/// # Safety
///
/// The arguments must be those of the handler.
pub unsafe fn handle_fault(signal: i32, info: *const c_void, context: *mut c_void) -> bool {
    // SAFETY: the caller's promise.
    unsafe { fault::handle(signal, info, context) }
}

/// Called in a fork child: no thread closes parts here, and recorded pages may no longer be mapped (`MADV_DONTFORK`).
pub(super) fn begin_child() {
    UNDER_WAY.store(0, Relaxed);
    HAS_INHERITED.store(true, Relaxed);
    fault::begin_child();
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 50, ..ProptestConfig::default() })]

        /// Bits and runs agree with a page-by-page model, also across words and leaves.
        #[test]
        fn bits_agree_with_a_model(steps in prop::collection::vec((0usize..600, 1usize..300, any::<bool>()), 1..20)) {
            static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
            let _turn = TURN.lock();
            let page = os_page_bytes();
            // Far from all mappings: a table without memory behind it.
            let start = 5 * LEAF_SPAN - 300 * page;
            let all = start..start + 900 * page;
            if prepare(&all).is_err() {
                println!("skipped: no guard pages here");
                return Ok(());
            }
            clear(&all);
            let mut model = [false; 900];
            for (first, pages, wanted) in steps {
                let range = start + first * page..start + (first + pages) * page;
                if wanted { set(&range) } else { clear(&range) }
                model[first..first + pages].fill(wanted);
                for at in 0..900 {
                    prop_assert_eq!(is_set(start + at * page), model[at]);
                    let rest = start + at * page..all.end;
                    let run = next_run(&rest, true);
                    let begin = (at..900).find(|at| model[*at]);
                    let end = begin.map(|begin| (begin..900).find(|at| !model[*at]).unwrap_or(900));
                    prop_assert_eq!(run, begin.zip(end).map(|(begin, end)| start + begin * page..start + end * page));
                }
            }
            clear(&all);
        }
    }
}
