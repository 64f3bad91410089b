//! `pagemill_vrange` in preloaded C programs: calls that end a mark, and more volatile memory than the limit of the
//! program's control group allows.

mod common;

use common::group::Group;
use common::{TIMEOUT, TestFolder, finish};

const MIB: u64 = 1 << 20;

/// Memory that is marked volatile is unmapped, replaced, moved, discarded or freed. It must then no longer be volatile,
/// both in a grown program and on the libc fallback.
#[test]
fn released_memory_is_no_longer_volatile() {
    let place = TestFolder::new();
    let Some(program) = place.compile("vrange_preload.c", &[]) else { return };
    finish(place.pagemill_run(&[], &program), TIMEOUT).assert_success();
    let mut not_grown = place.pagemill_run(&[], &program);
    not_grown.env_remove("PAGEMILL_AFTER");
    finish(not_grown, TIMEOUT).assert_success();
}

/// A program marks twice as much memory as the limit of its control group allows. Pagemill did not allocate this
/// memory. The program must not be killed, and the memory marked last must not be purged.
#[test]
fn volatile_memory_survives_a_groups_limit() {
    let place = TestFolder::new();
    let Some(program) = place.compile("vrange_preload.c", &[]) else { return };
    let Some(group) = Group::new("vrange", 256 * MIB) else { return };
    let mut command = place.pagemill_run(&[], &program);
    command.arg("512").env_remove("PAGEMILL_AFTER");
    let end = finish(group.enter(&command), TIMEOUT);
    end.assert_success();
    let gone: u64 = end.out.split(' ').next().unwrap().parse().unwrap();
    assert!((64..=118).contains(&gone), "{}: more than half must be purged, and at least a tenth need not be", end.out);
}
