//! Doc tests of programs that the compiler must reject, because they would break an invariant without `unsafe`.
//!
//! The rejected programs start like this one, which compiles:
//!
//! ```
//! # use pagemill_core::epoch;
//! # use pagemill_testbed::Testbed;
//! # use pagemill_xarray::XArray;
//! let pagemill = Testbed::for_test();
//! let array = XArray::new(pagemill.nodes.cache()?.forest());
//! assert!(array.load(0, &epoch::pin()).is_none());
//! # Ok::<(), pagemill_core::Error>(())
//! ```
//!
//! These are rejected: freeing a node that an index uses, moving a node to a number that another index uses, and
//! clearing a node.
//!
//! ```compile_fail,E0599
//! # let pagemill = pagemill_testbed::Testbed::for_test();
//! pagemill.nodes.cache().unwrap().forest().give(1);
//! ```
//! ```compile_fail,E0599
//! # let pagemill = pagemill_testbed::Testbed::for_test();
//! pagemill.nodes.cache().unwrap().forest().retire(1);
//! ```
//! ```compile_fail,E0133
//! # let pagemill = pagemill_testbed::Testbed::for_test();
//! pagemill.nodes.cache().unwrap().forest().relocate(1, 2);
//! ```
//! ```compile_fail,E0133
//! fn empty(node: &pagemill_xarray::Node) {
//!     node.clear();
//! }
//! ```
//!
//! These are rejected: a lookup with a guard of crossbeam's default collector, which would not protect the node, and a
//! deferred function of the program, which could run under a lock of this crate.
//!
//! ```compile_fail,E0308
//! # use pagemill_testbed::Testbed;
//! # use pagemill_xarray::XArray;
//! # let pagemill = Testbed::for_test();
//! let array = XArray::new(pagemill.nodes.cache().unwrap().forest());
//! array.load(0, &crossbeam_epoch::pin());
//! ```
//! ```compile_fail,E0599
//! pagemill_core::epoch::pin().defer(|| println!("under a lock"));
//! ```
//!
//! A guard must not be dropped on another thread:
//!
//! ```compile_fail,E0277
//! let guard = pagemill_core::epoch::pin();
//! std::thread::spawn(move || drop(guard));
//! ```
//!
//! Fork handlers must not be called by safe code:
//!
//! ```compile_fail,E0133
//! pagemill_testbed::Testbed::for_test().instance.before_fork();
//! ```
//! ```compile_fail,E0133
//! pagemill_testbed::Testbed::for_test().instance.after_fork();
//! ```
//! ```compile_fail,E0133
//! pagemill_testbed::Testbed::for_test().instance.begin_child();
//! ```
//! ```compile_fail,E0133
//! pagemill_core::stats::detach_in_child();
//! ```
//!
//! Safe code must not commit or overcommit pages of a live allocation, which would zero them or charge them twice:
//!
//! ```compile_fail,E0133
//! # let pagemill = pagemill_testbed::Testbed::for_test();
//! pagemill.arena.commit(pagemill.heap.base(), 4096);
//! ```
//! ```compile_fail,E0133
//! # let pagemill = pagemill_testbed::Testbed::for_test();
//! pagemill.arena.overcommit_extent(pagemill.heap.base(), 4096);
//! ```
