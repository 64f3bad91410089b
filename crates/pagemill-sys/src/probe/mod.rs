//! Determines which kernel features this process can use, by trying each one (`pagemill doctor`).
//!
//! Every [`Feature`] is declared once, beside the function that tries it. Nothing is inferred from a version number, no
//! setting is changed, and each trial undoes its effects. If `/proc` or `/sys` cannot be read, the state is
//! [`Availability::Unknown`], and the row says why. Unlike most modules of this crate, this module allocates.
//!
//! | file | features |
//! |---|---|
//! | `kernel` | release, processor, OS page, nodes |
//! | `memory` | huge pages, releasing memory, moving it |
//! | `limits` | overcommit, resource limits, pressure, swap |
//! | `cgroup` | the control group and its memory limit |
//! | `io` | rings, events, folders; privileges |
//! | `trial` | the system calls that are tried |

mod cgroup;
mod io;
mod kernel;
mod limits;
mod memory;
mod trial;

use crate::process::parse_release;
use std::path::{Path, PathBuf};

/// The state of a feature on this machine, for this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// The feature was tried, and works.
    Available,
    /// The feature works in part, or within a narrow limit.
    Limited,
    /// The feature was tried, and the kernel refused it.
    Missing,
    /// The feature could not be tried.
    Unknown,
}

impl Availability {
    /// Returns the keyword of the state in JSON output. Keywords stay the same in all versions.
    pub fn keyword(self) -> &'static str {
        match self {
            Self::Available => "available",
            Self::Limited => "limited",
            Self::Missing => "missing",
            Self::Unknown => "unknown",
        }
    }
}

/// Groups of features, in the order of the printed table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    Kernel,
    HugePages,
    GivingBack,
    Limits,
    Files,
    Privileges,
}

impl Group {
    /// Returns the keyword of the group in JSON output. Keywords stay the same in all versions.
    pub fn keyword(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::HugePages => "huge_pages",
            Self::GivingBack => "giving_back",
            Self::Limits => "limits",
            Self::Files => "files",
            Self::Privileges => "privileges",
        }
    }

    /// Returns the heading of the group in the printed table.
    pub fn title(self) -> &'static str {
        match self {
            Self::Kernel => "Kernel",
            Self::HugePages => "Huge pages",
            Self::GivingBack => "Giving memory back, and moving it",
            Self::Limits => "Limits",
            Self::Files => "I/O and files",
            Self::Privileges => "Privileges",
        }
    }
}

/// A row of the table: a feature and why it matters.
#[derive(Debug)]
pub struct Feature {
    /// The keyword of the feature in JSON output. Keywords stay the same in all versions.
    pub key: &'static str,
    pub group: Group,
    pub name: &'static str,
    /// The first Linux release with the feature, such as `5.14`; empty if every release has it.
    pub since: &'static str,
    /// What Pagemill uses the feature for.
    pub needed_for: &'static str,
    /// What Pagemill loses without the feature.
    pub lost: &'static str,
    /// The command that enables the feature; empty if only another kernel helps.
    fix: &'static str,
    /// Function that tries the feature and returns its state.
    check: fn(&SystemFiles) -> Checked,
}

/// The result of a check. `Err` is the finding if the check ended early.
type Checked = Result<Finding, Finding>;

/// Returns the finding of a check, whether the check ended early or not.
fn finding_of(checked: Checked) -> Finding {
    checked.unwrap_or_else(|early| early)
}

/// A feature and its state on this machine.
#[derive(Debug)]
pub struct Row {
    pub feature: &'static Feature,
    pub state: Availability,
    /// The result of the trial: a number, a setting, or an error.
    pub found: String,
    /// How to enable the feature; `None` if the state is [`Availability::Available`], or if no fix is known.
    pub fix: Option<String>,
}

/// The result of [`probe`]: the state of every feature.
#[derive(Debug)]
pub struct Report {
    /// The kernel's release string.
    pub kernel: String,
    pub rows: Vec<Row>,
}

