//! Backends of a ring: the kernel's io_uring, or threads where that is refused.
#![allow(unsafe_code)] // transfers name memory

use super::threads::Crew;
use crate::buffer::{Aligned, Buffer};
use crate::errno::{self, EAGAIN, EBUSY, EOPNOTSUPP};
use crate::uring::{self, Completion, Target, Transfer};
use pagemill_sys::waker::Waker;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Token of the read of the waker's eventfd; no transfer has it.
const WAKER_READ: u64 = u64::MAX - 1;

/// Longest single wait; stands for an infinite one.
const LONG: Duration = Duration::from_secs(3600);

/// Ends a wait. Threads that complete transfers only wake the waker.
pub(super) struct Call {
    is_called: AtomicBool,
    pub waker: Waker,
    /// The eventfd that event loops poll, if one was requested. It must be woken directly. The ring could signal it
    /// when the waker's read completes, but the kernel (Linux 6.18) passes a signal from one eventfd on to another only
    /// the first time.
    watch: OnceLock<Arc<Waker>>,
}

impl Call {
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self { is_called: AtomicBool::new(false), waker: Waker::new()?, watch: OnceLock::new() }))
    }

    pub fn call(&self) {
        self.is_called.store(true, SeqCst);
        self.waker.wake();
        if let Some(watch) = self.watch.get() {
            watch.wake();
        }
    }
}

/// A waker; the ring reads its eventfd.
pub(super) struct Alarm {
    call: Arc<Call>,
    /// Target of that read; the kernel writes here until the ring is closed.
    count: Aligned,
    is_set: bool,
}

#[allow(clippy::large_enum_variant)] // one a ring, reached with every transfer
pub(super) enum Backend {
    Kernel {
        ring: uring::Ring,
        alarm: Option<Box<Alarm>>,
        /// Signalled on completions, for event loops.
        watch: Option<Arc<Waker>>,
    },
    Threads(Crew),
}

impl Backend {
    pub fn kernel(depth: u32) -> io::Result<Self> {
        Ok(Self::Kernel { ring: uring::Ring::new(depth)?, alarm: None, watch: None })
    }

    pub fn threads() -> io::Result<Self> {
        Crew::new().map(Self::Threads)
    }

    pub fn is_kernel(&self) -> bool {
        matches!(self, Self::Kernel { .. })
    }

