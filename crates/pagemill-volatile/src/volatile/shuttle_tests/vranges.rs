//! Shuttle tests of ranges that are marked by address.
#![allow(unsafe_code)] // marks memory

use super::super::guards;
use super::super::vrange::{How, Marked, Mode};
use super::*;
use pagemill_sys::fault;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Number of pieces in an area. Each test uses two adjacent areas.
const PIECES: usize = 6;

std::thread_local! {
    /// Address of memory outside the arena, which all executions of a test use.
    static MAPPED_ADDR: usize = mem::map_sparse(2 * PIECES * PIECE_BYTES, PIECE_BYTES).unwrap();
}

/// A part of memory in which threads mark ranges.
#[derive(Clone, Copy)]
struct Area {
    vranges: &'static Vranges,
    addr: usize,
}

impl Area {
    /// Creates two adjacent areas, in a slot of the heap or in memory outside the arena.
    fn two_adjacent(fixture: &Fixture) -> [Self; 2] {
        let len = 2 * PIECES * PIECE_BYTES;
        let addr = match random_below(2) {
            0 => fixture.heap.allocate(len, PIECE_BYTES).unwrap().addr.as_ptr() as usize,
            _ => MAPPED_ADDR.with(|addr| *addr),
        };
        [addr, addr + PIECES * PIECE_BYTES].map(|addr| Self { vranges: fixture.vranges, addr })
    }

    fn call(self, part: &Range<usize>, mode: Mode, how: How) -> Marked {
        // SAFETY: the memory stays mapped, no reference to it exists, and its bytes are only compared.
        unsafe { self.vranges.vrange(self.addr + part.start * PIECE_BYTES, part.len() * PIECE_BYTES, mode, how) }
            .unwrap()
    }

    /// Returns a random mode of marking. Strict marks are used only if the kernel supports guards.
    fn random_mode(self) -> Mode {
        let has_guards = guards::prepare(&(self.addr..self.addr + PIECE_BYTES)).is_ok();
        if has_guards && random_below(2) == 0 { Mode::VolatileStrict } else { Mode::Volatile }
    }

    /// Returns whether a marked piece was purged: it reads zero or cannot be read.
    fn is_gone(self, piece: usize) -> bool {
        !fault::is_readable(self.addr + piece * PIECE_BYTES) || self.read(piece) == 0
    }

    fn read(self, piece: usize) -> u8 {
        byte_at(self.addr + piece * PIECE_BYTES)
    }

    fn write(self, piece: usize, byte: u8) {
        set_byte(self.addr + piece * PIECE_BYTES, byte);
    }

    fn forget(self, part: &Range<usize>) {
        self.vranges.forget(self.addr + part.start * PIECE_BYTES..self.addr + part.end * PIECE_BYTES);
    }
}

fn random_part() -> Range<usize> {
    let start = random_below(PIECES);
    start..start + 1 + random_below(PIECES - start)
}

fn random_how() -> How {
    if random_below(2) == 0 { How::Full } else { How::Partial }
}

/// An area that one thread uses, with the expected byte of each piece and whether the piece is marked.
struct UserArea {
    area: Area,
    bytes: [u8; PIECES],
    is_marked: [bool; PIECES],
}

impl UserArea {
    fn new(area: Area, byte: u8) -> Self {
        let mut owned = Self { area, bytes: [byte; PIECES], is_marked: [false; PIECES] };
        owned.renew(0..PIECES);
        owned
    }

    /// Writes new bytes to a part after it was unmarked.
    fn renew(&mut self, part: Range<usize>) {
        for piece in part {
            self.bytes[piece] = self.bytes[piece] % 0xFF + 1;
            self.area.write(piece, self.bytes[piece]);
            self.is_marked[piece] = false;
        }
    }

    /// Asserts that unmarked pieces have not changed.
    fn check(&self) {
        for piece in (0..PIECES).filter(|piece| !self.is_marked[*piece]) {
            assert_eq!(self.area.read(piece), self.bytes[piece], "nonvolatile memory changed");
        }
    }

    fn random_step(&mut self) {
        self.check();
        let part = random_part();
        match random_below(8) {
            0..3 => {
                let marked = self.area.call(&part, self.area.random_mode(), random_how());
                assert_eq!(marked.bytes as usize, part.len() * PIECE_BYTES);
                assert!(
                    !marked.purged || self.is_marked[part.clone()].contains(&true),
                    "new marks cannot have been purged"
                );
                self.is_marked[part].fill(true);
            }
            3..6 => self.unmark(part),
            6 => {
                // Removes the marks and writes new contents, as if the memory was freed and allocated again.
                self.area.forget(&part);
                self.renew(part);
            }
            _ => yield_randomly(),
        }
        yield_randomly();
        self.check();
    }

    fn unmark(&mut self, part: Range<usize>) {
        let unmarked = self.area.call(&part, Mode::Nonvolatile, How::Full);
        let were_marked = self.is_marked[part.clone()].iter().filter(|is_marked| **is_marked).count();
        assert_eq!(unmarked.bytes as usize, were_marked * PIECE_BYTES);
        assert!(!unmarked.purged || were_marked > 0);
        for piece in part.clone() {
            let found = self.area.read(piece);
            let may_be_gone = unmarked.purged && self.is_marked[piece];
            assert!(found == self.bytes[piece] || may_be_gone && found == 0, "piece {piece} went without a report");
        }
        self.renew(part);
    }
}

