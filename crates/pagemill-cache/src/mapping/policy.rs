//! Policies: choose between huge and small folios for each range of a file.

/// Why a folio is about to be allocated.
///
/// Example: [`Policy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A write to a page without a folio.
    Write,
    /// A read of a page without a folio. In a file without a store the page is a hole.
    Read,
    /// An access through a view to a page without a folio.
    Fault,
    /// The background thread considers collapsing the small folios of a range into a huge one.
    Collapse,
}

/// Facts about the range of a file that a huge folio would cover.
///
/// Example: [`Policy`].
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    pub cause: Cause,
    /// Offset of the range in the file.
    pub offset: u64,
    /// Length of the range: the bytes of a huge folio.
    pub span_bytes: u64,
    /// Number of bytes that the current call reads or writes in the range, from the first byte of the range on. For
    /// [`Cause::Fault`]: one page.
    pub wanted_bytes: u64,
    /// Bytes of the range that are in memory. Set for [`Cause::Collapse`] only.
    pub present_bytes: u64,
    /// Length of the file, including the current write.
    pub size_bytes: u64,
    /// Length of the sequential run of writes that ends right before this call. Pages that writes through a view create
    /// count as written.
    pub sequential_bytes: u64,
    /// For [`Cause::Write`] and [`Cause::Fault`]: bytes of the range that a huge folio would first have to read from the
    /// store, because the call does not write them.
    pub read_bytes: u64,
}

/// The decision of a policy about the folio size for a range.
///
/// Example: [`Policy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    Huge,
    Small,
    /// For [`Cause::Read`]: allocate nothing, so that the read returns zeros. For [`Cause::Collapse`]: do not collapse
    /// the range. Otherwise the same as `Small`.
    Nothing,
}

/// Chooses the folio size for every range of every file of a cache. `choose` is called often, so it should be fast. A
/// truncation of the file waits for the call, so `choose` must not use the cache's files. A panic unwinds through the
/// call that needed the decision. In the background thread a panic is counted (`behind_panics`), and the range stays as
/// it is.
///
/// ```
/// use pagemill::cache::{Ask, Cause, Choice, PageCache, Policy};
///
/// /// Huge folios for large writes only.
/// struct LargeWrites;
///
/// impl Policy for LargeWrites {
///     fn choose(&self, ask: &Ask) -> Choice {
///         let is_large = ask.cause == Cause::Write && ask.wanted_bytes >= ask.span_bytes / 4;
///         if is_large { Choice::Huge } else { Choice::Small }
///     }
/// }
///
/// let settings = PageCache::builder("blobs").limit(64 << 20).policy(LargeWrites);
/// let file = settings.build()?.create()?;
/// assert_eq!(file.write_at(&[1; 1 << 20], 0)?, 1 << 20);
/// # Ok::<(), pagemill::Error>(())
/// ```
pub trait Policy: Send + Sync {
    /// Chooses the folio size for a range. [`Ask`] describes the range and why a folio is needed.
    fn choose(&self, ask: &Ask) -> Choice;
}

impl<P: Policy + ?Sized> Policy for Box<P> {
    fn choose(&self, ask: &Ask) -> Choice {
        (**self).choose(ask)
    }
}

/// A file gets huge folios for sequential writes if it is at least as long as this many huge folios. The unused part of
/// the last huge folio is then smaller than the file's length.
const LARGE_FILE_SPANS: u64 = 2;

/// The small folios of a range are collapsed if at least this fraction (numerator, denominator) of the range is in
/// memory.
const DENSE_FRACTION: (u64, u64) = (7, 8);

/// The default policy, which decides by size, density and access order. Chooses a huge folio if a call writes more than
/// half of the range that the folio covers, or if a large file is written sequentially. A small file, or one with
/// scattered writes, gets small folios until its ranges are dense. So does a write to a range of which the store has
/// other bytes, because a huge folio would first have to read them. Accesses through a writable view that bring
/// pages into memory in order count as sequential writes.
///
/// Example: [`Builder`](super::Builder).
#[derive(Clone, Copy, Debug, Default)]
pub struct Auto;

