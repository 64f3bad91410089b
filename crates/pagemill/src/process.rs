//! The one Pagemill of a process: made at its first use, governed by what the kernel says, ready for `fork`, seen by
//! `pagemill` commands.

use crate::arena::Layout;
use crate::error::{Error, Result};
use crate::pagemill::Pagemill;
use crate::published;
use crate::reclaim::kernel::Kernel;
use crate::reclaim::tree::UNLIMITED;
use crate::sync::Lock;
use pagemill_sys::{file, process, thread};
use std::sync::OnceLock;

/// Held while it is made, and across `fork`.
static MAKING: Lock = Lock::new();
static OF_PROCESS: OnceLock<&'static Pagemill> = OnceLock::new();

static KERNEL: Kernel = Kernel::new("");

impl Pagemill {
    /// The Pagemill of this process. The first call makes it: it minds the limits of the memory control groups and of the
    /// machine, has a helper thread that gives back before they are met, and handlers that keep it whole across `fork`. Its
    /// figures are published in the user's folder, until the process ends: `pagemill meminfo` and others show them.
    ///
    /// A fork child has neither helper nor figures until it calls this.
    ///
    /// Cost: a look; the first time address space, a thread, a file of 64 KiB, some pages.
    ///
    /// # Errors
    ///
    /// [`Error::System`] without address space or thread.
    pub fn of_process() -> Result<&'static Self> {
        let pagemill = match OF_PROCESS.get() {
            Some(known) => known,
            None => make()?,
        };
        // The C library allocates for a thread: outside of the lock.
        if !pagemill.helper.is_running() && pagemill.helper.claim() {
            // Where that cannot be it goes on unseen.
            let _ = published::publish();
            if thread::spawn(c"pagemill", pagemill).is_err() {
                pagemill.helper.unclaim();
            }
        }
        Ok(pagemill)
    }
}

impl thread::Work for Pagemill {
    fn work(&'static self) {
        self.helper.run(self.arena, None);
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
    process::at_exit(end).map_err(Error::system("minding the end"))?;
    process::at_fork(before_fork, after_fork, begin_child).map_err(Error::system("minding forks"))?;
    Ok(OF_PROCESS.get_or_init(|| pagemill))
}

extern "C" fn end() {
    if let Some(pagemill) = OF_PROCESS.get() {
        // What callbacks use may go from here on.
        pagemill.slabs.defrag_by_hand();
    }
    published::withdraw();
}

extern "C" fn before_fork() {
    MAKING.acquire();
    if let Some(pagemill) = OF_PROCESS.get() {
        pagemill.before_fork();
    }
}

extern "C" fn after_fork() {
    if let Some(pagemill) = OF_PROCESS.get() {
        pagemill.after_fork();
    }
    MAKING.release();
}

extern "C" fn begin_child() {
    after_fork();
    if let Some(pagemill) = OF_PROCESS.get() {
        pagemill.begin_child();
    }
}
