/* Calls jemalloc's `mallctl`, and prints the version. Purges must return freed memory, of sizes below and
 * above 64 KiB, and the statistics must count live memory. The program may be linked to jemalloc. */
#include "check.h"

__attribute__((weak)) int mallctl(const char *name, void *old, size_t *old_len, void *new, size_t new_len);

static size_t sum(const char *name) {
    uint64_t epoch = 1;
    size_t value = 0, len = sizeof value;
    mallctl("epoch", NULL, NULL, &epoch, sizeof epoch);
    CHECK(mallctl(name, &value, &len, NULL, 0) == 0);
    return value;
}

int main(void) {
    enum { SMALL = 16 << 10, LARGE = 64 };
    static char *small[SMALL], *large[LARGE];
    CHECK(mallctl);
    size_t before = sum("stats.allocated");
    for (int i = 0; i < SMALL; i++) CHECK((small[i] = malloc(2 * KIB)) && memset(small[i], 1, 2 * KIB));
    for (int i = 0; i < LARGE; i++) CHECK((large[i] = malloc(MIB)) && memset(large[i], 1, MIB));
    size_t held = SMALL * 2 * KIB + LARGE * MIB;
    for (int i = 0; i < 2; i++) {
        size_t counted = sum(i ? "stats.active" : "stats.allocated");
        CHECK(counted >= before + held * 9 / 10 && counted <= before + held * 12 / 10);
    }
    size_t full = resident();
    CHECK(sum("stats.resident") >= held);
    for (int i = 0; i < SMALL; i++) free(small[i]);
    for (int i = 0; i < LARGE; i++) free(large[i]);
    CHECK(sum("stats.allocated") <= before + 2 * MIB);
    CHECK(mallctl("arena.4096.purge", NULL, NULL, NULL, 0) == 0);
    CHECK(full - resident() >= held * 9 / 10);

    const char *version = NULL;
    size_t len = sizeof version;
    CHECK(mallctl("version", &version, &len, NULL, 0) == 0 && strlen(version) > 3);
    unsigned narrow = 0;
    len = sizeof narrow;
    CHECK(mallctl("stats.resident", &narrow, &len, NULL, 0) == EINVAL);
    const char *unknown[] = {"no.such.name", "arena.x.purge", "arena.0", "stats"};
    for (int i = 0; i < 4; i++) CHECK(mallctl(unknown[i], NULL, NULL, NULL, 0) == ENOENT);
    printf("%s\n", version);
    return 0;
}
