//! Marks: extended attributes by which users say whether a file is volatile and whether it gets huge pages.
//!
//! A mark on a folder applies to the files in it and, where [`effective_marks`] allows that, below it.

use pagemill_core::units::BLOCK_BYTES;
use std::fmt;
use std::str::FromStr;

/// Names of the attributes with the marks, without their family. The family is `user.`, or `trusted.` where tmpfs has
/// no `user.` attributes (before Linux 6.6).
pub const VOLATILE: &str = "pagemill.volatile";
pub const HUGE: &str = "pagemill.huge";
/// Attribute with the offset from which a partially volatile file was purged. Pagemill sets it; a program that writes
/// the purged contents again removes it.
pub const PURGED: &str = "pagemill.purged";
/// Attribute of the root folder: the size that the user requested. The current size can be smaller.
pub const SIZE: &str = "pagemill.size";

/// What a purge may free of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Volatile {
    /// Nothing.
    #[default]
    None,
    /// The end of the file, in steps. [`PURGED`] has the offset.
    Partial,
    /// The whole file.
    Full,
}

/// Which page size the blocks of a file get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Huge {
    /// Dense blocks get huge pages, sparse blocks small ones. The worker examines a file after its close.
    #[default]
    Auto,
    /// Every block with any data gets a huge page, the last block included.
    Always,
    /// All blocks get small pages.
    Never,
}

/// The keywords of a mark's values, as users write them.
trait Keywords: Copy + PartialEq + 'static {
    const ATTRIBUTE: &'static str;
    const KEYWORDS: &'static [(Self, &'static str)];

    fn keyword(self) -> &'static str {
        Self::KEYWORDS.iter().find(|(value, _)| *value == self).map_or("", |(_, word)| word)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let known = || Self::KEYWORDS.iter().map(|(_, word)| *word).collect::<Vec<_>>().join(", ");
        let found = Self::KEYWORDS.iter().find(|(_, word)| *word == text).map(|(value, _)| *value);
        found.ok_or_else(|| format!("`{}` is no value of user.{}: {}", text.escape_debug(), Self::ATTRIBUTE, known()))
    }
}

impl Keywords for Volatile {
    const ATTRIBUTE: &'static str = VOLATILE;
    const KEYWORDS: &'static [(Self, &'static str)] =
        &[(Self::None, "none"), (Self::Partial, "partial"), (Self::Full, "full")];
}

impl Keywords for Huge {
    const ATTRIBUTE: &'static str = HUGE;
    const KEYWORDS: &'static [(Self, &'static str)] =
        &[(Self::Auto, "auto"), (Self::Always, "always"), (Self::Never, "never")];
}

macro_rules! parsed_and_printed_as_keywords {
    ($($kind:ty),*) => {$(
        impl FromStr for $kind {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                Self::parse(text)
            }
        }

        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.keyword())
            }
        }
    )*};
}
parsed_and_printed_as_keywords!(Volatile, Huge);

/// The marks set on one file or folder; `None` where the attribute is missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    pub volatile: Option<Volatile>,
    pub huge: Option<Huge>,
}

impl Marks {
    /// Returns these marks. Where a mark is missing, returns that of `outer`.
    pub fn or(self, outer: Self) -> Self {
        Self { volatile: self.volatile.or(outer.volatile), huge: self.huge.or(outer.huge) }
    }

    /// Returns these marks without the volatile mark if `is_writable_by_others`: a user other than the owner may have
    /// set the mark. With that mark, such a user could delete the contents of a file that the user may not delete. The
    /// mark `none` remains.
    #[must_use]
    pub fn trusted(self, is_writable_by_others: bool) -> Self {
        let volatile = self.volatile.filter(|volatile| *volatile == Volatile::None || !is_writable_by_others);
        Self { volatile, ..self }
    }

    /// Returns whether a file with these marks and this much memory needs no action: the file is neither volatile
    /// nor large enough for huge pages.
    pub fn needs_no_action(self, held_bytes: u64) -> bool {
        let is_small = match self.huge.unwrap_or_default() {
            Huge::Auto | Huge::Never => held_bytes < BLOCK_BYTES as u64,
            Huge::Always => held_bytes == 0,
        };
        is_small && self.volatile.unwrap_or_default() == Volatile::None
    }
}

/// An ancestor folder of a file: its marks, its owner, and whether other users may write to it.
#[derive(Clone, Copy, Debug)]
pub struct Ancestor {
    pub marks: Marks,
    pub owner: u32,
    /// Users other than the owner may write to the folder and delete its entries: it is group or world
    /// writable, and not sticky.
    pub is_open_to_others: bool,
}

