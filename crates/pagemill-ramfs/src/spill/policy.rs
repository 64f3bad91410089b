//! [`SmallFirst`]: the policy for folios in a file system with a spill store.

use pagemill_cache::{Ask, Cause, Choice, Policy};

/// Gives data small folios, so that memory is allocated for written segments only. Asks another policy about a collapse
/// of ranges that are completely in memory.
pub(crate) struct SmallFirst(pub Box<dyn Policy>);

impl Policy for SmallFirst {
    fn choose(&self, ask: &Ask) -> Choice {
        match ask.cause {
            Cause::Read => Choice::Nothing,
            Cause::Write | Cause::Fault => Choice::Small,
            Cause::Collapse if ask.present_bytes < ask.span_bytes => Choice::Nothing,
            Cause::Collapse => self.0.choose(ask),
        }
    }
}
