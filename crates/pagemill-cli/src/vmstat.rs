//! `pagemill vmstat [PID]`: shows what the memory managers of processes have done so far. With --watch, shows what one
//! memory manager does each second.

use crate::fail;
use crate::requests::Interrupt;
use crate::statistics::{self, Process, ProcessColumn, StatisticsError, Target, giveable_bytes, resident_bytes};
use pagemill_core::stats::{Counter, CounterKind, Row, Snapshot, TABLE, Unit};
use pagemill_core::units::Bytes;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Vmstat {
    /// A process on Pagemill, or a `pagemill run`, which stands for all processes of its tree. Default: all processes,
    /// one line for each.
    pid: Option<u32>,
    /// Repeat every second with the changes of this second, until the process ends or Ctrl-C.
    #[arg(long, requires = "pid")]
    watch: bool,
    /// Print one JSON object per process instead of a table (for a tree one object with its members; with --watch one
    /// every second).
    #[arg(long)]
    json: bool,
    /// Also show rows whose value is zero.
    #[arg(long)]
    all: bool,
}

const PROCESS_COLUMNS: [ProcessColumn; 4] = [
    ("RESIDENT", resident_bytes),
    ("GIVEABLE", |sum| giveable_bytes(sum).0),
    ("RETURNED", |sum| sum.get(Counter::PurgeFreed)),
    ("PEAK", |sum| sum.get(Counter::ResidentPeak)),
];

/// What is shown: the counters of a process, or the sums over the members of a process tree.
struct View {
    title: String,
    start_ticks: u64,
    sum: Snapshot,
    age: Option<String>,
    members: Option<Vec<Process>>,
}

impl View {
    fn of(pid: u32, interrupt: &Interrupt) -> Result<Self, StatisticsError> {
        Ok(match statistics::read_target(pid, interrupt)? {
            Target::One(process) => Self {
                title: process.title(),
                start_ticks: process.published.identity.start_ticks,
                sum: process.sum.clone(),
                age: process.age(),
                members: None,
            },
            Target::Tree(members) => Self {
                title: format!("{pid} pagemill run: {} on Pagemill\n", statistics::process_count_text(members.len())),
                start_ticks: pagemill_sys::process::identity(pid).map_or(0, |identity| identity.start_ticks),
                sum: statistics::sum_of(&members),
                age: None,
                members: Some(members),
            },
        })
    }
}

impl Vmstat {
    pub fn main(&self) -> ExitCode {
        let Ok(interrupt) = Interrupt::watch() else { return fail(1, "signals cannot be handled") };
        let shown = match self.pid {
            Some(pid) => self.show(pid, &interrupt),
            None => statistics::read_all(&interrupt).map(|all| self.write(&self.text_of_all(&all))),
        };
        match shown {
            Ok(Err(error)) if error.kind() != ErrorKind::BrokenPipe => {
                fail(1, &format!("the figures cannot be written: {error}"))
            }
            Ok(_) => ExitCode::SUCCESS,
            Err(StatisticsError::Interrupted) => interrupt.end(),
            Err(StatisticsError::Missing(why)) => fail(2, &why),
        }
    }

    fn show(&self, pid: u32, interrupt: &Interrupt) -> Result<std::io::Result<()>, StatisticsError> {
        let mut last = View::of(pid, interrupt)?;
        let mut written = self.write(&self.text(pid, &Snapshot::default(), &last));
        while self.watch && written.is_ok() {
            thread::sleep(Duration::from_secs(1));
            if interrupt.has_signal() {
                return Err(StatisticsError::Interrupted);
            }
            // The start time of the process is checked each time, because its id may have been reused.
            let now = match View::of(pid, interrupt) {
                Ok(now) if now.start_ticks == last.start_ticks => now,
                Err(StatisticsError::Interrupted) => return Err(StatisticsError::Interrupted),
                _ => break,
            };
            written = self.write(&self.text(pid, &last.sum, &now));
            last = now;
        }
        Ok(written)
    }

