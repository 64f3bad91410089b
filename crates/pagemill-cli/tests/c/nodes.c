/* nodes PAGEMILL: on each CPU in turn allocates 48 MiB in allocations of 256 KiB, which another CPU writes
 * first. So the pages are on the allocating CPU's node only if the allocator binds them. Then frees all memory, and
 * allocates again on each CPU from the last to the first.
 *
 * Prints for each CPU its node, and how many of the pages the kernel reports there: `cpu C node N pages P
 * here H`. At the end, runs `PAGEMILL meminfo --json` on this process. */
#include "check.h"
#include <sched.h>
#include <sys/syscall.h>

enum { PIECES = 192, PIECE_PAGES = 64, MOST_CPUS = 8 };

static char *held[MOST_CPUS][PIECES];
static int cpus;

/* Moves this thread to a CPU, and returns the CPU's node. */
static unsigned move_to(int cpu) {
    cpu_set_t only;
    unsigned cpu_now, node;
    CPU_ZERO(&only);
    CPU_SET(cpu, &only);
    CHECK(sched_setaffinity(0, sizeof only, &only) == 0);
    CHECK(syscall(SYS_getcpu, &cpu_now, &node, NULL) == 0 && (int)cpu_now == cpu);
    return node;
}

/* Returns how many pages of an allocation are on `node`. */
static int pages_on(char *piece, unsigned node) {
    void *pages[PIECE_PAGES];
    int nodes[PIECE_PAGES], here = 0;
    for (int i = 0; i < PIECE_PAGES; i++) pages[i] = (char *)((uintptr_t)piece & ~(uintptr_t)4095) + i * 4096;
    /* Without target nodes, move_pages only reports on which node each page is. */
    CHECK(syscall(SYS_move_pages, 0, (long)PIECE_PAGES, pages, NULL, nodes, 0) == 0);
    for (int i = 0; i < PIECE_PAGES; i++) here += nodes[i] == (int)node;
    return here;
}

static void ask_on(int cpu) {
    int here = 0;
    unsigned node = move_to(cpu);
    for (int i = 0; i < PIECES; i++) CHECK(held[cpu][i] = malloc(PIECE_PAGES * 4096));
    move_to((cpu + 1) % cpus);
    for (int i = 0; i < PIECES; i++) memset(held[cpu][i], cpu + 1, PIECE_PAGES * 4096);
    for (int i = 0; i < PIECES; i++) here += pages_on(held[cpu][i], node);
    printf("cpu %d node %u pages %d here %d\n", cpu, node, PIECES * PIECE_PAGES, here);
}

/* Runs `pagemill meminfo --json` on this process, and returns its status. */
static int look(const char *pagemill) {
    char self[16];
    int status;
    snprintf(self, sizeof self, "%d", getpid());
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        unsetenv("LD_PRELOAD");
        execl(pagemill, pagemill, "meminfo", "--json", self, NULL);
        CHECK(!"started");
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    CHECK((cpus = sysconf(_SC_NPROCESSORS_ONLN)) <= MOST_CPUS);
    for (int cpu = 0; cpu < cpus; cpu++) ask_on(cpu);
    for (int i = 0; i < cpus * PIECES; i++) free(held[i / PIECES][i % PIECES]);
    for (int cpu = cpus; cpu-- > 0;) ask_on(cpu);
    return look(argv[1]);
}
