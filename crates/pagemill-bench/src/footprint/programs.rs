//! The real programs that the experiment runs: their scripts and the commands that they need.
//!
//! Each program is one shell script in a folder of its own. The script uses no network, no user settings and no time of
//! day. Its output must therefore be the same under every allocator, and the bench checks that.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use fastrand::Rng;

use crate::error::{Error, Result, doing};
use crate::subject;

/// A program that the experiment runs.
#[derive(Clone, Debug)]
pub struct Program {
    pub name: &'static str,
    /// Names of the commands that must be installed for the script.
    pub needs: &'static [&'static str],
    /// The script, which `sh -e` runs in the prepared folder.
    pub script: &'static str,
    /// Whether the program prints the same output in each run. Otherwise only the exit status is checked.
    pub is_repeatable: bool,
    /// Creates the input of the script in the folder.
    prepare: fn(&Path) -> std::io::Result<()>,
}

/// All programs except Redis, which is a server and has a module of its own.
pub const PROGRAMS: &[Program] = &[
    Program {
        name: "python",
        needs: &["python3"],
        script: "exec \"$(cat python)\" -E work.py",
        is_repeatable: true,
        prepare: prepare_python,
    },
    Program {
        name: "python-tests",
        needs: &["python3"],
        script: "exec \"$(cat python)\" -m test test_json test_dict",
        is_repeatable: false,
        prepare: prepare_python,
    },
    Program {
        name: "sqlite3",
        needs: &["sqlite3"],
        script: "exec sqlite3 -batch :memory: '.read work.sql'",
        is_repeatable: true,
        prepare: prepare_sqlite,
    },
    Program { name: "git", needs: &["git"], script: GIT_SCRIPT, is_repeatable: true, prepare: prepare_git },
    Program {
        name: "cargo-build",
        needs: &["cargo"],
        script: "rm -rf target; cargo build -q --offline --manifest-path work/Cargo.toml --target-dir target; exec target/debug/work",
        is_repeatable: true,
        prepare: prepare_cargo,
    },
];

const GIT_SCRIPT: &str = "
rm -rf repository; cp -r tree repository; cd repository
git init -q; git add .; git commit -q -m one
for file in *.txt; do echo more >> $file; done
git commit -q -a -m two
git gc -q; git fsck; git rev-parse HEAD
";

const PYTHON_SCRIPT: &str = "
import hashlib, json
rows = [{'id': i, 'name': f'row {i}', 'tags': [str(j) for j in range(i % 7)], 'ratio': i / 7} for i in range(60000)]
text = json.dumps(rows, sort_keys=True)
again = json.loads(text)
assert again == rows
index = {row['name']: row for row in again}
del rows
blobs = [bytes([i % 256]) * (1000 + i * 37 % 200000) for i in range(1000)]
blobs = blobs[::2]
digest = hashlib.sha256(text.encode())
for blob in blobs:
    digest.update(blob)
print(len(index), digest.hexdigest())
";

const SQL_SCRIPT: &str = "
create table item(id integer primary key, name text, amount real, note blob);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 200000)
insert into item select i, 'item ' || (i * 7919 % 200003), i / 3.0, zeroblob(i % 300) from n;
create index item_name on item(name);
select count(*), sum(length(note)), round(sum(amount), 3) from item;
select name from item where name between 'item 1000' and 'item 1001' order by name desc limit 5;
delete from item where id % 2;
update item set note = zeroblob(id % 900) where id % 3 = 0;
select count(*), sum(length(note)) from item;
pragma integrity_check;
";

impl Program {
    /// Checks that the needed commands are installed, and creates the input of the script in the folder.
    ///
    /// # Errors
    ///
    /// [`Error::Gap`] if the program cannot run.
    pub fn prepare(&self, folder: &Path) -> Result<()> {
        if let Some(missing) = self.needs.iter().find(|name| !is_installed(name)) {
            return Err(Error::Gap(format!("{}: {missing} is not installed", self.name)));
        }
        (self.prepare)(folder).map_err(doing(format!("preparing {}", self.name)))?;
        if self.name == "python-tests" && !has_python_tests(folder) {
            return Err(Error::Gap("python-tests: Python came without its test package".to_owned()));
        }
        Ok(())
    }

