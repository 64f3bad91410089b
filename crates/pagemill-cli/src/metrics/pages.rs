//! The pages of the server of metrics: `/metrics`, and `/` with a link to it.

use crate::http::{Request, Response};
use pagemill_core::metrics::Format;

const INDEX_PAGE: &str =
    "<!DOCTYPE html><title>Pagemill</title><a href=\"/metrics\">Metrics</a> of processes on Pagemill\n";

/// Returns the response to a request. `page` returns the text of `/metrics`.
pub fn respond(request: &Request, page: &impl Fn(Format) -> String) -> Response {
    let page_of = |content_type, body| Response { status: "200 OK", content_type, headers: "Vary: Accept\r\n", body };
    match (request.method.as_str(), request.path.as_str()) {
        ("GET" | "HEAD", "/metrics") => {
            let format = accepted_format(&request.accept);
            page_of(format.content_type(), page(format))
        }
        ("GET" | "HEAD", "/") => page_of("text/html; charset=utf-8", INDEX_PAGE.to_owned()),
        (_, "/metrics" | "/") => Response {
            headers: "Allow: GET, HEAD\r\n",
            ..Response::error("405 Method Not Allowed", "the methods are GET and HEAD")
        },
        _ => Response::error("404 Not Found", "the page is /metrics"),
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

    /// Pages and methods that do not exist must be refused, and HEAD must have the headers of GET without a body.
    #[test]
    fn only_pages_of_the_server_are_served() {
        let response = |method: &str, path: &str| {
            let request = Request { method: method.into(), path: path.into(), ..Request::default() };
            respond(&request, &|format: Format| format!("{format:?}\n"))
        };
        let status = |method, path| response(method, path).status;
        assert_eq!(
            ["/metrics", "/", "/metrics/", "//"].map(|path| &status("GET", path)[..3]),
            ["200", "200", "404", "404"]
        );
        assert_eq!(["POST", "PUT", "get"].map(|method| &status(method, "/metrics")[..3]), ["405"; 3]);
        let head = response("HEAD", "/metrics");
        let (with, without) = (head.to_bytes(true), head.to_bytes(false));
        assert!(
            with.starts_with(&without) && with.ends_with(b"\r\n\r\nOpenMetrics\n") && without.ends_with(b"\r\n\r\n")
        );
        let refused = String::from_utf8(response("POST", "/").to_bytes(true)).unwrap();
        assert!(
            refused.contains("\r\nAllow: GET, HEAD\r\n") && refused.contains("\r\nContent-Length: 29\r\n"),
            "{refused}"
        );
    }
}
