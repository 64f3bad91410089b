//! Backends of a ring: the kernel's io_uring, or threads where the kernel refuses a ring.
#![allow(unsafe_code)] // passes addresses of memory to the kernel

use super::threads::ThreadBackend;
use crate::buffer::{Aligned, Buffer};
use crate::errno::{self, EAGAIN, EBUSY, EOPNOTSUPP};
use crate::uring::{self, Completion, Target, Transfer};
use pagemill_sys::waker::Waker;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Token of the read of the waker's eventfd. No transfer has this token.
const WAKER_READ_TOKEN: u64 = u64::MAX - 1;

/// Maximum duration of one wait. Used in place of longer timeouts.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// The object with which any thread can end a wait of the ring's thread.
pub(super) struct WakeHandle {
    /// Whether [`WakeHandle::wake`] was called since the last [`Backend::take_wake`].
    is_woken: AtomicBool,
    /// The eventfd that ends a wait of the ring's thread.
    pub waker: Waker,
    /// The eventfd that event loops poll, if one was requested. A wake-up writes to it directly: the kernel (Linux
    /// 6.18) does not reliably forward a wake-up from the waker's eventfd to another eventfd through the ring.
    watch: OnceLock<Arc<Waker>>,
}

impl WakeHandle {
    /// Creates a handle that was not woken yet.
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self { is_woken: AtomicBool::new(false), waker: Waker::new()?, watch: OnceLock::new() }))
    }

    /// Ends the current wait of the ring's thread, or else its next wait.
    pub fn wake(&self) {
        self.is_woken.store(true, SeqCst);
        self.waker.wake();
        if let Some(watch) = self.watch.get() {
            watch.wake();
        }
    }
}

/// The waker of an io_uring, and the queued read of its eventfd.
pub(super) struct WakerRead {
    handle: Arc<WakeHandle>,
    /// Buffer of the queued read. The kernel may write to the buffer until the ring is closed.
    count: Aligned,
    /// Whether a read of the eventfd is queued.
    is_queued: bool,
}

#[allow(clippy::large_enum_variant)] // one value per ring; a box would cost an indirection per transfer
/// The backend of one ring.
pub(super) enum Backend {
    Kernel {
        ring: uring::Ring,
        waker_read: Option<Box<WakerRead>>,
        /// Descriptor for event loops, signalled on completions.
        watch: Option<Arc<Waker>>,
    },
    Threads(ThreadBackend),
}

impl Backend {
    pub fn kernel(depth: u32) -> io::Result<Self> {
        Ok(Self::Kernel { ring: uring::Ring::new(depth)?, waker_read: None, watch: None })
    }

    pub fn threads() -> io::Result<Self> {
        ThreadBackend::new().map(Self::Threads)
    }

    pub fn is_kernel(&self) -> bool {
        matches!(self, Self::Kernel { .. })
    }

    /// Queues a transfer.
    ///
    /// # Errors
    ///
    /// The error of submitting earlier entries, if the queue was full.
    ///
    /// # Safety
    ///
    /// As `uring::Ring::queue`. The file must stay open until the completion has arrived.
    pub unsafe fn queue(&mut self, transfer: &Transfer, token: u64) -> io::Result<()> {
        match self {
            // SAFETY: the caller keeps the promises of `queue`.
            Self::Kernel { ring, .. } => unsafe { ring.queue(transfer, token) }?,
            // SAFETY: the caller keeps the promises of `queue`.
            Self::Threads(threads) => unsafe { threads.queue(transfer, token) },
        }
        Ok(())
    }

    /// Requests that the piece with this token be cancelled. The piece's completion arrives in any case.
    pub fn cancel(&mut self, token: u64) -> io::Result<()> {
        match self {
            Self::Kernel { ring, .. } => ring.queue_cancel(token)?,
            Self::Threads(threads) => threads.cancel(token),
        }
        Ok(())
    }

    /// Returns the number of requests that are queued but not started.
    pub fn queued(&mut self) -> usize {
        match self {
            Self::Kernel { ring, .. } => ring.queued(),
            Self::Threads(threads) => threads.queued(),
        }
    }

    /// Starts the queued transfers, or as many as the kernel accepts now.
    pub fn submit(&mut self) -> io::Result<()> {
        match self {
            Self::Kernel { ring, .. } => {
                if ring.queued() > 0 {
                    ignore_busy(ring.submit())?;
                }
            }
            Self::Threads(threads) => threads.submit(),
        }
        Ok(())
    }

