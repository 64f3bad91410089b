//! Commands to a process, which shrinks its slab caches or changes their settings itself.

use super::table::{self, Style};
use super::{Cache, Process, Slabinfo, unanswered, write};
use crate::asking::Interrupt;
use crate::fail;
use pagemill::listing::{self, Action, ControlCommand, Outcome, Unanswered};
use pagemill::units::Bytes;
use serde_json::{Value, json};
use std::process::ExitCode;

/// Exit status if a command was refused or is still running.
const NOT_DONE: u8 = 1;

/// Result of a command for a cache, by its name.
struct Told {
    name: String,
    outcome: Outcome,
}

/// Sends commands to caches one after the other, up to the first without an answer. Returns the results, and the error
/// of that one.
fn give(process: &Process, commands: &[(&Cache, Action)], interrupt: &Interrupt) -> (Vec<Told>, Option<Unanswered>) {
    let mut told = Vec::new();
    for (cache, action) in commands {
        let (path, snapshot) = &process.found[cache.at];
        let command = ControlCommand::Slab { action: *action, cache: cache.id };
        match listing::command(path, snapshot.identity, command, || interrupt.has_come()) {
            Ok(outcome) => told.push(Told { name: cache.info.name.to_string(), outcome }),
            Err(error) => return (told, Some(error)),
        }
    }
    (told, None)
}

/// Returns why a command was not carried out.
fn why(errno: i32) -> Option<String> {
    Some(match errno {
        0 => return None,
        libc::ENOENT => "it does not exist any more".to_owned(),
        libc::EBUSY => "another thread empties it, or is stopped in a call".to_owned(),
        libc::EAGAIN => "too many commands wait, or no thread is available".to_owned(),
        libc::ECANCELED => "code of the program panicked: a slab is out of use".to_owned(),
        libc::EOPNOTSUPP => "its objects stay where they are".to_owned(),
        errno => std::io::Error::from_raw_os_error(errno).to_string(),
    })
}

/// Sends commands, writes their results as `text` formats them, and returns the exit status. Commands that are still
/// running or were not started are reported on standard error instead.
fn carry_out(
    process: &Process,
    commands: &[(&Cache, Action)],
    text: impl FnOnce(&[Told]) -> String,
    interrupt: &Interrupt,
) -> ExitCode {
    let (told, error) = give(process, commands, interrupt);
    let has_results = !told.is_empty() || error.is_none();
    let written = if has_results { write(&text(&told)) } else { ExitCode::SUCCESS };
    let Some(error) = error else {
        let is_done = told.iter().all(|told| told.outcome.errno == 0);
        return if is_done { written } else { ExitCode::from(NOT_DONE) };
    };
    if matches!(error, Unanswered::Stopped) {
        return interrupt.end();
    }
    let mut left = commands[told.len()..].iter().map(|(cache, _)| &*cache.info.name);
    let at = left.next().unwrap_or_default();
    let left: Vec<&str> = left.collect();
    let left = if left.is_empty() { String::new() } else { format!("; not begun: {}", left.join(", ")) };
    // A command that was started is not undone.
    let status = if matches!(error, Unanswered::InProgress) { NOT_DONE } else { 2 };
    fail(status, &format!("{at}: {}{left}", unanswered(&process.found, &error)))
}

/// Shrinks the caches with a name, or all selected ones.
pub fn shrink(options: &Slabinfo, process: &Process, name: Option<&str>, interrupt: &Interrupt) -> ExitCode {
    let named = match name.map(|name| process.named(name)).transpose() {
        Ok(named) => named.unwrap_or_else(|| process.caches.iter().collect()),
        Err(message) => return fail(2, &message),
    };
    let wanted = named.into_iter().filter(|cache| options.is_wanted(&cache.info));
    let commands: Vec<(&Cache, Action)> = wanted.map(|cache| (cache, Action::Shrink)).collect();
    let text = |told: &[Told]| match options.json {
        true => process.json(shrunk_json(told)),
        false => process.title() + &shrunk_text(told, Style::of_output(options.verbose)),
    };
    carry_out(process, &commands, text, interrupt)
}

