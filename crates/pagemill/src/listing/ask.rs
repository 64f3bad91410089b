//! Asking: in a command. The answer comes from another process, and is checked like any stranger's.

use super::{Head, MOST_RECORDS, Record};
use crate::mapping::{Holder, Usage};
use crate::published::{self, Subject, TREE_FILE};
use crate::reclaim::tree::TreePage;
use crate::stats::{self, Figures};
use crate::volatile::Listed;
use pagemill_sys::file::{self, Path};
use pagemill_sys::process::{self, Identity};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

/// The longest that an answer is waited for.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(2);

const PAUSE: Duration = Duration::from_millis(2);

/// Requests that may lie beside each other: of others who ask now, or were killed while they did.
const MOST_REQUESTS: u32 = 64;

/// What a process answered of its ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    pub ranges: Vec<Listed>,
    /// There were so many more than [`MOST_RECORDS`].
    pub left_out: u64,
}

/// Why there is no list.
#[derive(Debug)]
pub enum Unanswered {
    /// It cannot be asked.
    Refused(io::Error),
    /// No answer came in time.
    Late,
    /// It has ended.
    Ended,
    /// Whoever asked does not want it any more.
    Stopped,
    /// The process could not write it.
    Failed(io::Error),
    /// What it wrote is no list.
    Damaged,
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => write!(f, "it cannot be asked: {error}"),
            Self::Late => write!(f, "it does not answer within {} s", ANSWER_WITHIN.as_secs()),
            Self::Ended => write!(f, "it has ended"),
            Self::Stopped => write!(f, "interrupted"),
            Self::Failed(error) => write!(f, "it could not write its list: {error}"),
            Self::Damaged => write!(f, "what it answers is no list"),
        }
    }
}

/// The file of a request: removed with this.
struct Request {
    path: Path,
    file: File,
    number: u32,
}

impl Drop for Request {
    fn drop(&mut self) {
        file::remove(self.path.as_c_str());
    }
}

/// Asks the process that published its figures at `figures` for its ranges. Waits until it answers, `should_stop`, or
/// [`ANSWER_WITHIN`] has passed; leaves no file behind, whatever comes.
///
/// # Errors
///
/// [`Unanswered`] says why there is no list.
pub fn ask(figures: &Path, who: Identity, should_stop: impl Fn() -> bool) -> Result<List, Unanswered> {
    ask_for(figures, who, should_stop).map(|(ranges, left_out)| List { ranges, left_out })
}

/// As [`ask`], for what its caches hold.
///
/// # Errors
///
/// As [`ask`].
pub fn ask_for_caches(
    figures: &Path,
    who: Identity,
    should_stop: impl Fn() -> bool,
) -> Result<Vec<(Holder, Usage)>, Unanswered> {
    ask_for(figures, who, should_stop).map(|(holders, _)| holders)
}

/// The records of a list, and how many more there were.
fn ask_for<R: Record>(
    figures: &Path,
    who: Identity,
    should_stop: impl Fn() -> bool,
) -> Result<(Vec<R>, u64), Unanswered> {
    let begun = Instant::now();
    let request = make_request(figures, R::SUBJECT).map_err(Unanswered::Refused)?;
    stats::with_page_of_asked(figures.as_c_str(), |page| page.ask(request.number)).map_err(Unanswered::Refused)?;
    wake_in_tree(figures, who);
    loop {
        if let Some(head) = head_of(&request.file, R::SUBJECT).map_err(|_| Unanswered::Damaged)? {
            return read(&request, head);
        }
        if should_stop() {
            return Err(Unanswered::Stopped);
        }
        if !process::is_alive(who) {
            return Err(Unanswered::Ended);
        }
        if begun.elapsed() > ANSWER_WITHIN {
            return Err(Unanswered::Late);
        }
        std::thread::sleep(PAUSE);
    }
}

/// Makes the file of the first request that nobody makes yet. What lies in the way is left alone, links too.
fn make_request(figures: &Path, subject: Subject) -> io::Result<Request> {
    let last = stats::with_page_of_asked(figures.as_c_str(), Figures::asked)?;
    for number in (1..=MOST_REQUESTS).filter_map(|more| last.checked_add(more)) {
        let path = published::request_of(figures.as_str(), subject, number).ok_or(io::ErrorKind::InvalidInput)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        match options.open(path.as_str()) {
            Ok(file) => return Ok(Request { path, file, number }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("too many ask it already"))
}

/// In a tree the helper sleeps on the tree's page.
fn wake_in_tree(figures: &Path, who: Identity) {
    let folder = figures.as_str().rsplit_once('/').map_or("", |(folder, _)| folder);
    if let Some(path) = Path::format(format_args!("{folder}/{TREE_FILE}"))
        && let Ok(page) = TreePage::join(path.as_c_str())
    {
        page.wake(who);
    }
}

/// The head, once it is there; an error for something else in its place.
fn head_of(file: &File, subject: Subject) -> io::Result<Option<Head>> {
    let mut magic = [0; 8];
    match file.read_exact_at(&mut magic, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    // It comes last.
    if magic == [0; 8] {
        return Ok(None);
    }
    let mut bytes = [0; Head::LEN];
    file.read_exact_at(&mut bytes, 0)?;
    Head::from_bytes(&bytes, subject).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reads and checks what the head announces.
fn read<R: Record>(request: &Request, head: Head) -> Result<(Vec<R>, u64), Unanswered> {
    if head.errno != 0 {
        return Err(Unanswered::Failed(io::Error::from_raw_os_error(i32::try_from(head.errno).unwrap_or(0))));
    }
    let expected = head.records.saturating_mul(R::LEN as u64).saturating_add(Head::LEN as u64);
    let is_whole = request.file.metadata().is_ok_and(|metadata| metadata.len() == expected);
    if head.number != request.number || head.records > MOST_RECORDS || !is_whole {
        return Err(Unanswered::Damaged);
    }
    let mut bytes = vec![0; head.records as usize * R::LEN];
    request.file.read_exact_at(&mut bytes, Head::LEN as u64).map_err(|_| Unanswered::Damaged)?;
    let records = bytes.chunks_exact(R::LEN).map(R::from_bytes).collect::<Option<Vec<_>>>();
    Ok((records.ok_or(Unanswered::Damaged)?, head.left_out))
}
