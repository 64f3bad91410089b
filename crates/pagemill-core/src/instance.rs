//! What all products of a process share: account, arena, helper thread, answers to other processes.
//!
//! An [`Instance`] has one [`Part`] for each product in use, such as the slab caches. The instance brings the parts
//! through a `fork` and measures them. [`Instance::of_process`] is the one that all code of a program shares. Each
//! product adds its part there on first use ([`PartOfProcess`]).
//!
//! Uses all other modules of this crate.
#![allow(unsafe_code)] // calls that only fork handlers may make

use crate::arena::{Arena, Layout, place};
use crate::error::{Error, Result};
use crate::listing::control::ControlEndpoint;
use crate::listing::figures::CounterValues;
use crate::listing::{ListWriter, Response, StatsResponder};
use crate::published::{self, Subject};
use crate::reclaim::Account;
use crate::reclaim::helper::Helper;
use crate::reclaim::kernel::Kernel;
use crate::reclaim::tree::UNLIMITED;
use crate::stats::{self, Counter, Snapshot};
use crate::sync::Lock;
use crate::trace::{self, Event};
use pagemill_sys::{clock, file, process, thread};
use std::io;
use std::sync::OnceLock;

/// The products (kinds of memory for programs) of an instance, in the order in which their locks are acquired before a
/// fork.
///
/// Example: [`Instance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    Slab,
    Cache,
    Volatile,
}

impl Product {
    const COUNT: usize = Self::Volatile as usize + 1;
}

/// The state of one product, such as the slab caches, in an [`Instance`].
///
/// Example: [`Instance`].
pub trait Part: Sync {
    fn product(&self) -> Product;

    /// Resident bytes of the product's metadata.
    fn metadata_bytes(&self) -> u64;

    /// Measures the amounts of the product's memory that no operation counts, and updates their counters. Must neither
    /// allocate nor take more than 20 ms.
    fn measure(&self) {}

    /// Makes memory resident that the product has requested because it will need it soon, if there is room without
    /// reclaim. The helper thread calls this after each wake-up, so it must take at most some milliseconds. Returns
    /// whether there was a request.
    fn prefault(&self) -> bool {
        false
    }

    /// Acquires the product's locks in the thread that is about to fork. Waits for threads that hold them.
    fn acquire_for_fork(&self);

    /// Releases the locks of [`Part::acquire_for_fork`], in the parent and in the child.
    ///
    /// # Safety
    ///
    /// The same thread has called [`Part::acquire_for_fork`] before, once for each call of this function.
    unsafe fn release_after_fork(&self);

    /// Resets the product's state in a fork child.
    ///
    /// # Safety
    ///
    /// The process is a fork child with one thread that has not called this yet, and holds no lock of the product.
    unsafe fn begin_child(&self);

    /// Called when the process exits, while other threads may still run.
    fn at_exit(&self) {}
}

/// What the products (kinds of memory for programs) of one process share: arena, account, helper thread, and answers to
/// other processes. It is created once and never freed.
///
/// ```
/// use pagemill_core::arena::Layout;
/// use pagemill_core::instance::{Instance, Part, Product};
/// use pagemill_core::reclaim::{Account, tree::UNLIMITED};
/// use pagemill_core::stats::Counter;
///
/// /// A product with 4096 bytes of metadata, and without locks.
/// struct Notes;
///
/// impl Part for Notes {
///     fn product(&self) -> Product {
///         Product::Slab
///     }
///     fn metadata_bytes(&self) -> u64 {
///         4096
///     }
///     fn acquire_for_fork(&self) {}
///     unsafe fn release_after_fork(&self) {}
///     unsafe fn begin_child(&self) {}
/// }
///
/// let instance = Instance::new(Layout::for_test(), Account::make(UNLIMITED)?)?;
/// let before = instance.figures().get(Counter::Metadata);
/// instance.add(&Notes);
/// assert!(instance.figures().get(Counter::Metadata) >= before + 4096);
/// # Ok::<(), pagemill_core::Error>(())
/// ```
pub struct Instance {
    pub account: &'static Account,
    pub arena: &'static Arena,
    pub helper: &'static Helper,
    /// Lists ranges, caches and slab caches for other processes.
    pub responder: &'static StatsResponder,
    /// Executes commands of other processes of the same user.
    pub control: &'static ControlEndpoint,
    /// The part of each product, indexed by [`Product`].
    parts: [OnceLock<&'static dyn Part>; Product::COUNT],
}

impl Instance {
    /// Reserves address space; no memory becomes resident. Allocates nothing from the global allocator, here or later.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if the address space cannot be reserved.
    pub fn new(layout: Layout, account: &'static Account) -> Result<&'static Self> {
        let arena: &'static Arena = place(Arena::new(layout, account)?)?;
        let helper: &'static Helper = place(Helper::new(account))?;
        let control: &'static ControlEndpoint = place(ControlEndpoint::new(account, arena))?;
        let responder: &'static StatsResponder = place(StatsResponder::new(control))?;
        stats::publish_arena_range(arena.addresses());
        account.set_helper(helper);
        helper.set_answer(responder);
        let parts = [const { OnceLock::new() }; Product::COUNT];
        let instance: &'static Self = place(Self { account, arena, helper, responder, control, parts })?;
        responder.add(instance);
        Ok(instance)
    }

    /// Adds the state of a product.
    ///
    /// # Panics
    ///
    /// If the product has a part already.
    pub fn add(&self, part: &'static dyn Part) {
        let is_first = self.parts[part.product() as usize].set(part).is_ok();
        assert!(is_first, "one part for each product");
    }

    fn parts(&self) -> impl DoubleEndedIterator<Item = &'static dyn Part> {
        self.parts.iter().filter_map(|part| part.get().copied())
    }

