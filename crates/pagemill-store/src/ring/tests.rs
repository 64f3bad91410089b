//! Tests of rings on files, with both backends. A transfer that does not end is a read of an empty pipe, which only
//! these tests can attach.
#![allow(unsafe_code)] // buffers of its own kinds

use super::*;
use crate::FileStore;
use crate::errno::{EBUSY, EINVAL};
use crate::{Aligned, FileOptions, Store};
use std::io::Write;
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;

const KIB: usize = 1 << 10;
const LONG_TIMEOUT: Duration = Duration::from_secs(600);

fn settings(engine: Engine) -> Settings {
    Settings { depth: 8, timeout: LONG_TIMEOUT, engine }
}

/// Returns two rings: one by io_uring (by threads if the kernel refuses it), and one by threads.
fn rings() -> Vec<Ring<Aligned>> {
    [Engine::Best, Engine::Threads].map(|engine| Ring::new(&settings(engine)).unwrap()).into()
}

fn buffer(len: usize, fill: u8) -> Aligned {
    let mut buffer = Aligned::new(len, 4 * KIB);
    buffer.fill(fill);
    buffer
}

fn wait_for_end<B: Buffer>(ring: &mut Ring<B>) -> (RequestId, B, io::Result<()>) {
    ring.wait(1, LONG_TIMEOUT).unwrap();
    match ring.next().expect("no event in time") {
        Event::Done { id, buffer, result } => (id, buffer, result),
        Event::Late { id } => panic!("{id:?} is late"),
    }
}

/// Returns a ring by io_uring. If the kernel refuses io_uring, prints a message and returns `None`.
fn kernel_ring<B: Buffer>(timeout: Duration) -> Option<Ring<B>> {
    let ring = Ring::new(&Settings { depth: 4, timeout, engine: Engine::Best }).unwrap();
    if ring.is_kernel() {
        return Some(ring);
    }
    println!("skipped: the kernel refuses rings");
    None
}

/// A ring writes at several offsets and lengths, aligned or not. Reads by the ring and by the store must return the
/// written bytes, and zeros past the end of the file.
#[test]
fn unaligned_transfers_are_complete() {
    for mut ring in rings() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::create(folder.path().join("file")).unwrap();
        let file = ring.attach(&store).unwrap();
        assert_eq!(ring.attach(&store).unwrap(), file);
        for (round, (offset, len)) in
            [(0, 8 * KIB), (0, 5000), (4 * KIB, 1), (8 * KIB, 64 * KIB), (100, 3), (64 * KIB, 4 * KIB + 511)]
                .into_iter()
                .enumerate()
        {
            let fill = round as u8 + 1;
            let id = ring.write(file, offset as u64, buffer(len, fill)).unwrap();
            let (ended, written, result) = wait_for_end(&mut ring);
            result.unwrap();
            assert!(ended == id && written.len() == len);
            let size = store.size_bytes().unwrap() as usize;
            assert!(size >= offset + len);
            ring.read(file, offset as u64, buffer(len + 8 * KIB, 0xEE)).unwrap();
            let (_, read, result) = wait_for_end(&mut ring);
            result.unwrap();
            assert!(read[..len].iter().all(|byte| *byte == fill), "{offset} {len}");
            assert!(read[(size - offset).min(read.len())..].iter().all(|byte| *byte == 0), "{offset} {len}");
            let mut blocking = vec![0xEE; read.len()];
            store.read(offset as u64, &mut blocking).unwrap();
            assert!(blocking[..] == read[..], "{offset} {len}");
        }
        let size = store.size_bytes().unwrap();
        assert_eq!(size, (68 * KIB + 511).max(72 * KIB) as u64);
    }
}

