/* Allocates before and after main: in constructors, destructors, exit handlers, and a thread that runs until
 * the process ends. */
#include "check.h"

static void *early[3];

static void allocate(void **memory, uint64_t word) {
    size_t sizes[] = {100, 100000, 5 * MIB};
    for (int i = 0; i < 3; i++) {
        memory[i] = calloc(1, sizes[i]);
        CHECK(is_zero(memory[i], sizes[i]));
        mark(memory[i], sizes[i], word);
    }
}

static void release(void **memory, uint64_t word) {
    size_t sizes[] = {100, 100000, 5 * MIB};
    for (int i = 0; i < 3; i++) {
        CHECK(is_marked(memory[i], sizes[i], sizes[i], word));
        free(memory[i]);
    }
}

__attribute__((constructor(101))) static void first(void) {
    allocate(early, 5);
}

__attribute__((destructor(101))) static void last(void) {
    void *memory[3];
    allocate(memory, 8);
    release(memory, 8);
    release(early, 5);
    dprintf(1, "destructor\n");
}

static void at_end(void) {
    void *memory[3];
    allocate(memory, 7);
    release(memory, 7);
    dprintf(1, "handler\n");
}

static void *outlives(void *unused) {
    for (;;) {
        void *memory[3];
        allocate(memory, 6);
        release(memory, 6);
    }
    return NULL;
}

int main(void) {
    pthread_t thread;
    atexit(at_end);
    CHECK(pthread_create(&thread, NULL, outlives, NULL) == 0);
    CHECK(is_marked(early[2], 5 * MIB, 5 * MIB, 5));
    usleep(20000);
    return 0;
}
