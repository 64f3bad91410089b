//! The switch for huge pages, which `pagemill huge` sets while the process runs.

use super::Arena;
use crate::error::{Error, Result};
use pagemill_sys::mem;
use std::sync::atomic::Ordering::Relaxed;

/// Which memory that becomes resident from now on gets huge pages. Memory in use stays as it is.
///
/// ```
/// use pagemill_core::arena::HugeUse;
/// use pagemill_testbed::Testbed;
///
/// let arena = Testbed::of_process()?.instance.arena;
/// assert_eq!(arena.huge_use(), HugeUse::Auto);
/// arena.set_huge_use(HugeUse::Never)?; // as `pagemill huge PID never`
/// assert!(!arena.allows_huge(true));
/// # Ok::<(), pagemill_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HugeUse {
    /// As the program and its start options say: blocks of which little would be unused, and folios for which the
    /// policy of their cache chooses a huge page.
    Auto = 1,
    /// Each block, and each new folio of a page cache, whatever its policy chooses.
    Always = 2,
    Never = 3,
}

impl HugeUse {
    /// Returns the value with this number, as in `HugeUse::Auto as u8`.
    pub fn from_number(number: u32) -> Option<Self> {
        [Self::Auto, Self::Always, Self::Never].into_iter().find(|value| *value as u32 == number)
    }
}

impl Arena {
    /// Returns which memory gets huge pages. An arena that was created without huge pages has none in any case.
    #[inline]
    pub fn huge_use(&self) -> HugeUse {
        match self.huge_use.load(Relaxed) {
            number if number == HugeUse::Always as u8 => HugeUse::Always,
            number if number == HugeUse::Never as u8 => HugeUse::Never,
            _ => HugeUse::Auto,
        }
    }

    /// Sets which memory gets huge pages from now on. After `Never`, the kernel makes no huge pages in the arena on its
    /// own either, until Pagemill requests some after another call.
    ///
    /// Cost: for `Never` one system call, some microseconds for each thousand blocks in use.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for another value than `Never` if the arena was created without huge pages.
    pub fn set_huge_use(&self, wanted: HugeUse) -> Result<()> {
        if !self.use_huge && wanted != HugeUse::Never {
            return Err(Error::Unsupported { what: "the process was started without huge pages" });
        }
        self.huge_use.store(wanted as u8, Relaxed);
        if wanted == HugeUse::Never {
            mem::forbid_huge(self.base(), self.addresses().len());
        }
        Ok(())
    }

    /// Returns whether memory gets huge pages for which the program has chosen `is_chosen`.
    #[inline]
    pub fn allows_huge(&self, is_chosen: bool) -> bool {
        match self.huge_use() {
            HugeUse::Auto => is_chosen,
            HugeUse::Always => true,
            HugeUse::Never => false,
        }
    }
}
