//! Model tests of views: random steps on files and their views, compared with a vector of bytes
//! ([`view_model`](model)).

#[path = "common/view_model.rs"]
mod model;

use model::{Model, STEP_BYTES, Setting, Step};
use pagemill_core::units::BLOCK_BYTES;
use proptest::prelude::*;

const KIB: usize = 1 << 10;

fn run(page_bytes: usize, use_huge: bool, has_store: bool, steps: &[Step]) {
    run_with(Setting::new(page_bytes, use_huge, has_store), steps);
}

fn run_with(setting: Setting, steps: &[Step]) {
    let cache = setting.cache();
    Model::new(&cache, setting).run(steps);
    assert_eq!(cache.charged_bytes(), 0);
}

fn random_steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(any::<[u8; STEP_BYTES]>().prop_map(Step::decode), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn views_of_small_pages_equal_vectors(steps in random_steps()) {
        run(4 * KIB, false, false, &steps);
    }

    #[test]
    fn views_of_huge_folios_equal_vectors(steps in random_steps()) {
        run(4 * KIB, true, false, &steps);
    }

    #[test]
    fn views_of_larger_pages_equal_vectors(steps in random_steps()) {
        run(64 * KIB, true, false, &steps);
    }

    #[test]
    fn views_of_pages_of_a_block_equal_vectors(steps in random_steps()) {
        run(BLOCK_BYTES, false, false, &steps);
    }

    #[test]
    fn views_of_small_pages_of_a_store_equal_vectors(steps in random_steps()) {
        run(4 * KIB, false, true, &steps);
    }

    #[test]
    fn views_of_huge_folios_of_a_store_equal_vectors(steps in random_steps()) {
        run(4 * KIB, true, true, &steps);
    }

    #[test]
    fn views_of_larger_pages_of_a_store_equal_vectors(steps in random_steps()) {
        run(64 * KIB, false, true, &steps);
    }

    #[test]
    fn views_of_pages_of_a_block_of_a_store_equal_vectors(steps in random_steps()) {
        run(BLOCK_BYTES, false, true, &steps);
    }
}

/// Most pages of a small cache are locked. The scan for an eviction must reach the others.
#[test]
fn locked_pages_do_not_stop_evictions() {
    let steps = [
        [0, 3, 0, 5, 108, 76, 119, 31],
        [0, 2, 224, 114, 206, 159, 11, 135],
        [14, 0, 79, 11, 120, 173, 151, 175],
        [8, 2, 218, 61, 48, 45, 250, 233],
        [14, 3, 63, 255, 72, 211, 234, 165],
        [12, 3, 15, 102, 48, 122, 186, 11],
        [25, 3, 215, 14, 163, 142, 210, 79],
    ];
    let setting = Setting { limit_bytes: 4 * BLOCK_BYTES, ..Setting::new(BLOCK_BYTES, false, true) };
    run_with(setting, &steps.map(Step::decode));
}
