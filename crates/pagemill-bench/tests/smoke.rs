//! Runs every experiment in its smallest form. Each workload must run, must report no wrong answer, and must report its
//! metrics.
//!
//! A test that needs a library that is not built or installed is skipped, and prints that.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

mod runner;

use runner::{bench, rows, value};

/// The workload of the experiment `ebizzy` copies chunks of keys and searches the copies for 50 ms. Every search must
/// find its key, and no allocation may fail.
#[test]
fn ebizzy_searches_find_every_key() {
    for sizes in ["fixed", "mixed"] {
        let line = rows(&["__ebizzy", "--threads", "2", "--warm-ms", "5", "--measure-ms", "50", "--sizes", sizes]);

        assert!(line[0]["records_per_second"].as_f64().is_some_and(|rate| rate > 0.0));
        assert_eq!(line[0]["refused"], 0);
    }
}

/// The workload of `ebizzy` runs with its copies in every kind of memory. No copy may be damaged or purged. A copy must
/// cause more than 30 page faults on average with `MADV_DONTNEED`, and at most 30 with the other kinds of memory.
#[test]
fn ebizzy_runs_with_every_kind_of_memory() {
    for memory in ["malloc", "handles", "free", "dontneed"] {
        let times = ["--threads", "2", "--warm-ms", "20", "--measure-ms", "50"];
        let line = rows(&[&["__ebizzy", "--memory", memory, "--sum-every", "2"], &times[..]].concat());

        assert!(line[0]["records_per_second"].as_f64().is_some_and(|rate| rate > 0.0));
        assert_eq!(
            (line[0]["refused"].as_u64(), line[0]["purged_per_record"].as_f64()),
            (Some(0), Some(0.0)),
            "{memory}"
        );
        let faults = line[0]["faults_per_record"].as_f64().expect("a number");
        assert_eq!(faults > 30.0, memory == "dontneed", "{memory}: {faults} faults a record");
    }
}

/// The experiment `ebizzy` runs with glibc's default settings, and with settings by which glibc returns memory at once.
/// A record must cause less than one page fault on average with the default settings, and more than 30 with the others,
/// which shows that the settings had an effect.
#[test]
fn returning_memory_at_once_causes_page_faults() {
    let rows =
        rows(&["ebizzy", "--quick", "--json", "--samples", "1", "--threads", "1", "--only", "glibc,glibc-eager"]);

    let faults = |subject| value(&rows, subject, "faults_per_record").expect("both ran");
    assert!(faults("glibc-eager") > 30.0, "{rows:?}");
    assert!(faults("glibc") < 1.0, "{rows:?}");
    let eager = rows.iter().find(|row| row["subject"] == "glibc-eager").expect("it ran");
    assert_eq!(eager["baseline"], "glibc");
}

/// Threads that fill memory, check it and free it run for a tenth of a second, in one process and in two. Their write
/// rate must not be zero, no allocation may fail, and no tag may be wrong.
#[test]
fn writer_threads_write_and_check_memory() {
    for processes in ["1", "2"] {
        let line = rows(&["__writers", "--processes", processes, "--threads", "2", "--mib", "16", "--run-ms", "100"]);

        assert!(line[0]["gib_per_second"].as_f64().is_some_and(|rate| rate > 0.0));
        assert_eq!(line[0]["refused"], 0);
    }
}

