//! Software page sizes, and the names of the subjects that use them.

use pagemill_core::units::PageSize;

/// A software page size, with the names of the subjects that use it.
#[derive(Debug, PartialEq, Eq)]
pub struct Page {
    /// The size as an argument of a command line.
    pub text: &'static str,
    /// A page cache with pages of this size, read by calls.
    pub cache: &'static str,
    /// A view of a file in such a cache.
    pub view: &'static str,
    /// Pins of pages in such a cache.
    pub pin: &'static str,
    /// `pagemill run` with this page size.
    pub run: &'static str,
}

macro_rules! pages {
    ($($text:literal)*) => {
        [$(Page {
            text: $text,
            cache: concat!("cache-", $text),
            view: concat!("view-", $text),
            pin: concat!("pin-", $text),
            run: concat!("run-", $text),
        },)*]
    };
}

/// All page sizes that [`PageSize`] allows.
static ALL: [Page; 12] = pages!("4K" "8K" "16K" "32K" "64K" "128K" "256K" "512K" "1M" "2M" "4M" "8M");

/// The smallest page size, with which others are compared.
pub const SMALL: &str = "4K";
/// The page size of most targets.
pub const MEDIUM: &str = "64K";
/// The size of a huge page.
pub const LARGE: &str = "2M";

/// Page sizes of a full run, and of a quick one.
const FULL: [&str; 7] = [SMALL, "16K", MEDIUM, "256K", "1M", LARGE, "8M"];
const QUICK: [&str; 3] = [SMALL, MEDIUM, LARGE];

impl Page {
    /// Returns the page size with this text.
    pub fn named(text: &str) -> &'static Self {
        let found = ALL.iter().find(|page| page.text == text);
        found.expect("the table has all page sizes of the experiment")
    }

    pub fn bytes(&self) -> u64 {
        self.text.parse::<PageSize>().map_or(0, |size| size.bytes() as u64)
    }
}

/// Parses an argument of `--page-sizes`.
pub fn parse(text: &str) -> Result<&'static Page, String> {
    let size: PageSize = text.parse()?;
    ALL.iter().find(|page| page.bytes() == size.bytes() as u64).ok_or_else(|| format!("{text} is not a page size here"))
}

/// Returns the given page sizes in ascending order, each once; without any, those of a quick or full run.
pub fn chosen(given: &[&'static Page], is_quick: bool) -> Vec<&'static Page> {
    let mut pages = match (given.is_empty(), is_quick) {
        (false, _) => given.to_vec(),
        (true, true) => QUICK.map(Page::named).to_vec(),
        (true, false) => FULL.map(Page::named).to_vec(),
    };
    pages.sort_by_key(|page| page.bytes());
    pages.dedup();
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every size of the table must be a page size, in ascending order. Sizes may be written in other units; sizes that
    /// are no power of two, too small or too large must be refused.
    #[test]
    fn page_sizes_are_parsed() {
        assert!(ALL.is_sorted_by_key(Page::bytes) && ALL[0].bytes() == 4 << 10 && ALL[11].bytes() == 8 << 20);
        assert_eq!(parse("1024K").map(|page| page.view), Ok("view-1M"));
        for text in ["2K", "48K", "16M", "much"] {
            assert!(parse(text).is_err(), "{text}");
        }
        let texts = |pages: Vec<&Page>| pages.iter().map(|page| page.text).collect::<Vec<_>>();
        assert_eq!(texts(chosen(&[Page::named("1M"), Page::named("4K"), Page::named("1M")], true)), ["4K", "1M"]);
        assert_eq!((texts(chosen(&[], true)).len(), texts(chosen(&[], false)).len()), (3, 7));
    }
}
