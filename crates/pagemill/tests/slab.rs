//! Slab caches across `fork`, which the tests inside of the crate cannot do.
#![allow(unsafe_code)] // fork

use pagemill::slab::{self, Settings};
use pagemill::{Error, Pagemill};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `act` in a fork child; says whether it came to its end.
fn in_child(pagemill: &Pagemill, act: impl FnOnce()) -> bool {
    pagemill.before_fork();
    // SAFETY: the child runs `act` and ends without returning to the test.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    pagemill.after_fork();
    if pid == 0 {
        pagemill.begin_child();
        let is_done = catch_unwind(AssertUnwindSafe(act)).is_ok();
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!is_done)) };
    }
    let mut status = -1;
    // SAFETY: our own child; writes `status`.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status == 0
}

/// A child reads what it inherited, is refused what takes a lock of its parent's, makes caches of its own, and changes nothing of
/// the parent's.
#[test]
fn a_fork_child_has_caches_of_its_own() {
    let pagemill = Pagemill::for_test();
    let values = pagemill.slabs.by_handle::<[u64; 8]>(Settings::new("values")).unwrap();
    let boxes = pagemill.slabs.fixed::<u64>(Settings::new("boxes")).unwrap();
    let handles: Vec<_> = (0..1000).map(|number| values.insert([number; 8]).unwrap()).collect();
    let slots: Vec<_> = (0..1000).map(|number| boxes.insert(number).unwrap()).collect();
    let is_done = in_child(pagemill, || {
        let guard = slab::pin();
        assert!(handles.iter().zip(0..).all(|(handle, number)| values.get(*handle, &guard) == Some(&[number; 8])));
        drop(guard);
        assert!(matches!(values.insert([0; 8]), Err(Error::WrongState { .. })));
        assert!(matches!(values.remove(handles[0]), Err(Error::WrongState { .. })));
        assert!(matches!(values.shrink(), Err(Error::WrongState { .. })));
        assert!(matches!(boxes.shrink(), Err(Error::WrongState { .. })));
        assert!(pagemill.slabs.list().is_empty());
        let own = pagemill.slabs.by_handle::<u64>(Settings::new("own")).unwrap();
        let own_handles: Vec<_> = (0..10_000).map(|number| own.insert(number).unwrap()).collect();
        own_handles.iter().step_by(2).for_each(|handle| assert!(own.remove(*handle).unwrap()));
        own.shrink().unwrap();
        assert_eq!(own.info().unwrap().active, 5_000);
        assert!(slots.iter().zip(0..).all(|(slot, number)| **slot == number));
    });
    assert!(is_done, "see the child's message above");
    slots.iter().zip(0..).for_each(|(slot, number)| assert_eq!(**slot, number));
    drop(slots);
    handles.iter().for_each(|handle| assert!(values.remove(*handle).unwrap()));
    values.shrink().unwrap();
    boxes.shrink().unwrap();
    assert_eq!((values.info().unwrap().total.blocks, boxes.info().unwrap().total.blocks), (0, 0));
}