/// A ring of depth 8 must accept eight transfers, and refuse a ninth until the caller takes events. A transfer of zero
/// bytes must end at once.
#[test]
fn depth_is_bounded() {
    for mut ring in rings() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::create(folder.path().join("file")).unwrap();
        let file = ring.attach(&store).unwrap();
        for at in 0..8 {
            ring.write(file, at * 4 * KIB as u64, buffer(4 * KIB, at as u8)).unwrap();
        }
        assert!(ring.is_full() && ring.write(file, 0, buffer(1, 0)).is_err());
        assert_eq!(ring.wait(8, LONG_TIMEOUT).unwrap(), 8);
        assert!(ring.is_full() && ring.in_flight() == 0);
        let mut ids = Vec::new();
        while let Some(Event::Done { id, result, .. }) = ring.next() {
            result.unwrap();
            assert!(!ids.contains(&id));
            ids.push(id);
        }
        assert_eq!(ids.len(), 8);
        let id = ring.read(file, 0, buffer(0, 0)).unwrap();
        assert_eq!(wait_for_end(&mut ring).0, id);
        assert!(!ids.contains(&id));
    }
}

/// A transfer that cannot succeed must end with an error event that returns its buffer. The next transfer must succeed.
#[test]
fn failures_are_reported_with_the_buffer() {
    for mut ring in rings() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"bytes").unwrap();
        let store = FileStore::open_read_only(&path).unwrap();
        let file = ring.attach(&store).unwrap();
        ring.write(file, 0, buffer(KIB, 1)).unwrap();
        let (_, _, result) = wait_for_end(&mut ring);
        assert_eq!(result.unwrap_err().raw_os_error(), Some(EBADF));
        ring.read(file, 1 << 63, buffer(KIB, 1)).unwrap();
        assert_eq!(wait_for_end(&mut ring).2.unwrap_err().raw_os_error(), Some(EINVAL));
        ring.read(file, 0, buffer(KIB, 1)).unwrap();
        let (_, read, result) = wait_for_end(&mut ring);
        assert!(result.is_ok() && &read[..6] == b"bytes\0");
        ring.detach(file).unwrap();
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ring.read(file, 0, buffer(1, 0)))).is_err());
    }
}

/// One of two stores is dropped. [`Ring::sweep`] must detach its file, but not before the file's last transfer has
/// ended. The file of the other store must stay attached.
#[test]
fn a_file_is_detached_after_its_store_is_dropped() {
    for mut ring in rings() {
        let folder = tempfile::tempdir().unwrap();
        let stores = ["a", "b"].map(|name| FileStore::create(folder.path().join(name)).unwrap());
        let ids = [ring.attach(&stores[0]).unwrap(), ring.attach(&stores[1]).unwrap()];
        ring.write(ids[0], 0, buffer(KIB, 1)).unwrap();
        if ring.in_flight() > 0 {
            assert_eq!(ring.detach(ids[0]).unwrap_err().raw_os_error(), Some(EBUSY));
        }
        let [first, second] = stores;
        drop(first);
        assert_eq!(ring.sweep(), ring.in_flight() == 0);
        wait_for_end(&mut ring).2.unwrap();
        assert!(ring.sweep());
        assert!(ring.files[0].is_none() && ring.files[1].is_some());
        let third = FileStore::create(folder.path().join("a")).unwrap();
        assert_eq!(ring.attach(&third).unwrap(), ids[0]);
        ring.read(ids[0], 0, buffer(KIB, 0)).unwrap();
        assert_eq!(wait_for_end(&mut ring).1[0], 1);
        drop(second);
    }
}

/// A file is attached to two rings, and its store is dropped. [`Ring::sweep`] of each ring must detach the file, which
/// closes it.
#[test]
fn a_file_of_two_rings_is_closed_after_its_store_is_dropped() {
    let mut rings = rings();
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::create(folder.path().join("a")).unwrap();
    rings.iter_mut().for_each(|ring| _ = ring.attach(&store).unwrap());
    let handle = Arc::downgrade(store.handle());
    drop(store);
    assert!(rings.iter_mut().all(Ring::sweep));
    assert_eq!(handle.strong_count(), 0, "no ring uses the file");
}

