//! Sends requests, from a command. The answer comes from another process, so it is checked like any untrusted input.

use super::figures::Values;
use super::slabs::{self, Row};
use super::{ControlCommand, Head, MOST_RECORDS, Outcome, Record, u32_at};
use crate::mapping::{Holder, Usage};
use crate::published::{self, Subject, TREE_FILE};
use crate::reclaim::tree::TreePage;
use crate::slab::SlabInfo;
use crate::stats::{self, Figures, Snapshot};
use crate::volatile::Listed;
use pagemill_sys::file::{self, Path};
use pagemill_sys::process::{self, Identity};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

/// Time limit of an answer.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(2);

const PAUSE: Duration = Duration::from_millis(2);

/// If the number of a request is not new, the request is repeated after this.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// The most concurrent requests: of other commands that ask now, or were killed while they asked.
const MOST_REQUESTS: u32 = 64;

/// The ranges that a process listed.
///
/// ```
/// use pagemill::{Pagemill, listing, published, volatile::Behaviour};
///
/// let range = Pagemill::of_process()?.ranges.allocate(1 << 20, Behaviour::Full)?;
/// let (file, figures) = published::find(std::process::id()).expect("this process publishes");
/// match listing::ask(&file, figures.identity, || false) { // of any process of this user
///     Ok(list) => assert!(list.ranges.iter().any(|listed| listed.addr == range.addr())),
///     Err(reason) => println!("no answer: {reason}"),
/// }
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    pub ranges: Vec<Listed>,
    /// The number of ranges beyond [`MOST_RECORDS`].
    pub left_out: u64,
}

/// Why there is no list.
///
/// Example: [`List`].
#[derive(Debug)]
pub enum Unanswered {
    /// No request can be made of the process.
    Refused(io::Error),
    /// No answer came in time.
    Late,
    /// The process has ended.
    Ended,
    /// The caller no longer wants the answer.
    Stopped,
    /// The process could not write it.
    Failed(io::Error),
    /// The answer is no valid list.
    Damaged,
    /// The process has taken the command, but not finished it in time. It continues.
    InProgress,
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
            Self::InProgress => write!(f, "it is still at it after {} s, and goes on", ANSWER_WITHIN.as_secs()),
        }
    }
}

/// The file of a request; removed on drop.
struct Request {
    path: Path,
    file: File,
    number: u32,
    /// Offset of the answer.
    head_at: u64,
}

impl Drop for Request {
    fn drop(&mut self) {
        file::remove(self.path.as_c_str());
    }
}

/// Asks the process that published its figures at `figures` for its ranges. Waits until it answers, `should_stop`
/// returns true, or [`ANSWER_WITHIN`] has passed. In every case the file of the request is removed.
///
/// # Errors
///
/// [`Unanswered`] with the reason.
pub fn ask(figures: &Path, identity: Identity, should_stop: impl Fn() -> bool) -> Result<List, Unanswered> {
    ask_for(figures, identity, None, should_stop).map(|(ranges, left_out)| List { ranges, left_out })
}

/// As [`ask`], for the usage of its caches.
///
/// # Errors
///
/// As [`ask`].
pub fn ask_for_caches(
    figures: &Path,
    identity: Identity,
    should_stop: impl Fn() -> bool,
) -> Result<Vec<(Holder, Usage)>, Unanswered> {
    ask_for(figures, identity, None, should_stop).map(|(holders, _)| holders)
}

/// As [`ask`], for the slab caches of several processes: sends all requests before the first wait, so a process that
/// does not answer does not delay the others. Returns for each its caches with their numbers, relocatable ones first,
/// then by name; or the reason why there are none ([`Unanswered::Stopped`] for those that had not answered when
/// `should_stop` returned true).
pub fn ask_for_slabs(
    targets: &[(&Path, Identity)],
    should_stop: impl Fn() -> bool,
) -> Vec<Result<Vec<(u64, SlabInfo)>, Unanswered>> {
    let until = Instant::now() + ANSWER_WITHIN;
    let asked = targets.iter().map(|(figures, identity)| Asked::begin(figures, *identity, None, until)).collect();
    let gathered = |(rows, _): Records<Row>| slabs::gather(rows).ok_or(Unanswered::Damaged);
    wait(asked, should_stop).into_iter().map(|told| told.and_then(gathered)).collect()
}

