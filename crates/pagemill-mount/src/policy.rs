//! Marks that users set on files with extended attributes: whether a file is volatile, and its huge pages.

use pagemill_core::units::BLOCK_BYTES;
use std::fmt;
use std::str::FromStr;

/// Names of the attributes without their family: `user.`, or `trusted.` where tmpfs has no other (before Linux 6.6).
pub const VOLATILE: &str = "pagemill.volatile";
pub const HUGE: &str = "pagemill.huge";
/// Offset from which a partially volatile file was purged. Set by Pagemill; a program that refills the file removes
/// it.
pub const PURGED: &str = "pagemill.purged";
/// On the root folder: the requested size, regardless of the current one.
pub const SIZE: &str = "pagemill.size";

/// What may be purged under pressure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Volatile {
    /// Nothing.
    #[default]
    None,
    /// The end of the file, in steps; [`PURGED`] has the offset.
    Partial,
    /// The whole file.
    Full,
}

/// Page size of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Huge {
    /// Huge where it is dense, small where it is sparse. Examined after the close.
    #[default]
    Auto,
    /// Huge for every block with any data, the last one included.
    Always,
    /// Small.
    Never,
}

/// Keywords of the values, as users write them.
trait Words: Copy + PartialEq + 'static {
    const ATTRIBUTE: &'static str;
    const WORDS: &'static [(Self, &'static str)];

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(value, _)| *value == self).map_or("", |(_, word)| word)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let known = || Self::WORDS.iter().map(|(_, word)| *word).collect::<Vec<_>>().join(", ");
        let found = Self::WORDS.iter().find(|(_, word)| *word == text).map(|(value, _)| *value);
        found.ok_or_else(|| format!("`{}` is no value of user.{}: {}", text.escape_debug(), Self::ATTRIBUTE, known()))
    }
}

impl Words for Volatile {
    const ATTRIBUTE: &'static str = VOLATILE;
    const WORDS: &'static [(Self, &'static str)] =
        &[(Self::None, "none"), (Self::Partial, "partial"), (Self::Full, "full")];
}

impl Words for Huge {
    const ATTRIBUTE: &'static str = HUGE;
    const WORDS: &'static [(Self, &'static str)] =
        &[(Self::Auto, "auto"), (Self::Always, "always"), (Self::Never, "never")];
}

macro_rules! by_words {
    ($($kind:ty),*) => {$(
        impl FromStr for $kind {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                Self::parse(text)
            }
        }

        impl fmt::Display for $kind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.word())
            }
        }
    )*};
}
by_words!(Volatile, Huge);

/// The marks of one file or folder itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    pub volatile: Option<Volatile>,
    pub huge: Option<Huge>,
}

impl Marks {
    /// Fills missing marks from `outer`.
    pub fn or(self, outer: Self) -> Self {
        Self { volatile: self.volatile.or(outer.volatile), huge: self.huge.or(outer.huge) }
    }

    /// Returns the marks of a file that are attributable to its owner. If its group or all users may write to the file,
    /// any of them may have set its mark, so a volatile mark is ignored: it would delete a file that they may not
    /// delete.
    #[must_use]
    pub fn trusted(self, is_writable_by_others: bool) -> Self {
        let volatile = self.volatile.filter(|volatile| *volatile == Volatile::None || !is_writable_by_others);
        Self { volatile, ..self }
    }

    /// Returns whether nothing is to be done for a file with these marks and this much memory.
    pub fn leave_alone(self, held_bytes: u64) -> bool {
        let is_small = match self.huge.unwrap_or_default() {
            Huge::Auto | Huge::Never => held_bytes < BLOCK_BYTES as u64,
            Huge::Always => held_bytes == 0,
        };
        is_small && self.volatile.unwrap_or_default() == Volatile::None
    }
}

