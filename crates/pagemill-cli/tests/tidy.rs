//! The house rules that a program can check, over the source of the whole workspace.
//!
//! The rules stand in ARCHITECTURE.md and CONVENTIONS.md. Comments and strings
//! are blanked before code is looked at; lines keep their numbers.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Most lines of a file.
const MAX_FILE_LINES: usize = 800;

/// Lines of a function that are mentioned, and that fail.
const LONG_FN_LINES: usize = 70;
const MAX_FN_LINES: usize = 100;

/// Modules of `crates/pagemill/src`, each with its layer: a module names lower ones and itself only.
const LAYERS: &[(&str, usize)] = &[
    ("units", 0),
    ("error", 1),
    ("trace", 2),
    ("stats", 3),
    ("sync", 3),
    ("epoch", 3),
    ("arena", 4),
    ("reclaim", 5),
    ("xarray", 5),
    ("folio", 5),
    ("store", 5),
    ("heap", 6),
    ("volatile", 7),
    ("mapping", 7),
    ("slab", 7),
    ("published", 8),
    ("listing", 9),
    ("pagemill", 10),
    ("process", 11),
];

/// Who may name whom against the order, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[("trace", "stats", "the ring of events lies on the page of figures")];

/// Bounds of the list in ARCHITECTURE.md.
const LIST_START: &str = "<!-- unsafe files -->";
const LIST_END: &str = "<!-- end -->";

const ALLOW_UNSAFE: &str = "#![allow(unsafe_code)]";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A file of the workspace: its path from the root, and its text.
struct File {
    path: String,
    text: String,
}

impl File {
    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn is_in_crates(&self) -> bool {
        self.path.starts_with("crates/")
    }

    /// Part of a product, not of its tests.
    fn is_product(&self) -> bool {
        self.is_rust() && self.is_in_crates() && !self.path.contains("/tests/")
    }

    fn code(&self) -> String {
        blank_comments_and_strings(&self.text)
    }
}

/// What belongs to the repository, tracked or about to be; without git all that is not built.
fn files() -> Vec<File> {
    let root = root();
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(&root)
        .output()
        .ok()
        .filter(|output| output.status.success())
        .map(|output| String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect());
    let mut paths: Vec<String> = listed.unwrap_or_else(|| walk(&root, ""));
    paths.sort();
    let read = |path: String| Some(File { text: fs::read_to_string(root.join(&path)).ok()?, path });
    let files: Vec<File> = paths.into_iter().filter_map(read).collect();
    assert!(files.iter().any(|file| file.path == "crates/pagemill/src/lib.rs"), "the workspace was not found");
    files
}

fn walk(root: &Path, below: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(root.join(below)).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("target") || name == ".git" {
            continue;
        }
        let path = if below.is_empty() { name } else { format!("{below}/{name}") };
        if entry.file_type().unwrap().is_dir() { paths.extend(walk(root, &path)) } else { paths.push(path) }
    }
    paths
}

/// The text with comments, strings and characters replaced by spaces; newlines stay.
fn blank_comments_and_strings(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skipped = len_of_comment(rest).or_else(|| len_of_literal(rest, &code));
        let len = skipped.unwrap_or(first.len_utf8());
        let (part, after) = rest.split_at(len);
        if skipped.is_some() {
            code.extend(part.chars().map(|character| if character == '\n' { '\n' } else { ' ' }));
        } else {
            code.push_str(part);
        }
        rest = after;
    }
    code
}

fn len_of_comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    let mut depth = usize::from(rest.starts_with("/*"));
    let mut at = 2;
    while depth > 0 && at < rest.len() {
        let step = rest.as_bytes().get(at..at + 2);
        depth = if step == Some(b"/*") { depth + 1 } else { depth - usize::from(step == Some(b"*/")) };
        at += if matches!(step, Some(b"/*" | b"*/")) { 2 } else { 1 };
    }
    rest.starts_with("/*").then_some(at.min(rest.len()))
}

