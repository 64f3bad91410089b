//! What the environment says, read once, when the library's life begins.
//!
//! Later is too late: another thread may be changing the environment while
//! malloc reads it, and a program may clear it.
#![allow(unsafe_code)] // a static written once

use pagemill::arena::Layout;
use pagemill::arena::nodes::Nodes;
use pagemill::published::TREE_VARIABLE;
use pagemill::reclaim::governor::DEFAULT_IDLE;
use pagemill::reclaim::tree::UNLIMITED;
use pagemill::units::{PageSize, parse_plain_bytes};
use pagemill_sys::file::{self, Path, Text};
use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::time::Duration;

/// Settings of this process.
pub struct Settings {
    /// Most bytes that the arena may hold.
    pub limit_bytes: u64,
    /// What the program holds before Pagemill serves it.
    pub after_bytes: Option<usize>,
    pub is_checking: bool,
    pub may_have_helper: bool,
    /// Whether control groups and the machine's memory are minded.
    pub is_watching: bool,
    /// Who does nothing for so long gives its free memory back.
    pub idle: Option<Duration>,
    /// Folder of the process tree; empty for none.
    pub tree: Path,
    /// The user's folder for runtime files; empty for none.
    pub runtime: Path,
    page_bytes: Option<usize>,
    nodes: Option<usize>,
    huge: Huge,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Huge {
    WhereTheyPay,
    Always,
    Never,
}

struct Cell(UnsafeCell<Settings>);

// SAFETY: written by `read` only, before anybody else can know of the library.
unsafe impl Sync for Cell {}

static SETTINGS: Cell = Cell(UnsafeCell::new(Settings::none()));

/// The settings, once read.
pub fn settings() -> &'static Settings {
    // SAFETY: not written any more (see `read`).
    unsafe { &*SETTINGS.0.get() }
}

/// Reads the environment. The thread that begins the library's life calls it, once, before the phase is told.
pub fn read() {
    // SAFETY: the first and only writer; readers come after it has told the phase.
    let settings = unsafe { &mut *SETTINGS.0.get() };
    settings.limit_bytes = size(c"PAGEMILL_LIMIT").map_or(UNLIMITED, |bytes| bytes as u64);
    settings.after_bytes = size(c"PAGEMILL_AFTER");
    settings.is_checking = variable(c"PAGEMILL_CHECK").is_some_and(|value| value != "0");
    settings.may_have_helper = word(c"PAGEMILL_HELPER", &[("on", true), ("off", false)]).unwrap_or(true);
    settings.is_watching = word(c"PAGEMILL_WATCH", &[("on", true), ("off", false)]).unwrap_or(true);
    settings.idle = match variable(c"PAGEMILL_IDLE") {
        None => Some(DEFAULT_IDLE),
        Some("off" | "0") => None,
        Some(_) => {
            size(c"PAGEMILL_IDLE").map_or(Some(DEFAULT_IDLE), |seconds| Some(Duration::from_secs(seconds as u64)))
        }
    };
    settings.page_bytes = size(c"PAGEMILL_PAGE_SIZE");
    settings.nodes = size(c"PAGEMILL_NODES");
    settings.huge =
        word(c"PAGEMILL_HUGE", &[("never", Huge::Never), ("always", Huge::Always)]).unwrap_or(Huge::WhereTheyPay);
    let path = |name| Path::format(format_args!("{}", variable(name)?));
    settings.tree = path(TREE_VARIABLE).unwrap_or_default();
    settings.runtime = path(c"XDG_RUNTIME_DIR").unwrap_or_default();
}

impl Settings {
    const fn none() -> Self {
        Self {
            limit_bytes: UNLIMITED,
            after_bytes: None,
            is_checking: false,
            may_have_helper: true,
            is_watching: true,
            idle: Some(DEFAULT_IDLE),
            tree: Path::new(),
            runtime: Path::new(),
            page_bytes: None,
            nodes: None,
            huge: Huge::WhereTheyPay,
        }
    }

    /// How the arena is to be laid out.
    pub fn layout(&self) -> Layout {
        // No caches here: they are for programs that use the crate.
        let mut layout = Layout { pool_bytes: 0, ..Layout::for_program() };
        if let Some(bytes) = self.page_bytes {
            match PageSize::new(bytes) {
                Some(page) => layout.page = page,
                None => warn(format_args!("pagemill: PAGEMILL_PAGE_SIZE={bytes} is no page size; ignored")),
            }
        }
        if let Some(count) = self.nodes {
            layout.nodes = Nodes::logical(count);
            if layout.nodes.count() != count {
                warn(format_args!("pagemill: PAGEMILL_NODES={count}: {} it is", layout.nodes.count()));
            }
        }
        match self.huge {
            Huge::Never => layout.use_huge = false,
            Huge::Always => layout.huge_from_bytes = 0,
            Huge::WhereTheyPay => {}
        }
        layout
    }
}

/// Says something to whoever started the program.
pub fn warn(message: std::fmt::Arguments<'_>) {
    if let Some(line) = Text::<512>::format(format_args!("{message}\n")) {
        file::write_stderr(line.as_bytes());
    }
}

fn variable(name: &CStr) -> Option<&'static str> {
    file::environment(name)?.to_str().ok().filter(|value| !value.is_empty())
}

/// One of several words from the environment; any other is named and passed over.
fn word<T: Copy>(name: &CStr, words: &[(&str, T)]) -> Option<T> {
    let value = variable(name)?;
    let found = words.iter().find(|(word, _)| *word == value).map(|(_, meaning)| *meaning);
    if found.is_none() {
        let (first, second) = (words[0].0, words[1].0);
        let name = name.to_str().unwrap_or("");
        warn(format_args!("pagemill: {name}={value} is neither {first} nor {second}; ignored"));
    }
    found
}

/// A size from the environment; one that cannot be read is named and passed over.
fn size(name: &CStr) -> Option<usize> {
    let value = variable(name)?;
    let bytes = parse_plain_bytes(value).and_then(|bytes| usize::try_from(bytes).ok());
    if bytes.is_none() {
        warn(format_args!("pagemill: {}={value} is no number; ignored", name.to_str().unwrap_or("")));
    }
    bytes
}
