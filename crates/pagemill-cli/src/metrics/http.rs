//! A server for one page, `/metrics`, over HTTP/1.1. Each connection gets one response.
//!
//! Requests are bounded in size and time, and so is the number of clients. The server reads no request bodies.

use httparse::{EMPTY_HEADER, Status};
use pagemill_core::metrics::Format;
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time for a request, and again for its response.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval at which a thread that waits for a client checks whether the server ends.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of bytes of a request: its first line and its headers.
const MAX_REQUEST_BYTES: usize = 8 << 10;
const MAX_HEADERS: usize = 64;

/// Maximum number of concurrent clients. A further connection is closed.
const MAX_CLIENTS: usize = 8;

/// Pause after the system refuses a connection, because it is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const INDEX_PAGE: &str =
    "<!DOCTYPE html><title>Pagemill</title><a href=\"/metrics\">Metrics</a> of processes on Pagemill\n";

/// Serves the text that `page` returns, until the other end of `stop` is closed. Returns when all clients have ended.
pub fn serve(listener: &TcpListener, stop: &UnixStream, page: &(impl Fn(Format) -> String + Sync)) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let (is_stopped, clients) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        let result = loop {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) if !fds[1].revents().is_empty() => break Ok(()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => break Err(error.into()),
            }
            let client = match listener.accept() {
                Ok((client, _)) => client,
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                Err(_) => {
                    thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            if clients.load(Relaxed) >= MAX_CLIENTS {
                continue;
            }
            clients.fetch_add(1, Relaxed);
            let (is_stopped, clients) = (&is_stopped, &clients);
            let work = move || {
                let _ = Connection { stream: client, is_stopped }.serve(page);
                clients.fetch_sub(1, Relaxed);
            };
            if thread::Builder::new().name("metrics-client".into()).spawn_scoped(scope, work).is_err() {
                clients.fetch_sub(1, Relaxed);
            }
        };
        is_stopped.store(true, Relaxed);
        result
    })
}

/// A response. Its headers say that the connection is closed behind it.
#[derive(Debug, PartialEq, Eq)]
struct Response {
    status: &'static str,
    content_type: &'static str,
    body: String,
}

impl Response {
    fn error(status: &'static str, why: &str) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body: format!("{why}\n") }
    }

    /// Returns the bytes to send. `has_body` is false for a request with the method HEAD.
    fn to_bytes(&self, has_body: bool) -> Vec<u8> {
        let allow = if self.status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
        let head = format!(
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{allow}Cache-Control: no-store\r\nVary: Accept\r\n\
             X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            self.status,
            self.content_type,
            self.body.len(),
        );
        let body = if has_body { self.body.as_bytes() } else { b"" };
        [head.as_bytes(), body].concat()
    }
}

/// What a request asks for.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    method: String,
    /// The path without the query.
    path: String,
    /// The values of all headers `Accept`.
    accept: String,
}

impl Request {
    /// Parses the start of a connection. Returns `None` if the request is not complete yet, and the response if it is
    /// not valid.
    fn parse(bytes: &[u8]) -> Result<Option<Self>, Response> {
        let mut headers = [EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        let too_large = || Response::error("431 Request Header Fields Too Large", "the request is too large");
        match request.parse(bytes) {
            Ok(Status::Complete(_)) => {}
            Ok(Status::Partial) if bytes.len() < MAX_REQUEST_BYTES => return Ok(None),
            Ok(Status::Partial) | Err(httparse::Error::TooManyHeaders) => return Err(too_large()),
            Err(error) => return Err(Response::error("400 Bad Request", &format!("this is not a request: {error}"))),
        }
        let path = request.path.unwrap_or_default();
        let accepts = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept"));
        let accepts: Vec<_> = accepts.map(|header| String::from_utf8_lossy(header.value)).collect();
        Ok(Some(Self {
            method: request.method.unwrap_or_default().to_owned(),
            path: path.split('?').next().unwrap_or_default().to_owned(),
            accept: accepts.join(","),
        }))
    }

    fn is_head(&self) -> bool {
        self.method == "HEAD"
    }

    fn response(&self, page: &impl Fn(Format) -> String) -> Response {
        match (self.method.as_str(), self.path.as_str()) {
            ("GET" | "HEAD", "/metrics") => {
                let format = accepted_format(&self.accept);
                Response { status: "200 OK", content_type: format.content_type(), body: page(format) }
            }
            ("GET" | "HEAD", "/") => {
                Response { status: "200 OK", content_type: "text/html; charset=utf-8", body: INDEX_PAGE.to_owned() }
            }
            (_, "/metrics" | "/") => Response::error("405 Method Not Allowed", "the methods are GET and HEAD"),
            _ => Response::error("404 Not Found", "the page is /metrics"),
        }
    }
}

/// Returns the format that a client accepts, according to the values of its header `Accept`: that with the larger
/// weight, and OpenMetrics if the client prefers neither.
fn accepted_format(accept: &str) -> Format {
    let (mut open, mut plain) = (0.0_f32, 0.0_f32);
    for range in accept.split(',') {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
        let weight = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
        let weight = weight.map_or(1.0, |weight| weight.trim().parse().unwrap_or(0.0));
        match kind.as_str() {
            "application/openmetrics-text" => open = open.max(weight),
            // A browser shows plain text.
            "text/plain" | "text/*" | "text/html" => plain = plain.max(weight),
            _ => {}
        }
    }
    if plain > open { Format::Prometheus } else { Format::OpenMetrics }
}

struct Connection<'server> {
    stream: TcpStream,
    is_stopped: &'server AtomicBool,
}

