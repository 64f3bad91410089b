/* Marks memory, some of which is purged because of a limit. Waits until standard input is closed. Then prints
 * the result of each unmark. */
#include "check.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>

static ssize_t (*vrange)(void *addr, size_t len, int mode, int behaviour, int *purged);

static char *map(size_t len) {
    char *addr = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(addr != MAP_FAILED);
    memset(addr, 7, len);
    return addr;
}

static char *allocate(size_t len) {
    char *addr = aligned_alloc(2 * MIB, len);
    CHECK(addr);
    memset(addr, 7, len);
    return addr;
}

static void mark_volatile(char *addr, size_t len, int behaviour) {
    CHECK(vrange(addr, len, 1, behaviour, NULL) == (ssize_t)len);
}

static int unmark(char *addr, size_t len) {
    int purged;
    CHECK(vrange(addr, len, 0, 0, &purged) == (ssize_t)len);
    return purged;
}

/* Without arguments: marks a range that is purged as a whole, one that may be purged in part, and one that
 * the limit does not cover. */
static void limited(void) {
    size_t len = 16 * MIB;
    char *old = allocate(len), *new = allocate(len), *foreign = map(len);
    mark_volatile(old, len, 0);
    /* The range that was marked first is purged first. The order is exact to some milliseconds, so the
     * program waits longer. */
    struct timespec moment = {0, 50000000};
    nanosleep(&moment, NULL);
    mark_volatile(new, len, 1);
    mark_volatile(foreign, len, 0);
    char *more = allocate(40 * MIB);
    printf("%d %zu %zu %zu\n", getpid(), (size_t)old, (size_t)new, (size_t)foreign);
    fflush(stdout);
    getchar();
    int gone = unmark(old, len);
    printf("%d %d %d\n", gone, unmark(new, len), unmark(foreign, len));
    free(more);
}

/* vranges COUNT: marks every other page of a mapping, COUNT pages in total. */
static void many(size_t count) {
    size_t page = sysconf(_SC_PAGESIZE);
    char *area = map(2 * count * page);
    for (size_t at = 0; at < count; at++)
        mark_volatile(area + 2 * at * page, page, 0);
    printf("%d %zu\n", getpid(), (size_t)area);
    fflush(stdout);
    getchar();
}

/* vranges child: marks memory, and forks a child, which marks a page and prints its address. */
static void child(void) {
    size_t page = sysconf(_SC_PAGESIZE);
    mark_volatile(map(MIB), MIB, 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char *own = map(page);
        mark_volatile(own, page, 0);
        printf("%d %zu\n", getpid(), (size_t)own);
        fflush(stdout);
        getchar();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv) {
    *(void **)&vrange = dlsym(RTLD_DEFAULT, "pagemill_vrange");
    CHECK(vrange);
    if (argc > 1 && strcmp(argv[1], "child") == 0)
        child();
    else if (argc > 1)
        many(strtoul(argv[1], NULL, 10));
    else
        limited();
    return 0;
}
