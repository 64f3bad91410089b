//! `pagemill metrics`, `run --metrics` and `mount --metrics`: the text must be valid, its values must be those of
//! `vmstat`, and the server must withstand wrong and slow clients. The dashboard must use only families that exist.

mod common;
#[path = "metrics/parser.rs"]
mod parser;

use common::holder::ObservedProgram;
use common::{End, Guard, PAGEMILL, TIMEOUT, TestFolder, finish, finish_with_input, is_missing, may_mount, tail};
use pagemill_core::metrics::{Format, family_name};
use pagemill_core::stats::{CounterKind, TABLE};
use pagemill_testbed::Testbed;
use pagemill_volatile::Behaviour;
use parser::{Dialect, Families, parse};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// The tests run this test binary as a child with this variable set to a number of MiB. In the child, the test
/// `program` holds so much volatile memory.
const PROGRAM_VARIABLE: &str = "METRICS_TEST_PROGRAM";

#[test]
#[ignore = "a program for other tests"]
fn program() {
    let Ok(mib) = std::env::var(PROGRAM_VARIABLE) else { return };
    let len = mib.parse::<usize>().unwrap() << 20;
    let mut range = Testbed::of_process().unwrap().ranges.allocate(len, Behaviour::Full).unwrap();
    range.bytes_mut().unwrap().fill(7);
    // Bypasses the test harness, which captures the output of tests.
    std::io::stdout().write_all(format!("\n{}\n", std::process::id()).as_bytes()).unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn start_program(place: &TestFolder, mib: u64) -> ObservedProgram {
    let mut command = place.command(std::env::current_exe().unwrap());
    command.args(["--exact", "program", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env(PROGRAM_VARIABLE, mib.to_string());
    ObservedProgram::start(command)
}

fn pagemill(place: &TestFolder, args: &[&str]) -> End {
    let mut command = place.command(PAGEMILL);
    command.args(args);
    finish(command, TIMEOUT)
}

fn open_metrics(text: &str) -> Families {
    parse(text, Dialect::OpenMetrics).unwrap_or_else(|why| panic!("{why}\n{text}"))
}

fn plain_metrics(text: &str) -> Families {
    parse(text, Dialect::Prometheus).unwrap_or_else(|why| panic!("{why}\n{text}"))
}

/// Returns the values of one label of a family.
fn label_values(families: &Families, family: &str, label: &str) -> BTreeSet<String> {
    families[family].samples.iter().map(|(labels, _)| labels[label].clone()).collect()
}

/// The metrics of a process must have a family for each counter, with the values that `vmstat` shows, in both formats.
#[test]
fn every_counter_is_published() {
    let place = TestFolder::new();
    let program = start_program(&place, 32);
    let pid = program.pid().to_string();
    let end = pagemill(&place, &["metrics"]);
    end.assert_success();
    let families = open_metrics(&end.out);
    for row in TABLE {
        let (name, unit) = family_name(row);
        let family = families.get(&name).unwrap_or_else(|| panic!("no family {name}"));
        let kind = if row.kind == CounterKind::Sum { "counter" } else { "gauge" };
        assert_eq!((family.kind.as_str(), family.unit.as_str()), (kind, unit), "{name}");
        assert_eq!(family.help.as_deref(), Some(row.meaning), "{name}");
        assert!(family.value("pid", &pid).is_some(), "{name}");
    }
    let value = |name: &str| families[name].value("pid", &pid).unwrap();
    assert!(families["pagemill_processes"].samples[0].1 >= 1.0);
    assert!(value("pagemill_resident_bytes") >= 32.0 * MIB as f64);
    assert_eq!(value("pagemill_ranges_made"), 1.0);
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    let measured = value("pagemill_measured_at_timestamp_seconds");
    assert!(measured > now - 600.0 && measured <= now, "measured at {measured}, now {now}");

    let shown = pagemill(&place, &["vmstat", &pid, "--json", "--all"]);
    let shown: Value = serde_json::from_str(&shown.out).unwrap();
    for name in ["ranges_made", "ranges_purged", "blocks_huge", "blocks_fallback"] {
        assert_eq!(value(&format!("pagemill_{name}")), shown[name].as_f64().unwrap(), "{name}");
    }
    let plain = pagemill(&place, &["metrics", "--prometheus"]);
    let plain = plain_metrics(&plain.out);
    assert_eq!(plain["pagemill_ranges_made_total"].value("pid", &pid), Some(1.0));
    let info = &plain["pagemill_build_info"].samples[0];
    assert_eq!((info.0["version"].as_str(), info.1), (env!("CARGO_PKG_VERSION"), 1.0));
    program.end();
}

/// Of several processes, only the largest get samples of their own. The others must be summed up. Without a process,
/// there must be valid metrics, too.
#[test]
fn the_number_of_samples_is_bounded() {
    let place = TestFolder::new();
    // Processes of the user that do not belong to the test may run, too.
    let before = open_metrics(&pagemill(&place, &["metrics"]).out);
    assert_eq!(before.contains_key("pagemill_resident_bytes"), before["pagemill_processes"].samples[0].1 > 0.0);
    let programs: Vec<_> = [8, 64, 16, 32, 4].map(|mib| start_program(&place, mib)).into_iter().collect();
    let end = pagemill(&place, &["metrics", "--processes", "2"]);
    end.assert_success();
    let families = open_metrics(&end.out);
    assert!(families["pagemill_processes"].samples[0].1 >= 5.0);
    let expected = [programs[1].pid().to_string(), programs[3].pid().to_string(), "other".to_owned()];
    assert_eq!(label_values(&families, "pagemill_resident_bytes", "pid"), BTreeSet::from(expected));
    assert!(families["pagemill_ranges_made"].value("pid", "other").unwrap() >= 3.0);
    assert!(families["pagemill_resident_bytes"].value("comm", "other").unwrap() >= 28.0 * MIB as f64);
    assert!(families.values().all(|family| family.samples.len() <= 3));
    programs.into_iter().for_each(|program| drop(program.end()));
}

/// A server of metrics in a process of its own.
struct Server {
    guard: Guard,
    address: String,
}

impl Server {
    fn start(place: &TestFolder) -> Self {
        let mut command = place.command(PAGEMILL);
        command.args(["metrics", "--listen", "127.0.0.1:0"]).stdout(Stdio::piped());
        let mut guard = Guard::new(command);
        let mut line = String::new();
        BufReader::new(guard.child().stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.strip_prefix("http://").and_then(|rest| rest.split_once("/metrics")).unwrap().0.to_owned();
        Self { guard, address }
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).unwrap()
    }

    /// Sends bytes, and returns the head and the body of the response.
    fn send(&self, request: &[u8]) -> (String, String) {
        let mut stream = self.connect();
        stream.write_all(request).unwrap();
        read_response(stream)
    }

    fn get(&self, accept: &str) -> (String, String) {
        self.send(format!("GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n").as_bytes())
    }
}

fn read_response(mut stream: TcpStream) -> (String, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
    (head.to_owned(), body.to_owned())
}

/// The server must answer in the format that the client prefers. Wrong methods, paths and requests must be refused. An
/// address in use must be reported. SIGINT must end the server.
#[test]
fn the_server_answers_valid_requests_only() {
    let place = TestFolder::new();
    let program = start_program(&place, 8);
    let mut server = Server::start(&place);
    let (head, body) = server.get("*/*");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains(&format!("\r\nContent-Type: {}\r\n", Format::OpenMetrics.content_type())), "{head}");
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    let pid = program.pid().to_string();
    assert_eq!(open_metrics(&body)["pagemill_ranges_made"].value("pid", &pid), Some(1.0));
    let (head, body) = server.get("text/plain;version=0.0.4");
    assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
    assert_eq!(plain_metrics(&body)["pagemill_ranges_made_total"].value("pid", &pid), Some(1.0));

    let (head, body) = server.send(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && !head.contains("Content-Length: 0") && body.is_empty(),
        "{head}"
    );
    assert!(server.send(b"GET / HTTP/1.0\r\n\r\n").1.contains("href=\"/metrics\""));
    let status = |request: &[u8]| server.send(request).0.split(' ').nth(1).unwrap().to_owned();
    assert_eq!(status(b"GET /other HTTP/1.1\r\n\r\n"), "404");
    let post = [&b"POST /metrics HTTP/1.1\r\nContent-Length: 4096\r\n\r\n"[..], &[b'x'; 4096]].concat();
    let (head, _) = server.send(&post);
    assert!(head.starts_with("HTTP/1.1 405 ") && head.contains("\r\nAllow: GET, HEAD\r\n"), "{head}");
    assert_eq!(status(b"\x16\x03\x01\x02\x00\r\n\r\n"), "400");
    assert_eq!(status(&[&b"GET /"[..], &[b'a'; 8 << 10]].concat()), "431");

    let used = pagemill(&place, &["metrics", "--listen", &server.address]);
    assert_eq!(used.code(), 2);
    assert!(used.err.contains(&server.address) && used.err.contains("another program uses it"), "{}", used.err);
    assert_eq!(pagemill(&place, &["metrics", "--listen", "nonsense"]).code(), 2);
    server.guard.signal("INT");
    assert!(server.guard.wait(TIMEOUT).success());
    program.end();
}

/// Clients that send nothing, or half a request, must not block other clients. After some seconds they must get a
/// response, or be disconnected. A server with such clients must end at once.
#[test]
fn slow_clients_block_no_others() {
    let place = TestFolder::new();
    let mut server = Server::start(&place);
    let mut half = server.connect();
    half.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    let idle: Vec<TcpStream> = (0..3).map(|_| server.connect()).collect();
    assert!(server.get("*/*").0.starts_with("HTTP/1.1 200 "));
    assert!(read_response(half).0.starts_with("HTTP/1.1 408 "));
    drop(idle);
    // More clients than the server accepts at a time. Those beyond are disconnected, and later ones are served.
    let many: Vec<TcpStream> = (0..20).map(|_| server.connect()).collect();
    drop(many);
    let begun = Instant::now();
    let is_served = || {
        let mut stream = server.connect();
        let sent = stream.write_all(b"HEAD / HTTP/1.1\r\n\r\n");
        let mut text = String::new();
        sent.and_then(|()| stream.read_to_string(&mut text)).is_ok() && text.starts_with("HTTP/1.1 200 ")
    };
    while !is_served() {
        assert!(begun.elapsed() < TIMEOUT, "no client is served any more");
        thread::sleep(Duration::from_millis(10));
    }
    let _idle = server.connect();
    server.guard.signal("TERM");
    assert!(server.guard.wait(TIMEOUT).success());
}

/// The file must be complete at each time at which it is read, and be written again. A folder that does not exist must
/// be reported.
#[test]
fn a_textfile_is_always_complete() {
    let place = TestFolder::new();
    let program = start_program(&place, 8);
    let folder = place.path("textfiles");
    fs::create_dir(&folder).unwrap();
    let folder_text = folder.to_str().unwrap();
    let path = folder.join("pagemill.prom");
    pagemill(&place, &["metrics", "--textfile", folder_text]).assert_success();
    let first = fs::read_to_string(&path).unwrap();
    let has_samples = |text: &str, program: &ObservedProgram| {
        plain_metrics(text)["pagemill_ranges_made_total"].value("pid", &program.pid().to_string()).is_some()
    };
    assert!(has_samples(&first, &program));
    let mut command = place.command(PAGEMILL);
    command.args(["metrics", "--textfile", folder_text, "--every", "1"]);
    let mut guard = Guard::new(command);
    let second = start_program(&place, 4);
    let begun = Instant::now();
    while !has_samples(&fs::read_to_string(&path).unwrap(), &second) {
        assert!(begun.elapsed() < TIMEOUT, "the file is not written again");
    }
    guard.signal("TERM");
    assert!(guard.wait(TIMEOUT).success());
    let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["pagemill.prom"]);
    let none = pagemill(&place, &["metrics", "--textfile", &format!("{folder_text}/none")]);
    assert!(none.code() == 2 && none.err.contains("none/pagemill.prom"), "{}", none.err);
    [program, second].into_iter().for_each(|program| drop(program.end()));
}

/// `run --metrics` must publish the metrics of its own tree only: over HTTP while the program runs, and in a file that
/// stays. An address in use must be reported before the program starts.
#[test]
fn run_publishes_its_tree() {
    let place = TestFolder::new();
    let program = start_program(&place, 8);
    let file = place.path("run.prom");
    let options = ["--limit", "300M", "--metrics", file.to_str().unwrap()];
    let end = finish(place.pagemill_run(&options, "true"), TIMEOUT);
    end.assert_success();
    let families = plain_metrics(&fs::read_to_string(&file).unwrap());
    assert_eq!(families["pagemill_tree_limit_bytes"].samples[0].1, 300.0 * MIB as f64);
    assert_eq!(families["pagemill_trees"].samples[0].1, 1.0);
    assert!(families["pagemill_tree_started_total"].samples[0].1 >= 1.0);
    assert!(families["pagemill_processes"].samples[0].1 <= 1.0, "the program outside of the tree is not counted");

    let mut command = place.pagemill_run(&["--metrics", "127.0.0.1:0"], "cat");
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut guard = Guard::new(command);
    let mut line = String::new();
    BufReader::new(guard.child().stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split("http://").nth(1).and_then(|rest| rest.split_once("/metrics")).unwrap().0;
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let families = open_metrics(&read_response(stream).1);
    assert_eq!(
        label_values(&families, "pagemill_tree_resident_bytes", "run"),
        BTreeSet::from([guard.id().to_string()])
    );
    drop(guard.child().stdin.take());
    assert!(guard.wait(TIMEOUT).success());

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let marker = place.path("marker");
    let script = format!("touch {}", marker.display());
    let end = finish(place.pagemill_run_shell(&["--metrics", &address], &script), TIMEOUT);
    assert!(end.code() == 2 && end.err.contains(&address) && !marker.exists(), "{}", end.err);
    program.end();
}

/// `mount --metrics` must publish the counters of its controller, and `metrics` those of all mounts. An address in use
/// must be reported before the file system is mounted.
#[test]
fn mounts_are_published() {
    if !may_mount() {
        return;
    }
    let place = TestFolder::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let script = format!(
        "set -e; mkdir ram; if {0} mount ram --size 64M --metrics {1} 2> error; then exit 3; fi
         grep -q 'another program uses it' error; if grep -q \" $PWD/ram \" /proc/self/mountinfo; then exit 4; fi
         {0} mount ram --size 64M --metrics ./mount.prom --daemon >&2
         dd if=/dev/urandom of=ram/file bs=1M count=4 2>/dev/null; {0} metrics > all.txt; {0} umount ram",
        PAGEMILL,
        listener.local_addr().unwrap()
    );
    let mut command = place.command("unshare");
    command.args(["-m", "sh", "-c", &script]);
    finish(command, TIMEOUT).assert_success();
    let point = place.path("ram").canonicalize().unwrap();
    let point = point.to_str().unwrap();
    let all = open_metrics(&fs::read_to_string(place.path("all.txt")).unwrap());
    assert_eq!(all["pagemill_mount_controlled"].value("mount", point), Some(1.0));
    assert_eq!(all["pagemill_mount_requested_bytes"].value("mount", point), Some(64.0 * MIB as f64));
    assert!(all["pagemill_mount_used_bytes"].value("mount", point).unwrap() >= 4.0 * MIB as f64);
    assert!(all["pagemill_mount_limit_bytes"].value("kind", "size").is_some());
    let begun = Instant::now();
    let own = || plain_metrics(&fs::read_to_string(place.path("mount.prom")).unwrap());
    while !own().get("pagemill_mount_scans_total").is_some_and(|family| family.value("mount", point) >= Some(1.0)) {
        assert!(begun.elapsed() < TIMEOUT, "{:?}", own());
    }
    assert!(!own().contains_key("pagemill_processes"));
}

/// An independent parser, that of the Python client of Prometheus, must accept both formats.
#[test]
fn the_parser_of_prometheus_accepts_the_metrics() {
    if is_missing("python3") {
        return;
    }
    const SCRIPT: &str = "import sys\n\
        from prometheus_client import parser\n\
        from prometheus_client.openmetrics import parser as openmetrics\n\
        parse = {'open': openmetrics, 'plain': parser}[sys.argv[1]].text_string_to_metric_families\n\
        print(sum(len(family.samples) for family in parse(sys.stdin.read())))\n";
    let place = TestFolder::new();
    let imports = finish(python(&place, &["-c", "import prometheus_client.openmetrics.parser"]), TIMEOUT);
    if !imports.status.success() {
        println!("skipped: Python has no prometheus_client: {}", tail(&imports.err));
        return;
    }
    let programs = [8, 4, 4].map(|mib| start_program(&place, mib));
    for (kind, option) in [("open", None), ("plain", Some("--prometheus"))] {
        let args: Vec<&str> = ["metrics", "--processes", "2"].into_iter().chain(option).collect();
        let text = pagemill(&place, &args).out;
        let samples = text.lines().filter(|line| !line.starts_with('#')).count();
        let end = finish_with_input(python(&place, &["-c", SCRIPT, kind]), text.into_bytes(), TIMEOUT);
        end.assert_success();
        assert_eq!(end.out.trim(), samples.to_string());
    }
    programs.into_iter().for_each(|program| drop(program.end()));
}

fn python(place: &TestFolder, args: &[&str]) -> Command {
    let mut command = place.command("python3");
    command.args(args);
    command
}

/// The labels that Prometheus adds to each sample.
const TARGET_LABELS: [&str; 2] = ["instance", "job"];

/// Returns the problems of a query: names that Pagemill does not write, and labels that the samples of the query do not
/// have. `existing` has the names of samples with their labels.
fn problems_of(query: &str, existing: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let mut problems = Vec::new();
    let mut known: BTreeSet<&str> = TARGET_LABELS.into();
    for (at, _) in query.match_indices("pagemill_").filter(|(at, _)| !query[..*at].ends_with(is_part)) {
        let rest = &query[at..];
        let (name, after) = rest.split_at(rest.find(|character| !is_part(character)).unwrap_or(rest.len()));
        let Some(labels) = existing.get(name) else {
            problems.push(format!("no {name}"));
            continue;
        };
        known.extend(labels.iter().map(String::as_str));
        let matchers =
            after.strip_prefix('{').and_then(|inside| inside.split_once('}')).map_or("", |(inside, _)| inside);
        for label in matchers.split(',').filter_map(|matcher| matcher.split(['=', '!']).next()).map(str::trim) {
            if !label.is_empty() && !labels.contains(label) && !TARGET_LABELS.contains(&label) {
                problems.push(format!("no label {label} of {name}"));
            }
        }
    }
    for grouped in query.split(" by (").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0)) {
        let unknown = grouped.split(',').map(str::trim).filter(|label| !known.contains(label));
        problems.extend(unknown.map(|label| format!("no label {label} in {query}")));
    }
    problems
}

