/* fork CHILDREN: forks while other threads allocate all the time. Every child allocates; some fork again or
 * exec. */
#include "check.h"

static volatile int is_over;

static void churn(uint64_t seed, long steps) {
    void *memory[50] = {0};
    size_t sizes[50] = {0};
    for (long step = 0; step < steps && !is_over; step++) {
        int i = next_random(&seed) % 50;
        CHECK(!memory[i] || is_marked(memory[i], sizes[i], sizes[i], i));
        free(memory[i]);
        size_t all[] = {16, 333, 4000, 30000, 65536, 150000, MIB, 3 * MIB};
        sizes[i] = all[next_random(&seed) % 8];
        memory[i] = step % 3 ? malloc(sizes[i]) : calloc(1, sizes[i]);
        CHECK(memory[i]);
        mark(memory[i], sizes[i], i);
    }
    for (int i = 0; i < 50; i++)
        free(memory[i]);
}

static void *forever(void *seed) {
    churn((uint64_t)seed, 1L << 60);
    return NULL;
}

static void *briefly(void *seed) {
    churn((uint64_t)seed, 100);
    return NULL;
}

static void child(int number, void *held) {
    alarm(400);
    CHECK(is_marked(held, 5 * MIB, 5 * MIB, 42));
    churn(number, 300);
    if (number % 3 == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, briefly, (void *)(long)number) == 0);
        pthread_join(thread, NULL);
    }
    if (number % 4 == 0) {
        pid_t grandchild = fork();
        if (grandchild == 0) {
            churn(number, 100);
            _exit(0);
        }
        int status;
        CHECK(waitpid(grandchild, &status, 0) == grandchild && status == 0);
    }
    /* The parent must not see what the child writes here. */
    mark(held, 5 * MIB, 43);
    free(held);
    if (number % 5 == 0)
        execlp("true", "true", NULL);
    exit(0);
}

int main(int argc, char **argv) {
    alarm(500);
    pthread_t threads[4];
    for (long i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, forever, (void *)i) == 0);
    void *held = malloc(5 * MIB);
    mark(held, 5 * MIB, 42);
    int count = atoi(argv[1]);
    for (int i = 0; i < count; i += 4) {
        pid_t children[4];
        for (int k = 0; k < 4; k++) {
            children[k] = fork();
            CHECK(children[k] >= 0);
            if (children[k] == 0)
                child(i + k, held);
        }
        for (int k = 0; k < 4; k++) {
            int status = -1;
            CHECK(waitpid(children[k], &status, 0) == children[k]);
            if (status != 0)
                dprintf(2, "child %d: status %x\n", i + k, status);
            CHECK(status == 0);
        }
    }
    CHECK(is_marked(held, 5 * MIB, 5 * MIB, 42));
    is_over = 1;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
