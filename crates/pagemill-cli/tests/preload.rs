//! The malloc family of the preload library, as C and C++ programs use it.
//!
//! Each program in `tests/c` checks its results and exits with 0. On an error it prints file and line. A comment at the
//! start of the program describes it.

mod common;

use common::{End, TIMEOUT, TestFolder, finish, finish_with_input};
use std::process::Command;

/// Compiles a program and runs it with `pagemill run OPTIONS`. Returns `None` if the program cannot be compiled.
fn run_with(options: &[&str], source: &str, flags: &[&str], arguments: &[&str]) -> Option<End> {
    let place = TestFolder::new();
    let program = place.compile(source, flags)?;
    let mut command = place.pagemill_run(options, program);
    command.args(arguments);
    Some(finish(command, TIMEOUT))
}

#[track_caller]
fn assert_succeeds(options: &[&str], source: &str, arguments: &[&str]) {
    if let Some(end) = run_with(options, source, &[], arguments) {
        end.assert_success();
        println!("{}", end.err);
    }
}

/// Sets of options that change how Pagemill maps or checks memory.
const OPTION_SETS: &[&[&str]] = &[
    &[],
    &["--no-huge"],
    &["--check"],
    &["--page-size", "64K"],
    &["--page-size", "64K", "--no-huge"],
    &["--page-size", "2M"],
    &["--nodes", "3"],
    &["--nodes", "3", "--page-size", "64K", "--check"],
    &["--limit", "4G"],
];

mod malloc_family {
    use super::*;

    #[track_caller]
    fn assert_case_succeeds(case: &str) {
        assert_succeeds(&[], "family.c", &[case]);
        assert_succeeds(&["--check"], "family.c", &[case]);
    }

    #[test]
    fn sizes_of_zero_return_distinct_pointers() {
        assert_case_succeeds("zero");
    }

    #[test]
    fn sizes_beyond_the_address_space_are_refused() {
        assert_case_succeeds("huge");
    }

    #[test]
    fn products_that_overflow_are_refused() {
        assert_case_succeeds("overflow");
    }

    #[test]
    fn realloc_keeps_contents_between_all_sizes() {
        assert_case_succeeds("resize");
    }

    #[test]
    fn alignments_are_kept_or_refused() {
        assert_case_succeeds("alignment");
    }

    #[test]
    fn valloc_and_pvalloc_give_pages() {
        assert_case_succeeds("pages");
    }

    #[test]
    fn every_usable_byte_can_be_used() {
        assert_case_succeeds("usable");
    }

    #[test]
    fn free_does_not_change_errno() {
        assert_case_succeeds("errno");
    }

    /// The test uses only the default options, because the resident memory depends on the options.
    #[test]
    fn trim_returns_memory_and_says_so() {
        assert_succeeds(&[], "family.c", &["trim"]);
    }

    #[test]
    fn calloc_zeroes_reused_memory() {
        assert_case_succeeds("zeroed");
        assert_succeeds(&["--no-huge", "--page-size", "64K"], "family.c", &["zeroed"]);
        assert_succeeds(&["--limit", "300M"], "family.c", &["zeroed"]);
    }

    #[test]
    fn memory_from_c_library_functions_can_be_freed() {
        assert_case_succeeds("borrowed");
    }

    #[test]
    fn the_cases_succeed_without_pagemill() {
        let place = TestFolder::new();
        let Some(program) = place.compile("family.c", &[]) else { return };
        for case in ["zero", "overflow", "resize", "pages", "usable", "zeroed", "borrowed"] {
            let mut command = place.command(&program);
            command.arg(case);
            finish(command, TIMEOUT).assert_success();
        }
    }
}

/// The function `mallctl` of jemalloc, for programs that are linked to jemalloc, and for programs that test whether the
/// function exists.
mod mallctl {
    use super::*;

    #[test]
    fn purges_return_memory_and_sums_count_it() {
        for options in [&[] as &[&str], &["--return", "keep"], &["--after", "0"]] {
            let Some(end) = run_with(options, "mallctl.c", &[], &[]) else { return };
            end.assert_success();
            assert!(end.out.starts_with("pagemill-"), "{}", end.out);
        }
    }