/// A folder on the path to a file, with what matters for marks.
#[derive(Clone, Copy, Debug)]
pub struct Above {
    pub marks: Marks,
    pub owner: u32,
    /// Users other than the owner may write to it and delete its entries: group or world writable, and not sticky.
    pub is_open_to_others: bool,
}

/// Returns the effective marks of a file of `owner`, from its own marks and those of the folders above, nearest first.
///
/// For a file that other users may write, `own` must not contain its volatile mark ([`Marks::trusted`]).
///
/// A mark must not have more effect than the rights of the user that could set it. A folder's mark applies to the
/// files directly in it, which its owner can delete anyway. Further down it applies only to files of the folder's
/// owner, or if root owns the folder, and never if other users may write to the folder.
pub fn effective(own: Marks, owner: u32, above: impl IntoIterator<Item = Above>) -> Marks {
    let mut marks = own;
    for (level, folder) in above.into_iter().enumerate() {
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
    const SILENT: Marks = Marks { volatile: None, huge: None };

    fn above(marks: Marks, owner: u32, is_open_to_others: bool) -> Above {
        Above { marks, owner, is_open_to_others }
    }

    /// Every value has its keyword; the error for an invalid value lists the valid ones.
    #[test]
    fn values_are_words() {
        for (value, word) in [(Volatile::None, "none"), (Volatile::Partial, "partial"), (Volatile::Full, "full")] {
            assert_eq!((word.parse(), value.to_string().as_str()), (Ok(value), word));
        }
        for (value, word) in [(Huge::Auto, "auto"), (Huge::Always, "always"), (Huge::Never, "never")] {
            assert_eq!((word.parse(), value.to_string().as_str()), (Ok(value), word));
        }
        let error = "Full\n".parse::<Volatile>().unwrap_err();
        assert_eq!(error, "`Full\\n` is no value of user.pagemill.volatile: none, partial, full");
    }

    /// Only small files without a mark are left alone. A volatile mark on a file that other users may write is ignored.
    #[test]
    fn small_plain_files_are_left_alone() {
        let (small, block) = (100, BLOCK_BYTES as u64);
        let huge = |huge| Marks { volatile: None, huge: Some(huge) };
        assert!(SILENT.leave_alone(small) && !SILENT.leave_alone(block) && !FULL.leave_alone(small));
        assert!(huge(Huge::Never).leave_alone(small) && !huge(Huge::Always).leave_alone(small));
        assert_eq!((FULL.trusted(false), FULL.trusted(true)), (FULL, SILENT));
        assert_eq!(huge(Huge::Always).trusted(true), huge(Huge::Always));
    }

    /// The nearest mark applies, for each attribute separately.
    #[test]
    fn the_nearest_mark_wins() {
        let huge = Marks { volatile: None, huge: Some(Huge::Never) };
        let none = Marks { volatile: Some(Volatile::None), huge: None };
        let found = effective(SILENT, 5, [above(huge, 5, false), above(FULL, 5, false)]);
        assert_eq!(found, Marks { volatile: Some(Volatile::Full), huge: Some(Huge::Never) });
        assert_eq!(effective(none, 5, [above(FULL, 5, false)]), none);
        assert_eq!(effective(SILENT, 5, []), SILENT);
    }

    /// Another user's mark on a folder applies to the files in it, which that user could delete, and to nothing below.
    #[test]
    fn marks_reach_no_further_than_rights() {
        let plain = above(SILENT, 5, false);
        assert_eq!(effective(SILENT, 5, [above(FULL, 6, true)]), FULL, "right in it");
        assert_eq!(effective(SILENT, 5, [plain, above(FULL, 6, false)]), SILENT, "another user's");
        assert_eq!(effective(SILENT, 5, [plain, above(FULL, 5, true)]), SILENT, "anybody may have set it");
        assert_eq!(effective(SILENT, 5, [plain, above(FULL, 0, false)]), FULL, "root's");
        assert_eq!(effective(SILENT, 5, [plain, above(FULL, 5, false)]), FULL, "its own");
    }
}
