//! Real programs must give the same results with Pagemill as without it.
//!
//! Programs that end quickly run with and without Pagemill, and their outputs are compared. Test suites that check
//! themselves run only with Pagemill. A program that is not installed is skipped with a message.

mod common;

use common::{End, Guard, TIMEOUT, TestFolder, finish, is_missing};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Sets of options with which each program runs: no options; Pagemill serves the first call; a limit with software
/// pages of 64 KiB.
const OPTION_SETS: &[&[&str]] = &[&[], &["--after", "0"], &["--limit", "2G", "--page-size", "64K"]];

/// Returns the command with the libc fallback, which is the default outside of tests.
fn with_libc_fallback(mut command: Command) -> Command {
    command.env_remove("PAGEMILL_AFTER");
    command
}

/// Runs a program without Pagemill, and with Pagemill under each set of options. Checks that all outputs are equal.
/// Returns the output.
#[track_caller]
fn assert_same_output(place: &TestFolder, program: &str, arguments: &[&str], prepare: impl Fn(&mut Command)) -> String {
    let run = |mut command: Command| {
        command.args(arguments);
        prepare(&mut command);
        finish(command, TIMEOUT)
    };
    let without = run(place.command(program));
    without.assert_success();
    for options in OPTION_SETS {
        let end = run(with_libc_fallback(place.pagemill_run(options, program)));
        end.assert_success();
        assert_eq!(end.out, without.out, "{program} under {options:?}");
        assert_eq!(end.err, without.err, "{program} under {options:?}");
    }
    without.out
}

mod python {
    use super::*;

    const SCRIPT: &str = r#"
import json, hashlib, os, random, subprocess, sys, threading, zlib
random.seed(7)
words = {f"key{i}": [random.random() for _ in range(i % 50)] for i in range(20000)}
text = json.dumps(words, sort_keys=True)
assert json.loads(text) == words
print(hashlib.sha256(text.encode()).hexdigest())
parts = [None] * 8
def work(index):
    data = bytearray()
    for i in range(2000):
        data += os.urandom(0) + bytes([i % 251]) * (i % 3000)
    parts[index] = zlib.crc32(zlib.decompress(zlib.compress(bytes(data))))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(parts)
grown = []
for i in range(300000):
    grown.append(str(i) * (i % 7))
print(len("".join(grown)))
for _ in range(20):
    assert subprocess.check_output([sys.executable, "-c", "print(sum(range(1000)))"]) == b"499500\n"
children = []
for i in range(10):
    pid = os.fork()
    if pid == 0:
        os._exit(len([bytes(1000) for _ in range(10000)]) % 251)
    children.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
print(len(bytes(10**9)))
"#;

    #[test]
    fn a_script_prints_the_same() {
        if is_missing("python3") {
            return;
        }
        let place = TestFolder::new();
        let out = assert_same_output(&place, "python3", &["-c", SCRIPT], |_| {});
        assert_eq!(out.lines().count(), 5);
    }

    /// Runs the Python interpreter's own tests, if they are installed. They take about a minute.
    #[test]
    fn the_interpreters_own_tests_pass() {
        if is_missing("python3") {
            return;
        }
        let place = TestFolder::new();
        let mut probe = place.command("python3");
        probe.args(["-c", "import test.test_json, test.test_dict, test.test_threading, test.test_subprocess"]);
        if !finish(probe, TIMEOUT).status.success() {
            println!("skipped: the interpreter's tests are not installed");
            return;
        }
        let run = |mut command: Command| -> End {
            command.args(["-m", "test", "-j2", "test_json", "test_dict", "test_threading", "test_subprocess"]);
            command.env("TMPDIR", place.path(""));
            finish(command, TIMEOUT)
        };
        let end = run(with_libc_fallback(place.pagemill_run(&[], "python3")));
        if !end.status.success() {
            let without = run(place.command("python3"));
            assert!(!without.status.success(), "only on Pagemill: {}\n{}", end.out, common::tail(&end.err));
            println!("skipped: the tests fail without Pagemill, too");
        }
    }
}

mod sqlite {
    use super::*;