/// Returns the names of all samples that Pagemill writes for a process, its tree and a mount, each with its labels.
/// Returns `None` if no RAM file system can be made here.
fn existing_samples(place: &TestFolder) -> Option<BTreeMap<String, BTreeSet<String>>> {
    let options = ["--limit", "300M", "--ram", "ram", "--ram-size", "64M"];
    let mut command = place.pagemill_run(&options, PAGEMILL);
    command.args(["metrics", "--prometheus"]);
    let end = finish(command, TIMEOUT);
    if end.status.code() == Some(2) && end.err.contains("--ram") {
        println!("skipped: {}", end.err);
        return None;
    }
    end.assert_success();
    let families = plain_metrics(&end.out).into_iter();
    let labels_of =
        |family: &parser::Family| family.samples.iter().flat_map(|(labels, _)| labels.keys().cloned()).collect();
    Some(families.map(|(name, family)| (name, labels_of(&family))).collect())
}

/// Returns the string values of all fields with this name.
fn strings<'value>(value: &'value Value, field: &str, found: &mut Vec<&'value str>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| match value {
            Value::String(text) if name == field => found.push(text),
            _ => strings(value, field, found),
        }),
        Value::Array(values) => values.iter().for_each(|value| strings(value, field, found)),
        _ => {}
    }
}

