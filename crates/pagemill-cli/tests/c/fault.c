/* Allocates and frees in all sizes, forks, starts a thread, and frees all, while single kernel calls fail.
 * Allocated memory must keep its contents. NULL with ENOMEM is a valid result. The set-up ends with getppid. */
#include "check.h"
#include <fcntl.h>

#define SLOTS 40

static void *memory[SLOTS];
static size_t sizes[SLOTS];

static void put(int slot, size_t size) {
    errno = 0;
    memory[slot] = slot % 3 ? malloc(size) : calloc(1, size);
    CHECK(memory[slot] || errno == ENOMEM);
    sizes[slot] = memory[slot] ? size : 0;
    CHECK(slot % 3 || !memory[slot] || is_zero(memory[slot], size));
    mark(memory[slot], sizes[slot], slot + 1);
}

static void check_all(void) {
    for (int slot = 0; slot < SLOTS; slot++)
        CHECK(is_marked(memory[slot], sizes[slot], sizes[slot], slot + 1));
}

/* Returns the resident bytes. Tries twice, since one of its calls may be the failing one. */
static size_t held(void) {
    for (int tries = 0; tries < 2; tries++) {
        long pages = 0, all = 0;
        FILE *file = fopen("/proc/self/statm", "r");
        int count = file ? fscanf(file, "%ld %ld", &all, &pages) : 0;
        if (file)
            fclose(file);
        if (count == 2)
            return (size_t)pages * 4096;
    }
    CHECK(!"two calls failed");
    return 0;
}

static void *thread(void *unused) {
    for (int i = 0; i < 20; i++) {
        char *bytes = malloc(1000 * (i + 1) * (i + 1));
        if (bytes)
            bytes[0] = 1;
        free(bytes);
    }
    return NULL;
}

int main(void) {
    alarm(100);
    getppid();
    size_t all[] = {40, 3000, 20000, 70000, 500000, MIB, 3 * MIB, 9 * MIB};
    for (int slot = 0; slot < SLOTS; slot++)
        put(slot, all[slot % 8]);
    check_all();
    for (int slot = 0; slot < SLOTS; slot += 2) {
        void *larger = realloc(memory[slot], sizes[slot] * 2 + 1);
        if (larger) {
            CHECK(is_marked(larger, sizes[slot], sizes[slot], slot + 1));
            memory[slot] = larger;
            sizes[slot] = sizes[slot] * 2 + 1;
            mark(larger, sizes[slot], slot + 1);
        }
    }
    for (int slot = 1; slot < SLOTS; slot += 3) {
        free(memory[slot]);
        memory[slot] = NULL;
        sizes[slot] = 0;
    }
    malloc_trim(0);
    check_all();
    for (int slot = 1; slot < SLOTS; slot += 3)
        put(slot, all[(slot + 3) % 8]);
    pthread_t other;
    if (pthread_create(&other, NULL, thread, NULL) == 0)
        pthread_join(other, NULL);
    pid_t child = fork();
    if (child == 0) {
        check_all();
        put(0, 2 * MIB);
        malloc_trim(0);
        check_all();
        _exit(0);
    }
    int status = 0;
    CHECK(child < 0 || (waitpid(child, &status, 0) == child && status == 0));
    check_all();
    for (int slot = 0; slot < SLOTS; slot++)
        free(memory[slot]);
    malloc_trim(0);
    CHECK(held() < 60 * MIB);
    int open = 0;
    for (int descriptor = 0; descriptor < 1024; descriptor++)
        open += fcntl(descriptor, F_GETFD) >= 0;
    printf("fine\nopen %d\n", open);
    return 0;
}
