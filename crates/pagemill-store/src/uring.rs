//! An io_uring: transfers are queued, submitted in batches, and complete in any order.
//!
//! This is a thin layer: the user of a [`Ring`] tracks which transfers are in flight. A ring belongs to one thread. On
//! Linux 6.1 and later, completions are processed when that thread waits, without interrupting it. A fork child must
//! not use the ring of its parent, because the ring's memory is not mapped there; it can only drop the ring.
#![allow(unsafe_code)] // queue entries contain addresses, and registering pins memory

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use pagemill_sys::waker::Waker;
use pagemill_sys::{file, process};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// Token of requests that the ring itself makes, such as cancels. Callers must not use it.
const OWN_TOKEN: u64 = u64::MAX;

/// Number of forks between this process and its ancestor that first called [`generation`].
static FORK_COUNT: AtomicU32 = AtomicU32::new(0);

extern "C" fn do_nothing() {}

extern "C" fn count_fork() {
    FORK_COUNT.fetch_add(1, Relaxed);
}

/// Returns the fork generation: a number that is larger by one in a fork child than in its parent.
///
/// # Errors
///
/// `ENOMEM` if the first call cannot register a fork handler.
pub fn generation() -> io::Result<u32> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    if *REGISTERED.get_or_init(|| process::at_fork(do_nothing, do_nothing, count_fork).is_ok()) {
        Ok(FORK_COUNT.load(Relaxed))
    } else {
        Err(io::ErrorKind::OutOfMemory.into())
    }
}

/// The file of a transfer: a descriptor, or a registered file.
///
/// Example: [`crate::Ring`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Descriptor(i32),
    /// An index into the ring's table of registered files.
    Registered(u32),
}

/// A read or write of a file.
///
/// Example: [`crate::Ring`].
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    pub target: Target,
    pub is_write: bool,
    pub addr: usize,
    pub len_bytes: u32,
    pub offset: u64,
    /// If the bytes lie in registered memory: index of that memory in the ring's table.
    pub registered: Option<u16>,
}

/// The result of a transfer.
///
/// Example: [`crate::Ring`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub token: u64,
    /// Bytes transferred, or a negative error number.
    pub result: i32,
}

/// An io_uring of one thread.
///
/// Example: [`crate::Ring`].
pub struct Ring {
    uring: ManuallyDrop<IoUring>,
    generation: u32,
}

