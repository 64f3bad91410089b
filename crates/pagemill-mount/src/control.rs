//! Runs a controller: the control loop's thread, and a socket for commands.
//!
//! The socket is in the user's own folder, so only the mounting user and root can connect. A request is one line of
//! JSON, and so is its answer.

use crate::control_loop::{ControlLoop, Settings, say};
use crate::file_access::FileAccess;
use crate::mounting::{self, Refusal};
use crate::status::Status;
use crate::submissions::{LoopRequest, SubmissionQueue};
use pagemill_sys::task;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Timeout for slow clients.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of concurrent clients, and of bytes in a request.
const MAX_CLIENTS: usize = 16;
const MAX_LINE: u64 = 4096;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "ask")]
enum Ask {
    Status,
    Purge { bytes: u64 },
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
enum Answer {
    Status(Box<Status>),
    Purged { bytes: u64 },
    Refused { why: String },
}

/// A running control loop and its thread.
pub struct Keeper {
    submissions: Arc<SubmissionQueue>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the control loop. The first scan is complete when this returns.
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

/// Returns the control loop's state; `None` if it does not answer.
fn status(submissions: &SubmissionQueue) -> Option<Status> {
    let (reply, answer) = mpsc::channel();
    submissions.send(LoopRequest::Status(reply));
    answer.recv_timeout(TIMEOUT).ok()
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.submissions.send(LoopRequest::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Why a controller ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This signal arrived: the file system is to be unmounted.
    Signal(i32),
    /// The file system is no longer mounted anywhere.
    Unmounted,
    /// No other process uses its mount namespace ([`mounting::is_abandoned`]). Sent only with [`Until::Abandoned`].
    Abandoned,
}

/// When a controller ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    Unmounted,
    Abandoned,
}

/// A controller's socket. Dropping it removes the socket, once clients have their answers.
pub struct Server {
    path: PathBuf,
    serving: Arc<Serving>,
}

impl Server {
    /// Serves requests for `keeper`'s mount. Sends to `ends` when the file system is no longer mounted, and, with
    /// [`Until::Abandoned`], when no process can reach it.
    ///
    /// # Errors
    ///
    /// Errors of creating the socket.
    pub fn start(keeper: &Keeper, device: u64, until: Until, ends: Sender<End>) -> io::Result<Self> {
        let path = mounting::socket_path(device)?;
        let listener = mounting::listen(&path)?;
        let serving = Arc::new(Serving { submissions: keeper.submissions.clone(), clients: AtomicUsize::new(0) });
        let server = Self { path, serving: serving.clone() };
        thread::Builder::new().name("control".into()).spawn(move || accept(&listener, &serving))?;
        thread::Builder::new().name("mounts".into()).spawn(move || watch_mounts(device, until, &ends))?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
        let begun = Instant::now();
        while self.serving.clients.load(Relaxed) > 0 && begun.elapsed() < Duration::from_secs(1) {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

struct Serving {
    submissions: Arc<SubmissionQueue>,
    clients: AtomicUsize,
}

fn accept(listener: &UnixListener, serving: &Arc<Serving>) {
    for client in listener.incoming() {
        let Ok(client) = client else {
            // Out of descriptors, for example.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if serving.clients.load(Relaxed) >= MAX_CLIENTS {
            continue;
        }
        serving.clients.fetch_add(1, Relaxed);
        let for_client = serving.clone();
        let work = move || {
            let _ = serve(client, &for_client);
            for_client.clients.fetch_sub(1, Relaxed);
        };
        if task::spawn(c"client", work).is_err() {
            serving.clients.fetch_sub(1, Relaxed);
        }
    }
}

fn serve(client: UnixStream, serving: &Serving) -> io::Result<()> {
    client.set_read_timeout(Some(TIMEOUT))?;
    client.set_write_timeout(Some(TIMEOUT))?;
    let mut line = String::new();
    BufReader::new(client.try_clone()?.take(MAX_LINE)).read_line(&mut line)?;
    // The client only checked that a controller exists.
    if line.is_empty() {
        return Ok(());
    }
    let answer = match serde_json::from_str(&line) {
        Ok(ask) => serving.answer(&ask),
        Err(error) => Answer::Refused { why: format!("this is not a request: {error}") },
    };
    write_line(&client, &answer)
}

fn write_line(mut to: &UnixStream, what: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_string(what).map_err(io::Error::other)?;
    line.push('\n');
    to.write_all(line.as_bytes())
}

impl Serving {
    fn answer(&self, ask: &Ask) -> Answer {
        match ask {
            Ask::Status => match status(&self.submissions) {
                Some(status) => Answer::Status(Box::new(status)),
                None => Answer::Refused { why: "the controller does not answer".into() },
            },
            Ask::Purge { bytes } => {
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

/// Unmounts; retries for a while if the file system is busy.
///
/// # Errors
///
/// The last [`Refusal`].
pub fn unmount(point: &Path, device: u64, controller: u32, tries: Duration) -> Result<(), Refusal> {
    let begun = Instant::now();
    loop {
        match mounting::unmount(point, device, controller) {
            Err(Refusal::Busy { .. }) if begun.elapsed() < tries => thread::sleep(Duration::from_millis(100)),
            result => return result,
        }
    }
}

/// Waits until the file system is no longer mounted, or no process can reach it.
fn watch_mounts(device: u64, until: Until, ends: &Sender<End>) {
    // The kernel reports changes of mounts, but not the end of processes.
    const NOW_AND_THEN: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };
    let Ok(table) = File::open("/proc/self/mountinfo") else { return };
    while mounting::is_mounted(device) {
        if until == Until::Abandoned && mounting::is_abandoned(device) && ends.send(End::Abandoned).is_err() {
            return;
        }
        let mut fds = [PollFd::new(&table, PollFlags::PRI)];
        if poll(&mut fds, Some(&NOW_AND_THEN)).is_err_and(|error| error != rustix::io::Errno::INTR) {
            return;
        }
    }
    let _ = ends.send(End::Unmounted);
}

/// Result of a request to a controller.
#[derive(Debug)]
pub enum Reached<T> {
    Answer(T),
    /// It refused, for this reason.
    Refused(String),
    /// No controller runs, or it does not answer.
    NoController,
}

fn ask<T>(device: u64, ask: &Ask, timeout: Option<Duration>, read: impl FnOnce(Answer) -> Option<T>) -> Reached<T> {
    let answer = || -> io::Result<Answer> {
        let socket = mounting::connect(device)?;
        socket.set_read_timeout(timeout)?;
        write_line(&socket, ask)?;
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line)?;
        serde_json::from_str(&line).map_err(io::Error::other)
    };
    match answer() {
        Ok(Answer::Refused { why }) => Reached::Refused(why),
        Ok(answer) => read(answer).map_or(Reached::NoController, Reached::Answer),
        Err(_) => Reached::NoController,
    }
}

/// Requests a file system's state from its controller.
pub fn ask_status(device: u64) -> Reached<Status> {
    ask(device, &Ask::Status, Some(2 * TIMEOUT), |answer| match answer {
        Answer::Status(status) => Some(*status),
        _ => None,
    })
}

/// Requests a purge of this many bytes; returns the bytes freed.
pub fn ask_purge(device: u64, bytes: u64) -> Reached<u64> {
    ask(device, &Ask::Purge { bytes }, None, |answer| match answer {
        Answer::Purged { bytes } => Some(bytes),
        _ => None,
    })
}

/// Reports that the file system stays mounted.
pub fn say_left(point: &Path, refusal: &Refusal) {
    say(&format!("{refusal}"));
    say(&format!("{0} stays mounted without a controller; `pagemill mount {0}` takes it over", point.display()));
}
