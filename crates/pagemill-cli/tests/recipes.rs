//! Executes the shell blocks of the recipes in docs, and compares their output.
//!
//! A block of the language `sh` is executed, `sh,root` only as root. All blocks of a page run in one folder, in which
//! `pagemill` is a link to the repository. A `text` block behind a shell block is its output; `…` stands for any text. A
//! block of another language whose first line is a comment with the name of a file, as in `# service.py: ...`, is first
//! written to that file. The Rust blocks are doc tests of the crate `pagemill`.

mod common;

use common::{PAGEMILL, TIMEOUT, TestFolder, finish, is_missing, may_mount, shell};
use std::fs;
use std::path::{Path, PathBuf};

/// A code block of a page.
struct Block {
    language: String,
    text: String,
    /// Number of the first line of `text`.
    line: usize,
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for (number, line) in page.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(language), None) => {
                open = Some(Block { language: language.to_owned(), text: String::new(), line: number + 2 });
            }
            (None, Some(block)) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block has no end");
    blocks
}

/// Returns the name of the file that a block shows: the second word of its first line, if a colon follows.
fn file_name(block: &Block) -> Option<&str> {
    let name = block.text.lines().next()?.split(' ').nth(1)?.strip_suffix(':')?;
    name.contains('.').then_some(name)
}

/// Returns whether `text` is `pattern`, in which each `…` stands for any text.
fn is_like(text: &str, pattern: &str) -> bool {
    let mut parts = pattern.split('…');
    let Some(mut rest) = text.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        let Some(at) = (if parts.peek().is_none() { rest.rfind(part) } else { rest.find(part) }) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

/// Unmounts the RAM file system of a recipe if a block failed before it did so.
struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        shell(&format!("! mountpoint -q '{0}' || '{PAGEMILL}' umount '{0}' || umount -l '{0}'", self.0.display()));
    }
}

/// Executes the blocks of a page in a new folder, in their order. Returns the number of executed blocks.
fn execute(page: &str) -> usize {
    let place = TestFolder::new();
    let text = fs::read_to_string(repository().join("docs").join(page)).unwrap();
    let is_allowed = |block: &Block| block.language == "sh" || (block.language == "sh,root" && may_mount());
    std::os::unix::fs::symlink(repository(), place.path("pagemill")).unwrap();
    let folder = Path::new(PAGEMILL).parent().unwrap().display();
    let path = format!("{folder}:{}", std::env::var("PATH").unwrap());
    let _unmount = Unmount(place.path("disk"));
    let blocks = blocks(&text);
    let mut executed = 0;
    for (index, block) in blocks.iter().enumerate() {
        if let Some(name) = file_name(block) {
            fs::write(place.path(name), &block.text).unwrap();
        }
        if !is_allowed(block) {
            continue;
        }
        let mut command = place.command_with_libc_fallback("sh");
        // If a block fails, the program that it started last ends, too.
        let script = format!("trap '[ -z \"${{!-}}\" ] || kill \"$!\" 2>/dev/null || :' EXIT\n{}", block.text);
        command.args(["-euc", &script]).env("PATH", &path);
        let end = finish(command, TIMEOUT);
        let where_ = format!("docs/{page}:{}", block.line);
        assert!(end.status.success(), "{where_}: {}\n{}\n{}", end.status, end.out, end.err);
        if let Some(expected) = blocks.get(index + 1).filter(|next| next.language == "text") {
            assert!(is_like(&end.out, &expected.text), "{where_} printed\n{}\ninstead of\n{}", end.out, expected.text);
        }
        executed += 1;
    }
    executed
}

/// A service under a limit must drop its cache and continue, and an idle one must return memory on request.
#[test]
fn a_service_under_a_limit() {
    if !is_missing("python3") {
        assert_eq!(execute("recipe-service.md"), 2);
    }
}

/// A job must get a private RAM file system. As root, jobs must share a cache that can be purged.
#[test]
fn a_ram_disk_for_ci() {
    if !is_missing("cc") {
        assert_eq!(execute("recipe-ci.md"), if may_mount() { 4 } else { 1 });
    }
}

/// The C program of the recipe must learn of the purge under `pagemill run`, and work without it.
#[test]
fn volatile_memory_in_c() {
    if !is_missing("cc") {
        assert_eq!(execute("recipe-c.md"), 2);
    }
}

/// systemd must accept the unit of the recipe.
#[test]
fn systemd_accepts_the_unit_of_the_recipe() {
    if is_missing("systemd-analyze") {
        return;
    }
    let place = TestFolder::new();
    let text = fs::read_to_string(repository().join("docs/recipe-service.md")).unwrap();
    let unit = blocks(&text).into_iter().find(|block| block.language == "ini").unwrap();
    // The package may not be installed here.
    let with_path = unit.text.replace("ExecStart=/usr/bin/pagemill ", &format!("ExecStart={PAGEMILL} "));
    assert_ne!(with_path, unit.text);
    let path = place.path("answers.service");
    fs::write(&path, with_path).unwrap();
    let mut command = place.command("systemd-analyze");
    command.args(["verify", "--man=no"]).arg(&path);
    let end = finish(command, TIMEOUT);
    assert!(end.status.success() && end.err.is_empty() && end.out.is_empty(), "{}{}", end.out, end.err);
}

/// Blocks that the tests neither execute nor compile must have one of a few languages.
#[test]
fn recipes_have_known_blocks() {
    let mut pages = 0;
    for entry in fs::read_dir(repository().join("docs")).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if !name.starts_with("recipe-") {
            continue;
        }
        pages += 1;
        for block in blocks(&fs::read_to_string(entry.path()).unwrap()) {
            let known = ["sh", "sh,root", "text", "rust", "c", "python", "ini", "toml"];
            assert!(known.contains(&block.language.as_str()), "{name}:{}: {}", block.line, block.language);
        }
    }
    assert_eq!(pages, 5);
}

#[test]
fn patterns_match_any_text_at_an_ellipsis() {
    assert!(is_like("a\n", "a\n") && is_like("a 12 b\n", "a … b\n") && is_like("x\ny\n", "…\n"));
    assert!(!is_like("a\nb\n", "a\n") && !is_like("a 12 c\n", "a … b\n") && !is_like("", "…\n"));
    assert!(is_like("a b a b", "…a b") && is_like("1 a 2 a", "1…a") && !is_like("1 a 2", "1…a"));
}
