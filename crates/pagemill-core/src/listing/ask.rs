//! Sends a request to another process and reads the answer. The answer is untrusted, so all of it is checked.

use super::figures::CounterValues;
use super::{AnswerHeader, ControlCommand, MOST_RECORDS, Outcome, Record, u32_at};
use crate::published::{self, Subject, TREE_FILE};
use crate::reclaim::tree::TreePage;
use crate::stats::{self, Figures, Snapshot};
use pagemill_sys::file::{self, Path};
use pagemill_sys::process::{self, Identity};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::{Duration, Instant};

/// Maximum time to wait for an answer of another process.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Pause between two checks whether another process has answered.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Time after which a request is sent again if its number was used before, because the process may have missed it.
const REPEAT_AFTER: Duration = Duration::from_millis(100);

/// Maximum number of request files of one process. Files of commands that were killed while they waited count, too.
const MAX_REQUESTS: u32 = 64;

/// Why a request to another process has no result.
///
/// Example: [`ListWriter`](super::ListWriter).
#[derive(Debug)]
pub enum Unanswered {
    /// The request could not be sent.
    Refused(io::Error),
    /// The process did not answer in time.
    Late,
    /// The process has ended.
    Ended,
    /// The caller stopped waiting.
    Stopped,
    /// The process could not write its answer.
    Failed(io::Error),
    /// The answer does not have the expected format.
    Damaged,
    /// The process has accepted the command but has not finished it in time. The process continues to run the command.
    InProgress,
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => write!(f, "no request can be sent to it: {error}"),
            Self::Late => write!(f, "it does not answer within {} s", ANSWER_WITHIN.as_secs()),
            Self::Ended => write!(f, "it has ended"),
            Self::Stopped => write!(f, "interrupted"),
            Self::Failed(error) => write!(f, "it could not write its list: {error}"),
            Self::Damaged => write!(f, "its answer is not a valid list"),
            Self::InProgress => {
                write!(f, "it still runs the command after {} s, and continues", ANSWER_WITHIN.as_secs())
            }
        }
    }
}

/// The file of a request, in which the requested process writes its answer. Dropping the value removes the file.
struct Request {
    path: Path,
    file: File,
    number: u32,
    /// Offset of the answer's header in the file.
    answer_at: u64,
}

impl Drop for Request {
    fn drop(&mut self) {
        file::remove(self.path.as_c_str());
    }
}

/// Requests the records of one list of the process that published its statistics at `figures`. Waits until the process
/// answers, `should_stop` returns true, or [`ANSWER_WITHIN`] has passed. In every case the request's file is removed.
///
/// # Errors
///
/// [`Unanswered`] says why there is no list.
pub fn ask_for<R: Record>(
    figures: &Path,
    identity: Identity,
    should_stop: impl Fn() -> bool,
) -> Result<Records<R>, Unanswered> {
    request_and_wait(figures, identity, None, should_stop)
}

