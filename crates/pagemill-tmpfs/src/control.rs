//! Runs a controller: a thread for the control loop, and a socket for commands.
//!
//! The socket is in the user's own folder, so only the mounting user and root can connect. A request is one line of
//! JSON, and the answer is also one line.

use crate::control_loop::{ControlLoop, Settings};
use crate::file_access::FileAccess;
use crate::messages::{print_message, write_json_line};
use crate::mounting::{self, Refusal};
use crate::status::Status;
use crate::submissions::{LoopRequest, SubmissionQueue};
use pagemill_sys::{process, task};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Timeout of reads from a client, of writes to a client, and of the control loop's answer to a status request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of concurrent clients.
const MAX_CLIENTS: usize = 16;

/// Maximum length of a client's request in bytes.
const MAX_REQUEST_BYTES: u64 = 4096;

/// A client's request, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "ask")]
enum Request {
    Status,
    Purge { bytes: u64 },
}

/// The controller's answer, as JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
enum Answer {
    Status(Box<Status>),
    Purged { bytes: u64 },
    Refused { why: String },
}

/// A running control loop. Dropping the value stops the loop and joins its thread.
pub struct ControlLoopThread {
    submissions: Arc<SubmissionQueue>,
    thread: Option<JoinHandle<()>>,
}

impl ControlLoopThread {
    /// Starts the control loop, and returns when its first scan is complete.
    ///
    /// # Errors
    ///
    /// Errors of the scan and of starting the thread.
    pub fn start(settings: Settings, access: FileAccess) -> io::Result<Self> {
        let control_loop = ControlLoop::new(settings, access)?;
        let submissions = control_loop.submissions();
        let thread = thread::Builder::new().name("control-loop".into()).spawn(move || control_loop.run())?;
        Ok(Self { submissions, thread: Some(thread) })
    }
}

