//! `pagemill_vrange` in preloaded C programs: calls that end a mark, and more volatile memory than a group allows.

mod common;

use common::group::Group;
use common::{Place, STUCK_AFTER, finish};

const MIB: u64 = 1 << 20;

/// Memory that is unmapped, replaced, moved, discarded or freed is no longer volatile; in a grown program and in a
/// one on the libc fallback.
#[test]
fn what_goes_is_not_marked() {
    let place = Place::new();
    let Some(program) = place.compile("vrange_preload.c", &[]) else { return };
    finish(place.pagemill_run(&[], &program), STUCK_AFTER).assert_success();
    let mut not_grown = place.pagemill_run(&[], &program);
    not_grown.env_remove("PAGEMILL_AFTER");
    finish(not_grown, STUCK_AFTER).assert_success();
}

/// Twice as much marked memory as the group allows, which Pagemill did not allocate: no process is killed, and the
/// newest bytes are there.
#[test]
fn volatile_memory_survives_a_groups_limit() {
    let place = Place::new();
    let Some(program) = place.compile("vrange_preload.c", &[]) else { return };
    let Some(group) = Group::new("vrange", 256 * MIB) else { return };
    let mut command = place.pagemill_run(&[], &program);
    command.arg("512").env_remove("PAGEMILL_AFTER");
    let end = finish(group.enter(&command), STUCK_AFTER);
    end.assert_success();
    let gone: u64 = end.out.split(' ').next().unwrap().parse().unwrap();
    assert!((64..=118).contains(&gone), "{}: more than half must go, and a tenth at least can stay", end.out);
}
