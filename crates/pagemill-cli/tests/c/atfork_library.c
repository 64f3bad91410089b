/* A library whose constructor registers fork handlers before it allocates anything.
 *
 * All three handlers allocate. After `atfork_start_threads`, the prepare handler also ends and joins the
 * threads that allocate. The other two handlers start threads again: the child's starts one thread and joins it
 * at once. */
#include "check.h"

static pthread_t threads[3];
static int is_over, is_joining;
static int ran[3];

static void *churn(void *seed) {
    uint64_t state = (uint64_t)seed + 1;
    size_t sizes[] = {24, 500, 9000, 60000, 65536, 200000, MIB, 3 * MIB};
    for (long step = 0; !__atomic_load_n(&is_over, __ATOMIC_RELAXED) || step < 50; step++) {
        size_t size = sizes[next_random(&state) % 8];
        char *memory = malloc(size);
        CHECK(memory);
        mark(memory, size, step);
        CHECK(is_marked(memory, size, size, step));
        free(memory);
    }
    return NULL;
}

void atfork_start_threads(void) {
    is_joining = 1;
    for (long i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)i) == 0);
}

void atfork_end_threads(void) {
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    __atomic_store_n(&is_over, 0, __ATOMIC_RELAXED);
}

/* Returns how often a handler ran: 0 the prepare handler, 1 the parent's, 2 the child's. */
int atfork_ran(int moment) {
    return ran[moment];
}

static void act(int moment) {
    ran[moment]++;
    size_t sizes[] = {40, 5000, 100000, 2 * MIB};
    for (int i = 0; i < 4; i++) {
        void *memory = calloc(1, sizes[i]);
        CHECK(memory && is_zero(memory, sizes[i]));
        mark(memory, sizes[i], moment);
        memory = realloc(memory, 2 * sizes[i]);
        CHECK(memory && is_marked(memory, sizes[i], 0, moment));
        free(memory);
    }
}

static void prepare(void) {
    act(0);
    if (is_joining)
        atfork_end_threads();
}

static void in_parent(void) {
    act(1);
    if (is_joining)
        atfork_start_threads();
}

static void in_child(void) {
    act(2);
    if (is_joining) {
        pthread_t thread;
        is_over = 1;
        CHECK(pthread_create(&thread, NULL, churn, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        is_joining = 0;
    }
}

__attribute__((constructor(101))) static void begin(void) {
    CHECK(pthread_atfork(prepare, in_parent, in_child) == 0);
}
