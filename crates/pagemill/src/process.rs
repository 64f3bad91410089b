//! The one Pagemill of a process: created at first use, governed by the kernel's limits, safe across `fork`, visible to
//! `pagemill` commands.
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

/// Held during creation and across `fork`.
static MAKING: Lock = Lock::new();
static OF_PROCESS: OnceLock<&'static Pagemill> = OnceLock::new();

static KERNEL: Kernel = Kernel::new("");

impl Pagemill {
    /// Returns the Pagemill of this process; the first call creates it. It observes the limits of the memory control
    /// groups and of the machine. Its helper thread gives memory back before they are met, and its fork handlers keep
    /// it consistent. Its figures are published in the user's folder until the process ends, for `pagemill meminfo` and
    /// others.
    ///
    /// A fork child has neither helper nor figures until it calls this.
    ///
    /// Cost: one atomic load; the first call takes address space, a thread, a file of 64 KiB and some pages.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if address space or the exit and fork handlers cannot be had.
    pub fn of_process() -> Result<&'static Self> {
        let pagemill = match OF_PROCESS.get() {
            Some(known) => known,
            None => make()?,
        };
        // The C library allocates to create a thread, so this runs outside the lock.
        if !pagemill.helper.is_running() && pagemill.helper.claim() {
            // If publishing fails the process runs without published figures.
            let _ = published::publish();
            if thread::spawn(c"pagemill", pagemill).is_err() {
                pagemill.helper.unclaim();
            }
        }
        Ok(pagemill)
    }
}

impl Pagemill {
    /// Sets when free memory returns to the system without a request and without pressure. The default is
    /// [`Return::BALANCED`]. Contents of volatile ranges and of caches are not free memory: only pressure drops them.
    pub fn set_return(&self, policy: Return) {
        self.helper.set_return(policy);
    }
}

impl thread::Work for Pagemill {
    fn work(&'static self) {
        self.helper.run(self.arena);
    }
}

fn make() -> Result<&'static Pagemill> {
    let _guard = MAKING.lock();
    if let Some(known) = OF_PROCESS.get() {
        return Ok(known);
    }
    let pagemill = Pagemill::new(Layout::for_program(), UNLIMITED)?;
    pagemill.account.headroom.set_limits(&KERNEL);
    let runtime = file::environment(c"XDG_RUNTIME_DIR").and_then(|path| path.to_str().ok());
    published::set_home("", runtime.unwrap_or_default());
    process::at_exit(end).map_err(Error::system("registering the exit handler"))?;
    process::at_fork(before_fork, after_fork, begin_child).map_err(Error::system("registering the fork handlers"))?;
    Ok(OF_PROCESS.get_or_init(|| pagemill))
}

extern "C" fn end() {
    if let Some(pagemill) = OF_PROCESS.get() {
        // Objects that callbacks use may be destroyed from here on.
        pagemill.slabs.defrag_by_hand();
    }
    published::withdraw();
}

extern "C" fn before_fork() {
    MAKING.acquire();
    if let Some(pagemill) = OF_PROCESS.get() {
        // SAFETY: the C library calls this, then `after_fork` on the same thread, on both sides.
        unsafe { pagemill.before_fork() };
    }
}

extern "C" fn after_fork() {
    if let Some(pagemill) = OF_PROCESS.get() {
        // SAFETY: `before_fork` came before; `MAKING` is held since, so the Pagemill was there then, or is not now.
        unsafe { pagemill.after_fork() };
    }
    MAKING.release();
}

extern "C" fn begin_child() {
    after_fork();
    if let Some(pagemill) = OF_PROCESS.get() {
        // SAFETY: called in the child, which has this thread; the locks are released.
        unsafe { pagemill.begin_child() };
    }
}