/// One process frees memory that another process then needs. With glibc settings that return memory at once, no process
/// may be killed. Skipped if the bench exits with 2, as it does without cgroups.
#[test]
fn handover_survives_with_eager_glibc() {
    let arguments = ["survive", "--handover", "--quick", "--json", "--samples", "1", "--only", "glibc-eager"];
    let output = bench(&arguments);
    if output.status.code() == Some(2) {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let rows = rows(&arguments);

    assert_eq!(value(&rows, "glibc-eager", "survived"), Some(1.0), "{rows:?}");
    assert!(value(&rows, "glibc-eager", "gib_per_second").is_some_and(|speed| speed > 0.0));
}

/// Processes free memory in allocations of one size, which another process then needs. With glibc settings that return
/// memory at once, no process may be killed in any variant. A size that is too small must be refused. Skipped if the
/// bench exits with 2, as it does without cgroups.
#[test]
fn handover_of_one_size_survives_with_eager_glibc() {
    let arguments = ["survive", "--handover", "--quick", "--json", "--trials", "1", "--sizes"];
    let all = "all,runs,random,several,busy,limit";
    let run = |size, only| [&arguments[..], &[size, "--variants", all, "--only", only]].concat();
    assert_eq!(bench(&run("8", "glibc-eager")).status.code(), Some(2), "a piece has sixteen bytes at least");
    let output = bench(&run("1M", "glibc-eager"));
    if output.status.code() == Some(2) {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let rows = rows(&run("1M", "glibc-eager"));

    let survived: Vec<_> = rows.iter().filter(|row| row["metric"] == "survived").collect();
    // Only Pagemill has an option for the limit of a process tree, so the variant `limit` does not run under glibc.
    assert_eq!(survived.len(), 5, "{rows:?}");
    assert!(survived.iter().all(|row| row["value"] == 1.0), "{rows:?}");
}

/// A process fills 16 MiB with eight threads and checks every word. It must report a duration, and no allocation may
/// fail.
#[test]
fn newcomer_checks_every_word() {
    let line = rows(&["__newcomer", "--mib", "16", "--threads", "8"]);

    assert!(line[0]["ms"].as_f64().is_some_and(|time| time > 0.0) && line[0]["refused"] == 0, "{line:?}");
}

/// A process requests free memory from another process of its process tree. The request must be answered, and its
/// latency must be reported. This part is skipped if the command `pagemill` is not built. Without a process tree, the
/// requesting process must report an error.
#[test]
fn requests_to_a_sibling_are_timed() {
    let rows = rows(&["survive", "--reaction", "--quick", "--json", "--samples", "1", "--only", "pagemill,glibc"]);
    match value(&rows, "pagemill", "median_us") {
        // The number of late requests depends on the machine.
        Some(time) => assert!(time > 0.0 && value(&rows, "pagemill", "late").is_some(), "{rows:?}"),
        None => println!("skipped: the command or the library is not built"),
    }

    let alone = bench(&["__asker", "--hoard-mib", "2", "--ask-mib", "1", "--asks", "1"]);
    assert!(String::from_utf8_lossy(&alone.stderr).contains("no tree to ask"));
}

/// `ebizzy --cost --only glibc` must succeed, and measure glibc without a comparison. `--cost` must be refused together
/// with `--hog`.
#[test]
fn cost_measures_only_named_subjects() {
    let rows = rows(&["ebizzy", "--cost", "--quick", "--json", "--threads", "2", "--only", "glibc"]);

    assert!(value(&rows, "glibc", "records_per_second").is_some_and(|rate| rate > 0.0));
    assert_eq!(bench(&["ebizzy", "--cost", "--hog"]).status.code(), Some(2));
}

/// The filler, a process that allocates memory at a steady rate, starts when its stop file already exists. It must
/// report that its floor stopped it only if the floor is above the machine's available memory.
#[test]
fn filler_stops_at_its_floor() {
    for (floor_mib, stopped) in [("16", 0), ("99999999", 1)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("stop"), "").expect("written");
        let folder = folder.path().display().to_string();
        let line = rows(&[
            "__filler",
            "--mib",
            "8",
            "--mib-per-second",
            "1024",
            "--floor-mib",
            floor_mib,
            "--folder",
            &folder,
        ]);
        assert_eq!(line[0]["stopped"], stopped, "{line:?}");
    }
}

/// Each allocator library must serve malloc when it is preloaded; otherwise its workload fails. Libraries that are not
/// found are skipped.
#[test]
fn peer_libraries_serve_malloc() {
    for subject in ["jemalloc", "mimalloc", "tcmalloc", "pagemill"] {
        let output = bench(&["ebizzy", "--quick", "--json", "--samples", "1", "--threads", "1", "--only", subject]);
        let complaint = String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(2) if complaint.contains("not found") => println!("skipped: {complaint}"),
            Some(0) => {
                let text = String::from_utf8_lossy(&output.stdout);
                assert!(text.contains("records_per_second"), "{text}{complaint}");
            }
            code => panic!("{subject}: {code:?} {complaint}"),
        }
    }
}

/// Each pattern of small allocations runs for 2 ms, and one pattern runs for a given number of malloc and free pairs.
/// No allocation may lose its tag, and the duration or the number of pairs must be reported.
#[test]
fn small_allocations_keep_their_tags() {
    for pattern in ["pair", "batch", "churn"] {
        let arguments = ["__small", "--pattern", pattern, "--size", "64", "--threads", "2"];
        let line = rows(&[&arguments[..], &["--measure-ms", "2"]].concat());

        assert!(line[0]["ns_per_pair"].as_f64().is_some_and(|time| time > 0.0));
    }
    let line = rows(&["__small", "--pattern", "pair", "--size", "64", "--pairs", "3000"]);
    assert_eq!(line[0]["pairs"], 3000);
}

/// 16 MiB in small allocations are freed while the last allocation stays live. A call of `malloc_trim` must then return
/// more than 10 MiB.
#[test]
fn giveback_measures_returned_memory() {
    let line = rows(&["__giveback", "--mib", "16", "--piece", "4096", "--how", "malloc-trim"]);

    assert!(line[0]["returned_mib"].as_f64().is_some_and(|mib| mib > 10.0), "{line:?}");
}

/// The experiment `startup` must report how many milliseconds the program `true` takes under glibc, without a preloaded
/// library.
#[test]
fn startup_time_of_program_true_is_measured() {
    let rows = rows(&["startup", "--quick", "--json", "--samples", "1", "--only", "glibc"]);

    assert!(value(&rows, "none", "ms").is_some_and(|time| time > 0.0));
}

/// The experiment `footprint --return` must report the memory that a process still holds after each second. glibc must
/// return allocations of 1 MiB at once, since it maps each of them separately.
#[test]
fn footprint_reports_memory_after_each_second() {
    let rows =
        rows(&["footprint", "--return", "--quick", "--json", "--samples", "1", "--only", "glibc", "--sizes", "1M"]);

    assert!(value(&rows, "glibc", "filled_mib").is_some_and(|mib| mib > 60.0), "{rows:?}");
    let held: Vec<_> = rows.iter().filter(|row| row["metric"] == "more_mib").collect();
    assert!(held.len() == 3 && held.iter().all(|row| row["value"].as_f64().is_some_and(|mib| mib < 16.0)), "{rows:?}");
    assert_eq!(bench(&["footprint", "--return", "--programs", "git"]).status.code(), Some(2));
}