/// As [`ask_for_slabs`], for figures: each process measures them first. `known` is what it has published.
pub fn ask_for_figures(
    targets: &[(&Path, &Snapshot)],
    should_stop: impl Fn() -> bool,
) -> Vec<Result<Snapshot, Unanswered>> {
    let until = Instant::now() + ANSWER_WITHIN;
    let asked = targets.iter().map(|(figures, known)| Asked::begin(figures, known.identity, None, until)).collect();
    let answers = wait(asked, should_stop).into_iter().zip(targets);
    let measured = |(values, _): Records<Values>, known: &Snapshot| match values.as_slice() {
        [Values(values)] => Ok(known.with_values(*values)),
        _ => Err(Unanswered::Damaged),
    };
    answers.map(|(told, (_, known))| told.and_then(|records| measured(records, known))).collect()
}

/// Makes the process return memory, or act on one of its slab caches; returns the outcome.
///
/// # Errors
///
/// As [`ask`]; [`Unanswered::InProgress`] if it takes longer.
pub fn command(
    figures: &Path,
    identity: Identity,
    command: ControlCommand,
    should_stop: impl Fn() -> bool,
) -> Result<Outcome, Unanswered> {
    let (outcomes, _) = ask_for::<Outcome>(figures, identity, Some(command), should_stop)?;
    outcomes.into_iter().find(|outcome| outcome.of == command.number()).ok_or(Unanswered::Damaged)
}

/// The records of a list, and the number of those left out.
type Records<R> = (Vec<R>, u64);

fn ask_for<R: Record>(
    figures: &Path,
    identity: Identity,
    command: Option<ControlCommand>,
    should_stop: impl Fn() -> bool,
) -> Result<Records<R>, Unanswered> {
    let asked = Asked::begin(figures, identity, command, Instant::now() + ANSWER_WITHIN);
    wait(vec![asked], should_stop).remove(0)
}

enum Asked<'a, R> {
    Waits(Box<Asking<'a, R>>),
    Told(Result<Records<R>, Unanswered>),
}

impl<'a, R: Record> Asked<'a, R> {
    fn begin(figures: &'a Path, identity: Identity, command: Option<ControlCommand>, until: Instant) -> Self {
        match Asking::begin(figures, identity, command, until) {
            Ok(asking) => Self::Waits(Box::new(asking)),
            Err(error) => Self::Told(Err(error)),
        }
    }

    /// Whether the result is known.
    fn is_told(&mut self) -> bool {
        if let Self::Waits(asking) = self
            && let Some(told) = asking.look()
        {
            *self = Self::Told(told);
        }
        matches!(self, Self::Told(_))
    }

    fn told(self) -> Result<Records<R>, Unanswered> {
        match self {
            Self::Waits(_) => Err(Unanswered::Stopped),
            Self::Told(told) => told,
        }
    }
}

/// Waits until the result of each is known, or `should_stop` returns true.
fn wait<R: Record>(
    mut asked: Vec<Asked<'_, R>>,
    should_stop: impl Fn() -> bool,
) -> Vec<Result<Records<R>, Unanswered>> {
    loop {
        let is_stopped = should_stop();
        let told = asked.iter_mut().filter_map(|asked| asked.is_told().then_some(())).count();
        if is_stopped || told == asked.len() {
            return asked.into_iter().map(Asked::told).collect();
        }
        std::thread::sleep(PAUSE);
    }
}

/// A process that was asked and has not answered yet.
struct Asking<'a, R> {
    figures: &'a Path,
    identity: Identity,
    command: Option<ControlCommand>,
    request: Request,
    /// Deadlines of the answer, and of this request: at the latter, a process that may not have seen the request is
    /// asked again.
    until: Instant,
    until_again: Instant,
    records: PhantomData<R>,
}

impl<'a, R: Record> Asking<'a, R> {
    fn begin(
        figures: &'a Path,
        identity: Identity,
        command: Option<ControlCommand>,
        until: Instant,
    ) -> Result<Self, Unanswered> {
        let request = make_request(figures, R::SUBJECT, command).map_err(Unanswered::Refused)?;
        let is_new = stats::with_page_of_process(figures.as_c_str(), |page| page.ask(request.number))
            .map_err(Unanswered::Refused)?;
        wake_in_tree(figures, identity);
        // The helper may have looked for another request of this number before the file existed.
        let until_again = if is_new { until } else { until.min(Instant::now() + ASK_AGAIN_AFTER) };
        Ok(Self { figures, identity, command, request, until, until_again, records: PhantomData })
    }