/// Bytes of the string or character that starts here, if one does; `before` is the code so far.
fn len_of_literal(rest: &str, before: &str) -> Option<usize> {
    let is_in_word = before.ends_with(|last: char| last.is_alphanumeric() || last == '_');
    if !is_in_word && let Some(raw) = rest.trim_start_matches(['b', 'c']).strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            let end = format!("\"{}", "#".repeat(hashes));
            let prefix = rest.len() - raw.len() + hashes + 1;
            return Some(rest[prefix..].find(&end).map_or(rest.len(), |at| prefix + at + end.len()));
        }
    }
    let quote = rest.chars().next()?;
    let is_lifetime = quote == '\'' && !rest[1..].starts_with('\\') && rest.chars().nth(2) != Some('\'');
    if !matches!(quote, '"' | '\'') || is_lifetime {
        return None;
    }
    let mut characters = rest.char_indices().skip(1);
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => drop(characters.next()),
            _ if character == quote => return Some(at + 1),
            _ => {}
        }
    }
    Some(rest.len())
}

/// Code without the modules of tests, which stand at a file's end.
fn without_tests(code: &str) -> &str {
    let mut at = 0;
    let mut lines = code.split_inclusive('\n').peekable();
    while let Some(line) = lines.next() {
        let is_test = line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test");
        if is_test && lines.peek().is_some_and(|next| next.starts_with("mod ")) {
            return &code[..at];
        }
        at += line.len();
    }
    code
}

/// Places where `word` stands as a word of its own.
fn words<'code>(code: &'code str, word: &'code str) -> impl Iterator<Item = usize> + 'code {
    let is_part = |character: char| character.is_alphanumeric() || character == '_';
    code.match_indices(word)
        .filter(move |(at, _)| !code[..*at].ends_with(is_part) && !code[at + word.len()..].starts_with(is_part))
        .map(|(at, _)| at)
}

fn line_of(code: &str, at: usize) -> usize {
    code[..at].matches('\n').count() + 1
}

fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "{} problem(s):\n  {}\n", problems.len(), problems.join("\n  "));
}

/// First names of the paths that start at the crate's root, with their places.
fn crate_names(code: &str) -> Vec<(usize, &str)> {
    let name_at = |at: usize| {
        let rest = &code[at..];
        &rest[..rest.find(|character: char| !character.is_alphanumeric() && character != '_').unwrap_or(rest.len())]
    };
    let mut names = Vec::new();
    for at in words(code, "crate").filter(|at| code[at + 5..].starts_with("::")) {
        let start = at + 7;
        if !code[start..].starts_with('{') {
            names.push((start, name_at(start)));
            continue;
        }
        // `crate::{a, b::{c, d}, e}`: the names at depth one.
        let mut depth = 0;
        for (offset, character) in code[start..].char_indices() {
            match character {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                break;
            }
            let is_start = code[..start + offset].trim_end().ends_with(['{', ',']) && !character.is_whitespace();
            if depth == 1 && is_start && character != '{' {
                names.push((start + offset, name_at(start + offset)));
            }
        }
    }
    names
}

/// Modules of the core name lower modules only.
#[test]
fn modules_use_lower_ones_only() {
    let layer = |name: &str| LAYERS.iter().find(|(module, _)| *module == name).map(|(_, layer)| *layer);
    let mut problems = Vec::new();
    for file in files() {
        let Some(inside) = file.path.strip_prefix("crates/pagemill/src/") else { continue };
        let module = inside.split(['/', '.']).next().unwrap();
        if module == "lib" {
            continue;
        }
        let Some(own) = layer(module) else {
            problems.push(format!("{}: module {module} has no layer; give it one in tidy", file.path));
            continue;
        };
        let code = file.code();
        for (at, name) in crate_names(without_tests(&code)) {
            let is_exception = EXCEPTIONS.iter().any(|(who, whom, _)| (*who, *whom) == (module, name));
            let is_lower = name == module || layer(name).is_some_and(|layer| layer < own);
            if !is_lower && !is_exception {
                problems.push(format!("{}:{}: {module} names {name}", file.path, line_of(&code, at)));
            }
        }
    }
    assert_none(&problems);
}

/// `unsafe` stands only where it is allowed, with a reason beside it, and nowhere is it allowed without need.
#[test]
fn unsafe_is_allowed_with_a_reason() {
    let mut problems = Vec::new();
    for file in files().iter().filter(|file| file.is_rust() && file.is_in_crates()) {
        let code = file.code();
        let uses = words(&code, "unsafe").next();
        let allowed = file.text.lines().find(|line| line.starts_with(ALLOW_UNSAFE));
        let reason = allowed.and_then(|line| line[ALLOW_UNSAFE.len()..].trim().strip_prefix("// "));
        match (uses, allowed, reason) {
            (Some(at), None, _) => problems.push(format!("{}:{}: unsafe", file.path, line_of(&code, at))),
            (None, Some(_), _) => problems.push(format!("{}: allows unsafe without need", file.path)),
            (_, Some(_), None) => problems.push(format!("{}: allows unsafe without a reason", file.path)),
            _ => {}
        }
    }
    assert_none(&problems);
}

