//! `pagemill vmstat PID`: what a process's memory manager has done so far, or does from second to second.

use crate::fail;
use pagemill::published;
use pagemill::stats::{Counter, Kind, Row, Snapshot, TABLE, Unit};
use pagemill::units::Bytes;
use serde_json::{Map, Value, json};
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Vmstat {
    /// A running process on Pagemill.
    pid: u32,
    /// Every second what was added, until the process ends or Ctrl-C.
    #[arg(long)]
    watch: bool,
    /// One JSON object (with --watch one a second) instead of a table.
    #[arg(long)]
    json: bool,
}

impl Vmstat {
    pub fn main(&self) -> ExitCode {
        let Some((_, mut last)) = published::find(self.pid) else { return fail(2, &published::missing(self.pid)) };
        let mut written = self.write(&Snapshot::default(), &last);
        while self.watch && written.is_ok() {
            thread::sleep(Duration::from_secs(1));
            // Looked up anew: another process may have got its number.
            let Some((_, now)) = published::find(self.pid).filter(|(_, now)| now.who == last.who) else { break };
            written = self.write(&last, &now);
            last = now;
        }
        match written {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                fail(1, &format!("the figures cannot be written: {error}"))
            }
            _ => ExitCode::SUCCESS,
        }
    }

    fn write(&self, before: &Snapshot, now: &Snapshot) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        let sums = || TABLE.iter().filter(|row| row.kind == Kind::Sum);
        // Of the gauges those that count; those in bytes are meminfo's.
        let states = || TABLE.iter().filter(|row| row.kind == Kind::Gauge && row.unit == Unit::Count);
        let added = |row: &Row| now.get(row.counter).saturating_sub(before.get(row.counter));
        if self.json {
            let mut rows: Map<String, Value> = sums().map(|row| (row.name.to_owned(), json!(added(row)))).collect();
            rows.extend(states().map(|row| (row.name.to_owned(), json!(now.get(row.counter)))));
            rows.insert("resident".into(), json!(now.get(Counter::Resident)));
            rows.insert("giveable".into(), json!(now.giveable_bytes()));
            writeln!(out, "{}", Value::Object(rows))?;
            return out.flush();
        }
        let (resident, giveable) = (Bytes(now.get(Counter::Resident)), Bytes(now.giveable_bytes()));
        writeln!(out, "{} {}: {resident} resident, {giveable} of it could be given at once", now.who.pid, now.name())?;
        for row in states().filter(|row| !self.watch || now.get(row.counter) != before.get(row.counter)) {
            writeln!(out, "  {:<25} {:>12}  {}", row.name, now.get(row.counter), row.meaning)?;
        }
        // Watching, only what moved is of interest.
        for row in sums().filter(|row| !self.watch || added(row) > 0) {
            let amount = match row.unit {
                Unit::Bytes => Bytes(added(row)).to_string(),
                Unit::Count => added(row).to_string(),
            };
            writeln!(out, "  {:<25} {amount:>12}  {}", row.name, row.meaning)?;
        }
        out.flush()
    }
}
