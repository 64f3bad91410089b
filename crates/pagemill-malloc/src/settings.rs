//! Settings from environment variables, which are read once, when the library starts.
//!
//! Reading the environment later would be unsafe, because another thread may change it at the same time. The program
//! may also have cleared the environment.

use pagemill_core::arena::Layout;
use pagemill_core::arena::nodes::Nodes;
use pagemill_core::published::TREE_VARIABLE;
use pagemill_core::reclaim::Return;
use pagemill_core::reclaim::tree::UNLIMITED;
use pagemill_core::units::{PageSize, parse_plain_bytes};
use pagemill_sys::file::{self, Path, Text};
use std::ffi::CStr;
use std::sync::OnceLock;

/// Settings of this process.
pub struct Settings {
    /// Limit of the process's resident bytes (`PAGEMILL_LIMIT`).
    pub limit_bytes: u64,
    /// Live bytes above which Pagemill serves the program instead of the C library (`PAGEMILL_AFTER`).
    pub after_bytes: Option<usize>,
    /// Whether frees of small allocations are checked (`PAGEMILL_CHECK`).
    pub is_checking: bool,
    /// Whether the helper thread may start (`PAGEMILL_HELPER`).
    pub may_have_helper: bool,
    /// Whether the limits of control groups and of the machine are taken into account (`PAGEMILL_WATCH`).
    pub observes_limits: bool,
    /// When free memory is returned to the system (`PAGEMILL_RETURN`).
    pub policy: Return,
    /// Folder of the process tree; empty for none.
    pub tree: Path,
    /// The user's folder for runtime files; empty for none.
    pub runtime: Path,
    /// Size of the software page (`PAGEMILL_PAGE_SIZE`).
    page_bytes: Option<usize>,
    /// Number of logical NUMA nodes (`PAGEMILL_NODES`).
    nodes: Option<usize>,
    /// Policy for huge pages (`PAGEMILL_HUGE`).
    huge: HugePolicy,
}

/// Policy for huge pages (`PAGEMILL_HUGE`).
#[derive(Clone, Copy, PartialEq, Eq)]
enum HugePolicy {
    /// A block gets a huge page only if little of it would stay unused.
    IfMostlyUsed,
    /// Every block gets a huge page, if the kernel has one.
    Always,
    /// No block gets a huge page.
    Never,
}

/// Returns the settings. The thread that starts the library makes the first call, which reads the environment, before
/// other threads can use the library.
pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(Settings::from_environment)
}

/// Returns the policy of `PAGEMILL_RETURN`, else that of the older variable `PAGEMILL_IDLE` (seconds or `off`).
fn return_policy() -> Option<Return> {
    if let Some(text) = variable(c"PAGEMILL_RETURN") {
        let policy = Return::parse(text);
        if let Err(error) = policy {
            warn_of_variable(format_args!("pagemill: PAGEMILL_RETURN={text}: {error}; ignored"));
        }
        return policy.ok();
    }
    match variable(c"PAGEMILL_IDLE")? {
        "off" | "0" => Some(Return::Keep),
        _ => Return::after_seconds(size_variable(c"PAGEMILL_IDLE")? as u64),
    }
}

impl Settings {
    fn from_environment() -> Self {
        let on_off = [("on", true), ("off", false)];
        let checks = [("1", true), ("0", false), ("on", true), ("off", false)];
        let huge = [("never", HugePolicy::Never), ("always", HugePolicy::Always)];
        let path = |name| variable(name).and_then(|path| Path::format(format_args!("{path}"))).unwrap_or_default();
        Self {
            limit_bytes: size_variable(c"PAGEMILL_LIMIT").map_or(UNLIMITED, |bytes| bytes as u64),
            after_bytes: size_variable(c"PAGEMILL_AFTER"),
            is_checking: word_variable(c"PAGEMILL_CHECK", &checks).unwrap_or(false),
            may_have_helper: word_variable(c"PAGEMILL_HELPER", &on_off).unwrap_or(true),
            observes_limits: word_variable(c"PAGEMILL_WATCH", &on_off).unwrap_or(true),
            policy: return_policy().unwrap_or(Return::BALANCED),
            tree: path(TREE_VARIABLE),
            runtime: path(c"XDG_RUNTIME_DIR"),
            page_bytes: size_variable(c"PAGEMILL_PAGE_SIZE"),
            nodes: size_variable(c"PAGEMILL_NODES"),
            huge: word_variable(c"PAGEMILL_HUGE", &huge).unwrap_or(HugePolicy::IfMostlyUsed),
        }
    }

    /// Returns the layout of the arena that these settings require.
    pub fn layout(&self) -> Layout {
        // No pool zone, because only programs that use the crate have page caches.
        let mut layout = Layout { pool_bytes: 0, ..Layout::for_program() };
        if let Some(bytes) = self.page_bytes {
            match PageSize::new(bytes) {
                Some(page) => layout.page = page,
                None => warn_of_variable(format_args!("pagemill: PAGEMILL_PAGE_SIZE={bytes} is no page size; ignored")),
            }
        }
        if let Some(count) = self.nodes {
            layout.nodes = Nodes::logical(count);
            if layout.nodes.count() != count {
                warn_of_variable(format_args!("pagemill: PAGEMILL_NODES={count}: {} it is", layout.nodes.count()));
            }
        }
        match self.huge {
            HugePolicy::Never => layout.use_huge = false,
            HugePolicy::Always => layout.huge_from_bytes = 0,
            HugePolicy::IfMostlyUsed => {}
        }
        layout
    }
}

/// Prints a message to standard error, with a newline.
pub fn warn(message: std::fmt::Arguments<'_>) {
    if let Some(line) = Text::<512>::format(format_args!("{message}\n")) {
        file::write_stderr(line.as_bytes());
    }
}

/// As [`warn`], about a variable that is ignored. Prints nothing in a process tree, where `run` has checked the
/// variables once for all processes.
fn warn_of_variable(message: std::fmt::Arguments<'_>) {
    if variable(TREE_VARIABLE).is_none() {
        warn(message);
    }
}

/// Returns the value of an environment variable; `None` if the variable is missing, empty or not UTF-8.
fn variable(name: &CStr) -> Option<&'static str> {
    file::environment(name)?.to_str().ok().filter(|value| !value.is_empty())
}

/// Reads an environment variable whose value must be one of `words`. Returns the meaning of that word. Warns about any
/// other value and ignores it.
fn word_variable<T: Copy>(name: &CStr, words: &[(&str, T)]) -> Option<T> {
    let value = variable(name)?;
    let found = words.iter().find(|(word, _)| *word == value).map(|(_, meaning)| *meaning);
    if found.is_none() {
        let (first, second) = (words[0].0, words[1].0);
        let name = name.to_str().unwrap_or("");
        warn_of_variable(format_args!("pagemill: {name}={value} is neither {first} nor {second}; ignored"));
    }
    found
}

/// Reads an environment variable whose value must be a whole number, with a suffix such as `K` if it is a size. Warns
/// about an invalid value and ignores it.
fn size_variable(name: &CStr) -> Option<usize> {
    let value = variable(name)?;
    let bytes = parse_plain_bytes(value).and_then(|bytes| usize::try_from(bytes).ok());
    if bytes.is_none() {
        warn_of_variable(format_args!("pagemill: {}={value} is no number; ignored", name.to_str().unwrap_or("")));
    }
    bytes
}
