//! Sends commands to a process, which then shrinks its slab caches or changes their ratios.

use super::table::{self, Style};
use super::{Cache, Process, Slabinfo, unanswered_message, write_to_stdout};
use crate::fail;
use crate::requests::Interrupt;
use pagemill_core::listing;
use pagemill_core::listing::{Action, ControlCommand, Outcome, Unanswered};
use pagemill_core::units::Bytes;
use serde_json::{Value, json};
use std::process::ExitCode;

/// Exit status if the process refused a command, or is still executing it.
const EXIT_STATUS_NOT_DONE: u8 = 1;

struct CommandResult {
    name: String,
    outcome: Outcome,
}

/// Sends commands for slab caches one after the other, until a command gets no answer. Returns the results. For an
/// unanswered command, also returns the error.
fn send_commands(
    process: &Process,
    commands: &[(&Cache, Action)],
    interrupt: &Interrupt,
) -> (Vec<CommandResult>, Option<Unanswered>) {
    let mut results = Vec::new();
    for (cache, action) in commands {
        let (path, snapshot) = &process.found[cache.at];
        let command = ControlCommand::Slab { action: *action, cache: cache.id };
        match listing::command(path, snapshot.identity, command, || interrupt.has_signal()) {
            Ok(outcome) => results.push(CommandResult { name: cache.info.name.to_string(), outcome }),
            Err(error) => return (results, Some(error)),
        }
    }
    (results, None)
}

/// Returns why a command was not executed, according to the error number of its result; `None` if it was executed.
fn failure_text(errno: i32) -> Option<String> {
    Some(match errno {
        0 => return None,
        libc::ENOENT => "the cache does not exist any more".to_owned(),
        libc::ENOSYS => "the program accepts no commands on its caches (feature `control` of pagemill)".to_owned(),
        libc::EBUSY => "another thread defragments the cache, or is stopped in a call".to_owned(),
        libc::EAGAIN => "too many commands wait, or no thread is available".to_owned(),
        libc::ECANCELED => "code of the program panicked, so a slab is out of use".to_owned(),
        libc::EOPNOTSUPP => "its objects stay where they are".to_owned(),
        errno => std::io::Error::from_raw_os_error(errno).to_string(),
    })
}

/// Sends commands, writes their results to standard output in the form that `text` returns, and returns the exit
/// status. A command that is still running, and commands that were not sent, are reported on standard error.
fn run_commands(
    process: &Process,
    commands: &[(&Cache, Action)],
    text: impl FnOnce(&[CommandResult]) -> String,
    interrupt: &Interrupt,
) -> ExitCode {
    let (results, error) = send_commands(process, commands, interrupt);
    assert!(results.len() <= commands.len());
    assert_eq!(error.is_none(), results.len() == commands.len(), "an error ends the commands");
    let has_results = !results.is_empty() || error.is_none();
    let written = if has_results { write_to_stdout(&text(&results)) } else { ExitCode::SUCCESS };
    let Some(error) = error else {
        let is_done = results.iter().all(|result| result.outcome.errno == 0);
        return if is_done { written } else { ExitCode::from(EXIT_STATUS_NOT_DONE) };
    };
    if matches!(error, Unanswered::Stopped) {
        return interrupt.end();
    }
    let mut left = commands[results.len()..].iter().map(|(cache, _)| &*cache.info.name);
    let at = left.next().unwrap_or_default();
    let left: Vec<&str> = left.collect();
    let left = if left.is_empty() { String::new() } else { format!("; not begun: {}", left.join(", ")) };
    // A command that was sent cannot be undone.
    let status = if matches!(error, Unanswered::InProgress) { EXIT_STATUS_NOT_DONE } else { 2 };
    fail(status, &format!("{at}: {}{left}", unanswered_message(&process.found, &error)))
}

/// Shrinks all slab caches with this name or, without a name, all selected slab caches.
pub fn shrink(options: &Slabinfo, process: &Process, name: Option<&str>, interrupt: &Interrupt) -> ExitCode {
    let named = match name.map(|name| process.caches_named(name)).transpose() {
        Ok(named) => named.unwrap_or_else(|| process.caches.iter().collect()),
        Err(message) => return fail(2, &message),
    };
    let wanted = named.into_iter().filter(|cache| options.is_selected(&cache.info));
    let commands: Vec<(&Cache, Action)> = wanted.map(|cache| (cache, Action::Shrink)).collect();
    let text = |results: &[CommandResult]| match options.json {
        true => process.json(shrink_results_json(results)),
        false => process.title() + &shrink_results_text(results, Style::of_output(options.verbose)),
    };
    run_commands(process, &commands, text, interrupt)
}

/// Moves objects of all slab caches with this name between NUMA nodes, as `action` says.
pub fn move_between_nodes(
    options: &Slabinfo,
    process: &Process,
    name: &str,
    action: Action,
    interrupt: &Interrupt,
) -> ExitCode {
    let named = match process.caches_named(name) {
        Ok(named) => named,
        Err(message) => return fail(2, &message),
    };
    if let Action::Move { from, to } = action {
        let nodes = named.iter().map(|cache| cache.info.nodes.len()).min().unwrap_or(0);
        if let Some(wrong) = [from, to].into_iter().find(|node| usize::from(*node) >= nodes) {
            let last = nodes.saturating_sub(1);
            return fail(2, &format!("process {} has no NUMA node {wrong}; the last one is {last}", process.pid()));
        }
    }
    let commands: Vec<(&Cache, Action)> = named.into_iter().map(|cache| (cache, action)).collect();
    let text = |results: &[CommandResult]| {
        if options.json {
            let rows = results.iter().map(|CommandResult { name, outcome }| {
                json!({"name": name, "moved": outcome.shrunk.moved, "error": failure_text(outcome.errno)})
            });
            return process.json(json!({"moved": rows.collect::<Vec<_>>()}));
        }
        let rows = results.iter().map(|CommandResult { name, outcome }| match failure_text(outcome.errno) {
            Some(why) => format!("  {name}: not done: {why}\n"),
            None => format!("  {name}: {} objects moved\n", outcome.shrunk.moved),
        });
        process.title() + &rows.collect::<String>()
    };
    run_commands(process, &commands, text, interrupt)
}