    /// # Errors
    ///
    /// The error of submitting, if the queue was full.
    ///
    /// # Safety
    ///
    /// As `uring::Ring::queue`; the file stays open until the completion has come.
    pub unsafe fn queue(&mut self, transfer: &Transfer, token: u64) -> io::Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Self::Kernel { ring, .. } => unsafe { ring.queue(transfer, token) },
            Self::Threads(crew) => {
                // SAFETY: the caller's promise.
                unsafe { crew.queue(transfer, token) };
                Ok(())
            }
        }
    }

    pub fn cancel(&mut self, token: u64) -> io::Result<()> {
        match self {
            Self::Kernel { ring, .. } => ring.queue_cancel(token),
            Self::Threads(crew) => {
                crew.cancel(token);
                Ok(())
            }
        }
    }

    #[cfg(any(test, feature = "test-util"))]
    pub fn has_queued(&mut self) -> bool {
        match self {
            Self::Kernel { ring, .. } => ring.has_queued(),
            Self::Threads(crew) => crew.has_queued(),
        }
    }

    /// Starts the queued transfers, or as many as the kernel has room for.
    pub fn submit(&mut self) -> io::Result<()> {
        match self {
            Self::Kernel { ring, .. } => {
                if ring.has_queued() {
                    return unless_busy(ring.submit());
                }
                Ok(())
            }
            Self::Threads(crew) => {
                crew.submit();
                Ok(())
            }
        }
    }

    /// Starts the queued transfers. Waits for `least` completions (0 returns those that are there), the waker, a
    /// signal, or the timeout.
    pub fn wait(&mut self, least: usize, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Kernel { ring, alarm, watch } => {
                if let Some(alarm) = alarm {
                    alarm.set(ring)?;
                }
                // Cleared before the completions are checked: a later completion signals it again.
                if let Some(watch) = watch {
                    watch.wait(Duration::ZERO);
                }
                unless_busy(ring.wait(least, timeout.min(LONG)))
            }
            Self::Threads(crew) => {
                crew.wait(if least == 0 { Duration::ZERO } else { timeout.min(LONG) });
                Ok(())
            }
        }
    }

    /// Returns the next completion. Consumes those of the waker on the way.
    pub fn pop(&mut self) -> Option<Completion> {
        match self {
            Self::Kernel { ring, alarm, .. } => loop {
                let done = ring.pop()?;
                match alarm {
                    Some(alarm) if done.token == WAKER_READ => alarm.is_set = false,
                    _ => return Some(done),
                }
            },
            Self::Threads(crew) => crew.pop(),
        }
    }

    /// Returns the handle that ends waits from here on. Its read uses one entry of the kernel's queue.
    pub fn waker(&mut self) -> io::Result<Arc<Call>> {
        match self {
            Self::Kernel { alarm: Some(alarm), .. } => Ok(alarm.call.clone()),
            Self::Kernel { alarm, watch, .. } => {
                let count = Aligned::new(size_of::<u64>(), align_of::<u64>());
                let new = Box::new(Alarm { call: Call::new()?, count, is_set: false });
                if let Some(watch) = watch {
                    let _ = new.call.watch.set(watch.clone());
                }
                Ok(alarm.insert(new).call.clone())
            }
            Self::Threads(crew) => Ok(crew.call().clone()),
        }
    }

    /// Returns a descriptor that becomes readable when completions have arrived since the last wait.
    pub fn watch(&mut self) -> io::Result<BorrowedFd<'_>> {
        match self {
            Self::Kernel { watch: Some(watch), .. } => Ok(Waker::as_fd(watch)),
            Self::Kernel { ring, watch, alarm } => {
                let waker = Arc::new(Waker::new()?);
                ring.wake_on_completion(&waker)?;
                if let Some(alarm) = alarm {
                    let _ = alarm.call.watch.set(waker.clone());
                }
                // For completions that arrived before.
                waker.wake();
                Ok(Waker::as_fd(watch.insert(waker)))
            }
            Self::Threads(crew) => Ok(crew.call().waker.as_fd()),
        }
    }

    /// Returns whether the waker was woken since the last call.
    pub fn take_call(&self) -> bool {
        let call = match self {
            Self::Kernel { alarm, .. } => alarm.as_ref().map(|alarm| &alarm.call),
            Self::Threads(crew) => Some(crew.call()),
        };
        call.is_some_and(|call| call.is_called.swap(false, SeqCst))
    }

    /// Ends the read of the waker, so that the ring can be closed. Returns whether it has ended.
    pub fn stop_waker(&mut self, timeout: Duration) -> bool {
        let Self::Kernel { ring, alarm: Some(alarm), .. } = self else { return true };
        // Wakes it, so that the read completes.
        alarm.call.waker.wake();
        let mut tries = 0;
        while alarm.is_set && tries < 8 {
            tries += 1;
            let _ = ring.wait(1, timeout / 8);
            while let Some(done) = ring.pop() {
                alarm.is_set &= done.token != WAKER_READ;
            }
        }
        !alarm.is_set
    }

    /// Returns the kernel's ring, for its tables.
    pub fn tables(&mut self) -> io::Result<&mut uring::Ring> {
        match self {
            Self::Kernel { ring, .. } => Ok(ring),
            Self::Threads(_) => Err(errno::error(EOPNOTSUPP)),
        }
    }
}

/// `EAGAIN` and `EBUSY` are no failures: the caller takes completions and tries again.
fn unless_busy(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if errno::is(&error, EAGAIN) || errno::is(&error, EBUSY) => {
            pagemill_sys::thread::pause();
            Ok(())
        }
        result => result,
    }
}

impl Alarm {
    fn set(&mut self, ring: &mut uring::Ring) -> io::Result<()> {
        if self.is_set {
            return Ok(());
        }
        let read = Transfer {
            target: Target::Descriptor(self.call.waker.number()),
            is_write: false,
            addr: self.count.addr().as_ptr() as usize,
            len_bytes: size_of::<u64>() as u32,
            offset: 0,
            registered: None,
        };
        // SAFETY: the alarm stays with its ring, which is closed after this read has ended, or never closed; no other
        // code reads the count.
        unsafe { ring.queue(&read, WAKER_READ) }?;
        self.is_set = true;
        Ok(())
    }
}
