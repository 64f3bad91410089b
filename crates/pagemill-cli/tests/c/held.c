/* held MIB KIB [free|exit|kill]: allocates MIB in allocations of KIB, prints how much is in huge pages, and
 * then frees all, ends by _exit, or kills itself. */
#include "check.h"
#include <signal.h>

int main(int argc, char **argv) {
    size_t all = atol(argv[1]) * MIB, piece = atol(argv[2]) * KIB, count = all / piece;
    char **memory = calloc(count, sizeof *memory);
    for (size_t i = 0; i < count; i++) {
        memory[i] = malloc(piece);
        CHECK(memory[i]);
        mark(memory[i], piece, i);
    }
    long huge_kib = 0, value;
    char line[512];
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "AnonHugePages: %ld", &value) == 1)
            huge_kib += value;
    if (file)
        fclose(file);
    printf("huge %ld KiB\n", huge_kib);
    for (size_t i = 0; i < count; i++) {
        CHECK(is_marked(memory[i], piece, piece, i));
        if (argc > 3 && !strcmp(argv[3], "free"))
            free(memory[i]);
    }
    fflush(stdout);
    if (argc > 3 && !strcmp(argv[3], "exit"))
        _exit(0);
    if (argc > 3 && !strcmp(argv[3], "kill"))
        kill(getpid(), SIGKILL);
    return 0;
}