    /// Measures and returns the statistics: memory that the process holds, how much of it could be returned at once,
    /// and the counters of all events. `pagemill meminfo` and `pagemill vmstat` show the same figures.
    ///
    /// Cost: some 20 us for each 64 MiB that is overcommitted or volatile; at most 20 ms for volatile memory. The
    /// caller must hold no lock that a `free` may take.
    pub fn figures(&self) -> Snapshot {
        self.measure();
        stats::snapshot()
    }

    /// Measures the memory of this process and publishes the statistics.
    pub fn measure(&self) {
        let now = clock::fine_ns();
        self.account.measure();
        self.parts().for_each(Part::measure);
        self.account.publish();
        let of_parts: u64 = self.parts().map(Part::metadata_bytes).sum();
        stats::set(Counter::Metadata, self.arena.metadata_bytes() + of_parts);
        stats::set(Counter::MeasuredAt, now);
    }

    /// Makes memory resident that was requested before an allocation needs it, if there is room without reclaim. A step
    /// of the helper thread. Returns true if a part had a request, or if a requested block of the heap was made
    /// resident.
    pub fn prefault(&self) -> bool {
        let mut was_requested = false;
        while self.arena.prefault() {
            was_requested = true;
        }
        self.parts().fold(was_requested, |was_requested, part| part.prefault() | was_requested)
    }

    /// Acquires all locks of the instance before `fork`, in the forking thread. Waits for purges of other threads.
    ///
    /// # Safety
    ///
    /// The thread's next call to this instance and its products is [`Instance::after_fork`], both in the parent and in
    /// the child. No part is added between the two calls.
    pub unsafe fn before_fork(&self) {
        self.control.acquire_for_fork();
        self.parts().for_each(Part::acquire_for_fork);
        self.arena.acquire_for_fork();
        self.account.headroom.acquire_for_fork();
    }

    /// Releases the locks of [`Instance::before_fork`]: in the parent, and in the child before
    /// [`Instance::begin_child`].
    ///
    /// # Safety
    ///
    /// The thread has called [`Instance::before_fork`], and calls this once in each process.
    pub unsafe fn after_fork(&self) {
        self.account.headroom.release_after_fork();
        // SAFETY: the caller's promise.
        unsafe { self.arena.release_after_fork() };
        for part in self.parts().rev() {
            // SAFETY: `before_fork` has acquired the locks of this part, on this thread.
            unsafe { part.release_after_fork() };
        }
        self.control.release_after_fork();
    }

    /// Resets counters, charges and the helper in a fork child. Memory that the child shares with the parent stays
    /// charged to the parent.
    ///
    /// # Safety
    ///
    /// The process is a fork child with one thread that has not called this yet, and no lock of this instance is held.
    pub unsafe fn begin_child(&self) {
        process::forget_own_identity();
        // SAFETY: the caller's promise.
        unsafe { stats::detach_in_child() };
        stats::publish_arena_range(self.arena.addresses());
        // SAFETY: the caller's promise.
        let generation = unsafe { self.arena.forked() };
        self.helper.unclaim();
        self.control.begin_child();
        for part in self.parts().rev() {
            // SAFETY: the caller's promise.
            unsafe { part.begin_child() };
        }
        self.account.begin_child(process::own_identity());
        trace::event(Event::Forked, u64::from(process::id()), u64::from(generation));
    }

