//! Huge or small: who decides for each range of a file, and on what grounds.

/// Why a folio is about to come into being.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Somebody writes where nothing is.
    Write,
    /// Somebody reads where nothing is. For a file in memory: a hole.
    Read,
    /// The background looks whether small folios should become a huge one.
    Collapse,
}

/// What is known of a range that could be one huge folio.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    pub cause: Cause,
    /// First byte of the range in the file.
    pub offset: u64,
    /// Bytes of the range: those of a huge folio.
    pub span_bytes: u64,
    /// Of these, wanted by this call, from its first byte on.
    pub wanted_bytes: u64,
    /// Of these, present; for [`Cause::Collapse`] only.
    pub present_bytes: u64,
    /// Length of the file, counting what is being written.
    pub size_bytes: u64,
    /// Bytes written in order right before this call, from wherever that began.
    pub streak_bytes: u64,
}

/// What to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Huge,
    Small,
    /// For [`Cause::Read`]: nothing, the answer is zeros. For [`Cause::Collapse`]: leave it as it is.
    Nothing,
}

/// Decides for every range of every file of a cache. Called often, so it should be quick; where a file is written, its
/// truncation waits meanwhile, so it must not use the cache's files.
pub trait Policy: Send + Sync {
    fn choose(&self, ask: &Ask) -> Choice;
}

/// A file that has this many huge folios' length wastes a part of it at most by one more.
const LARGE_SPANS: u64 = 2;

/// Small folios become a huge one where at least seven eighths of it are there.
const DENSE: (u64, u64) = (7, 8);

/// By size, density and order of access: huge where a call wants half of the range, or where a file that is large already is
/// written in order. A small file, or one that is written here and there, stays in small folios until it is dense.
#[derive(Clone, Copy, Debug, Default)]
pub struct Auto;

impl Policy for Auto {
    fn choose(&self, ask: &Ask) -> Choice {
        match ask.cause {
            Cause::Read => Choice::Nothing,
            Cause::Collapse if ask.present_bytes * DENSE.1 >= ask.span_bytes * DENSE.0 => Choice::Huge,
            Cause::Collapse => Choice::Nothing,
            Cause::Write => {
                let is_in_order = ask.streak_bytes >= ask.span_bytes / 2;
                let is_large = ask.size_bytes >= LARGE_SPANS * ask.span_bytes;
                if ask.wanted_bytes * 2 > ask.span_bytes || (is_in_order && is_large) {
                    Choice::Huge
                } else {
                    Choice::Small
                }
            }
        }
    }
}

/// Huge wherever one fits, on writes and on reads of holes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Always;

impl Policy for Always {
    fn choose(&self, _ask: &Ask) -> Choice {
        Choice::Huge
    }
}

/// Pages one by one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Never;

impl Policy for Never {
    fn choose(&self, ask: &Ask) -> Choice {
        if ask.cause == Cause::Write { Choice::Small } else { Choice::Nothing }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::BLOCK_BYTES;

    /// Small files and scattered writes stay small; large writes and large files in order are huge; dense is collapsed.
    #[test]
    fn auto_goes_by_size_density_and_order() {
        const SPAN: u64 = BLOCK_BYTES as u64;
        let ask = Ask {
            cause: Cause::Write,
            offset: 0,
            span_bytes: SPAN,
            wanted_bytes: 1000,
            present_bytes: 0,
            size_bytes: 1000,
            streak_bytes: 0,
        };
        assert_eq!(Auto.choose(&ask), Choice::Small);
        assert_eq!(Auto.choose(&Ask { wanted_bytes: SPAN, ..ask }), Choice::Huge);
        assert_eq!(Auto.choose(&Ask { size_bytes: 100 * SPAN, ..ask }), Choice::Small, "here and there");
        let in_order = Ask { streak_bytes: 2 * SPAN, ..ask };
        assert_eq!(Auto.choose(&in_order), Choice::Small);
        assert_eq!(Auto.choose(&Ask { size_bytes: 2 * SPAN, ..in_order }), Choice::Huge);
        let collapse = Ask { cause: Cause::Collapse, present_bytes: SPAN, ..ask };
        assert_eq!(Auto.choose(&collapse), Choice::Huge);
        assert_eq!(Auto.choose(&Ask { present_bytes: SPAN / 2, ..collapse }), Choice::Nothing);
        assert_eq!(Auto.choose(&Ask { cause: Cause::Read, ..ask }), Choice::Nothing);
    }
}