/// Every query of the dashboard must name only samples that Pagemill writes, and labels that these samples have. The
/// dashboard must have a title for each panel, and no panel must cover another.
#[test]
fn the_dashboard_uses_existing_metrics() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/grafana/pagemill.json");
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut cells = BTreeSet::new();
    for panel in panels {
        assert!(!panel["title"].as_str().unwrap().is_empty());
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|name| panel["gridPos"][name].as_u64().unwrap());
        assert!(x + w <= 24, "{}", panel["title"]);
        let is_free = (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))).all(|cell| cells.insert(cell));
        assert!(is_free, "{} covers another panel", panel["title"]);
    }
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());

    let Some(existing) = existing_samples(&TestFolder::new()) else { return };
    let wrong =
        "rate(pagemill_nothing_total[1m]) + sum by (pid, mount) (pagemill_resident_bytes{comm=~\"a\",run=\"1\"})";
    assert_eq!(
        problems_of(wrong, &existing),
        ["no pagemill_nothing_total", "no label run of pagemill_resident_bytes", &format!("no label mount in {wrong}")]
    );
    let mut queries = Vec::new();
    strings(&dashboard, "expr", &mut queries);
    strings(&dashboard, "query", &mut queries);
    assert!(queries.len() >= 30, "{} queries", queries.len());
    let problems: Vec<String> = queries.iter().flat_map(|query| problems_of(query, &existing)).collect();
    assert!(problems.is_empty(), "{problems:?}");
    assert!(existing.keys().filter(|name| queries.iter().any(|query| query.contains(name.as_str()))).count() >= 25);
}