/// The product's files that hold `unsafe` are those that ARCHITECTURE.md lists.
#[test]
fn unsafe_files_are_listed() {
    let is_unsafe = |file: &&File| file.is_product() && words(&file.code(), "unsafe").next().is_some();
    let files = files();
    let found: BTreeSet<&str> = files.iter().filter(is_unsafe).map(|file| file.path.as_str()).collect();
    let text = files.iter().find(|file| file.path == "ARCHITECTURE.md").map_or("", |file| &file.text);
    let section = text.split_once(LIST_START).and_then(|(_, rest)| rest.split_once(LIST_END)).map_or("", |part| part.0);
    let listed: BTreeSet<&str> =
        section.lines().filter_map(|line| line.split('`').nth(1)).filter(|path| path.ends_with(".rs")).collect();
    if found != listed {
        let mut list = String::new();
        found.iter().for_each(|path| writeln!(list, "- `{path}`").unwrap());
        let missing: Vec<_> = found.difference(&listed).collect();
        let extra: Vec<_> = listed.difference(&found).collect();
        panic!(
            "ARCHITECTURE.md lists other files with unsafe code than there are (missing: {missing:?}, \
             extra: {extra:?}). The list to paste:\n\n{LIST_START}\n\n{list}\n{LIST_END}\n"
        );
    }
}

#[test]
fn files_are_short() {
    let long = |file: &File| {
        let lines = file.text.lines().count();
        (lines > MAX_FILE_LINES).then(|| format!("{}: {lines} lines; at most {MAX_FILE_LINES}", file.path))
    };
    assert_none(&files().iter().filter(|file| file.is_rust()).filter_map(long).collect::<Vec<_>>());
}

/// Functions with a body: line, name, lines from the signature to the closing brace.
fn functions(code: &str) -> Vec<(usize, &str, usize)> {
    let mut functions = Vec::new();
    for at in words(code, "fn") {
        let signature = &code[at..];
        let name_end = signature[3..].find(|character: char| !character.is_alphanumeric() && character != '_');
        let name = &signature[3..3 + name_end.unwrap_or(0)];
        let Some(open) = signature.find(['{', ';']).filter(|open| signature[*open..].starts_with('{')) else {
            continue;
        };
        let mut depth = 0;
        let end = signature[open..].char_indices().find(|(_, character)| {
            depth += match character {
                '{' => 1,
                '}' => -1,
                _ => 0,
            };
            depth == 0
        });
        let end = end.map_or(signature.len(), |(end, _)| open + end);
        if !name.is_empty() {
            functions.push((line_of(code, at), name, signature[..end].matches('\n').count() + 1));
        }
    }
    functions
}

/// A function over 70 lines is mentioned, one over 100 fails.
#[test]
fn functions_are_short() {
    let mut problems = Vec::new();
    for file in files().iter().filter(|file| file.is_rust()) {
        for (line, name, lines) in functions(&file.code()) {
            if lines > MAX_FN_LINES {
                problems.push(format!("{}:{line}: {name} has {lines} lines; at most {MAX_FN_LINES}", file.path));
            } else if lines > LONG_FN_LINES {
                println!("warning: {}:{line}: {name} has {lines} lines; {LONG_FN_LINES} fit a screen", file.path);
            }
        }
    }
    assert_none(&problems);
}

/// The OS page and the block are named, not written as numbers.
#[test]
fn page_and_block_sizes_are_named() {
    let mut problems = Vec::new();
    for file in files().iter().filter(|file| file.is_product() && file.path.starts_with("crates/pagemill/src/")) {
        if file.path.ends_with("/units.rs") {
            continue;
        }
        let code = file.code();
        let code = without_tests(&code);
        for literal in ["4096", "4_096", "0x1000", "2097152", "2_097_152", "2 << 20"] {
            for at in words(code, literal) {
                problems.push(format!("{}:{}: {literal}", file.path, line_of(code, at)));
            }
        }
    }
    assert_none(&problems);
}

