//! Programs of the folder `examples`, and a database of others, on the page cache.

use pagemill::PageCache;
use pagemill::cache::Source;
use pagemill::store::{FileStore, MemoryStore, Store};
use redb::{Database, ReadableTable, ReadableTableMetadata, TableDefinition};
use redb_example::{ACCESSES, CachedStorage};
use std::collections::BTreeMap;
use std::sync::Arc;

#[path = "../examples/from_memmap2.rs"]
mod from_memmap2;
#[path = "../examples/redb.rs"]
mod redb_example;

const TABLE: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("model");
/// Memory limit of the page cache in bytes, a fraction of the database.
const CACHE_BYTES: u64 = 1 << 20;

type Model = BTreeMap<u64, Vec<u8>>;

/// Both halves of the example must write the same bytes to a file that is twice as large as the cache.
#[test]
fn memmap2_and_a_view_write_the_same_bytes() {
    from_memmap2::run(32).unwrap();
}

fn cache() -> PageCache {
    PageCache::builder("redb").limit(CACHE_BYTES).source(Source::Shared).build().unwrap()
}

fn open(cache: &PageCache, store: &Arc<dyn Store>, access: usize) -> Database {
    let storage = CachedStorage::open(cache, store.clone(), ACCESSES[access]).unwrap();
    // redb's own cache is small, so that most reads reach the page cache.
    Database::builder().set_cache_size(64 << 10).create_with_backend(storage).unwrap()
}

/// Makes one transaction of random insertions and removals, and ends it at random by a commit or an abort.
fn write_transaction(database: &Database, model: &mut Model, random: &mut fastrand::Rng) {
    let mut writing = database.begin_write().unwrap();
    if random.u8(0..4) == 0 {
        writing.set_durability(redb::Durability::Eventual);
    }
    let mut changed = model.clone();
    {
        let mut table = writing.open_table(TABLE).unwrap();
        for _ in 0..random.usize(1..150) {
            let key = random.u64(0..5000);
            let before = if random.u8(0..4) == 0 {
                let before = table.remove(key).unwrap().map(|value| value.value().to_owned());
                (before, changed.remove(&key))
            } else {
                let len = if random.u8(0..50) == 0 { 40_000 } else { 4000 };
                let value = vec![random.u8(..); random.usize(0..len)];
                let before = table.insert(key, &value[..]).unwrap().map(|value| value.value().to_owned());
                (before, changed.insert(key, value))
            };
            assert!(before.0 == before.1, "key {key}");
        }
    }
    if random.u8(0..8) == 0 {
        writing.abort().unwrap();
    } else {
        writing.commit().unwrap();
        *model = changed;
    }
}

fn assert_equal(database: &Database, model: &Model) {
    let reading = database.begin_read().unwrap();
    let table = reading.open_table(TABLE).unwrap();
    assert_eq!(table.len().unwrap(), model.len() as u64);
    for (found, (key, value)) in table.iter().unwrap().zip(model) {
        let (found_key, found_value) = found.unwrap();
        assert_eq!(found_key.value(), *key);
        assert!(found_value.value() == value, "key {key}");
    }
}

/// The database redb makes random transactions on a file of a page cache that is much smaller, by calls, by reads in a
/// view, and by writes in a view, while other threads read. Its table must equal a model. From time to time the database
/// is closed, and opened in another cache with another way of access; redb must find it whole.
fn compare_with_model(store: &Arc<dyn Store>, seed: u64) {
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut model = Model::new();
    for round in 0..ACCESSES.len() {
        let cache = cache();
        let mut database = open(&cache, store, (round + seed as usize) % ACCESSES.len());
        if round > 0 {
            assert_equal(&database, &model);
        }
        for _ in 0..10 {
            std::thread::scope(|scope| {
                let (database, before) = (&database, model.clone());
                let reading = (round > 0).then(|| database.begin_read().unwrap());
                if let Some(reading) = reading {
                    scope.spawn(move || {
                        let table = reading.open_table(TABLE).unwrap();
                        for (key, value) in before.iter().step_by(7) {
                            assert!(table.get(key).unwrap().expect("a key of the model").value() == value, "key {key}");
                        }
                    });
                }
                write_transaction(database, &mut model, &mut random);
            });
            assert!(cache.charged_bytes() <= CACHE_BYTES);
        }
        let model_bytes: usize = model.values().map(Vec::len).sum();
        assert!(round == 0 || model_bytes as u64 > CACHE_BYTES, "{model_bytes} bytes fit into the cache");
        assert_equal(&database, &model);
        assert!(database.check_integrity().unwrap(), "round {round}");
        if round % 2 == 1 {
            database.compact().unwrap();
            assert_equal(&database, &model);
        }
        drop(database);
    }
}

#[test]
fn redb_equals_a_model_on_a_store_in_memory() {
    for seed in 0..2 {
        compare_with_model(&(Arc::new(MemoryStore::new(Vec::new(), 512)) as Arc<dyn Store>), seed);
    }
}

#[test]
fn redb_equals_a_model_on_a_file() {
    let file = tempfile::NamedTempFile::new().unwrap();
    compare_with_model(&(Arc::new(FileStore::open(file.path()).unwrap()) as Arc<dyn Store>), 5);
}
