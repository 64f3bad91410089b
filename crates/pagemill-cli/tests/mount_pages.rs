//! The worker of `pagemill mount`: huge pages, zero pages, and its share of the CPUs.

mod common;

use common::ram::{MIB, Ram, pattern, wait_until};
use common::{Guard, TIMEOUT, finish};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const BLOCK: usize = MIB + MIB;

/// Maps a file and returns how many of its bytes are mapped by huge pages.
fn huge_bytes(path: &Path) -> usize {
    // A Python process maps the file, because unsafe code is not allowed in this test.
    let script = "import mmap, sys, re
f = open(sys.argv[1], 'rb'); n = f.seek(0, 2)
import ctypes
libc = ctypes.CDLL(None, use_errno=True); libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
huge = 1 << 21
around = libc.mmap(None, n + 2 * huge, 0, 0x22, -1, 0)
at = libc.mmap((around + huge - 1) // huge * huge, n, 1, 0x11, f.fileno(), 0)
ctypes.memmove(ctypes.create_string_buffer(n), at, n)
own = open('/proc/self/smaps').read().split('VmFlags')
print(sum(int(re.search(r'ShmemPmdMapped: +(\\d+)', part).group(1)) for part in own if '%x-' % at in part))";
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(path).stdin(Stdio::null());
    let end = finish(command, TIMEOUT);
    end.assert_success();
    end.out.trim().parse::<usize>().unwrap() * 1024
}

/// Some time after the last close, a large file that was written in small parts must have huge pages. A file marked
/// `never` must have small pages, and a sparse file must hold only its data. Every byte must be kept.
#[test]
fn pages_follow_contents_and_marks() {
    let Some(ram) = Ram::new(&["--size", "512M"]) else { return };
    if common::is_missing("python3") {
        return;
    }
    let never = ram.folder("never", &["--huge", "never"]);
    let dense = pattern(1, 8 * BLOCK + 5);
    for path in [ram.at("dense"), never.join("dense")] {
        let mut file = File::create(path).unwrap();
        dense.chunks(64 << 10).for_each(|part| file.write_all(part).unwrap());
    }
    let sparse = File::create(ram.at("sparse")).unwrap();
    sparse.set_len(32 * BLOCK as u64).unwrap();
    sparse.write_all_at(b"x", 9 * BLOCK as u64 + 77).unwrap();
    drop(sparse);
    let held = |path: PathBuf| fs::metadata(path).unwrap().blocks() as usize * 512;
    wait_until("the sparse file is small", || held(ram.at("sparse")) <= 64 << 10);
    // The counters alone are not enough: on a busy machine, the worker may make the other file's blocks huge before it
    // reads the file's mark.
    let is_huge = || huge_bytes(&ram.at("dense")) == 8 * BLOCK;
    wait_until("the dense file is huge", || is_huge() || ram.count("collapse_no_memory") > 0);
    if !is_huge() {
        return println!("skipped: no huge pages to be had");
    }
    wait_until("its twin was split", || ram.count("split_blocks") >= 8 && huge_bytes(&never.join("dense")) == 0);
    assert!(fs::read(ram.at("dense")).unwrap() == dense && fs::read(never.join("dense")).unwrap() == dense);
    let bytes = fs::read(ram.at("sparse")).unwrap();
    assert_eq!((bytes.len(), bytes[9 * BLOCK + 77]), (32 * BLOCK, b'x'));
    assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 1);
}

/// The worker must have the lowest priority. It has its own session, for kernels that schedule by session.
#[test]
fn the_worker_has_the_lowest_priority() {
    let Some(ram) = Ram::new(&["--size", "512M"]) else { return };
    fs::write(ram.at("file"), pattern(1, 4 * BLOCK)).unwrap();
    let controller = ram.controller.id();
    let children = || {
        let tasks = fs::read_dir(format!("/proc/{controller}/task")).unwrap();
        tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("children")).ok()).collect::<String>()
    };
    wait_until("the worker is there", || !children().trim().is_empty());
    let worker: u32 = children().split_whitespace().next().unwrap().parse().unwrap();
    let of = |pid: u32, field: usize| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(") ").next().unwrap().split(' ').nth(field).unwrap().to_owned()
    };
    const SESSION: usize = 3;
    const NICE: usize = 16;
    wait_until("it has its session", || of(worker, SESSION) == worker.to_string());
    assert_eq!(of(worker, NICE), "19");
    match fs::read_to_string(format!("/proc/{worker}/autogroup")) {
        Ok(group) => wait_until("its session gives way", || {
            group.contains("nice 19")
                || fs::read_to_string(format!("/proc/{worker}/autogroup")).unwrap().contains("nice 19")
        }),
        Err(error) => println!("skipped: sessions have no priority here: {error}"),
    }
}

/// Busy loops use all CPUs. The worker must still make blocks huge, since it has a small guaranteed share.
#[test]
fn blocks_become_huge_beside_busy_loops() {
    let Some(ram) = Ram::new(&["--size", "512M"]) else { return };
    let processors = std::thread::available_parallelism().unwrap().get();
    let busy = || {
        let mut command = Command::new("sh");
        command.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
        Guard::new(command)
    };
    let _loops: Vec<Guard> = (0..2 * processors).map(|_| busy()).collect();
    let bytes = pattern(1, 8 * BLOCK);
    fs::write(ram.at("file"), &bytes).unwrap();
    wait_until("blocks are huge", || ram.count("huge_blocks") >= 4 || ram.count("collapse_no_memory") > 0);
    assert!(fs::read(ram.at("file")).unwrap() == bytes);
}