    #[test]
    fn a_program_linked_to_jemalloc_runs() {
        let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
        let Some(library) = folders.map(|entry| entry.path().join("libjemalloc.so.2")).find(|path| path.exists())
        else {
            println!("skipped: no libjemalloc.so.2");
            return;
        };
        let flags = ["-Wl,--no-as-needed", library.to_str().unwrap()];
        let Some(end) = run_with(&[], "mallctl.c", &flags, &[]) else { return };
        end.assert_success();
        assert!(!end.out.contains("pagemill"), "{}", end.out);
    }
}

/// With default options, the C library serves a program's malloc calls until the program has used enough memory or made
/// enough calls. From then on Pagemill serves the calls: the program has *grown*.
mod libc_fallback {
    use super::*;

    fn run(options: &[&str], source: &str, arguments: &[&str]) -> Option<End> {
        let place = TestFolder::new();
        let program = place.compile(source, &[])?;
        let mut command = place.pagemill_run(options, program);
        command.args(arguments).env_remove("PAGEMILL_AFTER");
        let end = finish(command, TIMEOUT);
        place.assert_no_files_left();
        Some(end)
    }

    #[test]
    fn all_cases_succeed() {
        for case in
            ["zero", "huge", "overflow", "resize", "alignment", "pages", "usable", "errno", "zeroed", "borrowed"]
        {
            for options in [&[] as &[&str], &["--after", "1G"], &["--after", "100K"]] {
                let Some(end) = run(options, "family.c", &[case]) else { return };
                assert!(end.status.success(), "{case} {options:?}: {} {}", end.status, end.err);
            }
        }
    }

    /// Programs that grow at different times start threads, fork, and fill all their memory with patterns. All contents
    /// must stay intact.
    #[test]
    fn contents_stay_whole_while_growing() {
        for after in ["1", "64K", "1M", "4M", "32M"] {
            for (source, arguments) in [
                ("mixed.c", &["4", "4000", "8192"] as &[&str]),
                ("fork.c", &["60"]),
                ("storm.c", &[]),
                ("chain.c", &[]),
            ] {
                let Some(end) = run(&["--after", after], source, arguments) else { return };
                assert!(end.status.success(), "{source} --after {after}: {} {}", end.status, end.err);
            }
        }
    }

    /// A small program must have no arena and no jemalloc. A program that has grown must have both. Memory that the
    /// program allocated before it grew must still be counted.
    #[test]
    fn programs_grow_when_they_use_enough_memory() {
        let Some(small) = run(&[], "libc_fallback.c", &["1000"]) else { return };
        small.assert_success();
        assert_eq!(small.out, "arena no\n");
        let Some(grown) = run(&["--json"], "libc_fallback.c", &["6000"]) else { return };
        grown.assert_success();
        assert_eq!(grown.out, "arena yes\n");
        let report: serde_json::Value = serde_json::from_str(&grown.err).unwrap();
        let peak_kib = report["peak_bytes"].as_u64().unwrap() >> 10;
        assert!((6000..11000).contains(&peak_kib), "{peak_kib} KiB");
    }

    /// Many calls must also make a program grow, even if it uses little memory.
    #[test]
    fn programs_grow_when_they_call_often() {
        let Some(end) = run(&[], "libc_fallback.c", &["0", "200000"]) else { return };
        end.assert_success();
        assert_eq!(end.out, "arena yes\n");
    }

    #[test]
    fn a_program_that_stays_small_is_reported() {
        let Some(end) = run(&["--json"], "libc_fallback.c", &["1000"]) else { return };
        let report: serde_json::Value = serde_json::from_str(&end.err).unwrap();
        assert_eq!(report["processes"], 1);
        let peak_kib = report["peak_bytes"].as_u64().unwrap() >> 10;
        assert!((1000..1600).contains(&peak_kib), "{peak_kib} KiB");
    }

    /// While the C library serves a program, the C library must report misuse and end the program.
    #[test]
    fn the_c_library_reports_misuse() {
        for case in ["stack", "small-twice"] {
            let Some(end) = run(&[], "misuse.c", &[case]) else { return };
            assert_eq!(end.code(), 128 + 6, "{case}: {}", end.err);
            // The message is that of `free()` or `munmap_chunk()`, depending on the bytes before the pointer.
            assert!(end.err.contains("invalid pointer") || end.err.contains("double free"), "{case}: {}", end.err);
        }
    }