/// Nothing is left to do later, and nothing prints for its author only.
#[test]
fn nothing_is_left_over() {
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    let macros = [concat!("to", "do!"), concat!("unimple", "mented!"), concat!("db", "g!")];
    let mut problems = Vec::new();
    for file in files().iter().filter(|file| file.is_in_crates()) {
        for (number, line) in file.text.lines().enumerate() {
            let found = marks.iter().find(|mark| words(line, mark).next().is_some());
            let found = found.or_else(|| macros.iter().find(|word| line.contains(**word)));
            if let Some(found) = found {
                problems.push(format!("{}:{}: {found}", file.path, number + 1));
            }
        }
    }
    assert_none(&problems);
}

/// Names of the tests in a file.
fn tests_in(text: &str) -> Vec<&str> {
    let after_marks = text.split("#[test]\n").skip(1);
    let name = |after: &'_ str| -> Option<(usize, usize)> {
        let start = after.find("fn ")? + 3;
        Some((start, start + after[start..].find('(')?))
    };
    after_marks.filter_map(|after| name(after).map(|(start, end)| &after[start..end])).collect()
}

/// Each cell of the table of operations on a folio names a test, and what that chapter calls a test is one.
#[test]
fn the_table_of_locks_is_tested() {
    let files = files();
    let core = files.iter().filter(|file| file.is_rust() && file.path.starts_with("crates/pagemill/"));
    let tests: BTreeSet<&str> = core.flat_map(|file| tests_in(&file.text)).collect();
    let text = files.iter().find(|file| file.path == "docs/states-and-locks.md").map_or("", |file| &file.text);
    let chapter = text.split_once("Operation by operation").and_then(|(_, rest)| rest.split_once("\n## "));
    let chapter = chapter.expect("the chapter is there").0;
    let quoted = |part: &'_ str| -> Vec<String> { part.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let is_name =
        |word: &String| word.contains('_') && word.chars().all(|letter| letter.is_ascii_lowercase() || letter == '_');
    let missing = quoted(chapter).into_iter().filter(|word| is_name(word) && !tests.contains(word.as_str()));
    let mut problems: Vec<String> = missing.map(|word| format!("there is no test {word}")).collect();
    let rows: Vec<Vec<&str>> = chapter
        .lines()
        .filter(|line| line.starts_with("| "))
        .map(|line| line.trim_matches('|').split('|').collect())
        .collect();
    assert!(rows.len() == 6 && rows.iter().all(|row| row.len() == 6), "five operations by five");
    for row in &rows[1..] {
        for (cell, head) in row.iter().zip(&rows[0]).skip(1) {
            if !quoted(cell).iter().any(is_name) {
                problems.push(format!("no test for{}, then{head}", row[0]));
            }
        }
    }
    assert_none(&problems);
}

/// No file tells where on some machine it was made.
#[test]
fn no_file_names_a_machine() {
    let paths = ["work", "root", "home"].map(|folder| format!("/{folder}/"));
    let mut problems = Vec::new();
    for file in &files() {
        for (number, line) in file.text.lines().enumerate() {
            if let Some(path) = paths.iter().find(|path| line.contains(*path)) {
                problems.push(format!("{}:{}: {path}", file.path, number + 1));
            }
        }
    }
    assert_none(&problems);
}

/// Every package obeys the workspace's lints.
#[test]
fn every_package_has_the_lints() {
    let mut problems = Vec::new();
    for file in files().iter().filter(|file| file.is_in_crates() && file.path.ends_with("/Cargo.toml")) {
        let section = file.text.split_once("\n[lints]\n").map_or("", |(_, rest)| rest);
        let section = section.split("\n[").next().unwrap_or("");
        if !section.lines().any(|line| line.trim() == "workspace = true") {
            problems.push(format!("{}: [lints] workspace = true is missing", file.path));
        }
    }
    assert_none(&problems);
}

/// The checker reads source as the compiler does: what is in comments and strings is not code.
#[test]
fn comments_and_strings_are_no_code() {
    let text = "fn a<'x>() { \"unsafe\"; 'u'; '\\''; r#\"unsafe \" \"#; b\"unsafe\" } // unsafe\n/* unsafe /* */ unsafe */ unsafe";
    let code = blank_comments_and_strings(text);
    assert_eq!(words(&code, "unsafe").collect::<Vec<_>>(), [text.rfind("unsafe").unwrap()]);
    assert!(code.contains("fn a<'x>() {") && code.len() == text.len());
    assert_eq!(functions(&code), [(1, "a", 1)]);
    let names: Vec<&str> =
        crate_names("use crate::{b::{c, d}, e}; crate::f()").into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, ["b", "e", "f"]);
}
