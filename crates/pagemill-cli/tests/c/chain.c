/* One allocation grows from 64 KiB to 512 MiB and shrinks again. Every page has a number that depends on its
 * position. */
#include "check.h"

static void check(uint64_t *words, size_t size, uint64_t salt) {
    for (size_t at = 0; at < size / 8; at += 512)
        CHECK(words[at] == at * 3 + salt);
}

static void fill(uint64_t *words, size_t from, size_t to, uint64_t salt) {
    for (size_t at = (from / 8 + 511) / 512 * 512; at < to / 8; at += 512)
        words[at] = at * 3 + salt;
}

static void chain(size_t numerator, size_t denominator, uint64_t salt) {
    size_t size = 64 * KIB;
    uint64_t *words = malloc(size);
    fill(words, 0, size, salt);
    while (size < 512 * MIB) {
        size_t next = size * numerator / denominator;
        words = realloc(words, next);
        CHECK(words);
        check(words, size, salt);
        fill(words, size, next, salt);
        void *between = malloc(next / 10);
        CHECK(between);
        mark(between, next / 10, salt);
        free(between);
        size = next;
    }
    check(words, size, salt);
    while (size > 1000) {
        size_t next = size * denominator / numerator;
        words = realloc(words, next);
        CHECK(words);
        check(words, next / 4096 * 4096, salt);
        size = next;
    }
    free(words);
}

int main(void) {
    chain(2, 1, 5);
    chain(4, 3, 6);
    return 0;
}