/// As [`ask_for`], but requests the list of several processes. All requests are sent before the first wait, so a
/// process that does not answer does not delay the others. The result is [`Unanswered::Stopped`] for processes that had
/// not answered when `should_stop` returned true.
pub fn ask_all_for<'a, R: Record>(
    targets: &[(&'a Path, Identity)],
    should_stop: impl Fn() -> bool,
) -> Vec<Result<Records<R>, Unanswered>> {
    let deadline = Instant::now() + ANSWER_WITHIN;
    let send =
        |(figures, identity): &(&'a Path, Identity)| PendingRequest::send::<R>(figures, *identity, None, deadline);
    wait_for_results(targets.iter().map(send).collect(), should_stop)
}

/// As [`ask_all_for`], but requests the figures, which each process measures first. Each target has the path of the
/// process's figures file and the figures that the process published before.
pub fn ask_for_figures(
    targets: &[(&Path, &Snapshot)],
    should_stop: impl Fn() -> bool,
) -> Vec<Result<Snapshot, Unanswered>> {
    let identities: Vec<_> = targets.iter().map(|(figures, known)| (*figures, known.identity)).collect();
    let answers = ask_all_for::<CounterValues>(&identities, should_stop).into_iter().zip(targets);
    let measured = |(values, _): Records<CounterValues>, known: &Snapshot| match values.as_slice() {
        [CounterValues(values)] => Ok(known.with_values(*values)),
        _ => Err(Unanswered::Damaged),
    };
    answers.map(|(result, (_, known))| result.and_then(|records| measured(records, known))).collect()
}

/// Makes a process return memory, or act on one of its slab caches. Returns the outcome.
///
/// # Errors
///
/// As [`ask_for`]; [`Unanswered::InProgress`] if the command takes longer.
pub fn command(
    figures: &Path,
    identity: Identity,
    command: ControlCommand,
    should_stop: impl Fn() -> bool,
) -> Result<Outcome, Unanswered> {
    let (outcomes, _) = request_and_wait::<Outcome>(figures, identity, Some(command), should_stop)?;
    outcomes.into_iter().find(|outcome| outcome.of == command.target()).ok_or(Unanswered::Damaged)
}

/// The records of a list, and the number of records that were left out.
pub type Records<R> = (Vec<R>, u64);

/// Sends one request, which may contain a command, and waits for the answer.
fn request_and_wait<R: Record>(
    figures: &Path,
    identity: Identity,
    command: Option<ControlCommand>,
    should_stop: impl Fn() -> bool,
) -> Result<Records<R>, Unanswered> {
    let asked = PendingRequest::send::<R>(figures, identity, command, Instant::now() + ANSWER_WITHIN);
    wait_for_results(vec![asked], should_stop).remove(0)
}

/// Waits until all requests are finished, or `should_stop` returns true. Returns the result of each request, which is
/// [`Unanswered::Stopped`] for those that are not finished.
fn wait_for_results<R: Record>(
    asked: Vec<Result<PendingRequest<'_>, Unanswered>>,
    should_stop: impl Fn() -> bool,
) -> Vec<Result<Records<R>, Unanswered>> {
    let with_result = |asked| match asked {
        Ok(pending) => (Some(pending), Err(Unanswered::Stopped)),
        Err(error) => (None, Err(error)),
    };
    let mut asked: Vec<_> = asked.into_iter().map(with_result).collect();
    loop {
        let is_stopped = should_stop();
        for (pending, result) in &mut asked {
            if let Some(done) = pending.as_mut().and_then(PendingRequest::poll) {
                (*pending, *result) = (None, done);
            }
        }
        if is_stopped || asked.iter().all(|(pending, _)| pending.is_none()) {
            return asked.into_iter().map(|(_, result)| result).collect();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// A request that was sent and has no answer yet.
struct PendingRequest<'a> {
    figures: &'a Path,
    identity: Identity,
    command: Option<ControlCommand>,
    request: Request,
    /// Time at which the wait for the answer ends.
    deadline: Instant,
    /// Time at which the request is sent again, if the process may not have seen it.
    repeat_deadline: Instant,
}

impl<'a> PendingRequest<'a> {
    /// Sends a request for records of the type `R`.
    fn send<R: Record>(
        figures: &'a Path,
        identity: Identity,
        command: Option<ControlCommand>,
        deadline: Instant,
    ) -> Result<Self, Unanswered> {
        let request = create_request(figures, R::SUBJECT, command).map_err(Unanswered::Refused)?;
        let is_new = stats::with_page_of_process(figures.as_c_str(), |page| page.announce_request(request.number))
            .map_err(Unanswered::Refused)?;
        wake_in_tree(figures, identity);
        // If the number was used before, the helper may have searched for the request's file before the file existed.
        let repeat_deadline = if is_new { deadline } else { deadline.min(Instant::now() + REPEAT_AFTER) };
        Ok(Self { figures, identity, command, request, deadline, repeat_deadline })
    }

    /// Checks for the answer. Returns the result of the request, or `None` if the request must wait longer. Sends the
    /// request again if the process may have missed it.
    fn poll<R: Record>(&mut self) -> Option<Result<Records<R>, Unanswered>> {
        match read_header(&self.request, R::SUBJECT) {
            Ok(Some(header)) => return Some(read_records(&self.request, header)),
            Ok(None) => {}
            Err(_) => return Some(Err(Unanswered::Damaged)),
        }
        if !process::is_alive(self.identity) {
            return Some(Err(Unanswered::Ended));
        }
        let now = Instant::now();
        let is_late = now > self.deadline;
        if now <= self.repeat_deadline {
            return None;
        }
        if is_command_accepted(&self.request) {
            return is_late.then_some(Err(Unanswered::InProgress));
        }
        if is_late {
            return Some(Err(Unanswered::Late));
        }
        let again = Self::send::<R>(self.figures, self.identity, self.command, self.deadline);
        again.map(|again| *self = again).err().map(Err)
    }
}

/// Whether the process has marked the command as accepted.
fn is_command_accepted(request: &Request) -> bool {
    let mut bytes = [0; size_of::<u32>()];
    let is_read = request.file.read_exact_at(&mut bytes, ControlCommand::ACCEPTED_OFFSET as u64).is_ok();
    request.answer_at > 0 && is_read && u32_at(&bytes, 0) == 1
}

/// Creates the file of a request, with the first free request number. Does not touch existing files or follow links.
fn create_request(figures: &Path, subject: Subject, command: Option<ControlCommand>) -> io::Result<Request> {
    let last = stats::with_page_of_process(figures.as_c_str(), Figures::latest_request)?;
    for number in (1..=MAX_REQUESTS).filter_map(|more| last.checked_add(more)) {
        let path = published::request_file(figures.as_str(), subject, number).ok_or(io::ErrorKind::InvalidInput)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        match options.open(path.as_str()) {
            Ok(file) => {
                let answer_at = if command.is_some() { ControlCommand::LEN as u64 } else { 0 };
                let request = Request { path, file, number, answer_at };
                if let Some(command) = command {
                    request.file.write_all_at(&command.to_bytes(number), 0)?;
                }
                return Ok(request);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("too many requests to it wait already"))
}

/// Wakes the helper thread of a process that belongs to a process tree. Such a helper sleeps on the tree's shared page.
fn wake_in_tree(figures: &Path, identity: Identity) {
    let folder = figures.as_str().rsplit_once('/').map_or("", |(folder, _)| folder);
    if let Some(path) = Path::format(format_args!("{folder}/{TREE_FILE}"))
        && let Ok(page) = TreePage::join(path.as_c_str())
    {
        page.wake(identity);
    }
}

/// Reads the header of the answer to `request`. Returns `None` if no header was written yet, and an error if other
/// bytes are in its place.
fn read_header(request: &Request, subject: Subject) -> io::Result<Option<AnswerHeader>> {
    let mut magic = [0; 8];
    match request.file.read_exact_at(&mut magic, request.answer_at) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    // The magic is written last.
    if magic == [0; 8] {
        return Ok(None);
    }
    let mut bytes = [0; AnswerHeader::LEN];
    request.file.read_exact_at(&mut bytes, request.answer_at)?;
    AnswerHeader::from_bytes(&bytes, subject).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Reads the records of an answer, which follow `header`. Rejects the answer if its length or a record is invalid.
fn read_records<R: Record>(request: &Request, header: AnswerHeader) -> Result<(Vec<R>, u64), Unanswered> {
    if header.errno != 0 {
        return Err(Unanswered::Failed(io::Error::from_raw_os_error(i32::try_from(header.errno).unwrap_or(0))));
    }
    let records_at = request.answer_at + AnswerHeader::LEN as u64;
    let expected = header.records.saturating_mul(R::LEN as u64).saturating_add(records_at);
    let is_whole = request.file.metadata().is_ok_and(|metadata| metadata.len() == expected);
    if header.number != request.number || header.records > MOST_RECORDS || !is_whole {
        return Err(Unanswered::Damaged);
    }
    let mut bytes = vec![0; header.records as usize * R::LEN];
    request.file.read_exact_at(&mut bytes, records_at).map_err(|_| Unanswered::Damaged)?;
    let records = bytes.chunks_exact(R::LEN).map(R::from_bytes).collect::<Option<Vec<_>>>();
    Ok((records.ok_or(Unanswered::Damaged)?, header.left_out))
}
