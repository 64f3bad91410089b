//! Sizes: the OS page, the software page, the block, and human-readable bytes.
//!
//! Other code uses these names instead of the numbers 4096 and 2 MiB.

use pagemill_sys as sys;
use std::fmt;
use std::str::FromStr;

/// Bytes of a block, one huge page: the unit in which memory is taken from the system and returned.
pub const BLOCK_BYTES: usize = 2 << 20;

/// Maximum number of OS pages in a block (OS pages have at least 4 KiB).
pub const MAX_OS_PAGES_PER_BLOCK: usize = BLOCK_BYTES / 4096;

/// Bytes of the OS page: 4, 16 or 64 KiB.
#[inline]
pub fn os_page_bytes() -> usize {
    sys::mem::os_page_bytes()
}

/// Number of OS pages in a block.
#[inline]
pub fn os_pages_per_block() -> usize {
    BLOCK_BYTES / os_page_bytes()
}

/// The size of a software page: a power of two from the size of the OS page (4, 16 or 64 KiB) to 8 MiB, chosen at run
/// time.
///
/// It is the unit in which memory of page caches and of the small allocator becomes resident and is charged. Slots
/// become resident in this unit only where the kernel offers pages of such a size.
///
/// ```
/// use pagemill::units::PageSize;
///
/// assert_eq!(PageSize::new(64 << 10).map(PageSize::bytes), Some(65_536));
/// assert_eq!(PageSize::new(3 << 10), None); // not a power of two
/// assert_eq!("16K".parse(), Ok(PageSize::new(16 << 10).unwrap()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageSize(u32);

impl PageSize {
    /// The smallest OS page of any supported system; [`PageSize::new`] may require more.
    pub const MIN_BYTES: usize = 4 << 10;
    /// The largest software page.
    pub const MAX_BYTES: usize = 8 << 20;

    /// Returns the size of the OS page.
    pub fn os() -> Self {
        Self(os_page_bytes().trailing_zeros())
    }

    /// Returns a page size of `bytes`; `None` unless `bytes` is a power of two from the size of the OS page to 8 MiB.
    pub fn new(bytes: usize) -> Option<Self> {
        let fits = bytes.is_power_of_two() && (os_page_bytes()..=Self::MAX_BYTES).contains(&bytes);
        fits.then(|| Self(bytes.trailing_zeros()))
    }

    #[inline]
    pub fn bytes(self) -> usize {
        1 << self.0
    }
}

impl FromStr for PageSize {
    type Err = String;

    /// Parses a size as [`parse_bytes`] does.
    ///
    /// # Errors
    ///
    /// A message that describes the problem with the text, or lists the range of page sizes.
    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = parse_bytes(text)?;
        Self::new(bytes as usize).ok_or_else(|| {
            let (min, max) = (Bytes(os_page_bytes() as u64), Bytes(Self::MAX_BYTES as u64));
            format!("{text} is not a page size: expected a power of two from {min} to {max}")
        })
    }
}

/// A number of bytes with a human-readable form: `512 B`, `1.5 MiB`, `64 KiB`. One decimal is printed, rounded down.
///
/// ```
/// use pagemill::units::{Bytes, parse_bytes};
///
/// assert_eq!(Bytes(1536 << 10).to_string(), "1.5 MiB");
/// assert_eq!(parse_bytes("64K"), Ok(65_536));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let unit = self.0.checked_ilog2().unwrap_or(0) as usize / 10;
        let one = 1u64 << (10 * unit);
        let (whole, tenths) = (self.0 / one, (self.0 % one) as u128 * 10 / one as u128);
        if tenths == 0 { write!(f, "{whole} {}", UNITS[unit]) } else { write!(f, "{whole}.{tenths} {}", UNITS[unit]) }
    }
}

/// Parses a size such as `512M`, `64K`, `2GiB`, `1000000`; suffixes are powers of 1024.
///
/// ```
/// use pagemill::units::parse_bytes;
///
/// assert_eq!((parse_bytes("64K"), parse_bytes("1.5 GiB")), (Ok(65_536), Ok(3 << 29)));
/// assert!(parse_bytes("much").is_err());
/// ```
///
/// # Errors
///
/// A message that describes the problem with the text.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, suffix) = trimmed.split_at(digits);
    let invalid = || format!("'{text}' is not a size: expected a number with K, M, G or T, for example 512M");
    let shift = shift_of(suffix.trim()).ok_or_else(invalid)?;
    let overflow = || format!("'{text}' is more than the address space");
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(1 << shift).ok_or_else(overflow);
    }
    let fraction: f64 = number.parse().map_err(|_| invalid())?;
    let bytes = fraction * (1u64 << shift) as f64;
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(overflow()) }
}

/// As [`parse_bytes`], but accepts no spaces and no fraction, and does not allocate: for environment variables during
/// program start.
pub fn parse_plain_bytes(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = text.split_at(digits);
    number.parse::<u64>().ok()?.checked_mul(1 << shift_of(suffix)?)
}

/// Returns the power of two that a suffix such as `K`, `kB` or `KiB` stands for.
fn shift_of(suffix: &str) -> Option<u32> {
    Some(match suffix.trim_end_matches(['B', 'b']).trim_end_matches(['I', 'i']) {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes in the usual notations must be parsed. Other texts must be rejected.
    #[test]
    fn parse_bytes_accepts_common_notations() {
        for (text, bytes) in
            [("0", 0), ("512", 512), ("64K", 64 << 10), ("64KiB", 64 << 10), ("512mb", 512 << 20), ("1.5G", 3 << 29)]
        {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "12Q", "-1", "1..2M", "99999999999999999999", "99999999999T"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    /// A size must print with the largest unit of which it has at least one, and with one decimal if needed.
    #[test]
    fn bytes_print_with_largest_unit() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (u64::MAX, "15.9 EiB")]
        {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    /// Only powers of two from the OS page to 8 MiB may be page sizes.
    #[test]
    fn page_sizes_are_powers_of_two_in_range() {
        assert_eq!("64K".parse::<PageSize>().unwrap().bytes(), 64 << 10);
        assert_eq!(PageSize::os().bytes(), os_page_bytes());
        for text in ["2K", "48K", "16M", "x"] {
            assert!(text.parse::<PageSize>().is_err(), "{text}");
        }
    }
}
