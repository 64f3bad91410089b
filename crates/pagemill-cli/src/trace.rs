//! `pagemill trace PID`: the latest events of a process.

use crate::fail;
use pagemill::published;
use pagemill::trace::{self, Recorded};
use std::io::Write;
use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Trace {
    /// A running process on Pagemill.
    pid: u32,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

impl Trace {
    pub fn main(&self) -> ExitCode {
        let Some((path, _)) = published::find(self.pid) else {
            return fail(2, &published::missing(self.pid));
        };
        match trace::read(path.as_c_str()) {
            Ok(events) => {
                let mut out = std::io::stdout().lock();
                let written = events.iter().try_for_each(|event| writeln!(out, "{}", self.line(event, &events)));
                match written.and_then(|()| out.flush()) {
                    // A reader that stops reading (head, less) ends the listing.
                    Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                        fail(1, &format!("the events cannot be written: {error}"))
                    }
                    _ => ExitCode::SUCCESS,
                }
            }
            Err(error) => fail(2, &format!("cannot read the events of {}: {error}", self.pid)),
        }
    }

    fn line(&self, event: &Recorded, all: &[Recorded]) -> String {
        if self.json {
            let mut line = serde_json::Map::new();
            line.insert("sequence".into(), event.sequence.into());
            line.insert("time_ns".into(), event.time_ns.into());
            line.insert("event".into(), event.event.into());
            line.extend(event.numbers.iter().map(|(name, number)| ((*name).to_owned(), (*number).into())));
            return serde_json::Value::Object(line).to_string();
        }
        let start = all.first().map_or(0, |first| first.time_ns);
        let seconds = event.time_ns.saturating_sub(start) as f64 / 1e9;
        let numbers: Vec<String> = event.numbers.iter().map(|(name, number)| format!("{name} {number}")).collect();
        format!("{seconds:>12.6} s  {:<14}  {}", event.event, numbers.join(", "))
    }
}
