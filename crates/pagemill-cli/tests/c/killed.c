/* Members of the process tree are killed at random times, also while they change the tree's shared page. The
 * other members continue. */
#include "check.h"
#include <signal.h>

static void churn(uint64_t seed, int forever) {
    enum { COUNT = 20 };
    void *memory[COUNT] = {0};
    for (int step = 0; forever || step < 400; step++) {
        int i = next_random(&seed) % COUNT;
        size_t size = (size_t)1 << (10 + next_random(&seed) % 13);
        free(memory[i]);
        memory[i] = malloc(size);
        if (memory[i])
            mark(memory[i], size, 1);
    }
    for (int i = 0; i < COUNT; i++)
        free(memory[i]);
}

int main(void) {
    alarm(500);
    uint64_t seed = 1;
    for (int round = 0; round < 60; round++) {
        pid_t children[4];
        for (int i = 0; i < 4; i++) {
            children[i] = fork();
            CHECK(children[i] >= 0);
            if (children[i] == 0)
                churn(round * 4 + i, 1);
        }
        usleep(1000 + next_random(&seed) % 15000);
        churn(round, 0);
        for (int i = 0; i < 4; i++) {
            kill(children[i], SIGKILL);
            CHECK(waitpid(children[i], NULL, 0) == children[i]);
        }
    }
    /* The memory of the killed processes can be allocated again. */
    for (int i = 0; i < 200; i++) {
        void *memory = malloc(MIB);
        if (!memory)
            dprintf(2, "refused after %d MiB\n", i);
        CHECK(memory);
        mark(memory, MIB, i);
    }
    return 0;
}