    /// Starts the queued transfers. Returns when `least` completions have arrived, the waker was woken, a signal has
    /// arrived, or the timeout has passed. With `least` 0, does not wait.
    pub fn wait(&mut self, least: usize, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Kernel { ring, waker_read, watch } => {
                if let Some(waker_read) = waker_read {
                    waker_read.queue(ring)?;
                }
                // The descriptor is cleared before the completions are checked. A later completion signals it again.
                if let Some(watch) = watch {
                    watch.wait(Duration::ZERO);
                }
                ignore_busy(ring.wait(least, timeout.min(MAX_WAIT)))?;
            }
            Self::Threads(threads) => threads.wait(if least == 0 { Duration::ZERO } else { timeout.min(MAX_WAIT) }),
        }
        Ok(())
    }

    /// Returns the next completion of a transfer. Discards completions of the waker's read.
    pub fn pop(&mut self) -> Option<Completion> {
        match self {
            Self::Kernel { ring, waker_read, .. } => loop {
                let done = ring.pop()?;
                match waker_read {
                    Some(waker_read) if done.token == WAKER_READ_TOKEN => waker_read.is_queued = false,
                    _ => return Some(done),
                }
            },
            Self::Threads(threads) => threads.pop(),
        }
    }

    /// Returns the object with which other threads end waits of this ring. The read of the object's eventfd uses one
    /// entry of the kernel's queue.
    pub fn waker(&mut self) -> io::Result<Arc<WakeHandle>> {
        match self {
            Self::Kernel { waker_read: Some(waker_read), .. } => Ok(waker_read.handle.clone()),
            Self::Kernel { waker_read, watch, .. } => {
                let count = Aligned::new(size_of::<u64>(), align_of::<u64>());
                let new = Box::new(WakerRead { handle: WakeHandle::new()?, count, is_queued: false });
                if let Some(watch) = watch {
                    let _ = new.handle.watch.set(watch.clone());
                }
                Ok(waker_read.insert(new).handle.clone())
            }
            Self::Threads(threads) => Ok(threads.wake_handle().clone()),
        }
    }

    /// Returns a descriptor that becomes readable when completions have arrived since the last wait.
    pub fn watch(&mut self) -> io::Result<BorrowedFd<'_>> {
        match self {
            Self::Kernel { watch: Some(watch), .. } => Ok(Waker::as_fd(watch)),
            Self::Kernel { ring, watch, waker_read } => {
                let waker = Arc::new(Waker::new()?);
                ring.wake_on_completion(&waker)?;
                if let Some(waker_read) = waker_read {
                    let _ = waker_read.handle.watch.set(waker.clone());
                }
                // Wake the event loop for earlier completions.
                waker.wake();
                Ok(Waker::as_fd(watch.insert(waker)))
            }
            Self::Threads(threads) => Ok(threads.wake_handle().waker.as_fd()),
        }
    }

    /// Returns whether the waker was woken since the last call of this function.
    pub fn take_wake(&self) -> bool {
        let handle = match self {
            Self::Kernel { waker_read, .. } => waker_read.as_ref().map(|waker_read| &waker_read.handle),
            Self::Threads(threads) => Some(threads.wake_handle()),
        };
        handle.is_some_and(|handle| handle.is_woken.swap(false, SeqCst))
    }

    /// Ends the read of the waker's eventfd, so that the ring can be closed. Returns whether the read has ended.
    pub fn stop_waker(&mut self, timeout: Duration) -> bool {
        let Self::Kernel { ring, waker_read: Some(waker_read), .. } = self else { return true };
        // The wake-up makes the read complete.
        waker_read.handle.waker.wake();
        let mut tries = 0;
        while waker_read.is_queued && tries < 8 {
            tries += 1;
            let _ = ring.wait(1, timeout / 8);
            while let Some(done) = ring.pop() {
                waker_read.is_queued &= done.token != WAKER_READ_TOKEN;
            }
        }
        !waker_read.is_queued
    }

    /// Returns the kernel's ring, which has tables of files and memory. Returns an error if threads do the transfers.
    pub fn kernel_ring(&mut self) -> io::Result<&mut uring::Ring> {
        match self {
            Self::Kernel { ring, .. } => Ok(ring),
            Self::Threads(_) => Err(errno::error(EOPNOTSUPP)),
        }
    }
}

/// Turns the errors `EAGAIN` and `EBUSY` into success after a short pause. The caller then collects completions, which
/// frees entries of the ring, and tries again.
fn ignore_busy(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if errno::is(&error, EAGAIN) || errno::is(&error, EBUSY) => {
            pagemill_sys::thread::pause();
            Ok(())
        }
        result => result,
    }
}

impl WakerRead {
    /// Queues a read of the waker's eventfd, unless such a read is queued already.
    fn queue(&mut self, ring: &mut uring::Ring) -> io::Result<()> {
        if self.is_queued {
            return Ok(());
        }
        let read = Transfer {
            target: Target::Descriptor(self.handle.waker.number()),
            is_write: false,
            addr: self.count.addr().as_ptr() as usize,
            len_bytes: size_of::<u64>() as u32,
            offset: 0,
            registered: None,
        };
        // SAFETY: `self` lives as long as its ring, which is closed after this read has ended, or never. No other code
        // reads `count`.
        unsafe { ring.queue(&read, WAKER_READ_TOKEN) }?;
        self.is_queued = true;
        Ok(())
    }
}
