//! Model tests of views: random steps on files and their views, compared with a vector of bytes
//! ([`view_model`](model)).

#[path = "common/view_model.rs"]
mod model;

use model::{Model, STEP_BYTES, Setting, Step};
use pagemill_core::units::BLOCK_BYTES;
use proptest::prelude::*;

const KIB: usize = 1 << 10;

fn run(page_bytes: usize, use_huge: bool, has_store: bool, steps: &[Step]) {
    let setting = Setting { page_bytes, use_huge, has_store };
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
