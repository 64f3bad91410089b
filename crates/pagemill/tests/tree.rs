//! Tests with real processes that share the page of a process tree. A member of the tree must return memory for another
//! member, killed and stopped members must be tolerated, and no contents of the shared page may end a member.
//!
//! A member is this test program, started again. It runs only the test [`member`], which executes the commands that it
//! reads from its standard input.
#![allow(unsafe_code)] // writes to and frees the allocations of a member; sends signals

use pagemill_core::arena::Layout;
use pagemill_core::reclaim::tree::{TreePage, UNLIMITED};
use pagemill_sys::process;
use pagemill_testbed::Testbed;
use std::ffi::CString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// Environment variable with the path of the file of the shared page, for a member.
const PAGE_PATH_ENV: &str = "PAGEMILL_TEST_TREE";

/// Upper bound of every wait in these tests, even on a loaded machine.
const WAIT_LIMIT: Duration = Duration::from_secs(600);

/// Runs a member process, which executes the commands that [`Member`] sends.
#[test]
fn member() {
    let Ok(path) = std::env::var(PAGE_PATH_ENV) else { return };
    let pagemill = Testbed::new(Layout::for_test(), UNLIMITED).unwrap();
    pagemill.account.join(TreePage::join(&CString::new(path).unwrap()).unwrap(), process::own_identity());
    assert!(pagemill.helper.claim());
    std::thread::spawn(|| pagemill.helper.run(|| pagemill.instance.prefault()));
    let mut held = Slots { pagemill, addrs: Vec::new() };
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (word, number) = line.split_once(' ').unwrap();
        let number: usize = number.parse().unwrap();
        let result = match word {
            "allocate" => held.allocate(number),
            "free" => held.free(number),
            "allocate_and_free_for" => held.allocate_and_free_for(Duration::from_millis(number as u64)),
            "resident" => {
                pagemill.account.reconcile();
                pagemill.account.resident() as usize
            }
            _ => break,
        };
        println!("\n> {result}");
    }
    held.check();
    pagemill.account.leave();
}

/// Allocated slots of 1 MiB. Each slot is filled with its index.
struct Slots {
    pagemill: &'static Testbed,
    addrs: Vec<(usize, u8)>,
}

impl Slots {
    /// Allocates up to `count` slots. Stops at the first allocation that fails. Returns the number of allocated slots.
    fn allocate(&mut self, count: usize) -> usize {
        for done in 0..count {
            let Ok(found) = self.pagemill.heap.allocate(MIB, 1) else { return done };
            let byte = self.addrs.len() as u8 | 1;
            // SAFETY: the memory was allocated just now, and only this test uses it.
            unsafe { std::ptr::write_bytes(found.addr.as_ptr(), byte, MIB) };
            // Without huge pages, the slot is charged only at a measurement of resident memory.
            self.pagemill.account.reconcile();
            self.addrs.push((found.addr.as_ptr() as usize, byte));
        }
        count
    }

    fn free(&mut self, count: usize) -> usize {
        self.check();
        let count = count.min(self.addrs.len());
        for (addr, _) in self.addrs.drain(..count) {
            // SAFETY: the allocation was live and is not used again.
            unsafe { self.pagemill.heap.free(addr) }.unwrap();
        }
        count
    }

    fn check(&self) {
        for (addr, byte) in &self.addrs {
            // SAFETY: the allocation is live, and no thread writes to it.
            let bytes = unsafe { std::slice::from_raw_parts(*addr as *const u8, MIB) };
            assert!(*bytes == [*byte; MIB], "contents of {addr:#x} changed");
        }
    }

    /// Allocates and frees slots for this time. Returns the number of rounds.
    fn allocate_and_free_for(&mut self, time: Duration) -> usize {
        let (start, mut rounds) = (Instant::now(), 0);
        while start.elapsed() < time {
            self.allocate(1 + rounds % 7);
            self.free(rounds % 9);
            self.pagemill.account.reconcile();
            rounds += 1;
        }
        self.free(usize::MAX);
        rounds
    }
}

/// A member process of the tree, as its parent controls it.
struct Member {
    child: Child,
    input: ChildStdin,
    replies: Receiver<usize>,
}