    /// Returns the command that runs the script, without the settings of any subject.
    pub fn command(&self, folder: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["-e", "-c", self.script]).current_dir(folder);
        subject::clear_foreign_settings(&mut command);
        command.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
        for role in ["AUTHOR", "COMMITTER"] {
            command.env(format!("GIT_{role}_NAME"), "bench");
            command.env(format!("GIT_{role}_EMAIL"), "bench@example.org");
            command.env(format!("GIT_{role}_DATE"), "2000-01-01T00:00:00Z");
        }
        command.env("PYTHONHASHSEED", "0").env("LC_ALL", "C");
        command
    }
}

/// Returns whether a command is in a folder of `PATH`.
pub fn is_installed(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

/// Writes the Python script to the folder. Also records the path of the real interpreter, since `python3` may be a
/// shell wrapper.
pub fn prepare_python(folder: &Path) -> std::io::Result<()> {
    let mut command = Command::new("python3");
    command.args(["-c", "import sys; print(sys.executable)"]).stdin(Stdio::null());
    fs::write(folder.join("python"), command.output()?.stdout)?;
    fs::write(folder.join("work.py"), PYTHON_SCRIPT)
}

/// Returns the path of the Python interpreter that [`prepare_python`] recorded in the folder.
pub fn recorded_python_path(folder: &Path) -> std::io::Result<String> {
    fs::read_to_string(folder.join("python")).map(|path| path.trim().to_owned())
}

fn has_python_tests(folder: &Path) -> bool {
    let Ok(python) = recorded_python_path(folder) else {
        return false;
    };
    let mut command = Command::new(python);
    command.args(["-c", "import test.test_json, test.test_dict"]);
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn prepare_sqlite(folder: &Path) -> std::io::Result<()> {
    fs::write(folder.join("work.sql"), SQL_SCRIPT)
}

/// Writes six hundred text files of random words, which compress about as well as natural text.
fn prepare_git(folder: &Path) -> std::io::Result<()> {
    const WORDS: [&str; 8] = ["page", "folio", "range", "block", "limit", "slab", "node", "store"];
    let tree = folder.join("tree");
    fs::create_dir_all(&tree)?;
    let mut random = Rng::with_seed(7);
    for number in 0..600 {
        let mut text = String::new();
        for _ in 0..200 + random.usize(..800) {
            let word = WORDS[random.usize(..WORDS.len())];
            let end = if random.usize(..9) == 0 { '\n' } else { ' ' };
            let _ = write!(text, "{word}{}{end}", random.usize(..100));
        }
        fs::write(tree.join(format!("{number:04}.txt")), text)?;
    }
    Ok(())
}

/// Writes the source of a Rust crate with sixty modules and without dependencies.
fn prepare_cargo(folder: &Path) -> std::io::Result<()> {
    let source = folder.join("work/src");
    fs::create_dir_all(&source)?;
    // An empty [workspace] table keeps cargo from searching the parent folders for a workspace.
    let manifest = "[package]\nname = \"work\"\nversion = \"0.0.0\"\nedition = \"2021\"\n[workspace]\n";
    fs::write(folder.join("work/Cargo.toml"), manifest)?;
    let mut main = String::new();
    let mut sum = String::from("0u64");
    for number in 0..60 {
        let _ = writeln!(main, "mod part{number};");
        let _ = write!(sum, ".wrapping_add(part{number}::run({number}))");
        let mut part = String::from("use std::collections::BTreeMap;\n");
        part += "#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]\npub struct Item { key: u64, name: String }\n";
        part += "pub fn run(seed: u64) -> u64 {\n    let mut map = BTreeMap::new();\n";
        part += "    for i in 0..100u64 { map.insert(Item { key: i * seed % 31, name: format!(\"{i:?}\") }, i); }\n";
        part += "    map.iter().filter(|(item, _)| item.key % 2 == 0).map(|(item, i)| item.name.len() as u64 * i).sum()\n}\n";
        fs::write(source.join(format!("part{number}.rs")), part)?;
    }
    let _ = writeln!(main, "fn main() {{ println!(\"{{}}\", {sum}); }}");
    fs::write(source.join("main.rs"), main)
}
