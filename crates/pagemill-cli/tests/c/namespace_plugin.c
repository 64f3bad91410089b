/* Allocates on two threads of its linker namespace. Allocates memory for the program, and frees it. */
#include "check.h"

static void *work(void *unused) {
    for (int i = 0; i < 500; i++) {
        size_t size = 1000 + i % 7 * 100000;
        char *memory = malloc(size);
        CHECK(memory);
        mark(memory, size, i);
        CHECK(is_marked(memory, size, size, i));
        free(memory);
    }
    return NULL;
}

void plugin_work(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
    work(NULL);
    CHECK(pthread_join(thread, NULL) == 0);
}

void *plugin_give(void) {
    return memset(malloc(200000), 4, 200000);
}

void plugin_take(void *memory) {
    free(memory);
}