/// A region of memory is registered. [`Regions::find`] must find the region for each range inside it, and for no other
/// range. While a transfer inside the region is in flight, unregistering the region must fail.
#[test]
fn registered_memory_is_used() {
    /// A range of memory that the test owns.
    #[derive(Debug)]
    struct Subrange(NonNull<u8>, usize);
    // SAFETY: the memory outlives the ring, and one transfer at a time uses it.
    unsafe impl Buffer for Subrange {
        fn addr(&self) -> NonNull<u8> {
            self.0
        }
        fn len_bytes(&self) -> usize {
            self.1
        }
    }
    let Some(mut ring) = kernel_ring::<Subrange>(LONG_TIMEOUT) else { return };
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::create(folder.path().join("file")).unwrap();
    let file = ring.attach(&store).unwrap();
    let memory = buffer(64 * KIB, 7);
    let base = memory.addr();
    let subrange = |from: usize, len: usize| Subrange(NonNull::new(base.as_ptr().wrapping_add(from)).unwrap(), len);
    let id = match ring.register(Box::new(subrange(8 * KIB, 32 * KIB))) {
        Ok(id) => id,
        Err((error, _)) => return println!("skipped: memory cannot be registered: {error}"),
    };
    let addr = base.as_ptr() as usize;
    assert!(ring.regions.find(addr + 8 * KIB, 32 * KIB).is_some());
    for (from, len) in [(8 * KIB - 1, 2), (8 * KIB, 32 * KIB + 1), (40 * KIB, 1), (0, KIB)] {
        assert!(ring.regions.find(addr + from, len).is_none(), "{from} {len}");
    }
    for (from, len) in [(0, 9 * KIB), (39 * KIB, 9 * KIB), (12 * KIB, KIB), (0, 64 * KIB), (0, 0)] {
        let (error, _) = ring.register(Box::new(subrange(from, len))).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(EINVAL), "{from} {len}");
    }
    ring.write(file, 0, subrange(8 * KIB, 8 * KIB)).unwrap();
    ring.write(file, 8192, subrange(0, KIB)).unwrap();
    if ring.in_flight() == 2 {
        assert_eq!(ring.unregister(id).err().unwrap().raw_os_error(), Some(EBUSY));
    }
    wait_for_end(&mut ring).2.unwrap();
    wait_for_end(&mut ring).2.unwrap();
    assert_eq!(store.size_bytes().unwrap(), 9 * KIB as u64);
    assert_eq!(ring.unregister(id).unwrap().len_bytes(), 32 * KIB);
    assert_eq!(ring.unregister(id).err().unwrap().raw_os_error(), Some(EINVAL));
    let Ok(_) = ring.register(Box::new(subrange(0, 8 * KIB))) else { panic!("the table entry is free again") };
    drop(ring);
    drop(memory);
}

/// A read of an empty pipe must end after it is cancelled. Cancelling a read that has ended must have no effect.
#[test]
fn in_flight_transfers_can_be_cancelled() {
    let Some(mut ring) = kernel_ring(LONG_TIMEOUT) else { return };
    let (handle, mut writer) = FileHandle::of_pipe();
    let file = ring.attach_handle(&handle).unwrap();
    let first = ring.read(file, 0, buffer(8, 0)).unwrap();
    let second = ring.read(file, 0, buffer(4, 0)).unwrap();
    ring.submit().unwrap();
    ring.cancel(first);
    let (id, _, result) = wait_for_end(&mut ring);
    assert!(id == first && result.unwrap_err().raw_os_error() == Some(ECANCELED));
    writer.write_all(b"four").unwrap();
    let (id, bytes, result) = wait_for_end(&mut ring);
    assert!(id == second && result.is_ok() && &bytes[..] == b"four");
    ring.cancel(second);
    assert!(ring.wait(0, LONG_TIMEOUT).unwrap() == 0 && ring.buffer(second).is_none());
}

