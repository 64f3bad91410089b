//! Faults of writeback: the writes of two runs of dirty pages end in each way, for each call that writes them back.
//!
//! Writeback has the same steps as a read: it freezes folios, submits runs of them, completes the runs, and then marks
//! the folios clean. It allocates nothing that can fail. Writeback for room is in [`super::reserve`].

use super::driver::Outcome;
use super::reads::ENDS;
use super::scene::{FILE_PAGES, LIMIT_PAGES, PAGE, Scene, TestCaches};
use super::store::End;
use super::{WAIT_LIMIT, wait_until};
use crate::mapping::{Mapping, PageCache};
use libc::{EBUSY, ECANCELED, EIO, ETIMEDOUT};
use pagemill_core::error::Result;
use pagemill_store::Store;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// A call that writes dirty pages back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trigger {
    Sync,
    WriteBack,
    /// What the flusher thread calls. It reports no error.
    Background,
    /// The drop of the last handle. It reports no error, and what the store does not take is lost.
    Close,
}

use Trigger::*;

const TRIGGERS: [Trigger; 4] = [Sync, WriteBack, Background, Close];

/// What happens while the store has the writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Nothing,
    /// The file is truncated to [`TRUNCATED_BYTES`], before the second run, and extended again.
    Truncated,
    /// The last handle of the file is dropped, and the drop waits until the timeout of writeback.
    Closed,
    TimedOut,
}

use Event::*;

/// The dirty pages: two runs, each written by one transfer.
const RUNS: [Range<usize>; 2] = [0..2, 4..6];

const TRUNCATED_BYTES: usize = 3 * PAGE;

/// Returns why an event cannot happen; `None` if it can.
fn why_impossible(trigger: Trigger, event: Event) -> Option<&'static str> {
    match (trigger, event) {
        (Sync | WriteBack, Closed) => Some("the call borrows the handle"),
        (Close, Closed | Truncated) => Some("there is no handle left"),
        (Background, TimedOut) => {
            Some("background writeback has a fixed limit of one second, which the test cannot shorten")
        }
        _ => None,
    }
}

/// Writes the dirty pages. Returns the bytes of the file before.
fn make_dirty(scene: &mut Scene) -> Vec<u8> {
    let before = scene.expected.clone();
    for page in RUNS.into_iter().flatten() {
        let bytes = [200 + page as u8; PAGE];
        scene.file().write_at(&bytes, (page * PAGE) as u64).unwrap();
        scene.expected[page * PAGE..(page + 1) * PAGE].copy_from_slice(&bytes);
    }
    before
}

fn run(trigger: Trigger, cache: &PageCache, file: Option<Arc<Mapping>>) -> Outcome {
    let call = || -> Result<()> {
        match trigger {
            Sync => file.expect("an open file").sync(),
            WriteBack => file.expect("an open file").write_back(0, u64::MAX),
            Background => {
                drop(file);
                cache.write_back_due();
                Ok(())
            }
            Close => {
                drop(file);
                Ok(())
            }
        }
    };
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => Outcome::Right,
        Ok(Err(error)) => Outcome::Error(error.errno()),
        Err(_) => Outcome::Panicked,
    }
}

/// Returns the outcome of a call if a write ends with `end`, in the caller's thread or in one of the store.
fn outcome_of(trigger: Trigger, end: End, is_in_callers_thread: bool) -> Outcome {
    match (trigger, end) {
        (Background | Close, _) | (_, End::Done) => Outcome::Right,
        (_, End::Panicked) if is_in_callers_thread => Outcome::Panicked,
        (_, End::Failed | End::Short) => Outcome::Error(EIO),
        (_, End::Cancelled | End::Panicked) => Outcome::Error(ECANCELED),
    }
}