impl Policy for Auto {
    fn choose(&self, ask: &Ask) -> Choice {
        match ask.cause {
            Cause::Read => Choice::Nothing,
            Cause::Collapse if ask.present_bytes * DENSE_FRACTION.1 >= ask.span_bytes * DENSE_FRACTION.0 => {
                Choice::Huge
            }
            Cause::Collapse => Choice::Nothing,
            Cause::Write | Cause::Fault => {
                let is_sequential = ask.sequential_bytes >= ask.span_bytes / 2;
                let is_large = ask.size_bytes >= LARGE_FILE_SPANS * ask.span_bytes;
                let is_wanted = ask.wanted_bytes * 2 > ask.span_bytes || (is_sequential && is_large);
                if is_wanted && ask.read_bytes == 0 { Choice::Huge } else { Choice::Small }
            }
        }
    }
}

/// Always chooses huge folios, for writes, for reads of holes, and for accesses through views.
///
/// Example: [`Builder`](super::Builder).
#[derive(Clone, Copy, Debug, Default)]
pub struct Always;

impl Policy for Always {
    fn choose(&self, _ask: &Ask) -> Choice {
        Choice::Huge
    }
}

/// Never chooses huge folios.
///
/// Example: [`Builder`](super::Builder).
#[derive(Clone, Copy, Debug, Default)]
pub struct Never;

impl Policy for Never {
    fn choose(&self, ask: &Ask) -> Choice {
        if matches!(ask.cause, Cause::Write | Cause::Fault) { Choice::Small } else { Choice::Nothing }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemill_core::units::BLOCK_BYTES;

    /// Small files and scattered writes must get small folios. Large writes, and sequential writes of large files, must
    /// get huge folios. Dense ranges must be collapsed.
    #[test]
    fn auto_decides_by_size_density_and_access_order() {
        const SPAN: u64 = BLOCK_BYTES as u64;
        let ask = Ask {
            cause: Cause::Write,
            offset: 0,
            span_bytes: SPAN,
            wanted_bytes: 1000,
            present_bytes: 0,
            size_bytes: 1000,
            sequential_bytes: 0,
            read_bytes: 0,
        };
        assert_eq!(Auto.choose(&ask), Choice::Small);
        assert_eq!(Auto.choose(&Ask { wanted_bytes: SPAN, ..ask }), Choice::Huge);
        assert_eq!(Auto.choose(&Ask { size_bytes: 100 * SPAN, ..ask }), Choice::Small, "a scattered write");
        let sequential = Ask { sequential_bytes: 2 * SPAN, ..ask };
        assert_eq!(Auto.choose(&sequential), Choice::Small);
        assert_eq!(Auto.choose(&Ask { size_bytes: 2 * SPAN, ..sequential }), Choice::Huge);
        assert_eq!(Auto.choose(&Ask { size_bytes: 2 * SPAN, read_bytes: 1, ..sequential }), Choice::Small);
        let collapse = Ask { cause: Cause::Collapse, present_bytes: SPAN, ..ask };
        assert_eq!(Auto.choose(&collapse), Choice::Huge);
        assert_eq!(Auto.choose(&Ask { present_bytes: SPAN / 2, ..collapse }), Choice::Nothing);
        assert_eq!(Auto.choose(&Ask { cause: Cause::Read, ..ask }), Choice::Nothing);
        let fault = Ask { cause: Cause::Fault, size_bytes: 100 * SPAN, ..ask };
        assert_eq!(Auto.choose(&fault), Choice::Small, "a scattered access");
        assert_eq!(Auto.choose(&Ask { sequential_bytes: SPAN, ..fault }), Choice::Huge, "accesses in order");
        assert_eq!(Auto.choose(&Ask { sequential_bytes: SPAN, read_bytes: 1, ..fault }), Choice::Small);
    }
}
