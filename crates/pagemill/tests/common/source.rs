//! The kind of memory that the caches under test use. The test program `on_shared_memory` runs the tests of other files
//! again, as modules, with caches in shared memory.
#![allow(dead_code)] // each test file uses a part of this module

use pagemill_cache::mapping::Source;

/// Returns the kind of memory of the caches in this test program.
pub fn source() -> Source {
    if is_on_shared_memory() { Source::Shared } else { Source::Ordinary }
}

fn is_on_shared_memory() -> bool {
    module_path!().starts_with("on_shared_memory::")
}

/// Returns the name under which the test harness knows the test `name` of this file.
pub fn harness_name(name: &str) -> String {
    // The path is that of this module: program, file, `source`. The harness leaves out the program.
    let file = module_path!().split("::").nth(1).filter(|_| is_on_shared_memory());
    file.map_or_else(|| name.to_owned(), |file| format!("{file}::{name}"))
}