/// A read of an empty pipe exceeds the time limit. The wait must return a `Late` event, and then the read must end with
/// `ETIMEDOUT`.
#[test]
fn late_transfers_are_reported_and_cancelled() {
    let Some(mut ring) = kernel_ring(Duration::from_millis(20)) else { return };
    let late_before = stats::get(Counter::TransfersLate);
    let (handle, _writer) = FileHandle::of_pipe();
    let file = ring.attach_handle(&handle).unwrap();
    let id = ring.read(file, 0, buffer(8, 0)).unwrap();
    ring.wait(1, LONG_TIMEOUT).unwrap();
    assert!(matches!(ring.next(), Some(Event::Late { id: late }) if late == id));
    let (ended, _, result) = wait_for_end(&mut ring);
    assert!(ended == id && result.unwrap_err().raw_os_error() == Some(ETIMEDOUT));
    assert!(stats::get(Counter::TransfersLate) > late_before);
}

/// A ring is dropped while a read of an empty pipe is in flight. The drop must cancel the read, wait for its end, and
/// free its buffer.
#[test]
fn dropping_a_ring_frees_its_buffers() {
    struct DropReporter(Aligned, Arc<AtomicBool>);
    // SAFETY: as for the memory that the value owns.
    unsafe impl Buffer for DropReporter {
        fn addr(&self) -> NonNull<u8> {
            self.0.addr()
        }
        fn len_bytes(&self) -> usize {
            self.0.len_bytes()
        }
    }
    impl Drop for DropReporter {
        fn drop(&mut self) {
            self.1.store(true, std::sync::atomic::Ordering::SeqCst);
        }
    }
    let Some(mut ring) = kernel_ring(LONG_TIMEOUT) else { return };
    ring.waker().unwrap();
    let (handle, _writer) = FileHandle::of_pipe();
    let file = ring.attach_handle(&handle).unwrap();
    let is_freed = Arc::new(AtomicBool::new(false));
    assert!(ring.read(file, 0, DropReporter(buffer(8, 0), is_freed.clone())).is_ok());
    ring.submit().unwrap();
    assert!(!is_freed.load(std::sync::atomic::Ordering::SeqCst));
    drop(ring);
    assert!(is_freed.load(std::sync::atomic::Ordering::SeqCst));
    assert_eq!(Arc::strong_count(&handle), 1);
}

/// A wake-up by another thread must end a wait. So must a wake-up that came before the wait. Neither may end a later
/// wait.
#[test]
fn a_waker_ends_a_wait() {
    for mut ring in rings() {
        let waker = ring.waker().unwrap();
        waker.wake();
        assert_eq!(ring.wait(1, LONG_TIMEOUT).unwrap(), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| waker.wake());
            assert_eq!(ring.wait(1, LONG_TIMEOUT).unwrap(), 0);
        });
        let folder = tempfile::tempdir().unwrap();
        let store = FileOptions::new().create().buffered().open(folder.path().join("file")).unwrap();
        let file = ring.attach(&store).unwrap();
        ring.write(file, 0, buffer(KIB, 1)).unwrap();
        wait_for_end(&mut ring).2.unwrap();
        assert_eq!(ring.wait(1, Duration::from_millis(1)).unwrap(), 0);
    }
}

/// An event loop polls the ring's descriptor. The descriptor must become readable once a transfer has ended.
#[test]
fn the_descriptor_becomes_readable_on_completion() {
    for mut ring in rings() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::create(folder.path().join("file")).unwrap();
        let file = ring.attach(&store).unwrap();
        ring.write(file, 0, buffer(64 * KIB, 1)).unwrap();
        ring.submit().unwrap();
        while ring.wait(0, LONG_TIMEOUT).unwrap() == 0 {
            assert!(pagemill_sys::waker::is_readable(ring.watch().unwrap(), LONG_TIMEOUT));
        }
        wait_for_end(&mut ring).2.unwrap();
    }
}

/// The ring's descriptor must become readable after every wake-up, even while no transfer is in flight.
#[test]
fn the_descriptor_becomes_readable_on_wake_up() {
    for mut ring in rings() {
        let waker = ring.waker().unwrap();
        for _ in 0..3 {
            while pagemill_sys::waker::is_readable(ring.watch().unwrap(), Duration::ZERO) {
                assert_eq!(ring.wait(0, LONG_TIMEOUT).unwrap(), 0);
            }
            waker.wake();
            assert!(pagemill_sys::waker::is_readable(ring.watch().unwrap(), LONG_TIMEOUT));
        }
    }
}