/// Restores the bytes that the store did not take before its file was closed: all transfers but the first `done` ended
/// with `end`.
fn note_lost(scene: &mut Scene, before: &[u8], done: usize, end: End) {
    // A store with blocking calls gets the pending runs as soon as the second run has its first page. So the two pages
    // of the second run are written by two calls.
    let transfers = if scene.store.is_asynchronous() { RUNS.to_vec() } else { vec![0..2, 4..5, 5..6] };
    for transfer in transfers.into_iter().skip(done) {
        let len = transfer.len() * PAGE;
        let written = match end {
            End::Done => len,
            End::Short => len / 2,
            _ => 0,
        };
        let lost = transfer.start * PAGE + written..transfer.end * PAGE;
        scene.expected[lost.clone()].copy_from_slice(&before[lost]);
    }
}

/// The store works again. All bytes of an open file must get there. The first sync may report the failure.
fn check_written(scene: Scene, row: &str) {
    scene.store.succeed();
    if let Some(file) = &scene.file {
        let _ = file.sync();
        file.sync().expect(row);
        assert_eq!(file.dirty_bytes(), 0, "{row}");
    }
    let written = scene.store.inner.bytes();
    let wrong = written.iter().zip(&scene.expected).position(|(found, expected)| found != expected);
    assert_eq!((written.len(), wrong), (scene.expected.len(), None), "{row}: length and first wrong byte of the store");
    scene.check_unharmed(row);
}

/// *Submit*: both writes end during the call that starts them, or the first succeeds.
#[test]
fn writes_fail_when_they_are_submitted() {
    let caches = TestCaches::new();
    for (trigger, is_asynchronous) in TRIGGERS.map(|trigger| [(trigger, false), (trigger, true)]).into_iter().flatten()
    {
        for (first_calls, end) in ENDS.into_iter().flat_map(|end| [(0, end), (1, end)]) {
            let row = format!("{trigger:?}, asynchronous store: {is_asynchronous}, {first_calls} succeed, {end:?}");
            let mut scene = Scene::new(&caches, is_asynchronous, WAIT_LIMIT);
            let before = make_dirty(&mut scene);
            scene.store.end_calls(first_calls, end);
            let file = if trigger == Close { scene.file.take() } else { scene.file.clone() };
            assert_eq!(run(trigger, &scene.cache, file), outcome_of(trigger, end, true), "{row}");
            if trigger == Close {
                note_lost(&mut scene, &before, first_calls, end);
            }
            check_written(scene, &row);
        }
    }
}

/// The store fails or panics when it gets a new length, or when it makes the writes durable. A sync reports that, and a
/// later sync succeeds. The drop of the last handle needs only the new length, and reports nothing.
#[test]
fn syncs_fail_when_lengths_are_set_or_the_store_is_synced() {
    let caches = TestCaches::new();
    for (trigger, is_sync) in [(Sync, false), (Sync, true), (Close, false)] {
        for (is_longer, end) in ENDS.into_iter().flat_map(|end| [(false, end), (true, end)]) {
            let row = format!("{trigger:?}, sync fails: {is_sync}, longer file: {is_longer}, {end:?}");
            let mut scene = Scene::new(&caches, true, WAIT_LIMIT);
            let before = make_dirty(&mut scene);
            let size = if is_longer { (FILE_PAGES + 3) * PAGE } else { TRUNCATED_BYTES };
            scene.file().truncate(size as u64).unwrap();
            scene.expected.resize(size, 0);
            let others = if is_sync { (End::Done, end) } else { (end, End::Done) };
            scene.store.end_other_calls(others.0, others.1);
            let file = if trigger == Close { scene.file.take() } else { scene.file.clone() };
            assert_eq!(run(trigger, &scene.cache, file), outcome_of(trigger, end, true), "{row}");
            if trigger == Close && end != End::Done {
                if is_longer {
                    // The dirty pages are written before the store gets its new length.
                    scene.expected.truncate(FILE_PAGES * PAGE);
                } else {
                    scene.expected = before;
                }
            }
            check_written(scene, &row);
        }
    }
}

/// *Complete*: the store has both writes. An event happens, and then the writes end on another thread, in each way.
#[test]
fn writes_complete_late_in_each_way() {
    let caches = TestCaches::new();
    for trigger in TRIGGERS {
        for event in [Nothing, Truncated, Closed, TimedOut] {
            if why_impossible(trigger, event).is_none() {
                ENDS.into_iter().for_each(|end| complete_after_event(&caches, trigger, event, end));
            }
        }
    }
}