impl Member {
    fn start(tree: &Tree) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "member", "--nocapture", "--test-threads=1"])
            .env(PAGE_PATH_ENV, &tree.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (output, (sender, replies)) = (BufReader::new(child.stdout.take().unwrap()), channel());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let Some(number) = line.strip_prefix("> ") else { continue };
                let _ = sender.send(number.parse().unwrap());
            }
        });
        let mut member = Self { input: child.stdin.take().unwrap(), child, replies };
        member.request("resident", 0); // it has joined
        member
    }

    /// Sends a command to the member.
    fn send(&mut self, word: &str, number: usize) {
        writeln!(self.input, "{word} {number}").unwrap();
    }

    /// Waits for the reply to the oldest command that was not replied to, and returns the number in the reply.
    fn receive_reply(&mut self) -> usize {
        self.replies.recv_timeout(WAIT_LIMIT).expect("the member answers")
    }

    /// Sends a command to the member, waits for the reply, and returns the number in the reply.
    fn request(&mut self, word: &str, number: usize) -> usize {
        self.send(word, number);
        self.receive_reply()
    }

    /// Makes the member allocate `count` slots. Repeats the command until it succeeds, because on a busy machine a
    /// sibling may answer too late.
    fn allocate_with_retries(&mut self, count: usize) {
        let (began, mut done) = (Instant::now(), 0);
        while done < count {
            assert!(began.elapsed() < WAIT_LIMIT, "{done} of {count} allocations were granted");
            done += self.request("allocate", count - done);
        }
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: the process is a child of this test that was not waited for yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Stops the member and waits until all its threads are stopped. Without the wait, the member's helper thread could
    /// still answer a request.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let is_stopped = |task: std::fs::DirEntry| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        };
        let tasks = || std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        while !tasks().all(|task| is_stopped(task.unwrap())) {
            std::thread::yield_now();
        }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Makes the member check its slots and end. The member must end with success.
    fn end(mut self) {
        self.send("end", 0);
        let status = self.child.wait().unwrap();
        assert!(status.success(), "the member ended with {status}");
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The shared page of a process tree, in a file, with a memory limit.
struct Tree {
    _folder: tempfile::TempDir,
    path: String,
    page: &'static TreePage,
}

impl Tree {
    fn new(limit: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tree").to_str().unwrap().to_owned();
        let page = TreePage::create(&CString::new(path.as_str()).unwrap(), limit as u64).unwrap();
        Self { _folder: folder, path, page }
    }
}

/// Member A has 48 of 64 MiB, all of them free, and member B needs 48 MiB. The helper thread of A must return the
/// missing memory, but not all of A's memory.
#[test]
fn a_sibling_returns_its_free_memory() {
    let tree = Tree::new(64 * MIB);
    let (mut a, mut b) = (Member::start(&tree), Member::start(&tree));
    a.allocate_with_retries(48);
    assert_eq!(a.request("free", 48), 48);
    assert_eq!(a.request("resident", 0), 48 * MIB, "free, but still there");
    b.allocate_with_retries(48);
    let (began, mut a_holds, b_holds) = (Instant::now(), a.request("resident", 0), b.request("resident", 0));
    assert_eq!(b_holds, 48 * MIB);
    // A's helper may still answer a request for which the sender no longer waits.
    while tree.page.totals().resident != (a_holds + b_holds) as u64 {
        assert!(began.elapsed() < WAIT_LIMIT, "{a_holds} and {b_holds}: {:?}", tree.page.totals());
        a_holds = a.request("resident", 0);
    }
    assert!(a_holds <= 16 * MIB, "{a_holds}");
    assert_eq!(tree.page.totals().members, 2);
    assert!(tree.page.peak().0 <= (64 * MIB) as u64, "the limit was passed");
    a.end();
    b.end();
    assert_eq!(tree.page.totals().resident, 0);
}

/// Member A uses its memory, so allocations of member B fail. B must keep its own memory. After A has freed some
/// memory, B must get more.
#[test]
fn a_sibling_keeps_what_it_uses() {
    let tree = Tree::new(64 * MIB);
    let (mut a, mut b) = (Member::start(&tree), Member::start(&tree));
    a.allocate_with_retries(48);
    assert_eq!(b.request("allocate", 48), 16);
    assert_eq!(b.request("allocate", 1), 0);
    a.request("free", 20);
    b.allocate_with_retries(20);
    assert_eq!(b.request("allocate", 10), 0);
    a.end();
    b.end();
}

/// Two of three members have free memory. Together they must return what the third member needs.
#[test]
fn siblings_return_memory_together() {
    let tree = Tree::new(96 * MIB);
    let mut members = [Member::start(&tree), Member::start(&tree), Member::start(&tree)];
    for member in &mut members[..2] {
        member.allocate_with_retries(44);
        member.request("free", 44);
    }
    members[2].allocate_with_retries(80);
    assert!(tree.page.totals().resident <= (96 * MIB) as u64);
    members.into_iter().for_each(Member::end);
}

/// A member is killed. Its charge must end with the next sweep of the tree. A request over the limit must start a
/// sweep.
#[test]
fn the_charge_of_a_killed_member_ends() {
    let tree = Tree::new(64 * MIB);
    let (mut a, mut b) = (Member::start(&tree), Member::start(&tree));
    a.allocate_with_retries(48);
    a.kill();
    assert_eq!(tree.page.totals().resident, (48 * MIB) as u64, "no process has swept the page yet");
    b.allocate_with_retries(60);
    let totals = tree.page.totals();
    assert_eq!((totals.members, totals.resident), (1, (60 * MIB) as u64));
    b.end();
    let (mut c, mut d) = (Member::start(&tree), Member::start(&tree));
    c.allocate_with_retries(10);
    // Kills the member in the middle of its work.
    d.send("allocate_and_free_for", 10_000);
    std::thread::sleep(Duration::from_millis(50));
    d.kill();
    assert_eq!(tree.page.sweep(), 1);
    assert_eq!(tree.page.totals().resident, (10 * MIB) as u64);
    c.allocate_with_retries(50);
    c.end();
}

/// A stopped member cannot answer requests. Another member that needs its memory must wait only for a bounded time.
/// After the stopped member continues, the other member must get the memory.
#[test]
fn a_stopped_member_costs_a_bounded_wait() {
    let tree = Tree::new(64 * MIB);
    let (mut a, mut b) = (Member::start(&tree), Member::start(&tree));
    a.allocate_with_retries(48);
    a.request("free", 48);
    b.allocate_with_retries(16);
    a.stop();
    for attempt in 0..5 {
        // The reply proves that the wait is bounded, because the stopped member does not answer.
        assert_eq!(b.request("allocate", 1), 0, "attempt {attempt}: given by a stopped process?");
    }
    a.signal(libc::SIGCONT);
    b.allocate_with_retries(40);
    a.end();
    b.end();
}

fn mix_bits(mut value: u64) -> u64 {
    value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

/// Random words, ones and zeros are written all over the shared page while members work. No member may crash, hang or
/// lose a byte.
#[test]
fn random_contents_of_the_page_harm_no_member() {
    let tree = Tree::new(48 * MIB);
    let mut members = [Member::start(&tree), Member::start(&tree), Member::start(&tree)];
    let file = File::options().write(true).open(&tree.path).unwrap();
    let mut random = process::random_u64();
    println!("seed {random}");
    members.iter_mut().for_each(|member| member.send("allocate_and_free_for", 1500));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1400) {
        for _ in 0..100 {
            random = mix_bits(random.wrapping_add(0x9E37_79B9_7F4A_7C15));
            // Half of the writes go to the head and the entries of the first members, which are read most.
            let end = if random & 1 == 0 { 1024 } else { TreePage::LEN as u64 };
            let value = match random >> 1 & 3 {
                0 => 0,
                1 => u64::MAX,
                2 => random >> 40,
                _ => mix_bits(random),
            };
            file.write_at(&value.to_le_bytes(), (random >> 8) % (end / 8) * 8).unwrap();
        }
        match random >> 60 {
            0 => drop(file.write_at(&[0xFF; TreePage::LEN], 0).unwrap()),
            1 => drop(file.write_at(&[0; TreePage::LEN], 0).unwrap()),
            _ => {}
        }
        tree.page.totals();
        tree.page.sweep();
        std::thread::sleep(Duration::from_millis(1));
    }
    for member in &mut members {
        member.receive_reply();
        assert!(member.child.try_wait().unwrap().is_none(), "a member has ended");
    }
    // A page without its magic number cannot be joined. The attempt must have no effect.
    file.write_at(&[0xFF; 64], 0).unwrap();
    assert!(TreePage::join(&CString::new(tree.path.as_str()).unwrap()).is_err());
    members.into_iter().for_each(Member::end);
}