/// The experiment `footprint` must report the memory and the CPU time of threads that replace allocations at random. A
/// program whose sources are missing must be reported as not measured, with the option that names the folder of the
/// sources.
#[test]
fn footprint_measures_churn() {
    let arguments = ["footprint", "--quick", "--json", "--samples", "1", "--only", "glibc", "--programs"];
    let churn = rows(&[&arguments[..], &["churn"]].concat());
    for metric in ["process_peak_mib", "steady_mib", "last_quarter_mib", "after_mib", "live_mib", "cpu_us_per_act"] {
        assert!(value(&churn, "glibc", metric).is_some_and(|value| value > 0.0), "{metric}: {churn:?}");
    }
    // The first sample is taken while the threads still allocate their memory, so the bounds are wide.
    let live = value(&churn, "glibc", "live_mib").expect("it is there");
    assert!((10.0..200.0).contains(&live), "{churn:?}");

    let output = bench(&[&arguments[..], &["mstress"]].concat());
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && complaint.contains("--mimalloc-bench DIR"), "{complaint}");
}

/// The experiment `footprint` must compile benchmark programs from the given folder, which here contains a test program
/// with the output format of the benchmark larson. The program that uses pandas must run if pandas is installed.
#[test]
fn footprint_compiles_and_measures_other_programs() {
    let checkout = tempfile::tempdir().expect("a temporary folder");
    let sources = checkout.path().join("bench/larson");
    std::fs::create_dir_all(&sources).expect("made");
    let program = "#include <cstdio>\n#include <cstdlib>\n#include <unistd.h>\n\
        int main(int n, char **) { void *p = malloc(64); usleep(50000); free(p); printf(\"Throughput = %d operations per second\", n); }\n";
    std::fs::write(sources.join("larson.cpp"), program).expect("written");
    let folder = checkout.path().display().to_string();
    let arguments =
        ["footprint", "--quick", "--json", "--samples", "1", "--only", "glibc", "--mimalloc-bench", &folder];
    let output = bench(&[&arguments[..], &["--programs", "larson,rptest,pandas"]].concat());
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("rptest/rptest.c is not there"), "{complaint}");
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of = |case: &str, metric: &str| {
        let row = rows.iter().find(|row| row["case"] == case && row["metric"] == metric);
        row.and_then(|row| row["value"].as_f64())
    };

    match complaint.contains("larson: c++ is not installed") {
        true => println!("skipped: {complaint}"),
        false => assert!(of("larson", "cpu_us_per_act").is_some_and(|time| time > 0.0), "{text}{complaint}"),
    }
    match complaint.contains("gap: pandas") {
        true => println!("skipped: {complaint}"),
        false => assert!(of("pandas", "after_mib").is_some_and(|mib| mib > 10.0), "{text}{complaint}"),
    }
}

/// The experiment `startup` must report a row for each of: `true` under `pagemill run`, `true` under a program that
/// starts it, short programs, and a test configure script. A script whose output changes from run to run must be
/// reported as a wrong answer. Skipped if the command `pagemill` is not built.
#[test]
fn startup_measures_process_trees() {
    let source = tempfile::tempdir().expect("a temporary folder");
    let script = source.path().join("configure");
    // `install` makes the script, so that this process never has it open for writing. Otherwise a child of a parallel
    // test could inherit the descriptor, and to run the script would fail with `ETXTBSY`.
    let write = |text: &str| {
        let text_file = source.path().join("configure.source");
        std::fs::write(&text_file, text).expect("written");
        let mut install = Command::new("install");
        assert!(install.args(["-m", "755"]).args([&text_file, &script]).status().expect("install runs").success());
    };
    let folder = source.path().display().to_string();
    let arguments = ["startup", "--quick", "--json", "--samples", "1", "--only", "pagemill", "--configure", &folder];
    write("#!/bin/sh\nfor i in 1 2 3; do /bin/true; done; echo done > config.status; echo configured\n");
    let output = bench(&arguments);
    let complaint = String::from_utf8_lossy(&output.stderr);
    if complaint.contains("not built") || complaint.contains("not found") {
        println!("skipped: {complaint}");
        return;
    }
    let rows = rows(&arguments);

    let of = |case: &str, subject: &str, metric: &str| {
        let is_it =
            |row: &&serde_json::Value| row["case"] == case && row["subject"] == subject && row["metric"] == metric;
        rows.iter().find(is_it).and_then(|row| row["value"].as_f64())
    };
    for case in ["run true", "short programs", "configure"] {
        for subject in ["none", "pagemill"] {
            assert!(of(case, subject, "cpu_ms").is_some_and(|time| time > 0.0), "{case}, {subject}: {rows:?}");
        }
    }
    if !complaint.contains("cc is not installed") {
        assert!(of("run true", "spawner", "cpu_ms_added").is_some(), "{rows:?}");
    }
    write("#!/bin/sh\necho $$; exit 0\n");
    assert_eq!(bench(&arguments).status.code(), Some(1), "it prints something else each time");
}

