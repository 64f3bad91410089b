//! The malloc family through the preload library, as C and C++ programs see it.
//!
//! Each program of `tests/c` checks itself and exits with 0. On an error it prints file and line. Its first lines
//! describe it.

mod common;

use common::{End, Place, STUCK_AFTER, finish, finish_with_input};
use std::process::Command;

/// Compiles a program and runs it under `pagemill run OPTIONS`; `None` if it cannot be compiled.
fn run_with(options: &[&str], source: &str, flags: &[&str], arguments: &[&str]) -> Option<End> {
    let place = Place::new();
    let program = place.compile(source, flags)?;
    let mut command = place.pagemill_run(options, program);
    command.args(arguments);
    Some(finish(command, STUCK_AFTER))
}

#[track_caller]
fn succeeds(options: &[&str], source: &str, arguments: &[&str]) {
    if let Some(end) = run_with(options, source, &[], arguments) {
        end.assert_success();
        println!("{}", end.err);
    }
}

/// All sets of options that change how memory is mapped or checked.
const WAYS: &[&[&str]] = &[
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

mod family {
    use super::*;

    #[track_caller]
    fn holds(case: &str) {
        succeeds(&[], "family.c", &[case]);
        succeeds(&["--check"], "family.c", &[case]);
    }

    #[test]
    fn sizes_of_zero_give_pointers_of_their_own() {
        holds("zero");
    }

    #[test]
    fn sizes_beyond_all_memory_are_refused() {
        holds("huge");
    }

    #[test]
    fn products_that_overflow_are_refused() {
        holds("overflow");
    }

    #[test]
    fn realloc_keeps_contents_between_all_sizes() {
        holds("resize");
    }

    #[test]
    fn alignments_are_kept_or_refused() {
        holds("alignment");
    }

    #[test]
    fn valloc_and_pvalloc_give_pages() {
        holds("pages");
    }

    #[test]
    fn every_usable_byte_can_be_used() {
        holds("usable");
    }

    #[test]
    fn free_leaves_errno_alone() {
        holds("errno");
    }

    /// With default options only: how much is resident depends on them.
    #[test]
    fn trim_gives_back_and_tells() {
        succeeds(&[], "family.c", &["trim"]);
    }

    #[test]
    fn calloc_is_zero_whatever_was_there() {
        holds("zeroed");
        succeeds(&["--no-huge", "--page-size", "64K"], "family.c", &["zeroed"]);
        succeeds(&["--limit", "300M"], "family.c", &["zeroed"]);
    }

    #[test]
    fn the_c_library_allocates_here_too() {
        holds("borrowed");
    }

    #[test]
    fn the_programs_hold_without_pagemill() {
        let place = Place::new();
        let Some(program) = place.compile("family.c", &[]) else { return };
        for case in ["zero", "overflow", "resize", "pages", "usable", "zeroed", "borrowed"] {
            let mut command = place.command(&program);
            command.arg(case);
            finish(command, STUCK_AFTER).assert_success();
        }
    }
}

/// jemalloc's control call, for programs that are linked to jemalloc and for those that test whether it exists.
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
    fn a_program_linked_to_jemalloc_is_served() {
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

/// With default options: the C library serves a program until it has grown.
mod libc_fallback {
    use super::*;

    fn run(options: &[&str], source: &str, arguments: &[&str]) -> Option<End> {
        let place = Place::new();
        let program = place.compile(source, &[])?;
        let mut command = place.pagemill_run(options, program);
        command.args(arguments).env_remove("PAGEMILL_AFTER");
        let end = finish(command, STUCK_AFTER);
        place.assert_swept();
        Some(end)
    }

    #[test]
    fn the_family_holds() {
        for case in
            ["zero", "huge", "overflow", "resize", "alignment", "pages", "usable", "errno", "zeroed", "borrowed"]
        {
            for options in [&[] as &[&str], &["--after", "1G"], &["--after", "100K"]] {
                let Some(end) = run(options, "family.c", &[case]) else { return };
                assert!(end.status.success(), "{case} {options:?}: {} {}", end.status, end.err);
            }
        }
    }

    /// Threads, forks and patterns in all memory, with programs that grow at different moments.
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

    /// A small program has no arena and no jemalloc. Once grown it has both, and the memory that it held before is
    /// still counted.
    #[test]
    fn programs_grow_once_they_hold_enough() {
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

    /// Many calls make a program grow, too, however little memory it holds.
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

    /// Misuse ends the program with a message of the C library.
    #[test]
    fn misuse_is_named_by_the_c_library() {
        for case in ["stack", "small-twice"] {
            let Some(end) = run(&[], "misuse.c", &[case]) else { return };
            assert_eq!(end.code(), 128 + 6, "{case}: {}", end.err);
            // `free()` or `munmap_chunk()`, depending on the bytes before the pointer.
            assert!(end.err.contains("invalid pointer") || end.err.contains("double free"), "{case}: {}", end.err);
        }
    }

    /// The hardest moments to grow; see the program. Each case ends, and the memory that it held is reported.
    #[test]
    fn programs_grow_at_awkward_moments() {
        for case in ["handlers", "forks", "clearenv", "stack", "keys"] {
            let Some(end) = run(&["--json"], "grow.c", &[case]) else { return };
            assert!(end.status.success(), "{case}: {} {}", end.status, end.err);
            let report = end.err.lines().rfind(|line| line.starts_with('{')).unwrap_or_default();
            let report: serde_json::Value = serde_json::from_str(report).unwrap();
            assert!(report["peak_bytes"].as_u64().unwrap() > 10 << 20, "{case}: {report}");
        }
    }

    /// A limit of zero on file sizes: a write would raise a deadly signal. Figures are not published then.
    #[test]
    fn no_file_need_be_written() {
        let place = Place::new();
        let Some(program) = place.compile("libc_fallback.c", &[]) else { return };
        for kib in [100, 12000] {
            let script = format!("ulimit -f 0; exec {} {kib}", program.display());
            let mut command = place.shell(&[], &script);
            command.env_remove("PAGEMILL_AFTER");
            finish(command, STUCK_AFTER).assert_success();
        }
    }

    /// With a limited address space a program has as much of it as without Pagemill: it never grows.
    #[test]
    fn few_addresses_are_left_to_the_program() {
        let place = Place::new();
        let Some(program) = place.compile("libc_fallback.c", &[]) else { return };
        for what in ["-v", "-d"] {
            let script = format!("ulimit {what} 200000; exec {} 90000", program.display());
            let mut command = place.shell(&[], &script);
            command.env_remove("PAGEMILL_AFTER");
            let end = finish(command, STUCK_AFTER);
            end.assert_success();
            assert_eq!(end.out, "arena no\n");
        }
    }

    /// A limit applies from the first byte on.
    #[test]
    fn limits_end_the_libc_fallback() {
        let Some(end) = run(&["--limit", "1G"], "libc_fallback.c", &["1000"]) else { return };
        assert_eq!(end.out, "arena yes\n");
    }
}

mod misuse {
    use super::*;

    /// The misuse is reported on standard error, by function and kind, and ends the program as `abort` does.
    #[track_caller]
    fn is_named(options: &[&str], flags: &[&str], case: &str, words: &[&str]) {
        let Some(end) = run_with(options, "misuse.c", flags, &[case]) else { return };
        assert_eq!(end.code(), 128 + 6, "{case}: {}", end.err);
        let line = end.err.lines().find(|line| line.starts_with("pagemill: ")).unwrap_or_default();
        assert!(words.iter().all(|word| line.contains(word)), "{case}: {line}");
    }

    #[test]
    fn foreign_memory_is_not_freed() {
        for case in ["stack", "data", "mapping"] {
            is_named(&[], &[], case, &["free()", "invalid pointer"]);
            is_named(&["--check"], &[], case, &["free()", "invalid pointer"]);
        }
        is_named(&[], &[], "realloc-stack", &["realloc()", "invalid pointer"]);
    }

    /// Static data of a program at fixed addresses is below the arena.
    #[test]
    fn foreign_memory_of_a_fixed_program_is_not_freed() {
        for options in [&[] as &[&str], &["--after", "0"], &["--check"]] {
            is_named(options, &["-no-pie"], "data", &["free()", "invalid pointer"]);
        }
    }

    #[test]
    fn the_inside_of_large_memory_is_not_freed() {
        for case in ["large-inside", "large-inside-near", "huge-inside", "never-handed-out"] {
            is_named(&[], &[], case, &["free()", "invalid pointer"]);
        }
    }

    #[test]
    fn large_memory_is_not_freed_twice() {
        for case in ["large-twice", "huge-twice", "large-twice-trimmed", "large-twice-threads"] {
            is_named(&[], &[], case, &["free()", "double free"]);
        }
        is_named(&[], &[], "large-realloc-after-free", &["realloc()", "use after free"]);
    }

    #[test]
    fn small_memory_is_checked_on_request() {
        for case in ["small-twice", "small-inside", "small-odd"] {
            is_named(&["--check"], &[], case, &["free()", "double free or invalid pointer"]);
        }
        is_named(&["--check"], &[], "small-realloc-after-free", &["realloc()", "double free or invalid pointer"]);
    }
}

mod threads {
    use super::*;

    #[test]
    fn contents_stay_whole_in_every_way() {
        let place = Place::new();
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        for options in WAYS {
            let mut command = place.pagemill_run(options, &program);
            command.args(["4", "4000", "8192"]);
            let end = finish(command, STUCK_AFTER);
            assert!(end.status.success(), "{options:?}: {} {}", end.status, end.err);
        }
    }

    /// Small sizes only, many steps: calls that the linked allocator serves.
    #[test]
    fn small_contents_stay_whole() {
        succeeds(&[], "mixed.c", &["6", "200000", "60"]);
        succeeds(&["--check"], "mixed.c", &["6", "50000", "60"]);
    }

    /// Far more is requested than allowed; calls fail, contents stay intact.
    #[test]
    fn contents_stay_whole_at_the_limit() {
        succeeds(&["--limit", "64M"], "mixed.c", &["4", "1000", "16384", "may-fail"]);
        succeeds(&["--limit", "200M", "--no-huge"], "mixed.c", &["4", "1000", "16384", "may-fail"]);
        succeeds(&["--limit", "20M"], "mixed.c", &["2", "2000", "1024", "may-fail"]);
    }

    #[test]
    fn a_refused_realloc_loses_nothing() {
        succeeds(&["--limit", "64M"], "refused.c", &[]);
        succeeds(&["--limit", "64M", "--no-huge"], "refused.c", &[]);
    }

    #[test]
    fn thousands_of_short_threads_leave_nothing() {
        succeeds(&[], "storm.c", &[]);
        succeeds(&["--nodes", "3"], "storm.c", &[]);
    }
}

mod processes {
    use super::*;

    #[test]
    fn fork_beside_allocating_threads() {
        succeeds(&[], "fork.c", &["160"]);
    }

    #[test]
    fn fork_beside_allocating_threads_with_a_limit() {
        succeeds(&["--limit", "1G", "--report"], "fork.c", &["80"]);
        succeeds(&["--check", "--no-huge"], "fork.c", &["40"]);
    }

    #[test]
    fn vfork_and_spawn_beside_allocating_threads() {
        succeeds(&[], "vfork.c", &[]);
        succeeds(&["--limit", "1G"], "vfork.c", &[]);
    }

    #[test]
    fn memory_before_main_and_after_it() {
        for options in [&[] as &[&str], &["--check"], &["--limit", "200M"]] {
            let Some(end) = run_with(options, "edges.c", &[], &[]) else { return };
            end.assert_success();
            assert_eq!(end.out, "handler\ndestructor\n");
        }
    }

    #[test]
    fn libraries_come_and_go() {
        let place = Place::new();
        let Some(plugin) = place.compile("plugin.cpp", &["-shared", "-fPIC"]) else { return };
        let Some(loader) = place.compile("loader.c", &["-ldl"]) else { return };
        let mut command = place.pagemill_run(&[], loader);
        command.arg(plugin);
        finish(command, STUCK_AFTER).assert_success();
    }
}

mod large {
    use super::*;

    #[test]
    fn one_allocation_grows_and_shrinks() {
        succeeds(&[], "chain.c", &[]);
    }

    #[test]
    fn one_allocation_grows_and_shrinks_in_small_pages() {
        succeeds(&["--no-huge", "--page-size", "64K"], "chain.c", &[]);
    }

    #[test]
    fn ten_gigabytes_of_zeros_cost_what_is_touched() {
        succeeds(&[], "sparse.c", &[]);
        succeeds(&["--page-size", "64K"], "sparse.c", &[]);
        succeeds(&["--limit", "600M"], "sparse.c", &[]);
    }

    #[test]
    fn no_huge_pages_means_none() {
        let Some(end) = run_with(&["--no-huge"], "held.c", &[], &["200", "1024"]) else { return };
        end.assert_success();
        assert_eq!(end.out, "huge 0 KiB\n");
        let Some(end) = run_with(&["--no-huge"], "held.c", &[], &["100", "1"]) else { return };
        assert_eq!(end.out, "huge 0 KiB\n");
    }

    #[test]
    fn cpp_allocates_here() {
        let Some(end) = run_with(&[], "new.cpp", &["-std=c++17"], &[]) else { return };
        end.assert_success();
    }
}

mod lacking {
    use super::*;

    /// With a limited address space there is a smaller arena, or none, and large requests are refused.
    #[test]
    fn little_address_space_is_enough() {
        let place = Place::new();
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        for kib in [300_000, 700_000, 2_000_000, 20_000_000] {
            let script = format!("ulimit -v {kib}; exec {} 2 3000 1024 may-fail", program.display());
            let end = finish(place.shell(&[], &script), STUCK_AFTER);
            assert!(end.status.success(), "ulimit -v {kib}: {} {}", end.status, end.err);
        }
    }

    /// With very little address space, a shell works as it does without Pagemill.
    #[test]
    fn hardly_any_address_space_is_survived() {
        let place = Place::new();
        for kib in [60_000, 120_000, 200_000] {
            let script = format!("ulimit -v {kib}; exec sh -c 'echo $((6 * 7)); exit 3'");
            let mut without = place.command("sh");
            without.args(["-c", &script]);
            assert_eq!(finish(without, STUCK_AFTER).out, "42\n");
            let end = finish(place.shell(&[], &script), STUCK_AFTER);
            assert_eq!((end.out.as_str(), end.code()), ("42\n", 3), "ulimit -v {kib}: {}", end.err);
        }
    }

    /// `malloc` never takes more than the address space has, and returns null then.
    #[test]
    fn the_address_space_runs_out_in_order() {
        let place = Place::new();
        let Some(program) = place.compile("limit.c", &[]) else { return };
        let script = format!("ulimit -v 1500000; exec {} 1024 300 1500 same", program.display());
        let end = finish(place.shell(&[], &script), STUCK_AFTER);
        end.assert_success();
    }

    fn without_proc(place: &Place, command: &str) -> Command {
        let mut without = place.command("unshare");
        without.args(["-m", "sh", "-c"]).arg(format!("mount -t tmpfs none /proc && {command}"));
        without
    }

    /// Without `/proc`, for the command itself and for the program alone.
    #[test]
    fn proc_is_not_needed() {
        let place = Place::new();
        if !common::may_mount() {
            return;
        }
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        let program = format!("{} 2 3000 4096", program.display());
        let command = without_proc(&place, &format!("{} run --limit 1G -- {program}", common::PAGEMILL));
        finish(command, STUCK_AFTER).assert_success();
        let script = format!("unshare -m sh -c 'mount -t tmpfs none /proc && exec {program}'");
        finish(place.shell(&["--report"], &script), STUCK_AFTER).assert_success();
    }

    /// No file descriptor is free for helper files when the program allocates first.
    #[test]
    fn no_file_descriptor_is_needed_later() {
        let place = Place::new();
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        let script = format!("ulimit -n 3; exec {} 2 3000 4096", program.display());
        let end = finish(place.shell(&["--limit", "1G"], &script), STUCK_AFTER);
        // The loader itself needs one descriptor. Without it the program cannot start.
        if !end.err.contains("error while loading shared libraries") {
            end.assert_success();
        }
    }

    /// Threads cannot be created: there is no helper, and everything else works.
    #[test]
    fn the_helper_thread_is_not_needed() {
        let place = Place::new();
        let Some(program) = place.compile("mixed.c", &[]) else { return };
        let mut command = place.pagemill_run(&["--limit", "300M"], program);
        command.args(["2", "5000", "8192", "may-fail"]).env("PAGEMILL_HELPER", "off");
        finish(command, STUCK_AFTER).assert_success();
    }

    /// With closed standard streams, no file of Pagemill takes their place, and nothing is written into the program's
    /// files.
    #[test]
    fn closed_standard_streams_stay_closed() {
        let place = Place::new();
        let script = "exec 0<&- 2>&-; ls -l /proc/self/fd 1>&1 | grep -c pagemill; true";
        let end = finish_with_input(place.shell(&["--limit", "1G"], script), b"x".to_vec(), STUCK_AFTER);
        assert_eq!(end.out, "0\n");
    }
}
