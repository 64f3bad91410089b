//! A server of HTTP/1.1 for few clients, on a TCP or Unix socket. Each connection gets one response.
//!
//! Requests are bounded in size and time, and so is the number of clients. The caller provides the responses.

use httparse::{EMPTY_HEADER, Header, Status};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags, accept_with, recv, send, shutdown};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time for a request, and again for its response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval at which a thread that waits for a client checks whether the server ends.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of bytes of a request's head: its first line and its headers.
const MAX_HEAD_BYTES: usize = 8 << 10;
const MAX_HEADERS: usize = 64;

/// Number of bytes that are read at a time.
const READ_BYTES: usize = 1 << 10;

/// Pause after the system refuses a connection, because it is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Bounds of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of concurrent clients. A further connection is closed.
    pub clients: usize,
    /// Maximum number of bytes of a request's body. 0: bodies are not read.
    pub body_bytes: usize,
}

/// Sends the responses that `respond` returns to the clients of a listening socket, until the other end of `stop` is
/// closed. Returns when all clients have ended. `respond` is called by one thread for each client.
///
/// # Errors
///
/// Errors of `ioctl` and `poll`.
pub fn serve(
    listener: impl AsFd,
    stop: &UnixStream,
    limits: Limits,
    respond: &(impl Fn(&Request) -> Response + Sync),
) -> io::Result<()> {
    rustix::io::ioctl_fionbio(&listener, true)?;
    let (is_stopped, clients) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let result = loop {
            let mut fds = [PollFd::new(&listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) if !fds[1].revents().is_empty() => break Ok(()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => break Err(error.into()),
            }
            let socket = match accept_with(&listener, SocketFlags::CLOEXEC) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => continue,
                Err(_) => {
                    thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            if clients.load(Relaxed) >= limits.clients {
                continue;
            }
            clients.fetch_add(1, Relaxed);
            let (is_stopped, clients) = (&is_stopped, &clients);
            let work = move || {
                let _ = Connection { socket, is_stopped }.serve(limits.body_bytes, respond);
                clients.fetch_sub(1, Relaxed);
            };
            if thread::Builder::new().name("http-client".into()).spawn_scoped(scope, work).is_err() {
                clients.fetch_sub(1, Relaxed);
            }
        };
        is_stopped.store(true, Relaxed);
        result
    })
}

/// A response. Its headers say that the connection is closed behind it.
#[derive(Debug, PartialEq, Eq)]
pub struct Response {
    pub status: &'static str,
    pub content_type: &'static str,
    /// Further headers, each with its end of line.
    pub headers: &'static str,
    pub body: String,
}

impl Response {
    /// Returns a response with one line of text.
    pub fn error(status: &'static str, why: &str) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", headers: "", body: format!("{why}\n") }
    }

    /// Returns the bytes to send. `has_body` is false for a request with the method HEAD.
    pub fn to_bytes(&self, has_body: bool) -> Vec<u8> {
        let head = format!(
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}Cache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            self.status,
            self.content_type,
            self.body.len(),
            self.headers,
        );
        let body = if has_body { self.body.as_bytes() } else { b"" };
        [head.as_bytes(), body].concat()
    }
}

/// What a request asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    /// The path without the query.
    pub path: String,
    /// The values of all headers `Accept`.
    pub accept: String,
    pub body: Vec<u8>,
}

