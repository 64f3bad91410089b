/* misuse CASE: misuses free or realloc. If the misuse is detected, the program ends with SIGABRT. */
#include "check.h"
#include <sys/mman.h>

static char in_data[4096] = {1};

static void *freer(void *memory) {
    free(memory);
    return NULL;
}

int main(int argc, char **argv) {
    const char *which = argv[1];
    /* The buffer is zeroed because the C library's error message depends on the bytes before the pointer. */
    volatile char on_stack[4096] = {0};
    char *small = malloc(100), *large = malloc(300 * KIB), *huge = malloc(9 * MIB);
    memset(small, 1, 100), memset(large, 1, 300 * KIB), memset(huge, 1, 9 * MIB);
    if (!strcmp(which, "stack"))
        free((void *)(on_stack + 64));
    else if (!strcmp(which, "data"))
        free(in_data + 64);
    else if (!strcmp(which, "mapping"))
        free(mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    else if (!strcmp(which, "realloc-stack"))
        realloc((void *)(on_stack + 64), 100);
    else if (!strcmp(which, "large-inside"))
        free(large + 64 * KIB);
    else if (!strcmp(which, "large-inside-near"))
        free(large + 16);
    else if (!strcmp(which, "huge-inside"))
        free(huge + 2 * MIB);
    else if (!strcmp(which, "large-twice"))
        free(large), free(large);
    else if (!strcmp(which, "huge-twice"))
        free(huge), free(huge);
    else if (!strcmp(which, "large-twice-trimmed"))
        free(large), malloc_trim(0), free(large);
    else if (!strcmp(which, "large-twice-threads")) {
        pthread_t thread;
        pthread_create(&thread, NULL, freer, large);
        pthread_join(thread, NULL);
        free(large);
    } else if (!strcmp(which, "large-realloc-after-free"))
        free(large), realloc(large, 400 * KIB);
    else if (!strcmp(which, "never-handed-out"))
        free(huge + 1024 * MIB);
    else if (!strcmp(which, "small-twice"))
        free(small), free(small);
    else if (!strcmp(which, "small-inside"))
        free(small + 32);
    else if (!strcmp(which, "small-odd"))
        free(small + 1);
    else if (!strcmp(which, "small-realloc-after-free"))
        free(small), realloc(small, 200);
    else
        return 98;
    dprintf(2, "not detected\n");
    return 0;
}
