/* phases THREADS MIB MS [PHASES]: the threads together allocate MIB in each phase, write, check and free
 * them. The size of the allocations changes with each phase, so freed memory of the previous phase does not
 * fit. Runs for MS and at least PHASES (1) phases. */
#include "check.h"
#include <time.h>

static size_t thread_bytes;
static size_t least = 1;
static double end_s;

static double now_s(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void *work(void *start) {
    static const size_t sizes[] = {100 * KIB, 300 * KIB, 8 * KIB, 700 * KIB, 1500 * KIB, 40 * KIB, 3 * MIB, 170 * KIB};
    size_t phase = (size_t)start, enough = phase + least;
    while (phase < enough || now_s() < end_s) {
        size_t size = sizes[phase++ % (sizeof sizes / sizeof *sizes)], count = thread_bytes / size;
        char **held = calloc(count + 1, sizeof *held);
        CHECK(held);
        for (size_t i = 0; i < count; i++) {
            held[i] = malloc(size);
            CHECK(held[i]);
            memset(held[i], (int)(i ^ phase), size);
        }
        for (size_t i = 0; i < count; i++) {
            CHECK(held[i][0] == (char)(i ^ phase) && held[i][size - 1] == (char)(i ^ phase));
            free(held[i]);
        }
        free(held);
    }
    return NULL;
}

int main(int argc, char **argv) {
    int count = atoi(argv[1]);
    thread_bytes = atoi(argv[2]) * MIB / count;
    end_s = now_s() + atoi(argv[3]) / 1000.0;
    if (argc > 4)
        least = atoi(argv[4]);
    pthread_t threads[64];
    CHECK(count <= 64);
    for (long i = 0; i < count; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    return 0;
}