    const SCRIPT: &str = "
        PRAGMA cache_size = -65536;
        CREATE TABLE people(id INTEGER PRIMARY KEY, name TEXT, town INTEGER, score REAL);
        CREATE TABLE towns(id INTEGER PRIMARY KEY, name TEXT);
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500)
            INSERT INTO towns SELECT i, 'town ' || (i * 7919 % 1009) FROM n;
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000)
            INSERT INTO people SELECT i, hex(i * 2654435761 % 4294967296), i * 31 % 500 + 1, (i * 37 % 1000) / 8.0 FROM n;
        CREATE INDEX by_name ON people(name);
        CREATE INDEX by_town ON people(town, score);
        SELECT towns.name, count(*), sum(score), max(people.name) FROM people JOIN towns ON people.town = towns.id
            GROUP BY towns.name ORDER BY towns.name;
        SELECT count(*) FROM people a JOIN people b ON a.name = b.name WHERE a.id % 10 = 0;
        SELECT length(group_concat(name)) FROM (SELECT name FROM people ORDER BY score, name);
        UPDATE people SET score = score * 2 WHERE town < 100;
        DELETE FROM people WHERE id % 3 = 0;
        VACUUM;
        PRAGMA integrity_check;
        SELECT count(*), sum(score) FROM people;";

    #[test]
    fn queries_return_the_same_rows() {
        if is_missing("sqlite3") {
            return;
        }
        let place = TestFolder::new();
        let out = assert_same_output(&place, "sqlite3", &[":memory:", SCRIPT], |_| {});
        assert!(out.contains("\nok\n"), "{out}");
        let out =
            assert_same_output(&place, "sh", &["-c", &format!("rm -f file.db; sqlite3 file.db \"{SCRIPT}\"")], |_| {});
        assert!(out.contains("\nok\n"), "{out}");
    }
}

mod git {
    use super::*;

    const SCRIPT: &str = r#"
        set -e
        rm -rf repository && mkdir repository && cd repository
        git init -q -b main .
        for commit in 1 2 3 4 5; do
            mkdir -p folder$commit
            for file in $(seq 60); do
                seq $((commit * file * 37)) > folder$commit/file$file
            done
            seq $((commit * 200000)) > large
            git add -A
            git commit -q -m "commit $commit"
        done
        git checkout -q -b side HEAD~2
        echo side > side
        git add side && git commit -q -m side
        git merge -q -m merge main
        git gc -q --aggressive --prune=now
        git fsck --full --strict
        git log --format='%H %T %s' --stat
        git diff HEAD~3 | cksum
        git blame large | cksum
        git grep -c 7777 | cksum
        git archive HEAD | cksum
    "#;

    #[test]
    fn commit_histories_are_the_same() {
        if is_missing("git") {
            return;
        }
        let place = TestFolder::new();
        let out = assert_same_output(&place, "sh", &["-c", SCRIPT], |command| {
            for role in ["AUTHOR", "COMMITTER"] {
                command.env(format!("GIT_{role}_NAME"), "tester").env(format!("GIT_{role}_EMAIL"), "tester@localhost");
                command.env(format!("GIT_{role}_DATE"), "2020-02-02T02:02:02Z");
            }
            command
                .env("GIT_CONFIG_NOSYSTEM", "1")
                .env("GIT_CONFIG_GLOBAL", "/dev/null")
                .env("HOME", place.path("home"));
        });
        assert!(out.contains(" merge\n"), "{out}");
    }
}

mod node {
    use super::*;