fn freed(told: &[Told]) -> u64 {
    told.iter().fold(0, |sum, told| sum.saturating_add(told.outcome.shrunk.freed_bytes))
}

fn shrunk_text(told: &[Told], style: Style) -> String {
    if told.is_empty() {
        return "  no slab caches\n".to_owned();
    }
    let mut rows = vec![["NAME", "FREED", "MOVED", "SLABS", "SPACE"].map(str::to_owned).to_vec()];
    rows.extend(told.iter().map(|Told { name, outcome }| match why(outcome.errno) {
        Some(why) => vec![name.clone(), format!("not done: {why}")],
        None => {
            let shrunk = &outcome.shrunk;
            vec![
                name.clone(),
                Bytes(shrunk.freed_bytes).to_string(),
                shrunk.moved.to_string(),
                format!("{} -> {}", shrunk.slabs_before, shrunk.slabs_after),
                format!("{} -> {}", Bytes(shrunk.resident_before), Bytes(shrunk.resident_after)),
            ]
        }
    }));
    table::aligned(&rows, style, true) + &format!("  {} went back\n", Bytes(freed(told)))
}

fn shrunk_json(told: &[Told]) -> Value {
    let caches = told.iter().map(|Told { name, outcome }| {
        let shrunk = &outcome.shrunk;
        json!({
            "name": name, "freed_bytes": shrunk.freed_bytes, "moved": shrunk.moved, "slabs_before": shrunk.slabs_before,
            "slabs": shrunk.slabs_after, "resident_bytes_before": shrunk.resident_before,
            "resident_bytes": shrunk.resident_after, "error": why(outcome.errno),
        })
    });
    json!({"shrunk": caches.collect::<Vec<_>>(), "totals": {"freed_bytes": freed(told)}})
}

/// A ratio's name, its present value, and its command.
type Setting = (&'static str, fn(&Cache) -> u32, fn(u32) -> Action);

const USED: Setting = ("defrag_used_ratio", |cache| cache.info.defrag_used_ratio, Action::SetUsedRatio);
const REMOTE: Setting =
    ("remote_node_defrag_ratio", |cache| cache.info.remote_node_defrag_ratio, Action::SetRemoteRatio);

/// Sets ratios; sets none if a name is wrong.
pub fn set(options: &Slabinfo, process: &Process, interrupt: &Interrupt) -> ExitCode {
    let used = options.set_ratio.iter().map(|wanted| (USED, wanted));
    let wanted = used.chain(options.set_remote_ratio.iter().map(|wanted| (REMOTE, wanted)));
    let mut plan: Vec<(Setting, &Cache, u32)> = Vec::new();
    for (setting, (name, percent)) in wanted {
        match process.named(name) {
            Ok(caches) => plan.extend(caches.into_iter().map(|cache| (setting, cache, *percent))),
            Err(message) => return fail(2, &message),
        }
    }
    let commands: Vec<(&Cache, Action)> =
        plan.iter().map(|((_, _, action), cache, percent)| (*cache, action(*percent))).collect();
    let text = |told: &[Told]| {
        let rows = plan.iter().zip(told);
        if options.json {
            let set = rows.map(|(((name, before, _), cache, percent), told)| {
                json!({
                    "name": told.name, "setting": name, "before": before(cache), "percent": percent,
                    "error": why(told.outcome.errno),
                })
            });
            return process.json(json!({"set": set.collect::<Vec<_>>()}));
        }
        let lines = rows.map(|(((name, before, _), cache, percent), told)| match why(told.outcome.errno) {
            Some(why) => format!("  {}: {name} stays {} %: {why}\n", told.name, before(cache)),
            None => format!("  {}: {name} {percent} %, was {} %\n", told.name, before(cache)),
        });
        process.title() + &lines.collect::<String>()
    };
    carry_out(process, &commands, text, interrupt)
}
