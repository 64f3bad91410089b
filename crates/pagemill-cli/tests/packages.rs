//! What a package installs: manual pages, completions, units, and the preload library under its own name.

mod common;

use common::{End, Guard, PAGEMILL, TIMEOUT, TestFolder, finish, is_missing};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

fn pagemill(place: &TestFolder, args: &[&str]) -> End {
    let mut command = place.command(PAGEMILL);
    command.args(args);
    finish(command, TIMEOUT)
}

/// Returns the names of the subcommands that `--help` lists.
fn subcommands(place: &TestFolder) -> Vec<String> {
    let help = pagemill(place, &["--help"]);
    let lines = help.out.lines().skip_while(|line| *line != "Commands:").skip(1);
    let rows =
        lines.take_while(|line| !line.is_empty()).filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names: Vec<String> = rows.map(|row| row.split_whitespace().next().unwrap().to_owned()).collect();
    assert!(names.len() >= 15 && names.contains(&"metrics".to_owned()), "{names:?}");
    names.into_iter().filter(|name| name != "help").collect()
}

/// Returns the long options that the help of a subcommand lists.
fn options_of(place: &TestFolder, subcommand: &str) -> Vec<String> {
    let help = pagemill(place, &[subcommand, "--help"]);
    let rows = help.out.lines().map(str::trim_start).filter(|line| line.starts_with('-'));
    let words = rows.flat_map(|row| row.split([' ', '=', '[', ',']).take(3).map(str::to_owned).collect::<Vec<_>>());
    words.filter(|word| word.starts_with("--")).collect()
}

/// Each subcommand must have a manual page with all its options. The formatter must find nothing to warn about.
#[test]
fn each_subcommand_has_a_manual_page() {
    let place = TestFolder::new();
    let folder = place.path("man");
    pagemill(&place, &["man", folder.to_str().unwrap()]).assert_success();
    let mut expected = vec!["pagemill.1".to_owned()];
    for name in subcommands(&place) {
        let page = fs::read_to_string(folder.join(format!("pagemill-{name}.1"))).unwrap();
        assert!(page.contains(".SH SYNOPSIS") && page.contains(".SH DESCRIPTION"), "{page}");
        // The options of `bench` are those of another program.
        for option in options_of(&place, &name).iter().filter(|_| name != "bench") {
            assert!(page.contains(&option.replace('-', "\\-")), "{name}: no {option}");
        }
        expected.push(format!("pagemill-{name}.1"));
    }
    let mut found: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
    if is_missing("groff") {
        return;
    }
    for name in found {
        let mut command = place.command("groff");
        command.args(["-man", "-ww", "-z", "-Tutf8", "-P-c"]).arg(folder.join(&name));
        let end = finish(command, TIMEOUT);
        end.assert_success();
        assert_eq!(end.err, "", "{name}");
    }
    assert_eq!(pagemill(&place, &["man", "/dev/null/x"]).code(), 1);
}

/// The completions of each shell must know all subcommands and some options, and a shell must accept them.
#[test]
fn shells_accept_the_completions() {
    let place = TestFolder::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let end = pagemill(&place, &["completions", shell]);
        end.assert_success();
        let words = subcommands(&place).into_iter().chain(["limit-kernel", "textfile"].map(str::to_owned));
        words.for_each(|word| assert!(end.out.contains(&word), "{shell}: no {word}"));
        let path = place.path(shell);
        fs::write(&path, &end.out).unwrap();
        if ["bash", "zsh", "fish"].contains(&shell) && !is_missing(shell) {
            let mut command = place.command(shell);
            command.arg("-n").arg(&path);
            let checked = finish(command, TIMEOUT);
            assert!(checked.status.success() && checked.err.is_empty(), "{shell}: {}", checked.err);
        }
    }
    assert_eq!(pagemill(&place, &["completions", "sh"]).code(), 2);
}

/// The version must be that of the crate, possibly followed by a commit.
#[test]
fn the_version_is_printed() {
    let place = TestFolder::new();
    for args in [&["--version"][..], &["-V"]] {
        let end = pagemill(&place, args);
        let rest = end.out.strip_prefix(concat!("pagemill ", env!("CARGO_PKG_VERSION"))).unwrap().trim_end();
        assert!(rest.is_empty() || (rest.starts_with(" (") && rest.ends_with(')')), "{}", end.out);
    }
}