    const SCRIPT: &str = r#"
const crypto = require('crypto');
const { Worker, isMainThread, workerData, parentPort } = require('worker_threads');
function work(seed) {
    const hash = crypto.createHash('sha256');
    let kept = [];
    for (let i = 1; i < 400; i++) {
        const buffer = Buffer.alloc((i * seed * 997) % 300000, i);
        kept.push(buffer);
        if (kept.length > 20) hash.update(kept.splice(i % 20, 1)[0]);
        const object = { i, list: Array.from({ length: i }, (_, k) => ({ k, text: 'x'.repeat(k % 50) })) };
        const text = JSON.stringify(object);
        if (JSON.stringify(JSON.parse(text)) !== text) throw new Error('json');
        hash.update(text);
    }
    const shared = new Uint8Array(new SharedArrayBuffer(50 << 20));
    if (shared.some((byte) => byte !== 0)) throw new Error('not zero');
    return hash.digest('hex');
}
if (isMainThread) {
    console.log(work(1));
    const seeds = [2, 3, 4, 5];
    Promise.all(seeds.map((seed) => new Promise((done, fail) => {
        const worker = new Worker(__filename, { workerData: seed });
        worker.on('message', done);
        worker.on('error', fail);
    }))).then((all) => {
        console.log(all.join('\n'));
        const big = Buffer.concat(Array.from({ length: 100 }, (_, i) => Buffer.alloc(1 << 20, i)));
        console.log(crypto.createHash('md5').update(big).digest('hex'), require('zlib').gunzipSync(require('zlib').gzipSync(big)).equals(big));
        console.log(require('child_process').execFileSync(process.execPath, ['-p', '6 * 7']).toString());
    });
} else {
    parentPort.postMessage(work(workerData));
}
"#;

    #[test]
    fn a_script_with_workers_prints_the_same() {
        if is_missing("node") {
            return;
        }
        let place = TestFolder::new();
        fs::write(place.path("script.js"), SCRIPT).unwrap();
        let out = assert_same_output(&place, "node", &["script.js"], |_| {});
        assert!(out.contains("true"), "{out}");
    }
}

mod bash {
    use super::*;