impl Ring {
    /// Creates a ring for up to `depth` transfers in flight. The kernel rounds `depth` up to a power of two.
    ///
    /// # Errors
    ///
    /// `ENOSYS` or `EPERM` if rings are forbidden; `ENOMEM`, `EMFILE`.
    pub fn new(depth: u32) -> io::Result<Self> {
        let generation = generation()?;
        let mut builder = IoUring::builder();
        builder.dontfork().setup_clamp();
        // For older kernels all optional flags are omitted together, because `EINVAL` does not say which flag is
        // unknown.
        let mut best = builder.clone();
        best.setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        let uring = best.build(depth).or_else(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => builder.build(depth),
            _ => Err(error),
        })?;
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        Ok(Self { uring: ManuallyDrop::new(uring), generation })
    }

    /// Returns whether this process created the ring. False in a fork child that inherited the ring.
    pub fn is_ours(&self) -> bool {
        self.generation == FORK_COUNT.load(Relaxed)
    }

    /// Returns the kernel's ring, which only the process that created it may use.
    fn uring(&mut self) -> &mut IoUring {
        debug_assert!(self.is_ours(), "a fork child does not use the ring of its parent");
        &mut self.uring
    }

    /// Queues a transfer. [`Ring::submit`] or [`Ring::wait`] starts it.
    ///
    /// # Errors
    ///
    /// Errors of submitting, if the queue was full.
    ///
    /// # Safety
    ///
    /// Until the completion arrives or the process ends, the memory must stay mapped, and no thread may write to it. If
    /// the transfer is a read, no thread may read the memory either. A registered index must refer to memory that
    /// contains the bytes. The file must stay open until the transfer is submitted.
    pub unsafe fn queue(&mut self, transfer: &Transfer, token: u64) -> io::Result<()> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.push(&queue_entry(transfer).user_data(token)) }
    }

    /// Requests that the transfer with this token be cancelled. Its completion arrives in any case, with its result or
    /// with `ECANCELED`.
    ///
    /// # Errors
    ///
    /// As [`Ring::queue`].
    pub fn queue_cancel(&mut self, token: u64) -> io::Result<()> {
        // SAFETY: the entry contains no address.
        unsafe { self.push(&opcode::AsyncCancel::new(token).build().user_data(OWN_TOKEN)) }
    }

    /// Queues an entry. If the queue is full, submits the queued entries first.
    ///
    /// # Safety
    ///
    /// As [`Ring::queue`].
    unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: guaranteed by the caller.
            if unsafe { self.uring().submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.submit()?;
        }
    }

    /// Returns the number of entries that are queued but not submitted.
    pub fn queued(&mut self) -> usize {
        self.uring().submission().len()
    }

    /// Submits the queued entries without waiting.
    ///
    /// # Errors
    ///
    /// Errors of `io_uring_enter`: `EAGAIN`, or `EBUSY` if completions must be taken before.
    pub fn submit(&mut self) -> io::Result<()> {
        self.wait(0, Duration::ZERO)
    }

    /// Submits the queued entries and waits for `least` completions, a signal or the timeout. With `least` 0, does not
    /// wait.
    ///
    /// # Errors
    ///
    /// As [`Ring::submit`].
    pub fn wait(&mut self, least: usize, timeout: Duration) -> io::Result<()> {
        let submitter = self.uring().submitter();
        let time = Timespec::from(timeout);
        let result = if least == 0 {
            submitter.submit()
        } else {
            submitter.submit_with_args(least, &SubmitArgs::new().timespec(&time))
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes the next completion; `None` if none has arrived.
    pub fn pop(&mut self) -> Option<Completion> {
        let mut completions = self.uring().completion();
        let entry = completions.find(|entry| entry.user_data() != OWN_TOKEN)?;
        Some(Completion { token: entry.user_data(), result: entry.result() })
    }

    /// Creates an empty table for `len` ranges of memory. Needs Linux 5.19.
    ///
    /// # Errors
    ///
    /// `EINVAL` on older kernels; `ENOMEM`.
    pub fn make_memory_table(&mut self, len: u16) -> io::Result<()> {
        self.uring().submitter().register_buffers_sparse(len.into())
    }

    /// Pins memory and enters it in the table at index `place`, in place of the previous entry. Transfers that use the
    /// entry need no page lookup.
    ///
    /// # Errors
    ///
    /// `ENOMEM` beyond `RLIMIT_MEMLOCK`; `EFAULT` for memory that is unmapped or not writable; `EOPNOTSUPP` for mapped
    /// files.
    ///
    /// # Safety
    ///
    /// The memory must stay mapped until it is unregistered or the ring is dropped.
    pub unsafe fn register_memory(&mut self, place: u16, addr: usize, len_bytes: usize) -> io::Result<()> {
        let memory = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len_bytes };
        // SAFETY: guaranteed by the caller.
        unsafe { self.uring().submitter().register_buffers_update(place.into(), &[memory], None) }
    }

    /// Unpins the memory at index `place` of the table, at once or when the last in-flight transfer with it ends.
    ///
    /// # Errors
    ///
    /// Errors of `io_uring_register`.
    pub fn unregister_memory(&mut self, place: u16) -> io::Result<()> {
        // SAFETY: an empty entry contains no address.
        unsafe { self.register_memory(place, 0, 0) }
    }

    /// Creates an empty table for `len` files. Needs Linux 5.19.
    ///
    /// # Errors
    ///
    /// As [`Ring::make_memory_table`].
    pub fn make_file_table(&mut self, len: u32) -> io::Result<()> {
        self.uring().submitter().register_files_sparse(len)
    }

    /// Enters a file in the table at index `place`, in place of the previous entry; -1 clears the entry. The table
    /// keeps the file open.
    ///
    /// # Errors
    ///
    /// `EBADF`; `EINVAL` for an index outside the table.
    pub fn register_file(&mut self, place: u32, descriptor: i32) -> io::Result<()> {
        self.uring().submitter().register_files_update(place, &[descriptor]).map(drop)
    }

    /// Makes the kernel wake `waker` whenever completions arrive.
    ///
    /// The ring's own descriptor can be polled, too. But if completions are deferred to the ring's thread, such polls
    /// can miss them (seen on Linux 6.18, one poll in ten).
    ///
    /// # Errors
    ///
    /// `EBUSY` if a waker is already registered.
    pub fn wake_on_completion(&mut self, waker: &Waker) -> io::Result<()> {
        self.uring().submitter().register_eventfd(waker.number())
    }
}