impl Request {
    /// Parses the bytes that a connection has sent. Returns `None` if the request is not complete yet, and the response
    /// if it is not valid.
    fn parse(bytes: &[u8], max_body_bytes: usize) -> Result<Option<Self>, Response> {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        let too_large = || Response::error("431 Request Header Fields Too Large", "the request is too large");
        let head_bytes = match request.parse(bytes) {
            Ok(Status::Complete(len)) => len,
            Ok(Status::Partial) if bytes.len() < MAX_HEAD_BYTES => return Ok(None),
            Ok(Status::Partial) | Err(httparse::Error::TooManyHeaders) => return Err(too_large()),
            Err(error) => return Err(Response::error("400 Bad Request", &format!("this is not a request: {error}"))),
        };
        let body_bytes = if max_body_bytes == 0 { 0 } else { body_len(request.headers, max_body_bytes)? };
        let Some(body) = bytes.get(head_bytes..head_bytes + body_bytes) else { return Ok(None) };
        let path = request.path.unwrap_or_default();
        let accepts: Vec<_> = values(request.headers, "accept").map(String::from_utf8_lossy).collect();
        Ok(Some(Self {
            method: request.method.unwrap_or_default().to_owned(),
            path: path.split('?').next().unwrap_or_default().to_owned(),
            accept: accepts.join(","),
            body: body.to_owned(),
        }))
    }

    fn is_head(&self) -> bool {
        self.method == "HEAD"
    }
}

fn values<'head>(headers: &'head [Header<'head>], name: &'static str) -> impl Iterator<Item = &'head [u8]> {
    headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name)).map(|header| header.value)
}

/// Returns the length of a request's body. A request without `Content-Length` has none.
fn body_len(headers: &[Header], max_bytes: usize) -> Result<usize, Response> {
    if values(headers, "transfer-encoding").next().is_some() {
        return Err(Response::error("411 Length Required", "a body needs the header Content-Length"));
    }
    let mut lengths = values(headers, "content-length");
    let (Some(length), None) = (lengths.next(), lengths.next()) else {
        return match values(headers, "content-length").count() {
            0 => Ok(0),
            _ => Err(Response::error("400 Bad Request", "the request has several headers Content-Length")),
        };
    };
    let is_number = !length.is_empty() && length.iter().all(u8::is_ascii_digit);
    let Some(digits) = std::str::from_utf8(length).ok().filter(|_| is_number) else {
        return Err(Response::error("400 Bad Request", "the header Content-Length is not a number"));
    };
    // A number that does not fit is too large as well.
    digits.parse().ok().filter(|len| *len <= max_bytes).ok_or_else(|| {
        let why = format!("the body has {digits} bytes; the maximum is {max_bytes}");
        Response::error("413 Content Too Large", &why)
    })
}

struct Connection<'server> {
    socket: OwnedFd,
    is_stopped: &'server AtomicBool,
}