/// Copies the preload library to the place and the name that it has in a package.
fn installed_library(place: &TestFolder) -> PathBuf {
    let end = finish(place.pagemill_run_shell(&[], "echo \"$LD_PRELOAD\""), TIMEOUT);
    end.assert_success();
    let path = place.path("lib/pagemill/libpagemill.so");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::copy(end.out.trim(), &path).unwrap();
    path
}

/// With `LD_PRELOAD` alone, as in a container, the library must serve a program and its children: `meminfo` must show
/// them, and a limit must hold.
#[test]
fn the_library_works_without_the_command() {
    let place = TestFolder::new();
    if is_missing("python3") {
        return;
    }
    let library = installed_library(&place);
    const SCRIPT: &str = "import os, sys\n\
        kept = bytearray(64 << 20)\n\
        kept[::4096] = b'x' * len(kept[::4096])\n\
        print(os.getpid(), flush=True)\n\
        sys.stdin.readline()\n\
        try:\n    more = bytearray(600 << 20); more[::4096] = b'x' * len(more[::4096])\n\
        except MemoryError: print('refused', flush=True)\n";
    let mut command = place.command_with_libc_fallback("sh");
    command.args(["-c", "python3 -c \"$0\"", SCRIPT]).env("LD_PRELOAD", &library).env("PAGEMILL_LIMIT", "256M");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut guard = Guard::new(command);
    let mut output = BufReader::new(guard.child().stdout.take().unwrap()).lines();
    let pid = output.next().unwrap().unwrap();
    let info: Value = serde_json::from_str(&pagemill(&place, &["meminfo", "--json", &pid]).out).unwrap();
    assert!(info["name"] == "python3" && info["resident"].as_u64().unwrap() > 0, "{info}");
    drop(guard.child().stdin.take());
    assert_eq!(output.next().unwrap().unwrap(), "refused");
    assert!(guard.wait(TIMEOUT).success());
}

/// If an image sets `LD_PRELOAD` to the installed library, `run` must replace it by its own, so that a program has one
/// allocator. An installed library of the same build must be used instead of a copy in the cache folder.
#[test]
fn run_loads_one_library() {
    let place = TestFolder::new();
    let library = installed_library(&place);
    let libraries = "grep -o '/[^ ]*pagemill[^ ]*[.]so' /proc/self/maps | sort -u";
    let mut command = place.pagemill_run_shell(&[], libraries);
    command.env("LD_PRELOAD", &library);
    let end = finish(command, TIMEOUT);
    end.assert_success();
    assert_eq!(end.out.lines().count(), 1, "{}", end.out);

    let program = place.install(PAGEMILL, "bin/pagemill");
    let mut command = place.command(&program);
    command.args(["run", "--", "sh", "-c", libraries]);
    let end = finish(command, TIMEOUT);
    end.assert_success();
    assert_eq!(Path::new(end.out.trim()), library);
    // A library of another build is not used.
    fs::write(&library, "other").unwrap();
    let mut command = place.command(&program);
    command.args(["run", "--", "sh", "-c", libraries]);
    let end = finish(command, TIMEOUT);
    assert!(end.out.contains("/cache/pagemill/"), "{}{}", end.out, end.err);
}

/// systemd must accept the units without a message.
#[test]
fn systemd_accepts_the_units() {
    if is_missing("systemd-analyze") {
        return;
    }
    let place = TestFolder::new();
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    for (file, unit) in [
        ("pagemill-mount@.service", "pagemill-mount@mnt-ram.service"),
        ("pagemill-metrics.service", "pagemill-metrics.service"),
        ("pagemill-docker.service", "pagemill-docker.service"),
    ] {
        let text = fs::read_to_string(contrib.join(file)).unwrap();
        // systemd looks up the command in its own list of folders, in which it may not be installed here.
        let with_path = text.replace("ExecStart=pagemill ", &format!("ExecStart={PAGEMILL} "));
        assert_ne!(with_path, text, "{file}");
        // The manual pages of the command may not be installed here, either.
        let is_page_of_ours = |line: &&str| line.starts_with("Documentation=man:pagemill");
        let with_path: String = with_path.split_inclusive('\n').filter(|line| !is_page_of_ours(line)).collect();
        let path = place.path(unit);
        fs::write(&path, with_path).unwrap();
        let mut command = place.command("systemd-analyze");
        command.args(["verify", "--man=no"]).arg(&path);
        let end = finish(command, TIMEOUT);
        assert!(end.status.success() && end.err.is_empty() && end.out.is_empty(), "{file}: {}{}", end.out, end.err);
    }
}