impl Connection<'_> {
    fn serve(mut self, page: &impl Fn(Format) -> String) -> io::Result<()> {
        self.stream.set_nonblocking(false)?;
        let (response, has_body) = match self.read_request()? {
            Ok(request) => (request.response(page), !request.is_head()),
            Err(response) => (response, true),
        };
        self.send(&response.to_bytes(has_body))?;
        // Closing while bytes of the request are unread would discard the response.
        self.stream.shutdown(Shutdown::Write)?;
        let deadline = Instant::now() + STOP_CHECK_INTERVAL;
        let mut unread = 0;
        while unread < MAX_REQUEST_BYTES {
            match self.receive(&mut [0; 1024], deadline)? {
                0 => break,
                len => unread += len,
            }
        }
        Ok(())
    }

    /// Reads a request. An invalid or slow one results in the response to send.
    fn read_request(&mut self) -> io::Result<Result<Request, Response>> {
        let deadline = Instant::now() + CLIENT_TIMEOUT;
        let (mut bytes, mut buffer) = (Vec::new(), [0; 1024]);
        loop {
            match Request::parse(&bytes) {
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
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(buffer) {
                Err(error) if is_timeout(&error) => {}
                result => return result,
            }
        }
    }

    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let deadline = Instant::now() + CLIENT_TIMEOUT;
        while !bytes.is_empty() {
            let left = self.check_time(deadline)?;
            self.stream.set_write_timeout(Some(left))?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => bytes = &bytes[len..],
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(error),
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

/// Whether a read or write ended because of its timeout, or a signal.
fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The format with the larger weight must be chosen, and OpenMetrics without a preference.
    #[test]
    fn the_preferred_format_is_chosen() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for accept in ["", "*/*", "application/json", "application/openmetrics-text, text/plain", prometheus] {
            assert_eq!(accepted_format(accept), Format::OpenMetrics, "{accept}");
        }
        let old = "text/plain;version=0.0.4;q=1,*/*;q=0.1";
        let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
        for accept in ["text/plain", "TEXT/*", old, browser, "application/openmetrics-text;q=x, text/plain;q=0.1"] {
            assert_eq!(accepted_format(accept), Format::Prometheus, "{accept}");
        }
    }

    /// An incomplete request must be continued. Requests that are invalid or too large must be refused.
    #[test]
    fn requests_are_parsed_or_refused() {
        let complete = b"GET /metrics?a=b HTTP/1.1\r\nHost: x\r\naccept: text/plain\r\nAccept: */*\r\n\r\nbody";
        let request = Request::parse(complete).unwrap().unwrap();
        assert_eq!((request.path.as_str(), request.accept.as_str()), ("/metrics", "text/plain,*/*"));
        assert_eq!(Request::parse(b"").unwrap(), None);
        assert_eq!(Request::parse(&complete[..complete.len() - 6]).unwrap(), None);
        let status = |bytes: &[u8]| Request::parse(bytes).unwrap_err().status;
        assert_eq!(status(b"\x16\x03\x01\x02"), "400 Bad Request");
        assert_eq!(status(b"GET /metrics\r\n\r\n"), "400 Bad Request");
        let long = [&b"GET /"[..], &[b'a'; MAX_REQUEST_BYTES]].concat();
        assert_eq!(status(&long), "431 Request Header Fields Too Large");
        let many = [&b"GET / HTTP/1.1\r\n"[..], &b"a: b\r\n".repeat(MAX_HEADERS + 1), b"\r\n"].concat();
        assert_eq!(status(&many), "431 Request Header Fields Too Large");
    }

    /// Pages and methods that do not exist must be refused, and HEAD must have the headers of GET without a body.
    #[test]
    fn only_pages_of_the_server_are_served() {
        let request =
            |method: &str, path: &str| Request { method: method.into(), path: path.into(), accept: "".into() };
        let page = |format: Format| format!("{format:?}\n");
        let status = |method, path| request(method, path).response(&page).status;
        assert_eq!(
            ["/metrics", "/", "/metrics/", "//"].map(|path| &status("GET", path)[..3]),
            ["200", "200", "404", "404"]
        );
        assert_eq!(["POST", "PUT", "get"].map(|method| &status(method, "/metrics")[..3]), ["405"; 3]);
        let response = request("HEAD", "/metrics").response(&page);
        let (with, without) = (response.to_bytes(true), response.to_bytes(false));
        assert!(
            with.starts_with(&without) && with.ends_with(b"\r\n\r\nOpenMetrics\n") && without.ends_with(b"\r\n\r\n")
        );
        let refused = String::from_utf8(request("POST", "/").response(&page).to_bytes(true)).unwrap();
        assert!(
            refused.contains("\r\nAllow: GET, HEAD\r\n") && refused.contains("\r\nContent-Length: 29\r\n"),
            "{refused}"
        );
    }
}