impl Report {
    /// Returns the row of the feature that has this key.
    pub fn row(&self, key: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.feature.key == key)
    }

    /// Returns whether Pagemill works on this machine at all, even if slowly.
    pub fn is_supported(&self) -> bool {
        !self.rows.iter().any(|row| row.state == Availability::Missing && is_required(row.feature.key))
    }

    /// Returns the number of rows whose state is not [`Availability::Available`].
    pub fn lacking_count(&self) -> usize {
        self.rows.iter().filter(|row| row.state != Availability::Available).count()
    }
}

/// Returns whether Pagemill cannot run without the feature that has this key.
pub fn is_required(key: &str) -> bool {
    ["kernel", "processor", "reserve", "madv_populate", "madv_dontneed"].contains(&key)
}

/// Tries every feature. Takes 20 to 50 ms and some child processes, and at most 4 MiB of memory at a time.
pub fn probe() -> Report {
    probe_in(Path::new("/"))
}

/// As [`probe`], but reads `/proc`, `/sys` and `/dev` below `root`. System calls are tried on the running kernel.
pub fn probe_in(root: &Path) -> Report {
    let system = SystemFiles { root: root.to_path_buf() };
    let (kernel, _) = trial::kernel_names();
    let running = parse_release(&kernel);
    let rows = table().map(|feature| feature.probe_row(&system, running)).collect();
    Report { kernel, rows }
}

/// Returns every feature, in the order of the groups.
pub fn table() -> impl Iterator<Item = &'static Feature> {
    [kernel::FEATURES, memory::FEATURES, limits::FEATURES, cgroup::FEATURES, io::FEATURES].into_iter().flatten()
}

impl Feature {
    /// Tries the feature and returns its row. `running` is the release of the running kernel.
    fn probe_row(&'static self, system: &SystemFiles, running: Option<(u32, u32)>) -> Row {
        let Finding { state, found, fix, errno } = finding_of((self.check)(system));
        let fix = match state {
            Availability::Available => None,
            Availability::Unknown => fix,
            _ => Some(fix.unwrap_or_else(|| self.default_fix(errno, running))),
        };
        Row { feature: self, state, found, fix: fix.filter(|fix| !fix.is_empty()) }
    }

    /// Returns how to enable the feature after its trial failed with `errno`. A kernel that is too old, or built
    /// without the feature, returns ENOSYS or EINVAL.
    fn default_fix(&self, errno: Option<i32>, running: Option<(u32, u32)>) -> String {
        match errno {
            Some(libc::ENOSYS | libc::EINVAL | libc::ENOTTY) => {
                if running < parse_release(self.since) {
                    format!("needs Linux {}", self.since)
                } else {
                    "needs a kernel built with it, or a sandbox that lets it through".to_string()
                }
            }
            Some(libc::EPERM) if self.fix.is_empty() => "allow the call in the sandbox's filter (seccomp)".to_string(),
            _ if self.fix.is_empty() && !self.since.is_empty() => format!("needs Linux {}", self.since),
            _ => self.fix.to_string(),
        }
    }
}

/// The result of trying a feature.
struct Finding {
    state: Availability,
    found: String,
    /// A fix that replaces [`Feature::fix`].
    fix: Option<String>,
    /// The error number of the system call that failed. It decides which fix is shown.
    errno: Option<i32>,
}

impl Finding {
    fn new(state: Availability, found: impl Into<String>) -> Self {
        Self { state, found: found.into(), fix: None, errno: None }
    }

    fn available(found: impl Into<String>) -> Self {
        Self::new(Availability::Available, found)
    }

    fn limited(found: impl Into<String>) -> Self {
        Self::new(Availability::Limited, found)
    }

    fn missing(found: impl Into<String>) -> Self {
        Self::new(Availability::Missing, found)
    }

    fn unknown(found: impl Into<String>) -> Self {
        Self::new(Availability::Unknown, found)
    }

