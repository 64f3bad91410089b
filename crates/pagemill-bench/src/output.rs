//! What a run prints and writes besides its tables: JSON rows, the comparison with an earlier run, the report page.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::compare::{Comparison, OldRun};
use crate::error::{Error, Result, doing};
use crate::machine::Machine;
use crate::page::{Page, Section};
use crate::report::Row;

#[derive(Clone, Debug, Default, clap::Args)]
pub struct OutputOptions {
    /// Print one JSON object per line instead of tables
    #[arg(long)]
    pub json: bool,
    /// Also write a page with plots (NAME.html) and its rows (NAME.json) into this folder, which is made if needed
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Also print what changed beyond the spread since an earlier run, whose --json or --report wrote this file
    #[arg(long, value_name = "OLD.json")]
    pub compare: Option<PathBuf>,
}

/// The outputs of a run, which were checked before the run.
#[derive(Debug)]
pub struct Output {
    options: OutputOptions,
    old: Option<OldRun>,
    pub machine: Machine,
}

impl Output {
    /// Reads the earlier run, makes the folder of the page, and reads the facts about the machine. Prints nothing.
    ///
    /// # Errors
    ///
    /// [`Error::CannotRun`] if the file of the earlier run is not usable, or if the folder is not writable.
    pub fn prepare(options: &OutputOptions) -> Result<Self> {
        let old = options.compare.as_deref().map(OldRun::read).transpose()?;
        options.report.as_deref().map(make_writable).transpose()?;
        Ok(Self { options: options.clone(), old, machine: Machine::read() })
    }

    /// Returns the line that comes before the first row in JSON mode: the description of the machine.
    pub fn first_line(&self) -> Option<String> {
        self.options.json.then(|| self.machine.json_row().to_string())
    }

    /// Describes the machine in a line before the tables; in JSON mode on stderr.
    pub fn print_machine(&self) {
        match self.options.json {
            true => eprintln!("{}", self.machine.describe()),
            false => println!("{}\n", self.machine.describe()),
        }
    }

    pub fn is_json(&self) -> bool {
        self.options.json
    }

    /// Compares the sections of the run with the earlier run, prints the differences, and writes the page. `page` has
    /// the parts that only the caller knows; its comparison is filled in here.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if a file cannot be written.
    pub fn finish(&self, page: Page<'_>) -> Result<()> {
        let rows = || page.sections.iter().flat_map(|section| section.report.rows());
        let comparison = self.old.as_ref().map(|old| old.compare(&self.machine, rows()));
        if let Some(comparison) = &comparison {
            match self.options.json {
                true => comparison.json_rows().iter().for_each(|row| println!("{row}")),
                false => print!("\n{}", comparison.text()),
            }
        }
        let Some(folder) = &self.options.report else { return Ok(()) };
        self.write(folder, &Page { comparison: comparison.as_ref(), ..page })
    }

    fn write(&self, folder: &Path, page: &Page<'_>) -> Result<()> {
        let [html, json] = ["html", "json"].map(|ending| folder.join(format!("{}.{ending}", page.name)));
        let failed = |path: &Path| doing(format!("writing {}", path.display()));
        fs::write(&json, json_lines(&self.machine, &page.sections, page.comparison)).map_err(failed(&json))?;
        fs::write(&html, page.html()).map_err(failed(&html))?;
        let line = format!("report: {}, {}", html.display(), json.display());
        match self.options.json {
            true => eprintln!("{line}"),
            false => println!("{line}"),
        }
        Ok(())
    }
}

/// Returns the JSON rows of a run as `--json` prints them.
fn json_lines(machine: &Machine, sections: &[Section<'_>], comparison: Option<&Comparison>) -> String {
    let rows = sections.iter().flat_map(|section| section.report.rows()).map(Row::json);
    let differences = comparison.map(Comparison::json_rows).unwrap_or_default();
    let all = [machine.json_row().to_string()].into_iter().chain(rows).chain(differences.iter().map(Value::to_string));
    all.map(|line| line + "\n").collect()
}

/// Makes the folder if it does not exist, and checks that a file can be written there.
fn make_writable(folder: &Path) -> Result<()> {
    let refused = |cause| Error::CannotRun(format!("--report {}: {cause}", folder.display()));
    fs::create_dir_all(folder).map_err(refused)?;
    let mut probe = tempfile::tempfile_in(folder).map_err(refused)?;
    probe.write_all(b"report").map_err(refused)
}