impl Connection<'_> {
    fn serve(mut self, max_body_bytes: usize, respond: &impl Fn(&Request) -> Response) -> io::Result<()> {
        let (response, has_body) = match self.read_request(max_body_bytes)? {
            Ok(request) => (respond(&request), !request.is_head()),
            Err(response) => (response, true),
        };
        self.send(&response.to_bytes(has_body))?;
        // Closing while bytes of the request are unread would discard the response.
        shutdown(&self.socket, Shutdown::Write)?;
        let deadline = Instant::now() + STOP_CHECK_INTERVAL;
        let mut unread = 0;
        while unread < MAX_HEAD_BYTES + max_body_bytes {
            match self.receive(&mut [0; READ_BYTES], deadline)? {
                0 => break,
                len => unread += len,
            }
        }
        Ok(())
    }

    /// Reads a request. An invalid or slow one results in the response to send.
    fn read_request(&mut self, max_body_bytes: usize) -> io::Result<Result<Request, Response>> {
        let deadline = Instant::now() + CLIENT_TIMEOUT;
        let (mut bytes, mut buffer) = (Vec::new(), [0; READ_BYTES]);
        loop {
            match Request::parse(&bytes, max_body_bytes) {
                Ok(Some(request)) => return Ok(Ok(request)),
                Ok(None) => {}
                Err(response) => return Ok(Err(response)),
            }
            match self.receive(&mut buffer, deadline) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(len) => bytes.extend_from_slice(&buffer[..len]),
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    return Ok(Err(Response::error("408 Request Timeout", "the request took too long")));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Receives some bytes. Fails with `TimedOut` after `deadline`, and with `Interrupted` if the server ends.
    fn receive(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            let left = self.check_time(deadline)?;
            set_socket_timeout(&self.socket, Timeout::Recv, Some(left))?;
            match recv(&self.socket, &mut *buffer, RecvFlags::empty()) {
                Ok((len, _)) => return Ok(len),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let deadline = Instant::now() + CLIENT_TIMEOUT;
        while !bytes.is_empty() {
            let left = self.check_time(deadline)?;
            set_socket_timeout(&self.socket, Timeout::Send, Some(left))?;
            match send(&self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => bytes = &bytes[len..],
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Returns how long the next system call may wait.
    fn check_time(&self, deadline: Instant) -> io::Result<Duration> {
        if self.is_stopped.load(Relaxed) {
            return Err(ErrorKind::Interrupted.into());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left.min(STOP_CHECK_INTERVAL)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_BODY_BYTES: usize = 100;

    /// An incomplete request must be continued. Requests that are invalid or too large must be refused.
    #[test]
    fn requests_are_parsed_or_refused() {
        let complete = b"GET /metrics?a=b HTTP/1.1\r\nHost: x\r\naccept: text/plain\r\nAccept: */*\r\n\r\nbody";
        let parse = |bytes| Request::parse(bytes, 0);
        let request = parse(complete).unwrap().unwrap();
        assert_eq!((request.path.as_str(), request.accept.as_str()), ("/metrics", "text/plain,*/*"));
        assert_eq!(parse(b"").unwrap(), None);
        assert_eq!(parse(&complete[..complete.len() - 6]).unwrap(), None);
        let status = |bytes: &[u8]| Request::parse(bytes, MAX_BODY_BYTES).unwrap_err().status;
        assert_eq!(status(b"\x16\x03\x01\x02"), "400 Bad Request");
        assert_eq!(status(b"GET /metrics\r\n\r\n"), "400 Bad Request");
        let long = [&b"GET /"[..], &[b'a'; MAX_HEAD_BYTES]].concat();
        assert_eq!(status(&long), "431 Request Header Fields Too Large");
        let many = [&b"GET / HTTP/1.1\r\n"[..], &b"a: b\r\n".repeat(MAX_HEADERS + 1), b"\r\n"].concat();
        assert_eq!(status(&many), "431 Request Header Fields Too Large");
    }

    /// A body must be awaited up to its length, and be cut there. Lengths that are too large, ambiguous, no numbers or
    /// missing must be refused before the body arrives.
    #[test]
    fn bodies_have_a_known_length() {
        let head = |headers: &str| format!("POST / HTTP/1.1\r\n{headers}\r\n").into_bytes();
        let body = |headers: &str, body: &[u8]| {
            Request::parse(&[&head(headers), body].concat(), MAX_BODY_BYTES).map(|request| request.map(|it| it.body))
        };
        assert_eq!(body("", b"rest"), Ok(Some(Vec::new())));
        assert_eq!(body("content-length: 4\r\n", b"{}"), Ok(None));
        assert_eq!(body("Content-Length: 4\r\n", b"{}  rest"), Ok(Some(b"{}  ".to_vec())));
        assert_eq!(body("Content-Length: 100\r\n", &[b'x'; 100]), Ok(Some(vec![b'x'; 100])));
        let refused = |headers: &str| body(headers, b"").unwrap_err();
        assert_eq!(refused("Content-Length: 101\r\n").body, "the body has 101 bytes; the maximum is 100\n");
        let status = |headers: &str| refused(headers).status[..3].to_owned();
        assert_eq!(status("Content-Length: 99999999999999999999999\r\n"), "413");
        for wrong in ["Content-Length: -1\r\n", "Content-Length: +1\r\n", "Content-Length: \r\n"] {
            assert_eq!(status(wrong), "400", "{wrong}");
        }
        assert_eq!(status("Content-Length: 1\r\nContent-Length: 1\r\n"), "400");
        assert_eq!(status("Transfer-Encoding: chunked\r\nContent-Length: 1\r\n"), "411");
    }
}
