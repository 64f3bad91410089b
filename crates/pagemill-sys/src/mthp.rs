//! Multi-size huge pages (mTHP, since Linux 6.8): sizes between the OS page and 2 MiB that one page fault provides.
//!
//! The kernel has a setting for each size. A size is *offered* if the kernel uses it in memory with the advice
//! `MADV_HUGEPAGE`. The advice selects no size: a fault gets the largest offered size that fits into the mapping. So
//! the caller must make sure that no larger size is offered, or that a larger one does not fit
//! ([`PageSizes::advised_bytes`]).
//!
//! This module does not allocate.

use crate::file::{self, Text};

/// The folder of the kernel's settings.
pub(crate) const FOLDER: &str = "/sys/kernel/mm/transparent_hugepage";
/// The sizes below 2 MiB that the kernel may have: powers of two, as exponents.
pub(crate) const SIZE_EXPONENTS: std::ops::RangeInclusive<u32> = 13..=20;

/// A set of page sizes below 2 MiB, with one bit for each power of two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageSizes(u32);

impl PageSizes {
    /// Returns the set with the size of 2^`exponent` bytes added.
    pub(crate) fn with(self, exponent: u32) -> Self {
        debug_assert!(SIZE_EXPONENTS.contains(&exponent));
        Self(self.0 | 1 << exponent)
    }

    /// Returns the sizes in bytes, the smallest first.
    pub fn bytes(self) -> impl Iterator<Item = usize> {
        SIZE_EXPONENTS.filter(move |exponent| self.0 & 1 << exponent != 0).map(|exponent| 1 << exponent)
    }

    /// Returns the size of the pages that a fault provides in memory with the advice, if larger sizes than `most_bytes`
    /// must not come. `None` if no size up to `most_bytes` is in the set, or if a larger one is.
    pub fn advised_bytes(self, most_bytes: usize) -> Option<usize> {
        self.bytes().last().filter(|bytes| *bytes <= most_bytes)
    }
}

/// Returns whether the kernel offers a size in memory with the advice. `setting` is the word in brackets of the size's
/// setting, and `top` that of the setting for all sizes, which applies to a size that is set to `inherit`.
pub(crate) fn is_offered(setting: &str, top: &str) -> bool {
    let is_on = |word| matches!(word, "always" | "madvise");
    is_on(setting) || setting == "inherit" && is_on(top)
}

/// Returns the word in brackets of a setting such as `always [madvise] never`.
pub(crate) fn bracketed_word(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split(']').next()
}

/// Returns the sizes below 2 MiB that the kernel offers now. Reads one file for each size.
pub fn offered_sizes() -> PageSizes {
    let mut top_buffer = [0; 64];
    let top = read_setting(format_args!("{FOLDER}/enabled"), &mut top_buffer).unwrap_or("never");
    SIZE_EXPONENTS.fold(PageSizes::default(), |sizes, exponent| {
        let mut buffer = [0; 64];
        let path = format_args!("{FOLDER}/hugepages-{}kB/enabled", 1 << (exponent - 10));
        match read_setting(path, &mut buffer) {
            Some(word) if is_offered(word, top) => sizes.with(exponent),
            _ => sizes,
        }
    })
}

/// Reads the word in brackets of a setting.
fn read_setting<'buffer>(path: std::fmt::Arguments<'_>, buffer: &'buffer mut [u8]) -> Option<&'buffer str> {
    let path = Text::<128>::format(path)?;
    bracketed_word(std::str::from_utf8(file::read(path.as_c_str(), buffer).ok()?).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A size that is set to `inherit` must be offered only if the setting for all sizes allows huge pages.
    #[test]
    fn inherited_settings_follow_the_top_level() {
        for (setting, top, is) in [
            ("always", "never", true),
            ("madvise", "never", true),
            ("inherit", "madvise", true),
            ("inherit", "always", true),
            ("inherit", "never", false),
            ("never", "always", false),
        ] {
            assert_eq!(is_offered(setting, top), is, "{setting}, {top}");
        }
    }

    /// The largest offered size must be chosen. If it is larger than allowed, no size must be chosen.
    #[test]
    fn a_larger_offered_size_prevents_the_advice() {
        let sizes = PageSizes::default().with(14).with(16);
        assert_eq!(sizes.advised_bytes(64 << 10), Some(64 << 10));
        assert_eq!(sizes.advised_bytes(1 << 20), Some(64 << 10));
        assert_eq!(sizes.advised_bytes(32 << 10), None, "a fault would provide 64 KiB");
        assert_eq!(PageSizes::default().advised_bytes(1 << 20), None);
    }
}
