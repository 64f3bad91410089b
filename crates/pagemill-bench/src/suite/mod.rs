//! `pagemill bench` without a name: all experiments in a short form, then the five ideas in one table.
//!
//! An experiment that cannot run here is listed with the reason and the remedy. It does not fail the run. After an
//! interrupt the results so far are still printed and written.

mod plan;

use std::time::{Duration, Instant};

use comfy_table::{ContentArrangement, Table, presets};
use serde_json::{Value, json};

use crate::child;
use crate::error::{Error, Result};
use crate::experiment::{self, check_names};
use crate::ideas::IdeaResult;
use crate::output::{Output, OutputOptions};
use crate::page::{LeftOut, Page, Section, Warning};
use crate::report::Report;
pub use plan::{ENTRIES, Entry};

/// Width of the tables in letters.
const TABLE_WIDTH: u16 = 140;

#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    #[command(flatten)]
    pub output: OutputOptions,
    /// Run only these experiments, separated by commas (default: all, in under four minutes on 2 CPUs)
    #[arg(long, value_delimiter = ',', value_name = "EXPERIMENT")]
    pub only: Vec<String>,
    /// Exit with status 1 if a target is missed
    #[arg(long)]
    pub strict: bool,
}

/// An experiment of the suite that ended with results.
#[derive(Debug)]
struct Finished {
    report: Report,
    duration: Duration,
}

/// The state of a run of the suite.
#[derive(Debug, Default)]
struct Suite {
    finished: Vec<Finished>,
    left_out: Vec<LeftOut>,
    /// The line before the first JSON row, until it is printed.
    first_line: Option<String>,
    /// Why the bench must fail at the end: a wrong answer or an interrupt.
    failure: Option<Error>,
}

/// Runs the experiments of the suite, and prints and writes their results. `measure` runs one experiment. Returns the
/// exit status of the bench.
///
/// # Errors
///
/// [`Error::CannotRun`] before anything is measured, for an unknown name in `--only` or an unusable file or folder.
/// After all results were printed: [`Error::WrongAnswer`] if an experiment found one, [`Error::Interrupted`] after a
/// signal, [`Error::CannotRun`] if nothing was measured, [`Error::System`] if the page cannot be written.
pub fn run(options: &Options, measure: impl Fn(&Entry, &mut Report) -> Result<()>) -> Result<bool> {
    check_names("experiment", &options.only, &ENTRIES.iter().map(|entry| entry.name).collect::<Vec<_>>())?;
    let output = Output::prepare(&options.output)?;
    let is_wanted = |entry: &&Entry| options.only.is_empty() || options.only.iter().any(|name| name == entry.name);
    let mut suite = Suite { first_line: output.first_line(), ..Suite::default() };
    for entry in ENTRIES.iter().filter(is_wanted) {
        suite.run_entry(entry, output.is_json(), &measure);
        if matches!(suite.failure, Some(Error::Interrupted { .. })) {
            break;
        }
    }
    suite.finish(&output)?;
    let has_missed_target = suite.finished.iter().any(|finished| finished.report.has_missed_target());
    match suite.failure {
        Some(failure) => Err(failure),
        None if suite.finished.is_empty() => Err(Error::CannotRun("nothing was measured".to_owned())),
        None => Ok(options.strict && has_missed_target),
    }
}

impl Suite {
    fn run_entry(
        &mut self,
        entry: &'static Entry,
        is_json: bool,
        measure: &impl Fn(&Entry, &mut Report) -> Result<()>,
    ) {
        experiment::set_progress_title(entry.name);
        let begun = Instant::now();
        let mut report = Report::new(entry.name, is_json);
        report.set_first_line(self.first_line.take());
        let outcome = child::check_interrupt().and_then(|()| measure(entry, &mut report));
        self.first_line = report.take_first_line();
        let duration = begun.elapsed();
        let reason = match &outcome {
            Err(error) => Some(error.to_string()),
            Ok(()) if !report.has_results() => Some(format!("nothing was measured: {}", report.gaps().join("; "))),
            Ok(()) => None,
        };
        let seconds = duration.as_secs_f64();
        match &reason {
            None => eprintln!("{:<10} {seconds:5.1} s  {}", entry.name, entry.shows),
            Some(reason) => eprintln!("{:<10} {seconds:5.1} s  {reason}", entry.name),
        }
        if let Some(reason) = reason {
            self.left_out.push(LeftOut { name: entry.name, warning: Warning::of_gap(&reason) });
        }
        if let Err(error @ (Error::Interrupted { .. } | Error::WrongAnswer { .. })) = outcome {
            self.failure.get_or_insert(error);
        }
        // Rows are complete when they are added, so those of an experiment that ended early are results, too.
        if report.has_results() {
            self.finished.push(Finished { report, duration });
        }
    }

    /// Prints the tables of the suite, or their JSON rows, then the comparison; writes the page.
    fn finish(&self, output: &Output) -> Result<()> {
        let reports: Vec<&Report> = self.finished.iter().map(|finished| &finished.report).collect();
        let ideas = IdeaResult::all(&reports);
        let text = self.text(&ideas);
        output.print_machine();
        match output.is_json() {
            true => {
                self.first_line.iter().for_each(|line| println!("{line}"));
                ideas.iter().map(IdeaResult::json_row).chain(self.json_rows()).for_each(|row| println!("{row}"));
                eprint!("{text}");
            }
            false => print!("{text}"),
        }
        let sections = self
            .finished
            .iter()
            .map(|finished| Section { report: &finished.report, seconds: Some(finished.duration.as_secs_f64()) });
        output.finish(Page {
            name: "bench",
            title: "Pagemill in one page".to_owned(),
            machine: &output.machine,
            sections: sections.collect(),
            ideas: &ideas,
            left_out: &self.left_out,
            comparison: None,
        })
    }

    fn text(&self, ideas: &[IdeaResult]) -> String {
        let mut experiments = table(["experiment", "s", "figures", "reached", "within doubt", "short", "not measured"]);
        for Finished { report, duration } in &self.finished {
            let counts =
                report.verdict_counts().map(|count| if count == 0 { String::new() } else { count.to_string() });
            let start = [report.experiment().to_owned(), format!("{:.1}", duration.as_secs_f64())];
            experiments.add_row(start.into_iter().chain([report.rows().len().to_string()]).chain(counts));
        }
        let mut five = table(["idea", "the original", "Pagemill", "best peer", "measured by"]);
        for idea in ideas {
            let original = format!("{} ({})", idea.original, idea.source);
            five.add_row([idea.title, &original, &idea.ours_text(), &idea.peer_text(), idea.measured]);
        }
        let mut text = format!("\n{experiments}\n");
        for LeftOut { name, warning: Warning { what, remedy } } in &self.left_out {
            text += &format!("left out: {name}: {what}; remedy: {remedy}\n");
        }
        let seconds: f64 = self.finished.iter().map(|finished| finished.duration.as_secs_f64()).sum();
        text + &format!("\n{five}\n\n{} experiments in {seconds:.0} s\n", self.finished.len())
    }

    fn json_rows(&self) -> impl Iterator<Item = Value> {
        self.left_out.iter().map(|LeftOut { name, warning: Warning { what, remedy } }| {
            json!({"kind": "left-out", "experiment": name, "reason": what, "remedy": remedy})
        })
    }
}

fn table<const COLUMNS: usize>(header: [&str; COLUMNS]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(TABLE_WIDTH);
    table.set_header(header);
    table
}
