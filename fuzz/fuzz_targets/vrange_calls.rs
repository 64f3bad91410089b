//! Makes random calls that mark, unmark, map and purge volatile ranges. Each three bytes of the input are decoded as
//! one call, and the results are compared with a table of pages.
//!
//! Run it by `cargo +nightly fuzz run vrange_calls`. At the start of each input, every page of the area is written. At
//! the end of the input, the area is unmarked.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::reclaim::{Shrinker, Urgency};
use pagemill_core::units::os_page_bytes;
use pagemill_sys::fault;
use pagemill_testbed::Testbed;
use pagemill_volatile::vrange::{How, Mode};
use std::sync::OnceLock;

const PAGE_COUNT: usize = 256;

fn pagemill() -> &'static Testbed {
    static PAGEMILL: OnceLock<&'static Testbed> = OnceLock::new();
    PAGEMILL.get_or_init(|| Testbed::new(Layout::for_test(), UNLIMITED).expect("address space"))
}

/// Returns the address of the memory under test, which is aligned to pages, is never freed, and is accessed only byte
/// by byte.
fn area() -> usize {
    static AREA: OnceLock<usize> = OnceLock::new();
    *AREA.get_or_init(|| {
        let bytes = vec![0u8; (PAGE_COUNT + 1) * os_page_bytes()].leak();
        (bytes.as_ptr() as usize).next_multiple_of(os_page_bytes())
    })
}

/// Returns the mode in which access to a purged page raises a signal, or the plain mode if the kernel has no guard
/// pages.
fn strict_mode_if_supported() -> Mode {
    static MODE: OnceLock<Mode> = OnceLock::new();
    *MODE.get_or_init(|| {
        // SAFETY: the range is inside the area, which has no references to it and is never freed.
        let is_there = unsafe { pagemill().vranges.vrange(area(), os_page_bytes(), Mode::VolatileStrict, How::Full) };
        AreaModel::call_vrange(0, 1, Mode::Nonvolatile, How::Full);
        if is_there.is_ok() { Mode::VolatileStrict } else { Mode::Volatile }
    })
}

/// The expected state of a page of the memory under test.
#[derive(Clone, Copy, Default)]
struct Page {
    is_marked: bool,
    may_be_gone: bool,
}

struct AreaModel {
    pages: [Page; PAGE_COUNT],
}

impl AreaModel {
    fn address_of(page: usize) -> *mut u8 {
        (area() + page * os_page_bytes()) as *mut u8
    }

    /// Returns whether a page is purged. A purged page reads as zero or, under a strict mark, cannot be read.
    fn is_gone(page: usize, is_marked: bool) -> bool {
        let is_guarded = is_marked && !fault::is_readable(Self::address_of(page) as usize);
        // SAFETY: the byte is inside the area. A guard on an unmarked page would cause a fault, which fails the
        // test.
        is_guarded || unsafe { Self::address_of(page).read_volatile() } == 0
    }

    fn write(page: usize) {
        // SAFETY: the byte is inside the area, which has no references to it.
        unsafe { Self::address_of(page).write_volatile(1) };
    }

    fn call_vrange(page: usize, pages: usize, mode: Mode, how: How) -> pagemill_volatile::vrange::Marked {
        let (addr, len) = (area() + page * os_page_bytes(), pages * os_page_bytes());
        // SAFETY: the range is inside the area, which has no references to it and is never freed.
        unsafe { pagemill().vranges.vrange(addr, len, mode, how) }.expect("whole pages that are mapped")
    }

    fn step(&mut self, kind: u8, page: usize, pages: usize) {
        let part = page..(page + pages).min(PAGE_COUNT);
        let pages = part.len();
        match kind % 7 {
            mark @ (0 | 1 | 5 | 6) => {
                let how = if matches!(mark, 0 | 5) { How::Full } else { How::Partial };
                let mode = if matches!(mark, 0 | 1) { Mode::Volatile } else { strict_mode_if_supported() };
                let was_gone = self.pages[part.clone()].iter().any(|page| page.is_marked && page.may_be_gone);
                let marked = Self::call_vrange(page, pages, mode, how);
                assert_eq!((marked.bytes as usize, marked.purged), (pages * os_page_bytes(), was_gone));
                self.pages[part.clone()].fill(Page { is_marked: true, may_be_gone: was_gone });
            }
            2 => {
                let marked = Self::call_vrange(page, pages, Mode::Nonvolatile, How::Full);
                let were: Vec<_> = self.pages[part.clone()].iter().filter(|page| page.is_marked).collect();
                assert_eq!(marked.bytes as usize, were.len() * os_page_bytes());
                assert_eq!(marked.purged, were.iter().any(|page| page.may_be_gone));
            }
            3 => drop(pagemill().vranges.shrink((pages * os_page_bytes()) as u64, Urgency::Limit)),
            _ => pagemill().vranges.forget(area() + page * os_page_bytes()..area() + part.end * os_page_bytes()),
        }
        if matches!(kind % 7, 2 | 4) {
            // These calls remove all marks.
            self.pages[part.clone()].fill(Page::default());
            part.for_each(Self::write);
        }
        for (at, page) in self.pages.iter_mut().enumerate() {
            let is_gone = Self::is_gone(at, page.is_marked);
            assert!(!is_gone || page.is_marked, "page {at} was not marked");
            page.may_be_gone |= is_gone;
        }
    }
}

fuzz_target!(|data: &[u8]| {
    strict_mode_if_supported();
    (0..PAGE_COUNT).for_each(AreaModel::write);
    let mut machine = AreaModel { pages: [Page::default(); PAGE_COUNT] };
    for call in data.chunks_exact(3).take(200) {
        machine.step(call[0], usize::from(call[1]), usize::from(call[2]) + 1);
    }
    AreaModel::call_vrange(0, PAGE_COUNT, Mode::Nonvolatile, How::Full);
});