/// Shrinks all slab caches of a process. Returns the bytes freed.
///
/// # Errors
///
/// A message that names the first cache that was not shrunk; `None` if a signal interrupted the wait.
pub fn shrink_caches(process: &Process, interrupt: &Interrupt) -> Result<u64, Option<String>> {
    let commands: Vec<(&Cache, Action)> = process.caches.iter().map(|cache| (cache, Action::Shrink)).collect();
    let (results, error) = send_commands(process, &commands, interrupt);
    match error {
        None => {}
        Some(Unanswered::Stopped) => return Err(None),
        Some(error) => {
            let name = commands[results.len()..].first().map_or("", |(cache, _)| &*cache.info.name);
            return Err(Some(format!("{name}: {}", unanswered_message(&process.found, &error))));
        }
    }
    // A cache that was dropped meanwhile has no memory left.
    let refused = results.iter().filter(|result| result.outcome.errno != libc::ENOENT);
    match refused.into_iter().find_map(|result| Some((&result.name, failure_text(result.outcome.errno)?))) {
        Some((name, why)) => Err(Some(format!("{name}: {why}"))),
        None => Ok(total_freed_bytes(&results)),
    }
}

fn total_freed_bytes(results: &[CommandResult]) -> u64 {
    results.iter().fold(0, |sum, result| sum.saturating_add(result.outcome.shrunk.freed_bytes))
}

fn shrink_results_text(results: &[CommandResult], style: Style) -> String {
    if results.is_empty() {
        return "  no slab caches\n".to_owned();
    }
    let mut rows = vec![["NAME", "FREED", "MOVED", "SLABS", "SPACE"].map(str::to_owned).to_vec()];
    rows.extend(results.iter().map(|CommandResult { name, outcome }| match failure_text(outcome.errno) {
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
    table::aligned_rows(&rows, style, true) + &format!("  {} returned\n", Bytes(total_freed_bytes(results)))
}

fn shrink_results_json(results: &[CommandResult]) -> Value {
    let caches = results.iter().map(|CommandResult { name, outcome }| {
        let shrunk = &outcome.shrunk;
        json!({
            "name": name, "freed_bytes": shrunk.freed_bytes, "moved": shrunk.moved, "slabs_before": shrunk.slabs_before,
            "slabs": shrunk.slabs_after, "resident_bytes_before": shrunk.resident_before,
            "resident_bytes": shrunk.resident_after, "error": failure_text(outcome.errno),
        })
    });
    json!({"shrunk": caches.collect::<Vec<_>>(), "totals": {"freed_bytes": total_freed_bytes(results)}})
}

/// A ratio of a slab cache: its name, the function that returns its current value, and the command that sets it.
type RatioSetting = (&'static str, fn(&Cache) -> u32, fn(u32) -> Action);

const USED_RATIO: RatioSetting = ("defrag_used_ratio", |cache| cache.info.defrag_used_ratio, Action::SetUsedRatio);
const REMOTE_RATIO: RatioSetting =
    ("remote_node_defrag_ratio", |cache| cache.info.remote_node_defrag_ratio, Action::SetRemoteRatio);

/// Sets the ratios of slab caches as the options say. Sets no ratio if one of the names is unknown.
pub fn set_ratios(options: &Slabinfo, process: &Process, interrupt: &Interrupt) -> ExitCode {
    let used = options.set_ratio.iter().map(|wanted| (USED_RATIO, wanted));
    let wanted = used.chain(options.set_remote_ratio.iter().map(|wanted| (REMOTE_RATIO, wanted)));
    let mut plan: Vec<(RatioSetting, &Cache, u32)> = Vec::new();
    for (setting, (name, percent)) in wanted {
        match process.caches_named(name) {
            Ok(caches) => plan.extend(caches.into_iter().map(|cache| (setting, cache, *percent))),
            Err(message) => return fail(2, &message),
        }
    }
    let commands: Vec<(&Cache, Action)> =
        plan.iter().map(|((_, _, action), cache, percent)| (*cache, action(*percent))).collect();
    assert_eq!(commands.len(), plan.len());
    let text = |results: &[CommandResult]| {
        let rows = plan.iter().zip(results);
        if options.json {
            let set = rows.map(|(((name, before, _), cache, percent), result)| {
                json!({
                    "name": result.name, "setting": name, "before": before(cache), "percent": percent,
                    "error": failure_text(result.outcome.errno),
                })
            });
            return process.json(json!({"set": set.collect::<Vec<_>>()}));
        }
        let lines =
            rows.map(|(((name, before, _), cache, percent), result)| match failure_text(result.outcome.errno) {
                Some(why) => format!("  {}: {name} stays {} %: {why}\n", result.name, before(cache)),
                None => format!("  {}: {name} {percent} %, was {} %\n", result.name, before(cache)),
            });
        process.title() + &lines.collect::<String>()
    };
    run_commands(process, &commands, text, interrupt)
}