impl Drop for ControlLoopThread {
    fn drop(&mut self) {
        self.submissions.send(LoopRequest::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Why a controller ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// This signal arrived: the controller unmounts the file system.
    Signal(i32),
    /// The file system is no longer mounted anywhere.
    Unmounted,
    /// No other process can reach the file system ([`mounting::is_abandoned`]). Reported only with
    /// [`Until::Abandoned`].
    Abandoned,
}

/// When a controller ends, apart from signals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// The file system is no longer mounted anywhere.
    Unmounted,
    /// No other process can reach the file system, or it is no longer mounted anywhere.
    Abandoned,
}

/// A controller's socket and the thread that serves it. Dropping the value removes the socket, and waits up to a second
/// until clients have their answers.
pub struct Server {
    path: PathBuf,
    state: Arc<ServerState>,
}

impl Server {
    /// Starts a thread that serves requests for the mount of `control_loop`. Sends an [`EndReason`] to `ends` when the
    /// file system is no longer mounted and, with [`Until::Abandoned`], when no process can reach it.
    ///
    /// # Errors
    ///
    /// Errors of creating the socket.
    pub fn start(
        control_loop: &ControlLoopThread,
        device: u64,
        until: Until,
        ends: Sender<EndReason>,
    ) -> io::Result<Self> {
        let path = mounting::socket_path(device)?;
        let listener = mounting::listen(&path)?;
        let state =
            Arc::new(ServerState { submissions: control_loop.submissions.clone(), clients: AtomicUsize::new(0) });
        let server = Self { path, state: state.clone() };
        thread::Builder::new().name("control".into()).spawn(move || accept(&listener, &state))?;
        thread::Builder::new().name("mounts".into()).spawn(move || watch_mounts(device, until, &ends))?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        let begun = Instant::now();
        while self.state.clients.load(Relaxed) > 0 && begun.elapsed() < Duration::from_secs(1) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

struct ServerState {
    submissions: Arc<SubmissionQueue>,
    clients: AtomicUsize,
}

fn accept(listener: &UnixListener, state: &Arc<ServerState>) {
    for client in listener.incoming() {
        let Ok(client) = client else {
            // Accepting failed, possibly because the process is out of file descriptors.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if state.clients.load(Relaxed) >= MAX_CLIENTS {
            continue;
        }
        state.clients.fetch_add(1, Relaxed);
        let for_client = state.clone();
        let work = move || {
            let _ = serve(client, &for_client);
            for_client.clients.fetch_sub(1, Relaxed);
        };
        if task::spawn(c"client", work).is_err() {
            state.clients.fetch_sub(1, Relaxed);
        }
    }
}

fn serve(client: UnixStream, state: &ServerState) -> io::Result<()> {
    client.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    client.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(client.try_clone()?.take(MAX_REQUEST_BYTES)).read_line(&mut line)?;
    // An empty request only checks that a controller exists.
    if line.is_empty() {
        return Ok(());
    }
    let answer = match serde_json::from_str(&line) {
        Ok(request) => state.answer(&request),
        Err(error) => Answer::Refused { why: format!("this is not a request: {error}") },
    };
    write_json_line(&client, &answer)
}

impl ServerState {
    fn answer(&self, request: &Request) -> Answer {
        match request {
            Request::Status => {
                let (reply, answer) = mpsc::channel();
                self.submissions.send(LoopRequest::Status(reply));
                match answer.recv_timeout(ANSWER_TIMEOUT) {
                    Ok(status) => Answer::Status(Box::new(status)),
                    Err(_) => Answer::Refused { why: "the controller does not answer".into() },
                }
            }
            Request::Purge { bytes } => {
                let (reply, answer) = mpsc::channel();
                self.submissions.send(LoopRequest::Purge(*bytes, reply));
                match answer.recv() {
                    Ok(bytes) => Answer::Purged { bytes },
                    Err(_) => Answer::Refused { why: "the controller has ended".into() },
                }
            }
        }
    }
}

/// Unmounts a file system. While the file system is busy, retries for the duration `retry_time`.
///
/// # Errors
///
/// The last [`Refusal`].
pub fn unmount(point: &Path, device: u64, controller: u32, retry_time: Duration) -> Result<(), Refusal> {
    let begun = Instant::now();
    loop {
        match mounting::unmount(point, device, controller) {
            Err(Refusal::Busy { .. }) if begun.elapsed() < retry_time => thread::sleep(Duration::from_millis(100)),
            result => return result,
        }
    }
}

/// Waits until the file system is no longer mounted, and sends [`EndReason::Unmounted`] to `ends`. With
/// [`Until::Abandoned`], also sends [`EndReason::Abandoned`] each time it finds that no other process can reach the
/// file system.
fn watch_mounts(device: u64, until: Until, ends: &Sender<EndReason>) {
    // Interval of the check for [`Until::Abandoned`]. The kernel reports changes of mounts at once, but not the end of
    // a process.
    const POLL_INTERVAL: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
    let Ok(table) = File::open("/proc/self/mountinfo") else { return };
    while mounting::is_mounted(device) {
        if until == Until::Abandoned && mounting::is_abandoned(device) && ends.send(EndReason::Abandoned).is_err() {
            return;
        }
        let mut fds = [PollFd::new(&table, PollFlags::PRI)];
        if poll(&mut fds, Some(&POLL_INTERVAL)).is_err_and(|error| error != rustix::io::Errno::INTR) {
            return;
        }
    }
    let _ = ends.send(EndReason::Unmounted);
}

/// Result of a client's request to a controller.
#[derive(Debug)]
pub enum RequestOutcome<T> {
    Answer(T),
    /// The controller refused the request, for this reason.
    Refused(String),
    /// No controller runs, or it does not answer.
    NoController,
}

/// Sends a request to the controller of a file system. `read` extracts the result from the answer; `None` means that
/// the answer is of another kind.
fn send_request<T>(
    device: u64,
    request: &Request,
    timeout: Option<Duration>,
    read: impl FnOnce(Answer) -> Option<T>,
) -> RequestOutcome<T> {
    let answer = || -> io::Result<Answer> {
        let socket = mounting::connect(device)?;
        if let Some(why) = stopped_controller(&socket) {
            return Ok(Answer::Refused { why });
        }
        socket.set_read_timeout(timeout)?;
        write_json_line(&socket, request)?;
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line)?;
        serde_json::from_str(&line).map_err(io::Error::other)
    };
    match answer() {
        Ok(Answer::Refused { why }) => RequestOutcome::Refused(why),
        Ok(answer) => read(answer).map_or(RequestOutcome::NoController, RequestOutcome::Answer),
        Err(_) => RequestOutcome::NoController,
    }
}

/// Returns an error text if the controller at the other end of the socket is stopped (`SIGSTOP`, a debugger).
fn stopped_controller(socket: &UnixStream) -> Option<String> {
    let pid = rustix::net::sockopt::socket_peercred(socket).ok()?.pid.as_raw_pid();
    process::is_stopped(pid.cast_unsigned())
        .then(|| format!("its controller, process {pid}, is stopped; `kill -CONT {pid}` continues it"))
}

/// Requests the status of a file system from its controller.
pub fn request_status(device: u64) -> RequestOutcome<Status> {
    send_request(device, &Request::Status, Some(2 * ANSWER_TIMEOUT), |answer| match answer {
        Answer::Status(status) => Some(*status),
        _ => None,
    })
}

/// Requests a purge of this many bytes from a file system's controller. Returns the bytes freed.
pub fn request_purge(device: u64, bytes: u64) -> RequestOutcome<u64> {
    send_request(device, &Request::Purge { bytes }, None, |answer| match answer {
        Answer::Purged { bytes } => Some(bytes),
        _ => None,
    })
}

/// Prints that the file system stays mounted after its controller ends, and why it was not unmounted.
pub fn report_still_mounted(point: &Path, refusal: &Refusal) {
    print_message(&format!("{refusal}"));
    print_message(&format!(
        "{0} stays mounted without a controller; `pagemill mount {0}` takes it over",
        point.display()
    ));
}
