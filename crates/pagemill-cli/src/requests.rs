//! Helpers of the commands that send a request to a process. If a signal arrives, such a command removes its request
//! file before it ends. If the process does not answer, the command reports the likely reason.

use pagemill_core::listing::Unanswered;
use pagemill_core::stats::{Counter, Snapshot};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The signal that interrupted this command, if any. Signals are only recorded, so that the command can remove its
/// request file before it ends.
#[derive(Clone)]
pub struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    pub fn watch() -> std::io::Result<Self> {
        let signal = Arc::new(AtomicUsize::new(0));
        for number in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_usize(number, signal.clone(), number as usize)?;
        }
        Ok(Self(signal))
    }

    /// Returns a value that no signal changes. [`Interrupt::stop`] has the effect of a signal.
    pub fn by_hand() -> Self {
        Self(Arc::default())
    }

    /// Makes [`Interrupt::has_signal`] return true, as SIGTERM would.
    pub fn stop(&self) {
        self.0.store(SIGTERM as usize, Relaxed);
    }

    pub fn has_signal(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    /// Ends this command by the default action of the signal that was recorded.
    pub fn end(&self) -> ExitCode {
        let signal = self.0.load(Relaxed);
        let _ = signal_hook::low_level::emulate_default_handler(signal as i32);
        ExitCode::from(128 + signal as u8)
    }
}

/// Returns the likely reason why a process does not answer, as text to append to an error message. Empty if no reason
/// is likely.
pub fn unanswered_reason(error: &Unanswered, snapshot: &Snapshot) -> &'static str {
    match error {
        Unanswered::Late if snapshot.get(Counter::Helpers) == 0 => {
            " (it has no helper thread: it holds little memory, is a fork child, or PAGEMILL_HELPER is off)"
        }
        Unanswered::Late => " (it may be stopped, or in another mount namespace)",
        _ => "",
    }
}
