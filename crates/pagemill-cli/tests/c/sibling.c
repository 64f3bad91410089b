/* sibling FREED-MIB FREED-KIB WANTED-MIB WANTED-KIB [keep|calm]: the first child allocates FREED-MIB, frees
 * them, and stays idle. The second child then allocates WANTED-MIB, so the first must return its free
 * memory. With `calm`, the limit has room for both. With `keep`, the first child frees nothing, and is killed
 * before the second starts. */
#include "check.h"
#include <signal.h>

static long hold(size_t all, size_t piece, void ***held) {
    long count = all / piece;
    void **memory = calloc(count, sizeof *memory);
    CHECK(memory);
    for (long i = 0; i < count; i++) {
        /* The call is repeated: on a busy machine, the sibling may be late to return memory. */
        for (int tries = 0; !(memory[i] = malloc(piece)) && tries < 5000; tries++)
            usleep(100000);
        if (!memory[i])
            dprintf(2, "refused after %zu MiB of %zu\n", i * piece / MIB, all / MIB);
        CHECK(memory[i]);
        mark(memory[i], piece, i);
    }
    for (long i = 0; i < count; i++)
        CHECK(is_marked(memory[i], piece, piece, i));
    *held = memory;
    return count;
}

static size_t resident_of(pid_t pid) {
    char path[64];
    long all, pages = -1;
    snprintf(path, sizeof path, "/proc/%d/statm", pid);
    FILE *file = fopen(path, "r");
    CHECK(file && fscanf(file, "%ld %ld", &all, &pages) == 2);
    fclose(file);
    return (size_t)pages * 4096;
}

int main(int argc, char **argv) {
    int keeps = argc > 5 && !strcmp(argv[5], "keep"), is_calm = argc > 5 && !keeps, ready[2], status;
    char byte;
    CHECK(pipe(ready) == 0);
    pid_t idle = fork();
    if (idle == 0) {
        void **held;
        close(ready[0]);
        long count = hold(atol(argv[1]) * MIB, atol(argv[2]) * KIB, &held);
        for (long i = 0; i < count && !keeps; i++)
            free(held[i]);
        CHECK(write(ready[1], "r", 1) == 1);
        for (int second = 0; second < 1000; second++)
            sleep(1);
        _exit(0);
    }
    close(ready[1]);
    CHECK(read(ready[0], &byte, 1) == 1);
    size_t before = resident_of(idle);
    if (keeps) {
        kill(idle, SIGKILL);
        CHECK(waitpid(idle, &status, 0) == idle);
    }
    pid_t needy = fork();
    if (needy == 0) {
        void **held;
        hold(atol(argv[3]) * MIB, atol(argv[4]) * KIB, &held);
        exit(0);
    }
    CHECK(waitpid(needy, &status, 0) == needy);
    if (!keeps) {
        size_t after = resident_of(idle);
        fprintf(stderr, "idle sibling: %zu MiB before, %zu after\n", before / MIB, after / MIB);
        kill(idle, SIGKILL);
        waitpid(idle, NULL, 0);
        CHECK(is_calm || status != 0 || after + 50 * MIB < before);
    }
    CHECK(status == 0);
    return 0;
}
