/* grow CASE: the program grows (Pagemill replaces the C library's malloc) in a difficult situation:
   handlers  the program's fork handlers, registered before it grows, allocate afterwards
   forks     one thread grows while others fork and register handlers; children allocate and end
   clearenv  the environment is cleared before it grows
   stack     the thread that grows has little more stack than the minimum
   keys      all thread keys are in use, so jemalloc cannot start, and the C library continues to serve */
#include "check.h"
#include <limits.h>

static void hold(size_t kib) {
    for (size_t at = 0; at < kib; at += 10) {
        char *piece = malloc(10 * KIB);
        CHECK(piece);
        memset(piece, 7, 10 * KIB);
    }
}

static void allocate(void) {
    /* These sizes are in no thread cache yet, neither of jemalloc nor of Pagemill. */
    for (size_t size = 1000; size < 200 * KIB; size += 3333) free(malloc(size));
}

static void end_well(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void fork_once(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        allocate();
        hold(12000);
        _exit(0);
    }
    end_well(child);
}

static void *forker(void *unused) {
    for (int i = 0; i < 20; i++) {
        pthread_atfork(allocate, allocate, allocate);
        fork_once();
    }
    return NULL;
}

static void *grower(void *unused) {
    hold(12000);
    return NULL;
}

int main(int argc, char **argv) {
    const char *what = argv[1];
    if (!strcmp(what, "handlers")) {
        CHECK(pthread_atfork(allocate, allocate, allocate) == 0);
        hold(12000);
        for (int i = 0; i < 5; i++) fork_once();
    } else if (!strcmp(what, "forks")) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, i < 3 ? forker : grower, NULL) == 0);
        for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    } else if (!strcmp(what, "clearenv")) {
        clearenv();
        hold(12000);
    } else if (!strcmp(what, "stack")) {
        pthread_attr_t attributes;
        pthread_t thread;
        pthread_attr_init(&attributes);
        /* The minimum is not enough for unoptimised builds, above all of jemalloc. */
        CHECK(pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN + 48 * KIB) == 0);
        CHECK(pthread_create(&thread, &attributes, grower, NULL) == 0);
        pthread_join(thread, NULL);
    } else if (!strcmp(what, "keys")) {
        pthread_key_t key;
        while (pthread_key_create(&key, NULL) == 0) {
        }
        hold(12000);
        allocate();
    } else {
        CHECK(!"a known case");
    }
    return 0;
}
