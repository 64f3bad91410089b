//! A program with slab caches of all kinds, and helpers for tests that observe the program. The tests control the
//! callbacks of the caches by files.
#![allow(unsafe_code)] // implements the owner of slab objects

use super::holder::ObservedProgram;
use super::{End, PAGEMILL, TestFolder, finish_answered, walk};
use pagemill_slab as slab;
use pagemill_slab::SlabCache;
use pagemill_slab::{Candidates, Done, Handle, Migrate, Moving, OwnerSlab, Settings, SlabInfo, Target};
use pagemill_testbed::Testbed;
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

/// If this variable is set, the test `program` of a test file acts as the program that the other tests observe. The
/// value is a folder. Files in that folder control the callbacks of the program's caches.
const PROGRAM_VARIABLE: &str = "SLABINFO_TEST_PROGRAM";

/// Number of objects that the program inserts into each cache.
pub const INSERTED_OBJECTS: u64 = 20_000;

/// Number of objects that the program keeps in each cache: one in ten. It frees the others.
pub const KEPT_OBJECTS: u64 = INSERTED_OBJECTS / 10;

/// A cache name with control characters.
pub const CONTROL_CHARACTER_NAME: &str = "tab\tred \x1b[31m\nline=1";

/// The text of `CONTROL_CHARACTER_NAME` as `slabinfo` displays it.
pub const CONTROL_CHARACTER_NAME_SHOWN: &str = "tab?red ?[31m?line=1";

pub const CACHE_NAMES: [&str; 4] = ["entries", "nodes", "boxes", CONTROL_CHARACTER_NAME_SHOWN];

/// The owner of the objects of the slab cache `nodes`. Files in the folder control its callbacks.
struct NodeOwner {
    folder: PathBuf,
    objects: Vec<AtomicPtr<Object>>,
}

impl NodeOwner {
    fn wait_while_exists(&self, file: &str) {
        while self.folder.join(file).exists() {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// An object of the slab cache `nodes`. While it is in use, its first word is its index plus one. While it is free, the
/// first word is zero.
struct Object([AtomicU64; 24]);

// SAFETY: except for helper threads, one thread makes all calls, and waits while they run. So objects in use
// stay in use while they are isolated and moved.
unsafe impl Migrate for NodeOwner {
    type Object = Object;
    type Isolated = ();

    fn construct(&self) -> Object {
        Object([const { AtomicU64::new(0) }; 24])
    }

    fn isolate(&self, objects: &mut Candidates<'_, Object>) {
        self.wait_while_exists("isolating");
        // SAFETY: all objects of the cache are constructed.
        objects.retain(|object| unsafe { object.as_ref() }.0[0].load(Relaxed) != 0);
    }

    fn migrate<'object>(
        &self,
        object: Moving<'object, Object>,
        to: &mut Target<'_, Object>,
        (): &mut (),
    ) -> Done<'object> {
        self.wait_while_exists("moving");
        assert!(!self.folder.join("panicking").exists(), "as it is told to");
        let Some(new) = to.take() else { return object.failed() };
        // SAFETY: both objects are constructed objects of the cache.
        let (from, to) = unsafe { (object.object().as_ref(), new.object().as_ref()) };
        from.0.iter().zip(&to.0).for_each(|(from, to)| to.store(from.load(Relaxed), Relaxed));
        self.objects[from.0[0].load(Relaxed) as usize - 1].store(new.object().as_ptr(), Relaxed);
        from.0[0].store(0, Relaxed);
        object.moved(new)
    }
}

fn is_kept(number: u64) -> bool {
    number % 10 == 3
}

fn fill_nodes(cache: &OwnerSlab<NodeOwner>) {
    for (number, at) in cache.owner().objects.iter().enumerate() {
        let object = cache.allocate().unwrap();
        // SAFETY: the object is a constructed object of the cache.
        unsafe { object.as_ref() }.0[0].store(number as u64 + 1, Relaxed);
        at.store(object.as_ptr(), Relaxed);
    }
    for (_, at) in cache.owner().objects.iter().enumerate().filter(|(number, _)| !is_kept(*number as u64)) {
        let object = NonNull::new(at.swap(std::ptr::null_mut(), Relaxed)).unwrap();
        // SAFETY: the only reference to the object was removed.
        unsafe {
            object.as_ref().0[0].store(0, Relaxed);
            cache.free(object);
        }
    }
}

/// Prints the process id. Then prints for each cache: the numbers of objects in use, of slabs and of partial slabs, the
/// resident bytes, and the ratios `defrag_used_ratio` and `remote_node_defrag_ratio`.
fn print_state(infos: &[SlabInfo]) {
    let words = |info: &SlabInfo| {
        let total = &info.total;
        let words = [
            info.active,
            total.slabs.into(),
            total.partial.into(),
            total.resident_bytes,
            info.defrag_used_ratio.into(),
            info.remote_node_defrag_ratio.into(),
        ];
        words.map(|word| word.to_string()).join(" ")
    };
    let line: Vec<String> = infos.iter().map(words).collect();
    // Bypasses the test harness, which captures the output of tests.
    let line = format!("\n{} {}\n", std::process::id(), line.join(" "));
    std::io::stdout().write_all(line.as_bytes()).unwrap();
}

/// Runs the observed program if this process was started as the observed program.
pub fn run() {
    let Some(folder) = std::env::var_os(PROGRAM_VARIABLE) else { return };
    // With a ratio of 0, objects are moved only by commands.
    let settings = |name| Settings::new(name).defrag_used_ratio(0);
    let slabs = Testbed::of_process().unwrap().slabs;
    let entries = slabs.by_handle::<[u64; 24]>(settings("entries")).unwrap();
    let owner =
        NodeOwner { folder: folder.into(), objects: (0..INSERTED_OBJECTS).map(|_| AtomicPtr::default()).collect() };
    let nodes: OwnerSlab<NodeOwner> = slabs.by_owner(settings("nodes"), owner).unwrap();
    let boxes = slabs.fixed::<u64>(Settings::new("boxes").debug(true)).unwrap();
    let odd = slabs.fixed::<u64>(Settings::new(CONTROL_CHARACTER_NAME)).unwrap();
    let handles: Vec<Handle<[u64; 24]>> =
        (0..INSERTED_OBJECTS).map(|number| entries.insert([number; 24]).unwrap()).collect();
    for (number, handle) in handles.iter().enumerate().filter(|(number, _)| !is_kept(*number as u64)) {
        assert!(entries.remove(*handle).unwrap().is_some(), "{number}");
    }
    fill_nodes(&nodes);
    let kept: Vec<_> = (0..100).map(|number| boxes.insert(number).unwrap()).collect();
    // In a forked child, the caches of its parent do not exist; the child has only those that it creates itself.
    let folder = &nodes.owner().folder;
    loop {
        if folder.join("forking").exists() {
            fork_child();
        }
        print_state(&[entries.info().unwrap(), nodes.info().unwrap(), boxes.info().unwrap(), odd.info().unwrap()]);
        if std::io::stdin().read_line(&mut String::new()).unwrap() == 0 {
            break;
        }
    }
    let guard = slab::enter();
    for (number, handle) in handles.iter().enumerate() {
        let number = number as u64;
        assert_eq!(entries.get(*handle, &guard), is_kept(number).then_some(&[number; 24]));
    }
    drop(guard);
    for (number, at) in nodes.owner().objects.iter().enumerate() {
        // SAFETY: the table has null and pointers to objects in use.
        let object = unsafe { at.load(Relaxed).as_ref() };
        assert_eq!(object.map(|object| object.0[0].load(Relaxed)), is_kept(number as u64).then_some(number as u64 + 1));
    }
    assert_eq!(kept.iter().map(|number| **number).sum::<u64>(), 4950);
    drop(odd);
    // The number 1 means that all contents are intact.
    std::io::stdout().write_all(b"1\n").unwrap();
}

/// Forks a child process that creates a slab cache, prints a line, waits for input and ends. Waits until the child has
/// ended.
fn fork_child() {
    // SAFETY: the child only creates a cache, writes a line, reads one and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let own = Testbed::of_process().unwrap().slabs.by_handle::<u64>(Settings::new("own")).unwrap();
        let handles: Vec<_> = (0..INSERTED_OBJECTS).map(|number| own.insert(number).unwrap()).collect();
        handles.iter().skip(1).for_each(|handle| assert!(own.remove(*handle).unwrap().is_some()));
        print_state(&[own.info().unwrap()]);
        let _ = std::io::stdin().read_line(&mut String::new());
        assert_eq!(own.get(handles[0], &slab::enter()), Some(&0));
        std::process::exit(0);
    }
    let mut status = -1;
    // SAFETY: `waitpid` writes `status`.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((ended, status), (child, 0));
}

