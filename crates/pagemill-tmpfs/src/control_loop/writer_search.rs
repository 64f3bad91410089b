//! When to search for groups that write without the controller's knowledge ([`crate::groups`]).

use pagemill_core::units::BLOCK_BYTES;
use std::time::{Duration, Instant};

/// Writers are searched for again after the file system has grown by this much and `SEARCH_PAUSE` has passed.
const SEARCH_GROWTH_BYTES: u64 = 8 * BLOCK_BYTES as u64;
/// Minimum time between two searches for writers because of growth.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);

/// While there are suspects, writers are searched for again after this time even if the file system has not grown.
const SUSPECTS_PAUSE: Duration = Duration::from_secs(1);

/// The file system's usage at the last search for writers, the time of that search, and its result.
pub(super) struct WriterSearch {
    used_bytes: u64,
    at: Instant,
    /// The last search found a suspect that may write here.
    has_suspects: bool,
}

impl WriterSearch {
    pub(super) fn new(used_bytes: u64, now: Instant) -> Self {
        Self { used_bytes, at: now, has_suspects: false }
    }

    pub(super) fn has_suspects(&self) -> bool {
        self.has_suspects
    }

    /// Returns whether a search for writers is due.
    pub(super) fn is_due(&mut self, used_bytes: u64, now: Instant) -> bool {
        // The stored usage never rises here, so the growth of a slow writer adds up.
        self.used_bytes = self.used_bytes.min(used_bytes);
        let has_grown = used_bytes >= self.used_bytes.saturating_add(SEARCH_GROWTH_BYTES);
        (has_grown && now >= self.at + SEARCH_PAUSE) || (self.has_suspects && now >= self.at + SUSPECTS_PAUSE)
    }

    /// Records a completed search for writers, with its result.
    pub(super) fn record(&mut self, used_bytes: u64, now: Instant, has_suspects: bool) {
        *self = Self { used_bytes, at: now, has_suspects };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A search must be due after growth, and a second after a search that found suspects. The second search may find
    /// that the suspects no longer grow.
    #[test]
    fn suspects_are_examined_again() {
        let now = Instant::now();
        let mut search = WriterSearch::new(2 * SEARCH_GROWTH_BYTES, now);
        let later = now + 2000 * MS;
        assert!(!search.is_due(2 * SEARCH_GROWTH_BYTES, later) && !search.is_due(SEARCH_GROWTH_BYTES, later));
        assert!(search.is_due(2 * SEARCH_GROWTH_BYTES, later), "usage has grown from its minimum");
        assert!(!search.is_due(2 * SEARCH_GROWTH_BYTES, now + 19 * MS));
        search.record(2 * SEARCH_GROWTH_BYTES, now, true);
        assert!(!search.is_due(0, now + 999 * MS) && search.is_due(0, now + 1000 * MS) && search.has_suspects());
        search.record(0, now, false);
        assert!(!search.is_due(0, later) && !search.has_suspects());
    }
}