/// `--only` names two variants of Pagemill: `pagemill` returns free memory by its age, and `pagemill-keep` does not.
/// The bench must compare the first with the second.
#[test]
fn pagemill_is_compared_with_its_keep_variant() {
    let arguments =
        ["ebizzy", "--quick", "--json", "--samples", "1", "--threads", "1", "--only", "pagemill,pagemill-keep"];
    let output = bench(&arguments);
    let complaint = String::from_utf8_lossy(&output.stderr);
    if complaint.contains("not found") {
        println!("skipped: {complaint}");
        return;
    }
    assert!(output.status.success() && complaint.contains("ebizzy: balanced against keep"), "{complaint}");
    assert!(value(&rows(&arguments), "pagemill-keep", "records_per_second").is_some_and(|rate| rate > 0.0));
}

/// The experiment `footprint` must measure sqlite3, the smallest of its real programs. Skipped if sqlite3 is not
/// installed.
#[test]
fn footprint_measures_a_program() {
    let arguments = ["footprint", "--quick", "--json", "--samples", "1", "--only", "glibc", "--programs", "sqlite3"];
    let output = bench(&arguments);
    let complaint = String::from_utf8_lossy(&output.stderr);
    // Without sqlite3 nothing is measured, and the bench exits with 2.
    if output.status.code() == Some(2) && complaint.contains("gap: sqlite3") {
        return println!("skipped: {complaint}");
    }
    let rows = rows(&arguments);

    assert!(value(&rows, "glibc", "peak_mib").is_some_and(|peak| peak > 1.0), "{rows:?}");
}

/// A memory hog and the workload of `ebizzy` use memory alternately, with glibc settings that return memory at once.
/// Neither process may be killed. Without cgroups, both run without a limit.
#[test]
fn workload_and_memory_hog_survive() {
    let rows = rows(&["ebizzy", "--quick", "--hog", "--json", "--samples", "1", "--only", "glibc-eager"]);

    assert!(value(&rows, "glibc-eager", "records_per_second").is_some(), "{rows:?}");
    assert_eq!(value(&rows, "glibc-eager", "killed"), None);
}

