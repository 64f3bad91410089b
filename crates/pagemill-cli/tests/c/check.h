/* Helpers of the test programs: a check that prints its line when it fails, and patterns by which overwritten
 * memory is detected. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            dprintf(2, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
            _exit(99);                                                                    \
        }                                                                                 \
    } while (0)

/* Returns the value. The compiler cannot predict the result. */
static inline size_t hidden(size_t value) {
    volatile size_t copy = value;
    return copy;
}

/* Returns the resident bytes of this process. */
static inline size_t resident(void) {
    long pages = 0, all = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%ld %ld", &all, &pages) == 2);
    fclose(file);
    return (size_t)pages * 4096;
}

/* Writes a byte that depends on `word` to every page, to the middle and to the end of the memory. */
static inline void mark(void *memory, size_t size, uint64_t word) {
    unsigned char *bytes = memory;
    unsigned char low = (unsigned char)(word ^ word >> 8 ^ word >> 16) | 1;
    for (size_t at = 0; at < size; at += 4096)
        bytes[at] = low;
    if (size)
        bytes[size - 1] = bytes[size / 2] = low;
}

/* Returns whether the first `size` bytes still have the pattern that `mark` wrote to `marked` bytes. */
static inline int is_marked(void *memory, size_t size, size_t marked, uint64_t word) {
    unsigned char *bytes = memory;
    unsigned char low = (unsigned char)(word ^ word >> 8 ^ word >> 16) | 1;
    for (size_t at = 0; at < size; at += 4096)
        if (bytes[at] != low)
            return 0;
    if (marked && size >= marked && bytes[marked - 1] != low)
        return 0;
    return !(marked && size > marked / 2 && bytes[marked / 2] != low);
}

static inline int is_zero(const void *memory, size_t size) {
    const unsigned char *bytes = memory;
    return size == 0 || (bytes[0] == 0 && memcmp(bytes, bytes + 1, size - 1) == 0);
}

static inline uint64_t next_random(uint64_t *state) {
    uint64_t x = (*state += 0x9E3779B97F4A7C15u);
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}