    /// Programs grow in fork handlers, destructors and other difficult situations, which `grow.c` describes. Each
    /// program must succeed, and its memory must be reported.
    #[test]
    fn programs_grow_in_difficult_situations() {
        for case in ["handlers", "forks", "clearenv", "stack", "keys"] {
            let Some(end) = run(&["--json"], "grow.c", &[case]) else { return };
            assert!(end.status.success(), "{case}: {} {}", end.status, end.err);
            let report = end.err.lines().rfind(|line| line.starts_with('{')).unwrap_or_default();
            let report: serde_json::Value = serde_json::from_str(report).unwrap();
            assert!(report["peak_bytes"].as_u64().unwrap() > 10 << 20, "{case}: {report}");
        }
    }

    /// Under a file size limit of zero, any write to a file raises a signal that kills. Pagemill must then publish no
    /// statistics.
    #[test]
    fn no_file_needs_to_be_written() {
        let place = TestFolder::new();
        let Some(program) = place.compile("libc_fallback.c", &[]) else { return };
        for kib in [100, 12000] {
            let script = format!("ulimit -f 0; exec {} {kib}", program.display());
            let mut command = place.pagemill_run_shell(&[], &script);
            command.env_remove("PAGEMILL_AFTER");
            finish(command, TIMEOUT).assert_success();
        }
    }

    /// Under a limit of its address space, a program must never grow, because Pagemill's arena would reserve addresses.
    /// So the program has as much address space as without Pagemill.
    #[test]
    fn a_limited_address_space_is_not_reduced() {
        let place = TestFolder::new();
        let Some(program) = place.compile("libc_fallback.c", &[]) else { return };
        for what in ["-v", "-d"] {
            let script = format!("ulimit {what} 200000; exec {} 90000", program.display());
            let mut command = place.pagemill_run_shell(&[], &script);
            command.env_remove("PAGEMILL_AFTER");
            let end = finish(command, TIMEOUT);
            end.assert_success();
            assert_eq!(end.out, "arena no\n");
        }
    }

    /// Under a memory limit, Pagemill must serve a program from its first allocation on.
    #[test]
    fn a_limit_disables_the_libc_fallback() {
        let Some(end) = run(&["--limit", "1G"], "libc_fallback.c", &["1000"]) else { return };
        assert_eq!(end.out, "arena yes\n");
    }
}

mod misuse {
    use super::*;

    /// Checks that Pagemill reports a misuse of the malloc functions on standard error, with function and kind of
    /// misuse, and that it ends the program like `abort`.
    #[track_caller]
    fn assert_misuse_is_reported(options: &[&str], flags: &[&str], case: &str, words: &[&str]) {
        let Some(end) = run_with(options, "misuse.c", flags, &[case]) else { return };
        assert_eq!(end.code(), 128 + 6, "{case}: {}", end.err);
        let line = end.err.lines().find(|line| line.starts_with("pagemill: ")).unwrap_or_default();
        assert!(words.iter().all(|word| line.contains(word)), "{case}: {line}");
    }

    #[test]
    fn foreign_memory_is_not_freed() {
        for case in ["stack", "data", "mapping"] {
            assert_misuse_is_reported(&[], &[], case, &["free()", "invalid pointer"]);
            assert_misuse_is_reported(&["--check"], &[], case, &["free()", "invalid pointer"]);
        }
        assert_misuse_is_reported(&[], &[], "realloc-stack", &["realloc()", "invalid pointer"]);
    }

    /// In a program at fixed addresses, static data is below the arena. A free of an address of that data must be
    /// reported.
    #[test]
    fn foreign_memory_of_a_fixed_program_is_not_freed() {
        for options in [&[] as &[&str], &["--after", "0"], &["--check"]] {
            assert_misuse_is_reported(options, &["-no-pie"], "data", &["free()", "invalid pointer"]);
        }
    }

    #[test]
    fn pointers_into_large_memory_are_not_freed() {
        for case in ["large-inside", "large-inside-near", "huge-inside", "never-handed-out"] {
            assert_misuse_is_reported(&[], &[], case, &["free()", "invalid pointer"]);
        }
    }

    #[test]
    fn large_memory_is_not_freed_twice() {
        for case in ["large-twice", "huge-twice", "large-twice-trimmed", "large-twice-threads"] {
            assert_misuse_is_reported(&[], &[], case, &["free()", "double free"]);
        }
        assert_misuse_is_reported(&[], &[], "large-realloc-after-free", &["realloc()", "use after free"]);
    }

    #[test]
    fn small_memory_is_checked_on_request() {
        for case in ["small-twice", "small-inside", "small-odd"] {
            assert_misuse_is_reported(&["--check"], &[], case, &["free()", "double free or invalid pointer"]);
        }
        assert_misuse_is_reported(
            &["--check"],
            &[],
            "small-realloc-after-free",
            &["realloc()", "double free or invalid pointer"],
        );
    }
}

