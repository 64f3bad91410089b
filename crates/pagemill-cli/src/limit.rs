//! Sizes of limits: bytes, or a percentage of the memory that this process may use.

use pagemill_core::units::parse_bytes;
use pagemill_sys::cgroup::{self, Hierarchy};
use std::io;
use std::str::FromStr;

/// The size of a limit as given on the command line, such as `512M` or `50%`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitSize {
    /// A number of bytes, greater than 0.
    Bytes(u64),
    /// 1 to 100 percent of the memory that this process may use ([`available_bytes`]).
    Percent(u64),
}

impl FromStr for LimitSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(number) = text.trim().strip_suffix('%') {
            let percent = number.trim_end().parse().ok().filter(|percent| (1..=100).contains(percent));
            return percent.map(Self::Percent).ok_or_else(|| format!("'{text}' is not a percentage from 1% to 100%"));
        }
        match parse_bytes(text)? {
            0 => Err("a limit of 0 bytes is too small".into()),
            bytes => Ok(Self::Bytes(bytes)),
        }
    }
}

impl LimitSize {
    /// Returns the size in bytes.
    ///
    /// # Errors
    ///
    /// A message, if the memory to which a percentage refers cannot be determined.
    pub fn resolve(self) -> Result<u64, String> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Percent(percent) => {
                let all = available_bytes("").map_err(|error| {
                    format!(
                        "{percent}% cannot be computed: the machine's memory is unknown ({error}); give a size instead"
                    )
                })?;
                Ok((u128::from(all) * u128::from(percent) / 100) as u64)
            }
        }
    }
}

/// Returns the smallest memory limit of this process's control groups and of the groups above them. Returns the
/// machine's memory if that is smaller.
///
/// `root` is prepended to every path, as in [`Hierarchy::find`].
///
/// # Errors
///
/// Errors of reading `/proc/meminfo`.
fn available_bytes(root: &str) -> io::Result<u64> {
    let of_groups = Hierarchy::find(root).map_or(u64::MAX, |groups| groups.smallest_limit_bytes());
    Ok(cgroup::machine(root)?.total_bytes.min(of_groups))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn sizes_and_percentages_are_parsed() {
        for (text, size) in [
            ("512M", LimitSize::Bytes(512 << 20)),
            (" 1 ", LimitSize::Bytes(1)),
            ("50%", LimitSize::Percent(50)),
            ("1%", LimitSize::Percent(1)),
            (" 100 % ", LimitSize::Percent(100)),
        ] {
            assert_eq!(text.parse(), Ok(size), "{text}");
        }
        for text in ["", "0", "0%", "101%", "-1%", "1.5%", "%", "50%%", "half", "1e2%"] {
            assert!(text.parse::<LimitSize>().is_err(), "{text}");
        }
    }

    /// Percentages are resolved with and without limits of control groups. A percentage must refer to the smallest
    /// limit of the process's group and of the groups above it. Without any limit, it must refer to the machine's
    /// memory.
    #[test]
    fn a_percentage_refers_to_the_smallest_limit() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().to_str().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert!(available_bytes(root).is_err());
        write("proc/meminfo", "MemTotal: 4096 kB\nMemAvailable: 1 kB\nSwapFree: 0 kB\n");
        assert_eq!(available_bytes(root).unwrap(), 4 << 20);
        write("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        write("proc/self/cgroup", "0::/outer/inner\n");
        write("sys/fs/cgroup/outer/inner/memory.current", "1\n");
        write("sys/fs/cgroup/outer/inner/memory.max", "max\n");
        assert_eq!(available_bytes(root).unwrap(), 4 << 20);
        write("sys/fs/cgroup/outer/memory.max", "1048576\n");
        assert_eq!(available_bytes(root).unwrap(), 1 << 20);
        write("sys/fs/cgroup/outer/inner/memory.max", "8388608\n");
        assert_eq!(available_bytes(root).unwrap(), 1 << 20, "the outer limit is smaller");
    }
}