    /// Returns the finding for a feature whose system call the kernel refused with this error.
    fn refused(error: &std::io::Error) -> Self {
        Self { errno: error.raw_os_error(), ..Self::missing(describe_error(error)) }
    }

    /// Returns the finding with `fix`, which replaces the fix of the feature.
    fn with_fix(self, fix: impl Into<String>) -> Self {
        Self { fix: Some(fix.into()), ..self }
    }
}

/// As [`Finding::refused`].
impl From<std::io::Error> for Finding {
    fn from(error: std::io::Error) -> Self {
        Self::refused(&error)
    }
}

/// Returns memory for a trial, or the finding if there is none.
fn scratch_block() -> Result<trial::Scratch, Finding> {
    let no_memory = |error| Finding::unknown(format!("no memory for the trial: {}", describe_error(&error)));
    trial::Scratch::new(1).map_err(no_memory)
}

/// The error of a kernel file that could not be read.
struct KernelFileError {
    /// Text for the row: the path and the error.
    reason: String,
    fix: Option<String>,
    /// The kernel has no such file.
    is_absent: bool,
}

impl KernelFileError {
    /// Returns the finding `absent` if the kernel has no such file.
    fn or_if_absent(self, absent: Finding) -> Finding {
        if self.is_absent { absent } else { self.into() }
    }
}

impl From<KernelFileError> for Finding {
    fn from(unread: KernelFileError) -> Self {
        Self { fix: unread.fix, ..Self::unknown(unread.reason) }
    }
}

/// The kernel's files (`/proc`, `/sys`, `/dev`), below a root folder that tests can replace.
struct SystemFiles {
    root: PathBuf,
}

impl SystemFiles {
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// Returns the text of a kernel file, without white space at its start and end.
    fn read(&self, path: &str) -> Result<String, KernelFileError> {
        let error = match std::fs::read(self.path(path)) {
            Ok(bytes) => return Ok(String::from_utf8_lossy(&bytes).trim().to_string()),
            Err(error) => error,
        };
        let mount = if path.starts_with("/proc") { "proc" } else { "sys" };
        let is_mounted = if mount == "proc" { self.has_file("/proc/self") } else { self.has_file("/sys/kernel") };
        let fix = (!is_mounted).then(|| format!("sudo mount -t {} none /{mount}", mount.replace("sys", "sysfs")));
        let is_absent = is_mounted && error.kind() == std::io::ErrorKind::NotFound;
        Err(KernelFileError { reason: format!("cannot read {path}: {}", describe_error(&error)), fix, is_absent })
    }

    /// As [`SystemFiles::read`], for a file that contains one number.
    fn read_number(&self, path: &str) -> Result<u64, KernelFileError> {
        let text = self.read(path)?;
        text.parse().map_err(|_| KernelFileError {
            reason: format!("{path} holds no number but {text:?}"),
            fix: None,
            is_absent: false,
        })
    }

    /// Returns whether a kernel file exists.
    fn has_file(&self, path: &str) -> bool {
        self.path(path).exists()
    }
}

/// Formats an error with its symbolic name: `EPERM (Operation not permitted)`.
fn describe_error(error: &std::io::Error) -> String {
    let text = error.to_string();
    let Some(errno) = error.raw_os_error() else { return text };
    let text = text.split(" (os error").next().unwrap_or_default();
    let name = match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EIO => "EIO",
        libc::ENXIO => "ENXIO",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::EEXIST => "EEXIST",
        libc::ENODEV => "ENODEV",
        libc::ENOTDIR => "ENOTDIR",
        libc::EINVAL => "EINVAL",
        libc::ENFILE => "ENFILE",
        libc::EMFILE => "EMFILE",
        libc::ENOTTY => "ENOTTY",
        libc::ENOSPC => "ENOSPC",
        libc::EROFS => "EROFS",
        libc::ENOSYS => "ENOSYS",
        libc::EUSERS => "EUSERS",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EDQUOT => "EDQUOT",
        _ => return format!("error {errno} ({text})"),
    };
    format!("{name} ({text})")
}

