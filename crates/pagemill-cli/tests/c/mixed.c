/* mixed THREADS STEPS LARGEST-KIB [may-fail]: makes random calls in many threads, and checks the contents
 * before each change. */
#include "check.h"

enum { SLOTS = 300 };

static size_t largest;
static long steps;
static int may_fail;

struct slot {
    unsigned char *memory;
    size_t size;
    uint64_t word;
};

/* Returns a random size. Each power of two is equally likely. */
static size_t random_size(uint64_t *state) {
    size_t size = (size_t)1 << next_random(state) % 26;
    size += next_random(state) % size;
    return size > largest ? 1 + size % 1000 : size;
}

static void *work(void *seed) {
    uint64_t state = (uint64_t)seed;
    struct slot *slots = calloc(SLOTS, sizeof *slots);
    long refused = 0;
    CHECK(slots);
    for (long step = 0; step < steps; step++) {
        struct slot *slot = &slots[next_random(&state) % SLOTS];
        size_t size = random_size(&state);
        uint64_t kind = next_random(&state) % 8, word = next_random(&state);
        unsigned char *memory;
        CHECK(!slot->memory || is_marked(slot->memory, slot->size, slot->size, slot->word));
        if (slot->memory && kind < 3) {
            memory = realloc(slot->memory, size);
            if (memory) {
                size_t keep = size < slot->size ? size : slot->size;
                CHECK(is_marked(memory, keep, slot->size, slot->word));
                slot->memory = NULL;
            }
        } else {
            free(slot->memory);
            slot->memory = NULL;
            size_t align = (size_t)16 << next_random(&state) % 18;
            memory = kind == 3 ? calloc(1, size) : kind == 4 && align <= largest ? memalign(align, size) : malloc(size);
            if (kind == 3 && memory)
                CHECK(is_zero(memory, size));
            if (kind == 4 && memory && align <= largest)
                CHECK((uintptr_t)memory % align == 0);
        }
        if (memory) {
            *slot = (struct slot){memory, size, word};
            mark(memory, size, word);
        } else {
            CHECK(may_fail && errno == ENOMEM);
            refused++;
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        CHECK(!slots[i].memory || is_marked(slots[i].memory, slots[i].size, slots[i].size, slots[i].word));
        free(slots[i].memory);
    }
    free(slots);
    return (void *)refused;
}

int main(int argc, char **argv) {
    int count = atoi(argv[1]);
    steps = atol(argv[2]);
    largest = (size_t)atol(argv[3]) * KIB;
    may_fail = argc > 4;
    pthread_t threads[64];
    long refused = 0;
    for (long i = 0; i < count; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)(i * 7919 + 1)) == 0);
    for (int i = 0; i < count; i++) {
        void *result;
        pthread_join(threads[i], &result);
        refused += (long)result;
    }
    printf("%ld refused\n", refused);
    return 0;
}