pub fn start(place: &TestFolder) -> ObservedProgram {
    ObservedProgram::start(as_program(place, place.command(std::env::current_exe().unwrap())))
}

pub fn as_program(place: &TestFolder, mut command: Command) -> Command {
    command.args(["--exact", "program", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env(PROGRAM_VARIABLE, place.path("."));
    command
}

/// Returns the numbers that [`print_state`] printed for the cache with this name.
pub fn printed_numbers<'holder>(holder: &'holder ObservedProgram, name: &str) -> &'holder [u64] {
    let at = CACHE_NAMES.iter().position(|known| *known == name).unwrap();
    holder.numbers[1..].chunks_exact(6).nth(at).unwrap()
}

pub fn slabinfo(place: &TestFolder, options: &[&str]) -> Command {
    let mut command = place.command(PAGEMILL);
    command.arg("slabinfo").args(options);
    command
}

/// Returns the output of `pagemill slabinfo` for the observed program.
pub fn show(place: &TestFolder, holder: &ObservedProgram, options: &[&str]) -> String {
    let pid = holder.pid().to_string();
    let end = finish_answered(|| slabinfo(place, &[&[pid.as_str()], options].concat()));
    end.assert_success();
    assert_eq!(request_files(place), Vec::<PathBuf>::new());
    end.out
}

pub fn list(place: &TestFolder, holder: &ObservedProgram, options: &[&str]) -> Value {
    serde_json::from_str(&show(place, holder, &[&["--json"], options].concat())).unwrap()
}

pub fn cache<'list>(list: &'list Value, name: &str) -> &'list Value {
    let caches = list["caches"].as_array().unwrap();
    caches.iter().find(|cache| cache["name"] == name).unwrap_or_else(|| panic!("no {name}: {list}"))
}

pub fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

pub fn cache_names(list: &Value) -> Vec<&str> {
    list["caches"].as_array().unwrap().iter().map(|cache| cache["name"].as_str().unwrap()).collect()
}

/// Returns the request files that are left in the folder of published files.
pub fn request_files(place: &TestFolder) -> Vec<PathBuf> {
    walk(&place.path("runtime"))
        .into_iter()
        .filter(|path| [".slabs-", ".order-"].iter().any(|word| path.to_string_lossy().contains(word)))
        .collect()
}

#[track_caller]
pub fn assert_refused(end: &End, words: &str) {
    assert!(end.code() == 2 && end.out.is_empty() && end.err.contains(words), "{}: {}{}", end.status, end.out, end.err);
}