/// With bad arguments, the bench must exit with 2, whether the argument parser or the bench itself detects them.
#[test]
fn bad_arguments_exit_with_2() {
    for arguments in [
        &["nonsense"][..],
        &["ebizzy", "--samples", "0"],
        &["ebizzy", "--only", "hoard"],
        &["footprint", "--programs", "emacs"],
    ] {
        assert_eq!(bench(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

/// The bench gets a signal while a workload runs. First the workload must end, then the bench must end by the same
/// signal, as a shell or a service manager expects. The bench runs in a process group of its own.
#[test]
fn signals_end_a_run() {
    for (name, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagemill-bench"));
        command.args(["slab", "--parts", "reads", "--samples", "1000"]).process_group(0).stdout(Stdio::null());
        let mut run = command.stderr(Stdio::piped()).spawn().expect("the bench starts");
        let workloads = format!("/proc/{0}/task/{0}/children", run.id());
        let children = || std::fs::read_to_string(&workloads).unwrap_or_default();
        let began = Instant::now();
        while children().is_empty() && began.elapsed() < Duration::from_secs(600) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let children = children();
        let kill = Command::new("kill").args(["-s", name, &run.id().to_string()]).status();
        assert!(!children.is_empty() && kill.is_ok_and(|status| status.success()), "{children}");
        let status = run.wait().expect("it ends");
        assert_eq!((status.signal(), status.code()), (Some(number), None), "{name}");
        for child in children.split_ascii_whitespace() {
            assert!(!std::path::Path::new("/proc").join(child).exists(), "{name}: {child} goes on");
        }
        let mut complaint = String::new();
        std::io::Read::read_to_string(&mut run.stderr.take().expect("it is piped"), &mut complaint).expect("text");
        assert!(complaint.contains("interrupted; everything started was ended"), "{complaint}");
    }
}

/// The subcommand `settings` must print the settings by which allocators return memory at once.
#[test]
fn allocator_settings_are_printed() {
    let output = bench(&["settings"]);

    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("`MIMALLOC_PURGE_DELAY=0`") && text.contains("tcmalloc-eager"));
}

/// Runs a workload on files in a new folder of /dev/shm, which is a tmpfs on every Linux. Returns the JSON rows that
/// the workload prints.
fn rows_on_files(arguments: &[&str]) -> Vec<serde_json::Value> {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in /dev/shm");
    for inner in ["volatile", "kept"] {
        std::fs::create_dir(folder.path().join(inner)).expect("made");
    }
    let device = folder.path().metadata().expect("it is there").dev().to_string();
    let place = ["--folder", folder.path().to_str().expect("UTF-8"), "--device", &device];
    rows(&[arguments, &place].concat())
}

/// The seven operations of iozone run on mapped files, in worker processes, and on mapped files in worker processes.
/// Every record must be read as it was written, and each operation must report its speed.
#[test]
fn records_are_read_back_by_every_operation() {
    for flags in [&["--mapped"][..], &["--processes"], &["--mapped", "--processes"]] {
        let numbers = ["--workers", "3", "--total-bytes", "6000000", "--cell-ms", "1", "--pause-ms", "0"];
        let line = rows_on_files(&[&["__iozone"], &numbers[..], flags].concat());

        for way in ["initial_write", "rewrite", "read", "reread", "reverse_read", "random_read", "random_write"] {
            assert!(line[0][way].as_f64().is_some_and(|speed| speed > 0.0), "{way}: {line:?}");
        }
    }
}

/// The seven operations of iozone must run on files in a page cache of the process, by its calls and through views. The
/// options `--cached` and `--processes` must exclude each other.
#[test]
fn iozone_runs_on_files_in_the_page_cache() {
    let numbers = ["--workers", "3", "--total-bytes", "12000000", "--cell-ms", "1", "--pause-ms", "0"];
    for flags in [&["--cached"][..], &["--cached", "--mapped"]] {
        let line = rows(&[&["__iozone"], flags, &numbers[..]].concat());

        for way in ["initial_write", "rewrite", "read", "reread", "reverse_read", "random_read", "random_write"] {
            assert!(line[0][way].as_f64().is_some_and(|speed| speed > 0.0), "{way}: {line:?}");
        }
    }
    assert!(!bench(&[&["__iozone", "--cached", "--processes"], &numbers[..]].concat()).status.success());
}

/// Pages are compared and then read in random order: by two threads in the page cache, in plain memory and in other
/// caches, and by one thread in files. All pages must be found. A count of operations must measure no time.
#[test]
fn hits_find_their_pages() {
    for (subject, has_pins) in
        [("huge", true), ("dense", true), ("memcpy", false), ("frames", true), ("foyer", true), ("quick-cache", true)]
    {
        let numbers = ["--threads", "2", "--mib", "16", "--run-ms", "5"];
        let hit = |more: &[&str]| rows(&[&["__hit", "--subject", subject], &numbers[..], more].concat());
        let (line, counted) = (hit(&[]), hit(&["--operation", "copy_ns", "--operations", "99"]));
        assert!(counted[0]["huge_share"].is_number() && counted[0]["copy_ns"].is_null(), "{counted:?}");
        let time = |metric: &str| line[0][metric].as_f64();
        assert!(time("copy_ns").is_some_and(|ns| ns > 0.0), "{subject}: {line:?}");
        assert_eq!(time("pin_ns").is_some_and(|ns| ns > 0.0), has_pins, "{subject}: {line:?}");
        let is_own = ["huge", "dense"].contains(&subject);
        assert_eq!(line[0]["frames_bytes"].as_f64().is_some_and(|bytes| bytes >= 16.0), is_own, "{subject}: {line:?}");
    }
    for subject in ["mmap", "pread"] {
        let line = rows_on_files(&["__hit", "--subject", subject, "--threads", "1", "--mib", "4", "--run-ms", "5"]);
        assert!(line[0]["copy_ns"].as_f64().is_some_and(|ns| ns > 0.0), "{subject}: {line:?}");
    }
}

/// The experiment `hit` must report the ratio between the page cache and its baseline. Small files must take between
/// half and four times the memory of their pages.
#[test]
fn hit_compares_its_subjects() {
    let arguments = ["hit", "--quick", "--json", "--samples", "1", "--mib", "8", "--files", "2000"];
    let rows = rows(&[&arguments[..], &["--only", "huge,memcpy,frames,files"]].concat());

    let copy = rows.iter().find(|row| row["subject"] == "huge" && row["metric"] == "copy_ns").expect("it ran");
    assert!(copy["baseline"] == "memcpy" && copy["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), "{copy}");
    assert!(value(&rows, "frames", "pin_ns").is_some_and(|ns| ns > 0.0));
    let resident = value(&rows, "files", "resident_ratio").expect("it ran");
    // Two thousand files need four huge pages. The process grows by about as much for other reasons, so the bounds are
    // wide.
    assert!((0.5..4.0).contains(&resident), "{resident}");
    assert_eq!(bench(&["hit", "--only", "hoard"]).status.code(), Some(2));
}

/// Objects of every slab cache and of its peers must keep their tags: in every pattern with two threads, and in a run
/// with a given number of pairs of allocation and free.
#[test]
fn objects_keep_their_tags() {
    for subject in ["fixed", "by-owner", "by-handle", "malloc", "slotmap", "sharded-slab"] {
        for (pattern, size) in [("pair", "64"), ("batch", "192"), ("churn", "4096")] {
            let of = ["__slab", "speed", "--subject", subject, "--pattern", pattern, "--size", size, "--live", "3000"];
            let line = rows(&[&of[..], &["--threads", "2", "--measure-ms", "2"]].concat());
            let time = |metric: &str| line[0][metric].as_f64();
            assert!(time("ns").is_some_and(|ns| ns > 0.0), "{subject} {pattern}: {line:?}");
            assert!(time("pairs_per_second").is_some_and(|pairs| pairs > 0.0), "{subject} {pattern}: {line:?}");
            assert_eq!(rows(&[&of[..], &["--pairs", "3000"]].concat())[0]["pairs"], 3000);
        }
    }
}

/// Each part of the experiment `slab` must report its rows: slab caches compared with an allocator and a map; values
/// read by handle and by pointer; a reader and a writer, with and without concurrent moves of the objects. Unknown
/// sizes, subjects and parts must be refused.
#[test]
fn slab_compares_its_subjects() {
    let part = |arguments: &[&str]| rows(&[&["slab", "--quick", "--json", "--samples", "1"], arguments].concat());

    let speed = part(&["--parts", "speed", "--sizes", "64", "--only", "fixed,glibc,slotmap"]);
    for subject in ["fixed", "glibc", "slotmap"] {
        assert_eq!(speed.iter().filter(|row| row["subject"] == subject && row["metric"] == "ns").count(), 6);
    }
    let reads = part(&["--parts", "reads"]);
    let both = ["handle-read", "pointer-read"];
    assert!(both.iter().all(|subject| value(&reads, subject, "chain_ns").is_some_and(|ns| ns > 0.0)), "{reads:?}");
    assert!(reads.iter().any(|row| row["baseline"] == "pointer-read" && row["ratio"].as_f64().is_some()), "{reads:?}");
    let moves = part(&["--parts", "moves", "--only", "by-owner,by-handle"]);
    for subject in ["by-owner", "by-handle"] {
        assert_eq!(moves.iter().filter(|row| row["subject"] == subject && row["metric"] == "moved").count(), 2);
    }
    for wrong in [["--sizes", "100"], ["--only", "hoard"], ["--parts", "nothing"]] {
        assert_eq!(bench(&[&["slab"][..], &wrong].concat()).status.code(), Some(2), "{wrong:?}");
    }
}

/// Arguments that leave nothing to measure must be refused before anything runs, with a list of valid arguments. The
/// test uses parts and subjects of the experiment `slab`, and subjects of experiments that do not use all allocators.
#[test]
fn arguments_without_effect_are_refused() {
    let walks = "walks has still, moving";
    let speed = "speed has fixed, by-owner, by-handle, slotmap, sharded-slab, glibc, jemalloc, mimalloc, tcmalloc";
    for (arguments, words) in [
        (&["slab", "--parts", "walks", "--only", "by-owner"][..], walks),
        (&["slab", "--parts", "speed,walks", "--only", "by-owner"], walks),
        (&["slab", "--parts", "moves", "--only", "fixed"], "moves has by-handle, by-owner"),
        (&["slab", "--parts", "reads", "--only", "glibc"], "reads has handle-read, pointer-read"),
        (&["slab", "--parts", "speed", "--only", "mesh"], speed),
        (&["slab", "--parts", "stalls", "--only", "slotmap"], "stalls has by-owner, by-handle, fixed, glibc,"),
        (&["slab", "--parts", "walks", "--only", "moving,glibc"], "none of the parts has a subject glibc; walks has"),
        (&["slab", "--parts", "walks", "--sizes", "64"], "--sizes is for speed, which --parts or --only leaves out"),
        (&["slab", "--only", "moving", "--callgrind"], "--callgrind is for speed, which --parts or --only leaves out"),
        (
            &["slab", "--parts", "reads", "--objects", "1000"],
            "--objects is for fragments and stalls, which --parts or --only leaves out",
        ),
        (&["startup", "--only", "glibc-eager"], "no subject glibc-eager; there are glibc,"),
        (&["footprint", "--only", "glibc,glibc-eager"], "no subject glibc-eager; there are glibc,"),
        (&["volatile", "--only", "glibc"], "no subject glibc; there are"),
    ] {
        let output = bench(arguments);
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && complaint.contains(words), "{arguments:?}: {complaint}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

/// Ranges of folios, which may or may not be split, are pinned and unpinned; for comparison, a reference count of each
/// page is incremented and decremented. No reference may leak. Folios are split and collapsed, and their bytes must not
/// change.
#[test]
fn pins_leave_no_reference_behind() {
    let rows = rows(&["refs", "--quick", "--json", "--samples", "1"]);

    for subject in ["splittable", "never-split", "per-4-KiB"] {
        assert!(value(&rows, subject, "ns").is_some_and(|ns| ns > 0.0), "{subject}: {rows:?}");
        assert_eq!(rows.iter().filter(|row| row["subject"] == subject && row["metric"] == "ns").count(), 6);
    }
    for (subject, metric) in
        [("split-collapse", "split_ns"), ("split-collapse", "collapse_ns"), ("memcpy-2-MiB", "copy_ns")]
    {
        assert!(value(&rows, subject, metric).is_some_and(|ns| ns > 0.0), "{metric}: {rows:?}");
    }
}

/// After most objects are freed, memory must be compacted in slab caches that can move objects, but not in an
/// allocator. The latency of another thread must be measured during the compaction. The index of a file must be walked
/// during moves.
#[test]
fn slabs_are_compacted_and_walked() {
    let part = |part: &str, only: &str| {
        let arguments = ["slab", "--quick", "--json", "--samples", "1", "--parts", part, "--only", only];
        let objects = if part == "walks" { &[][..] } else { &["--objects", "100000"] };
        rows(&[&arguments[..], objects].concat())
    };
    let rows_of = |rows: &[serde_json::Value], metric: &str| rows.iter().filter(|row| row["metric"] == metric).count();

    let rows = part("fragments", "by-owner,by-handle,fixed,glibc");
    assert_eq!(rows_of(&rows, "left_ratio"), 8, "{rows:?}");
    // Without compaction, nine tenths of the memory left are free objects.
    let left = |subject| value(&rows, subject, "left_ratio").expect("it ran");
    assert!(left("by-owner") < left("glibc") && left("by-handle") < left("fixed"), "{rows:?}");
    assert!(value(&rows, "by-handle", "times_copy").is_some_and(|times| times > 0.0));
    assert_eq!(value(&rows, "by-owner", "handles_mib"), Some(0.0));

    let rows = part("stalls", "by-owner");
    assert_eq!((rows_of(&rows, "calls"), rows_of(&rows, "ms")), (4, 4), "{rows:?}");

    let rows = part("walks", "still,moving");
    for subject in ["still", "moving"] {
        assert!(value(&rows, subject, "ns").is_some_and(|ns| ns > 0.0), "{subject}: {rows:?}");
    }
    assert!(value(&rows, "moving", "moved").is_some_and(|moved| moved > 0.0));
    assert_eq!(bench(&["slab", "--only", "hoard"]).status.code(), Some(2));
}

/// A file larger than its page cache must be read by threads, by a queue, by a bare io_uring and, if installed, by fio.
/// Skipped if the bench exits with 2, as it does without a file system on a device.
#[test]
fn misses_are_read_and_found() {
    let arguments = ["miss", "--quick", "--json", "--samples", "1", "--mib", "64", "--cache-mib", "32", "--only"];
    let only = "threads-1,queue-32,queue-32-cold,futures-32,ring-32,fio-psync-1,fio-io_uring-32,hits-memcpy";
    let arguments = [&arguments[..], &[only]].concat();
    let output = bench(&arguments);
    if output.status.code() == Some(2) {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let rows = rows(&arguments);

    for subject in ["threads-1", "queue-32", "queue-32-cold", "futures-32", "ring-32"] {
        for metric in ["ios_per_second", "cpu_us", "p50_us", "p99_us", "p999_us"] {
            assert!(value(&rows, subject, metric).is_some_and(|value| value > 0.0), "{subject} {metric}: {rows:?}");
        }
    }
    // The cache has room for half of the file, so about half of the reads are hits.
    let hits = value(&rows, "queue-32", "hit_ratio").expect("it ran");
    assert!((0.2..0.8).contains(&hits), "{hits}");
    assert!(value(&rows, "hits-memcpy", "kept_ratio").is_some_and(|kept| kept > 0.0));
    if String::from_utf8_lossy(&output.stderr).contains("fio is not there") {
        println!("skipped: fio");
    } else {
        assert!(value(&rows, "fio-io_uring-32", "ios_per_second").is_some_and(|rate| rate > 0.0), "{rows:?}");
    }
    assert_eq!(bench(&["miss", "--dir", "/dev/shm"]).status.code(), Some(2), "memory is no device");
    assert_eq!(bench(&["miss", "--only", "hoard"]).status.code(), Some(2));
}

/// Large reads and writes run through an io_uring, with buffers of both page sizes, and through the page cache. The
/// bytes must be right: reads are compared as they complete, and writes are read back.
#[test]
fn large_transfers_are_read_and_written() {
    assert_eq!(bench(&["orion", "--targets", "--depths", "4"]).status.code(), Some(2), "one or the other");
    let arguments = ["orion", "--quick", "--json", "--samples", "1", "--mib", "128", "--depths", "4", "--only"];
    let arguments = [&arguments[..], &["cache,ring-huge-registered,ring-4-KiB-pages"]].concat();
    let output = bench(&arguments);
    if output.status.code() == Some(2) {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let rows = rows(&arguments);

    let count = |subject: &str| {
        rows.iter().filter(|row| row["subject"] == subject && row["metric"] == "mib_per_second").count()
    };
    let counts = ["cache", "ring-huge-registered", "ring-4-KiB-pages"].map(count);
    assert_eq!(counts, [12, 12, 12], "{rows:?}");
    assert_eq!(value(&rows, "original-2013: v2.6.39", "mb_per_second"), Some(5629.0));
}

/// The page cache and the kernel's page cache must read and write a file in order, and the bytes must be right. Without
/// `--writes`, a file of the user must not be written.
#[test]
fn streams_are_read_and_written() {
    assert_eq!(bench(&["stream", "--only", "hoard"]).status.code(), Some(2));
    assert_eq!(bench(&["stream", "--dir", "/dev/shm"]).status.code(), Some(2), "memory is no device");
    let arguments = ["stream", "--quick", "--json", "--samples", "1", "--mib", "32", "--only", "cache,kernel"];
    let output = bench(&arguments);
    if output.status.code() == Some(2) {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let rows = rows(&arguments);

    for subject in ["cache", "kernel"] {
        for metric in ["mib_per_second", "cpu_us_per_mib"] {
            let is_it = |row: &&serde_json::Value| row["subject"] == subject && row["metric"] == metric;
            let values: Vec<f64> = rows.iter().filter(is_it).filter_map(|row| row["value"].as_f64()).collect();
            assert!(values.len() == 6 && values.iter().all(|value| *value > 0.0), "{subject} {metric}: {rows:?}");
        }
    }
}

/// The page cache, a bare io_uring and fio write scattered dirty pages to a file. The workload must find the right
/// bytes in these pages and in the pages next to them. The cache must need fewer transfers than there are pages, since
/// it merges adjacent pages.
#[test]
fn dirty_pages_are_written_back() {
    let refused = |more: &[&str]| bench(&[&["writeback"], more].concat());
    let own = refused(&["--file", "Cargo.toml"]);
    assert!(own.status.code() == Some(2) && String::from_utf8_lossy(&own.stderr).contains("--writes"), "{own:?}");
    for more in [&["--writes"][..], &["--only", "hoard"], &["--dir", "/dev/shm"], &["--one-of", "0"]] {
        assert_eq!(refused(more).status.code(), Some(2), "{more:?}");
    }
    let arguments = ["writeback", "--quick", "--json", "--samples", "1", "--mib", "32", "--only"];
    let only = "cache,ring-64,fio-io_uring-64,fio-libaio-64";
    let output = bench(&[&arguments[..], &[only]].concat());
    if output.status.code() == Some(2) {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let rows = rows(&[&arguments[..], &[only]].concat());

    let of = |subject: &str, metric: &str| value(&rows, subject, metric).unwrap_or_default();
    assert!(["cache", "ring-64"].iter().all(|subject| of(subject, "mib_per_second") > 0.0), "{rows:?}");
    assert_eq!(of("ring-64", "transfers_per_page"), 1.0);
    // One page in eight is dirty. For one dirty page in eight, the page before it is also dirty, so both are one
    // transfer.
    assert!((0.8..0.95).contains(&of("cache", "transfers_per_page")), "{rows:?}");
    if String::from_utf8_lossy(&output.stderr).contains("fio is not there") {
        println!("skipped: fio");
    } else {
        assert!(["fio-io_uring-64", "fio-libaio-64"].iter().all(|subject| of(subject, "cpu_us") > 0.0), "{rows:?}");
    }
    let all = self::rows(&[&arguments[..], &["cache", "--one-of", "1"]].concat());
    assert!(value(&all, "cache", "transfers_per_page").is_some_and(|transfers| transfers < 0.05), "{all:?}");
}

/// Workloads on files must succeed. Small files must be created, found and removed. Three files of 64 MiB with one
/// written byte each must use less than 64 MiB. Threads that write files must find the files that were to be kept and
/// those closed last.
#[test]
fn files_are_written_and_found() {
    let metadata = rows_on_files(&["__metadata", "--files", "50", "--per-directory", "20"]);
    assert!(metadata[0]["find"].as_f64().is_some_and(|speed| speed > 0.0), "{metadata:?}");

    let waste = rows_on_files(&["__waste", "--files", "3", "--bytes", "67108864", "--step", "0"]);
    assert!(waste[0]["used_after_second"].as_f64().is_some_and(|mib| mib < 64.0), "{waste:?}");

    let numbers = ["--writers", "2", "--file-mib", "1", "--kept-mib", "16", "--newest", "4", "--fill-mib", "3"];
    let writers = rows_on_files(&[&["__file-writers", "--run-ms", "20"], &numbers[..]].concat());
    assert!(writers[0]["files"].as_u64().is_some_and(|files| files >= 3), "{writers:?}");
    let losses = ["failed_writes", "lost_kept", "lost_newest", "torn"];
    assert!(losses.iter().all(|loss| writers[0][loss] == 0), "{writers:?}");
}

/// The experiment `iozone` must mount and measure a tmpfs, files in a page cache, and views of them. Skipped if the
/// bench exits with 2, as it does without permission to mount.
#[test]
fn tmpfs_is_mounted_and_measured() {
    let arguments = ["iozone", "--json", "--samples", "1", "--threads", "2", "--total", "4M", "--cell-seconds", "0"];
    let arguments = [&arguments[..], &["--quick", "--only", "tmpfs-never"]].concat();
    let output = bench(&arguments);
    if output.status.code() == Some(2) {
        println!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let rows = rows(&arguments);

    assert!(value(&rows, "tmpfs-never", "random_read").is_some_and(|speed| speed > 0.0), "{rows:?}");
    assert_eq!(rows.iter().filter(|row| row["subject"] == "tmpfs-never").count(), 14);
    assert!(value(&rows, "original-2013", "random_read").is_some());

    for (flag, subject) in [("--cache", "cache"), ("--views", "views")] {
        let rows = self::rows(&[&arguments[..], &[flag, "--only", subject]].concat());
        assert!(value(&rows, subject, "random_read").is_some_and(|speed| speed > 0.0), "{rows:?}");
        assert_eq!(rows.iter().filter(|row| row["subject"] == subject).count(), 7);
        // Those against the other tmpfs are not measured.
        let verdicts = rows.iter().filter(|row| row["metric"] == "target_kept");
        assert_eq!(verdicts.count(), 2, "{rows:?}");
    }
}

/// The experiment `traces` runs two generated traces of few pages. It must report the hit ratio of Pagemill's eviction
/// policy and of its peers. It must also report whether the target was reached, for each trace and for the mean. A
/// second run must report the same numbers.
#[test]
fn traces_report_the_same_hit_ratios() {
    let line = ["traces", "--json", "--samples", "1", "--pages", "2000", "--traces", "zipf-1.0,loop"];
    let first = rows(&line);

    for subject in ["pagemill", "lru", "clock", "s3-fifo", "sieve"] {
        let percent = value(&first, subject, "hit_percent").expect("it ran");
        assert!((20.0..80.0).contains(&percent), "{subject}: {percent}");
    }
    let is_lru_loop = |row: &&serde_json::Value| row["subject"] == "lru" && row["case"] == "loop, 10 %";
    assert_eq!(first.iter().find(is_lru_loop).expect("it ran")["value"], 0.0);
    assert_eq!(first.iter().filter(|row| row["metric"] == "target_kept").count(), 3);
    // The row of the machine has its load and the time.
    let results =
        |rows: Vec<serde_json::Value>| -> Vec<_> { rows.into_iter().filter(|row| row["kind"] != "machine").collect() };
    assert_eq!(results(first), results(rows(&line)));
}