fn complete_after_event(caches: &TestCaches, trigger: Trigger, event: Event, end: End) {
    let row = format!("{trigger:?}, {event:?}, {end:?}");
    let timeout = if matches!(event, TimedOut | Closed) { Duration::from_millis(5) } else { WAIT_LIMIT };
    let mut scene = Scene::new(caches, true, timeout);
    let before = make_dirty(&mut scene);
    scene.store.keep(false);
    let mut handle = scene.file.take();
    let outcome = thread::scope(|scope| {
        let (store, cache) = (&scene.store, &scene.cache);
        let file = match trigger {
            Close => handle.take(),
            Background => None,
            _ => handle.clone(),
        };
        let calling = scope.spawn(move || run(trigger, cache, file));
        wait_until(&format!("{row}: the writes"), || store.kept() == RUNS.len());
        store.succeed();
        match event {
            Nothing => {}
            Truncated => {
                let file = handle.as_ref().expect("an open file");
                file.truncate(TRUNCATED_BYTES as u64).unwrap();
                file.truncate((FILE_PAGES * PAGE) as u64).unwrap();
            }
            Closed => drop(handle.take()),
            TimedOut => wait_until(&format!("{row}: the timeout"), || calling.is_finished()),
        }
        scope.spawn(|| store.release(end)).join().unwrap();
        calling.join().unwrap()
    });
    scene.file = handle;
    let expected = match (trigger, event) {
        (Sync | WriteBack, TimedOut) => Outcome::Error(EBUSY),
        _ => outcome_of(trigger, end, false),
    };
    assert_eq!(outcome, expected, "{row}");
    if event == Truncated {
        scene.expected[TRUNCATED_BYTES..].fill(0);
    }
    if scene.file.is_none() {
        note_lost(&mut scene, &before, 0, end);
    }
    check_written(scene, &row);
}

/// A writer is throttled because all memory of its cache is dirty, and writes its file back. That fails in each way, at
/// once, late or after the timeout. The writer gets the error, and all bytes written before reach the store later.
#[test]
fn throttled_writers_get_the_error_of_the_store() {
    let caches = TestCaches::new();
    for (end, is_late, is_timed_out) in
        ENDS.into_iter().flat_map(|end| [(end, false, false), (end, true, false), (end, true, true)])
    {
        let row = format!("{end:?}, late: {is_late}, timed out: {is_timed_out}");
        let timeout = if is_timed_out { Duration::from_millis(5) } else { WAIT_LIMIT };
        let mut scene = Scene::new(&caches, true, timeout);
        scene.other.dont_need(0, u64::MAX).unwrap();
        scene.expected = vec![5; LIMIT_PAGES * PAGE];
        scene.file().write_at(&scene.expected, 0).unwrap();
        if is_late {
            scene.store.keep(false);
        } else {
            scene.store.end_calls(0, end);
        }
        let end_offset = scene.expected.len() as u64;
        let outcome = thread::scope(|scope| {
            let (store, file) = (&scene.store, scene.file());
            let writing = scope.spawn(|| catch_unwind(AssertUnwindSafe(|| file.write_at(&[6; PAGE], end_offset))));
            if is_late {
                wait_until(&format!("{row}: the write"), || store.kept() > 0);
                if is_timed_out {
                    wait_until(&format!("{row}: the timeout"), || writing.is_finished());
                }
                scope.spawn(|| store.release(end)).join().unwrap();
            }
            match writing.join().unwrap() {
                Ok(Ok(len)) if len == PAGE => Outcome::Right,
                Ok(result) => Outcome::Error(result.expect_err(&row).errno()),
                Err(_) => Outcome::Panicked,
            }
        });
        let expected = if is_timed_out { Outcome::Error(ETIMEDOUT) } else { outcome_of(Sync, end, !is_late) };
        assert_eq!(outcome, expected, "{row}");
        if outcome == Outcome::Right {
            scene.expected.resize(scene.expected.len() + PAGE, 6);
        }
        check_written(scene, &row);
    }
}
