//! Checks the rules of ARCHITECTURE.md and CONVENTIONS.md that a program can check, over the whole workspace.
//!
//! The checks of code replace comments and strings by spaces first. Line numbers therefore stay the same.

#[path = "tidy/imports.rs"]
mod imports;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Maximum number of lines of a source file.
const MAX_FILE_LINES: usize = 800;

/// Number of lines of a function above which the test prints a warning.
const LONG_FN_LINES: usize = 70;
/// Number of lines of a function above which the test fails.
const MAX_FN_LINES: usize = 100;

/// The crates of the library, from the lowest to the highest layer, without the prefix `pagemill-`. Cargo enforces
/// their order. `pagemill`, which is not in the list, re-exports their public items.
const LIBRARY_CRATES: &[&str] = &["core", "heap", "volatile", "xarray", "store", "slab", "cache", "ramfs"];

/// Modules of `crates/pagemill-core/src`, each with its layer. The code of a module may name the module itself and
/// modules of lower layers.
const CORE_LAYERS: &[(&str, usize)] = &[
    ("units", 0),
    ("error", 1),
    ("trace", 2),
    ("stats", 3),
    ("sync", 3),
    ("epoch", 3),
    ("callback", 4),
    ("metrics", 4),
    ("arena", 4),
    ("reclaim", 5),
    ("published", 6),
    ("listing", 7),
    ("instance", 8),
];

/// Exceptions from the layers of the core. Each has a module, another module that it may name although the layers
/// forbid it, and the reason.
const LAYER_EXCEPTIONS: &[(&str, &str, &str)] =
    &[("trace", "stats", "the ring of events is on the page of the counters")];

/// Pronouns for people, which CONVENTIONS.md rejects. A comment names the thread, the caller or the function instead.
const PERSON_PRONOUNS: &[&str] = &["who", "whom", "whoever", "somebody", "nobody", "anybody"];

/// Maximum number of [`PERSON_PRONOUNS`] in all comments and Markdown files together. CONVENTIONS.md quotes some.
const MAX_PERSON_PRONOUNS: usize = 5;

/// Files that may contain retired terms.
const RETIRED_ALLOWED: &[&str] = &[GLOSSARY, "CONVENTIONS.md"];

/// Identifiers that may contain a retired term, because they are part of an interface. The only one is the name of a
/// counter.
const RETIRED_NAMES: &[&str] = &["books_mended", "BooksMended"];

const GLOSSARY: &str = "docs/glossary.md";

const ALLOW_UNSAFE: &str = "#![allow(unsafe_code)]";

fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A file of the workspace: its path, relative to the root of the workspace, and its text.
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

    /// Returns whether the file is part of a product, which integration tests are not.
    fn is_product(&self) -> bool {
        self.is_rust() && self.is_in_crates() && !self.path.contains("/tests/")
    }

    /// Returns whether the file belongs to a crate of the library, and to the folder `inside` of that crate.
    fn is_in_library(&self, inside: &str) -> bool {
        let Some(rest) = self.path.strip_prefix("crates/pagemill") else { return false };
        let name = rest.split('/').next().unwrap_or("");
        let is_crate = name.is_empty() || name.strip_prefix('-').is_some_and(|name| LIBRARY_CRATES.contains(&name));
        is_crate && rest[name.len()..].starts_with(inside)
    }

    fn code(&self) -> String {
        blank_comments_and_strings(&self.text)
    }

    /// Returns the text that is written for readers: all text of a Markdown file, or the comments of a Rust file
    /// without their code examples.
    fn prose(&self) -> String {
        if self.path.ends_with(".md") {
            self.text.clone()
        } else if self.is_rust() && self.is_in_crates() {
            comments_without_code(&self.text)
        } else {
            String::new()
        }
    }
}

/// Returns the files of the repository that git does not ignore. Without git, returns all files except build output.
fn files() -> Vec<File> {
    let root = workspace_root();
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

/// The kinds of text in a Rust source file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TextKind {
    Code,
    Comment,
    /// A string or character literal.
    Literal,
}

/// Replaces comments, strings and characters by spaces. Keeps newlines, so that line numbers stay the same.
fn blank_comments_and_strings(text: &str) -> String {
    blank_all_but(TextKind::Code, text)
}

