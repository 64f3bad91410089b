//! Tests of the lists of volatile ranges that a process writes on request: their layout in bytes, and their contents
//! while the listed ranges change.
#![allow(unsafe_code)] // maps memory and marks it

mod common;

use common::{exclusive_test, pagemill};
use pagemill_core::Error;
use pagemill_core::listing::MOST_RECORDS;
use pagemill_core::published::Subject;
use pagemill_core::units::os_page_bytes;
use pagemill_sys::file::AnswerFile;
use pagemill_volatile::listed::{Listed, RangeKind, RangeState};
use pagemill_volatile::vrange::{How, Mode};
use pagemill_volatile::{Behaviour, VolatileBuf};
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Writes a list of volatile ranges into a new file, and returns the file's bytes.
fn write_list() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("list");
    std::fs::write(&path, b"").unwrap();
    let file = AnswerFile::open(&CString::new(path.to_str().unwrap()).unwrap()).unwrap();
    pagemill().responder.write_list(&file, 9, Subject::Ranges).unwrap();
    std::fs::read(path).unwrap()
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn list_handles() -> Vec<Listed> {
    let (mut found, mut part, mut from) = (Vec::new(), [Listed::NONE; 16], Some(0));
    while let Some(start) = from {
        let copied = pagemill().ranges.list(start, &mut part);
        found.extend_from_slice(&part[..copied.count]);
        from = copied.next;
    }
    found
}

/// A list must have the layout that ARCHITECTURE.md documents: a header, then a record for each range.
#[test]
fn a_list_has_the_documented_layout() {
    let _exclusive = exclusive_test();
    let range = pagemill().ranges.allocate(3 << 20, Behaviour::Full).unwrap();
    range.mark().unwrap();
    let bytes = write_list();
    assert_eq!(&bytes[..16], b"pm-vrng1\x09\0\0\0\0\0\0\0");
    assert_eq!((number(&bytes, 16), number(&bytes, 24), bytes.len()), (1, 0, 64));
    assert_eq!((number(&bytes, 32), number(&bytes, 40), number(&bytes, 48)), (range.addr() as u64, 3 << 20, 0));
    assert_eq!(bytes[60..], [0, 1, 0, 0], "a handle, volatile, goes as a whole");
}

/// The list must distinguish strictly marked ranges from others, if the kernel supports strict marks.
#[test]
fn strict_marks_are_listed_as_strict() {
    let _exclusive = exclusive_test();
    let range = pagemill().ranges.allocate(4 << 20, Behaviour::Full).unwrap();
    let half = range.len_bytes() / 2;
    // SAFETY: there are no references to the bytes of the held range, which is unmarked before it is dropped.
    let call = |at, mode| unsafe { pagemill().vranges.vrange(range.addr() + at, half, mode, How::Partial) };
    match call(0, Mode::VolatileStrict) {
        Err(Error::Unsupported { what }) => return println!("skipped: {what}"),
        marked => assert_eq!(marked.unwrap().bytes, half as u64),
    }
    call(half, Mode::Volatile).unwrap();
    let listed = pagemill().vranges.list();
    assert_eq!(
        listed.iter().map(|mark| (mark.addr, mark.is_strict)).collect::<Vec<_>>(),
        [(range.addr(), true), (range.addr() + half, false)]
    );
    let bytes = write_list();
    let tails: Vec<&[u8]> = bytes[32..].chunks_exact(32).map(|record| &record[28..]).collect();
    assert_eq!(tails, [[0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]], "the handle, and its marked halves");
    for at in [0, half] {
        call(at, Mode::Nonvolatile).unwrap();
    }
}

/// More ranges are marked by address than a list can contain. The length of the file must be limited, and the list must
/// report the number of ranges that it does not contain.
#[test]
fn the_length_of_a_list_is_limited() {
    let _exclusive = exclusive_test();
    let (page, more) = (os_page_bytes(), 10);
    let count = MOST_RECORDS as usize + more;
    let len = 2 * count * page;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping replaces nothing.
    let area = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(area, libc::MAP_FAILED);
    // SAFETY: there are no references to this memory of the test, which is unmarked before it is unmapped.
    let call = |at: usize, len, mode| unsafe { pagemill().vranges.vrange(area as usize + at, len, mode, How::Full) };
    (0..count).for_each(|index| _ = call(2 * index * page, page, Mode::Volatile).unwrap());
    let bytes = write_list();
    assert_eq!((number(&bytes, 16), number(&bytes, 24)), (MOST_RECORDS, more as u64));
    assert_eq!(bytes.len() as u64, 32 + 32 * MOST_RECORDS);
    let starts: Vec<u64> = bytes[32..].chunks_exact(32).map(|record| number(record, 0)).collect();
    assert!(starts.windows(2).all(|pair| pair[0] < pair[1]), "ascending, each once");
    assert_eq!(pagemill().vranges.list().len(), count);
    call(0, len, Mode::Nonvolatile).unwrap();
    assert!(pagemill().vranges.list().is_empty());
    // SAFETY: the mapping was made above and is unmarked.
    unsafe { libc::munmap(area, len) };
}

/// Ranges are allocated, marked, pinned and dropped while other threads list them. Each list must have exactly once
/// every range that exists during the whole listing. It must have no range that never existed.
#[test]
fn handles_are_listed_while_they_change() {
    let _exclusive = exclusive_test();
    let make = |len: usize| pagemill().ranges.allocate(len, Behaviour::Full).unwrap();
    let kept: Vec<VolatileBuf> = (0..50).map(|_| make(64 << 10)).collect();
    kept[0].mark().unwrap();
    let pin = kept[0].pin().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                let range = make(64 << 10);
                range.mark().unwrap();
                let _ = (range.pin().unwrap(), range.unmark().unwrap());
            }
        });
        for _ in 0..2000 {
            let found = list_handles();
            for range in &kept {
                let listed: Vec<_> = found.iter().filter(|listed| listed.addr == range.addr()).collect();
                let expected = if range.addr() == kept[0].addr() { RangeState::Pinned } else { RangeState::Held };
                assert_eq!((listed.len(), listed[0].state), (1, expected));
            }
            assert!(found.len() <= kept.len() + 1);
            let is_known = |listed: &Listed| listed.kind == RangeKind::Handle && listed.len_bytes == 64 << 10;
            assert!(found.iter().all(|listed| is_known(listed) && listed.purged_bytes == Some(0)));
        }
        is_over.store(true, Relaxed);
    });
    drop(pin);
    drop(kept);
    assert!(list_handles().is_empty(), "free ones are not listed");
}
