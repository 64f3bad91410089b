//! The helper makes chunks resident while other threads take chunks into use or return them.

use super::*;

/// Number of steps of the helper.
const HELPER_STEPS: usize = 4;

/// Two threads write new files, the helper provides chunks early, and a fourth thread returns free chunks. The files
/// must keep their bytes. At the end no chunk may be in transit, and after the last return none may have memory.
#[test]
fn chunks_ahead_during_growth_and_returns() {
    let ahead = stats::get(Counter::BlocksPrefaulted);
    let runs = run_in_many_schedules(1, || {
        let cache = cache_with_ample_room();
        let (caches, pool) = (cache.0.caches, cache.0.pool);
        assert!(caches.helper.claim());
        let files: Arc<[TestFile; 2]> = Arc::new([1, 2].map(|byte| TestFile::new(&cache, byte, PAGES)));
        let writers = [0, 1].map(|file| {
            let files = files.clone();
            shuttle::thread::spawn(move || {
                for page in 0..PAGES {
                    let written = files[file].file.write_at(&[files[file].byte; SAMPLE_BYTES], page * PAGE as u64);
                    assert_eq!(written.unwrap(), SAMPLE_BYTES);
                }
            })
        });
        let helper = shuttle::thread::spawn(move || {
            for _ in 0..HELPER_STEPS {
                caches.grow_ahead();
                shuttle::thread::yield_now();
            }
        });
        let returns = cache.clone();
        let returns = shuttle::thread::spawn(move || (0..2).for_each(|_| _ = returns.shrink()));
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        helper.join().unwrap();
        returns.join().unwrap();
        files.iter().for_each(TestFile::check_all);
        drop(files);
        assert_is_empty(&cache);
        assert!(pool.is_idle(), "each chunk is free or has no memory");
        cache.shrink();
        assert_eq!((pool.filled_bytes(), pool.giveable_bytes()), (0, 0));
        caches.helper.unclaim();
    });
    assert!(runs < 100 || stats::get(Counter::BlocksPrefaulted) > ahead, "the helper never provided a chunk");
}