/// Replaces all text except that of the kind `kept` by spaces. Keeps newlines.
fn blank_all_but(kept: TextKind, text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let before = &text[..text.len() - rest.len()];
        let comment = len_of_comment(rest).map(|len| (TextKind::Comment, len));
        let literal = || len_of_literal(rest, before).map(|len| (TextKind::Literal, len));
        let (part, len) = comment.or_else(literal).unwrap_or((TextKind::Code, first.len_utf8()));
        let (piece, after) = rest.split_at(len);
        if part == kept {
            result.push_str(piece);
        } else {
            result.extend(piece.chars().map(|character| if character == '\n' { '\n' } else { ' ' }));
        }
        rest = after;
    }
    result
}

/// Returns the comments of a Rust source file, without the code blocks of its documentation.
fn comments_without_code(text: &str) -> String {
    let comments = blank_all_but(TextKind::Comment, text);
    let mut is_code = false;
    let is_prose = |line: &&str| {
        is_code ^= line.trim_start().trim_start_matches(['/', '!']).trim_start().starts_with("```");
        !is_code
    };
    comments.lines().filter(is_prose).collect::<Vec<_>>().join("\n")
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

/// Returns the length of the string or character literal at the start of `rest`; `None` if `rest` starts with other
/// text. `before` is the text that precedes `rest`.
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

/// Returns the code that precedes the test module, which must be at the end of the file.
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

/// Returns the offsets in `code` at which `word` occurs as a whole word.
fn word_offsets<'code>(code: &'code str, word: &'code str) -> impl Iterator<Item = usize> + 'code {
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

/// Returns the first name after `crate::` in each path in the code, with its offset.
fn crate_names(code: &str) -> Vec<(usize, &str)> {
    let name_at = |at: usize| {
        let rest = &code[at..];
        &rest[..rest.find(|character: char| !character.is_alphanumeric() && character != '_').unwrap_or(rest.len())]
    };
    let mut names = Vec::new();
    for at in word_offsets(code, "crate").filter(|at| code[at + 5..].starts_with("::")) {
        let start = at + 7;
        if !code[start..].starts_with('{') {
            names.push((start, name_at(start)));
            continue;
        }
        // In `crate::{a, b::{c, d}, e}` the names at depth one are `a`, `b` and `e`.
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

/// Modules of the crate `pagemill-core` must name only modules of lower layers.
#[test]
fn modules_name_only_lower_modules() {
    let layer = |name: &str| CORE_LAYERS.iter().find(|(module, _)| *module == name).map(|(_, layer)| *layer);
    let mut problems = Vec::new();
    for file in files() {
        let Some(inside) = file.path.strip_prefix("crates/pagemill-core/src/") else { continue };
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
            let is_exception = LAYER_EXCEPTIONS.iter().any(|(from, to, _)| (*from, *to) == (module, name));
            let is_lower = name == module || layer(name).is_some_and(|layer| layer < own);
            if !is_lower && !is_exception {
                problems.push(format!("{}:{}: {module} names {name}", file.path, line_of(&code, at)));
            }
        }
    }
    assert_none(&problems);
}

/// `unsafe` compiles only in files with `#![allow(unsafe_code)]`. A reason must follow on that line, as in
/// `#![allow(unsafe_code)] // the C ABI`. A file without unsafe code must not have the line.
#[test]
fn unsafe_is_allowed_with_a_reason() {
    let mut problems = Vec::new();
    for file in files().iter().filter(|file| file.is_rust() && file.is_in_crates()) {
        let code = file.code();
        let uses = word_offsets(&code, "unsafe").next();
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

/// Returns the number of [`PERSON_PRONOUNS`] in a text, in upper or lower case.
fn pronouns_in(text: &str) -> usize {
    let text = text.to_ascii_lowercase();
    PERSON_PRONOUNS.iter().map(|pronoun| word_offsets(&text, pronoun).count()).sum()
}

/// Comments and Markdown files must name threads, callers and functions instead of [`PERSON_PRONOUNS`]. If there are
/// too many pronouns, the test prints the count of each file, the largest count first.
#[test]
fn sentences_name_their_subject() {
    let files = files();
    let counted = files.iter().map(|file| (pronouns_in(&file.prose()), &file.path)).filter(|(count, _)| *count > 0);
    let mut counts: Vec<(usize, &String)> = counted.collect();
    counts.sort_by(|one, other| other.cmp(one));
    let total: usize = counts.iter().map(|(count, _)| count).sum();
    println!("{total} pronouns for people; at most {MAX_PERSON_PRONOUNS}");
    let list: Vec<String> = counts.iter().map(|(count, path)| format!("{count:5} {path}")).collect();
    assert!(
        total <= MAX_PERSON_PRONOUNS,
        "{total} of {PERSON_PRONOUNS:?}, at most {MAX_PERSON_PRONOUNS}:\n{}",
        list.join("\n")
    );
}

/// Returns line, name and documentation of the public types of a file.
fn public_types(text: &str) -> Vec<(usize, &str, String)> {
    let (mut types, mut documentation) = (Vec::new(), String::new());
    for (number, line) in text.lines().enumerate().map(|(number, line)| (number + 1, line.trim())) {
        if line.starts_with("///") {
            documentation.push_str(line);
        } else if !line.starts_with("#[") {
            let item = line.strip_prefix("pub ").map(|item| item.strip_prefix("unsafe ").unwrap_or(item));
            let name = ["struct ", "enum ", "trait "].iter().find_map(|kind| item?.strip_prefix(*kind));
            let name = name.map(|name| name.split(|part: char| !part.is_alphanumeric()).next().unwrap());
            let name = name.filter(|name| !name.is_empty()); // not a macro's `$name`
            types.extend(name.map(|name| (number, name, documentation.clone())));
            documentation.clear();
        }
    }
    types
}

/// Returns the problem with the example of a public type. The documentation of the type must contain a code block, or
/// name the type with the example (``Example: [`Cache`].``). The code block of a type that the facade `exports` must
/// name the facade only, because programs do not depend on the other crates.
fn problem_with_example(name: &str, documentation: &str, exports: &str) -> Option<&'static str> {
    let is_exported = word_offsets(exports, name).next().is_some();
    if !documentation.contains("```") && !documentation.contains("Example") {
        return Some("has no example");
    }
    let code: String = documentation.split("```").skip(1).step_by(2).collect();
    (is_exported && code.contains("pagemill_")).then_some("has an example that does not use the facade")
}

/// Every public type of the library must have an example that its users can compile, or name the type whose example
/// shows it. The example is at the type: rustdoc shows no text of a re-export in another crate.
#[test]
fn public_types_have_examples() {
    let files = files();
    let facade = files.iter().find(|file| file.path == "crates/pagemill/src/lib.rs").map(File::code).unwrap();
    let library = files.iter().filter(|file| file.is_product() && file.is_in_library("/src/"));
    let mut problems = Vec::new();
    for file in library.filter(|file| !file.path.contains("tests")) {
        for (line, name, documentation) in public_types(&file.text) {
            let problem = problem_with_example(name, &documentation, &facade);
            problems.extend(problem.map(|problem| format!("{}:{line}: {name} {problem}", file.path)));
        }
    }
    assert_none(&problems);
    let text = "/// A.\n///\n/// ```\n/// use pagemill_a::A;\n/// ```\npub struct A;\n/// B.\n#[derive(Debug)]\npub enum B {}\n\
        pub unsafe trait C {}\npub fn d() {}";
    let problems = |exports: &str| -> Vec<(usize, bool)> {
        let problem = |(line, name, documentation): &(usize, &str, String)| {
            Some((*line, problem_with_example(name, documentation, exports)? == "has no example"))
        };
        public_types(text).iter().filter_map(problem).collect()
    };
    assert_eq!(problems("pub use b::B;"), [(9, true), (10, true)]);
    assert_eq!(problems("pub use a::A;"), [(6, false), (9, true), (10, true)]);
}

/// Where the test rejects a retired term of the glossary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RejectedAs {
    /// The term is rejected in identifiers.
    Identifier,
    /// The term is rejected in identifiers, and as a word in comments and Markdown files.
    Word,
}

/// Returns the retired terms that the glossary lists, with the places where they are rejected. Each row of the
/// glossary's chapter "Retired terms" has the form `| term, term | replacement | identifier |`, or `word` in the last
/// cell.
fn retired_terms(glossary: &str) -> Vec<(String, RejectedAs)> {
    let chapter = glossary.split_once("\n## Retired terms").map_or("", |(_, rest)| rest);
    let chapter = chapter.split("\n## ").next().unwrap_or("");
    let mut terms = Vec::new();
    for row in chapter.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let rejected = match cells[..] {
            [_, _, "identifier"] => RejectedAs::Identifier,
            [_, _, "word"] => RejectedAs::Word,
            _ => continue,
        };
        terms.extend(cells[0].split(", ").map(|term| (term.to_owned(), rejected)));
    }
    terms
}

fn identifiers(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    code.split(|character: char| !character.is_alphanumeric() && character != '_').filter_map(move |word| {
        let start = at;
        at = start + word.len() + code[start + word.len()..].chars().next().map_or(0, char::len_utf8);
        word.starts_with(|first: char| first.is_alphabetic() || first == '_').then_some((start, word))
    })
}

/// Returns the words of an identifier in lower case, such as *retire* and *list* for `RetireList` and `retire_list`.
fn words_of(identifier: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for character in identifier.chars() {
        if character == '_' || (character.is_uppercase() && was_lower) {
            words.push(String::new());
        }
        was_lower = !character.is_uppercase();
        if character != '_' {
            words.last_mut().unwrap().extend(character.to_lowercase());
        }
    }
    words
}

/// Returns the retired terms that a file contains, each with its line number.
fn retired_in(file: &File, terms: &[(String, RejectedAs)]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    if file.is_rust() {
        let code = file.code();
        for (at, identifier) in identifiers(&code).filter(|(_, identifier)| !RETIRED_NAMES.contains(identifier)) {
            let words = words_of(identifier);
            let term = terms.iter().find(|(term, _)| words.contains(term));
            found.extend(term.map(|_| (line_of(&code, at), identifier.to_owned())));
        }
    }
    let prose = file.prose().to_lowercase();
    for (term, _) in terms.iter().filter(|(_, rejected)| *rejected == RejectedAs::Word) {
        found.extend(word_offsets(&prose, term).map(|at| (line_of(&prose, at), term.clone())));
    }
    found
}

/// Code, comments and Markdown files must use the current terms of the glossary, and no retired terms.
#[test]
fn retired_terms_are_not_used() {
    let files = files();
    let glossary = files.iter().find(|file| file.path == GLOSSARY).map_or("", |file| &file.text);
    let terms = retired_terms(glossary);
    assert!(terms.len() >= 20, "the glossary lists {} rejected terms", terms.len());
    let checked = files.iter().filter(|file| !RETIRED_ALLOWED.contains(&&*file.path));
    let problems = checked.flat_map(|file| {
        let found = retired_in(file, &terms).into_iter();
        found.map(|(line, name)| format!("{}:{line}: {name}; see {GLOSSARY}", file.path)).collect::<Vec<_>>()
    });
    assert_none(&problems.collect::<Vec<_>>());
}

/// The check for retired terms must find them in identifiers of both styles and, if the glossary says so, in text. It
/// must find none in strings and in longer words.
#[test]
fn retired_terms_are_found() {
    let glossary = "## Terms\n| none | x | word |\n\n## Retired terms\n\n| retired | term | rejected as |\n|---|---|---|\n\
        | limbo, hall | list | word |\n| books | state | identifier |\n| turn | wait | - |\n\n## More\n| other | x | word |\n";
    let terms = retired_terms(glossary);
    let expected = [("limbo", RejectedAs::Word), ("hall", RejectedAs::Word), ("books", RejectedAs::Identifier)];
    assert_eq!(terms, expected.map(|(term, rejected)| (term.to_owned(), rejected)));
    let text = "/// The Limbo of a hallway; the books' turn.\nstruct MyLimbo(u8);\nfn check_books(turn: Hall) {}\n\
        const TEXT: &str = \"limbo\";\nlet limbos = bookshelf;\n";
    let rust = File { path: "crates/planted.rs".to_owned(), text: text.to_owned() };
    let found = |file| retired_in(file, &terms);
    let names = |found: Vec<(usize, String)>| found.into_iter().map(|(line, name)| format!("{line} {name}"));
    assert_eq!(names(found(&rust)).collect::<Vec<_>>(), ["2 MyLimbo", "3 check_books", "3 Hall", "1 limbo"]);
    let markdown = File { path: "planted.md".to_owned(), text: "The books are\nin limbo.\n".to_owned() };
    assert_eq!(names(found(&markdown)).collect::<Vec<_>>(), ["2 limbo"]);
}

#[test]
fn files_are_short() {
    let long = |file: &File| {
        let lines = file.text.lines().count();
        (lines > MAX_FILE_LINES).then(|| format!("{}: {lines} lines; at most {MAX_FILE_LINES}", file.path))
    };
    assert_none(&files().iter().filter(|file| file.is_rust()).filter_map(long).collect::<Vec<_>>());
}

/// Returns line number, name and number of lines of each function with a body. The lines are counted from the signature
/// to the closing brace.
fn functions(code: &str) -> Vec<(usize, &str, usize)> {
    let mut functions = Vec::new();
    for at in word_offsets(code, "fn") {
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

/// Functions longer than [`LONG_FN_LINES`] cause a warning. No function may be longer than [`MAX_FN_LINES`].
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

/// The sizes of the OS page and of the block have named constants. Code must not contain these sizes as numbers.
#[test]
fn page_and_block_sizes_are_named() {
    let mut problems = Vec::new();
    for file in files().iter().filter(|file| file.is_product() && file.is_in_library("/src/")) {
        if file.path.ends_with("/units.rs") {
            continue;
        }
        let code = file.code();
        let code = without_tests(&code);
        for literal in ["4096", "4_096", "0x1000", "2097152", "2_097_152", "2 << 20"] {
            for at in word_offsets(code, literal) {
                problems.push(format!("{}:{}: {literal}", file.path, line_of(code, at)));
            }
        }
    }
    assert_none(&problems);
}

/// The crates must contain no markers of unfinished work and no debug macros.
#[test]
fn no_unfinished_work_is_left() {
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    let macros = [concat!("to", "do!"), concat!("unimple", "mented!"), concat!("db", "g!")];
    let mut problems = Vec::new();
    for file in files().iter().filter(|file| file.is_in_crates()) {
        for (number, line) in file.text.lines().enumerate() {
            let found = marks.iter().find(|mark| word_offsets(line, mark).next().is_some());
            let found = found.or_else(|| macros.iter().find(|word| line.contains(**word)));
            if let Some(found) = found {
                problems.push(format!("{}:{}: {found}", file.path, number + 1));
            }
        }
    }
    assert_none(&problems);
}

fn tests_in(text: &str) -> Vec<&str> {
    let after_marks = text.split("#[test]\n").skip(1);
    let name = |after: &'_ str| -> Option<(usize, usize)> {
        let start = after.find("fn ")? + 3;
        Some((start, start + after[start..].find('(')?))
    };
    after_marks.filter_map(|after| name(after).map(|(start, end)| &after[start..end])).collect()
}

/// The table of operations on a folio is in docs/states-and-locks.md. Each of its cells must name a test. Every test
/// that the chapter names must exist.
#[test]
fn the_tests_of_the_lock_table_exist() {
    let files = files();
    let core = files.iter().filter(|file| file.is_rust() && file.is_in_library("/"));
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

/// No file may contain a path of the machine on which the file was written.
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

/// Every package must use the lints of the workspace.
#[test]
fn every_package_uses_the_workspace_lints() {
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

/// Comments and strings must not count as code. Only comments must count as text for readers.
#[test]
fn code_comments_and_strings_are_distinguished() {
    let text = "fn a<'x>() { \"unsafe\"; 'u'; '\\''; r#\"unsafe \" \"#; b\"unsafe\" } // unsafe\n/* unsafe /* */ unsafe */ unsafe";
    let code = blank_comments_and_strings(text);
    assert_eq!(word_offsets(&code, "unsafe").collect::<Vec<_>>(), [text.rfind("unsafe").unwrap()]);
    assert!(code.contains("fn a<'x>() {") && code.len() == text.len());
    let comments = blank_all_but(TextKind::Comment, text);
    assert_eq!(word_offsets(&comments, "unsafe").count(), 3);
    assert_eq!(
        comments_without_code("/// a\n/// ```\n/// b\n/// ```\nfn c() {} // d").matches(char::is_alphabetic).count(),
        2
    );
    assert_eq!(pronouns_in("Who asks? Whoever asked `who_asks`, whose answer nobody has."), 3);
    assert_eq!(functions(&code), [(1, "a", 1)]);
    let names: Vec<&str> =
        crate_names("use crate::{b::{c, d}, e}; crate::f()").into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, ["b", "e", "f"]);
}
