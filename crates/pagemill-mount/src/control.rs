//! A controller from start to end: the steward's thread, and a socket by which commands reach it.
//!
//! The socket lies in the user's own folder, so only who mounted (and root) can ask. A request is a line of JSON, and so is
//! its answer.

use crate::door::Door;
use crate::inbox::{Inbox, Request};
use crate::mounting::{self, Refusal};
use crate::status::Status;
use crate::steward::{Settings, Steward, say};
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

/// Who asks slowly is not waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// Most who are answered at a time, and the longest line they may send.
const MAX_CLIENTS: usize = 16;
const MAX_LINE: u64 = 4096;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "ask")]
enum Ask {
    Status,
    Purge { bytes: u64 },
}

/// What is answered.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "answer")]
enum Answer {
    Status(Box<Status>),
    Purged { bytes: u64 },
    Refused { why: String },
}

/// A steward at work in its thread.
pub struct Keeper {
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts it; it has looked at everything when this returns.
    ///
    /// # Errors
    ///
    /// What looking and starting say.
    pub fn start(settings: Settings, door: Door) -> io::Result<Self> {
        let steward = Steward::new(settings, door)?;
        let inbox = steward.inbox();
        let thread = thread::Builder::new().name("steward".into()).spawn(move || steward.run())?;
        Ok(Self { inbox, thread: Some(thread) })
    }
}

/// The steward's state; `None` if it does not answer.
fn status(inbox: &Inbox) -> Option<Status> {
    let (reply, answer) = mpsc::channel();
    inbox.send(Request::Status(reply));
    answer.recv_timeout(PATIENCE).ok()
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.inbox.send(Request::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Why a controller ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This signal: the file system is to be unmounted.
    Signal(i32),
    /// It is mounted nowhere any more.
    Unmounted,
}

/// The socket of a controller; removed with it, once those who asked have their answers.
pub struct Server {
    path: PathBuf,
    serving: Arc<Serving>,
}

impl Server {
    /// Serves `keeper`'s mount from now on. `ends` is told when it is mounted no more.
    ///
    /// # Errors
    ///
    /// What making the socket says.
    pub fn start(keeper: &Keeper, device: u64, ends: Sender<End>) -> io::Result<Self> {
        let path = mounting::socket_path(device)?;
        // Of a controller that is gone: it did not answer when this one took over.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        let serving = Arc::new(Serving { inbox: keeper.inbox.clone(), clients: AtomicUsize::new(0) });
        let server = Self { path, serving: serving.clone() };
        thread::Builder::new().name("control".into()).spawn(move || accept(&listener, &serving))?;
        thread::Builder::new().name("mounts".into()).spawn(move || watch_mounts(device, &ends))?;
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
    inbox: Arc<Inbox>,
    clients: AtomicUsize,
}

fn accept(listener: &UnixListener, serving: &Arc<Serving>) {
    for client in listener.incoming() {
        let Ok(client) = client else {
            // Out of descriptors, say.
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
        if thread::Builder::new().name("client".into()).spawn(work).is_err() {
            serving.clients.fetch_sub(1, Relaxed);
        }
    }
}

fn serve(client: UnixStream, serving: &Serving) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new(client.try_clone()?.take(MAX_LINE)).read_line(&mut line)?;
    // Somebody only looked whether there is a controller.
    if line.is_empty() {
        return Ok(());
    }
    let answer = match serde_json::from_str(&line) {
        Ok(ask) => serving.answer(&ask),
        Err(error) => Answer::Refused { why: format!("this is no request: {error}") },
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
            Ask::Status => match status(&self.inbox) {
                Some(status) => Answer::Status(Box::new(status)),
                None => Answer::Refused { why: "the controller does not answer".into() },
            },
            Ask::Purge { bytes } => {
                let (reply, answer) = mpsc::channel();
                self.inbox.send(Request::Purge(*bytes, reply));
                match answer.recv() {
                    Ok(bytes) => Answer::Purged { bytes },
                    Err(_) => Answer::Refused { why: "the controller has ended".into() },
                }
            }
        }
    }
}

/// Unmounts, trying for a while if it is busy.
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

/// Waits until the file system is mounted nowhere any more.
fn watch_mounts(device: u64, ends: &Sender<End>) {
    // The kernel says when mounts change; now and then a look all the same.
    const NOW_AND_THEN: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };
    let Ok(table) = File::open("/proc/self/mountinfo") else { return };
    while mounting::is_mounted(device) {
        let mut fds = [PollFd::new(&table, PollFlags::PRI)];
        if poll(&mut fds, Some(&NOW_AND_THEN)).is_err_and(|error| error != rustix::io::Errno::INTR) {
            return;
        }
    }
    let _ = ends.send(End::Unmounted);
}

/// What a command gets from a controller.
#[derive(Debug)]
pub enum Reached<T> {
    Answer(T),
    /// It says why not.
    Refused(String),
    /// There is none, or it does not answer.
    Nobody,
}

fn ask<T>(device: u64, ask: &Ask, patience: Option<Duration>, read: impl FnOnce(Answer) -> Option<T>) -> Reached<T> {
    let answer = || -> io::Result<Answer> {
        let socket = UnixStream::connect(mounting::socket_path(device)?)?;
        socket.set_read_timeout(patience)?;
        write_line(&socket, ask)?;
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line)?;
        serde_json::from_str(&line).map_err(io::Error::other)
    };
    match answer() {
        Ok(Answer::Refused { why }) => Reached::Refused(why),
        Ok(answer) => read(answer).map_or(Reached::Nobody, Reached::Answer),
        Err(_) => Reached::Nobody,
    }
}

/// Asks the controller of a file system for its state.
pub fn ask_status(device: u64) -> Reached<Status> {
    ask(device, &Ask::Status, Some(2 * PATIENCE), |answer| match answer {
        Answer::Status(status) => Some(*status),
        _ => None,
    })
}

/// Asks it to purge so much; answered with what went.
pub fn ask_purge(device: u64, bytes: u64) -> Reached<u64> {
    ask(device, &Ask::Purge { bytes }, None, |answer| match answer {
        Answer::Purged { bytes } => Some(bytes),
        _ => None,
    })
}

/// Says that something was left mounted.
pub fn say_left(point: &Path, refusal: &Refusal) {
    say(&format!("{refusal}"));
    say(&format!("{0} stays mounted without a controller; `pagemill mount {0}` takes it over", point.display()));
}