mod threads {
    use super::*;

    #[test]
    fn contents_stay_intact_with_all_options() {
        let place = TestFolder::new();
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        for options in OPTION_SETS {
            let mut command = place.pagemill_run(options, &program);
            command.args(["4", "4000", "8192"]);
            let end = finish(command, TIMEOUT);
            assert!(end.status.success(), "{options:?}: {} {}", end.status, end.err);
        }
    }

    /// A program makes many steps with small sizes, which jemalloc serves. Its contents must stay intact.
    #[test]
    fn small_contents_stay_intact() {
        assert_succeeds(&[], "mixed.c", &["6", "200000", "60"]);
        assert_succeeds(&["--check"], "mixed.c", &["6", "50000", "60"]);
    }

    /// The program requests far more memory than the limit allows. Allocations must fail, and contents must stay
    /// intact.
    #[test]
    fn contents_stay_intact_at_the_limit() {
        assert_succeeds(&["--limit", "64M"], "mixed.c", &["4", "1000", "16384", "may-fail"]);
        assert_succeeds(&["--limit", "200M", "--no-huge"], "mixed.c", &["4", "1000", "16384", "may-fail"]);
        assert_succeeds(&["--limit", "20M"], "mixed.c", &["2", "2000", "1024", "may-fail"]);
    }

    #[test]
    fn a_refused_realloc_loses_nothing() {
        assert_succeeds(&["--limit", "64M"], "refused.c", &[]);
        assert_succeeds(&["--limit", "64M", "--no-huge"], "refused.c", &[]);
    }

    #[test]
    fn short_lived_threads_leak_nothing() {
        assert_succeeds(&[], "storm.c", &[]);
        assert_succeeds(&["--nodes", "3"], "storm.c", &[]);
    }
}

mod processes {
    use super::*;

    #[test]
    fn fork_with_allocating_threads() {
        assert_succeeds(&[], "fork.c", &["160"]);
    }

    #[test]
    fn fork_with_allocating_threads_under_a_limit() {
        assert_succeeds(&["--limit", "1G", "--report"], "fork.c", &["80"]);
        assert_succeeds(&["--check", "--no-huge"], "fork.c", &["40"]);
    }

    #[test]
    fn vfork_and_spawn_with_allocating_threads() {
        assert_succeeds(&[], "vfork.c", &[]);
        assert_succeeds(&["--limit", "1G"], "vfork.c", &[]);
    }

    #[test]
    fn memory_is_available_before_and_after_main() {
        for options in [&[] as &[&str], &["--check"], &["--limit", "200M"]] {
            let Some(end) = run_with(options, "edges.c", &[], &[]) else { return };
            end.assert_success();
            assert_eq!(end.out, "handler\ndestructor\n");
        }
    }

    #[test]
    fn libraries_are_loaded_and_unloaded() {
        let place = TestFolder::new();
        let Some(plugin) = place.compile("plugin.cpp", &["-shared", "-fPIC"]) else { return };
        let Some(loader) = place.compile("loader.c", &["-ldl"]) else { return };
        let mut command = place.pagemill_run(&[], loader);
        command.arg(plugin);
        finish(command, TIMEOUT).assert_success();
    }
}

mod large {
    use super::*;

    #[test]
    fn one_allocation_grows_and_shrinks() {
        assert_succeeds(&[], "chain.c", &[]);
    }

    #[test]
    fn one_allocation_grows_and_shrinks_in_small_pages() {
        assert_succeeds(&["--no-huge", "--page-size", "64K"], "chain.c", &[]);
    }

    #[test]
    fn untouched_zeros_are_not_resident() {
        assert_succeeds(&[], "sparse.c", &[]);
        assert_succeeds(&["--page-size", "64K"], "sparse.c", &[]);
        assert_succeeds(&["--limit", "600M"], "sparse.c", &[]);
    }

    #[test]
    fn the_option_no_huge_prevents_huge_pages() {
        let Some(end) = run_with(&["--no-huge"], "held.c", &[], &["200", "1024"]) else { return };
        end.assert_success();
        assert_eq!(end.out, "huge 0 KiB\n");
        let Some(end) = run_with(&["--no-huge"], "held.c", &[], &["100", "1"]) else { return };
        assert_eq!(end.out, "huge 0 KiB\n");
    }

