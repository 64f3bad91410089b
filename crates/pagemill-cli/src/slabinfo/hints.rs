//! Suggestions in error messages: cache names that are similar to an unknown name, and processes that have a cache.

use super::{Process, Slabinfo};
use std::collections::BTreeSet;

/// Minimum similarity of a suggested name to the unknown name, from 0 to 1.
const MIN_NAME_SIMILARITY: f64 = 0.8;

/// Maximum number of existing cache names that a message lists.
const MAX_LISTED_NAMES: usize = 8;

/// Returns the suggestion for an unknown cache name: similar names or, if there are none, a list of the existing names.
pub fn name_suggestion<'name>(name: &str, known: impl Iterator<Item = &'name str>) -> String {
    let wanted = name.to_lowercase();
    let known: BTreeSet<&str> = known.collect();
    let similarity = |known: &str| {
        let known = known.to_lowercase();
        let is_part = !wanted.is_empty() && (known.contains(&wanted) || wanted.contains(&known));
        if is_part { 1.0 } else { strsim::jaro_winkler(&known, &wanted) }
    };
    let mut similar: Vec<(f64, &str)> = known
        .iter()
        .map(|known| (similarity(known), *known))
        .filter(|(similarity, _)| *similarity > MIN_NAME_SIMILARITY)
        .collect();
    similar.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    let words = |names: &[&str]| names.iter().map(|name| shell_word(name)).collect::<Vec<_>>();
    if !similar.is_empty() {
        let names: Vec<&str> = similar.iter().map(|(_, name)| *name).take(3).collect();
        return format!("; did you mean {}?", words(&names).join(" or "));
    }
    if known.is_empty() {
        return String::new();
    }
    let more = known.len().saturating_sub(MAX_LISTED_NAMES);
    let known: Vec<&str> = known.into_iter().take(MAX_LISTED_NAMES).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("; existing caches: {}{more}", words(&known).join(", "))
}

/// Returns a name as one word of a shell command, in quotes if necessary.
fn shell_word(name: &str) -> String {
    let is_plain = |letter: char| letter.is_alphanumeric() || "_-.:/+@%".contains(letter);
    let is_word = !name.is_empty() && name.chars().all(is_plain);
    if is_word { name.to_owned() } else { format!("'{}'", name.replace('\'', r"'\''")) }
}

impl Slabinfo {
    /// Returns the error message if the arguments are not a single process id.
    pub fn argument_error(&self) -> Option<String> {
        if let (Some(pid), Some(other)) = (&self.pid, &self.other) {
            let name = shell_word(if pid.parse::<u32>().is_ok() { other } else { pid });
            return Some(format!(
                "only one process can be given: {} or {}? A cache is given by an option: --shrink={name}, --report={name}",
                shell_word(pid),
                shell_word(other)
            ));
        }
        let name = self.pid.as_ref().filter(|pid| pid.parse::<u32>().is_err())?;
        let how = match self.shrink {
            Some(_) => {
                format!("`pagemill slabinfo PID --shrink={}` shrinks the caches with this name", shell_word(name))
            }
            None => format!("`pagemill slabinfo --report={}` shows the caches with this name", shell_word(name)),
        };
        Some(format!("{name} is not a process id; {how}"))
    }
}

/// Returns the error message for `--shrink` without a process id. The message lists the processes that have the caches.
pub fn missing_process_error(name: Option<&str>, processes: &[Process]) -> String {
    let name = name.map(pagemill_slab::shown_name);
    let option = name.as_ref().map_or_else(|| "--shrink".to_owned(), |name| format!("--shrink={}", shell_word(name)));
    let is_it = |process: &&Process| name.as_ref().is_none_or(|name| process.caches_named(name).is_ok());
    let found: Vec<String> =
        processes.iter().filter(is_it).map(|process| process.title().trim_end().to_owned()).collect();
    let rest = match (&name, found.is_empty()) {
        (_, false) => format!("; PID can be that of {}", found.join(", ")),
        (Some(name), true) => {
            let names = processes.iter().flat_map(|process| process.cache_names());
            format!("; no process has a slab cache {}{}", shell_word(name), name_suggestion(name, names))
        }
        (None, true) => "; no process of yours has slab caches".to_owned(),
    };
    format!("no process is given: use `pagemill slabinfo PID {option}`{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For an unknown cache name, similar names must be suggested. If there are none, existing names must be listed.
    #[test]
    fn similar_names_are_suggested() {
        let instead = |name: &str| name_suggestion(name, ["entries", "nodes", "boxes", "red line"].into_iter());
        assert_eq!(instead("ndoes"), "; did you mean nodes?");
        assert_eq!(instead("Entry"), "; did you mean entries?");
        assert_eq!(instead("line"), "; did you mean 'red line'?");
        assert_eq!(instead("xyz"), "; existing caches: boxes, entries, nodes, 'red line'");
        assert_eq!(name_suggestion("xyz", std::iter::empty()), "");
        let many: Vec<String> = (0..20).map(|number| format!("a{number:02}")).collect();
        assert!(name_suggestion("xyz", many.iter().map(String::as_str)).ends_with("a07 and 12 more"));
        assert_eq!([shell_word("it's"), shell_word("")], [r"'it'\''s'", "''"]);
    }
}
