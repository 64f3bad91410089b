//! Facts about the machine that a measurement depends on, and the load at the start of a run.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::proc;

/// Kind of the JSON row that describes the machine.
pub const MACHINE_KIND: &str = "machine";

/// Text of a fact that could not be read.
const UNKNOWN: &str = "unknown";

/// Load per CPU at the start of a run above which other programs disturb it.
pub const BUSY_LOAD_PER_CPU: f64 = 0.25;

/// The machine at the start of a run.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Each fact has its key in JSON and its text. Measurements on machines with the same facts are comparable.
    facts: Vec<(&'static str, String)>,
    /// Load average of the last minute at the start of the run; none if it is unknown.
    pub load: Option<f64>,
    /// Start of the run in seconds since 1970, UTC.
    pub start_seconds: u64,
}

/// A fact that differs between two machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub fact: String,
    pub old: String,
    pub new: String,
}

impl Machine {
    /// Reads the facts about this machine. A fact that cannot be read has the text `unknown`.
    pub fn read() -> Self {
        let memory = proc::total_bytes().map(|bytes| format!("{} MiB", bytes >> 20));
        let cpus = std::thread::available_parallelism().map(|cpus| cpus.to_string()).ok();
        let governor = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
        let facts = [
            ("kernel", read_line("/proc/sys/kernel/osrelease")),
            ("processor", cpuinfo_value("model name")),
            ("cpus", cpus),
            ("memory", memory),
            ("virtual_machine", cpuinfo_value("flags").map(|flags| yes_or_no(has_word(&flags, "hypervisor")))),
            ("huge_pages", chosen("/sys/kernel/mm/transparent_hugepage/enabled")),
            ("huge_pages_shmem", chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
            ("cgroup_version", Some(cgroup_version().to_owned())),
            ("governor", read_line(governor)),
            ("build", Some(if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned())),
        ];
        let facts = facts.map(|(key, text)| (key, text.unwrap_or_else(|| UNKNOWN.to_owned()))).to_vec();
        let load = read_line("/proc/loadavg").and_then(|line| line.split(' ').next()?.parse().ok());
        let start_seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { facts, load, start_seconds }
    }

    /// Returns the text of a fact; `unknown` if there is no such fact.
    pub fn fact(&self, key: &str) -> &str {
        self.facts.iter().find(|(name, _)| *name == key).map_or(UNKNOWN, |(_, text)| text)
    }

    /// Returns each fact as a title for readers and its text, without the facts that are unknown.
    pub fn titles(&self) -> impl Iterator<Item = (String, &str)> {
        let known = self.facts.iter().filter(|(_, text)| text != UNKNOWN);
        known.map(|(key, text)| (key.replace('_', " "), text.as_str()))
    }

    /// Describes kernel, CPUs and huge-page setting in one line.
    pub fn describe(&self) -> String {
        let [kernel, cpus, processor, huge] = ["kernel", "cpus", "processor", "huge_pages"].map(|key| self.fact(key));
        format!("machine: Linux {kernel}, {cpus} CPUs, {processor}, huge pages: {huge}")
    }

    /// Returns the row that describes the machine in JSON output.
    pub fn json_row(&self) -> Value {
        let mut row =
            Map::from_iter([("kind".to_owned(), json!(MACHINE_KIND)), ("time".to_owned(), json!(self.time()))]);
        row.extend(self.facts.iter().map(|(key, text)| ((*key).to_owned(), json!(text))));
        row.insert("load".to_owned(), json!(self.load));
        Value::Object(row)
    }

    /// Returns the number of CPUs; 1 if it is unknown.
    pub fn cpus(&self) -> f64 {
        self.fact("cpus").parse().unwrap_or(1.0)
    }

    /// Returns the facts that have another text in `old`, which [`Machine::json_row`] made. A fact that is missing in
    /// `old` counts as unknown. A load that differs by more than [`BUSY_LOAD_PER_CPU`] is also a difference.
    pub fn differences(&self, old: &Value) -> Vec<Difference> {
        let of = |(key, new): &(&str, String)| {
            let old = old[*key].as_str().unwrap_or(UNKNOWN).to_owned();
            (old != *new).then(|| Difference { fact: key.replace('_', " "), old, new: new.clone() })
        };
        let load = self.load.zip(old["load"].as_f64());
        let load = load.filter(|(new, old)| (new - old).abs() > BUSY_LOAD_PER_CPU * self.cpus()).map(|(new, old)| {
            Difference { fact: "load at the start".to_owned(), old: old.to_string(), new: new.to_string() }
        });
        self.facts.iter().filter_map(of).chain(load).collect()
    }

    /// Returns the start of the run as `YYYY-MM-DD HH:MM UTC`.
    pub fn time(&self) -> String {
        let (year, month, day) = civil_date(self.start_seconds / 86_400);
        let minute = self.start_seconds / 60 % (24 * 60);
        format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", minute / 60, minute % 60)
    }
}

fn read_line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Returns the bracketed word of a setting such as `always [madvise] never`.
fn chosen(path: &str) -> Option<String> {
    let line = read_line(path)?;
    line.split(['[', ']']).nth(1).map(str::to_owned)
}

/// Returns the value of the first line of /proc/cpuinfo with this key.
fn cpuinfo_value(key: &str) -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.split('\t').next() == Some(key))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|one| one == word)
}