    #[test]
    fn cpp_operators_use_pagemill() {
        let Some(end) = run_with(&[], "new.cpp", &["-std=c++17"], &[]) else { return };
        end.assert_success();
    }
}

mod missing_resources {
    use super::*;

    /// With a limited address space, the arena is smaller or missing. Allocations may then fail, but the program must
    /// still end with success.
    #[test]
    fn a_small_address_space_suffices() {
        let place = TestFolder::new();
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        for kib in [300_000, 700_000, 2_000_000, 20_000_000] {
            let script = format!("ulimit -v {kib}; exec {} 2 3000 1024 may-fail", program.display());
            let end = finish(place.pagemill_run_shell(&[], &script), TIMEOUT);
            assert!(end.status.success(), "ulimit -v {kib}: {} {}", end.status, end.err);
        }
    }

    /// With very little address space, a shell must still print the same results as without Pagemill.
    #[test]
    fn a_tiny_address_space_is_survived() {
        let place = TestFolder::new();
        for kib in [60_000, 120_000, 200_000] {
            let script = format!("ulimit -v {kib}; exec sh -c 'echo $((6 * 7)); exit 3'");
            let mut without = place.command("sh");
            without.args(["-c", &script]);
            assert_eq!(finish(without, TIMEOUT).out, "42\n");
            let end = finish(place.pagemill_run_shell(&[], &script), TIMEOUT);
            assert_eq!((end.out.as_str(), end.code()), ("42\n", 3), "ulimit -v {kib}: {}", end.err);
        }
    }

    /// When the address space of a program is used up, `malloc` must return null.
    #[test]
    fn malloc_fails_when_the_address_space_is_used_up() {
        let place = TestFolder::new();
        let Some(program) = place.compile("limit.c", &[]) else { return };
        let script = format!("ulimit -v 1500000; exec {} 1024 300 1500 same", program.display());
        let end = finish(place.pagemill_run_shell(&[], &script), TIMEOUT);
        end.assert_success();
    }

    fn without_proc(place: &TestFolder, command: &str) -> Command {
        let mut without = place.command("unshare");
        without.args(["-m", "sh", "-c"]).arg(format!("mount -t tmpfs none /proc && {command}"));
        without
    }

    /// Pagemill must work without `/proc`, whether `/proc` is missing for the command or only for the program.
    #[test]
    fn proc_is_not_needed() {
        let place = TestFolder::new();
        if !common::may_mount() {
            return;
        }
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        let program = format!("{} 2 3000 4096", program.display());
        let command = without_proc(&place, &format!("{} run --limit 1G -- {program}", common::PAGEMILL));
        finish(command, TIMEOUT).assert_success();
        let script = format!("unshare -m sh -c 'mount -t tmpfs none /proc && exec {program}'");
        finish(place.pagemill_run_shell(&["--report"], &script), TIMEOUT).assert_success();
    }

    /// A program has no free file descriptor at its first allocation. The program must still work.
    #[test]
    fn no_file_descriptor_is_needed_after_the_start() {
        let place = TestFolder::new();
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        let script = format!("ulimit -n 3; exec {} 2 3000 4096", program.display());
        let end = finish(place.pagemill_run_shell(&["--limit", "1G"], &script), TIMEOUT);
        // The loader itself needs a descriptor. If it has none, the program cannot start.
        if !end.err.contains("error while loading shared libraries") {
            end.assert_success();
        }
    }

    /// The helper thread is disabled. All functions of the allocator that do not need the helper must work.
    #[test]
    fn the_helper_thread_is_not_needed() {
        let place = TestFolder::new();
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        let mut command = place.pagemill_run(&["--limit", "300M"], program);
        command.args(["2", "5000", "8192", "may-fail"]).env("PAGEMILL_HELPER", "off");
        finish(command, TIMEOUT).assert_success();
    }

    /// If a program's standard streams are closed, Pagemill's files must not get the descriptor numbers of these
    /// streams. Otherwise output of the program could reach such a file.
    #[test]
    fn closed_standard_streams_stay_closed() {
        let place = TestFolder::new();
        let script = "exec 0<&- 2>&-; ls -l /proc/self/fd 1>&1 | grep -c pagemill; true";
        let end = finish_with_input(place.pagemill_run_shell(&["--limit", "1G"], script), b"x".to_vec(), TIMEOUT);
        assert_eq!(end.out, "0\n");
    }
}