    /// Returns the instance of this process; the first call creates it. Its helper thread observes the limits of the
    /// memory control groups and of the machine, and returns memory before a limit is reached. Fork handlers keep the
    /// instance consistent. Its statistics are published in the user's folder until the process ends, for `pagemill
    /// meminfo` and other commands.
    ///
    /// In a fork child, the first call of this function starts the helper thread and publishes the statistics.
    ///
    /// Cost: two atomic loads. The first call reserves address space, starts a thread, and creates a file of 64 KiB.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if address space cannot be reserved, or the exit or fork handlers cannot be registered.
    pub fn of_process() -> Result<&'static Self> {
        let instance = get_or_create(&INSTANCE_OF_PROCESS, create_instance)?;
        // Creating a thread allocates through the C library, so it happens outside of the lock.
        if !instance.helper.is_running() && instance.helper.claim() {
            // If publishing fails, the process runs without published statistics.
            let _ = published::publish();
            if thread::spawn(c"pagemill", instance).is_err() {
                instance.helper.unclaim();
            }
        }
        Ok(instance)
    }
}

impl ListWriter for Instance {
    fn subject(&self) -> Subject {
        Subject::Figures
    }

    /// Measures the figures of this process and writes their record.
    fn list(&self, response: &mut Response<'_>) -> io::Result<()> {
        response.write_record(&CounterValues(*self.figures().values()).to_record())
    }
}

impl thread::Work for Instance {
    fn work(&'static self) {
        self.helper.run(|| self.prefault());
    }
}

/// Lock that is held while the process's [`Instance`] or the state of a product is created, and during `fork`.
static CREATION_LOCK: Lock = Lock::new();
static INSTANCE_OF_PROCESS: OnceLock<&'static Instance> = OnceLock::new();
static KERNEL_LIMITS: Kernel = Kernel::new("");

/// The state of one product in the [`Instance`] of the process; created on first use.
///
/// Example: `Slabs::of_process` of `pagemill-slab`.
pub struct PartOfProcess<T: 'static>(OnceLock<&'static T>);

impl<T: Sync> PartOfProcess<T> {
    #[expect(clippy::new_without_default, reason = "statics only")]
    pub const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Returns the state of the product. The first call creates the state with `create`, which must add it to the
    /// instance ([`Instance::add`]), and must not call `get_or_create` itself.
    ///
    /// # Errors
    ///
    /// As [`Instance::of_process`], and those of `create`.
    pub fn get_or_create(&self, create: impl FnOnce(&'static Instance) -> Result<&'static T>) -> Result<&'static T> {
        let instance = Instance::of_process()?;
        get_or_create(&self.0, || create(instance))
    }
}

/// Returns the value of `cell`. The first call creates the value under [`CREATION_LOCK`].
#[inline]
fn get_or_create<T>(cell: &OnceLock<&'static T>, create: impl FnOnce() -> Result<&'static T>) -> Result<&'static T> {
    if let Some(known) = cell.get() {
        return Ok(known);
    }
    let _guard = CREATION_LOCK.lock();
    if let Some(known) = cell.get() {
        return Ok(known);
    }
    let created = create()?;
    Ok(cell.get_or_init(|| created))
}

fn create_instance() -> Result<&'static Instance> {
    let instance = Instance::new(Layout::for_program(), Account::make(UNLIMITED)?)?;
    instance.account.headroom.set_limits(&KERNEL_LIMITS);
    let runtime = file::environment(c"XDG_RUNTIME_DIR").and_then(|path| path.to_str().ok());
    published::set_publish_folder("", runtime.unwrap_or_default());
    process::at_exit(at_exit).map_err(Error::system("registering the exit handler"))?;
    process::at_fork(before_fork, after_fork, begin_child).map_err(Error::system("registering the fork handlers"))?;
    Ok(instance)
}

extern "C" fn at_exit() {
    if let Some(instance) = INSTANCE_OF_PROCESS.get() {
        instance.parts().for_each(Part::at_exit);
    }
    published::remove_own_file();
}

extern "C" fn before_fork() {
    CREATION_LOCK.acquire();
    if let Some(instance) = INSTANCE_OF_PROCESS.get() {
        // SAFETY: the C library calls this, then `after_fork` on the same thread, in both processes. Parts are added
        // only under `CREATION_LOCK`.
        unsafe { instance.before_fork() };
    }
}

extern "C" fn after_fork() {
    if let Some(instance) = INSTANCE_OF_PROCESS.get() {
        // SAFETY: `before_fork` ran and has held the lock since. So the instance existed then if it exists now.
        unsafe { instance.after_fork() };
    }
    CREATION_LOCK.release();
}

extern "C" fn begin_child() {
    after_fork();
    if let Some(instance) = INSTANCE_OF_PROCESS.get() {
        // SAFETY: this is the child, which has one thread, and `after_fork` has released the locks.
        unsafe { instance.begin_child() };
    }
}
