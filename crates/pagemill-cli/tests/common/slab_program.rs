//! A program with slab caches of all kinds and controllable callbacks, and helpers for tests that inspect it.
#![allow(unsafe_code)] // an owner of objects

use super::holder::Holder;
use super::{End, PAGEMILL, Place, finish_answered, walk};
use pagemill::Pagemill;
use pagemill::slab::{self, ByOwner, Candidates, Done, Handle, Migrate, Moving, Settings, SlabInfo, Target};
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

/// The program is the test `program` of the file that includes this one. This variable names the folder of files that
/// control it.
const BE_PROGRAM: &str = "SLABINFO_TEST_PROGRAM";

/// Values of each cache; one in ten is kept.
pub const COUNT: u64 = 20_000;
pub const KEPT: u64 = COUNT / 10;

pub const ODD_NAME: &str = "tab\tred \x1b[31m\nline=1";

/// The name as it is displayed.
pub const ODD_SHOWN: &str = "tab?red ?[31m?line=1";

pub const NAMES: [&str; 4] = ["entries", "nodes", "boxes", ODD_SHOWN];

/// Files in this folder control the callbacks.
struct Book {
    folder: PathBuf,
    objects: Vec<AtomicPtr<Object>>,
}

impl Book {
    /// Waits while this file exists.
    fn mind(&self, file: &str) {
        while self.folder.join(file).exists() {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Its number plus one, while it is live.
struct Object([AtomicU64; 24]);

// SAFETY: except for helper threads, all calls of this program come from one thread, which waits while they run. So
// live objects stay live while they are isolated and moved.
unsafe impl Migrate for Book {
    type Object = Object;
    type Isolated = ();

    fn construct(&self) -> Object {
        Object([const { AtomicU64::new(0) }; 24])
    }

    fn isolate(&self, objects: &mut Candidates<'_, Object>) {
        self.mind("isolating");
        // SAFETY: objects of the cache are constructed.
        objects.retain(|object| unsafe { object.as_ref() }.0[0].load(Relaxed) != 0);
    }

    fn migrate<'object>(
        &self,
        object: Moving<'object, Object>,
        to: &mut Target<'_, Object>,
        (): &mut (),
    ) -> Done<'object> {
        self.mind("moving");
        assert!(!self.folder.join("panicking").exists(), "as it is told to");
        let Some(new) = to.take() else { return object.failed() };
        // SAFETY: both are objects of the cache.
        let (from, to) = unsafe { (object.object().as_ref(), new.object().as_ref()) };
        from.0.iter().zip(&to.0).for_each(|(from, to)| to.store(from.load(Relaxed), Relaxed));
        self.objects[from.0[0].load(Relaxed) as usize - 1].store(new.object().as_ptr(), Relaxed);
        from.0[0].store(0, Relaxed);
        object.moved(new)
    }
}

fn stays(number: u64) -> bool {
    number % 10 == 3
}

fn fill_nodes(cache: &ByOwner<Book>) {
    for (number, at) in cache.owner().objects.iter().enumerate() {
        let object = cache.allocate().unwrap();
        // SAFETY: an object of the cache, constructed.
        unsafe { object.as_ref() }.0[0].store(number as u64 + 1, Relaxed);
        at.store(object.as_ptr(), Relaxed);
    }
    for (_, at) in cache.owner().objects.iter().enumerate().filter(|(number, _)| !stays(*number as u64)) {
        let object = NonNull::new(at.swap(std::ptr::null_mut(), Relaxed)).unwrap();
        // SAFETY: its only reference was removed.
        unsafe {
            object.as_ref().0[0].store(0, Relaxed);
            cache.free(object);
        }
    }
}

/// Prints its process id and, for each cache: objects in use, slabs, partial slabs, resident bytes, ratios.
fn say(infos: &[SlabInfo]) {
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

/// The program, as which the test `program` of a file runs for the other tests of that file.
pub fn run() {
    let Some(folder) = std::env::var_os(BE_PROGRAM) else { return };
    // A ratio of 0: no object moves without a command.
    let settings = |name| Settings { defrag_used_ratio: 0, ..Settings::new(name) };
    let slabs = Pagemill::of_process().unwrap().slabs;
    let entries = slabs.by_handle::<[u64; 24]>(settings("entries")).unwrap();
    let book = Book { folder: folder.into(), objects: (0..COUNT).map(|_| AtomicPtr::default()).collect() };
    let nodes: ByOwner<Book> = slabs.by_owner(settings("nodes"), book).unwrap();
    let boxes = slabs.fixed::<u64>(Settings { debug: true, ..Settings::new("boxes") }).unwrap();
    let odd = slabs.fixed::<u64>(Settings::new(ODD_NAME)).unwrap();
    let handles: Vec<Handle<[u64; 24]>> = (0..COUNT).map(|number| entries.insert([number; 24]).unwrap()).collect();
    for (number, handle) in handles.iter().enumerate().filter(|(number, _)| !stays(*number as u64)) {
        assert!(entries.remove(*handle).unwrap(), "{number}");
    }
    fill_nodes(&nodes);
    let kept: Vec<_> = (0..100).map(|number| boxes.insert(number).unwrap()).collect();
    // A child has only caches of its own.
    let folder = &nodes.owner().folder;
    loop {
        if folder.join("forking").exists() {
            be_parent();
        }
        say(&[entries.info().unwrap(), nodes.info().unwrap(), boxes.info().unwrap(), odd.info().unwrap()]);
        if std::io::stdin().read_line(&mut String::new()).unwrap() == 0 {
            break;
        }
    }
    let guard = slab::pin();
    for (number, handle) in handles.iter().enumerate() {
        let number = number as u64;
        assert_eq!(entries.get(*handle, &guard), stays(number).then_some(&[number; 24]));
    }
    drop(guard);
    for (number, at) in nodes.owner().objects.iter().enumerate() {
        // SAFETY: the table holds live objects or null.
        let object = unsafe { at.load(Relaxed).as_ref() };
        assert_eq!(object.map(|object| object.0[0].load(Relaxed)), stays(number as u64).then_some(number as u64 + 1));
    }
    assert_eq!(kept.iter().map(|number| **number).sum::<u64>(), 4950);
    drop(odd);
    // All contents are intact.
    std::io::stdout().write_all(b"1\n").unwrap();
}

/// Forks a child that makes a cache, prints a line, and ends after input; waits for its end.
fn be_parent() {
    // SAFETY: the child makes a cache, writes a line, reads one and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let own = Pagemill::of_process().unwrap().slabs.by_handle::<u64>(Settings::new("own")).unwrap();
        let handles: Vec<_> = (0..COUNT).map(|number| own.insert(number).unwrap()).collect();
        handles.iter().skip(1).for_each(|handle| assert!(own.remove(*handle).unwrap()));
        say(&[own.info().unwrap()]);
        let _ = std::io::stdin().read_line(&mut String::new());
        assert_eq!(own.get(handles[0], &slab::pin()), Some(&0));
        std::process::exit(0);
    }
    let mut status = -1;
    // SAFETY: writes `status`.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((ended, status), (child, 0));
}

pub fn start(place: &Place) -> Holder {
    Holder::start(program_of(place, place.command(std::env::current_exe().unwrap())))
}

pub fn program_of(place: &Place, mut command: Command) -> Command {
    command.args(["--exact", "program", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env(BE_PROGRAM, place.path("."));
    command
}

/// The numbers that the program printed for a cache: objects, slabs, partial slabs, resident bytes, ratios.
pub fn said<'holder>(holder: &'holder Holder, name: &str) -> &'holder [u64] {
    let at = NAMES.iter().position(|known| *known == name).unwrap();
    holder.numbers[1..].chunks_exact(6).nth(at).unwrap()
}

pub fn slabinfo(place: &Place, options: &[&str]) -> Command {
    let mut command = place.command(PAGEMILL);
    command.arg("slabinfo").args(options);
    command
}

/// The output of the command for a program.
pub fn show(place: &Place, holder: &Holder, options: &[&str]) -> String {
    let pid = holder.pid().to_string();
    let end = finish_answered(|| slabinfo(place, &[&[pid.as_str()], options].concat()));
    end.assert_success();
    assert_eq!(requests(place), Vec::<PathBuf>::new());
    end.out
}

pub fn list(place: &Place, holder: &Holder, options: &[&str]) -> Value {
    serde_json::from_str(&show(place, holder, &[&["--json"], options].concat())).unwrap()
}

pub fn cache<'list>(list: &'list Value, name: &str) -> &'list Value {
    let caches = list["caches"].as_array().unwrap();
    caches.iter().find(|cache| cache["name"] == name).unwrap_or_else(|| panic!("no {name}: {list}"))
}

pub fn number(row: &Value, name: &str) -> u64 {
    row[name].as_u64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

pub fn names(list: &Value) -> Vec<&str> {
    list["caches"].as_array().unwrap().iter().map(|cache| cache["name"].as_str().unwrap()).collect()
}

/// Requests that are left in the folder.
pub fn requests(place: &Place) -> Vec<PathBuf> {
    walk(&place.path("runtime"))
        .into_iter()
        .filter(|path| [".slabs-", ".order-"].iter().any(|word| path.to_string_lossy().contains(word)))
        .collect()
}

#[track_caller]
pub fn assert_refused(end: &End, words: &str) {
    assert!(end.code() == 2 && end.out.is_empty() && end.err.contains(words), "{}: {}{}", end.status, end.out, end.err);
}