/// Returns the effective marks of a file: its own, completed by those of its ancestors, nearest first. `owner`
/// owns the file.
///
/// If other users may write to the file, `own` must not contain its volatile mark ([`Marks::trusted`]).
///
/// A mark must not have more effect than the rights of the user that set it. A folder's mark applies to the files
/// directly in the folder, which the folder's owner can delete anyway. It applies to files in subfolders only if two
/// conditions hold: root or the file's owner owns the folder, and no other user may write to the folder.
pub fn effective_marks(own: Marks, owner: u32, ancestors: impl IntoIterator<Item = Ancestor>) -> Marks {
    let mut marks = own;
    for (level, folder) in ancestors.into_iter().enumerate() {
        let is_its_owners = folder.owner == owner || folder.owner == 0;
        if level == 0 || (is_its_owners && !folder.is_open_to_others) {
            marks = marks.or(folder.marks);
        }
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: Marks = Marks { volatile: Some(Volatile::Full), huge: None };
    const NO_MARKS: Marks = Marks { volatile: None, huge: None };

    fn ancestor(marks: Marks, owner: u32, is_open_to_others: bool) -> Ancestor {
        Ancestor { marks, owner, is_open_to_others }
    }

    /// Every value parses from and prints as its keyword. The error for an invalid value lists the valid ones.
    #[test]
    fn every_value_has_a_keyword() {
        for (value, word) in [(Volatile::None, "none"), (Volatile::Partial, "partial"), (Volatile::Full, "full")] {
            assert_eq!((word.parse(), value.to_string().as_str()), (Ok(value), word));
        }
        for (value, word) in [(Huge::Auto, "auto"), (Huge::Always, "always"), (Huge::Never, "never")] {
            assert_eq!((word.parse(), value.to_string().as_str()), (Ok(value), word));
        }
        let error = "Full\n".parse::<Volatile>().unwrap_err();
        assert_eq!(error, "`Full\\n` is no value of user.pagemill.volatile: none, partial, full");
    }

    /// Small files without a mark must need no action. A volatile mark on a file that other users may write must be
    /// ignored.
    #[test]
    fn small_plain_files_are_left_alone() {
        let (small, block) = (100, BLOCK_BYTES as u64);
        let huge = |huge| Marks { volatile: None, huge: Some(huge) };
        assert!(NO_MARKS.needs_no_action(small) && !NO_MARKS.needs_no_action(block) && !FULL.needs_no_action(small));
        assert!(huge(Huge::Never).needs_no_action(small) && !huge(Huge::Always).needs_no_action(small));
        assert_eq!((FULL.trusted(false), FULL.trusted(true)), (FULL, NO_MARKS));
        assert_eq!(huge(Huge::Always).trusted(true), huge(Huge::Always));
    }

    /// Several ancestors have marks. For each attribute, the file's own mark must apply, else that of the nearest
    /// ancestor with a mark.
    #[test]
    fn the_nearest_mark_wins() {
        let huge = Marks { volatile: None, huge: Some(Huge::Never) };
        let none = Marks { volatile: Some(Volatile::None), huge: None };
        let found = effective_marks(NO_MARKS, 5, [ancestor(huge, 5, false), ancestor(FULL, 5, false)]);
        assert_eq!(found, Marks { volatile: Some(Volatile::Full), huge: Some(Huge::Never) });
        assert_eq!(effective_marks(none, 5, [ancestor(FULL, 5, false)]), none);
        assert_eq!(effective_marks(NO_MARKS, 5, []), NO_MARKS);
    }

    /// A mark that another user set on a folder must apply to the files directly in the folder, which that user could
    /// delete, but not to files in subfolders.
    #[test]
    fn a_mark_reaches_no_further_than_its_users_rights() {
        let plain = ancestor(NO_MARKS, 5, false);
        assert_eq!(effective_marks(NO_MARKS, 5, [ancestor(FULL, 6, true)]), FULL, "file directly in the folder");
        assert_eq!(effective_marks(NO_MARKS, 5, [plain, ancestor(FULL, 6, false)]), NO_MARKS, "another user's folder");
        assert_eq!(
            effective_marks(NO_MARKS, 5, [plain, ancestor(FULL, 5, true)]),
            NO_MARKS,
            "any user may have set the mark"
        );
        assert_eq!(effective_marks(NO_MARKS, 5, [plain, ancestor(FULL, 0, false)]), FULL, "root's folder");
        assert_eq!(effective_marks(NO_MARKS, 5, [plain, ancestor(FULL, 5, false)]), FULL, "folder of the file's owner");
    }
}
