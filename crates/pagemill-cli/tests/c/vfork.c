/* Calls vfork and posix_spawn while other threads allocate. The child shares the parent's memory until it
 * execs. */
#include "check.h"
#include <spawn.h>

extern char **environ;
static volatile int is_over;

static void *churn(void *seed) {
    uint64_t state = (uint64_t)seed;
    while (!is_over) {
        size_t size = (size_t)1 << next_random(&state) % 22;
        void *memory = malloc(size);
        CHECK(memory);
        mark(memory, size, 1);
        free(memory);
    }
    return NULL;
}

int main(void) {
    alarm(500);
    pthread_t threads[3];
    for (long i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)i) == 0);
    char *held = malloc(MIB);
    mark(held, MIB, 9);
    for (int i = 0; i < 100; i++) {
        int status = -1;
        pid_t pid = vfork();
        if (pid == 0) {
            execlp("true", "true", NULL);
            _exit(97);
        }
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
        char *words[] = {"true", NULL};
        CHECK(posix_spawnp(&pid, "true", NULL, NULL, words, environ) == 0);
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
        CHECK(system("exit 3") == 3 << 8);
    }
    CHECK(is_marked(held, MIB, MIB, 9));
    is_over = 1;
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    return 0;
}