    /// The result, once it is known.
    fn look(&mut self) -> Option<Result<Records<R>, Unanswered>> {
        match head_of(&self.request, R::SUBJECT) {
            Ok(Some(head)) => return Some(read(&self.request, head)),
            Ok(None) => {}
            Err(_) => return Some(Err(Unanswered::Damaged)),
        }
        if !process::is_alive(self.identity) {
            return Some(Err(Unanswered::Ended));
        }
        let now = Instant::now();
        let is_late = now > self.until;
        if now <= self.until_again {
            return None;
        }
        if is_taken(&self.request) {
            return is_late.then_some(Err(Unanswered::InProgress));
        }
        if is_late {
            return Some(Err(Unanswered::Late));
        }
        match Self::begin(self.figures, self.identity, self.command, self.until) {
            Ok(again) => {
                *self = again;
                None
            }
            Err(error) => Some(Err(error)),
        }
    }
}

/// Whether the process has marked the command as taken.
fn is_taken(request: &Request) -> bool {
    let mut bytes = [0; size_of::<u32>()];
    let is_read = request.file.read_exact_at(&mut bytes, ControlCommand::TAKEN_AT as u64).is_ok();
    request.head_at > 0 && is_read && u32_at(&bytes, 0) == 1
}

/// Makes the file of the first free request number. Existing files are left alone, links too.
fn make_request(figures: &Path, subject: Subject, command: Option<ControlCommand>) -> io::Result<Request> {
    let last = stats::with_page_of_process(figures.as_c_str(), Figures::asked)?;
    for number in (1..=MOST_REQUESTS).filter_map(|more| last.checked_add(more)) {
        let path = published::request_file(figures.as_str(), subject, number).ok_or(io::ErrorKind::InvalidInput)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        match options.open(path.as_str()) {
            Ok(file) => {
                let head_at = if command.is_some() { ControlCommand::LEN as u64 } else { 0 };
                let request = Request { path, file, number, head_at };
                if let Some(command) = command {
                    request.file.write_all_at(&command.to_bytes(number), 0)?;
                }
                return Ok(request);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("too many ask it already"))
}

/// In a tree, wakes the helper, which sleeps on the tree's page.
fn wake_in_tree(figures: &Path, identity: Identity) {
    let folder = figures.as_str().rsplit_once('/').map_or("", |(folder, _)| folder);
    if let Some(path) = Path::format(format_args!("{folder}/{TREE_FILE}"))
        && let Ok(page) = TreePage::join(path.as_c_str())
    {
        page.wake(identity);
    }
}

/// Reads the head, once it is there; an error for other contents.
fn head_of(request: &Request, subject: Subject) -> io::Result<Option<Head>> {
    let mut magic = [0; 8];
    match request.file.read_exact_at(&mut magic, request.head_at) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    // The magic is written last.
    if magic == [0; 8] {
        return Ok(None);
    }
    let mut bytes = [0; Head::LEN];
    request.file.read_exact_at(&mut bytes, request.head_at)?;
    Head::from_bytes(&bytes, subject).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reads and checks the records that the head announces.
fn read<R: Record>(request: &Request, head: Head) -> Result<(Vec<R>, u64), Unanswered> {
    if head.errno != 0 {
        return Err(Unanswered::Failed(io::Error::from_raw_os_error(i32::try_from(head.errno).unwrap_or(0))));
    }
    let records_at = request.head_at + Head::LEN as u64;
    let expected = head.records.saturating_mul(R::LEN as u64).saturating_add(records_at);
    let is_whole = request.file.metadata().is_ok_and(|metadata| metadata.len() == expected);
    if head.number != request.number || head.records > MOST_RECORDS || !is_whole {
        return Err(Unanswered::Damaged);
    }
    let mut bytes = vec![0; head.records as usize * R::LEN];
    request.file.read_exact_at(&mut bytes, records_at).map_err(|_| Unanswered::Damaged)?;
    let records = bytes.chunks_exact(R::LEN).map(R::from_bytes).collect::<Option<Vec<_>>>();
    Ok((records.ok_or(Unanswered::Damaged)?, head.left_out))
}
