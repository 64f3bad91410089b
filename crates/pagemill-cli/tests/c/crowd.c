/* crowd COUNT: runs COUNT processes at once, more than the tree's shared page has entries for. Each of them
 * allocates successfully. */
#include "check.h"

int main(int argc, char **argv) {
    int count = atoi(argv[1]), gate[2], bad = 0;
    CHECK(pipe(gate) == 0);
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            char byte;
            close(gate[1]);
            void *memory = malloc(100 * KIB);
            CHECK(memory);
            mark(memory, 100 * KIB, i);
            CHECK(read(gate[0], &byte, 1) == 0);
            CHECK(is_marked(memory, 100 * KIB, 100 * KIB, i));
            free(memory);
            exit(0);
        }
    }
    close(gate[1]);
    for (int i = 0, status; i < count; i++)
        if (wait(&status) < 0 || status != 0)
            bad++;
    CHECK(bad == 0);
    return 0;
}
