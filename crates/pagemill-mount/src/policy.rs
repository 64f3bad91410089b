//! What users say of their files, by extended attributes: may it vanish, shall it be huge.

use std::fmt;
use std::str::FromStr;

/// The attributes, without their family (`user.`, or `trusted.` where tmpfs has no other: before Linux 6.6).
pub const VOLATILE: &str = "pagemill.volatile";
pub const HUGE: &str = "pagemill.huge";
/// From which byte on a partial file was purged; set by Pagemill, taken away by who fills it again.
pub const PURGED: &str = "pagemill.purged";

/// What may go under pressure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Volatile {
    /// Nothing.
    #[default]
    None,
    /// Bytes from the end, a bit at a time: [`PURGED`] says from where on.
    Partial,
    /// The file as a whole.
    Full,
}

/// Which pages a file is to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Huge {
    /// Huge where it is dense, small where it is sparse, looked at once it is closed.
    #[default]
    Auto,
    /// Huge wherever there is a byte, the end included.
    Always,
    /// Small.
    Never,
}

/// A word for each value, as users write it.
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

/// What is said of one file or folder itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    pub volatile: Option<Volatile>,
    pub huge: Option<Huge>,
}

impl Marks {
    /// What this says, and where it is silent what `outer` says.
    pub fn or(self, outer: Self) -> Self {
        Self { volatile: self.volatile.or(outer.volatile), huge: self.huge.or(outer.huge) }
    }
}

/// A folder on the way to a file, as far as its marks are concerned.
#[derive(Clone, Copy, Debug)]
pub struct Above {
    pub marks: Marks,
    pub owner: u32,
    /// Others than its owner may write to it and delete what is in it: group or world writable, and not sticky.
    pub is_open_to_others: bool,
}

/// What holds for a file of `owner` with these marks of its own, below these folders, the nearest first.
///
/// (A file that anybody may write to does not speak for its owner: leave its own mark out.)
///
/// A mark must not reach further than who could set it: a folder's mark counts for the files right in it, which its owner
/// can delete anyway; further down only for files of its owner, or if root set it, and never if others may write to it.
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

    /// Every value has its word, and what is none is named with what would be.
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

    /// The nearest mark wins, each attribute by itself.
    #[test]
    fn the_nearest_mark_wins() {
        let huge = Marks { volatile: None, huge: Some(Huge::Never) };
        let none = Marks { volatile: Some(Volatile::None), huge: None };
        let found = effective(SILENT, 5, [above(huge, 5, false), above(FULL, 5, false)]);
        assert_eq!(found, Marks { volatile: Some(Volatile::Full), huge: Some(Huge::Never) });
        assert_eq!(effective(none, 5, [above(FULL, 5, false)]), none);
        assert_eq!(effective(SILENT, 5, []), SILENT);
    }

    /// A stranger's mark on a folder reaches the files in it, which he could delete, and nothing below.
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
