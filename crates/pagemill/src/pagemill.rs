//! [`Pagemill`]: the memory manager of a process.

use pagemill_core::error::Result;
use pagemill_core::instance::Instance;
use pagemill_core::metrics::{self, Exposition, Format, Labels};
use pagemill_core::reclaim::{Return, Shrinker};
use pagemill_core::stats::Snapshot;

/// The memory manager of this process, which all products share.
///
/// A program needs this type only for statistics and settings. The products find the memory manager by themselves.
///
/// ```
/// use pagemill::stats::Counter;
/// use pagemill::{Pagemill, VolatileBuf};
///
/// let mut tile = VolatileBuf::new(1 << 20)?;
/// tile.bytes_mut()?.fill(7);
/// assert!(Pagemill::of_process()?.figures().get(Counter::Resident) >= 1 << 20);
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct Pagemill(&'static Instance);

impl Pagemill {
    /// Returns the memory manager of this process; the first call creates it. Its helper thread observes the limits of
    /// the memory control groups and of the machine, and returns memory before a limit is reached. Fork handlers keep
    /// its state consistent. Its statistics are published in the user's folder until the process ends, for `pagemill
    /// meminfo` and other commands.
    ///
    /// In a fork child, the first call of this function starts the helper thread and publishes the statistics.
    ///
    /// Cost: two atomic loads. The first call reserves address space, starts a thread, and creates a file of 64 KiB.
    ///
    /// # Errors
    ///
    /// [`crate::Error::System`] if address space cannot be reserved, or if the exit or fork handlers cannot be
    /// registered.
    pub fn of_process() -> Result<Self> {
        Instance::of_process().map(Self)
    }

    /// Measures and returns the statistics: the memory that the process holds, how much of it could be returned at
    /// once, and the counters of all events. `pagemill meminfo` and `pagemill vmstat` show the same values.
    ///
    /// Cost: some 20 us for each 64 MiB of overcommitted or volatile memory; at most 20 ms for volatile memory.
    pub fn figures(self) -> Snapshot {
        self.0.figures()
    }

    /// Measures the statistics, and returns them as text for a monitoring system, such as Prometheus. The samples have no
    /// labels, because the program is the only process that they describe. `pagemill metrics` writes the same families.
    ///
    /// Cost: that of [`Pagemill::figures`], and some 100 us for the text of some 40 KiB.
    pub fn metrics(self, format: Format) -> String {
        let mut metrics = Exposition::new(format);
        metrics::write_build_info(&mut metrics);
        metrics::write_process_families(&mut metrics, &[(Labels::default(), self.figures())]);
        metrics.finish()
    }

    /// Starts a thread that forwards the events of the memory manager to the subscriber of the crate `tracing`: purges,
    /// splits, collapses, moves and reclaim, as `pagemill trace` shows them. Their target is `pagemill`; the field
    /// `event` has the kind of the event, `monotonic_ns` its time. Failures have the level `WARN`, all others `DEBUG`.
    ///
    /// The thread reads the events each time that `interval` has passed. If there were more than 1024 events meanwhile,
    /// the oldest are lost, and an event with the level `WARN` has their number. Recording costs the same with and
    /// without the thread.
    ///
    /// ```
    /// use pagemill::Pagemill;
    /// use std::time::Duration;
    ///
    /// let forwarder = Pagemill::of_process()?.forward_events(Duration::from_millis(100))?;
    /// // ... the program runs ...
    /// drop(forwarder); // forwards the events that are left
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Errors of creating the thread.
    #[cfg(feature = "tracing")]
    pub fn forward_events(self, interval: std::time::Duration) -> std::io::Result<crate::EventForwarder> {
        crate::EventForwarder::start(interval)
    }

    /// Sets the policy that says after which time free memory returns to the system without a request or pressure. The
    /// default is [`Return::BALANCED`]. The policy does not apply to the contents of volatile memory and of page
    /// caches.
    pub fn set_return(self, policy: Return) {
        self.0.helper.set_return(policy);
    }

    /// Returns all free memory to the system, and purges volatile memory that is marked and not pinned. Returns the
    /// number of bytes that went back. A test can call it to check that the program computes purged bytes again.
    ///
    /// ```
    /// use pagemill::{Contents, Pagemill, VolatileBuf};
    ///
    /// let mut tile = VolatileBuf::new(1 << 20)?;
    /// tile.bytes_mut()?.fill(7);
    /// tile.mark()?;
    /// Pagemill::of_process()?.return_all();
    /// assert_eq!(tile.unmark()?, Contents::Purged { kept_bytes: 0 });
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    pub fn return_all(self) -> u64 {
        self.0.account.return_all()
    }

    /// Registers a shrinker: a component of the program that holds memory and can return it. When a limit or pressure
    /// needs memory, Pagemill requests some from the shrinker.
    ///
    /// # Errors
    ///
    /// [`crate::Error::TooMany`] if three shrinkers of the same cost are registered already.
    pub fn register(self, shrinker: &'static dyn Shrinker) -> Result<()> {
        self.0.account.register_for_program(shrinker)
    }
}

impl std::fmt::Debug for Pagemill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pagemill").field("resident_bytes", &self.0.account.resident()).finish_non_exhaustive()
    }
}