/// Returns the queue entry of a transfer.
fn queue_entry(transfer: &Transfer) -> squeue::Entry {
    let Transfer { target, is_write, addr, len_bytes: len, offset, registered } = *transfer;
    let (number, flags) = match target {
        Target::Descriptor(number) => (number, squeue::Flags::empty()),
        Target::Registered(place) => (place as i32, squeue::Flags::FIXED_FILE),
    };
    let (file, memory) = (Fd(number), addr as *mut u8);
    let entry = match (is_write, registered) {
        (false, None) => opcode::Read::new(file, memory, len).offset(offset).build(),
        (false, Some(place)) => opcode::ReadFixed::new(file, memory, len, place).offset(offset).build(),
        (true, None) => opcode::Write::new(file, memory, len).offset(offset).build(),
        (true, Some(place)) => opcode::WriteFixed::new(file, memory, len, place).offset(offset).build(),
    };
    entry.flags(flags)
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: the field is not used again.
            unsafe { ManuallyDrop::drop(&mut self.uring) };
        } else {
            // The ring's memory is not mapped in the child; another mapping may be there.
            // SAFETY: the descriptor is the child's copy, and is not used again.
            drop(file::Fd::from(unsafe { OwnedFd::from_raw_fd(self.uring.as_raw_fd()) }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    const SECOND: Duration = Duration::from_secs(1);

    fn ring() -> Option<Ring> {
        Ring::new(4).inspect_err(|error| println!("skipped: no ring: {error}")).ok()
    }

    fn transfer(file: &impl AsRawFd, is_write: bool, bytes: &mut [u8], offset: u64) -> Transfer {
        Transfer {
            target: Target::Descriptor(file.as_raw_fd()),
            is_write,
            addr: bytes.as_mut_ptr() as usize,
            len_bytes: bytes.len() as u32,
            offset,
            registered: None,
        }
    }

    fn wait_for(ring: &mut Ring, token: u64) -> i32 {
        loop {
            match ring.pop() {
                Some(done) if done.token == token => return done.result,
                Some(done) => panic!("{done:?}"),
                None => ring.wait(1, SECOND).unwrap(),
            }
        }
    }

    /// Writes by descriptor from ordinary memory, and reads the bytes back by registered file into registered memory. They
    /// must be equal. After the file and the memory are unregistered, the same read must fail.
    #[test]
    fn transfers_move_the_bytes() {
        let Some(mut ring) = ring() else { return };
        let file = tempfile::tempfile().unwrap();
        let (mut out, mut back) = (vec![7u8; 10_000], vec![0u8; 10_000]);
        // SAFETY: both buffers live until the end of the test, which waits for each transfer.
        unsafe { ring.queue(&transfer(&file, true, &mut out, 5), 1) }.unwrap();
        assert_eq!(ring.queued(), 1);
        assert_eq!(wait_for(&mut ring, 1), 10_000);
        ring.make_file_table(2).unwrap();
        ring.register_file(1, file.as_raw_fd()).unwrap();
        ring.make_memory_table(4).unwrap();
        // SAFETY: as for the previous call.
        unsafe { ring.register_memory(3, back.as_mut_ptr() as usize, back.len()) }.unwrap();
        let mut read = transfer(&file, false, &mut back, 4);
        (read.target, read.registered) = (Target::Registered(1), Some(3));
        // SAFETY: as for the previous call.
        unsafe { ring.queue(&read, 2) }.unwrap();
        assert_eq!(wait_for(&mut ring, 2), 10_000);
        assert!(back[0] == 0 && back[1..].iter().all(|byte| *byte == 7));
        ring.unregister_memory(3).unwrap();
        ring.register_file(1, -1).unwrap();
        // SAFETY: as for the previous call.
        unsafe { ring.queue(&read, 3) }.unwrap();
        assert!(wait_for(&mut ring, 3) < 0, "the tables are empty");
    }

    /// A read of an empty pipe is in flight. A wait must time out. After a cancel, the read must complete with
    /// `ECANCELED`.
    #[test]
    fn waits_end_and_transfers_can_be_cancelled() {
        let Some(mut ring) = ring() else { return };
        let (reader, _writer) = io::pipe().unwrap();
        let mut bytes = vec![0u8; 8];
        // SAFETY: the buffer lives until the end of the test, which waits for the transfer.
        unsafe { ring.queue(&transfer(&reader, false, &mut bytes, 0), 9) }.unwrap();
        ring.wait(1, Duration::from_millis(1)).unwrap();
        assert_eq!(ring.pop(), None);
        ring.queue_cancel(9).unwrap();
        assert_eq!(wait_for(&mut ring, 9), -libc::ECANCELED);
    }

    /// Seven reads are queued in a ring for four. The full queue must be submitted before the fifth read is queued. A
    /// transfer that fails must report its error.
    #[test]
    fn a_full_queue_is_submitted() {
        let Some(mut ring) = ring() else { return };
        let file = File::open("/proc/self/exe").unwrap();
        let mut bytes = vec![0u8; 8];
        let read = transfer(&file, false, &mut bytes, 0);
        for token in 0..7 {
            // SAFETY: the buffer lives until the end of the test, which waits for the transfer.
            unsafe { ring.queue(&read, token) }.unwrap();
        }
        let mut tokens = Vec::new();
        while tokens.len() < 7 {
            ring.wait(1, SECOND).unwrap();
            while let Some(done) = ring.pop() {
                assert_eq!(done.result, 8);
                tokens.push(done.token);
            }
        }
        tokens.sort_unstable();
        assert_eq!(tokens, [0, 1, 2, 3, 4, 5, 6]);
        // SAFETY: the buffer lives until the end of the test, which waits for each transfer.
        unsafe { ring.queue(&Transfer { target: Target::Descriptor(-1), ..read }, 8) }.unwrap();
        assert_eq!(wait_for(&mut ring, 8), -libc::EBADF);
    }
}
