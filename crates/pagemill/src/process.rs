//! [`Pagemill::of_process`]: the Pagemill that all code of a process shares.
//!
//! The first call creates the Pagemill, which respects the kernel's limits, handles `fork`, and publishes its figures
//! for `pagemill` commands.
#![allow(unsafe_code)] // fork handlers

use crate::pagemill::Pagemill;
use pagemill_core::arena::Layout;
use pagemill_core::error::{Error, Result};
use pagemill_core::published;
use pagemill_core::reclaim::Return;
use pagemill_core::reclaim::kernel::Kernel;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::sync::Lock;
use pagemill_sys::{file, process, thread};
use std::sync::OnceLock;

/// Lock that is held while the Pagemill is created and during `fork`.
static CREATION_LOCK: Lock = Lock::new();
/// The Pagemill of this process, once it was created.
static OF_PROCESS: OnceLock<&'static Pagemill> = OnceLock::new();

static KERNEL: Kernel = Kernel::new("");

impl Pagemill {
    /// Returns the Pagemill of this process; the first call creates it. Its helper thread observes the limits of the
    /// memory control groups and of the machine, and returns memory before a limit is reached. Fork handlers keep the
    /// Pagemill consistent. Its figures are published in the user's folder until the process ends, for `pagemill
    /// meminfo` and other commands.
    ///
    /// In a fork child, the first call of this function starts the helper thread and publishes the figures.
    ///
    /// Cost: two atomic loads. The first call reserves address space, starts a thread, and creates a file of 64 KiB.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if address space cannot be reserved, or the exit or fork handlers cannot be registered.
    pub fn of_process() -> Result<&'static Self> {
        let pagemill = match OF_PROCESS.get() {
            Some(known) => known,
            None => create()?,
        };
        // Creating a thread allocates through the C library, so it happens outside of the lock.
        if !pagemill.helper.is_running() && pagemill.helper.claim() {
            // If publishing fails, the process runs without published figures.
            let _ = published::publish();
            if thread::spawn(c"pagemill", pagemill).is_err() {
                pagemill.helper.unclaim();
            }
        }
        Ok(pagemill)
    }
}

impl Pagemill {
    /// Sets the time after which free memory returns to the system even without a request or pressure. The default is
    /// [`Return::BALANCED`]. The policy does not apply to the contents of volatile ranges and caches.
    pub fn set_return(&self, policy: Return) {
        self.helper.set_return(policy);
    }
}

impl thread::Work for Pagemill {
    fn work(&'static self) {
        self.helper.run(self.arena);
    }
}

/// Creates the Pagemill of this process, unless another thread has created it.
fn create() -> Result<&'static Pagemill> {
    let _guard = CREATION_LOCK.lock();
    if let Some(known) = OF_PROCESS.get() {
        return Ok(known);
    }
    let pagemill = Pagemill::new(Layout::for_program(), UNLIMITED)?;
    pagemill.account.headroom.set_limits(&KERNEL);
    let runtime = file::environment(c"XDG_RUNTIME_DIR").and_then(|path| path.to_str().ok());
    published::set_home("", runtime.unwrap_or_default());
    process::at_exit(at_exit).map_err(Error::system("registering the exit handler"))?;
    process::at_fork(before_fork, after_fork, begin_child).map_err(Error::system("registering the fork handlers"))?;
    Ok(OF_PROCESS.get_or_init(|| pagemill))
}

/// Stops background defragmentation and removes the figures file at exit.
extern "C" fn at_exit() {
    if let Some(pagemill) = OF_PROCESS.get() {
        // Exit destroys objects that the program's callbacks use. So background defragmentation stops calling them.
        pagemill.slabs.defrag_by_hand();
    }
    published::withdraw();
}

extern "C" fn before_fork() {
    CREATION_LOCK.acquire();
    if let Some(pagemill) = OF_PROCESS.get() {
        // SAFETY: the C library calls this, then `after_fork` on the same thread, on both sides.
        unsafe { pagemill.before_fork() };
    }
}

extern "C" fn after_fork() {
    if let Some(pagemill) = OF_PROCESS.get() {
        // SAFETY: `before_fork` ran and has held the lock since. So the Pagemill existed then if it exists now.
        unsafe { pagemill.after_fork() };
    }
    CREATION_LOCK.release();
}

extern "C" fn begin_child() {
    after_fork();
    if let Some(pagemill) = OF_PROCESS.get() {
        // SAFETY: this is the child, which has one thread, and `after_fork` has released the locks.
        unsafe { pagemill.begin_child() };
    }
}
