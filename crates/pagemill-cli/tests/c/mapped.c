/* mapped MIB RUN: maps and writes MIB without malloc, and keeps it until the process RUN (0: the parent) has
 * sampled it. */
#include "check.h"
#include <sys/mman.h>

/* Returns the number of voluntary context switches of a process. `run` has one between two samples. */
static long sleeps(long pid) {
    char path[64], line[256];
    long count = -1;
    snprintf(path, sizeof path, "/proc/%ld/status", pid);
    FILE *file = fopen(path, "r");
    CHECK(file);
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "voluntary_ctxt_switches: %ld", &count) == 1)
            break;
    fclose(file);
    CHECK(count >= 0);
    return count;
}

int main(int argc, char **argv) {
    size_t len = atol(argv[1]) * MIB;
    long run = atol(argv[2]);
    if (run == 0)
        run = getppid();
    char *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memset(memory, 1, len);
    for (long before = sleeps(run); sleeps(run) < before + 40;) usleep(1000);
    return 0;
}