/// Asserts that the sums of marked bytes agree with the marks, that no piece is claimed, and that no thread waits for a
/// piece.
fn check_state(vranges: &Vranges) {
    vranges.table.with(|table| {
        assert_eq!((table.claimed, table.waiting), (0, 0));
        let (mut all, mut foreign) = (0, 0);
        for (range, mark) in table.marks.from(0) {
            assert!(!mark.is_purging);
            let bytes = if mark.is_empty { 0 } else { range.len() as u64 };
            all += bytes;
            foreign += if vranges.arena.contains(range.start) { 0 } else { bytes };
        }
        assert_eq!((table.sums.all, table.sums.foreign), (all, foreign));
        assert_eq!((vranges.giveable_bytes(), vranges.foreign_bytes()), (all, foreign));
        assert_eq!(vranges.is_empty(), table.marks.bytes() == 0);
    });
}

/// Purges all marked memory while no other thread runs, and asserts that nothing is left to purge.
fn purge_all(vranges: &Vranges) {
    skip_ticks(5);
    vranges.shrink(u64::MAX, Urgency::Limit);
    check_state(vranges);
    assert_eq!(vranges.giveable_bytes(), 0, "what is marked can go");
}

/// Two threads mark, unmark and forget overlapping parts of their own areas, which are adjacent, while purges run.
/// Bytes that are not marked must not change, and every purge must be reported to the thread that unmarks the memory.
#[test]
fn marks_race_purges() {
    run_in_many_schedules(|fixture| {
        let areas = Area::two_adjacent(&fixture);
        let left = Arc::new(Mutex::new(Vec::new()));
        let user = |area: Area, byte: u8| {
            let left = left.clone();
            Box::new(move || {
                let mut owned = UserArea::new(area, byte);
                (0..8).for_each(|_| owned.random_step());
                if random_below(2) == 0 {
                    owned.unmark(0..PIECES);
                    yield_randomly();
                }
                owned.check();
                left.lock().unwrap().push(owned);
            }) as Box<dyn FnOnce() + Send>
        };
        let others = move || (0..3).for_each(|_| fixture.purge_once());
        run_concurrently([
            user(areas[0], 1),
            user(areas[1], 100),
            Box::new(move || purge(fixture.vranges, 3)),
            Box::new(others),
        ]);
        check_state(fixture.vranges);
        purge_all(fixture.vranges);
        for owned in left.lock().unwrap().iter() {
            owned.check();
            let is_there = |piece: usize| owned.is_marked[piece] && !owned.area.is_gone(piece);
            assert!(!(0..PIECES).any(is_there), "what is marked could not go");
        }
        areas.iter().for_each(|area| area.forget(&(0..PIECES)));
        let can_be_read = |area: &Area| (0..PIECES).all(|piece| fault::is_readable(area.addr + piece * PIECE_BYTES));
        assert!(areas.iter().all(can_be_read), "guards are left");
        check_state(fixture.vranges);
        assert!(fixture.vranges.is_empty());
    });
}

/// Two threads mark and unmark the same memory while purges run. Each purge must be reported to at least one of the
/// threads.
#[test]
fn purge_of_shared_memory_is_reported() {
    run_in_many_schedules(|fixture| {
        let [area, _] = Area::two_adjacent(&fixture);
        (0..PIECES).for_each(|piece| area.write(piece, 7));
        let reported = Arc::new(Mutex::new([false; PIECES]));
        let user = || {
            let reported = reported.clone();
            move || {
                for _ in 0..5 {
                    let (part, mode) = (random_part(), [area.random_mode(), Mode::Nonvolatile][random_below(2)]);
                    if area.call(&part, mode, random_how()).purged {
                        reported.lock().unwrap()[part].fill(true);
                    }
                    yield_randomly();
                }
            }
        };
        run_concurrently([Box::new(user()), Box::new(user()), Box::new(move || purge(fixture.vranges, 4))]);
        check_state(fixture.vranges);
        for piece in 0..PIECES {
            let was_reported =
                area.call(&(piece..piece + 1), Mode::Nonvolatile, How::Full).purged || reported.lock().unwrap()[piece];
            assert!(was_reported || area.read(piece) == 7, "piece {piece} went without a report");
        }
        assert!(fixture.vranges.is_empty());
    });
}

/// Marks a piece of memory again while a purge runs. This piece must be purged after the other pieces, although the
/// purge queue was filled before.
#[test]
fn recently_marked_piece_is_purged_last() {
    run_in_many_schedules(|fixture| {
        let [area, _] = Area::two_adjacent(&fixture);
        (0..PIECES).for_each(|piece| area.write(piece, 7));
        // The marked pieces are not adjacent, because a purge joins adjacent pieces into one interval.
        let parts = [0, 2, 4].map(|piece| piece..piece + 1);
        for part in &parts {
            area.call(part, Mode::Volatile, How::Full);
            skip_ticks(2);
        }
        let used = random_below(2);
        let part = parts[used].clone();
        let user = move || {
            skip_ticks(2);
            if random_below(2) == 0 {
                area.call(&part, Mode::Nonvolatile, How::Full);
            }
            area.call(&part, Mode::Volatile, How::Full);
        };
        run_concurrently([Box::new(user), Box::new(move || purge(fixture.vranges, 1))]);
        let mut kept = parts.each_ref().map(|part| area.read(part.start) == 7);
        // A piece that was purged before it was unmarked reads zero. A second purge of this piece after the new mark
        // cannot be detected.
        while let Some(oldest) = (0..3).filter(|index| kept[*index]).min_by_key(|index| (*index == used, *index)) {
            fixture.vranges.shrink(1, Urgency::Limit);
            let after = parts.each_ref().map(|part| area.read(part.start) == 7);
            kept[oldest] = after[oldest];
            assert_eq!(after, kept, "another went than {oldest}; used: {used}");
        }
        area.forget(&(0..PIECES));
        check_state(fixture.vranges);
    });
}
