//! Names of volumes, and the options of `docker volume create -o`.

use crate::mount;
use pagemill_core::units::parse_bytes;
use pagemill_tmpfs::policy::{Huge, Volatile};
use std::collections::BTreeMap;

/// Maximum number of bytes of a volume's name, which is also the name of a folder.
const MAX_NAME_BYTES: usize = 255;

/// Parsed options of a volume. `None`: the default of `pagemill mount`, no mark.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    pub size_bytes: Option<u64>,
    pub mode: Option<u32>,
    pub volatile: Option<Volatile>,
    pub huge: Option<Huge>,
}

impl Options {
    /// # Errors
    ///
    /// A text with the option that is unknown, or whose value is wrong.
    pub fn parse(given: &BTreeMap<String, String>) -> Result<Self, String> {
        let mut options = Self::default();
        for (option, value) in given {
            let wrong = |why: String| format!("option {}={}: {why}", option.escape_debug(), value.escape_debug());
            match option.as_str() {
                "size" => options.size_bytes = Some(parse_bytes(value).map_err(wrong)?),
                "mode" => options.mode = Some(mount::parse_mode(value).map_err(wrong)?),
                "volatile" => options.volatile = Some(value.parse().map_err(wrong)?),
                "huge" => options.huge = Some(value.parse().map_err(wrong)?),
                _ => return Err(wrong("a volume has no such option; it has size, mode, volatile, huge".into())),
            }
        }
        Ok(options)
    }
}

/// Checks a volume's name. An accepted name is one component of a path, neither `.` nor `..`.
///
/// # Errors
///
/// A text with the character that is wrong, and its position.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_allowed =
        |(at, letter): (usize, char)| letter.is_ascii_alphanumeric() || (at > 0 && matches!(letter, '_' | '.' | '-'));
    let rule = "a name has letters and digits of ASCII and, behind the first, also `_`, `.` and `-`";
    if name.is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(format!("the volume's name has {} bytes: 1 to {MAX_NAME_BYTES} are possible", name.len()));
    }
    match name.char_indices().find(|found| !is_allowed(*found)) {
        Some((at, letter)) => Err(format!("the volume's name has {letter:?} at byte {at}: {rule}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names that lead out of a folder, or that have other characters than Docker allows, must be refused.
    #[test]
    fn names_are_single_components() {
        let longest = "n".repeat(MAX_NAME_BYTES);
        for name in ["a", "0", "ci-cache_1.2", "a..b", longest.as_str()] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
        let too_long = "n".repeat(MAX_NAME_BYTES + 1);
        for name in ["", ".", "..", "../a", "a/b", "/a", ".lock", "-a", "a b", "a\0", "a\n", "ä", too_long.as_str()] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        assert!(check_name("a/../b").unwrap_err().contains("'/' at byte 1"));
    }

    /// Options must be parsed like those of the commands, whatever the form of a size. Unknown options and wrong values
    /// must be named in the error.
    #[test]
    fn options_are_those_of_the_commands() {
        let parse = |given: &[(&str, &str)]| {
            Options::parse(&given.iter().map(|(option, value)| ((*option).into(), (*value).into())).collect())
        };
        assert_eq!(parse(&[]), Ok(Options::default()));
        assert_eq!(parse(&[("size", "1G")]), parse(&[("size", "1024 MiB")]));
        let all = parse(&[("size", "4096"), ("mode", "0750"), ("volatile", "full"), ("huge", "never")]).unwrap();
        assert_eq!((all.size_bytes, all.mode), (Some(4096), Some(0o750)));
        assert_eq!((all.volatile, all.huge), (Some(Volatile::Full), Some(Huge::Never)));
        for (option, value) in [("size", "big"), ("mode", "9"), ("volatile", "yes"), ("huge", ""), ("sise", "1G")] {
            let error = parse(&[(option, value)]).unwrap_err();
            assert!(error.starts_with(&format!("option {option}={value}: ")), "{error}");
        }
    }
}