/// Formats a number of bytes with a unit: `512 MiB`, `23.5 GiB`.
fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let exponent = (bytes.max(1).ilog2() / 10) as usize;
    let value = bytes as f64 / (1u64 << (10 * exponent)) as f64;
    let number = format!("{value:.1}");
    format!("{} {}", number.trim_end_matches(".0"), UNITS[exponent])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The features of the table must have unique keys, be sorted by group, and have no missing or too long text.
    #[test]
    fn rows_are_well_formed() {
        let mut keys = BTreeSet::new();
        for feature in table() {
            let key = feature.key;
            assert!(keys.insert(key), "{key} twice");
            assert!(
                key.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_'),
                "{key}"
            );
            assert!(feature.name.len() <= 28, "{key}: the name is too long for its column");
            assert!(feature.fix.len() <= 72, "{key}: the fix is too long for a line of 80");
            assert!(!feature.needed_for.is_empty() && !feature.lost.is_empty(), "{key}");
            assert!(feature.since.is_empty() || parse_release(feature.since).is_some(), "{key}");
        }
        assert!(table().map(|feature| feature.group as u8).is_sorted());
    }

    /// Every feature must get a state on this machine, and each feature that does not work fully must get a fix.
    #[test]
    fn this_machine_is_examined() {
        let report = probe();
        assert_eq!(report.rows.len(), table().count());
        assert!(report.is_supported(), "{report:#?}");
        for row in &report.rows {
            assert!(!row.found.is_empty(), "{}", row.feature.key);
            match row.state {
                Availability::Available => assert!(row.fix.is_none(), "{row:?}"),
                Availability::Limited | Availability::Missing => assert!(row.fix.is_some(), "{row:?}"),
                Availability::Unknown => {}
            }
        }
    }

    /// With an empty folder as root, features whose state is read from a file must be unknown. Their rows must say why,
    /// and how to mount the missing file system.
    #[test]
    fn without_kernel_files_rows_are_unknown() {
        let root = tempfile::tempdir().unwrap();
        let report = probe_in(root.path());
        for key in ["thp_enabled", "thp_defrag", "overcommit", "max_map_count", "memory", "swap", "cgroup", "psi"] {
            let row = report.row(key).unwrap();
            assert_eq!(row.state, Availability::Unknown, "{key}");
            assert!(row.found.contains("ENOENT"), "{key}: {}", row.found);
            assert!(row.fix.as_ref().is_some_and(|fix| fix.contains("mount")), "{key}");
        }
        assert!(report.is_supported());
    }

    /// `parse_release` must return the major and minor number of kernel releases of the usual forms.
    #[test]
    fn releases_are_parsed() {
        assert_eq!(parse_release("6.18.44-generic"), Some((6, 18)));
        assert_eq!(parse_release("5.15"), Some((5, 15)));
        assert_eq!(parse_release("unknown"), None);
    }

    /// A size must be printed in the largest unit that is not larger than the size, with at most one decimal.
    #[test]
    fn sizes_are_printed_in_the_largest_unit() {
        assert_eq!(format_size(0), "0 B");
        assert_eq!(format_size(512 << 20), "512 MiB");
        assert_eq!(format_size(47 << 29), "23.5 GiB");
        assert_eq!(format_size((100 << 20) - 1), "100 MiB");
        assert_eq!(format_size(u64::MAX), "16 EiB");
    }

    /// A known error must be printed with its symbolic name, any other with its number.
    #[test]
    fn known_errors_are_printed_by_name() {
        assert!(describe_error(&std::io::Error::from_raw_os_error(libc::EPERM)).starts_with("EPERM ("));
        assert!(describe_error(&std::io::Error::from_raw_os_error(libc::EXDEV)).starts_with("error 18 ("));
    }
}
