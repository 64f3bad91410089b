//! Import cycles: files of a crate that import each other in a circle.

use super::{assert_none, blank_comments_and_strings, files, without_tests, word_offsets};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of files that may import each other in a circle.
const MAX_CYCLE_FILES: usize = 3;

/// Crate and first module of the only files that may form a larger circle: those on the path of a request through the
/// page cache.
const REQUEST_PATH: (&str, &str) = ("pagemill-cache", "mapping");

/// The path of a module from the root of its crate, as a list of names.
type Module = Vec<String>;

/// The modules of a crate, each with the modules that its code names.
type Imports = BTreeMap<Module, BTreeSet<Module>>;

/// Returns the crate and the module to which a source file belongs; `None` for tests and other files.
fn module_of(path: &str) -> Option<(&str, Module)> {
    let (name, rest) = path.strip_prefix("crates/")?.split_once("/src/")?;
    let mut module: Module = rest.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        module.pop();
    }
    let is_test = module.iter().any(|name| name == "tests" || name.ends_with("_tests"));
    (!is_test).then_some((name, module))
}

/// Returns the paths that a `use` tree stands for: `a::b` and `a::c` for `a::{b, c}`.
fn paths_of(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some((prefix, rest)) = tree.split_once('{') else { return vec![tree.to_owned()] };
    let inner = rest.strip_suffix('}').unwrap_or(rest);
    let (mut paths, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, letter) in inner.char_indices().chain([(inner.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                paths.extend(paths_of(&inner[start..at]).iter().map(|path| format!("{prefix}{path}")));
                start = at + 1;
            }
            _ => {}
        }
    }
    paths
}

/// Returns the paths in a file's code that start with `crate` or `super`, in `use` declarations and elsewhere.
fn paths_in(code: &str) -> Vec<String> {
    let is_path = |letter: char| letter.is_alphanumeric() || "_:".contains(letter);
    let mut paths = Vec::new();
    let starts = ["crate", "super"].into_iter().flat_map(|word| word_offsets(code, word));
    for start in starts.filter(|start| !code[..*start].ends_with("::")) {
        let rest = &code[start..];
        let len = rest.find(|letter| !is_path(letter)).unwrap_or(rest.len());
        match rest[len..].strip_prefix('{') {
            Some(_) => paths.extend(paths_of(rest.split(';').next().unwrap_or_default())),
            None => paths.push(rest[..len].to_owned()),
        }
    }
    paths
}

/// Returns the module to which a path in the code of `from` refers: the longest prefix of the path that is a module.
/// Returns `None` if that is `from` itself or a module above it.
fn named_module(path: &str, from: &Module, modules: &BTreeSet<Module>) -> Option<Module> {
    let mut at: Module = if path.starts_with("crate") { Vec::new() } else { from.clone() };
    for name in path.split("::").map(str::trim).take_while(|name| !name.is_empty()) {
        match name {
            "crate" => {}
            "super" => drop(at.pop()),
            _ => at.push(name.to_owned()),
        }
    }
    while !modules.contains(&at) {
        at.pop()?;
    }
    (!from.starts_with(&at)).then_some(at)
}

/// Returns the modules that `from` names, directly or through other modules.
fn reachable(imports: &Imports, from: &Module) -> BTreeSet<Module> {
    let (mut found, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(module) = open.pop() {
        open.extend(imports[module].iter().filter(|next| found.insert((*next).clone())));
    }
    found
}

/// Returns the groups of more than `MAX_CYCLE_FILES` modules in which each module names all others, directly or through
/// other modules.
fn large_cycles(imports: &Imports) -> BTreeSet<Vec<Module>> {
    let reached: BTreeMap<&Module, _> = imports.keys().map(|module| (module, reachable(imports, module))).collect();
    let group = |module: &Module| -> Vec<Module> {
        reached[module].iter().filter(|other| reached[other].contains(module)).cloned().collect()
    };
    imports.keys().map(group).filter(|group| group.len() > MAX_CYCLE_FILES).collect()
}

/// At most `MAX_CYCLE_FILES` files may import each other in a circle, except the files on the path of a request through
/// the page cache.
#[test]
fn import_cycles_are_short() {
    let files = files();
    let mut crates: BTreeMap<&str, BTreeMap<Module, String>> = BTreeMap::new();
    for file in &files {
        if let Some((name, module)) = module_of(&file.path) {
            let code = blank_comments_and_strings(&file.text);
            crates.entry(name).or_default().insert(module, without_tests(&code).to_owned());
        }
    }
    assert!(crates.len() > 10, "the sources are found");
    let mut problems = Vec::new();
    for (name, codes) in &crates {
        let modules: BTreeSet<Module> = codes.keys().cloned().collect();
        let imports = codes.iter().map(|(module, code)| {
            let targets = paths_in(code).into_iter().filter_map(|path| named_module(&path, module, &modules));
            (module.clone(), targets.collect())
        });
        let is_allowed = |module: &Module| (*name, module[0].as_str()) == REQUEST_PATH;
        for group in large_cycles(&imports.collect()).into_iter().filter(|group| !group.iter().all(is_allowed)) {
            let names: Vec<_> = group.iter().map(|module| module.join("::")).collect();
            problems.push(format!("{name}: these files import each other: {}", names.join(", ")));
        }
    }
    assert_none(&problems);
}

/// Four modules name each other in a circle, by `use` trees or by paths in code. The circle must be found. A name of a
/// module above the naming module must not count.
#[test]
fn import_cycles_are_found() {
    assert_eq!(paths_of("crate::a::{b, c::{d, e}}"), ["crate::a::b", "crate::a::c::d", "crate::a::c::e"]);
    let module = |path: &str| -> Module { path.split("::").map(str::to_owned).collect() };
    let codes = [
        ("a", "use crate::{b::Item, units};"),
        ("b", "fn f() { crate::c::g() }"),
        ("c", "use super::d;"),
        ("c::inner", "use super::Outer;"),
        ("d", "use crate::a::{self, Thing};"),
        ("units", ""),
    ];
    let modules: BTreeSet<Module> = codes.iter().map(|(path, _)| module(path)).collect();
    let imports_of = |codes: &[(&str, &str)]| -> Imports {
        let targets = |path: &str, code| {
            paths_in(code).into_iter().filter_map(|named| named_module(&named, &module(path), &modules)).collect()
        };
        codes.iter().map(|(path, code)| (module(path), targets(path, code))).collect()
    };
    let found = large_cycles(&imports_of(&codes));
    assert_eq!(found.into_iter().collect::<Vec<_>>(), [["a", "b", "c", "d"].map(module)]);
    let mut open = codes;
    open[4].1 = "use crate::units;";
    assert!(large_cycles(&imports_of(&open)).is_empty());
}
