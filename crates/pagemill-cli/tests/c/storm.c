/* Starts thousands of short threads, sixteen at a time. Each frees blocks that other threads allocated, and
 * leaves some of its own blocks for other threads. */
#include "check.h"

enum { ROUNDS = 250, AT_ONCE = 16, BOXES = 64 };

static void *boxes[BOXES];

static void *shortly(void *seed) {
    uint64_t state = (uint64_t)seed;
    for (int i = 0; i < 40; i++) {
        size_t sizes[] = {24, 700, 5000, 40000, 90000, 300000};
        size_t size = sizes[next_random(&state) % 6];
        size_t *memory = malloc(size);
        CHECK(memory);
        memory[0] = size, memory[1] = ~size;
        mark((char *)memory + 16, size - 16, size);
        size_t *other = __atomic_exchange_n(&boxes[next_random(&state) % BOXES], memory, __ATOMIC_ACQ_REL);
        if (other) {
            CHECK(other[1] == ~other[0]);
            CHECK(is_marked((char *)other + 16, other[0] - 16, other[0] - 16, other[0]));
            free(other);
        }
    }
    return NULL;
}

int main(void) {
    size_t early = 0;
    for (long round = 0; round < ROUNDS; round++) {
        pthread_t threads[AT_ONCE];
        for (long i = 0; i < AT_ONCE; i++)
            CHECK(pthread_create(&threads[i], NULL, shortly, (void *)(round * AT_ONCE + i)) == 0);
        for (int i = 0; i < AT_ONCE; i++)
            pthread_join(threads[i], NULL);
        if (round == 50)
            early = resident();
    }
    /* The memory of ended threads is reused. */
    fprintf(stderr, "resident: %zu early, %zu at the end\n", early, resident());
    CHECK(resident() < early * 3 / 2 + 64 * MIB);
    return 0;
}
