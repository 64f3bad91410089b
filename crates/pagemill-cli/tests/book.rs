//! Checks the links of the documentation, and the site that `contrib/build-book` builds from it.

mod common;

use common::{TIMEOUT, TestFolder, finish, is_missing, walk};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Returns the Markdown files of the repository: those at its top, in docs, and of each crate.
fn pages() -> Vec<PathBuf> {
    let root = repository();
    let crates = fs::read_dir(root.join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<PathBuf> = [root.clone(), root.join("docs")]
        .into_iter()
        .chain(crates)
        .flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    pages.sort();
    assert!(pages.len() > 40, "{pages:?}");
    pages
}

/// Returns the text of a page without its code blocks and without code in backticks.
fn prose(page: &str) -> String {
    let mut is_code = false;
    let mut text = String::new();
    for line in page.lines() {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        if !is_code && !is_fence {
            text.push_str(&line.split('`').step_by(2).collect::<Vec<_>>().join("`"));
        }
        text.push('\n');
    }
    text
}

/// Returns the parts of `text` between `start` and the next `end`.
fn between<'text>(text: &'text str, start: &'text str, end: char) -> impl Iterator<Item = &'text str> {
    text.split(start).skip(1).filter_map(move |rest| rest.split_once(end).map(|(part, _)| part))
}

/// Returns the anchors of a page: the names that links to its headings have.
fn anchors(page: &str) -> BTreeSet<String> {
    let mut is_code = false;
    let mut found = BTreeSet::new();
    for line in page.lines() {
        is_code ^= line.starts_with("```");
        if let (false, Some(heading)) = (is_code, line.strip_prefix('#')) {
            let heading = heading.trim_start_matches('#').trim().to_lowercase();
            let letters = heading.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
            found.insert(letters.map(|letter| if letter == ' ' { '-' } else { letter }).collect());
        }
    }
    found
}

/// Each link between pages must lead to a file of the repository, and to a heading if it names one.
#[test]
fn links_of_pages_lead_somewhere() {
    let mut problems = Vec::new();
    let mut links = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for link in between(&prose(&text), "](", ')') {
            if link.starts_with("https://") || link.starts_with("http://") {
                continue;
            }
            links += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            let is_there = target.is_file()
                && (anchor.is_empty() || anchors(&fs::read_to_string(&target).unwrap()).contains(anchor));
            if !is_there {
                problems.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(links > 200, "{links}");
    assert!(problems.is_empty(), "{problems:#?}");
}

/// Each page in docs must be in the summary of the site.
#[test]
fn the_summary_has_all_pages() {
    let docs = repository().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    let listed: BTreeSet<PathBuf> =
        between(&summary, "](", ')').map(|link| docs.join(link).canonicalize().unwrap()).collect();
    let missing: Vec<PathBuf> = pages()
        .into_iter()
        .filter(|page| page.parent() == Some(&docs) && !page.ends_with("SUMMARY.md") && !listed.contains(page))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The blocks of docs/from-memmap2.md are parts of an example, which another test runs.
#[test]
fn excerpts_are_lines_of_the_example() {
    let page = fs::read_to_string(repository().join("docs/from-memmap2.md")).unwrap();
    let example = fs::read_to_string(repository().join("crates/pagemill/examples/from_memmap2.rs")).unwrap();
    let lines: BTreeSet<&str> = example.lines().map(str::trim).collect();
    let blocks: Vec<&str> =
        page.split("```rust,ignore\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(blocks.len(), 2);
    for line in blocks.iter().flat_map(|block| block.lines()) {
        assert!(lines.contains(line.trim()), "not in the example: {line}");
    }
}

/// Returns the values of the attributes `name` of the tags `tag` in a page.
fn attributes<'page>(page: &'page str, tag: &'page str, name: &'page str) -> Vec<&'page str> {
    let tags = page.split('<').filter_map(move |rest| {
        let (head, _) = rest.split_once('>')?;
        head.strip_prefix(tag).filter(|rest| rest.starts_with(char::is_whitespace))
    });
    tags.flat_map(|head| {
        let start = format!("{name}=\"");
        head.match_indices(&start)
            .filter(|(at, _)| head[..*at].ends_with(char::is_whitespace))
            .filter_map(|(at, _)| head[at + start.len()..].split('"').next())
            .collect::<Vec<_>>()
    })
    .collect()
}

/// Returns what is wrong with the links and resources of one page of the site.
fn problems_of(site: &Path, page: &Path, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let resources = [("script", "src"), ("img", "src"), ("link", "href"), ("source", "src"), ("iframe", "src")];
    let loaded = resources.into_iter().flat_map(|(tag, name)| attributes(text, tag, name));
    let links = attributes(text, "a", "href");
    for (link, is_loaded) in loaded.map(|link| (link, true)).chain(links.into_iter().map(|link| (link, false))) {
        if link.contains("://") || link.starts_with("//") {
            if is_loaded {
                problems.push(format!("{}: loads {link}", page.display()));
            }
            continue;
        }
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let file = file.split('?').next().unwrap();
        let target = if file.is_empty() { page.to_path_buf() } else { page.parent().unwrap().join(file) };
        let has_anchor = |target: &Path| {
            let text = fs::read_to_string(target).unwrap_or_default();
            text.contains(&format!("id=\"{anchor}\""))
        };
        let is_inside = target.canonicalize().is_ok_and(|path| path.starts_with(site));
        if !is_inside || !target.is_file() || !(anchor.is_empty() || has_anchor(&target)) {
            problems.push(format!("{}: {link}", page.display()));
        }
    }
    problems
}

/// The site must have all pages. Their links must lead to files of the site, and loading a page must need no network.
#[test]
fn the_site_is_complete_and_needs_no_network() {
    if is_missing("mdbook") {
        return;
    }
    let place = TestFolder::new();
    let site = place.path("site");
    let mut command = place.command("bash");
    command.arg(repository().join("contrib/build-book")).arg(&site);
    let end = finish(command, TIMEOUT);
    end.assert_success();
    assert!(!end.err.contains("WARN") && !end.err.contains("ERROR"), "{}", end.err);
    let site = site.canonicalize().unwrap();
    let files = walk(&site);
    let pages: Vec<&PathBuf> = files.iter().filter(|path| path.extension().is_some_and(|end| end == "html")).collect();
    assert!(pages.len() > 35, "{pages:?}");
    let mut problems = Vec::new();
    for page in pages {
        let text = fs::read_to_string(page).unwrap();
        // The page of errors has links from the top of a server.
        if !page.ends_with("404.html") {
            problems.extend(problems_of(&site, page, &text));
        }
    }
    for style in files.iter().filter(|path| path.extension().is_some_and(|end| end == "css")) {
        let text = fs::read_to_string(style).unwrap();
        let loads = between(&text, "url(", ')').filter(|url| url.contains("://") && !url.contains("data:"));
        problems.extend(loads.map(|url| format!("{}: loads {url}", style.display())));
    }
    assert!(problems.is_empty(), "{problems:#?}");
}

#[test]
fn links_and_anchors_are_found() {
    let text = "a [b](c.md#d) `[no](x)`\n```\n[no](y)\n# no\n```\n## Each `page`, twice: 2 MiB\n";
    assert_eq!(between(&prose(text), "](", ')').collect::<Vec<_>>(), ["c.md#d"]);
    assert_eq!(anchors(text), BTreeSet::from(["each-page-twice-2-mib".to_owned()]));
    let page = "<a class=\"x\" href=\"a.html\">b</a><abbr href=\"no\"><img alt=\"\" src=\"https://c/d.png\">";
    assert_eq!(attributes(page, "a", "href"), ["a.html"]);
    let problems = problems_of(Path::new("/"), Path::new("/nowhere/page.html"), page);
    assert_eq!(problems, ["/nowhere/page.html: loads https://c/d.png", "/nowhere/page.html: a.html"]);
}