fn yes_or_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}

fn cgroup_version() -> &'static str {
    let exists = |path: &str| Path::new(path).exists();
    match (exists("/sys/fs/cgroup/cgroup.controllers"), exists("/sys/fs/cgroup/memory")) {
        (true, _) => "2",
        (_, true) => "1",
        _ => "none",
    }
}

/// Converts days since 1970-01-01 to year, month and day of the Gregorian calendar.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut rest) = (1970, days);
    while rest >= 365 + u64::from(is_leap(year)) {
        rest -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for len in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if rest < len {
            break;
        }
        rest -= len;
        month += 1;
    }
    (year, month, rest + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The row of a machine must differ from that machine in no fact, and from another kernel in exactly that fact. A
    /// row without facts must differ in each known fact.
    #[test]
    fn differences_name_the_facts() {
        let machine = Machine::read();
        let row = machine.json_row();
        assert_eq!(row["kind"], MACHINE_KIND);
        assert_eq!(machine.differences(&row), []);

        let mut other = row.clone();
        other["kernel"] = json!("2.6.39");
        let found = machine.differences(&other);
        assert_eq!(
            found.iter().map(|one| (one.fact.as_str(), one.old.as_str())).collect::<Vec<_>>(),
            [("kernel", "2.6.39")]
        );
        assert_eq!(machine.differences(&json!({})).len(), machine.titles().count());
        let loaded = Machine { load: Some(99.0), ..machine.clone() };
        let idle = Machine { load: Some(0.1), ..machine.clone() };
        let found = loaded.differences(&idle.json_row());
        assert_eq!(found.iter().map(|one| one.fact.as_str()).collect::<Vec<_>>(), ["load at the start"]);
        assert!(machine.describe().contains("CPUs"));
    }

    /// Days around leap days and turns of the year must be converted to the right dates.
    #[test]
    fn days_are_converted_to_dates() {
        let expected = [(0, (1970, 1, 1)), (58, (1970, 2, 28)), (59, (1970, 3, 1)), (11_016, (2000, 2, 29))];
        for (days, date) in expected.into_iter().chain([(20_783, (2026, 11, 26)), (19_723, (2024, 1, 1))]) {
            assert_eq!(civil_date(days), date);
        }
        let machine = Machine { start_seconds: 20_783 * 86_400 + 65 * 60, ..Machine::read() };
        assert_eq!(machine.time(), "2026-11-26 01:05 UTC");
    }
}