    const SCRIPT: &str = r#"
        declare -A table
        for i in {1..5000}; do table[key$i]=$((i * i)); done
        sum=0
        for key in "${!table[@]}"; do ((sum += table[$key])); done
        echo $sum ${#table[@]}
        for i in {1..60}; do (echo $((i * 3)); exit $((i % 7))); echo "status $?"; done
        seq 200000 | sort -rn | uniq | awk '{ s += $1 } END { print s }' | tee /dev/stderr | tr 0-9 a-j
        text=
        for i in {1..3000}; do text+="some words $i "; done
        echo ${#text} ${text:5000:30} ${text//words/W} | cksum
        cat <(seq 10) <(seq 5) | paste -sd+ | bc 2>/dev/null || echo no bc
        for i in {1..8}; do (seq $((i * 10000)) | md5sum) & done | sort
        wait
        mapfile -t lines < <(seq 50000); echo ${#lines[@]} ${lines[49999]}
        coproc cat; echo through >&"${COPROC[1]}"; exec {COPROC[1]}>&-; read -r line <&"${COPROC[0]}"; echo "$line"
    "#;

    #[test]
    fn loops_subshells_and_pipes_print_the_same() {
        if is_missing("bash") {
            return;
        }
        let place = TestFolder::new();
        let out = assert_same_output(&place, "bash", &["-c", SCRIPT], |_| {});
        assert!(out.contains("50000 50000\n"), "{out}");
    }
}

mod redis {
    use super::*;

    /// Fifty clients send requests to a Redis server for some ten seconds. No request may fail, and afterwards all
    /// values must be readable.
    #[test]
    fn requests_of_clients_succeed() {
        if ["redis-server", "redis-benchmark", "redis-cli"].into_iter().any(is_missing) {
            return;
        }
        for options in [&[] as &[&str], &["--limit", "1G", "--page-size", "64K"]] {
            serve(options);
        }
    }

    fn serve(options: &[&str]) {
        let place = TestFolder::new();
        let socket = place.path("s");
        let socket = socket.to_str().unwrap();
        let mut server = with_libc_fallback(place.pagemill_run(options, "redis-server"));
        server.args(["--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no", "--dir"]);
        server.arg(place.path("")).stdout(Stdio::null());
        let mut server = Guard::new(server);
        wait_for(Path::new(socket), &mut server);
        let client = |program: &str, on_pagemill: bool, arguments: &[&str]| {
            let mut command = if on_pagemill {
                with_libc_fallback(place.pagemill_run(options, program))
            } else {
                place.command(program)
            };
            command.args(["-s", socket]).args(arguments);
            let end = finish(command, TIMEOUT);
            end.assert_success();
            end.out.trim().to_owned()
        };
        let load = [
            "-n",
            "30000",
            "-r",
            "20000",
            "-c",
            "50",
            "-P",
            "4",
            "-d",
            "700",
            "-q",
            "-t",
            "set,get,lpush,lrange_100,mset",
        ];
        let out = client("redis-benchmark", true, &load);
        assert!(!out.to_lowercase().contains("err") && out.contains("SET") && out.contains("LPUSH"), "{out}");
        let value = "v".repeat(300_000);
        assert_eq!(client("redis-cli", false, &["set", "large", &value[..100_000]]), "OK");
        assert_eq!(client("redis-cli", true, &["append", "large", &value[..100_000]]), "200000");
        assert_eq!(client("redis-cli", false, &["get", "large"]), &value[..200_000]);
        // The data is saved once by the server and once by a forked child. Both files must have the same data.
        assert_eq!(client("redis-cli", false, &["save"]), "OK");
        let before = client("redis-cli", false, &["debug", "digest"]);
        let keys = client("redis-cli", false, &["dbsize"]);
        assert!(client("redis-cli", false, &["bgsave"]).contains("started"));
        let start = Instant::now();
        while !client("redis-cli", false, &["info", "persistence"]).contains("rdb_bgsave_in_progress:0") {
            assert!(start.elapsed() < TIMEOUT, "it does not end saving");
            thread::sleep(Duration::from_millis(100));
        }
        assert!(client("redis-cli", false, &["info", "persistence"]).contains("rdb_last_bgsave_status:ok"));
        assert_eq!(client("redis-cli", false, &["dbsize"]), keys);
        assert_eq!(client("redis-cli", false, &["debug", "digest"]), before);
        client("redis-cli", false, &["memory", "purge"]);
        assert_eq!(client("redis-cli", false, &["flushall"]), "OK");
        let mut end = place.command("redis-cli");
        end.args(["-s", socket, "shutdown", "nosave"]);
        finish(end, TIMEOUT);
        assert_eq!(server.wait(TIMEOUT).code(), Some(0));
    }

    fn wait_for(socket: &Path, server: &mut Guard) {
        let start = Instant::now();
        while !socket.exists() {
            assert!(!server.has_ended(), "the server has ended");
            assert!(start.elapsed() < TIMEOUT, "the server does not listen");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

mod cargo {
    use super::*;

    const SOURCE: &str = r#"
        use std::collections::BTreeMap;
        fn main() {
            let mut table: BTreeMap<String, Vec<u64>> = BTreeMap::new();
            for i in 0..1000u64 {
                table.entry(format!("{}", i % 17)).or_default().push(i * i);
            }
            println!("{:?}", table.iter().map(|(k, v)| (k.clone(), v.iter().sum::<u64>())).collect::<Vec<_>>());
        }
    "#;

    /// Cargo builds a crate without dependencies, in debug and release mode. Each program that it builds must have the
    /// same bytes with and without Pagemill.
    #[test]
    fn the_built_program_is_the_same() {
        let place = TestFolder::new();
        fs::create_dir_all(place.path("tiny/src")).unwrap();
        let manifest = "[package]\nname = \"tiny\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[workspace]\n";
        fs::write(place.path("tiny/Cargo.toml"), manifest).unwrap();
        fs::write(place.path("tiny/src/main.rs"), SOURCE).unwrap();
        let build = |mut command: Command, profile: &str| {
            for (name, _) in std::env::vars_os() {
                let name = name.to_string_lossy();
                if name.starts_with("CARGO_") && name != "CARGO_HOME" || name == "RUSTFLAGS" || name == "RUSTDOCFLAGS" {
                    command.env_remove(&*name);
                }
            }
            command.args(["build", "--offline", "--quiet", "--profile", profile, "--manifest-path"]);
            command.arg(place.path("tiny/Cargo.toml")).env("CARGO_TARGET_DIR", place.path("tiny/target"));
            finish(command, TIMEOUT).assert_success();
            let folder = if profile == "dev" { "debug" } else { profile };
            let program = fs::read(place.path("tiny/target").join(folder).join("tiny")).unwrap();
            fs::remove_dir_all(place.path("tiny/target")).unwrap();
            program
        };
        let cargo = env!("CARGO");
        for profile in ["dev", "release"] {
            let without = build(place.command(cargo), profile);
            let with = build(place.pagemill_run(&["--limit", "4G"], cargo), profile);
            assert!(without == with, "{profile}: the programs differ");
        }
    }
}
