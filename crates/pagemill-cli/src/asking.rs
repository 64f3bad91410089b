//! What commands that ask a process have in common: they end by a signal without leaving a request behind, and say why there is
//! no answer.

use pagemill::listing::Unanswered;
use pagemill::stats::{Counter, Snapshot};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The signal that came, once one has: the file of the request is removed before the command ends.
pub struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    pub fn watch() -> std::io::Result<Self> {
        let signal = Arc::new(AtomicUsize::new(0));
        for number in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_usize(number, signal.clone(), number as usize)?;
        }
        Ok(Self(signal))
    }

    pub fn has_come(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    /// Ends as the signal would have ended it.
    pub fn end(&self) -> ExitCode {
        let signal = self.0.load(Relaxed);
        let _ = signal_hook::low_level::emulate_default_handler(signal as i32);
        ExitCode::from(128 + signal as u8)
    }
}

/// What is known of why a process does not answer.
pub fn reason(error: &Unanswered, snapshot: &Snapshot) -> &'static str {
    match error {
        Unanswered::Late if snapshot.get(Counter::Helpers) == 0 => {
            " (it has no helper thread: it is a fork child that has not marked anything itself, or PAGEMILL_HELPER is off)"
        }
        Unanswered::Late => " (it may be stopped, or see other folders)",
        _ => "",
    }
}