    fn write(&self, text: &str) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }

    fn text_of_all(&self, processes: &[Process]) -> String {
        match (self.json, processes.is_empty()) {
            (true, _) => processes.iter().map(|process| format!("{}\n", self.json_of(process))).collect(),
            (false, true) => "no process of yours is on Pagemill\n".to_owned(),
            (false, false) => statistics::process_table(processes, &PROCESS_COLUMNS),
        }
    }

    fn text(&self, pid: u32, before: &Snapshot, now: &View) -> String {
        if self.json {
            let mut rows = self.rows_of(before, &now.sum);
            rows.insert("pid".into(), json!(pid));
            rows.insert("age".into(), json!(now.age));
            if let Some(members) = &now.members {
                rows.insert("members".into(), members.iter().map(|member| self.json_of(member)).collect());
            }
            return format!("{}\n", Value::Object(rows));
        }
        let (resident, giveable) = (Bytes(resident_bytes(&now.sum)), Bytes(giveable_bytes(&now.sum).0));
        let mut text = now.title.clone();
        let _ = writeln!(text, "  {resident} resident, {giveable} could be returned at once");
        for row in count_gauges().filter(|row| self.is_shown(row, before, &now.sum)) {
            let _ = writeln!(text, "  {:<25} {:>12}  {}", row.name, now.sum.get(row.counter), row.meaning);
        }
        for row in sum_rows().filter(|row| self.is_shown(row, before, &now.sum)) {
            let amount = statistics::amount_text(row.unit, counter_increase(row, before, &now.sum));
            let _ = writeln!(text, "  {:<25} {amount:>12}  {}", row.name, row.meaning);
        }
        text + &now
            .members
            .as_ref()
            .map_or_else(String::new, |members| statistics::process_table(members, &PROCESS_COLUMNS))
    }

    /// Returns whether the row of a counter is shown: its value is nonzero or, with --watch, has changed.
    fn is_shown(&self, row: &Row, before: &Snapshot, now: &Snapshot) -> bool {
        let is_sum = row.kind == CounterKind::Sum || self.watch;
        self.all || if is_sum { now.get(row.counter) != before.get(row.counter) } else { now.get(row.counter) > 0 }
    }

    fn rows_of(&self, before: &Snapshot, now: &Snapshot) -> Map<String, Value> {
        let mut rows = Map::new();
        rows.insert("name".into(), json!(now.name()));
        rows.insert("resident".into(), json!(resident_bytes(now)));
        rows.insert("giveable".into(), json!(giveable_bytes(now).0));
        let values = sum_rows().map(|row| (row.name, counter_increase(row, before, now)));
        let values = values.chain(count_gauges().map(|row| (row.name, now.get(row.counter))));
        rows.extend(
            values.filter(|(_, value)| self.all || *value > 0).map(|(name, value)| (name.to_owned(), json!(value))),
        );
        rows
    }

    /// Returns the JSON object of one process in a list: its counters, process id, user and age.
    fn json_of(&self, process: &Process) -> Value {
        let mut rows = self.rows_of(&Snapshot::default(), &process.sum);
        rows.insert("pid".into(), json!(process.pid()));
        rows.insert("user".into(), json!(process.published.user));
        rows.insert("age".into(), json!(process.age()));
        Value::Object(rows)
    }
}

fn sum_rows() -> impl Iterator<Item = &'static Row> {
    TABLE.iter().filter(|row| row.kind == CounterKind::Sum)
}

/// Returns the gauges (counters of current values) whose unit is a count. `meminfo` shows the gauges whose unit is
/// bytes.
fn count_gauges() -> impl Iterator<Item = &'static Row> {
    TABLE.iter().filter(|row| row.kind == CounterKind::Gauge && row.unit == Unit::Count)
}

fn counter_increase(row: &Row, before: &Snapshot, now: &Snapshot) -> u64 {
    now.get(row.counter).saturating_sub(before.get(row.counter))
}
